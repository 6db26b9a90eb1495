"""Runs the main job as a user does, kills, interrupts and restarts it."""

import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import types

import flax.linen as nn
import jax
import numpy as np
import pytest
from absl import flags
from tiny_run import tiny

from mwrobust import command_line, export, main, networks, reporting
from mwrobust import data as data_lib
from mwrobust.errors import UserError
from mwrobust.evaluation import Outcomes
from mwrobust.reporting.runs import own_threats
from mwrobust.runtime import files
from mwrobust.training import checkpoints, setup
from mwrobust.training import evaluation as run_evaluation
from mwrobust.training import loop as train

ROOT = pathlib.Path(__file__).parent.parent
STEPS = 18
SIX = ('pixel_linf', 'pixel_l2', 'pixel_l1', 'dct_linf', 'dct_l2', 'dct_l1')
TWO = {'threats.only': ('pixel_linf', 'dct_l1')}  # Faster to compile.
ONE_NETWORK = {'eval.others': ()}  # Evaluates only the output.


def rows_of(workdir, kind):
  lines = pathlib.Path(workdir, 'metrics.jsonl').read_text().splitlines()
  return [row for row in map(json.loads, lines) if row['kind'] == kind]


def status_of(workdir):
  return json.loads(pathlib.Path(workdir, 'status.json').read_text())


def evaluations_of(workdir):
  paths = pathlib.Path(workdir, 'eval').glob('*/outcomes.npz')
  return [Outcomes.load(path) for path in paths]


def results_of(workdir):
  """Returns the bytes of all training and evaluation results."""
  paths = sorted(workdir.glob('eval/*/*'))
  return {
    path: path.read_bytes() for path in [*paths, workdir / 'metrics.jsonl']
  }


@functools.cache
def job():
  return setup.prepare(tiny())


def final_state(workdir, of=job):
  (state,) = checkpoints.last(pathlib.Path(workdir), 1, of().init())
  return state


def assert_same_state(workdir, expected, of=job):
  found = jax.tree.leaves(final_state(workdir, of))
  for ours, theirs in zip(
    found, jax.tree.leaves(final_state(expected, of)), strict=True
  ):
    assert (np.asarray(ours) == np.asarray(theirs)).all()


# A child process that runs the tiny job and is killed, or asked to stop, at a
# given point.
CHILD = """
import json, os, pathlib, signal, sys, threading
sys.path.insert(0, sys.argv[1])
point, where, workdir = sys.argv[2], int(sys.argv[3]), sys.argv[4]
changes = json.loads(sys.argv[5])

import tests.conftest
from mwrobust import command_line, main
from mwrobust.training import loop as train
from mwrobust.evaluation import survivors
from tests.tiny_run import tiny

def send(number):
  os.kill(os.getpid(), number)

if point in ('train', 'stop', 'ctrl-c'):
  number = {'train': 9, 'stop': 15, 'ctrl-c': 2}[point]
  trained = train._Log.trained
  def dying(self, *args):
    trained(self, *args)
    if self.step == where:
      send(number)
  train._Log.trained = dying
elif point in ('validate', 'stop-validate'):
  validate = train.validate
  def dying(job, state, pause):
    calls.append(None)
    def pause_and_die():
      pause()
      if len(calls) == where:
        send(9 if point == 'validate' else 15)
    return validate(job, state, pause_and_die)
  calls = []
  train.validate = dying
elif point in ('evaluate', 'stop-evaluate'):
  survivors.SECONDS_BETWEEN_SAVES = -1
  record = survivors._record
  def dying(*args):
    record(*args)
    calls.append(None)
    if len(calls) == where:
      send(9 if point == 'evaluate' else 15)
  calls = []
  survivors._record = dying
elif point == 'before-save':
  train.Checkpoints.save = lambda *args: send(9)
elif point == 'save':
  def watch():
    folder = pathlib.Path(workdir, 'checkpoints')
    while True:
      if folder.is_dir() and any('tmp' in name for name in os.listdir(folder)):
        send(9)
  threading.Thread(target=watch, daemon=True).start()
elif point == 'disk':
  import resource
  resource.setrlimit(resource.RLIMIT_FSIZE, (where, where))
  signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

sys.argv = ['main', '--workdir=' + workdir]
main._CONFIG = type('Flag', (), {'value': tiny(**changes)})
command_line.run(main.main, main.default_config)
"""


def cache_of(point):
  # A process that dies while it fills JAX's cache leaves half an entry there.
  kind = 'disk' if point == 'disk' else 'children'
  return f'{os.environ["JAX_COMPILATION_CACHE_DIR"]}-{kind}'


