"""Norms: a ball, its steepest ascent and its projections, for one example.

Each function takes the perturbation or gradient of ONE example, a vector; vmap
it over the batch. A box `low <= delta <= high` around zero may limit the
perturbation ([0, 1] does in pixels); without one the bounds are infinite:

>>> import jax.numpy as jnp
>>> free = jnp.full(3, -jnp.inf), jnp.full(3, jnp.inf)
>>> L1.project(jnp.array([3.0, -1.0, 0.5]), *free, 3.0).tolist()
[2.5, -0.5, 0.0]
>>> L1.project(jnp.array([3.0, -1.0, 0.5]), free[0], jnp.ones(3), 2.25).tolist()
[1.0, -0.875, 0.375]
>>> L2.ascend(jnp.array([3e-20, 4e-20]), True, keep=1).round(3).tolist()
[0.6..., 0.8...]

Every projection is exact, and none of them sorts, which is slow on a CPU. Sums
are written as products with a vector of ones, because XLA's CPU backend
vectorises matmuls but not reductions.
"""

import dataclasses
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
    length: `length(x)` is the norm of x.
    random_start: `random_start(noise, eps)` turns n + 2 independent uniform
      numbers in (-1, 1) into a uniform point of the eps-ball in n dimensions.
      (It takes noise, not a key, so that all norms share one generator, which
      takes longer to compile than everything else here.)
    ascend: `ascend(gradient, free, keep)` is the step of steepest ascent. Its
      length is one in the coordinates that are `free` to move, whatever the
      scale of the gradient (zero if the gradient is). The other coordinates are
      pushed against their bounds in the same way, so that a projection onto
      ball and box does not pull them back. For l1 the step moves the `keep`
      steepest free coordinates by equal amounts.
    project: `project(x, low, high, eps)` is the point of the eps-ball and the
      box that is nearest to x in Euclidean distance.
    to_plane: `to_plane(slope, gap, low, high)` is the shortest step d in this
      norm with `slope @ d = gap` inside the box. If the box does not reach the
      plane, it is the step that comes nearest to it.
  """

  name: str
  length: Callable[[Array], Array]
  random_start: Callable[[Array, Array], Array]
  ascend: Callable[[Array, Array, Array], Array]
  project: Callable[[Array, Array, Array, Array], Array]
  to_plane: Callable[[Array, Array, Array, Array], Array]


def rescale(x: Array) -> Array:
  """Divides by the largest finite entry; NaN becomes 0, infinity 1."""
  largest = largest_entry(x)
  x = jnp.clip(_known(x), -largest, largest)
  # The maximum is `largest`. XLA computes such a division once. A division by
  # `largest` itself becomes a product, which XLA:CPU computes again wherever
  # the result is used, together with the last sums of the gradient x.
  return x / jnp.maximum(jnp.abs(x), largest)


def largest_entry(x: Array) -> Array:
  """Returns the largest finite |entry|, or 1 if there is none but 0."""
  largest = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0))
  # XLA may multiply with 1 / largest instead, which must be a normal float.
  return jnp.where(largest > 0, jnp.minimum(largest, 8e37), 1)


def _known(x: Array) -> Array:
  return jnp.where(jnp.isnan(x), 0, x)


def total(x: Array) -> Array:
  """Returns the sum of the entries."""
  return jnp.vdot(x, jnp.ones_like(x), precision=lax.Precision.HIGHEST)


def _count(holds: Array) -> Array:
  return total(holds.astype(jnp.float32))


def _room(direction: Array, low: Array, high: Array) -> Array:
  """Returns how far each coordinate can move in the given direction."""
  return jnp.where(direction > 0, high, -low)


def _fill(weight: Array, rate: Array, room: Array, goal: Array) -> Array:
  """Finds t with `sum(weight * min(t * rate, room)) = goal`.

  The sum is concave in t, so Newton's method from the left never overshoots. It
  is also piecewise linear, so it takes as many steps as the set of coordinates
  with room left changes. If all the room does not suffice, t is so large that
  every coordinate is at its bound.
  """

  def newton(state):
    t, _ = state
    open_ = t * rate < room
    full = total(jnp.where(open_, 0, weight * room))
    slope = total(jnp.where(open_, weight * rate, 0))
    step = (goal - full) / jnp.where(slope > 0, slope, 1)
    return jnp.where(slope > 0, step, 1e30), t

  rises = lambda state: state[0] > state[1] * (1 + 1e-6)  # noqa: E731
  start = jnp.zeros_like(goal, rate.dtype)
  return lax.while_loop(rises, newton, (start, start - 1))[0]


# ----------------------------------------------------------------- l infinity


def _linf_length(x: Array) -> Array:
  return jnp.max(jnp.abs(x))


def _linf_random_start(noise: Array, eps: Array) -> Array:
  return eps * noise[:-2]


def _linf_ascend(gradient: Array, free: Array, keep: Array) -> Array:
  del free, keep  # Every coordinate moves; only l1 is sparse.
  return jnp.sign(_known(gradient))


def _linf_project(x: Array, low: Array, high: Array, eps: Array) -> Array:
  return jnp.clip(x, jnp.maximum(low, -eps), jnp.minimum(high, eps))


def _linf_to_plane(slope: Array, gap: Array, low: Array, high: Array) -> Array:
  slope, gap = _towards(slope, gap)
  size, room = jnp.abs(slope), _room(slope, low, high)
  t = _fill(size, jnp.ones_like(size), room, gap)
  return jnp.sign(slope) * jnp.minimum(t, room)


# ------------------------------------------------------------------------- l2


def _unit(x: Array) -> tuple[Array, Array]:
  """Returns the unit vector of x (0 for 0), and the length of x.

  Scales x first, so that the squares of 1e-20 and 1e20 fit into float32.
  """
  scaled = rescale(x)
  length = jnp.sqrt(total(scaled * scaled))
  unit = scaled / jnp.where(length > 0, length, 1)
  return unit, jnp.max(jnp.abs(x)) * length


def _l2_length(x: Array) -> Array:
  return _unit(x)[1]


def _l2_random_start(noise: Array, eps: Array) -> Array:
  # The first n coordinates of a uniform point on the sphere in n + 2
  # dimensions are uniform in the ball in n dimensions.
  normal = lax.erf_inv(noise)
  length = jnp.sqrt(total(normal * normal))
  return eps * normal[:-2] / jnp.where(length > 0, length, 1)


def _l2_ascend(gradient: Array, free: Array, keep: Array) -> Array:
  del keep  # Only l1 is sparse.
  scaled = rescale(gradient)
  length = jnp.sqrt(total(jnp.where(free, scaled * scaled, 0)))
  return jnp.clip(scaled / jnp.where(length > 0, length, jnp.inf), -1, 1)


def _l2_project(x: Array, low: Array, high: Array, eps: Array) -> Array:
  """Shrinks by the factor s for which clip(s x, low, high) has length eps.

  In units of eps, `_fill` solves sum min(s^2 x^2, room^2) = 1.
  """
  eps = jnp.maximum(eps, 1e-30)  # A radius of 0 is allowed.
  scaled = rescale(x)
  room = jnp.square(_room(x, low, high) / eps)
  inside = jnp.clip(x, low, high)
  is_inside = total(jnp.minimum(jnp.square(x / eps), room)) <= 1
  # A point that is already inside gets a goal of 0, which is reached at once.
  goal = jnp.where(is_inside, 0.0, 1.0)
  square = _fill(jnp.ones_like(x), scaled * scaled, room, goal)
  shrunk = jnp.clip(eps * jnp.sqrt(square) * scaled, low, high)
  return jnp.where(is_inside, inside, shrunk)


def _l2_to_plane(slope: Array, gap: Array, low: Array, high: Array) -> Array:
  slope, gap = _towards(slope, gap)
  size, room = jnp.abs(slope), _room(slope, low, high)
  t = _fill(size, size, room, gap)
  return jnp.sign(slope) * jnp.minimum(t * size, room)


# ------------------------------------------------------------------------- l1


def _l1_length(x: Array) -> Array:
  return total(jnp.abs(x))


def _l1_random_start(noise: Array, eps: Array) -> Array:
  # n of n + 1 exponentials, divided by the sum of all, are uniform in the solid
  # simplex; with random signs, in the ball.
  exponential = -jnp.log1p(-jnp.abs(noise[:-1]))
  point = jnp.sign(noise[:-2]) * exponential[:-1]
  return eps * point / total(exponential)


def _threshold(size: Array, mass: Array, goal: Array) -> Array:
  """Returns the largest entry t of `size` with `sum(mass[size >= t]) >= goal`.

  Non-negative floats are ordered like their bits, so t is found bit by bit. On
  a CPU these 31 sums are several times cheaper than a sort or `lax.top_k`.
  """
  bits = lax.bitcast_convert_type(size, jnp.int32)

  def set_bit(i: int, found: Array) -> Array:
    candidate = found | (jnp.int32(1) << (30 - i))
    reached = total(jnp.where(bits >= candidate, mass, 0))
    return jnp.where(reached >= goal, candidate, found)

  passes = jnp.int32(0), jnp.int32(31)
  found = lax.fori_loop(*passes, set_bit, jnp.zeros_like(bits[0]))
  return lax.bitcast_convert_type(found, jnp.float32)


def _l1_ascend(gradient: Array, free: Array, keep: Array) -> Array:
  """Returns SLIDE's step: equal shares for the `keep` largest |gradient|."""
  size = jnp.abs(_known(gradient))
  mobile = jnp.where(free, size, 0)
  if isinstance(keep, int) and keep == 1:
    threshold = jnp.max(mobile)
  else:
    threshold = _threshold(mobile, jnp.ones_like(size), keep)
  kept = (size >= threshold) & (size > 0)
  count = _count(kept & free)
  return jnp.where(kept, jnp.sign(gradient), 0) / jnp.maximum(count, 1)


