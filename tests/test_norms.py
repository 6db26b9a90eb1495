import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mwrobust import norms

N = 24
NORMS = pytest.mark.parametrize(
  'norm', norms.NORMS.values(), ids=lambda norm: norm.name
)
# Shared compiled functions: a whole table of rows at a time.
PROJECT = {
  norm.name: jax.jit(jax.vmap(norm.project, (0, None)))
  for norm in norms.NORMS.values()
}
ASCEND = {
  norm.name: jax.jit(jax.vmap(norm.ascend, (0, None)), static_argnums=1)
  for norm in norms.NORMS.values()
}
ORD = {'linf': np.inf, 'l2': 2, 'l1': 1}


def oracle_project(name, x, eps):
  """The projection of one row in float64, by textbook or by bisection."""
  x = np.asarray(x, np.float64)
  if np.linalg.norm(x, ORD[name]) <= eps:
    return x
  if name == 'linf':
    return np.clip(x, -eps, eps)
  if name == 'l2':
    return x * (eps / np.linalg.norm(x))
  # Bisection on the threshold, measured from the top to keep the digits.
  size = np.abs(x)
  low, high = -float(eps), 0.0
  for _ in range(200):
    middle = (low + high) / 2
    total = np.maximum(size - size.max() - middle, 0).sum()
    low, high = (middle, high) if total > eps else (low, middle)
  return np.sign(x) * np.maximum(size - size.max() - high, 0)


def awkward_rows():
  rng = np.random.default_rng(0)
  normal = rng.normal(size=(6, N))
  sparse = normal * (rng.uniform(size=normal.shape) < 0.1)
  tied = rng.integers(-2, 3, size=(6, N))
  one_hot = 7.0 * np.eye(N)[:2]
  rows = [normal, sparse, tied, np.zeros((1, N)), np.ones((1, N)), one_hot]
  rows = np.concatenate(rows)
  scales = [1e-20, 1e-6, 1.0, 1e6, 1e20, 1e37]
  return np.concatenate([scale * rows for scale in scales]).astype(np.float32)


@NORMS
@pytest.mark.parametrize('eps', [1e-20, 1e-3, 0.3, 5.0, 1e4])
def test_projection_agrees_with_the_oracle(norm, eps):
  eps = np.float32(eps)
  rows = awkward_rows()
  projected = PROJECT[norm.name](rows, eps)
  expected = np.stack([oracle_project(norm.name, row, eps) for row in rows])
  np.testing.assert_allclose(projected, expected, rtol=2e-6, atol=2e-6 * eps)


def assert_is_projection(name, x, projected, eps):
  """Inside the ball; bit-identical if x was; else the KKT conditions."""
  assert np.isfinite(projected).all()
  wide, result = x.astype(np.float64), projected.astype(np.float64)
  assert np.linalg.norm(result, ORD[name]) <= eps * (1 + 1e-5)
  # Nearer to the border than float32 can tell, both answers are right.
  if np.linalg.norm(wide, ORD[name]) <= eps * (1 - 1e-6):
    assert (projected == x).all()
  elif np.linalg.norm(wide, ORD[name]) > eps:
    residual = wide - result
    # Optimal iff the residual's dual norm is attained on the ball at result:
    # <residual, result> = eps ||residual||_dual.
    dual = np.linalg.norm(residual, {'linf': 1, 'l2': 2, 'l1': np.inf}[name])
    scale = eps * max(dual, np.abs(wide).max())
    np.testing.assert_allclose(
      np.vdot(residual, result), eps * dual, atol=1e-5 * scale, rtol=0
    )


@NORMS
@pytest.mark.parametrize('eps', [1e-20, 0.3, 1e4])
def test_projection_satisfies_the_kkt_conditions(norm, eps):
  eps = np.float32(eps)
  rows = awkward_rows()
  for x, projected in zip(rows, PROJECT[norm.name](rows, eps), strict=True):
    assert_is_projection(norm.name, x, np.asarray(projected), eps)


finite = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
tied = st.sampled_from([0.0, 1.0, -1.0, 2.0, 0.5])


@NORMS
@settings(max_examples=60, deadline=None)
@given(
  x=st.one_of(
    hnp.arrays(np.float32, N, elements=elements) for elements in (finite, tied)
  ),
  eps=st.floats(2.0**-20, 2.0**20, width=32),
)
def test_projection_property(norm, x, eps):
  projected = PROJECT[norm.name](x[None], np.float32(eps))[0]
  assert_is_projection(norm.name, x, np.asarray(projected), np.float32(eps))