def run_child(point, where, workdir, **changes):
  arguments = [point, str(where), str(workdir), json.dumps(changes)]
  return subprocess.run(
    [sys.executable, '-c', CHILD, ROOT, *arguments],
    capture_output=True,
    text=True,
    cwd=ROOT,
    timeout=900,
    check=False,
    env=os.environ | {'JAX_COMPILATION_CACHE_DIR': cache_of(point)},
  )


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('run') / 'undisturbed'
  result = run_child('none', 0, workdir)
  assert result.returncode == 0, result.stderr
  # This process need not compile the same again; each entry appears at once.
  cache = pathlib.Path(os.environ['JAX_COMPILATION_CACHE_DIR'])
  cache.mkdir(parents=True, exist_ok=True)
  for entry in pathlib.Path(cache_of('none')).iterdir():
    shutil.copy(entry, part := cache.with_name(f'{cache.name}-part'))
    part.replace(cache / entry.name)
  return workdir, result


def test_the_main_job_ends_with_a_summary_and_leaves_its_results(undisturbed):
  workdir, result = undisturbed
  # A summary of at most six lines within 80 columns, then the paths.
  *said, html, markdown = result.stdout.splitlines()
  assert [html, markdown] == [
    str(workdir / name) for name in ('report.html', 'report.md')
  ]
  assert (workdir / 'report.html').exists()
  last = max(i for i, line in enumerate(said) if line.startswith('Evaluating'))
  assert 1 <= len(said[last + 1 :]) <= 6
  assert max(map(len, said[last + 1 :])) <= 80
  (output,) = (
    outcomes
    for outcomes in evaluations_of(workdir)
    if outcomes.settings['is_output']
  )
  assert f'{output.accuracies()["union"]:.1f} %' in result.stdout
  report = (workdir / 'report.md').read_text()
  for word in (*SIX, 'min', 'union', 'natural', 'h=1', 'h=2 average'):
    assert f' {word} ' in report
  evaluated = {
    tuple(outcomes.settings[field] for field in ('network', 'protocol'))
    for outcomes in evaluations_of(workdir)
  }
  assert evaluated == {
    (network, 'paper') for network in ('h=1', 'h=2 average', 'h=2 ensemble')
  }
  assert 'step 18/18  100%' in result.stderr
  for row in rows_of(workdir, 'outer'):
    accuracies = row['validation_accuracy']
    worst = min(accuracies, key=accuracies.get)
    assert (
      f'outer step {row["outer_step"]}/3: natural '
      f'{100 * row["natural_accuracy"]:.1f} %, worst {worst} '
      f'{100 * accuracies[worst]:.1f} % (weight {row["weight"][worst]:.2f})'
    ) in result.stderr
  assert '\r' not in result.stderr  # Plain lines in a log file.
  assert 'Traceback' not in result.stderr
  assert status_of(workdir) == {'status': 'done'}
  config = json.loads((workdir / 'config.json').read_text())
  assert config['train']['batch_size'] == 20
  assert len(os.listdir(workdir / 'checkpoints')) == 2  # h of T
  assert sorted(os.listdir(workdir)) == [
    *('checkpoints', 'config.json', 'eval', 'metrics.jsonl', 'report.html'),
    *('report.md', 'status.json', 'tensorboard'),
  ]


def test_metrics_tell_what_was_trained_and_what_it_cost(undisturbed):
  workdir, _ = undisturbed
  trained, outer = rows_of(workdir, 'train'), rows_of(workdir, 'outer')
  # Every 4 steps, and at the end of each outer step of 6.
  assert [row['step'] for row in trained] == [4, 6, 8, 12, 16, 18]
  assert [row['step'] for row in outer] == [6, 12, 18]
  chosen = sum(sum(row['chosen'].values()) for row in trained)
  assert chosen == STEPS
  for row in outer:
    assert set(row['validation_loss']) == set(row['weight']) == set(SIX)
    assert sum(row['weight'].values()) == pytest.approx(1, rel=1e-5)
  # Three gradients per step (two for the attack), twelve per validation image.
  validations = 3 * 30 * 12
  assert outer[-1]['gradient_evaluations'] == 3 * 20 * STEPS + validations
  # The weights are those of the paper's update.
  log_weights = np.zeros(6)
  for row in outer:
    log_weights += 0.1 * np.array([row['validation_loss'][n] for n in SIX])
    expected = np.exp(log_weights) / np.exp(log_weights).sum()
    np.testing.assert_allclose([row['weight'][n] for n in SIX], expected, 1e-4)
  # The radii grow over the first half of training.
  assert [row['radius_scale'] for row in outer] == pytest.approx([6 / 9, 1, 1])


def test_a_finished_run_is_not_run_again(undisturbed):
  workdir, _ = undisturbed
  before = results_of(workdir)
  result = run_child('none', 0, workdir)
  assert result.returncode == 0
  assert '%' not in result.stderr
  assert results_of(workdir) == before


