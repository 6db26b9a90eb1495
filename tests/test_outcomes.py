import os

import numpy as np
import pytest
import scipy.stats

from mwrobust import attacks
from mwrobust.errors import UserError
from mwrobust.outcomes import Outcomes, wilson
from mwrobust.steps import Attacked

RNG = np.random.default_rng(0)
PAIRS = tuple(
  (
    threat,
    attacks.slide(20, percentile=95)
    if threat.norm == 'l1'
    else attacks.pgd(10),
  )
  for threat in attacks.six_threats(0.1, 0.5, 2.0)
)
N = 40


def begin(restarts=3, **changes):
  labels = RNG.integers(0, 3, N).astype(np.int32)
  logits = 4 * np.eye(3, dtype=np.float32)[labels] - 2
  logits[:4] *= -1  # These are wrong.
  options = {
    'settings': {'seed': 0},
    'pairs': PAIRS,
    'restarts': restarts,
    'labels': labels,
    'logits': logits,
    'logits_again': logits[:10],
    'images': RNG.integers(0, 256, (2, 4, 4, 1), dtype=np.uint8),
  }
  return Outcomes.begin(**options | changes)


def attacked(rows, labels, correct, loss):
  rows = np.asarray(rows)
  wrong = (labels[rows] + 1) % 3
  return Attacked(
    images=np.full((len(rows), 4, 4, 1), loss, np.float32),
    predicted=np.where(correct, labels[rows], wrong),
    loss=np.full(len(rows), loss, np.float32),
    norm=np.full(len(rows), loss, np.float32),
    norm_clipped=np.full(len(rows), loss, np.float32),
    stuck=np.zeros(len(rows), bool),
  )


def test_an_example_is_attacked_until_it_falls():
  outcomes = begin()
  everyone = np.arange(N)
  np.testing.assert_array_equal(outcomes.survivors(1, 0), everyone)
  stands = everyone % 2 == 0
  outcomes.record(
    1, everyone, attacked(everyone, outcomes.labels, stands, loss=1.0)
  )
  assert outcomes.survivors(1, 0).size == 0
  survivors = outcomes.survivors(1, 1)
  np.testing.assert_array_equal(survivors, everyone[stands])
  # A lower loss is not told, a fall is, whatever its loss.
  falls = survivors % 4 == 0
  outcomes.record(
    1, survivors, attacked(survivors, outcomes.labels, ~falls, loss=0.5)
  )
  told = np.where(everyone % 4 == 0, 0.5, 1.0)
  for field in ('loss', 'norm', 'norm_clipped'):
    np.testing.assert_array_equal(getattr(outcomes, field)[1], told)
  np.testing.assert_array_equal(outcomes.adversarial[1, :, 0, 0, 0], [0.5, 1])
  np.testing.assert_array_equal(outcomes.correct[1], everyone % 4 == 2)
  np.testing.assert_array_equal(outcomes.correct_after(1)[1], stands)
  np.testing.assert_array_equal(
    outcomes.predicted[1] == outcomes.labels, outcomes.correct[1]
  )
  done, full = outcomes.gradient_evaluations()
  assert done == PAIRS[1][1].steps * (N + N // 2)
  assert full == 3 * N * sum(attack.steps for _, attack in PAIRS)
  assert not outcomes.complete


def test_a_network_that_answers_nan_is_fooled():
  outcomes = begin()
  rows = np.arange(N)
  answers = attacked(rows, outcomes.labels, True, loss=np.nan)
  outcomes.record(0, rows, answers)
  assert not outcomes.correct[0].any()


def filled():
  outcomes = begin(restarts=1)
  everyone = np.arange(N)
  for threat in range(6):
    stands = RNG.random(N) < 0.8
    stands[-1] = True
    outcomes.record(
      threat, everyone, attacked(everyone, outcomes.labels, stands, loss=1.0)
    )
  assert outcomes.complete
  return outcomes


def test_every_figure_comes_from_the_matrix():
  outcomes = filled()
  accuracies = outcomes.accuracies()
  correct = outcomes.correct.tolist()
  for name, row in zip(outcomes.threats, correct, strict=True):
    assert accuracies[name] == pytest.approx(100 * sum(row) / N)
  union = sum(all(row[n] for row in correct) for n in range(N))
  assert accuracies['union'] == pytest.approx(100 * union / N)
  assert accuracies['min'] == min(accuracies[n] for n in outcomes.threats)
  assert accuracies['natural'] == pytest.approx(100 * (N - 4) / N)


def test_overlap_and_unique_kills_count_what_needed_fooling():
  outcomes = filled()
  fooled = [
    {n for n in range(4, N) if not outcomes.correct[i, n]} for i in range(6)
  ]
  for i in range(6):
    others = set().union(*(fooled[j] for j in range(6) if j != i))
    assert outcomes.unique_kills()[i] == len(fooled[i] - others)
    for j in range(6):
      assert outcomes.overlap()[i, j] == len(fooled[i] & fooled[j])


def test_what_is_loaded_is_what_was_saved(tmp_path):
  outcomes = filled()
  outcomes.save(tmp_path / 'eval' / 'h=1.npz')
  loaded = Outcomes.load(tmp_path / 'eval' / 'h=1.npz')
  for field, value in vars(outcomes).items():
    np.testing.assert_array_equal(getattr(loaded, field), value)
    assert type(getattr(loaded, field)) is type(value)


@pytest.mark.parametrize('size', [0, 40, 2000])
def test_a_torn_file_is_told(size, tmp_path):
  path = tmp_path / 'h=1.npz'
  filled().save(path)
  os.truncate(path, size)
  with pytest.raises(UserError, match=r'h=1\.npz cannot be read as an eval'):
    Outcomes.load(path)


def test_no_objects_are_unpickled(tmp_path):
  path = tmp_path / 'h=1.npz'
  np.savez(path, settings=np.array([{}], dtype=object))
  with pytest.raises(UserError, match='cannot be read'):
    Outcomes.load(path)


@pytest.mark.parametrize('successes', [0, 1, 37, 99, 100])
def test_intervals_are_those_of_scipy(successes):
  expected = scipy.stats.binomtest(successes, 100).proportion_ci(
    method='wilson'
  )
  np.testing.assert_allclose(
    wilson(successes, 100), (100 * expected.low, 100 * expected.high), 1e-6,
    atol=1e-9,
  )  # fmt: skip
