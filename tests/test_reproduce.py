"""What a table of the paper needs, what it costs, and one that is made."""

import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_report import change_metrics, copy_run, ignore, section, tables_of
from tiny_run import tiny

from mwrobust import config, paper, reproduce, runs, train
from mwrobust.errors import UserError
from mwrobust.job import prepare, refuse_another_run
from mwrobust.outcomes import Outcomes
from mwrobust.runtime.signals import Stop

ROOT = pathlib.Path(__file__).parent.parent
POLICIES = ('greedy', 'round_robin', 'multiplicative_weights')
SINGLE = ('single pixel_linf', 'single dct_linf')
METHODS = (*POLICIES, *SINGLE)
NETWORKS = ('h=1', 'h=2 average', 'h=2 ensemble')


# ------------------------------------------------------------------- the plan


@pytest.mark.parametrize(
  ('table', 'methods', 'restarts', 'data'),
  [
    ('tradeoff', SINGLE, 1, 'cifar10'),
    ('cifar10', POLICIES, 1, 'cifar10'),
    ('mnist', (*POLICIES, *SINGLE), 1, 'mnist'),
    ('restarts', POLICIES, 20, 'mnist'),
    ('time', (*SINGLE, *POLICIES), 1, 'mnist'),
    ('convexity', POLICIES[2:], 1, 'mnist'),
  ],
)
def test_a_plan_has_each_method_with_each_seed(
  table, methods, restarts, data, tmp_path
):
  shared = tiny()
  before = shared.to_dict()
  plan = reproduce.TABLES[table]
  planned = reproduce.plan(plan, shared, [0, 7], tmp_path)
  assert [(run.method, run.config.seed, run.workdir) for run in planned] == [
    (method, seed, tmp_path / f'{method.replace(" ", "_")}-seed{seed}')
    for method in methods
    for seed in (0, 7)[: 1 if table == 'mnist' and method in SINGLE else 2]
  ]
  assert plan.restarts == restarts
  assert plan.config == f'{data}.py'
  for run in planned:
    name, _, threat = run.method.partition(' ')
    changed = {
      field
      for field, value in config.flatten(run.config).items()
      if value != config.flatten(shared)[field]
    }
    assert changed <= {'seed', 'policy.name', 'policy.threat', 'eval.others'}
    assert run.config.policy.name == name
    assert run.config.policy.threat == (threat or 'pixel_linf')
  planned[0].config.train.T = 99
  planned[0].config.model.options.hidden = 99
  assert planned[1].config.to_dict()['train'] == before['train']
  assert planned[1].config.to_dict()['model'] == before['model']
  assert shared.to_dict() == before


def test_the_tables_are_those_of_the_paper():
  for name, table in reproduce.TABLES.items():
    data = table.config.removesuffix('.py')
    assert (ROOT / 'configs' / table.config).exists()
    if name == 'time':
      assert set(table.methods) == set(paper.HOURS[data])
      continue
    figures = paper.ACCURACIES[data, table.restarts]
    shown = {(method, 'h=3 average') for method in table.methods}
    for method, others in table.methods.items():
      names = {'last': 'h=1', 'ensemble': 'h=3 ensemble'}
      shown |= {(method, names[kind]) for kind in others}
    columns = {column for column in figures if column[0] in table.methods}
    assert shown & columns
    # Convexity is about averages only.
    assert columns <= shown or name == 'convexity'
    for row in table.rows:
      assert all(row in figures[column] for column in columns)


@pytest.mark.parametrize('words', [[], [''], ['a'], ['0', '-1'], ['1.5']])
def test_bad_seeds_are_told(words):
  with pytest.raises(UserError, match=r'--seeds=.* must be numbers'):
    reproduce.parse_seeds(words)


def test_a_seed_counts_once(tmp_path):
  assert reproduce.parse_seeds(['2', '0', '2']) == [2, 0]
  with pytest.raises(UserError, match='seed = 4294967296 is not allowed'):
    reproduce.plan(reproduce.TABLES['mnist'], tiny(), [2**32], tmp_path)


def test_a_table_of_some_methods_keeps_their_order(tmp_path):
  table = reproduce.TABLES['mnist']
  some = reproduce.restrict(table, ['single dct_linf', 'greedy'])
  planned = reproduce.plan(some, tiny(), [0, 1], tmp_path)
  assert [(run.method, run.config.seed) for run in planned] == [
    *(('greedy', 0), ('greedy', 1)),
    ('single dct_linf', 0),
  ]
  assert reproduce.restrict(table, []) == table