def test_killed_again_and_again_it_ends_with_the_same_parameters(
  undisturbed, tmp_path
):
  expected, _ = undisturbed
  workdir = tmp_path / 'killed'
  for point, where in (
    ('train', 3),
    ('validate', 1),
    ('save', 0),
    ('train', 8),
    ('stop-validate', 1),
    ('before-save', 0),
    ('save', 0),
    ('train', 17),
  ):
    result = run_child(point, where, workdir)
    code = 143 if point == 'stop-validate' else -signal.SIGKILL
    assert result.returncode == code, (point, result.stderr)
  result = run_child('none', 0, workdir, **ONE_NETWORK)
  assert result.returncode == 0, result.stderr
  assert_same_state(workdir, expected)
  # None of them compiled the train step again.
  entries = [
    name
    for name in os.listdir(cache_of('none'))
    if name.startswith('jit_train_step') and name.endswith('-cache')
  ]
  assert len(entries) == 1
  for kind in ('train', 'outer'):
    ours, theirs = rows_of(workdir, kind), rows_of(expected, kind)
    timing = ('seconds', 'images_per_second')
    for row in (*ours, *theirs):
      for field in timing:
        row.pop(field, None)
    assert ours == theirs


@pytest.mark.parametrize(('point', 'code'), [('stop', 143), ('ctrl-c', 130)])
def test_a_signal_saves_and_says_how_to_go_on(
  point, code, undisturbed, tmp_path
):
  expected, _ = undisturbed
  workdir = tmp_path / 'interrupted'
  result = run_child(point, 9, workdir)
  assert result.returncode == code, result.stderr
  assert 'Run the same command again to resume' in result.stdout
  assert 'Traceback' not in result.stderr
  assert status_of(workdir) == {'status': 'interrupted'}
  result = run_child('none', 0, workdir, **ONE_NETWORK)
  assert 'Resuming from step 9 of 18' in result.stdout
  assert result.returncode == 0, result.stderr
  assert sorted(os.listdir(workdir)) == sorted(os.listdir(expected))
  assert_same_state(workdir, expected)


def test_an_evaluation_goes_on_from_the_batch_it_was_killed_in(
  undisturbed, tmp_path
):
  expected, _ = undisturbed
  workdir = tmp_path / 'run'
  shutil.copytree(expected, workdir)
  shutil.rmtree(workdir / 'eval')
  # Each network has a batch for each of five threats, as dct_l2 is pixel_l2:
  # in the first network, in the second, in the third.
  for point, where in (('evaluate', 3), ('stop-evaluate', 5), ('evaluate', 6)):
    result = run_child(point, where, workdir)
    code = 143 if point == 'stop-evaluate' else -signal.SIGKILL
    assert result.returncode == code, result.stderr
  begun = [o.settings['network'] for o in evaluations_of(workdir)]
  assert sorted(begun) == ['h=1', 'h=2 average', 'h=2 ensemble']
  result = run_child('none', 0, workdir)
  assert result.returncode == 0, result.stderr

  def files_of(run):
    return {
      str(path.relative_to(run)): path.read_bytes()
      for path in (run / 'eval').glob('**/*')
      if path.is_file()
    }

  assert files_of(workdir) == files_of(expected)


def test_a_disk_that_fills_up_is_told_and_costs_nothing(undisturbed, tmp_path):
  expected, _ = undisturbed
  workdir = tmp_path / 'full'
  assert run_child('train', 8, workdir).returncode == -signal.SIGKILL
  # All but one of the programs have been compiled.
  shutil.copytree(cache_of('none'), cache_of('disk'))
  for entry in pathlib.Path(cache_of('disk')).glob('jit_natural_step*'):
    entry.unlink()
  result = run_child('disk', 6000, workdir)
  assert result.returncode == 1, result.stderr
  assert 'mwrobust: Cannot' in result.stderr
  assert result.stderr.splitlines()[-1].startswith('mwrobust: Cannot')
  assert 'Traceback' not in result.stderr
  assert run_child('none', 0, workdir, **ONE_NETWORK).returncode == 0
  assert_same_state(workdir, expected)


# ------------------------------------------------------ in this process


def run(config, workdir):
  told = []
  evaluations = train.train_and_evaluate(config, str(workdir), told.append)
  return evaluations, told


def test_another_config_is_refused_with_the_differing_fields(undisturbed):
  workdir, _ = undisturbed
  before = (workdir / 'config.json').read_bytes()
  with pytest.raises(UserError) as error:
    run(tiny(**{'train.h': 1, 'seed': 3}), workdir)
  assert 'seed: 0 there, 3 here' in str(error.value)
  assert 'train.h: 2 there, 1 here' in str(error.value)
  assert 'another --workdir' in str(error.value)
  assert (workdir / 'config.json').read_bytes() == before


def test_evaluation_may_be_changed_later_and_keeps_the_old_one(
  undisturbed, tmp_path
):
  workdir = tmp_path / 'run'
  shutil.copytree(undisturbed[0], workdir)
  before = set(os.listdir(workdir / 'eval'))
  evaluations, _ = run(tiny(**{'eval.examples': 10}), workdir)
  assert evaluations['h=1']['paper'].correct.shape == (6, 10)
  assert before < set(os.listdir(workdir / 'eval'))
  counts = [len(outcomes.labels) for outcomes in evaluations_of(workdir)]
  assert sorted(counts) == [10] * 3 + [30] * 3


