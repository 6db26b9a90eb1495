"""Computes every figure of a report again from the outcomes."""

import itertools
import json
import pathlib
import re
import statistics
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
from browser import browse
from made import (
  ATTACKS,
  SIX,
  about,
  ignore,
  make_outcomes,
  make_run,
  run_evaluations,
  section,
  tables_of,
)

from mwrobust import attacks, evaluation, reporting
from mwrobust.errors import UserError
from mwrobust.reporting import runs, sections

ROOT = pathlib.Path(__file__).parent.parent
ROWS = (*SIX, 'min', 'union', 'natural')
NETWORKS = ('h=1', 'h=2 average', 'h=2 ensemble')
HEADINGS = (
  *(
    'Verdict',
    'Pictures',
    'Images fooled by each threat',
    'Accuracy over the radius',
  ),
  'Cost',
)
RUN_HEADINGS = (*HEADINGS, 'Training', 'All networks of this run')


def words_of(text):
  return ' '.join(text.split())


def headings_of(markdown):
  return re.findall('^## (.*)$', markdown, re.MULTILINE)


def percent(outcomes, row):
  """Returns the expected accuracies, with NumPy only."""
  natural = outcomes.logits.argmax(axis=1) == outcomes.labels
  stands = {
    threat['name']: natural & (fell == -1)
    for threat, fell in zip(
      outcomes.settings['threats'], outcomes.fell, strict=True
    )
  }
  counts = {name: row.sum() for name, row in stands.items()} | {
    'min': min(row.sum() for row in stands.values()),
    'union': np.logical_and.reduce(list(stands.values())).sum(),
    'natural': natural.sum(),
  }
  return 100 * counts[row] / len(natural)


def assert_short(told):
  """Checks for a summary of at most six lines of 80 columns, and two paths."""
  summary, *paths = told
  assert 1 <= len(summary.splitlines()) <= 6
  assert max(map(len, summary.splitlines())) <= 80
  assert [pathlib.Path(path).name for path in paths] == [
    *('report.html', 'report.md')
  ]
  assert all(pathlib.Path(path).exists() for path in paths)


@pytest.fixture(scope='module')
def evaluated():
  """Returns two protocols of one network, and its curve."""
  common = {'network': 'my <net>'}
  return (
    make_outcomes(protocol='standard', share=0.6, **common),
    make_outcomes(protocol='paper', share=0.3, **common),
    make_outcomes(
      protocol='fast', count=20, radii=(0.25, 1.0, 4.0), share=0.9, **common
    ),
  )


@pytest.fixture(scope='module')
def reported(evaluated, tmp_path_factory):
  """Returns the folder of a report, its Markdown, and the printed text."""
  folder = tmp_path_factory.mktemp('report') / 'my network'
  told = []
  standard, paper, curve = evaluated
  reporting.write([standard, paper], folder, curve, told.append)
  return folder, (folder / 'report.md').read_text(), told


# ---------------------------------------------------------------- the network


def test_both_files_are_written_and_said(reported):
  folder, markdown, told = reported
  assert_short(told)
  page = (folder / 'report.html').read_text()
  assert page.startswith('<!doctype html>')
  assert headings_of(markdown) == [h for h in HEADINGS if h != 'Pictures']
  assert re.findall('<h2>(.*?)</h2>', page) == list(HEADINGS)
  assert max(map(len, markdown.splitlines())) <= 110


def test_the_verdict_is_one_sentence(reported, evaluated):
  _, markdown, told = reported
  natural, union = (percent(evaluated[0], row) for row in ('natural', 'union'))
  sentence = (
    f'Of 40 test images, {natural:.1f} % are classified correctly; {union:.1f} '
    '% stay correct whatever any of the six threats does.'
  )
  assert words_of(section(markdown, 'Verdict')).startswith(sentence)
  assert words_of(told[0]).startswith(sentence)
  name = min(SIX, key=lambda name: percent(evaluated[0], name))
  assert f'{name}, {percent(evaluated[0], name):.1f} %' in told[0]


@pytest.mark.parametrize(
  ('count', 'words'),
  [
    (1, 'under pixel_linf'),
    (2, 'whatever either of the two threats does'),
    (12, 'whatever any of the twelve threats does'),
    (13, 'whatever any of the 13 threats does'),
  ],
)
def test_threats_are_counted_in_words(count, words):
  threats = ['pixel_linf', *map(str, range(1, count))]
  assert sections.whatever(threats) == words


def test_large_numbers_have_commas():
  outcomes = make_outcomes(count=1000)
  assert sections.verdict(outcomes).startswith('Of 1,000 test images, 90.0 % ')