@NORMS
def test_projection_does_not_couple_rows(norm):
  rows = awkward_rows()
  together = PROJECT[norm.name](rows, 0.3)
  alone = [PROJECT[norm.name](row[None], 0.3)[0] for row in rows]
  np.testing.assert_allclose(together, np.stack(alone), rtol=1e-6, atol=3e-7)


@NORMS
def test_length_agrees_with_numpy(norm):
  rows = awkward_rows()
  expected = np.linalg.norm(rows.astype(np.float64), ORD[norm.name], axis=1)
  fits = expected < np.finfo(np.float32).max
  lengths = jax.vmap(norm.length)(rows)
  np.testing.assert_allclose(lengths[fits], expected[fits], rtol=1e-5)


@NORMS
@pytest.mark.parametrize('percentile', [0.0, 50.0, 95.0, 99.9])
@pytest.mark.parametrize('scale', [1e-20, 1.0, 1e20])
def test_ascend_is_a_unit_step_whatever_the_scale(norm, percentile, scale):
  rows = np.random.default_rng(1).normal(size=(5, N)).astype(np.float32)
  step = np.asarray(ASCEND[norm.name](rows * np.float32(scale), percentile))
  lengths = np.linalg.norm(step, ORD[norm.name], axis=1)
  np.testing.assert_allclose(lengths, 1, rtol=1e-5)
  assert ((step == 0) | (np.sign(step) == np.sign(rows))).all()
  reference = ASCEND[norm.name](rows, percentile)
  np.testing.assert_allclose(step, reference, rtol=1e-5, atol=1e-6)


@NORMS
def test_ascend_survives_degenerate_gradients(norm):
  rows = np.zeros((4, N), np.float32)
  rows[1] = np.nan
  rows[2, 3] = -np.inf
  rows[3, :2] = [np.inf, np.nan]
  step = np.asarray(ASCEND[norm.name](rows, 95.0))
  assert (step[:2] == 0).all()  # No slope, no step.
  assert step[2, 3] == -1
  assert step[3, 0] == 1
  assert np.isfinite(step).all()


@pytest.mark.parametrize('percentile', [0.0, 33.0, 75.0, 95.0, 99.0])
def test_slide_moves_the_top_coordinates(percentile):
  rows = np.random.default_rng(2).normal(size=(20, N)).astype(np.float32)
  keep = max(1, N - int(np.floor(percentile * N / 100)))
  step = np.asarray(ASCEND['l1'](rows, percentile))
  order = np.argsort(-np.abs(rows), axis=1, kind='stable')
  expected = np.zeros_like(rows)
  for row, sign, top in zip(expected, np.sign(rows), order, strict=True):
    row[top[:keep]] = sign[top[:keep]] / keep
  np.testing.assert_allclose(step, expected, rtol=1e-6)


def test_slide_leaves_zero_gradients_and_shares_among_ties():
  gradient = np.zeros((2, N), np.float32)
  gradient[0, [2, 5]] = [3.0, -1.0]  # Fewer slopes than kept coordinates.
  gradient[1, :8] = 1.0  # More ties than kept coordinates.
  step = np.asarray(ASCEND['l1'](gradient, 75.0))
  np.testing.assert_allclose(step[0, [2, 5]], [0.5, -0.5])
  np.testing.assert_allclose(step[1, :8], 1 / 8)
  assert (np.count_nonzero(step, axis=1) == [2, 8]).all()


@NORMS
def test_random_start_is_uniform_in_the_ball(norm):
  n, eps = 3, 2.0
  noise = jax.random.uniform(
    jax.random.key(0), (20_000, n + 2), minval=-1 + 1e-7
  )
  points = jax.vmap(norm.random_start, (0, None))(noise, eps)
  radii = np.linalg.norm(np.asarray(points), ORD[norm.name], axis=1) / eps
  assert radii.max() <= 1 + 1e-6
  # Uniform: the share of points within radius r is r^n, in every octant.
  for r in (0.3, 0.5, 0.7, 0.9):
    assert abs((radii <= r).mean() - r**n) < 0.015
  octants = (np.asarray(points) > 0) @ [1, 2, 4]
  assert abs(np.bincount(octants) / len(points) - 1 / 8).max() < 0.01


@NORMS
@pytest.mark.parametrize('extreme', [-1 + 6e-8, 1 - 2.4e-7])
def test_random_start_at_the_ends_of_the_noise(norm, extreme):
  noise = jnp.full(N + 2, extreme, jnp.float32)
  start = np.asarray(norm.random_start(noise, 0.5))
  assert np.isfinite(start).all()
  assert np.linalg.norm(start, ORD[norm.name]) <= 0.5 * (1 + 1e-6)


def test_unknown_norm():
  with pytest.raises(ValueError, match=r"norm='l3'.*\['l1', 'l2', 'linf'\]"):
    norms.get('l3')