def _l1_project(x: Array, low: Array, high: Array, eps: Array) -> Array:
  """Soft-thresholds inside the box: min(max(|x| - threshold, 0), room).

  The sum of these is piecewise linear in the threshold. Newton's method, with
  a bracket that is halved when a step would leave it, finds the threshold at
  which the sum is eps. The threshold is measured down from the largest |x|, so
  that huge x lose no digits.
  """
  size = jnp.abs(x)
  room = jnp.minimum(_room(x, low, high), eps)  # Nothing goes further.
  top = jnp.max(size)
  depth = size - top

  def newton(state):
    lowest, highest, below, _, i = state
    lifted = depth + below
    found = total(jnp.clip(lifted, 0, room))
    falls_short = found < eps
    lowest = jnp.where(falls_short, below, lowest)
    highest = jnp.where(falls_short, highest, below)
    # At a kink, the slope of the side that the step goes to.
    at_end = lifted == jnp.where(falls_short, 0, room)
    slope = _count(((lifted > 0) & (lifted < room)) | at_end)
    step = below + (eps - found) / jnp.maximum(slope, 1)
    # The sums are rounded, so `found` may never equal eps. From near it, one
    # more step is exact and needs no bracket.
    is_near = jnp.abs(found - eps) <= 5e-6 * eps
    holds = is_near | ((slope > 0) & (step > lowest) & (step < highest))
    step = jnp.where(holds, step, (lowest + highest) / 2)
    return lowest, highest, step, is_near | (step == below), i + 1

  # Without a box, entries eps below the top end at zero, so start there.
  is_free = jnp.all((room >= eps) | (size == 0))
  highest = jnp.where(is_free, jnp.minimum(top, eps), top)
  inside = jnp.clip(x, low, high)
  is_inside = _l1_length(inside) <= eps
  state = jnp.zeros_like(highest), highest, highest, is_inside, 0
  state = lax.while_loop(lambda s: ~s[3] & (s[4] < 64), newton, state)
  projected = jnp.sign(x) * jnp.clip(depth + state[2], 0, room)
  return jnp.where(is_inside, inside, projected)