def test_the_accuracies_are_those_of_the_outcomes(reported, evaluated):
  _, markdown, _ = reported
  ours, after = tables_of(section(markdown, 'Verdict'))
  assert list(ours) == list(ROWS)
  assert list(ours['min']) == ['accuracy, %', 'eps', 'standard', 'paper']
  assert [ours[name]['eps'] for name in SIX] == ['0.4', '1', '5'] * 2
  for outcomes in evaluated[:2]:
    for row in ROWS:
      cell = ours[row][outcomes.settings['protocol']]
      value, low, high = map(float, re.findall(r'[\d.]+', cell))
      expected = percent(outcomes, row)
      assert value == pytest.approx(expected, abs=0.051)
      interval = scipy.stats.binomtest(
        round(expected * 40 / 100), 40
      ).proportion_ci(method='wilson')
      assert low == pytest.approx(100 * interval.low, abs=0.051)
      assert high == pytest.approx(100 * interval.high, abs=0.051)
  assert list(after) == list(ROWS[:-1])
  assert tuple(after['union'])[1:] == ATTACKS['standard']
  assert after['union']['square'] == f'{percent(evaluated[0], "union"):.1f}'


def test_every_section_says_which_network_it_shows(reported):
  folder, markdown, _ = reported
  for heading in headings_of(markdown):
    assert 'my <net>' in section(markdown, heading)
  page = (folder / 'report.html').read_text()
  bodies = re.findall(r'<section.*?</section>', page, re.DOTALL)
  assert len(bodies) == len(HEADINGS)
  assert all('my &lt;net&gt;' in body for body in bodies)


def test_a_weaker_protocol_is_said_to_be_one(reported, evaluated):
  _, markdown, _ = reported
  standard, paper, _ = evaluated
  more = max(percent(paper, name) - percent(standard, name) for name in SIX)
  assert more > 0
  assert f'by up to {more:.1f} points' in words_of(markdown)


@pytest.mark.parametrize(
  ('by', 'masks'),
  [(0, False), (1, False), (2, True), (3, True), (4, True)],
)
def test_masking_is_said_first(by, masks, tmp_path):
  outcomes = make_outcomes(by=by)
  told = []
  reporting.write(outcomes, tmp_path, say=told.append)
  assert_short(told)
  failed = [c for c in evaluation.checks(outcomes) if not c.passed]
  assert bool(failed) == masks
  page = (tmp_path / 'report.html').read_text()
  assert ('class="callout bad"' in page) == masks
  assert ('class="callout good"' in page) == (not masks)
  text = words_of(section((tmp_path / 'report.md').read_text(), 'Verdict'))
  for check in failed:
    assert words_of(f'{check.finding} {check.advice}') in text
  assert 'looks like gradient masking' in words_of(told[0])
  assert ('Nothing looks' in told[0]) == (not masks)


def test_the_paper_alone_cannot_tell(tmp_path):
  told = []
  reporting.write(make_outcomes(protocol='paper'), tmp_path, say=told.append)
  assert_short(told)
  assert 'cannot tell' in told[0]
  assert 'Nothing looks' not in (tmp_path / 'report.md').read_text()


def test_what_was_not_tested_is_not_green(tmp_path):
  outcomes = make_outcomes()
  outcomes.labels = outcomes.labels + 2  # All are misclassified.
  told = []
  reporting.write(outcomes, tmp_path, say=told.append)
  assert_short(told)
  assert 'Nothing was attacked' in told[0]
  page = (tmp_path / 'report.html').read_text()
  assert 'class="callout good"' not in page
  assert 'Nothing looks' not in page


def test_an_unfinished_evaluation_is_said_to_be_one(tmp_path):
  outcomes = make_outcomes()
  reporting.write(outcomes, tmp_path, say=ignore)
  assert 'not finished' not in (tmp_path / 'report.md').read_text()
  outcomes.tried[0, -1], outcomes.fell[0, -1] = 0, -1
  reporting.write(outcomes, tmp_path, say=ignore)
  assert 'not finished' in (tmp_path / 'report.md').read_text()


def test_who_fools_what_is_that_of_the_outcomes(reported, evaluated):
  _, markdown, _ = reported
  numbers, shares = tables_of(section(markdown, 'Images fooled by each threat'))
  fooled = [set(np.flatnonzero(fell >= 0)) for fell in evaluated[0].fell]
  for i, name in enumerate(SIX):
    others = set().union(*fooled[:i], *fooled[i + 1 :])
    assert numbers[name]['images fooled'] == str(len(fooled[i]))
    assert numbers[name]['only by it'] == str(len(fooled[i] - others))
    assert numbers[name]['apgd-ce'] == str(len(fooled[i]))
    assert numbers[name]['square'] == '0'
    for j, other in enumerate(SIX):
      share = 100 * len(fooled[i] & fooled[j]) / len(fooled[i])
      assert shares[name][other] == f'{share:.0f}'


