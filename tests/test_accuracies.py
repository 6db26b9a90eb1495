import dataclasses

import pytest
from made import (
  about,
  make_outcomes,
  make_run,
  run_evaluations,
  set_fields,
)

from mwrobust import attacks, reporting
from mwrobust import config as config_lib
from mwrobust.reporting import accuracies, paper


@pytest.mark.parametrize('data', ['mnist', 'cifar10'])
def test_a_run_of_the_paper_is_one(data, tmp_path):
  config = config_lib.preset('paper', data)
  outcomes = make_outcomes(config_lib.make_threats(config), **about())
  fields = {
    f'threats.{threat.name}.eps': threat.eps
    for threat in config_lib.make_threats(config)
  }
  free = {'seed': 3, 'data.dir': '/data', 'method': 'greedy'}
  workdir = make_run(
    tmp_path / 'run', [outcomes], **fields | free | {'data.name': data}
  )
  run = reporting.load(workdir)
  assert accuracies.unlike_the_paper(run) == ''
  config.seed, config.data.dir, config.train.log_every = 3, '/data', 7
  config.method, config.eval.examples = 'greedy', 100
  assert accuracies.other_fields(config) == ''


@pytest.mark.parametrize(
  ('fields', 'words'),
  [
    ({'data.name': 'mnist5k'}, 'data mnist5k (paper: mnist)'),
    ({'model.name': 'cnn'}, 'network cnn (paper: resnet50)'),
    (
      {'model.options': {'width': 32}},
      "network resnet50 ('width', 32) (paper: ",
    ),
  ],
)
def test_another_network_or_data_are_not_the_papers(fields, words, tmp_path):
  run = reporting.load(make_run(tmp_path / 'run', **fields))
  assert words in accuracies.unlike_the_paper(run)


@pytest.mark.parametrize(
  'threats',
  [
    [
      dataclasses.replace(threat, space='haar', name=threat.name)
      for threat in attacks.six_threats(0.4, 1.0, 5.0)
    ],
    attacks.six_threats(0.4, 1.0, 6.0),
    attacks.six_threats(0.4, 1.0, 5.0)[:3],
  ],
)
def test_other_threats_are_not_the_papers(threats, tmp_path):
  """The threats of the evaluation count, not those of training."""
  outcomes = make_outcomes(threats, **about())
  run = reporting.load(make_run(tmp_path / 'run', [outcomes]))
  assert 'threats pixel_linf' in accuracies.unlike_the_paper(run)


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('train.T', 3),
    ('attack.steps', 2),
    ('threats.dct_l1.attack.steps', 10),
    ('optimizer.name', 'adam'),
  ],
)
def test_what_else_differs_is_said(field, value):
  config = config_lib.preset('paper', 'mnist')
  set_fields(config, {field: value})
  assert f'{field} {value} (paper: ' in accuracies.other_fields(config)


@pytest.mark.parametrize(
  ('mean', 'std', 'verdict'),
  [
    (50.0, 0.1, 'within 1 sd, +0.0'),
    (55.0, 5.0, 'within 1 sd, -5.0'),
    (45.0, 5.0, 'within 1 sd, +5.0'),
    (55.1, 5.0, 'lower, -5.1'),
    (44.9, 5.0, 'higher, +5.1'),
  ],
)
def test_verdicts_are_by_the_spread_of_the_paper(mean, std, verdict):
  seeds = []
  for stand in (16, 24):  # 40 % and 60 %.
    outcomes = make_outcomes(share=0.0)
    outcomes.fell[0, : 40 - stand] = 0
    seeds.append(outcomes)
  figure = paper.Figure(mean, std)
  assert accuracies.beside_the_paper(seeds, figure, 'pixel_linf') == (
    '50.00',
    f'{mean:.2f} ± {std:.2f}',
    verdict,
  )
  assert accuracies.beside_the_paper(seeds, None, 'pixel_linf') == (
    *('50.00', '-', '-'),
  )


def markdown(parts):
  return '\n'.join(part.markdown for part in parts)


@pytest.mark.parametrize(
  ('protocol', 'starts'), [('paper', 1), ('paper-20', 20)]
)
def test_the_papers_protocol_is_what_is_compared(protocol, starts, tmp_path):
  found = [
    make_outcomes(protocol=name, **about('h=1')) for name in ('fast', protocol)
  ]
  run = reporting.load(make_run(tmp_path / 'run', found))
  text = markdown(accuracies.accuracy_parts([run]))
  assert text.count('beside the paper') == 1
  figure = paper.ACCURACIES['mnist', starts]['multiplicative_weights', 'h=1']
  for row in ('pixel_linf', 'union', 'natural'):
    assert f' {figure[row].mean:.2f} ± {figure[row].std:.2f} ' in text


def test_columns_and_rows_can_be_chosen(tmp_path):
  run = reporting.load(make_run(tmp_path / 'run', run_evaluations()))
  text = markdown(
    accuracies.accuracy_parts(
      [run],
      [('multiplicative_weights', 'h=1'), ('greedy', 'h=1')],
      ('dct_l1', 'natural'),
    )
  )
  assert 'h=2' not in text
  assert 'union |' not in text
  assert text.count('| dct_l1') == 3  # Two protocols, and with the paper.