def test_choices_can_be_made_on_validation_images(undisturbed, tmp_path):
  """Evaluates validation images, also more than training used."""
  workdir = tmp_path / 'run'
  shutil.copytree(undisturbed[0], workdir)
  fields = {'eval.split': 'validation', 'eval.examples': 35, 'eval.others': ()}
  found = run_evaluation.evaluate_run(tiny(**fields), str(workdir), print)
  outcomes = found['h=2 average']['paper']
  whole = data_lib.load('mnist5k', seed=0).validation
  np.testing.assert_array_equal(outcomes.labels, whole.labels[:35])
  assert outcomes.settings['split'] == 'validation'
  (first,) = reporting.load(workdir, 'validation').evaluations.values()
  assert len(first['paper'].labels) == 35
  # Earlier reports stay as they were.
  assert {
    len(outcomes.labels)
    for by_protocol in reporting.load(workdir).evaluations.values()
    for outcomes in by_protocol.values()
  } == {30}
  said = []
  reporting.write_run(
    reporting.load(workdir, 'validation'), tmp_path / 'page', said.append
  )
  assert '35 validation images' in said[0]
  page = (tmp_path / 'page' / 'report.md').read_text()
  assert 'test images' not in page


def test_a_run_meets_threats_that_it_was_not_trained_with(
  undisturbed, tmp_path
):
  workdir = tmp_path / 'run'
  shutil.copytree(undisturbed[0], workdir)
  config = tiny(
    **{
      'eval.protocols': ('paper', 'fast'),
      'eval.others': (),
      'eval.curve_examples': 5,
    }
  )
  config.threats = {'only': ()}
  for norm, eps in (('linf', 0.07), ('l1', 1.0)):
    config.threats[f'mine_{norm}'] = {
      'space': 'haar',
      'norm': norm,
      'eps': eps,
      'clip': 'inside',
      'attack': {},
    }
  evaluations = run_evaluation.evaluate_run(config, str(workdir), print)
  (of_output,) = evaluations.values()
  assert list(of_output) == ['paper', 'fast']
  assert of_output['fast'].threats == ('mine_linf', 'mine_l1')
  assert of_output['fast'].eps[0] == 0.07
  curves = [o for o in evaluations_of(workdir) if len(o.settings['radii']) > 1]
  assert [len(curve.labels) for curve in curves] == [5]
  with pytest.raises(UserError, match='seed: 0 there, 1 here'):
    run_evaluation.evaluate_run(tiny(seed=1), str(workdir), print)
  # The last screen is about what was asked for, the page about the training.
  said = []
  reporting.write_run(
    reporting.load(workdir),
    tmp_path / 'page',
    said.append,
    own_threats(config),
  )
  assert 'Worst threat (fast): mine_' in said[0]


def test_a_single_run_need_not_meet_its_own_threat(tmp_path):
  fields = {'method': 'single', 'train.T': 1, 'train.h': 1}
  config = tiny(**fields, **{'policy.threat': 'pixel_linf'})
  train.train_and_evaluate(config, str(tmp_path), print)
  config.threats.only = ('dct_l1',)
  evaluations = run_evaluation.evaluate_run(config, str(tmp_path), print)
  (of_output,) = evaluations.values()
  assert of_output['paper'].threats == ('dct_l1',)


def test_the_networks_of_a_run(undisturbed):
  workdir, _ = undisturbed
  last, average, ensemble = run_evaluation.networks(
    job(), workdir, lambda: None, print
  )
  older, newer = (
    state.params for state in checkpoints.last(workdir, 2, job().init())
  )
  assert [n.name for n in (last, average, ensemble)] == [
    *('h=1', 'h=2 average', 'h=2 ensemble')
  ]
  assert [n.outer_steps for n in (last, average)] == [(3,), (2, 3)]
  assert [n.is_output for n in (last, average, ensemble)] == [0, 1, 0]
  equal = functools.partial(jax.tree.map, np.testing.assert_array_equal)
  equal(last.members[0]['params'], newer)
  equal([member['params'] for member in ensemble.members], [older, newer])
  for found, a, b in zip(
    *map(jax.tree.leaves, (average.members[0]['params'], older, newer)),
    strict=True,
  ):
    assert (a != b).any()
    np.testing.assert_allclose(found, (a + b) / 2, rtol=1e-6)


def test_a_damaged_evaluation_is_named_and_kept(undisturbed, tmp_path):
  workdir = tmp_path / 'run'
  shutil.copytree(undisturbed[0], workdir)
  damaged = next((workdir / 'eval').glob('*/outcomes.npz'))
  os.truncate(damaged, 40)
  with pytest.raises(UserError, match=str(damaged)):
    run(tiny(), workdir)
  assert damaged.stat().st_size == 40