def test_a_threat_that_fools_nothing(tmp_path):
  outcomes = make_outcomes(share=0.0)
  reporting.write(outcomes, tmp_path, say=ignore)
  _, shares = tables_of((tmp_path / 'report.md').read_text())[-3:-1]
  assert set(shares['dct_l1'].values()) == {'dct_l1', '-'}


def test_the_curve_is_labelled_in_multiples_of_eps(reported, evaluated):
  folder, markdown, _ = reported
  (lines,) = tables_of(section(markdown, 'Accuracy over the radius'))
  curve = evaluated[2]
  header = ['accuracy, % at', '0', '0.25 eps', '1 eps', '4 eps']
  for i, name in enumerate(SIX):
    stands = curve.fell.reshape(3, 6, 20)[:, i, 2:] == -1
    cells = ['90.0', *(f'{100 * s.sum() / 20:.1f}' for s in stands)]
    assert lines[name] == dict(zip(header, [name, *cells], strict=True))
  page = (folder / 'report.html').read_text()
  ticks = re.findall(r'<text class="x"[^>]*>(.*?)</text>', page)
  assert ticks == ['0.25', '1', '4']


def test_odd_radii_are_named_too(tmp_path):
  curve = make_outcomes(protocol='fast', radii=(0.3, 1 / 3, 1.5, 3.14159))
  reporting.write(make_outcomes(), tmp_path, curve, ignore)
  text = section(
    (tmp_path / 'report.md').read_text(), 'Accuracy over the radius'
  )
  assert list(tables_of(text)[0]['dct_l1'])[2:] == [
    *('0.3 eps', '0.3333 eps', '1.5 eps', '3.142 eps')
  ]


def test_the_cost_is_that_of_the_outcomes(reported):
  _, markdown, _ = reported
  (cost,) = tables_of(section(markdown, 'Cost'))
  assert list(cost) == ['standard', 'paper', 'the radii']
  # Six threats, five attacks of ten steps each, forty images.
  assert cost['standard']['gradients'] == '7,200 (60 % of 12,000)'
  assert cost['standard']['other forward passes'] == '1,200 (167 % of 720)'
  assert cost['paper']['other forward passes'] == '240 (-)'


@pytest.mark.parametrize('channels', [1, 2, 3])
def test_pictures_of_any_size_and_number_of_channels(channels, tmp_path):
  outcomes = make_outcomes(channels=channels, pictures=2)
  large = np.zeros((2, 224, 230, channels), np.float32)
  outcomes.images = large
  outcomes.adversarial = np.ones((6, *large.shape), np.float32)
  reporting.write(outcomes, tmp_path, say=ignore)
  page = (tmp_path / 'report.html').read_text()
  widths = re.findall(r'<img [^>]*width="(\d+)"', page)
  assert len(widths) == 2 * (1 + 2 * 6)
  assert max(map(int, widths)) <= 112


def test_what_is_not_of_one_network_is_refused(tmp_path):
  first = make_outcomes(network='a')
  for field, other in {
    'network': make_outcomes(network='b'),
    'data': make_outcomes(network='a', count=50),
    'threats': make_outcomes(attacks.six_threats(0.4, 2.0, 5.0), network='a'),
  }.items():
    with pytest.raises(UserError, match=f'  {field}: '):
      reporting.write([first, other], tmp_path, say=ignore)
  assert not list(tmp_path.iterdir())


def test_a_curve_is_not_taken_for_the_figures(tmp_path):
  curve = make_outcomes(radii=(1.0, 2.0))
  with pytest.raises(UserError, match=r'\[1\.0, 2\.0\].*curve'):
    reporting.write(curve, tmp_path, say=ignore)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('field', list(about()))
def test_a_missing_setting_of_a_run_is_named(field, tmp_path):
  settings = about()
  del settings[field]
  path = tmp_path / evaluation.FILE
  make_outcomes(**settings).save(path)
  if field == 'dataset':  # Nothing reads it.
    runs.load_outcomes(path)
  else:
    with pytest.raises(UserError, match=f'no {field!r}'):
      runs.load_outcomes(path)


# -------------------------------------------------------------------- one run


@pytest.fixture(scope='module')
def reported_run(tmp_path_factory):
  """Returns a run with its report, and the printed text."""
  workdir = make_run(tmp_path_factory.mktemp('run') / 'moved from elsewhere')
  told = []
  reporting.write_run(reporting.load(workdir), workdir, told.append)
  return workdir, (workdir / 'report.md').read_text(), told


