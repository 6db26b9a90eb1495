"""Norms: a ball, its steepest ascent and its projection, for one example.

Each function takes the perturbation or gradient of ONE example, an array of
any shape, and is meant to be vmapped over the batch:

>>> import jax.numpy as jnp
>>> L1.project(jnp.array([3.0, -1.0, 0.5]), 3.0).tolist()
[2.5, -0.5, 0.0]
>>> L2.ascend(jnp.array([3e-20, 4e-20]), percentile=0.0).round(3).tolist()
[0.6..., 0.8...]

Sums are written as products with a vector of ones: XLA's CPU backend
vectorises matmuls but not reductions, and sums are what these functions do.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Norm:
  """A norm as the attacks see it.

  Attributes:
    name: `'linf'`, `'l2'`, `'l1'`.
    length: `length(x)`: the norm of x.
    random_start: `random_start(noise, eps)`: from n + 2 independent uniform
      numbers in (-1, 1), a uniform point of the eps-ball in n dimensions.
      (Made from noise, not from a key, so that all norms share one generator:
      compiling it takes longer than all else here.)
    ascend: `ascend(gradient, percentile)`: the step of length one (zero where
      the gradient is zero) that climbs; whatever the gradient's scale.
    project: `project(x, eps)`: the point of the eps-ball nearest to x in the
      Euclidean distance; x itself, to the bit, if it is inside.
  """

  name: str
  length: Callable[[Array], Array]
  random_start: Callable[[Array, float], Array]
  ascend: Callable[[Array, float], Array]
  project: Callable[[Array, float], Array]


def rescale(x: Array) -> Array:
  """The entries over the largest of them: NaN is 0, infinity the largest."""
  # XLA divides by multiplying with 1 / largest, which must be a normal float.
  x = jnp.clip(jnp.nan_to_num(x), -8e37, 8e37)
  largest = jnp.max(jnp.abs(x))
  return jnp.where(largest > 0, x / jnp.where(largest > 0, largest, 1), 0)


def _sum(x: Array) -> Array:
  return jnp.vdot(x, jnp.ones_like(x), precision=lax.Precision.HIGHEST)


# ----------------------------------------------------------------- l infinity


def _linf_length(x: Array) -> Array:
  return jnp.max(jnp.abs(x))


def _linf_random_start(noise: Array, eps: float) -> Array:
  return eps * noise[:-2]


def _linf_ascend(gradient: Array, percentile: float) -> Array:
  del percentile  # Only l1 is sparse.
  return jnp.sign(jnp.nan_to_num(gradient))


def _linf_project(x: Array, eps: float) -> Array:
  return jnp.clip(x, -eps, eps)


# ------------------------------------------------------------------------- l2


def _unit(x: Array) -> tuple[Array, Array]:
  """The unit vector of x (0 for 0), and the length of x.

  Scaled, so that the squares of 1e-20 and 1e20 do not leave float32.
  """
  scaled = rescale(x)
  length = jnp.sqrt(_sum(scaled * scaled))
  unit = scaled / jnp.where(length > 0, length, 1)
  return unit, jnp.max(jnp.abs(x)) * length


def _l2_length(x: Array) -> Array:
  return _unit(x)[1]


def _l2_random_start(noise: Array, eps: float) -> Array:
  # The first n coordinates of a uniform point on the sphere in n + 2
  # dimensions are uniform in the ball in n dimensions.
  unit, _ = _unit(lax.erf_inv(noise))
  return eps * unit[:-2]


def _l2_ascend(gradient: Array, percentile: float) -> Array:
  del percentile  # Only l1 is sparse.
  return _unit(gradient)[0]


def _l2_project(x: Array, eps: float) -> Array:
  unit, length = _unit(x)
  return jnp.where(length > eps, eps * unit, x)


# ------------------------------------------------------------------------- l1


def _l1_length(x: Array) -> Array:
  return _sum(jnp.abs(x))


def _l1_random_start(noise: Array, eps: float) -> Array:
  # n of n + 1 exponentials over the sum of all are uniform in the simplex and
  # its inside; with random signs, in the ball.
  exponential = -jnp.log1p(-jnp.abs(noise[:-1]))
  point = jnp.sign(noise[:-2]) * exponential[:-1]
  return eps * point / _sum(exponential)


def _kth_largest(x: Array, k: int) -> Array:
  """The k-th largest entry of x >= 0, exact.

  Floats that are not negative are ordered like their bits, so the answer is
  found bit by bit: the largest pattern that at least k entries reach. On a CPU
  these 31 counts are several times cheaper than a sort or `lax.top_k`.
  """
  bits = lax.bitcast_convert_type(x, jnp.int32)

  def set_bit(i: int, found: Array) -> Array:
    candidate = found | (jnp.int32(1) << (30 - i))
    reached = _sum((bits >= candidate).astype(jnp.float32))
    return jnp.where(reached >= k, candidate, found)

  passes = jnp.int32(0), jnp.int32(31)
  found = lax.fori_loop(*passes, set_bit, jnp.zeros_like(bits.ravel()[0]))
  return lax.bitcast_convert_type(found, jnp.float32)


def _l1_ascend(gradient: Array, percentile: float) -> Array:
  """SLIDE: equal shares for the largest (100 - percentile) % of |gradient|."""
  size = jnp.abs(jnp.nan_to_num(gradient))
  keep = max(1, size.size - math.floor(percentile * size.size / 100))
  kept = (size >= _kth_largest(size, keep)) & (size > 0)
  count = _sum(kept.astype(jnp.float32))
  return jnp.where(kept, jnp.sign(gradient), 0) / jnp.maximum(count, 1)


def _l1_project(x: Array, eps: float) -> Array:
  """Soft thresholding, sign(x) max(|x| - threshold, 0), summing to eps.

  Newton's method on the piecewise linear sum (Michelot's algorithm) finds the
  threshold exactly, in as many steps as the support shrinks. Everything is
  measured down from the largest |x|: what lies eps or more below it ends at
  zero, so all numbers are of the order of eps and huge x cost no digits.
  """
  size = jnp.abs(x)
  depth = jnp.maximum(size - jnp.max(size), -eps)

  def threshold_of(support: Array) -> tuple[Array, Array]:
    count = _sum(support.astype(jnp.float32))
    total = _sum(jnp.where(support, depth, 0))
    return (total - eps) / jnp.maximum(count, 1), count

  def shrink(state: tuple) -> tuple:
    support, threshold, count, _ = state
    support &= depth > threshold
    return support, *threshold_of(support), count

  support = depth > -eps
  threshold, count = threshold_of(support)
  state = support, threshold, count, jnp.full_like(count, jnp.inf)
  state = lax.while_loop(lambda s: s[2] < s[3], shrink, state)
  _, threshold, _, _ = state
  projected = jnp.sign(x) * jnp.maximum(depth - threshold, 0)
  return jnp.where(_sum(size) > eps, projected, x)


LINF = Norm(
  'linf', _linf_length, _linf_random_start, _linf_ascend, _linf_project
)
L2 = Norm('l2', _l2_length, _l2_random_start, _l2_ascend, _l2_project)
L1 = Norm('l1', _l1_length, _l1_random_start, _l1_ascend, _l1_project)
NORMS = {norm.name: norm for norm in (LINF, L2, L1)}


def get(norm: str | Norm) -> Norm:
  """The norm of that name, or the caller's own `Norm` as it is."""
  if isinstance(norm, Norm):
    return norm
  if not isinstance(norm, str) or norm not in NORMS:
    raise ValueError(
      f'norm={norm!r} is not a norm: allowed are {sorted(NORMS)} and any '
      'mwrobust.norms.Norm.'
    )
  return NORMS[norm]
