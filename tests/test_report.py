"""Every figure of a report is computed here once more, from the files."""

import json
import pathlib
import re
import shutil
import statistics
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
from browser import browse

from mwrobust import health, paper, report, runs
from mwrobust.errors import UserError
from mwrobust.outcomes import Outcomes

ROOT = pathlib.Path(__file__).parent.parent
SIX = ('pixel_linf', 'pixel_l2', 'pixel_l1', 'dct_linf', 'dct_l2', 'dct_l1')
ROWS = (*SIX, 'min', 'union', 'natural')
NETWORKS = ('h=1', 'h=2 average', 'h=2 ensemble')
HEADINGS = (
  'Accuracy',
  'Were the attacks strong enough?',
  'How far the attacks went',
  'Who fools what',
  'Training',
  'Cost',
  'What the attacks look like',
)


def ignore(text):
  del text


def copy_run(source, target, alter=None, **fields):
  """A copy of a run, as if it had been made with another config.

  Args:
    source: its workdir.
    target: that of the copy.
    alter: changes each of its `Outcomes`.
    **fields: of the config, `{'policy.name': 'greedy'}`.
  """
  shutil.copytree(source, target)
  config = json.loads((target / 'config.json').read_text())
  for field, value in fields.items():
    group, _, name = field.rpartition('.')
    (config[group] if group else config)[name] = value
  (target / 'config.json').write_text(json.dumps(config))
  for path in (target / 'eval').iterdir():
    outcomes = Outcomes.load(path)
    if alter:
      alter(outcomes)
    outcomes.save(path)
  return target


def change_metrics(run, change):
  """Lets `change(row)` work on all rows of the metrics."""
  path = run / 'metrics.jsonl'
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  for row in rows:
    change(row)
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def stand(count):
  """Lets some more images stand: `count`, and one more for each threat."""

  def alter(outcomes):
    for i, row in enumerate(outcomes.correct):
      row[: count + i % 6] = True
    outcomes.logits[: 2 * count] = np.eye(10)[outcomes.labels[: 2 * count]]

  return alter


def keep(threats=None, examples=None):
  """Leaves the threats of a space, or the first examples, only."""

  def alter(outcomes):
    names = np.array(outcomes.threats)
    rows = [n for n, name in enumerate(names) if name.startswith(threats or '')]
    outcomes.threats = tuple(names[rows].tolist())
    for field in ('eps', 'steps', 'adversarial'):
      setattr(outcomes, field, getattr(outcomes, field)[rows])
    for field in (
      *('correct', 'starts', 'predicted', 'loss', 'norm', 'norm_clipped'),
      'stuck',
    ):
      setattr(outcomes, field, getattr(outcomes, field)[rows, :examples])
    for field in ('labels', 'logits'):
      setattr(outcomes, field, getattr(outcomes, field)[:examples])

  return alter


def counts_of(path):
  """How many images are classified correctly, by row; and how many there are.

  With nothing but NumPy.
  """
  with np.load(path, allow_pickle=False) as arrays:
    counts = {
      str(name): int(row.sum())
      for name, row in zip(arrays['threats'], arrays['correct'], strict=True)
    }
    natural = arrays['logits'].argmax(axis=1) == arrays['labels']
    counts |= {
      'min': min(counts.values()),
      'union': int(np.logical_and.reduce(arrays['correct'], axis=0).sum()),
      'natural': int(natural.sum()),
    }
    return counts, len(arrays['labels'])


def percent(run, network, row):
  counts, images = counts_of(run / 'eval' / f'{network.replace(" ", "_")}.npz')
  return 100 * counts[row] / images


def section(markdown, heading):
  """What stands below a heading."""
  _, found, after = f'\n{markdown}'.partition(f'\n## {heading}\n')
  assert found, heading
  return after.partition('\n## ')[0]


def tables_of(text):
  """The Markdown tables: a dict by row, then by column, for each."""
  found = []
  for block in re.findall(r'(?:^\|.*\|\n?)+', text, re.MULTILINE):
    lines = [
      [cell.strip() for cell in line.strip('|').split('|')]
      for line in block.strip().splitlines()
    ]
    assert len({len(line) for line in block.strip().splitlines()}) == 1
    header, rule, *rows = lines
    assert set(''.join(rule)) == {'-'}
    found.append({row[0]: dict(zip(header, row, strict=True)) for row in rows})
  return found