def test_a_run_shows_its_output_first(reported_run):
  workdir, markdown, told = reported_run
  assert_short(told)
  assert markdown.startswith('# mnist, Mult. weights\n')
  assert headings_of(markdown) == [h for h in RUN_HEADINGS if h != 'Pictures']
  output = reporting.load(workdir).evaluations['h=2 average']['standard']
  ours, _ = tables_of(section(markdown, 'Verdict'))
  assert list(ours['min']) == ['accuracy, %', 'eps', 'standard', 'paper']
  cell = ours['union']['standard']
  assert cell.startswith(f'{percent(output, "union"):.1f} ')
  assert 'network is h=2 average' in section(markdown, 'Verdict')


def test_a_run_is_read_by_its_settings(reported_run):
  run = reporting.load(reported_run[0])
  assert tuple(run.evaluations) == NETWORKS
  for network, protocols in run.evaluations.items():
    assert tuple(protocols) == ('standard', 'paper')
    for protocol, outcomes in protocols.items():
      assert outcomes.settings['network'] == network
      assert outcomes.settings['protocol'] == protocol
  assert list(run.curves) == ['h=2 average']
  assert (run.output, run.outer_step, run.others) == ('h=2 average', 3, [])
  assert run.method == 'multiplicative_weights'
  assert [row['outer_step'] for row in run.outer] == [1, 2, 3]


def test_the_training_is_that_of_the_metrics(reported_run):
  workdir, markdown, _ = reported_run
  last, cost = tables_of(section(markdown, 'Training'))
  row = json.loads((workdir / 'metrics.jsonl').read_text().splitlines()[-1])
  losses = ('weight', 'validation_loss', 'probed_loss', 'possible_loss')
  natural = last.pop('natural')
  assert natural['accuracy, %'] == f'{100 * row["natural_accuracy"]:.1f}'
  for name, cells in last.items():
    accuracy = cells.pop('accuracy, %')
    assert accuracy == f'{100 * row["validation_accuracy"][name]:.1f}'
    found = list(cells.values())
    assert found == [name, *(f'{row[field][name]:.3f}' for field in losses)]
  assert list(last) == list(SIX)
  (cells,) = cost.values()
  assert list(cells.values())[:3] == [
    *('Mult. weights, seed 0', '37,035', '3:00')
  ]
  # Each network under two protocols (an ensemble of two counts twice), and the
  # curve: 40 or 20 images, 6 threats, 5, 1 or 2 attacks, 6 gradients each.
  spent = (1 + 1 + 2) * 40 * 6 * (5 + 1) * 6 + 20 * 18 * 2 * 6
  assert cells['evaluation, gradients'] == f'{spent:,}'
  page = (workdir / 'report.html').read_text()
  assert 'Mini batches of each threat' in page


def change_rows(workdir, **fields):
  """Sets fields of all rows of the metrics."""
  path = workdir / 'metrics.jsonl'
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  for row in rows:
    row.update(fields)
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def said_about_training(workdir):
  reporting.write_run(reporting.load(workdir), workdir, ignore)
  return words_of(section((workdir / 'report.md').read_text(), 'Training'))


def test_both_sides_of_the_game_are_shown(reported_run):
  """Checks the lines of the chart, and the last values in the text."""
  workdir, markdown, _ = reported_run
  page = (workdir / 'report.html').read_text()
  _, _, sides = page.partition('<h3>Both sides of the game</h3>')
  sides, _, regret = sides.partition('<h3>Regret</h3>')
  rows = reporting.load(workdir).outer
  for chart, title, field in (
    (sides, 'mixture', 'mean_mixture'),
    (sides, 'worst threat', 'mean_worst'),
    (regret, 'regret', 'regret'),
  ):
    found = re.findall(rf'<title>{title}\nouter step (\d+): ([\d.]+)<', chart)
    assert [(int(t), float(y)) for t, y in found] == [
      (row['outer_step'], row['game'][field]) for row in rows
    ]
  text = words_of(section(markdown, 'Training'))
  assert 'The regret is 3.000' in text
  assert '2.250 and 1.250, times 3 outer steps with' in text


def test_a_method_without_a_mixture_has_no_game(tmp_path):
  workdir = make_run(tmp_path / 'run', method='max')
  path = workdir / 'metrics.jsonl'
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  for row in rows:
    row.pop('game', None)
    row.pop('played', None)
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  text = said_about_training(workdir)
  assert 'regret' not in text
  assert 'training attack' in text
  page = (workdir / 'report.html').read_text()
  assert 'Weights' in page
  assert 'Regret' not in page


