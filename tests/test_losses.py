import jax
import numpy as np
import optax
import pytest

from mwrobust.attacks import losses

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(7, 5)).astype(np.float32) * 10
LABELS = RNG.integers(0, 5, size=7)


def test_cross_entropy_agrees_with_optax():
  expected = optax.softmax_cross_entropy_with_integer_labels(LOGITS, LABELS)
  found = losses.cross_entropy(LOGITS, LABELS)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('scale', [1e-9, 1e-4, 1.0, 1e4, 1e30])
def test_log_odds_are_exact_at_every_scale(scale):
  logits = scale * LOGITS
  ahead = np.float64(logits) - np.take_along_axis(logits, LABELS[:, None], 1)
  others = np.arange(5) != LABELS[:, None]
  most = ahead.max(1, where=others, initial=-np.inf)
  odds = np.exp(ahead - most[:, None], where=others, out=np.zeros_like(ahead))
  expected = most + np.log(odds.sum(1) / 4)
  found, gradient = jax.vmap(jax.value_and_grad(
    lambda row, label: losses.log_odds(row[None], label[None])[0]
  ))(logits, LABELS)  # fmt: skip
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  expected = odds / odds.sum(1, keepdims=True) - ~others
  np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_log_odds_rise_with_the_cross_entropy():
  order = np.argsort(losses.cross_entropy(LOGITS, LABELS))
  odds = np.asarray(losses.log_odds(LOGITS, LABELS))
  assert (np.diff(odds[order]) >= 0).all()


def test_margin_is_above_zero_exactly_for_errors():
  margin = losses.margin(LOGITS, LABELS)
  for row, label, found in zip(LOGITS, LABELS, margin, strict=True):
    others = np.delete(row, label).max()
    assert found == pytest.approx(others - row[label])
  assert ((margin > 0) == (LOGITS.argmax(-1) != LABELS)).all()


def by_hand(row, label, target=None):
  """Returns AutoAttack's DLR of one row."""
  ordered = np.sort(row)[::-1]
  if target is None:
    other = np.delete(row, label).max()
    return (other - row[label]) / (ordered[0] - ordered[2])
  scale = ordered[0] - (ordered[2] + ordered[3]) / 2
  return (row[target] - row[label]) / scale


def test_dlr_is_autoattacks():
  targets = (LABELS + 1) % 5
  found = losses.dlr(LOGITS, LABELS)
  targeted = losses.targeted_dlr(LOGITS, LABELS, targets)
  for i, (row, label) in enumerate(zip(LOGITS, LABELS, strict=True)):
    assert found[i] == pytest.approx(by_hand(row, label), rel=1e-4)
    expected = by_hand(row, label, targets[i])
    assert targeted[i] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize('classes', [2, 3])
@pytest.mark.parametrize('name', losses.LOSSES)
def test_few_classes_have_a_slope(name, classes):
  logits = np.array([[2.0, -1.0, 0.5], [0.1, 0.2, 0.3]], np.float32)
  logits, labels = logits[:, :classes], np.array([0, 1])
  targets = 1 - labels
  for loss in (
    lambda z: losses.LOSSES[name](z, labels),
    lambda z: losses.TARGETED[name](z, labels, targets),
  ):
    gradient = jax.grad(lambda z, loss=loss: loss(z).sum())(logits)
    assert np.isfinite(gradient).all()
    assert (gradient[np.arange(2), labels] < 0).all()


def test_dlr_has_a_slope_where_all_other_logits_are_tied():
  logits, labels = np.array([[5.0, 0, 0, 0, 0]], np.float32), np.array([0])
  for loss in (
    lambda z: losses.dlr(z, labels),
    lambda z: losses.targeted_dlr(z, labels, np.array([1])),
  ):
    gradient = jax.grad(lambda z, loss=loss: loss(z).sum())(logits)
    assert gradient[0, 0] < -0.1


def test_probability_margin():
  found = losses.probability_margin(LOGITS, LABELS)
  softmax = np.exp(LOGITS - LOGITS.max(1, keepdims=True))
  softmax /= softmax.sum(1, keepdims=True)
  expected = losses.margin(softmax, LABELS)
  np.testing.assert_allclose(found, expected, atol=1e-6)