@pytest.mark.parametrize(
  ('policy', 'changes'),
  [
    ('greedy', {}),
    ('round_robin', {}),
    ('single', {'policy.threat': 'dct_l2'}),
    ('uniform', {}),
    ('natural', {}),
    ('e_at', {}),
    ('ucb', {}),
    ('max', {'threats.only': ('pixel_linf', 'dct_l1')}),
    ('avg', {'threats.only': ('pixel_linf', 'dct_l1')}),
    ('msd', {'threats.only': ('pixel_linf', 'dct_l1')}),
  ],
)
def test_every_method_trains(policy, changes, tmp_path):
  one = {'train.T': 2, 'train.h': 1, 'eval.others': ()}
  config = tiny(**{'method': policy} | one | changes)
  evaluations, _ = run(config, tmp_path / policy)
  accuracies = evaluations['h=1']['paper'].accuracies()
  assert accuracies['union'] <= accuracies['min'] <= accuracies['pixel_linf']
  if policy in ('max', 'avg', 'msd'):
    cost = rows_of(tmp_path / policy, 'outer')[-1]['gradient_evaluations']
    validation = 2 * 30 * 2 * 2  # Twice 30 images under two threats, two steps.
    per_image = {
      'max': 2 * 2 + 2 / 3 + 1,
      'avg': 2 * 2 + 2,
      'msd': 2 * (1 + 2 / 3) + 1,
    }[policy]
    assert cost == pytest.approx(12 * 20 * per_image + validation, abs=1)
  has_game = policy not in ('natural', 'max', 'msd')
  for row in rows_of(tmp_path / policy, 'outer'):
    assert ('game' in row) == ('played' in row) == has_game
  if policy in ('max', 'avg', 'msd'):
    return
  chosen = [
    sum(row['chosen'][name] for row in rows_of(tmp_path / policy, 'train'))
    for name in SIX
  ]
  if policy in ('e_at', 'ucb'):
    assert sum(chosen) == 12
    assert min(chosen) > 0 or policy == 'e_at'
    return
  if policy == 'round_robin':
    assert chosen == [2] * 6
  elif policy == 'single':
    assert chosen == [0, 0, 0, 0, 12, 0]
  elif policy == 'natural':
    assert chosen == [0] * 6
  elif policy == 'greedy':
    # One threat an outer step; the second by the validation before it.
    assert sorted(chosen)[:4] == [0] * 4
    losses = rows_of(tmp_path / policy, 'outer')[0]['validation_loss']
    worst = SIX.index(max(losses, key=losses.get))
    assert chosen[worst] in (6, 12)
    # Two validations after an outer step, and one before the first.
    cost = rows_of(tmp_path / policy, 'outer')[-1]['gradient_evaluations']
    assert cost == 3 * 20 * 12 + 3 * 30 * 12


def test_training_makes_a_network_robust(tmp_path):
  unions = {}
  for method in ('natural', 'multiplicative_weights'):
    config = tiny(
      **{
        'method': method,
        'threats.only': ('pixel_linf', 'dct_l2'),
        'threats.pixel_linf.eps': 0.1,
        'data.train_examples': 2000,
        'model.options.features': (4, 8),
        'model.options.hidden': 32,
        'optimizer.learning_rate': 1e-2,
        'train.batch_size': 50,
        'train.r': 2,
        'train.log_every': 1000,
        'attack.steps': 4,
        'eval.examples': 200,
        'eval.batch_size': 200,
        'eval.others': (),
      }
    )
    evaluations, _ = run(config, tmp_path / method)
    unions[method] = evaluations['h=2 average']['paper'].accuracies()['union']
  # Natural training leaves almost no robustness.
  assert unions['multiplicative_weights'] > unions['natural'] + 40, unions


def test_validation_sees_the_radii_that_training_sees(tmp_path, monkeypatch):
  scales = []
  prepare = setup.prepare

  def recording(config):
    prepared = prepare(config)

    def validation_step(variables, index, batch, scale):
      scales.append(float(scale))
      return prepared.validation_step(variables, index, batch, scale)

    return prepared._replace(validation_step=validation_step)

  monkeypatch.setattr(setup, 'prepare', recording)
  run(tiny(**ONE_NETWORK), tmp_path / 'ramp')
  # Six threats on two batches.
  assert scales == pytest.approx([6 / 9] * 12 + [1] * 24)


def test_a_budget_decides_how_long_training_is(tmp_path):
  # An outer step validates 30 images under two threats with two steps, and each
  # of its mini batches takes 20 x 3 gradients.
  budget = 3 * (30 * 4 + 4 * 60)
  config = tiny(**{'train.budget': budget}, **TWO, **ONE_NETWORK)
  run(config, tmp_path / 'budget')
  rows = rows_of(tmp_path / 'budget', 'outer')
  assert [row['step'] for row in rows] == [4, 8, 12]
  assert rows[-1]['gradient_evaluations'] == budget
  with pytest.raises(UserError, match=r'train\.budget = 500 is too small'):
    run(tiny(**{'train.budget': 500}, **TWO), tmp_path / 'small')