def test_a_threat_that_is_not_there_is_told_before_anything_runs(tmp_path):
  pixels = tiny(**{'threats.spaces': ('pixel',)})
  with pytest.raises(UserError, match=r"policy.threat = 'dct_linf'"):
    reproduce.plan(reproduce.TABLES['time'], pixels, [0], tmp_path)


def test_a_table_of_averages_needs_more_than_one_step(tiny_run, tmp_path):
  run = copy_run(tiny_run, tmp_path / 'run', **{'train.h': 1})
  for path in (run / 'eval').glob('h=2*.npz'):
    path.unlink()
  table = reproduce.TABLES['convexity']

  def make():
    reproduce.plan(table, config.load(run), [0], tmp_path)
    reproduce.accuracy_section(table, [runs.load(run)])

  with pytest.raises(UserError, match=r'train\.h'):
    make()


def test_an_ensemble_of_all_is_in_its_table(tiny_run, tmp_path):
  run = copy_run(tiny_run, tmp_path / 'run', algorithm='ensemble')
  for path in (run / 'eval').glob('h=2_average*.npz'):
    path.unlink()
  path = run / 'eval' / 'h=2_ensemble.npz'
  path.rename(path.with_stem('h=3_ensemble'))
  loaded = runs.load(run)
  _, parts = reproduce.accuracy_section(reproduce.TABLES['mnist'], [loaded])
  (ours, *_) = tables_of('\n\n'.join(part.markdown for part in parts))
  assert loaded.output == 'h=3 ensemble'
  assert list(ours['min']) == ['accuracy, %', 'h=1', 'h=3 ensemble']


def test_a_run_of_another_config_is_told_before_anything_runs(
  tiny_run, tmp_path, monkeypatch
):
  """Not after days of training what comes before it."""
  planned = reproduce.plan(reproduce.TABLES['mnist'], tiny(), [0], tmp_path)
  copy_run(tiny_run, planned[-1].workdir, **{'train.T': 4})
  trained = []

  def train_and_evaluate(config, workdir, say):
    refuse_another_run(pathlib.Path(workdir), config)
    trained.append(workdir)
    shutil.copytree(tiny_run, workdir)

  monkeypatch.setattr(train, 'train_and_evaluate', train_and_evaluate)
  monkeypatch.setattr(reproduce, 'seconds_per_gradient', lambda config: 1.0)

  def make():
    reproduce.describe_plan(planned, 1)
    reproduce.run_missing(planned, 1, ignore)

  with pytest.raises(UserError, match='another config'):
    make()
  assert trained == []


# ------------------------------------------------------------------- the costs


def logged(workdir, kind):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [row for row in map(json.loads, lines) if row['kind'] == kind]


class NoCheckpoints:
  """Where nothing is saved."""

  def restore(self, like, say):
    del like, say

  def save(self, state):
    del state


def rehearse(config, workdir):
  """The real loop of training, with steps that do not compute anything."""
  job = prepare(config)

  def init():
    shapes = jax.eval_shape(job.init)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

  def train_step(state, index, batch):
    return state.replace(step=state.step + 1), jnp.float32(1)

  def validation_step(variables, index, batch, scale):
    return np.ones(len(batch.labels))

  train.train(
    job._replace(
      init=init, train_step=train_step, validation_step=validation_step
    ),
    workdir,
    NoCheckpoints(),
    Stop(),
    ignore,
  )
  return logged(workdir, 'outer')[-1]


@pytest.fixture(scope='module')
def rehearsed(tmp_path_factory):
  """The last row of metrics, by method; SLIDE takes more steps than PGD."""
  found = {}
  for method in ('single pixel_linf', 'single dct_l1', 'round_robin', 'greedy'):
    workdir = tmp_path_factory.mktemp('rehearsed')
    name, _, threat = method.partition(' ')
    changes = {'policy.name': name, 'policy.threat': threat or 'pixel_linf'}
    cost = {'train.pgd_steps': 3, 'train.slide_steps': 7}
    config = tiny(**changes, **cost)
    found[method] = config, rehearse(config, workdir), workdir
  return found


