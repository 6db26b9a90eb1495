"""FAB: the smallest perturbation that crosses a decision boundary.

Croce & Hein, "Minimally distorted Adversarial Examples with a Fast Adaptive
Boundary Attack" (2020), targeted. It linearises the boundary between the label
and a target class and takes the shortest step onto that plane that stays in the
box. It starts at the image and climbs no loss, so it finds adversarial images
that masked gradients hide from other attacks.

In pixels that step is exact. In other spaces the clip to [0, 1] stops some
pixels on the way, so a step has several parts: each aims at what is left of the
way to the plane, with the pixels that can still move.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mwrobust.attacks import losses, norms
from mwrobust.attacks.checks import check_count
from mwrobust.attacks.climb import noise
from mwrobust.attacks.geometry import PIXEL
from mwrobust.attacks.problem import Best, Problem, Tried, better, judge

Array = jax.Array

_MOST_BIAS = 0.1  # The largest weight of the step that starts at the image.
_OVERSHOOT = 1.05  # A step onto the plane is this many times longer.
_MOST_PARTS = 8  # Other spaces: the parts of a step.
_NEAR = 0.005  # Other spaces: a step ends with this share of its way left.
_PULL = 0.2  # Other spaces: before a step, delta shrinks by this share.
_BACK = 0.9  # After a success, the search resumes at this share of delta.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fab:
  """The FAB attack; made by `fab`.

  Attributes:
    steps: the number of gradient steps of a try.
    targets: the number of likeliest wrong classes to aim at, one by one.
    restarts: the number of starts: the first at the image, the others random.
  """

  steps: int
  targets: int
  restarts: int = 1

  def __post_init__(self):
    check_count('steps', self.steps)
    check_count('targets', self.targets)
    check_count('restarts', self.restarts)

  @property
  def tries(self) -> int:
    """The number of runs: from each start, towards each target."""
    return self.restarts * self.targets

  @property
  def stops_early(self) -> bool:
    """Whether it skips examples that are already fooled; always True."""
    return True

  def prepare(self, problem: Problem, eps: float, norm: norms.Norm):
    """Makes `attempt(number, tried) -> tried`."""
    return _prepare(self, problem, eps, norm)


def fab(steps: int = 100, *, targets: int = 9, restarts: int = 1) -> Fab:
  """Returns targeted FAB; see `Fab` for the arguments."""
  return Fab(steps=steps, targets=targets, restarts=restarts)


class _Search(NamedTuple):
  """The state of a search."""

  i: Array
  delta: Array
  nearest: Array  # The shortest delta that fooled the network.
  length: Array  # The norm of `nearest`.
  best: Best
  stuck: Array


class _Part(NamedTuple):
  """The state after a part of a step in another space than pixels."""

  i: Array
  delta: Array
  placed: Array  # The image of delta, before the clip.
  left: Array  # What is left of the way to the plane.


def _prepare(attack: Fab, problem: Problem, eps: float, norm: norms.Norm):
  labels, domain = problem.labels, problem.domain
  the_map, ball = problem.geometry
  radius = problem.scale * eps
  others = problem.likeliest_others(attack.targets)
  length_of = jax.vmap(norm.length)

  def difference(images, target):
    logits = problem.logits(images)
    difference = losses.targeted_margin(logits, labels, target)
    return jnp.sum(difference), (difference, logits)

  value_and_grad = problem.constant(
    jax.value_and_grad(difference, has_aux=True), labels
  )
  logits_fn = problem.constant(problem.logits)

  def step_in_pixels(domain, delta, slope, gap):
    """Steps onto the plane, biased towards the image's own step onto it."""
    low, high = domain.low, domain.high
    here = norm.to_plane(slope, gap, low - delta, high - delta)
    gap += _dot(slope, delta)
    from_image = norm.to_plane(slope, gap, low, high)
    near, far = norm.length(here), norm.length(from_image)
    bias = near / jnp.maximum(near + far, 1e-12)
    bias = jnp.clip(bias, 0, _MOST_BIAS)
    moved = (1 - bias) * (delta + _OVERSHOOT * here)
    moved += bias * _OVERSHOOT * from_image
    return jnp.clip(moved, low, high)

  def step_in_space(domain, delta, slope, gap):
    """Steps over the plane in parts, from a point nearer to the image."""
    _, shown = the_map.place(domain, delta)
    # On the far side of the boundary the step goes back, along -slope.
    slope, gap = jnp.where(gap < 0, -slope, slope), jnp.abs(gap)

    def left_at(delta):
      placed, image = the_map.place(domain, delta)
      return placed, jnp.maximum(gap - _dot(slope, image - shown), 0)

    def goes_on(part: _Part) -> Array:
      return (part.left > _NEAR * gap) & (part.i < _MOST_PARTS)

    def go(part: _Part) -> _Part:
      pulled = the_map.pull_back(domain, part.delta, part.placed, slope)
      # Nothing bounds a coefficient here, so the shortest step onto the plane
      # goes along the steepest one.
      steepest = norm.ascend(pulled, True, keep=1)
      rise = _dot(pulled, steepest)
      far = part.left / jnp.where(rise > 0, rise, jnp.inf)
      delta = part.delta + jnp.minimum(far, norms.FARTHEST) * steepest
      return _Part(part.i + 1, delta, *left_at(delta))

    start = (1 - _PULL) * delta
    first = _Part(jnp.int32(0), start, *left_at(start))
    moved = lax.while_loop(goes_on, go, first).delta
    moved = start + _OVERSHOOT * (moved - start)
    _, image = the_map.place(domain, moved)
    clipped = the_map.enter(image).centre - domain.centre
    if the_map.clip == 'strict':
      return clipped
    # Both show the same image.
    is_shorter = norm.length(clipped) < norm.length(moved)
    return jnp.where(is_shorter, clipped, moved)

  @jax.vmap
  def step(domain, delta, difference, gradient):
    """Steps onto the boundary, linearised at delta."""
    slope, gap = norms.rescale(gradient), -difference
    gap /= norms.largest_entry(gradient)
    if the_map.space is PIXEL:
      return step_in_pixels(domain, delta, slope.ravel(), gap)
    return step_in_space(domain, delta, slope, gap)

  def record(search: _Search, delta, loss, logits) -> tuple[_Search, Array]:
    found = judge(delta, loss, logits, labels)
    length = length_of(delta)
    nearer = found.fooled & (length < search.length)
    return search._replace(
      nearest=jnp.where(nearer[:, None], delta, search.nearest),
      length=jnp.where(nearer, length, search.length),
      best=better(search.best, found, (length <= radius) & ~search.best.fooled),
    ), found.fooled

  def attempt(number, tried):
    target = jnp.take(others, number % attack.targets, axis=1)
    restart = number // attack.targets
    keys = problem.keys(restart)

    def start_at(key, domain):
      delta = ball.random_start(noise(key, domain.centre.size), radius / 2)
      return ball.settle(delta, domain, radius / 2)

    start = jax.vmap(start_at)(keys, domain)
    delta = jnp.where(restart > 0, start, 0)

    def advance(search: _Search) -> _Search:
      _, shown = problem.place(search.delta)
      (_, (loss, logits)), gradient = value_and_grad(shown, target)
      search, _ = record(search, search.delta, loss, logits)
      delta = step(domain, search.delta, loss, gradient)
      logits = logits_fn(problem.final_images(delta))
      loss = losses.targeted_margin(logits, labels, target)
      search, fooled = record(search, delta, loss, logits)
      back = jnp.where(fooled, _BACK, 1.0)[:, None]
      stuck = jnp.all(gradient == 0, axis=(1, 2, 3))
      return search._replace(i=search.i + 1, delta=back * delta, stuck=stuck)

    def goes_on(search: _Search) -> Array:
      return (search.i < attack.steps) & ~jnp.all(search.best.fooled)

    search = _Search(
      i=jnp.int32(0),
      delta=delta,
      nearest=delta,
      length=jnp.full_like(tried.best.loss, jnp.inf),
      best=tried.best,
      stuck=tried.stuck,
    )
    search = lax.while_loop(goes_on, advance, search)

    # ---- a delta that fooled the network outside the ball may do so projected
    delta = jax.vmap(lambda *args: ball.project(*args, radius))(
      search.nearest, domain
    )
    logits = logits_fn(problem.final_images(delta))
    loss = losses.targeted_margin(logits, labels, target)
    found = judge(delta, loss, logits, labels)
    best = better(search.best, found, ~search.best.fooled)
    spent = tried.spent.plus(gradients=search.i, forwards=search.i + 1)
    return Tried(best, search.stuck, spent)

  return attempt


def _dot(x: Array, y: Array) -> Array:
  # XLA's CPU backend fuses a dot product of images with what they are computed
  # from, which is many times slower than the sum of their product.
  return norms.total(x.ravel() * y.ravel())