def test_a_run_with_a_budget_resumes_in_the_middle_to_the_bit(tmp_path):
  """Checks the progress, whose length depends on the choices so far."""
  changes = {
    'method': 'e_at',
    **TWO,
    **ONE_NETWORK,
    'threats.dct_l1.attack': {'steps': 7},
    'train.budget': 4500,
    'train.log_every': 1,
    'optimizer.schedule': 'one_cycle',
    'train.ramp': 0.75,
  }
  assert run_child('none', 0, tmp_path / 'whole', **changes).returncode == 0
  ends = [row['step'] for row in rows_of(tmp_path / 'whole', 'outer')]
  workdir = tmp_path / 'killed'
  for point, where, code in (
    ('train', ends[0] + 2, -signal.SIGKILL),
    ('stop', ends[0] + 3, 143),
    ('train', ends[1] + 2, -signal.SIGKILL),
  ):
    result = run_child(point, where, workdir, **changes)
    assert result.returncode == code, result.stderr
  assert run_child('none', 0, workdir, **changes).returncode == 0
  of = functools.partial(setup.prepare, tiny(**changes))
  assert_same_state(workdir, tmp_path / 'whole', of)
  state = final_state(workdir, of)
  assert int(state.chosen.sum()) == int(state.step) == ends[-1]
  for kind in ('train', 'outer'):
    ours, theirs = (
      [
        (row['step'], row['gradient_evaluations'], row.get('learning_rate'))
        for row in rows_of(tmp_path / name, kind)
      ]
      for name in ('killed', 'whole')
    )
    assert ours == theirs


def test_the_game_and_the_check_are_written_down(undisturbed, tmp_path):
  workdir, _ = undisturbed
  rows = rows_of(workdir, 'outer')
  np.testing.assert_allclose(list(rows[0]['played'].values()), 1 / 6, rtol=1e-5)
  played, losses = (  # The game begins when the radii have grown.
    np.array([list(row[field].values()) for row in rows[1:]])
    for field in ('played', 'validation_loss')
  )
  expected = losses.sum(axis=0).max() - (played * losses).sum()
  assert rows[-1]['game']['regret'] == pytest.approx(expected, rel=1e-3)
  for row in rows:
    assert 0 <= row['natural_accuracy'] <= 1
    assert set(row['validation_accuracy']) == set(SIX)
  changes = {'threats.only': ('dct_linf',), 'train.T': 2}
  config = tiny(**{'train.check_examples': 8} | changes | ONE_NETWORK)
  run(config, tmp_path / 'checked')
  (last,) = rows_of(tmp_path / 'checked', 'outer')[-1]['possible_loss'].items()
  assert last[0] == 'dct_linf'


def test_the_attack_of_training_is_checked_not_that_of_validation(
  tmp_path, capsys
):
  fields = {
    'threats.only': ('pixel_linf',),
    'threats.pixel_linf.eps': 0.3,
    'attack.step_size': 1e-3,  # Hardly moves.
    'attack.random_start': False,
    'data.train_examples': 1000,
    'optimizer.learning_rate': 1e-2,
    'train.T': 1,
    'train.h': 1,
    'train.check_examples': 20,
    'eval.others': (),
  }
  config = tiny(**fields)
  config.validation_attack = {'steps': 20, 'step_size': 0.1}
  run(config, tmp_path)
  (row,) = rows_of(tmp_path, 'outer')
  reached, possible = (
    row[field]['pixel_linf'] for field in ('probed_loss', 'possible_loss')
  )
  assert possible > 1.5 * reached
  # That of validation finds the losses.
  assert row['validation_loss']['pixel_linf'] > 1.5 * reached
  (warning,) = (
    line for line in capsys.readouterr().err.splitlines() if 'APGD' in line
  )
  assert f'pixel_linf ({reached:.2f}, APGD {possible:.2f})' in warning


def test_a_game_of_realised_shares_is_independent_of_interruptions(tmp_path):
  fields = {'method': 'e_at', 'policy.signal': 'error', 'train.T': 2}
  fields |= {'eval.others': ()}
  run(tiny(**fields), tmp_path / 'whole')
  workdir = tmp_path / 'interrupted'
  assert run_child('stop', 9, workdir, **fields).returncode == 143
  run(tiny(**fields), workdir)
  rows = rows_of(workdir, 'outer')
  for field in ('played', 'game'):
    whole = [row[field] for row in rows_of(tmp_path / 'whole', 'outer')]
    assert [row[field] for row in rows] == whole
  chosen = [
    sum(
      row['chosen'][SIX[0]]
      for row in rows_of(workdir, 'train')
      if first < row['step'] <= first + 6
    )
    for first in (0, 6)
  ]
  assert [6 * row['played'][SIX[0]] for row in rows] == pytest.approx(chosen)
  errors = [1 - min(row['validation_accuracy'].values()) for row in rows]
  assert [row['game']['worst'] for row in rows] == pytest.approx(errors)