def markdown_of(*workdirs, folder, settings=''):
  """The Markdown of the report over some runs."""
  merged = [runs.load(workdir, settings) for workdir in workdirs]
  report.write(merged, folder, ignore)
  return (folder / f'report{settings}.md').read_text()


@pytest.fixture(scope='module')
def reported(tiny_run, tmp_path_factory):
  """A run with its report, and what was said."""
  run = tmp_path_factory.mktemp('report') / 'moved from elsewhere'
  shutil.copytree(tiny_run, run)
  told = []
  report.write([runs.load(run)], run, told.append)
  return run, (run / 'report.md').read_text(), told


# -------------------------------------------------------------------- one run


def test_both_files_are_written_and_told(reported):
  run, markdown, told = reported
  assert told[1:] == [str(run / 'report.md'), str(run / 'report.html')]
  page = (run / 'report.html').read_text()
  assert page.startswith('<!doctype html>')
  assert markdown.startswith('# mnist5k, Mult. weights\n')
  headings = re.findall('^## (.*)$', markdown, re.MULTILINE)
  assert headings == list(HEADINGS[:-1])  # The last is pictures only.
  # On the terminal: the table, and whether to believe it.
  assert told[0].strip() in markdown
  assert re.findall('^## (.*)$', told[0], re.MULTILINE) == list(HEADINGS[:2])


def test_the_accuracies_are_those_of_the_outcomes(reported):
  run, markdown, _ = reported
  ours, _ = tables_of(section(markdown, 'Accuracy'))
  assert list(ours) == list(ROWS)
  for network in NETWORKS:
    counts, images = counts_of(
      run / 'eval' / f'{network.replace(" ", "_")}.npz'
    )
    assert list(counts) == list(ROWS)
    assert images == 30
    for row, count in counts.items():
      value, low, high = re.fullmatch(
        r'([\d.]+) \(([\d.]+) to ([\d.]+)\)', ours[row][network]
      ).groups()
      assert value == f'{100 * count / images:.2f}'
      interval = scipy.stats.binomtest(count, images).proportion_ci(
        method='wilson'
      )
      assert float(low) == pytest.approx(100 * interval.low, abs=0.051)
      assert float(high) == pytest.approx(100 * interval.high, abs=0.051)
  assert list(ours['min']) == ['accuracy, %', *NETWORKS]
  assert 'first 30 test images, one start, 2 steps' in markdown


def test_the_run_is_described(reported):
  _, markdown, _ = reported
  text = section(markdown, 'Accuracy')
  for words in (
    *('Data mnist5k', 'network cnn', 'preset paper', 'seed 0'),
    *('policy multiplicative_weights', 'radii linf 0.4, l2 1, l1 5'),
    *('Threats in pixel and dct', 'T = 3', 'r = 1', 'h = 2'),
    "NOT the paper's setting",
    *('model.name cnn (paper: resnet50)', 'data.name mnist5k (paper: mnist)'),
  ):
    assert words in text


def test_the_paper_stands_beside_it(reported):
  run, markdown, _ = reported
  _, beside = tables_of(section(markdown, 'Accuracy'))
  assert list(beside) == list(ROWS)
  theirs = paper.ACCURACIES['mnist', 1]['multiplicative_weights', 'h=1']
  for row, cells in beside.items():
    ours = percent(run, 'h=1', row)
    mean, std = theirs[row]
    assert cells['h=1 (paper)'] == f'{ours:.2f} ({mean:.2f} ± {std:.2f})'
    assert cells['verdict'] == f'lower ({ours - mean:+.1f})'


def test_the_health_of_the_output_is_told(reported):
  _, markdown, _ = reported
  text = section(markdown, 'Were the attacks strong enough?')
  found = re.findall(r'^- (ok|LOOK)  (.*?): (.*?): ', text, re.MULTILINE)
  assert [name for _, network, name in found if network == 'h=2 average'] == [
    *('zero gradients', 'logits', 'deterministic', 'inside the ball'),
    "training's attacks",
    *('one more start', 'margin loss', 'twice the steps'),
    *('apgd from larger balls', 'wide radii'),
  ]
  # Of the other networks, only what is wrong.
  others = {word for word, network, _ in found if network != 'h=2 average'}
  assert others <= {'LOOK'}


