import numpy as np
import optax
import pytest

from mwrobust import losses

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(7, 5)).astype(np.float32) * 10
LABELS = RNG.integers(0, 5, size=7)


def test_cross_entropy_agrees_with_optax():
  expected = optax.softmax_cross_entropy_with_integer_labels(LOGITS, LABELS)
  found = losses.cross_entropy(LOGITS, LABELS)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_margin_is_above_zero_exactly_for_errors():
  margin = losses.margin(LOGITS, LABELS)
  for row, label, found in zip(LOGITS, LABELS, margin, strict=True):
    others = np.delete(row, label).max()
    assert found == pytest.approx(others - row[label])
  assert ((margin > 0) == (LOGITS.argmax(-1) != LABELS)).all()