@pytest.mark.parametrize(
  ('fields', 'named'),
  [
    ({'train.budget': 6_000_000}, 'budget of 6,000,000 gradient'),
    ({'train.r': 0.5}, '1.5 epochs'),
  ],
)
def test_several_runs_say_what_is_equal_between_them(fields, named, tmp_path):
  found = [
    reporting.load(make_run(tmp_path / method, method=method, **fields))
    for method in ('multiplicative_weights', 'greedy')
  ]
  reporting.write_runs(found, tmp_path / 'page', ignore)
  text = words_of((tmp_path / 'page' / 'report.md').read_text())
  assert f'the same {named}' in text
  assert ('not at equal cost' in text) == ('train.r' in fields)


@pytest.mark.parametrize(
  ('probed', 'possible', 'is_fooled'),
  [
    (1.0, 1.51, True),
    (1.0, 1.49, False),
    (0.01, 0.1, False),  # Both are almost zero.
    (0.01, 0.12, True),
    (2.0, 1.0, False),
  ],
)
def test_a_training_attack_that_is_fooled_is_said_to_be(
  probed, possible, is_fooled, tmp_path
):
  workdir = make_run(tmp_path / 'run')
  same = dict.fromkeys(SIX, 1.0)
  change_rows(
    workdir,
    probed_loss=same | {'dct_l2': probed},
    possible_loss=same | {'dct_l2': possible},
  )
  text = said_about_training(workdir)
  assert ('fooled the training attack under dct_l2: APGD' in text) == is_fooled
  assert ('did not fool the training attack' in text) == (not is_fooled)


def test_a_training_attack_that_was_not_checked(tmp_path):
  workdir = make_run(tmp_path / 'run')
  change_rows(workdir, check_examples=0)  # The field of a config may differ.
  text = said_about_training(workdir)
  assert 'the training attack was not checked' in text
  assert 'APGD' not in text


def test_all_networks_have_a_table_per_protocol(reported_run):
  workdir, markdown, _ = reported_run
  text = section(markdown, 'All networks of this run')
  standard, paper, beside = tables_of(text)
  evaluations = reporting.load(workdir).evaluations
  for protocol, table in (('standard', standard), ('paper', paper)):
    assert list(table) == ['union', 'min', *SIX, 'natural']
    assert list(table['min'])[1:] == list(NETWORKS)
    for network in NETWORKS:
      for row in ROWS:
        value = percent(evaluations[network][protocol], row)
        assert table[row][network].startswith(f'{value:.1f} (')
  # It is the paper's network on its data under its threats.
  assert list(beside['min'])[1:] == ['ours', "the paper's", 'verdict']
  assert 'train.T 3 (paper: 20)' in words_of(text)


def test_other_data_are_not_compared(tmp_path):
  run = make_run(
    tmp_path / 'run', **{'data.name': 'mnist5k', 'model.name': 'cnn'}
  )
  reporting.write_run(reporting.load(run), run, ignore)
  text = (run / 'report.md').read_text()
  assert 'beside the paper' not in text
  (line,) = re.findall("Not compared with the paper's .*", words_of(text))
  assert 'data mnist5k (paper: mnist)' in line
  assert 'network cnn (paper: resnet50)' in line


def test_training_without_attacks(tmp_path):
  run = make_run(tmp_path / 'run', **{'method': 'natural'})
  lines = (run / 'metrics.jsonl').read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  for row in rows:
    for field in {'weight', 'chosen'} & row.keys():
      row[field] = dict.fromkeys(SIX, 0)
  lines = ''.join(json.dumps(row) + '\n' for row in rows)
  (run / 'metrics.jsonl').write_text(lines)
  reporting.write_run(reporting.load(run), run, ignore)
  text = (run / 'report.md').read_text()
  assert text.startswith('# mnist, Natural\n')
  assert 'beside the paper' not in text  # It has no such column.
  assert 'Mini batches of' not in (run / 'report.html').read_text()


def test_a_run_without_metrics(tmp_path):
  run = make_run(tmp_path / 'run')
  path = run / 'metrics.jsonl'
  path.write_bytes(path.read_bytes() + b'{"kind": "tr')  # Still being written.
  assert len(reporting.load(run).outer) == 3
  path.unlink()
  reporting.write_run(reporting.load(run), run, ignore)
  assert 'There are no metrics.' in (run / 'report.md').read_text()


