"""Each check is shown what it is there for."""

import dataclasses

import numpy as np
import pytest
from test_outcomes import PAIRS, N, begin, filled

from mwrobust import attacks, health
from mwrobust.outcomes import Outcomes


def found(outcomes, probed=None, widened=None, validation_loss=None):
  checks = health.checks(outcomes, validation_loss, probed, widened)
  return {check.name: check for check in checks}


def probe(outcomes, fall=()):
  """Probes that fool the rows (way, threat, example) and nobody else."""
  correct = np.tile(outcomes.correct, (len(health.WAYS), 1, 1))
  for index in fall:
    correct[index] = False
  return dataclasses.replace(outcomes, correct=correct.reshape(-1, N))


def widen(outcomes):
  """Half of eps fools nobody, more of it everybody."""
  k = len(outcomes.threats)
  correct = np.zeros((len(health.RADII), k, N), bool)
  correct[0] = True
  return dataclasses.replace(outcomes, correct=correct.reshape(-1, N))


def test_a_healthy_evaluation_passes_everything():
  outcomes = filled()
  outcomes.norm[:] = 0.9 * outcomes.eps[:, None]
  losses = dict(zip(outcomes.threats, outcomes.loss.mean(axis=1), strict=True))
  checks = found(outcomes, probe(outcomes), widen(outcomes), losses)
  assert all(check.passed for check in checks.values()), checks
  assert list(checks) == [
    *('zero gradients', 'logits', 'deterministic', 'inside the ball'),
    "training's attacks",
    *('one more start', 'margin loss', 'twice the steps'),
    *('apgd from larger balls', 'wide radii'),
  ]


def test_zero_gradients_of_those_that_stand():
  outcomes = filled()
  outcomes.stuck[:] = ~outcomes.correct
  assert found(outcomes)['zero gradients'].passed
  outcomes.stuck[2, np.flatnonzero(outcomes.correct[2])[0]] = True
  check = found(outcomes)['zero gradients']
  assert not check.passed
  assert '2.5 % of the examples stand' in check.finding
  assert 'pixel_l1' in check.finding


def test_probabilities_as_logits():
  outcomes = filled()
  softmax = np.exp(outcomes.logits)
  outcomes.logits = softmax / softmax.sum(axis=1, keepdims=True)
  assert not found(outcomes)['logits'].passed
  outcomes.logits = np.log(outcomes.logits)  # Those are logits.
  assert found(outcomes)['logits'].passed


def test_a_randomised_network():
  outcomes = filled()
  outcomes.logits_again = outcomes.logits_again + np.float32(0.1)
  assert not found(outcomes)['deterministic'].passed


def test_a_perturbation_outside_of_its_ball():
  outcomes = filled()
  outcomes.norm[:] = outcomes.eps[:, None]
  outcomes.norm[4, 7] *= 1.01
  check = found(outcomes)['inside the ball']
  assert not check.passed
  assert '1.0100 eps, dct_l2' in check.finding


@pytest.mark.parametrize(
  ('way', 'name'),
  list(enumerate(health.WAYS)),
)
def test_a_stronger_attack(way, name):
  outcomes = filled()
  stands = np.flatnonzero(outcomes.union)[0]
  checks = found(outcomes, probe(outcomes, [(way, 3, stands)]))
  assert [n for n, check in checks.items() if not check.passed][-1] == name
  assert '2.5 points at most, dct_linf' in checks[name].finding
  assert 'union by 2.5' in checks[name].finding


def test_the_unions_after_each_way_and_after_all():
  outcomes = filled()
  first, second, *_ = np.flatnonzero(outcomes.union)
  probed = probe(outcomes, [(1, 0, first), (3, 5, first), (3, 2, second)])
  whole, one = 100 * outcomes.union.mean(), 100 / N
  assert health.unions(outcomes, probed) == {
    'as evaluated': pytest.approx(whole),
    'one more start': pytest.approx(whole),
    'margin loss': pytest.approx(whole - one),
    'twice the steps': pytest.approx(whole),
    'apgd from larger balls': pytest.approx(whole - 2 * one),
    'all of these': pytest.approx(whole - 2 * one),
  }
  # The ways are the stronger for not finding the same.
  probed = probe(outcomes, [(1, 0, first), (3, 2, second)])
  together = health.unions(outcomes, probed)['all of these']
  assert together == pytest.approx(whole - 2 * one)


