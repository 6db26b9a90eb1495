import numpy as np
import pytest

from mwrobust import accuracies, paper
from mwrobust import config as config_lib
from mwrobust.outcomes import Outcomes


@pytest.mark.parametrize('data', ['mnist', 'cifar10'])
def test_a_run_of_the_paper_is_said_to_be_one(data):
  config = config_lib.preset('paper', data)
  config.seed = 3
  config.data.dir = '/data'
  config.policy.name = 'greedy'
  config.eval.restarts = 20
  config.train.log_every = 7
  text = accuracies.comparability(config)
  assert text.startswith('Network, data and numbers are those of the paper.')


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    *[('train.T', 3), ('threats.eps_l1', 7.0), ('model.name', 'cnn')],
    *[('train.pgd_steps', 2), ('threats.spaces', ('pixel',))],
    *[('eval.pgd_steps', 2), ('eval.slide_steps', 2), ('eval.examples', 100)],
  ],
)
def test_a_run_of_other_numbers_is_not(field, value):
  config = config_lib.preset('paper', 'mnist')
  group, name = field.split('.')
  config[group][name] = value
  text = accuracies.comparability(config)
  assert text.startswith("NOT the paper's setting")
  assert f'{field} {value}' in text


def test_the_released_numbers_are_not_those_of_the_paper():
  text = accuracies.comparability(config_lib.preset('released', 'cifar10'))
  assert "NOT the paper's setting" in text
  assert 'model.name resnet_v1_50 (paper: resnet50)' in text
  assert 'threats.eps_l2 1.0 (paper: 0.1)' in text


@pytest.mark.parametrize(
  ('mean', 'std', 'verdict'),
  [
    (50.0, 0.1, 'alike\n+0.0'),
    (55.0, 5.0, 'alike\n-5.0'),
    (45.0, 5.0, 'alike\n+5.0'),
    (55.1, 5.0, 'lower\n-5.1'),
    (44.9, 5.0, 'higher\n+5.1'),
  ],
)
def test_verdicts_are_by_the_spread_of_the_paper(tiny_run, mean, std, verdict):
  seeds = []
  for stands in (12, 18):  # 40 % and 60 %.
    outcomes = Outcomes.load(tiny_run / 'eval' / 'h=1.npz')
    outcomes.correct[0] = np.arange(30) < stands
    seeds.append(outcomes)
  figure = paper.Figure(mean, std)
  assert accuracies.beside_the_paper(seeds, figure, 'pixel_linf') == (
    f'50.00\n{mean:.2f} ± {std:.2f}',
    verdict,
  )
  assert accuracies.beside_the_paper(seeds, None, 'pixel_linf') == (
    '50.00',
    '-',
  )