def test_other_evaluations_have_tables_of_their_own(tmp_path):
  """Shows evaluations with other radii, fewer images, and a second seed."""
  wider = attacks.six_threats(0.5, 2.0, 9.0)
  found = [
    *run_evaluations(),
    make_outcomes(wider, count=400, **about()),
    make_outcomes(count=30, share=0.1, **about()),
    make_outcomes(count=30, share=0.2, **about()),
  ]
  workdir = make_run(tmp_path / 'run', found)
  run = reporting.load(workdir)
  assert len(run.primary.first.labels) == 40  # Not the 400 of other threats.
  assert len(run.others) == 3
  assert list(run.curves) == ['h=2 average']
  assert not any(group.curves for group in run.others)
  reporting.write_run(run, workdir, ignore)
  text = section((workdir / 'report.md').read_text(), 'Other evaluations')
  tables = tables_of(text)
  eps = sorted(table['pixel_l2']['eps'] for table in tables)
  assert eps == ['1', '1', '2']


def test_without_its_own_threats_a_run_shows_the_others(tmp_path):
  wider = attacks.six_threats(0.5, 2.0, 9.0)
  found = [make_outcomes(wider, count=n, **about()) for n in (20, 30)]
  run = reporting.load(make_run(tmp_path / 'run', found))
  assert len(run.primary.first.labels) == 30
  assert len(run.others) == 1


@pytest.mark.parametrize(('field', 'value'), [('eps', 2.0), ('clip', 'strict')])
def test_other_threats_of_the_same_name_are_not_its_own(field, value, tmp_path):
  other = make_outcomes(count=400, **about())
  other.settings['threats'][1][field] = value
  run = reporting.load(make_run(tmp_path / 'run', [*run_evaluations(), other]))
  assert len(run.primary.first.labels) == 40
  assert len(run.others) == 1


def test_only_the_newest_outer_step_counts(tmp_path):
  old = make_outcomes(count=90, **about(step=2))
  found = [old, make_outcomes(**about('h=1', step=3))]
  workdir = make_run(tmp_path / 'run', found)
  run = reporting.load(workdir)
  assert list(run.evaluations) == ['h=1']
  assert run.others == []
  assert run.output is None  # An interrupted evaluation has h=1 only.
  reporting.write_run(run, workdir, ignore)
  assert str(workdir) in words_of((workdir / 'report.md').read_text())


def test_a_run_without_an_evaluation(tmp_path):
  unfinished = make_outcomes(**about())
  unfinished.tried[:] = 0
  unfinished.fell[:] = -1
  run = make_run(tmp_path / 'run', [unfinished])
  command = f'python -m mwrobust.main --mode=eval --workdir={run}'
  with pytest.raises(UserError, match=re.escape(command)):
    reporting.load(run)


@pytest.mark.parametrize('content', [b'', b'no archive', None])
def test_a_file_that_cannot_be_read_is_named(content, tmp_path):
  run = make_run(tmp_path / 'run')
  path = run / 'eval' / '3' / 'outcomes.npz'
  if content is None:
    make_outcomes().save(path)  # Of a network that is not of a run.
  else:
    path.write_bytes(content)
  with pytest.raises(UserError, match=re.escape(str(path))):
    reporting.load(run)


# --------------------------------------------------------------- several runs


@pytest.fixture(scope='module')
def merged(tmp_path_factory):
  """Returns runs of three methods, with three seeds, two and one."""
  folder = tmp_path_factory.mktemp('merged')
  found = {}
  for method, seeds in (
    *[('multiplicative_weights', 3), ('round_robin', 2)],
    ('single pixel_l2', 1),
  ):
    name, _, threat = method.partition(' ')
    found[method] = [
      make_run(
        folder / f'{name}-{seed}',
        **{
          'seed': seed,
          'method': name,
          'policy.threat': threat or 'pixel_linf',
        },
      )
      for seed in range(seeds)
    ]
  return found


def write_merged(workdirs, folder):
  told = []
  found = [reporting.load(workdir) for workdir in workdirs]
  reporting.write_runs(found, folder, told.append)
  assert_short(told)
  return (folder / 'report.md').read_text(), told[0], found


def test_seeds_have_their_mean_and_deviation(merged, tmp_path):
  markdown, _, found = write_merged(merged['multiplicative_weights'], tmp_path)
  assert markdown.startswith('# mnist, 3 runs\n')
  text = section(markdown, 'Accuracy')
  standard, paper, _ = tables_of(text)
  for protocol, table in (('standard', standard), ('paper', paper)):
    for network in NETWORKS:
      for row in ROWS:
        values = [
          percent(run.evaluations[network][protocol], row) for run in found
        ]
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        assert table[row][network] == f'{mean:.1f} (± {deviation:.1f})'
  assert 'Mult. weights with seeds 0, 1, 2' in text
  (cost,) = tables_of(section(markdown, 'Cost'))
  assert list(cost) == [f'Mult. weights, seed {seed}' for seed in range(3)]