def test_a_finished_run_can_be_extended_where_nothing_depends_on_its_length(
  tmp_path,
):
  changes = {'train.ramp': 0.0, 'eval.others': ()}
  run(tiny(**{'train.T': 2} | changes), tmp_path / 'run')
  run(tiny(**{'train.T': 3} | changes), tmp_path / 'run')
  run(tiny(**{'train.T': 3} | changes), tmp_path / 'whole')
  assert_same_state(tmp_path / 'run', tmp_path / 'whole')
  with pytest.raises(UserError, match=r'train\.T: 3 there, 2 here') as shorter:
    run(tiny(**{'train.T': 2} | changes), tmp_path / 'run')
  assert 'optimizer.schedule' not in str(shorter.value)
  with pytest.raises(UserError, match='seed: 0 there, 1 here'):
    run(tiny(**{'train.T': 4, 'seed': 1} | changes), tmp_path / 'run')

  def recorded():
    return json.loads((tmp_path / 'run' / 'config.json').read_text())

  # What cannot begin extends nothing.
  longer = tiny(**{'train.T': 4} | changes)
  with files.locked(tmp_path / 'run'), pytest.raises(files.InUse):
    run(longer, tmp_path / 'run')
  assert recorded()['train']['T'] == 3
  longer.eval.examples = 9999
  with pytest.raises(UserError, match=r'eval\.examples = 9999'):
    run(longer, tmp_path / 'run')
  assert recorded()['train']['T'] == 3


@pytest.mark.parametrize(
  ('before', 'after', 'named'),
  [
    ({'train.T': 3}, {'train.T': 4}, ['train.ramp = 0.5']),
    ({'train.T': 4}, {'train.T': 3}, None),
    (
      {'train.ramp': 0.0, 'optimizer.schedule': 'cosine'},
      {'train.T': 4},
      ["optimizer.schedule = 'cosine'"],
    ),
    (
      {'train.ramp': 0.0, 'train.budget': 6000},
      {'train.budget': 7000},
      ['train.budget = 7000'],
    ),
    ({'train.budget': 7000}, {'train.budget': 6000}, None),
    ({'seed': 1}, {'seed': 2}, None),
  ],
)
def test_a_run_that_cannot_be_extended_says_why(before, after, named, tmp_path):
  (tmp_path / 'config.json').write_text(tiny(**before).to_json())
  with pytest.raises(UserError) as caught:
    setup.check_workdir(tmp_path, tiny(**before | after))
  said = str(caught.value)
  (field,) = after
  assert f'{field}: ' in said
  assert f'{after[field]} here' in said
  for reason in ('train.ramp =', 'optimizer.schedule =', 'train.budget ='):
    assert (reason in said) == any(reason in word for word in named or [])
  assert all(word in said for word in named or [])


def test_a_workdir_is_locked_while_a_run_is_in_it(tmp_path):
  with (
    files.locked(tmp_path / 'run'),
    pytest.raises(UserError, match=str(os.getpid())),
  ):
    run(tiny(), tmp_path / 'run')


class Own(nn.Module):
  num_classes: int

  @nn.compact
  def __call__(self, x):
    return nn.Dense(self.num_classes)(x.reshape(len(x), -1))


def test_an_own_network_and_own_data_are_trained_evaluated_and_exported(
  tmp_path,
):
  rng = np.random.default_rng(0)
  arrays = {}
  for split, count in (('train', 40), ('test', 10)):
    shape = (count, 8, 8, 3)
    arrays[f'{split}_images'] = rng.integers(0, 256, shape, dtype=np.uint8)
    arrays[f'{split}_labels'] = np.arange(count) % 2
  np.savez(tmp_path / 'own.npz', **arrays)
  config = tiny(
    **{
      'data.name': str(tmp_path / 'own.npz'),
      'data.train_examples': 0,
      'model.name': f'{__name__}:Own',
      'model.options': {},
      'threats.only': ('pixel_linf', 'dct_l2'),
      'train.batch_size': 10,
      'train.T': 1,
      'train.h': 1,
      'train.validation_examples': 0,
      'eval.examples': 0,
    }
  )
  workdir = tmp_path / 'run'
  trained, _ = run(config, workdir)
  expected = trained['h=1']['paper'].logits
  assert expected.shape == (10, 2)
  config.threats.only = ('pixel_l2',)
  evaluated = run_evaluation.evaluate_run(config, str(workdir), print)
  assert evaluated['h=1']['paper'].threats == ('pixel_l2',)
  config.threats.only = ('pixel_linf', 'dct_l2')
  export.export(config, str(workdir), lambda text: None)
  logits_fn, params, card = networks.load(workdir / 'export' / 'model', Own)
  assert card['classes'] == 2
  images = np.float32(arrays['test_images']) / 255
  np.testing.assert_allclose(logits_fn(params, images), expected, 1e-4, 1e-5)


def test_the_ensemble_of_all_outer_steps(tmp_path):
  config = tiny(algorithm='ensemble')
  evaluations, _ = run(config, tmp_path / 'ensemble')
  assert list(evaluations) == ['h=1', 'h=3 ensemble']
  settings = evaluations['h=3 ensemble']['paper'].settings
  assert settings['outer_steps'] == [1, 2, 3]
  assert len(os.listdir(tmp_path / 'ensemble' / 'checkpoints')) == 3


