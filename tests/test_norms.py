import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mwrobust.attacks import norms

N = 24
FREE = np.full(N, -np.inf, np.float32), np.full(N, np.inf, np.float32)
NORMS = pytest.mark.parametrize(
  'norm', norms.NORMS.values(), ids=lambda norm: norm.name
)


def project_free(norm):
  """Returns the projection without a box."""
  return lambda x, eps: norm.project(x, *FREE, eps)


# Compiled functions that all tests share, each for a table of rows.
PROJECT = {
  norm.name: jax.jit(jax.vmap(project_free(norm), (0, None)))
  for norm in norms.NORMS.values()
}
PROJECT_BOX = {
  norm.name: jax.jit(jax.vmap(norm.project, (0, 0, 0, None)))
  for norm in norms.NORMS.values()
}
TO_PLANE = {
  norm.name: jax.jit(jax.vmap(norm.to_plane)) for norm in norms.NORMS.values()
}
ASCEND = {
  norm.name: jax.jit(
    jax.vmap(lambda g, keep, norm=norm: norm.ascend(g, g == g, keep), (0, None))
  )
  for norm in norms.NORMS.values()
}
ORD = {'linf': np.inf, 'l2': 2, 'l1': 1}


def bisect(function, low, high):
  """Returns the root of a rising function, in float64."""
  for _ in range(400):
    middle = (low + high) / 2
    low, high = (low, middle) if function(middle) > 0 else (middle, high)
  return high


def oracle_project(name, x, eps, low=-np.inf, high=np.inf):
  """Returns the projection of a row in float64, by formula or bisection."""
  x, low, high = (np.asarray(a, np.float64) for a in (x, low, high))
  if np.linalg.norm(np.clip(x, low, high), ORD[name]) <= eps:
    return np.clip(x, low, high)
  if name == 'linf':
    return np.clip(np.clip(x, -eps, eps), low, high)
  if name == 'l2':
    unit = x / np.linalg.norm(x)

    def shrunk(scale):
      return np.clip(scale * unit, low, high)

    most = np.linalg.norm(x)
    return shrunk(bisect(lambda s: np.linalg.norm(shrunk(s)) - eps, 0, most))
  # Measured from the top to keep the digits.
  size = np.abs(x)

  def lifted(below):
    shrunk = np.sign(x) * np.maximum(size - size.max() + below, 0)
    return np.clip(shrunk, low, high)

  most = size.max() if np.isfinite([low, high]).any() else float(eps)
  return lifted(bisect(lambda b: np.abs(lifted(b)).sum() - eps, 0, most))


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


def boxed_rows():
  """Returns perturbations, and the box that [0, 1] leaves for an image."""
  rng = np.random.default_rng(1)
  random = rng.uniform(size=(8, N))
  saturated = np.where(rng.uniform(size=(8, N)) < 0.5, random > 0.5, random)
  black = np.zeros((2, N))
  images = np.concatenate([random, saturated, black]).astype(np.float32)
  steps = rng.normal(size=images.shape)
  sparse = steps * (rng.uniform(size=steps.shape) < 0.2)
  rows = [steps, 0.1 * steps, sparse, 0 * steps, 1e-6 * steps, 30 * steps]
  x = np.concatenate(rows).astype(np.float32)
  images = np.tile(images, (len(rows), 1))
  return x, -images, 1 - images


@NORMS
@pytest.mark.parametrize('eps', [1e-7, 0.05, 0.3, 1.0, 4.0, 100.0])
def test_projection_onto_ball_and_box_agrees_with_the_oracle(norm, eps):
  x, low, high = boxed_rows()
  projected = np.asarray(PROJECT_BOX[norm.name](x, low, high, np.float32(eps)))
  expected = np.stack(
    [
      oracle_project(norm.name, *row[:1], eps, *row[1:])
      for row in zip(x, low, high, strict=True)
    ]
  )
  np.testing.assert_allclose(projected, expected, rtol=1e-5, atol=2e-6 * eps)
  lengths = np.linalg.norm(projected.astype(np.float64), ORD[norm.name], axis=1)
  assert (lengths <= eps * (1 + 1e-5)).all()
  assert ((projected >= low) & (projected <= high)).all()