def test_methods_have_columns_of_their_own(merged, tmp_path):
  everything = [run for method in merged.values() for run in method]
  # Seeds need not come method by method.
  markdown, said, found = write_merged(everything[::-1], tmp_path)
  tables = tables_of(section(markdown, 'Accuracy'))
  titles = {
    'multiplicative_weights': 'Mult. weights',
    'round_robin': 'Round robin',
    'single pixel_l2': 'Single pixel_l2',
  }
  # A table for each protocol and network, and two of the paper's columns.
  assert len(tables) == 2 * 3 + 2
  networks = ('h=2 average', 'h=1', 'h=2 ensemble')  # The output comes first.
  for i, (protocol, network) in enumerate(
    itertools.product(('standard', 'paper'), networks)
  ):
    assert set(tables[i]['min']) == {'accuracy, %', *titles.values()}
    for method, title in titles.items():
      values = [
        percent(run.evaluations[network][protocol], 'union')
        for run in found
        if run.method == method
      ]
      mean = statistics.mean(values)
      assert tables[i]['union'][title].startswith(f'{mean:.1f} (')
  unions = {
    title: statistics.mean(
      percent(run.evaluations['h=2 average']['standard'], 'union')
      for run in found
      if run.method == method
    )
    for method, title in titles.items()
  }
  # The most robust first.
  said = words_of(said)
  places = [said.index(title) for title in unions if title in said]
  assert len(places) == 3
  assert sorted(unions, key=unions.get, reverse=True) == sorted(
    unions, key=said.index
  )


def test_what_a_run_failed_is_in_the_table(tmp_path):
  found = [
    make_run(
      tmp_path / str(seed),
      [make_outcomes(by=by, **about())],
      seed=seed,
    )
    for seed, by in ((0, 0), (1, 3))
  ]
  markdown, said, _ = write_merged(found, tmp_path)
  (table,) = tables_of(section(markdown, 'Can these figures be believed?'))
  assert list(table) == ['Mult. weights, seed 1: h=2 average']
  assert '1 of 2 runs' in said


@pytest.mark.parametrize(
  ('fields', 'more', 'message'),
  [
    ({'preset': 'released'}, {}, "preset: 'paper' and 'released'"),
    ({'data.name': 'cifar10'}, {}, "data.name: 'mnist' and 'cifar10'"),
    ({'train.T': 4}, {}, 'train.T: 3 and 4'),
    ({'policy.eta': 0.3}, {}, 'policy.eta: 0.1 and 0.3'),
    ({'seed': 0}, {}, 'with seed 0'),
    ({}, {'count': 30}, 'images: 40 and 30'),
    ({}, {'protocol': 'fast'}, "protocols: 'standard' and 'fast'"),
    ({}, about(step=2), 'outer step: 3 and 2'),
    ({}, {'threats': attacks.six_threats(1, 1, 1)}, 'pixel linf 1 inside'),
  ],
  ids=lambda value: '' if isinstance(value, str) else ' '.join(value),
)
def test_what_cannot_be_merged_is_named(tmp_path, fields, more, message):
  first = make_run(tmp_path / 'first', [make_outcomes(**about())])
  outcomes = make_outcomes(**about() | more)
  other = make_run(tmp_path / 'other', [outcomes], **{'seed': 1} | fields)
  with pytest.raises(UserError, match=message) as error:
    reporting.write_runs([*map(reporting.load, (first, other))], tmp_path)
  assert str(first) in str(error.value)
  assert str(other) in str(error.value)
  assert not list(tmp_path.glob('report*'))


def test_attacks_that_changed_are_named(tmp_path):
  outcomes = make_outcomes(**about())
  first = make_run(tmp_path / 'first', [outcomes])
  for threat in outcomes.settings['threats']:
    threat['attacks']['fab-t']['steps'] = 11
  other = make_run(tmp_path / 'other', [outcomes], seed=1)
  with pytest.raises(UserError, match=r"standard.fab-t.l1: .*'steps': 11"):
    runs.check_mergeable([*map(reporting.load, (first, other))])


def test_methods_may_differ_in_their_policy_only(tmp_path):
  greedy = {'method': 'greedy', 'policy.eta': 0.3}
  found = [
    make_run(tmp_path / 'a'),
    make_run(tmp_path / 'b', **greedy),
    make_run(tmp_path / 'c', **greedy, **{'seed': 1, 'train.log_every': 7}),
  ]
  runs.check_mergeable([*map(reporting.load, found)])
  longer = make_run(tmp_path / 'd', **greedy | {'train.T': 4})
  with pytest.raises(UserError, match=r'train.T: 3 and 4'):
    runs.check_mergeable([*map(reporting.load, [found[0], longer])])


# ------------------------------------------------------------ the command line