def test_batch_norm_augmentation_and_sgd(tmp_path):
  config = tiny(
    **{
      'data.augment': True,
      'data.validation': 'last',
      'optimizer.name': 'sgd',
      'train.T': 2,
      'threats.only': ('pixel_linf', 'pixel_l2', 'pixel_l1'),
      'model.name': 'resnet_v1_50',
    }
  )
  config.model.options = {'depth': 8, 'width': 4}
  config.eval.others = ('recalibrated',)
  evaluations, _ = run(config, tmp_path / 'resnet')
  assert list(evaluations) == ['h=2 average', 'h=2 recalibrated']
  average, again = (found['paper'] for found in evaluations.values())
  assert average.correct.shape == (3, 30)
  assert (average.logits != again.logits).any()


def test_recalibration_needs_statistics(undisturbed):
  workdir, _ = undisturbed
  with pytest.raises(UserError, match=r"eval\.others .*'recalibrated'.*cnn"):
    run(tiny(**{'eval.others': ('recalibrated',)}), workdir)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, monkeypatch, capsys):
  workdir = tmp_path / 'diverged'
  trained = train._Log.trained

  def diverging(self, index, loss):
    trained(self, index, loss * float('nan') if self.step == 9 else loss)

  monkeypatch.setattr(train._Log, 'trained', diverging)
  monkeypatch.setattr(main, '_CONFIG', types.SimpleNamespace(value=tiny()))
  flags.FLAGS(['main', f'--workdir={workdir}'])
  with pytest.raises(SystemExit) as exit_:
    command_line.call(main.main, ['main'])
  assert 'loss is not finite between steps 8 and 12' in exit_.value.code
  assert status_of(workdir) == {'status': 'diverged'}
  assert os.listdir(workdir / 'checkpoints') == ['1']


def test_a_network_that_explodes_is_noticed(tmp_path):
  config = tiny(**{'optimizer.learning_rate': 1e30, 'optimizer.drops': ()})
  with pytest.raises(train.Diverged):
    run(config, tmp_path / 'explodes')


def test_a_run_that_never_began_does_not_claim_its_workdir(tmp_path):
  with pytest.raises(UserError, match='more than the 120'):
    run(tiny(**{'train.batch_size': 121}), tmp_path / 'w')
  config = tiny()
  config.model.options.hidden = 0
  with pytest.raises(UserError, match=r'model\.options = .* cnn'):
    run(config, tmp_path / 'w')
  assert not (tmp_path / 'w').exists()


def test_a_damaged_checkpoint_is_made_again(undisturbed, tmp_path):
  expected, _ = undisturbed
  workdir = tmp_path / 'damaged'
  assert run_child('train', 14, workdir).returncode == -signal.SIGKILL
  newest = max((workdir / 'checkpoints').iterdir(), key=lambda p: int(p.name))
  assert newest.name == '2'
  files = [path for path in newest.rglob('*') if path.is_file()]
  os.truncate(max(files, key=lambda path: path.stat().st_size), 10)
  _, told = run(tiny(**ONE_NETWORK), workdir)
  assert any('checkpoints/2 cannot be read' in text for text in told)
  assert any('Resuming from step 6' in text for text in told)
  assert_same_state(workdir, expected)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'data.name': 'minst'}, r"data\.name = 'minst'.* 'mnist'"),
    ({'train.batch_size': 121}, r'train\.batch_size = 121 .* 120'),
    ({'data.train_examples': 9999}, r'data\.train_examples = 9999'),
    ({'eval.examples': 9999}, r'eval\.examples = 9999 .* 1000'),
    (
      {'train.validation_examples': 401},
      r'train\.validation_examples = 401 .* 400',
    ),
    ({'data.dir': '/nowhere'}, r'data\.dir=/nowhere'),
  ],
)
def test_what_does_not_fit_the_data_is_refused(changes, message, tmp_path):
  with pytest.raises(UserError, match=message):
    run(tiny(**changes), tmp_path / 'bad')


def test_a_workdir_that_cannot_be_written(tmp_path):
  (tmp_path / 'file').write_text('mine')
  with pytest.raises(UserError, match='Cannot write'):
    run(tiny(), tmp_path / 'file' / 'run')
  assert (tmp_path / 'file').read_text() == 'mine'


def test_the_raw_files_of_the_real_data_are_trained_on(tmp_path):
  folder = pathlib.Path(
    os.environ.get('MWROBUST_DATA', ROOT.parent / 'shared' / 'data')
  )
  if not folder.is_dir():
    pytest.skip(f'the real data are not at {folder}')
  for name in ('mnist', 'cifar10'):
    data = {'data.name': name, 'data.dir': str(folder)}
    config = tiny(**data, **{'train.T': 1, 'train.h': 1, 'eval.others': ()})
    evaluations, _ = run(config, tmp_path / name)
    assert evaluations['h=1']['paper'].natural.shape == (30,)