@pytest.mark.parametrize('name', ['linf', 'l1'])
def test_projection_onto_ball_and_box_is_the_nearest_point(name):
  """Checks by SciPy that no point of ball and box is further along x - p."""
  eps = 1.0 if name == 'l1' else 0.2
  x, low, high = boxed_rows()
  rows = slice(0, 18)
  projected = np.asarray(PROJECT_BOX[name](x, low, high, np.float32(eps)))
  for p, v, lo, hi in zip(
    projected[rows], x[rows], low[rows], high[rows], strict=True
  ):
    residual = v.astype(np.float64) - p
    best = farthest(residual, name, eps, lo, hi)
    assert residual @ p >= best - 1e-4 * max(1, np.abs(residual).max())


def farthest(slope, name, eps, low, high):
  """Returns max slope @ d over ball and box, by a linear program."""
  # d = up - down, both >= 0.
  costs = np.concatenate([-slope, slope])
  limit = eps if name == 'linf' else np.inf
  bounds = [(0, min(limit, b)) for b in np.concatenate([high, -low])]
  matrix = np.ones((1, 2 * N)) if name == 'l1' else None
  limits = [eps] if name == 'l1' else None
  result = scipy.optimize.linprog(costs, matrix, limits, bounds=bounds)
  assert result.success
  return -result.fun


def oracle_to_plane(name, slope, gap, low, high):
  """Returns the distance to the plane, in float64."""
  slope, gap = slope.astype(np.float64), float(gap)
  if name == 'l2':
    toward = np.sign(gap) * slope

    def step(t):
      return np.clip(t * toward, low, high)

    most = bisect(lambda t: np.sign(gap) * (slope @ step(t)) - abs(gap), 0, 1e6)
    return np.linalg.norm(step(most))
  # d = up - down. Minimises the largest entry, t, for linf, the sum for l1.
  costs = np.append(np.full(2 * N, float(name == 'l1')), float(name == 'linf'))
  matrix = np.append(np.concatenate([slope, -slope]), 0)[None]
  below = np.hstack([np.eye(2 * N), -np.ones((2 * N, 1))])
  bounds = [*((0, b) for b in np.concatenate([high, -low])), (0, None)]
  result = scipy.optimize.linprog(
    costs, below, np.zeros(2 * N), matrix, [gap], bounds=bounds
  ) if name == 'linf' else scipy.optimize.linprog(
    costs, None, None, matrix, [gap], bounds=bounds
  )  # fmt: skip
  assert result.success
  return result.fun


@NORMS
def test_the_way_to_a_plane_in_a_box_is_the_shortest(norm):
  rng = np.random.default_rng(2)
  _, low, high = boxed_rows()
  low, high = low[:18], high[:18]
  slope = rng.normal(size=low.shape).astype(np.float32)
  slope[:4] *= rng.uniform(size=(4, N)) < 0.4  # Some slopes are sparse.
  most = np.where(slope > 0, high, -low) * np.abs(slope)
  least = np.where(slope > 0, low, -high) * np.abs(slope)
  for share in (1e-3, 0.3, 0.8):
    for gap in (share * most.sum(axis=1), share * least.sum(axis=1)):
      gap = gap.astype(np.float32)
      step = np.asarray(TO_PLANE[norm.name](slope, gap, low, high))
      assert ((step >= low) & (step <= high)).all()
      reached = np.sum(slope.astype(np.float64) * step, axis=1)
      np.testing.assert_allclose(reached, gap, rtol=1e-4, atol=1e-6)
      for row in range(len(step)):
        expected = oracle_to_plane(
          norm.name, slope[row], gap[row], low[row], high[row]
        )
        length = np.linalg.norm(step[row], ORD[norm.name])
        assert length <= expected * (1 + 1e-4) + 1e-6


@NORMS
def test_a_plane_out_of_reach_is_approached_as_far_as_the_box_allows(norm):
  _, low, high = boxed_rows()
  slope = np.random.default_rng(3).normal(size=low.shape).astype(np.float32)
  gap = np.full(len(slope), 1e4, np.float32)
  step = TO_PLANE[norm.name](slope, gap, low, high)
  expected = np.where(slope > 0, high, low)
  np.testing.assert_allclose(step, expected, atol=1e-6)


@NORMS
@pytest.mark.parametrize('scale', [1e-20, 1.0, 1e20])
def test_the_way_to_a_plane_without_a_box(norm, scale):
  scale = np.float32(scale)
  slope = scale * np.random.default_rng(4).normal(size=(5, N)).astype('float32')
  free = [np.tile(bound, (5, 1)) for bound in FREE]
  gap = scale * np.array([1, -2, 0.1, 0, 3], np.float32)
  step = np.asarray(TO_PLANE[norm.name](slope, gap, *free), np.float64)
  dual = {'linf': 1, 'l2': 2, 'l1': np.inf}[norm.name]
  slope = slope.astype(np.float64)
  shortest = np.abs(gap) / np.linalg.norm(slope, dual, axis=1)
  lengths = np.linalg.norm(step, ORD[norm.name], axis=1)
  np.testing.assert_allclose(lengths, shortest, rtol=1e-4)
  np.testing.assert_allclose(np.sum(slope * step, 1), gap, rtol=1e-4)