@pytest.mark.parametrize('name', ['health', 'radii'])
def test_what_was_not_checked_is_not_said_to_have_passed(
  name, tiny_run, tmp_path
):
  run = copy_run(tiny_run, tmp_path / 'run')
  (run / 'eval' / f'h=2_average_{name}.npz').unlink()
  text = section(
    markdown_of(run, folder=run), 'Were the attacks strong enough?'
  )
  words = ' '.join(text.split())
  assert f'and were not all tried in {run}.' in words


def test_probes_from_before_a_way_changed_are_not_read(tiny_run, monkeypatch):
  assert runs.load(tiny_run).probes
  monkeypatch.setitem(health._CHANGES, 'margin loss', lambda _, attack: attack)
  found = runs.load(tiny_run)
  assert not found.probes
  assert found.widened


def test_the_unions_are_those_of_the_outcomes(reported):
  run, markdown, _ = reported
  unions, _ = tables_of(section(markdown, 'Were the attacks strong enough?'))
  ((_, shown),) = unions.items()
  with np.load(run / 'eval' / 'h=2_average_health.npz') as arrays:
    stands = arrays['correct'].reshape(len(health.WAYS), len(SIX), -1)
  assert shown['images'] == str(stands.shape[-1])
  for name, correct in zip(health.WAYS, stands, strict=True):
    assert shown[name] == f'{100 * correct.all(0).mean():.1f}'
  assert shown['all of these'] == f'{100 * stands.all((0, 1)).mean():.1f}'


def test_the_curve_is_that_of_the_outcomes(reported):
  run, markdown, _ = reported
  _, curve = tables_of(section(markdown, 'Were the attacks strong enough?'))
  with np.load(run / 'eval' / 'h=2_average_radii.npz') as arrays:
    correct = arrays['correct'].reshape(len(health.RADII), len(SIX), -1)
  stands = np.minimum.accumulate(correct)  # In a smaller ball, too.
  accuracies = 100 * stands.mean(axis=2)
  for i, name in enumerate(SIX):
    shown = [curve[name][f'{scale:g} eps'] for scale in health.RADII]
    assert shown == [f'{accuracy:.1f}' for accuracy in accuracies[:, i]]


def test_the_validation_of_another_network_is_no_check(tiny_run, tmp_path):
  run = runs.load(tiny_run)
  assert run.validation_loss == run.outer[-1]['validation_loss']
  assert run._replace(outer=run.outer[:-1]).validation_loss is None
  ramping = copy_run(tiny_run, tmp_path / 'run')
  change_metrics(ramping, lambda row: row.update(radius_scale=0.5))
  assert runs.load(ramping).validation_loss is None


def test_the_norms_are_those_of_the_outcomes(reported):
  run, markdown, _ = reported
  (norms,) = tables_of(section(markdown, 'How far the attacks went'))
  with np.load(run / 'eval' / 'h=2_average.npz') as arrays:
    for i, name in enumerate(SIX):
      eps = float(arrays['eps'][i])
      before = float(arrays['norm'][i].max())
      clipped = arrays['norm_clipped'][i].astype(float)
      assert list(norms[name].values()) == [
        *(name, f'{eps:.4g}', f'{before / eps:.3f}'),
        *(f'{clipped.mean() / eps:.3f}', f'{clipped.max() / eps:.3f}'),
      ]