@pytest.mark.parametrize(
  'method', ['single pixel_linf', 'single dct_l1', 'round_robin']
)
def test_the_cost_of_training_is_what_training_counts(rehearsed, method):
  config, last, _ = rehearsed[method]
  training, _ = reproduce.gradient_evaluations(config, restarts=1)
  # For round robin too: 18 mini batches are three for each of six threats.
  assert training == last['gradient_evaluations']


def test_the_cost_of_greedy_has_a_validation_more(rehearsed):
  config, last, _ = rehearsed['greedy']
  training, _ = reproduce.gradient_evaluations(config, restarts=1)
  validation = 4 * 30 * (4 * 3 + 2 * 7)
  # All losses are alike here, and the first of them takes 3 steps.
  assert last['gradient_evaluations'] == validation + 18 * 20 * (3 + 1)
  mean = (4 * 3 + 2 * 7) / 6
  assert training == round(validation + 18 * 20 * (mean + 1))


def test_weights_of_round_robin_are_the_shares_it_trains(rehearsed):
  _, last, workdir = rehearsed['round_robin']
  rows = logged(workdir, 'train')
  for name, weight in last['weight'].items():
    assert sum(row['chosen'][name] for row in rows) == 3
    assert weight == pytest.approx(1 / 6)


def test_training_without_attacks_costs_no_attacks():
  natural = tiny(**{'policy.name': 'natural'})
  training, _ = reproduce.gradient_evaluations(natural, restarts=1)
  assert training == 18 * 20 + 3 * 30 * 12


def test_an_outer_step_may_be_a_part_of_an_epoch():
  half = tiny(**{'train.r': 0.5})
  job = prepare(half)
  assert (job.steps_per_epoch, job.steps_per_outer_step, job.steps) == (6, 3, 9)
  training, _ = reproduce.gradient_evaluations(half, restarts=1)
  assert training == 9 * 20 * (2 + 1) + 3 * 30 * 12
  least = tiny(**{'train.r': 0.01})  # A mini batch at least.
  assert prepare(least).steps_per_outer_step == 1


def test_the_cost_of_the_tiny_run(tiny_run):
  training, evaluation = reproduce.gradient_evaluations(tiny(), restarts=1)
  # All threats take two steps there, so it is known before who is chosen.
  assert training == logged(tiny_run, 'outer')[-1]['gradient_evaluations']
  full = {
    path.stem: Outcomes.load(path).gradient_evaluations()[1]
    for path in (tiny_run / 'eval').iterdir()
  }
  assert set(full) == {
    *('h=1', 'h=2_average', 'h=2_average_health', 'h=2_average_radii'),
    'h=2_ensemble',
  }
  # A gradient of an ensemble of two is one of each.
  networks = full['h=1'] + full['h=2_average'] + 2 * full['h=1']
  more = full['h=2_average_health'] + full['h=2_average_radii']
  assert evaluation == networks + more