def _l1_to_plane(slope: Array, gap: Array, low: Array, high: Array) -> Array:
  """Uses up the room of one coordinate after the other, steepest first."""
  slope, gap = _towards(slope, gap)
  size = jnp.abs(slope)
  needed = gap / jnp.where(size > 0, size, 1)
  room = jnp.minimum(_room(slope, low, high), needed)
  room = jnp.where(size > 0, room, 0)
  gain = size * room
  threshold = _threshold(size, gain, gap)
  rest = gap - total(jnp.where(size > threshold, gain, 0))
  ties = total(jnp.where(size == threshold, gain, 0))
  share = jnp.clip(rest / jnp.where(ties > 0, ties, 1), 0, 1)
  step = jnp.where(size > threshold, room, 0)
  step = jnp.where(size == threshold, share * room, step)
  return jnp.sign(slope) * step


FARTHEST = 1e6  # A plane further away is of no use to an attack.


def _towards(slope: Array, gap: Array) -> tuple[Array, Array]:
  """Rescales the plane to slopes of at most 1 and a gap of at least 0."""
  slope = jnp.nan_to_num(slope)
  largest = jnp.max(jnp.abs(slope))
  gap = jnp.nan_to_num(gap) / jnp.where(largest > 0, largest, 1)
  gap = jnp.clip(gap, -FARTHEST, FARTHEST)
  return rescale(slope) * jnp.where(gap < 0, -1, 1), jnp.abs(gap)


LINF = Norm(
  'linf',
  _linf_length,
  _linf_random_start,
  _linf_ascend,
  _linf_project,
  _linf_to_plane,
)
L2 = Norm(
  'l2', _l2_length, _l2_random_start, _l2_ascend, _l2_project, _l2_to_plane
)
L1 = Norm(
  'l1', _l1_length, _l1_random_start, _l1_ascend, _l1_project, _l1_to_plane
)
NORMS = {norm.name: norm for norm in (LINF, L2, L1)}