def test_the_overlap_is_that_of_the_outcomes(tiny_run, tmp_path):
  def alter(outcomes):
    stand(2)(outcomes)
    outcomes.correct[5] = True  # This one fools nobody.

  run = copy_run(tiny_run, tmp_path / 'run', alter)
  text = section(markdown_of(run, folder=run), 'Who fools what')
  numbers, shares = tables_of(text)
  with np.load(run / 'eval' / 'h=2_average.npz') as arrays:
    natural = arrays['logits'].argmax(axis=1) == arrays['labels']
    fooled = [
      {n for n in range(30) if natural[n] and not row[n]}
      for row in arrays['correct']
    ]
  assert fooled[0]
  assert not fooled[5]
  for i, name in enumerate(SIX):
    others = set().union(*fooled[:i], *fooled[i + 1 :])
    assert numbers[name]['images fooled'] == str(len(fooled[i]))
    assert numbers[name]['by it alone'] == str(len(fooled[i] - others))
    for j, other in enumerate(SIX):
      if fooled[i]:
        share = 100 * len(fooled[i] & fooled[j]) / len(fooled[i])
        assert shares[name][other] == f'{share:.0f}'


def test_the_training_is_that_of_the_metrics(reported):
  run, markdown, _ = reported
  (last,) = tables_of(section(markdown, 'Training'))
  lines = (run / 'metrics.jsonl').read_text().splitlines()
  row = json.loads(lines[-1])
  assert row['outer_step'] == 3
  assert {name: list(cells.values())[1:] for name, cells in last.items()} == {
    name: [
      f'{row["weight"][name]:.3f}',
      f'{row["validation_loss"][name]:.3f}',
    ]
    for name in SIX
  }


def test_the_cost_counts_every_network(reported):
  """An ensemble of two goes through two networks, and the probes cost too."""
  run, markdown, _ = reported
  (cost,) = tables_of(section(markdown, 'Cost'))
  cells = list(cost['Mult. weights, seed 0'].values())
  row = json.loads((run / 'metrics.jsonl').read_text().splitlines()[-1])
  assert cells[1] == f'{row["gradient_evaluations"]:,}'
  spent = 0
  for path in (run / 'eval').iterdir():
    with np.load(path) as arrays:
      members = 2 if 'ensemble' in path.stem else 1
      spent += members * int(arrays['starts'].sum(axis=1) @ arrays['steps'])
  assert cells[3] == f'{spent:,}'


# --------------------------------------------------------------- several runs