def test_restarts_that_still_help():
  outcomes = begin(restarts=4)
  outcomes.starts[:] = 4
  assert found(outcomes)['starts 3 to 4'].passed
  outcomes.correct[0, 5] = False
  outcomes.starts[0, 5] = 2  # Fell at the second: known before.
  assert found(outcomes)['starts 3 to 4'].passed
  outcomes.starts[0, 5] = 3
  assert not found(outcomes)['starts 3 to 4'].passed


def test_the_probes_are_the_same_threats_climbing_otherwise():
  k = len(PAIRS)
  probes = health.probes(PAIRS)
  assert len(probes) == 4 * k
  for i, (threat, attack) in enumerate(PAIRS):
    same, margin, longer, apgd = probes[i::k]
    assert same == (threat, attack)
    assert margin == (threat, dataclasses.replace(attack, loss='margin'))
    # Without the size that is said here it would be half of that.
    size = 2.5 * threat.eps / attack.steps
    assert longer == (
      threat,
      dataclasses.replace(attack, steps=2 * attack.steps, step_size=size),
    )
    assert apgd == (threat, attacks.apgd(attack.steps, loss='dlr'))
    assert max(apgd[1].radii) > 1


@pytest.mark.parametrize('steps', [1, 2, 3])
def test_few_steps_are_enough_for_all_probes(steps):
  threat, _ = PAIRS[0]
  _, attack = health.probes([(threat, attacks.pgd(steps))])[-1]
  assert attack.steps == len(attack.radii) == steps


def test_what_is_saved_of_the_probes_is_what_is_compared_with(tmp_path):
  outcomes = begin(settings={'seed': 0})
  for ways in (health.probes(PAIRS), health.wider(PAIRS)):
    settings = health.settings(outcomes, ways)
    path = tmp_path / 'saved.npz'
    begin(settings=settings).save(path)
    assert Outcomes.load(path).settings == settings


def test_the_curve_begins_without_an_attack():
  outcomes = filled()
  curve = health.curve(outcomes, widen(outcomes))
  for name in outcomes.threats:
    assert curve[name] == [
      (0, 100 * outcomes.natural.mean()),
      (0.5, 100),
      *((scale, 0) for scale in health.RADII[1:]),
    ]


def test_a_wide_radius_that_fools_not_everyone():
  outcomes = filled()
  widened = widen(outcomes)
  k = len(outcomes.threats)
  widened.correct[-1, 3] = True  # The widest of the last threat.
  # The steps were too coarse: this image fell in a smaller ball.
  assert found(outcomes, widened=widened)['wide radii'].passed
  widened.correct[k - 1 :: k, 3] = True
  check = found(outcomes, widened=widened)['wide radii']
  assert not check.passed
  assert 'at 32 eps the accuracy is 2.5 % and hardly falls' in check.finding
  assert 'dct_l1' in check.finding
  # Half of that radius has fooled less.
  widened.correct[k - 1 : -1 : k, :4] = True
  assert found(outcomes, widened=widened)['wide radii'].passed


def test_wider_threats_differ_in_their_radius_only():
  wider = health.wider(PAIRS)
  assert len(wider) == 6 * len(health.RADII)
  threat, attack = PAIRS[1]
  assert wider[13] == (dataclasses.replace(threat, eps=2 * threat.eps), attack)


def test_a_network_that_hides_from_the_attacks_of_training():
  outcomes = filled()
  losses = dict(zip(outcomes.threats, outcomes.loss.mean(axis=1), strict=True))
  losses['dct_l2'] /= 3
  check = found(outcomes, validation_loss=losses)["training's attacks"]
  assert not check.passed
  assert 'under dct_l2 the mean loss is' in check.finding