def test_the_cost_of_the_paper():
  paper_mnist = config.preset('paper', 'mnist')
  training, evaluation = reproduce.gradient_evaluations(paper_mnist, 20)
  steps = 4 * 10 + 2 * 20
  assert (
    training
    == 60 * 54_000 * (steps // 6)
    + 60 * 54_000 * (steps % 6) / 6
    + 60 * 54_000
    + 20 * 6_000 * steps
  )
  eval_steps = 4 * 40 + 2 * 100
  more = 5 * 500 + 7 * 250  # Of the probes, and of the radii.
  assert evaluation == eval_steps * (5 * 20 * 10_000 + more)
  paper_mnist.train.h = 1
  paper_mnist.eval.health_examples = 0
  _, evaluation = reproduce.gradient_evaluations(paper_mnist, 1)
  assert evaluation == 10_000 * eval_steps


def test_the_cost_of_an_ensemble_of_all():
  """Of T networks, beside the last one."""
  changes = {'train.T': 5, 'eval.health_examples': 0}
  ensemble = tiny(algorithm='ensemble', **changes)
  _, evaluation = reproduce.gradient_evaluations(ensemble, restarts=1)
  assert evaluation == (1 + 5) * 30 * 12


def rows_of_plan(planned, restarts, monkeypatch):
  """By run: the status, and what is left in thousands of gradients."""
  monkeypatch.setattr(reproduce, 'seconds_per_gradient', lambda config: 3.6)
  text = reproduce.describe_plan(planned, restarts)
  (table,) = tables_of(text)
  return {
    pathlib.Path(name).name: (cells['status'], float(cells['hours left']))
    for name, cells in table.items()
  }


def left(gradients):
  return pytest.approx(gradients / 1000, abs=0.0051)


def test_what_is_left_is_what_is_not_done(tiny_run, tmp_path, monkeypatch):
  table = reproduce.TABLES['convexity']
  planned = reproduce.plan(table, tiny(), range(4), tmp_path)
  workdirs = [run.workdir for run in planned]
  for seed, workdir in enumerate(workdirs[1:], start=1):
    copy_run(tiny_run, workdir, seed=seed)
  # 0 is new, 1 is done. 2 was killed in training, 3 before its evaluation.
  shutil.rmtree(workdirs[2] / 'eval')
  lines = (workdirs[2] / 'metrics.jsonl').read_text().splitlines()
  (workdirs[2] / 'metrics.jsonl').write_text(f'{lines[0]}\n')
  done = json.loads(lines[0])['gradient_evaluations']
  shutil.rmtree(workdirs[3] / 'eval')
  training, evaluation = reproduce.gradient_evaluations(planned[0].config, 1)
  name = 'multiplicative_weights-seed'
  assert rows_of_plan(planned, 1, monkeypatch) == {
    f'{name}0': ('new', left(training + evaluation)),
    f'{name}1': ('done', 0),
    f'{name}2': ('begun', left(training + evaluation - done)),
    f'{name}3': ('begun', left(evaluation)),
  }
  # Twenty starts are another evaluation; the training serves both.
  _, restarts = reproduce.gradient_evaluations(planned[0].config, 20)
  found = rows_of_plan(planned[1:2], 20, monkeypatch)
  assert found == {f'{name}1': ('begun', left(restarts))}


@pytest.mark.parametrize('name', ['health', 'radii'])
def test_a_run_without_its_checks_is_not_done(
  name, tiny_run, tmp_path, monkeypatch
):
  table = reproduce.TABLES['convexity']
  planned = reproduce.plan(table, tiny(), [0], tmp_path)
  copy_run(tiny_run, planned[0].workdir)
  (planned[0].workdir / 'eval' / f'h=2_average_{name}.npz').unlink()
  ((status, _),) = rows_of_plan(planned, 1, monkeypatch).values()
  assert status == 'begun'


def test_an_evaluation_that_was_interrupted_needs_no_training(
  tiny_run, tmp_path, monkeypatch
):
  table = reproduce.TABLES['convexity']
  planned = reproduce.plan(table, tiny(), [0], tmp_path)
  copy_run(tiny_run, planned[0].workdir)
  for path in (planned[0].workdir / 'eval').glob('h=2*.npz'):
    path.unlink()  # That of h=1 is there.
  _, evaluation = reproduce.gradient_evaluations(planned[0].config, 1)
  ((status, hours),) = rows_of_plan(planned, 1, monkeypatch).values()
  assert status == 'begun'
  assert hours <= evaluation / 1000 + 0.0051


# --------------------------------------------------------------------- the time


def test_hours_are_compared_with_those_of_one_threat(tiny_run, tmp_path):
  table = reproduce.TABLES['time']
  seconds = {
    'single pixel_linf': (3600, 7200),
    'single dct_linf': (3000, 4200),
    'greedy': (5400, 5400),
    'round_robin': (9000, 7200),
    'multiplicative_weights': (7200, 6300),
  }
  found = []
  for run in reproduce.plan(table, tiny(), [0, 1], tmp_path):
    copy_run(
      tiny_run,
      run.workdir,
      **{
        'seed': run.config.seed,
        'policy.name': run.config.policy.name,
        'policy.threat': run.config.policy.threat,
      },
    )
    last = seconds[run.method][run.config.seed]

    def change(row, last=last):
      row['seconds'] = last * row['step'] / 18

    change_metrics(run.workdir, change)
    found.append(runs.load(run.workdir))
  heading, parts = reproduce.time_section(table, found)
  assert heading == 'Training time'
  (rows,) = tables_of(parts[0].markdown)
  titles = {
    'single pixel_linf': 'Single pixel_linf',
    'single dct_linf': 'Single dct_linf',
    'greedy': 'Greedy',
    'round_robin': 'Round robin',
    'multiplicative_weights': 'Mult. weights',
  }
  assert list(rows) == [titles[method] for method in table.methods]
  first = statistics.mean(seconds['single pixel_linf'])
  hours = paper.HOURS['mnist']
  for method, title in titles.items():
    ours = statistics.mean(seconds[method])
    assert list(rows[title].values())[1:] == [
      *(f'{ours / 3600:.3f}', f'{ours / first:.2f}'),
      f'{hours[method]:.2f}',
      f'{hours[method] / hours["single pixel_linf"]:.2f}',
    ]
  assert "NOT the paper's setting" in parts[1].markdown


# ------------------------------------------------------------ the command line


def run_reproduce(*words, cwd=ROOT):
  return subprocess.run(
    [sys.executable, '-m', 'mwrobust.reproduce', *map(str, words)],
    capture_output=True,
    text=True,
    cwd=cwd,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    check=False,
  )


@pytest.mark.parametrize(
  ('words', 'message'),
  [
    ([], '--table'),
    (['--table=mnist', '--seeds=0,x'], '--seeds=0,x must be numbers'),
    (['--table=mnist', '--methods=gredy'], "Did you mean 'greedy'?"),
  ],
)
def test_what_cannot_be_made_is_told(words, message):
  result = run_reproduce(*words)
  assert result.returncode == 1
  assert message in result.stdout + result.stderr
  assert 'Traceback' not in result.stderr


@pytest.fixture(scope='module')
def little(tmp_path_factory):
  """A config file of the tiny run."""
  path = tmp_path_factory.mktemp('config') / 'little.py'
  path.write_text(
    f"""
import sys
sys.path.insert(0, {str(ROOT / 'tests')!r})
from tiny_run import tiny
get_config = tiny
"""
  )
  return path


@pytest.fixture(scope='module')
def made(little, tiny_run, tmp_path_factory):
  """The table on MNIST, made where one of its runs was finished before."""
  folder = tmp_path_factory.mktemp('made')
  shutil.copytree(tiny_run, folder / 'little' / 'multiplicative_weights-seed0')
  words = f'--config={little}', f'--workdir={folder}'
  return folder / 'little', words, run_reproduce('--table=mnist', *words)


def test_a_dry_run_lists_and_writes_nothing(little, tmp_path):
  result = run_reproduce(
    *('--table=restarts', '--seeds=0,1', '--dry_run'),
    *(f'--config={little}', '--config.train.T=4'),
    cwd=tmp_path,
  )
  assert result.returncode == 0, result.stderr
  assert list(tmp_path.iterdir()) == []
  (table,) = tables_of(result.stdout)
  folder = pathlib.Path('runs/reproduce/little')
  assert list(table) == [
    str(folder / f'{policy}-seed{seed}')
    for policy in POLICIES
    for seed in (0, 1)
  ]
  steps = 6 * 2  # Of all threats.
  training = 4 * 120 * (2 + 1) + 4 * 30 * steps
  for name, cells in table.items():
    assert cells['status'] == 'new'
    # The average, the last, and here only an ensemble of two.
    networks = 4 if 'multiplicative' in name else 2
    # With one start, then with 20; 5 for the probes, 7 for the radii.
    evaluation = steps * ((1 + 20) * 30 * networks + 2 * (5 * 10 + 7 * 10))
    more = 30 * steps if 'greedy' in name else 0
    assert cells['training'] == f'{training + more:,}'
    assert cells['evaluation'] == f'{evaluation:,}'
  assert re.search(r'About .* left in all\.', result.stdout)


def test_only_what_is_missing_is_trained(made, tiny_run):
  results, _, result = made
  assert result.returncode == 0, result.stderr
  finished = results / 'multiplicative_weights-seed0'
  assert 'is trained already' not in result.stdout
  assert (finished / 'metrics.jsonl').read_bytes() == (
    tiny_run / 'metrics.jsonl'
  ).read_bytes()
  for method in METHODS:
    workdir = results / f'{method.replace(" ", "_")}-seed0'
    status = json.loads((workdir / 'status.json').read_text())
    assert status == {'status': 'done'}
    assert f'{workdir}\n' in result.stdout


def test_a_made_table_is_written_thrice(made):
  results, _, result = made
  assert {path.name for path in results.glob('mnist.*')} == {
    *('mnist.json', 'mnist.md', 'mnist.html')
  }
  markdown = (results / 'mnist.md').read_text()
  ours, beside = tables_of(section(markdown, 'Accuracy'))
  figures = json.loads((results / 'mnist.json').read_text())['runs']
  assert [(run['method'], run['seed']) for run in figures] == [
    (method, 0) for method in METHODS
  ]
  titles = (
    *('Greedy', 'Round robin', 'Mult. weights'),
    *('Single pixel_linf', 'Single dct_linf'),
  )
  for run, title in zip(figures, titles, strict=True):
    workdir = results / f'{run["method"].replace(" ", "_")}-seed0'
    assert run['preset'] == 'paper'
    assert run['config'] == json.loads((workdir / 'config.json').read_text())
    final = logged(workdir, 'outer')[-1]
    assert run['training'] == {
      field: final[field] for field in ('gradient_evaluations', 'seconds')
    }
    last, output, ensemble = NETWORKS
    shown = {output}
    if run['method'] in POLICIES:
      shown |= {last}
    if run['method'] == 'multiplicative_weights':
      shown |= {ensemble}
    assert set(run['accuracies']) == shown
    for network, accuracies in run['accuracies'].items():
      with np.load(
        workdir / 'eval' / f'{network.replace(" ", "_")}.npz'
      ) as arrays:
        correct = arrays['correct']
      assert accuracies['union'] == pytest.approx(100 * correct.all(0).mean())
      assert accuracies['min'] == pytest.approx(100 * correct.mean(1).min())
      assert (accuracies['images'], accuracies['starts']) == (30, 1)
      for row, cells in ours.items():
        value = cells[f'{title} {network}'].partition(' ')[0]
        assert value == f'{accuracies[row]:.2f}'
    with np.load(
      workdir / 'eval' / f'{output.replace(" ", "_")}_health.npz'
    ) as arrays:
      stands = arrays['correct'].all(axis=0)
    left = run['unions'][output]['all of these']
    assert left == pytest.approx(100 * stands.mean())
    if run['method'] in POLICIES:
      cell = beside['union'][f'{title} h=1 (paper)']
      theirs = paper.ACCURACIES['mnist', 1][run['method'], 'h=1']['union']
      assert f'({theirs.mean:.2f} ± {theirs.std:.2f})' in cell
  for words in ('preset paper', "NOT the paper's setting", '## Cost'):
    assert words in markdown
    assert words in result.stdout
  assert str(results / 'mnist.html') in result.stdout
  page = (results / 'mnist.html').read_text()
  assert page.startswith('<!doctype html>')


def test_the_cost_of_a_made_table_was_known_before(made):
  results, _, _ = made
  for policy in POLICIES:
    shared = tiny(**{'policy.name': policy})
    training, _ = reproduce.gradient_evaluations(shared, restarts=1)
    last = logged(results / f'{policy}-seed0', 'outer')[-1]
    assert training == last['gradient_evaluations']


def test_restarts_only_evaluate_again(made, tiny_run):
  results, words, _ = made
  before = {
    path: path.read_bytes()
    for path in results.rglob('*')
    if path.name == 'metrics.jsonl' or path.suffix in ('.npz', '.md')
  }
  output = results / 'elsewhere' / 'appendix'
  result = run_reproduce('--table=restarts', *words, f'--output={output}')
  assert result.returncode == 0, result.stderr
  assert 'outer step' not in result.stderr
  for path, content in before.items():
    assert path.read_bytes() == content, path
  markdown = (results / 'elsewhere' / 'appendix.md').read_text()
  assert '20 starts' in markdown
  figures = json.loads((results / 'elsewhere' / 'appendix.json').read_text())[
    'runs'
  ]
  for run in figures:
    for network, accuracies in run['accuracies'].items():
      assert accuracies['starts'] == 20
      stem = f'{results}/{run["method"]}-seed0/eval/{network.replace(" ", "_")}'
      many = Outcomes.load(f'{stem}-restarts=20.npz')
      one = Outcomes.load(f'{stem}.npz')
      np.testing.assert_array_equal(many.correct_after(1), one.correct)
      assert accuracies['union'] == pytest.approx(100 * many.union.mean())
  # The paper has figures for these, of other radii than for one start.
  _, beside = tables_of(section(markdown, 'Accuracy'))
  assert '(3.37 ± 3.10)' in beside['union']['Greedy h=1 (paper)']