@pytest.fixture(scope='module')
def merged(tiny_run, tmp_path_factory):
  """Runs of three methods, with three seeds, two and one."""
  folder = tmp_path_factory.mktemp('merged')
  found = {}
  for method, seeds in (
    *[('multiplicative_weights', 3), ('round_robin', 2)],
    ('single pixel_l2', 1),
  ):
    name, _, threat = method.partition(' ')
    found[method] = [
      copy_run(
        tiny_run,
        folder / f'{name}-{seed}',
        stand(len(method) // 3 + seed**2),
        **{
          'seed': seed,
          'policy.name': name,
          'policy.threat': threat or 'pixel_linf',
        },
      )
      for seed in range(seeds)
    ]
  return found


def test_seeds_have_their_mean_and_deviation(merged, tmp_path):
  seeds = merged['multiplicative_weights']
  markdown = markdown_of(*seeds, folder=tmp_path)
  text = section(markdown, 'Accuracy')
  ours, beside = tables_of(text)
  theirs = paper.ACCURACIES['mnist', 1]['multiplicative_weights', 'h=1']
  deviations = set()
  for row in ROWS:
    for network in NETWORKS:
      values = [percent(run, network, row) for run in seeds]
      mean, deviation = statistics.mean(values), statistics.stdev(values)
      assert ours[row][network] == f'{mean:.2f} (± {deviation:.2f})'
      deviations.add(round(deviation, 2))
    mean = statistics.mean(percent(run, 'h=1', row) for run in seeds)
    assert beside[row]['h=1 (paper)'].startswith(f'{mean:.2f} ')
    far = abs(mean - theirs[row].mean) > theirs[row].std
    word = 'higher' if mean > theirs[row].mean else 'lower'
    assert beside[row]['verdict'].startswith(word if far else 'alike')
  assert min(deviations) > 0
  assert 'Mult. weights with seeds 0, 1, 2' in text
  assert 'seed 0' not in text
  (cost,) = tables_of(section(markdown, 'Cost'))
  assert list(cost) == [f'Mult. weights, seed {seed}' for seed in range(3)]
  assert markdown.startswith('# mnist5k, 3 runs\n')


def test_methods_have_columns_of_their_own(merged, tmp_path):
  everything = [run for method in merged.values() for run in method]
  # Seeds need not come method by method.
  text = markdown_of(*everything[::-1], folder=tmp_path)
  ours, beside = tables_of(section(text, 'Accuracy'))
  titles = {
    'multiplicative_weights': 'Mult. weights',
    'round_robin': 'Round robin',
    'single pixel_l2': 'Single pixel_l2',
  }
  assert set(ours['min']) - {'accuracy, %'} == {
    f'{title} {network}' for title in titles.values() for network in NETWORKS
  }
  for method, title in titles.items():
    for network in NETWORKS:
      for row in ROWS:
        values = [percent(run, network, row) for run in merged[method]]
        mean = f'{statistics.mean(values):.2f}'
        spread = r'[\d.]+ to [\d.]+'  # Of one seed: its interval.
        if len(values) > 1:
          spread = f'± {statistics.stdev(values):.2f}'
        assert re.fullmatch(
          rf'{mean} \({spread}\)', ours[row][f'{title} {network}']
        )
  # The paper has the two policies, for their last parameters.
  assert [name for name in beside['min'] if 'paper' in name] == [
    'beside the paper',
    'Round robin h=1 (paper)',
    'Mult. weights h=1 (paper)',
  ]
  which = 'Round robin with seeds 1, 0; Mult. weights with seeds 2, 1, 0'
  assert which in ' '.join(text.split())


def _percentile(outcomes):
  for pair in outcomes.settings['attacks']:
    pair['attack']['percentile'] = 50.0


def _of_an_earlier_step(outcomes):
  outcomes.settings['outer_steps'] = [
    t - 1 for t in outcomes.settings['outer_steps']
  ]


@pytest.mark.parametrize(
  ('fields', 'alter', 'message'),
  [
    ({'preset': 'released'}, None, r"preset: 'paper' and 'released'"),
    ({'data.name': 'mnist'}, None, r"data.name: 'mnist5k' and 'mnist'"),
    ({'train.T': 4}, None, r'train.T: 3 and 4'),
    ({'threats.eps_l1': 6.0}, None, r'threats.eps_l1: 5.0 and 6.0'),
    ({'policy.eta': 0.3}, None, r'policy.eta: 0.1 and 0.3'),
    ({'seed': 0}, None, r'with seed 0: it would count twice'),
    ({'eval.examples': 20}, keep(examples=20), r'images: 30 and 20'),
    ({'eval.percentile': 50.0}, _percentile, r'percentile'),
    ({}, _of_an_earlier_step, r'step'),
  ],
  ids=lambda value: str(value) if isinstance(value, dict) else '',
)
def test_what_cannot_be_merged_is_named(
  tiny_run, tmp_path, fields, alter, message
):
  other = copy_run(tiny_run, tmp_path / 'other', alter, **{'seed': 1} | fields)
  with pytest.raises(UserError, match=message) as error:
    report.write([runs.load(tiny_run), runs.load(other)], tmp_path, ignore)
  assert str(tiny_run) in str(error.value)
  assert str(other) in str(error.value)
  assert not list(tmp_path.glob('report*'))


def test_methods_may_differ_in_their_policy_only(tiny_run, tmp_path):
  greedy = {'policy.name': 'greedy', 'policy.eta': 0.3}
  other = copy_run(tiny_run, tmp_path / 'a', **greedy)
  runs.check_mergeable([runs.load(tiny_run), runs.load(other)])
  third = copy_run(tiny_run, tmp_path / 'b', **greedy, seed=1)
  runs.check_mergeable([*map(runs.load, (tiny_run, other, third))])
  longer = copy_run(tiny_run, tmp_path / 'c', **greedy | {'train.T': 4})
  with pytest.raises(UserError, match=r'train.T: 3 and 4'):
    runs.check_mergeable([runs.load(tiny_run), runs.load(longer)])


# ------------------------------------------------------------ runs of all sorts


def assert_whole(run):
  """The report of the run has all sections; returns its Markdown."""
  markdown = markdown_of(run, folder=run)
  headings = re.findall('^## (.*)$', markdown, re.MULTILINE)
  assert headings == list(HEADINGS[:-1])  # The last is pictures only.
  return markdown


def test_the_last_parameters_alone(tiny_run, tmp_path):
  run = copy_run(tiny_run, tmp_path / 'run', **{'train.h': 1})
  for path in (run / 'eval').glob('h=2*.npz'):
    if 'health' in path.name:
      probed = Outcomes.load(path)
      alone = Outcomes.load(path.with_name('h=1.npz'))
      ways = probed.settings['attacks']
      probed.settings = alone.settings | {'attacks': ways}
      probed.save(path.with_name('h=1_health.npz'))
    path.unlink()
  text = assert_whole(run)
  assert '  h=1: margin loss: ' in text


def test_an_ensemble_of_all(tiny_run, tmp_path):
  run = copy_run(tiny_run, tmp_path / 'run', algorithm='ensemble')
  for path in (run / 'eval').glob('h=2_average*.npz'):
    path.unlink()
  path = run / 'eval' / 'h=2_ensemble.npz'
  path.rename(path.with_stem('h=3_ensemble'))
  assert 'h=3 ensemble: deterministic' in assert_whole(run)


def test_the_output_of_one_outer_step_is_its_parameters(tiny_run, tmp_path):
  fields = {'algorithm': 'ensemble', 'train.T': 1, 'train.h': 1}
  run = copy_run(tiny_run, tmp_path / 'run', **fields)
  for path in (run / 'eval').glob('h=2*.npz'):
    path.unlink()
  assert runs.load(run).output == 'h=1'  # As `evaluate.networks` calls it.


def test_threats_in_pixels_only(tiny_run, tmp_path):
  run = copy_run(
    tiny_run,
    tmp_path / 'run',
    keep(threats='pixel'),
    **{'threats.spaces': ['pixel']},
  )

  def change(row):
    for field, value in row.items():
      if isinstance(value, dict):
        row[field] = {name: value[name] for name in SIX[:3]}

  change_metrics(run, change)
  text = assert_whole(run)
  ours, beside = tables_of(section(text, 'Accuracy'))
  assert list(ours) == [*SIX[:3], 'min', 'union', 'natural']
  assert list(beside) == list(ours)
  spaces = "threats.spaces ('pixel',) (paper: ('pixel', 'dct'))"
  assert spaces in ' '.join(text.split())


def test_training_without_attacks(tiny_run, tmp_path):
  run = copy_run(tiny_run, tmp_path / 'run', **{'policy.name': 'natural'})

  def change(row):
    for field in {'weight', 'chosen'} & row.keys():
      row[field] = dict.fromkeys(SIX, 0)

  change_metrics(run, change)
  text = assert_whole(run)
  assert text.startswith('# mnist5k, Natural\n')
  assert 'beside the paper' not in text  # It has no such column.
  assert 'trained when' not in (run / 'report.html').read_text()


def test_a_run_without_metrics(tiny_run, tmp_path):
  run = copy_run(tiny_run, tmp_path / 'run')
  path = run / 'metrics.jsonl'
  whole = path.read_bytes()
  path.write_bytes(whole + b'{"kind": "tr')  # It is being written just now.
  assert 'last validation loss' in assert_whole(run)
  path.unlink()
  assert 'There are no metrics.' in assert_whole(run)


def test_a_run_without_an_evaluation(tiny_run, tmp_path):
  run = copy_run(tiny_run, tmp_path / 'run')
  # One that was interrupted is none, and a health check alone is none.
  for name in ('h=1', 'h=2_average', 'h=2_ensemble'):
    path = run / 'eval' / f'{name}.npz'
    outcomes = Outcomes.load(path)
    outcomes.correct[2, 7] = True
    outcomes.starts[2, 7] = 0
    outcomes.save(path)
  command = re.escape(f'python -m mwrobust.main --mode=eval --workdir={run}')
  with pytest.raises(UserError, match=f'has no evaluation.*{command}'):
    runs.load(run)
  shutil.rmtree(run / 'eval')
  with pytest.raises(UserError, match=f'has no evaluation.*{command}'):
    runs.load(run)


def test_an_output_that_is_missing_is_missed(tiny_run, tmp_path):
  """An interrupted evaluation has h=1 only: not what the run was for."""
  run = copy_run(tiny_run, tmp_path / 'run')
  for path in (run / 'eval').glob('h=2*.npz'):
    path.unlink()
  markdown = markdown_of(run, folder=run)
  assert 'h=2 average' in section(markdown, 'Accuracy')


def with_restarts(run):
  """Renames the evaluation to one with two starts."""
  for path in (run / 'eval').iterdir():
    outcomes = Outcomes.load(path)
    stem = path.stem.removesuffix('_health').removesuffix('_radii')
    if stem == path.stem:
      outcomes.restarts = 2
      outcomes.starts[:] = np.where(outcomes.correct, 2, 1)
    path.unlink()
    outcomes.save(path.with_stem(path.stem.replace(stem, f'{stem}-restarts=2')))


def test_other_settings_are_named_where_there_are_others(tiny_run, tmp_path):
  run = copy_run(tiny_run, tmp_path / 'run')
  with_restarts(run)
  with pytest.raises(UserError, match='has no evaluation') as error:
    runs.load(run)
  assert 'restarts=2' in str(error.value)
  assert 'health' not in str(error.value)  # That is no setting to ask for.
  with pytest.raises(UserError, match='no evaluation with restarts=3'):
    runs.load(run, '-restarts=3')


# ------------------------------------------------------------ the command line


def run_report(*words):
  return subprocess.run(
    [sys.executable, '-m', 'mwrobust.report', *map(str, words)],
    capture_output=True,
    text=True,
    cwd=ROOT,
    check=False,
  )


@pytest.mark.parametrize(
  ('words', 'message'),
  [
    ([], 'Name the workdir of a run, or of several.'),
    (['nowhere'], 'nowhere holds no run'),
  ],
)
def test_what_cannot_be_reported_is_told_in_a_line(words, message):
  result = run_report(*words)
  assert result.returncode == 1
  assert message in result.stderr
  assert 'Traceback' not in result.stderr


def test_two_runs_from_the_command_line(merged, tmp_path):
  first, second, _ = merged['multiplicative_weights']
  result = run_report(first, second, f'--output={tmp_path}')
  assert result.returncode == 0, result.stderr
  assert result.stderr == ''
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    *('report.html', 'report.md')
  ]
  assert str(tmp_path / 'report.html') in result.stdout
  assert not (first / 'report.md').exists()
  assert 'Mult. weights with seeds 0, 1.' in result.stdout