@NORMS
def test_degenerate_planes_give_no_nan(norm):
  slope = np.zeros((4, N), np.float32)
  slope[1] = np.nan
  slope[2, 3] = np.inf
  slope[3] = 1e-38
  gap = np.array([1, 1, np.inf, np.nan], np.float32)
  _, low, high = boxed_rows()
  for box in ((low[:4], high[:4]), [np.tile(b, (4, 1)) for b in FREE]):
    assert np.isfinite(TO_PLANE[norm.name](slope, gap, *box)).all()


def assert_is_projection(name, x, projected, eps):
  """Checks the ball, that points inside are unchanged, and KKT otherwise."""
  assert np.isfinite(projected).all()
  wide, result = x.astype(np.float64), projected.astype(np.float64)
  assert np.linalg.norm(result, ORD[name]) <= eps * (1 + 1e-5)
  # Within float32 rounding of the border, both answers are right.
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
@pytest.mark.parametrize('keep', [1, 2, 12, N])
@pytest.mark.parametrize('scale', [1e-20, 1.0, 1e20])
def test_ascend_is_a_unit_step_whatever_the_scale(norm, keep, scale):
  rows = np.random.default_rng(1).normal(size=(5, N)).astype(np.float32)
  step = np.asarray(ASCEND[norm.name](rows * np.float32(scale), keep))
  lengths = np.linalg.norm(step, ORD[norm.name], axis=1)
  np.testing.assert_allclose(lengths, 1, rtol=1e-5)
  assert ((step == 0) | (np.sign(step) == np.sign(rows))).all()
  reference = ASCEND[norm.name](rows, keep)
  np.testing.assert_allclose(step, reference, rtol=1e-5, atol=1e-6)


@NORMS
def test_ascend_survives_degenerate_gradients(norm):
  rows = np.zeros((4, N), np.float32)
  rows[1] = np.nan
  rows[2, 3] = -np.inf
  rows[3, :2] = [np.inf, np.nan]
  step = np.asarray(ASCEND[norm.name](rows, 2))
  assert (step[:2] == 0).all()  # No gradient, no step.
  assert step[2, 3] == -1
  assert step[3, 0] == 1
  assert np.isfinite(step).all()


@pytest.mark.parametrize('keep', [1, 2, 6, 17, N])
def test_slide_moves_the_top_coordinates(keep):
  rows = np.random.default_rng(2).normal(size=(20, N)).astype(np.float32)
  step = np.asarray(ASCEND['l1'](rows, keep))
  order = np.argsort(-np.abs(rows), axis=1, kind='stable')
  expected = np.zeros_like(rows)
  for row, sign, top in zip(expected, np.sign(rows), order, strict=True):
    row[top[:keep]] = sign[top[:keep]] / keep
  np.testing.assert_allclose(step, expected, rtol=1e-6)


def test_slide_leaves_zero_gradients_and_shares_among_ties():
  gradient = np.zeros((2, N), np.float32)
  gradient[0, [2, 5]] = [3.0, -1.0]  # Fewer entries than kept coordinates.
  gradient[1, :8] = 1.0  # More ties than kept coordinates.
  step = np.asarray(ASCEND['l1'](gradient, 6))
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
  # Uniform means that a share r^n is within radius r, in every octant.
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


@NORMS
def test_ascend_pushes_what_is_held_and_is_as_long_in_what_is_free(norm):
  gradient = jnp.array([9.0, -5.0, 4.0, 3.0, -1.0, 0.0])
  free = jnp.array([False, True, False, True, True, True])
  step = np.asarray(norm.ascend(gradient, free, 2))
  length = np.linalg.norm(step[np.asarray(free)], ORD[norm.name])
  assert length == pytest.approx(1, rel=1e-5)
  assert step[0] > 0
  assert step[0] <= 1
  if norm.name == 'l1':  # The two steepest free ones, and steeper bound ones.
    np.testing.assert_allclose(step, [0.5, -0.5, 0.5, 0.5, 0, 0])
  none_free = norm.ascend(gradient, jnp.zeros(6, bool), 2)
  assert np.isfinite(none_free).all()