def run_report(*words):
  return subprocess.run(
    [sys.executable, '-m', 'mwrobust.report', *map(str, words)],
    capture_output=True,
    text=True,
    cwd=ROOT,
    check=False,
  )


@pytest.mark.parametrize('words', [[], ['nowhere']])
def test_what_cannot_be_reported_is_said_in_a_line(words):
  result = run_report(*words)
  assert result.returncode == 1
  assert all(word in result.stderr for word in words)
  assert result.stderr.strip().count('\n') == 0


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


def test_evaluations_from_the_command_line(evaluated, tmp_path):
  folders = [tmp_path / name for name in ('standard', 'paper', 'curve')]
  for folder, outcomes in zip(folders, evaluated, strict=True):
    folder.mkdir()
    outcomes.save(folder / evaluation.FILE)
  result = run_report(folders[0])
  assert result.returncode == 0, result.stderr
  text = (folders[0] / 'report.md').read_text()
  assert 'Accuracy over the radius' not in headings_of(text)
  result = run_report(*folders, f'--output={tmp_path / "all"}')
  assert result.returncode == 0, result.stderr
  text = (tmp_path / 'all' / 'report.md').read_text()
  assert 'Accuracy over the radius' in headings_of(text)
  result = run_report(folders[2])
  assert result.returncode == 1
  assert str(folders[2]) in result.stderr
  # `mwrobust.evaluate` keeps the curve in a subfolder.
  folders[2].rename(folders[0] / 'curve')
  result = run_report(folders[0])
  assert result.returncode == 0, result.stderr
  text = (folders[0] / 'report.md').read_text()
  assert 'Accuracy over the radius' in headings_of(text)


def test_reports_need_no_flax():
  program = (
    'import sys, mwrobust.reporting, mwrobust.report\n'
    'print(*{name.partition(".")[0] for name in sys.modules})'
  )
  result = subprocess.run(
    [sys.executable, '-c', program],
    capture_output=True,
    text=True,
    check=True,
    cwd=ROOT,
  )
  imported = set(result.stdout.split())
  assert 'mwrobust' in imported
  assert not imported & {'flax', 'orbax', 'optax'}
  assert not [name for name in imported if name.startswith('tensorflow')]


def test_the_writer_does_not_import_the_reader():
  program = (
    'import sys, mwrobust.evaluation, mwrobust.training.evaluation\n'
    'print(*(n for n in sys.modules if n.startswith("mwrobust.reporting")))'
  )
  result = subprocess.run(
    [sys.executable, '-c', program],
    capture_output=True,
    text=True,
    check=True,
    cwd=ROOT,
  )
  assert result.stdout.strip() == ''


# --------------------------------------------------------------- in the browser

LOOK = """(() => {
  const page = document.documentElement.clientWidth;
  const x = [...document.querySelectorAll('.plot .x')];
  return {
    headings: [...document.querySelectorAll('h2')].map(h => h.textContent),
    images: document.images.length,
    broken: [...document.images].filter(i => !i.naturalWidth).length,
    bars: document.querySelectorAll('.bars svg').length,
    outside: [...document.querySelectorAll('.bars *, .callout, h1, p')].filter(
      e => e.getBoundingClientRect().right > page + 1).length,
    touching: x.slice(1).filter((e, i) => {
      const a = x[i].getBoundingClientRect(), b = e.getBoundingClientRect();
      return a.top == b.top && b.left < a.right + 2 && b.left > a.left;
    }).map(e => e.textContent),
    text: document.body.innerText,
  };
})()"""


@pytest.mark.parametrize(
  ('width', 'dark'), [(360, False), (390, True), (1200, True)]
)
def test_a_browser_shows_the_report(reported_run, width, dark):
  run, _, _ = reported_run
  visit = browse(run / 'report.html', width, dark, script=LOOK)
  assert visit.title == 'mnist, Mult. weights'
  assert visit.console == []
  assert visit.requests == [(run / 'report.html').as_uri()]
  assert visit.scroll_width <= width
  assert (visit.background == 'rgb(255, 255, 255)') == (not dark)
  found = visit.value
  assert found['headings'] == list(RUN_HEADINGS)
  assert found['images'] == 3 * (1 + 2 * 6)
  assert found['broken'] == found['outside'] == 0
  assert found['touching'] == []
  assert found['bars'] == 1 + 2 * 7  # Natural; six threats and the union.
  assert 'gradient masking' in found['text']


def test_seven_radii_fit_on_a_phone(tmp_path):
  curve = make_outcomes(protocol='fast', radii=evaluation.RADII)
  reporting.write(make_outcomes(), tmp_path, curve, ignore)
  visit = browse(tmp_path / 'report.html', 360, script=LOOK)
  assert visit.scroll_width <= 360
  assert visit.value['touching'] == []