def test_another_evaluation_from_the_command_line(tiny_run, tmp_path):
  run = copy_run(tiny_run, tmp_path / 'run', stand(3))
  with_restarts(run)
  result = run_report(run, '--settings=restarts=2')
  assert result.returncode == 0, result.stderr
  assert not (run / 'report.md').exists()
  markdown = (run / 'report-restarts=2.md').read_text()
  assert 'first 30 test images, 2 starts, 2 steps' in markdown
  assert 'h=2 average: starts 2 to 2: lowers' in markdown
  page = (run / 'report-restarts=2.html').read_text()
  assert 'Accuracy after so many starts' in page
  assert 'beside the paper' not in markdown  # It has 1 and 20 starts.


# --------------------------------------------------------------- in the browser

LOOK = """({
  headings: [...document.querySelectorAll('h2')].map(h => h.textContent),
  images: document.images.length,
  broken: [...document.images].filter(i => !i.naturalWidth).length,
  text: document.body.innerText,
})"""


@pytest.mark.parametrize(('width', 'dark'), [(360, False), (1200, True)])
def test_a_browser_shows_the_report(reported, width, dark):
  run, _, _ = reported
  visit = browse(run / 'report.html', width, dark, script=LOOK)
  assert visit.title == 'mnist5k, Mult. weights'
  assert visit.console == []
  assert visit.requests[0] == (run / 'report.html').as_uri()
  assert {url.partition(':')[0] for url in visit.requests} == {'file', 'data'}
  assert visit.scroll_width <= width
  assert (visit.background == 'rgb(255, 255, 255)') == (not dark)
  assert visit.value['headings'] == list(HEADINGS)
  assert visit.value['images'] >= 36
  assert visit.value['broken'] == 0
  for words in ("NOT the paper's setting", 'Which threat was trained when'):
    assert words in visit.value['text']
