"""FAB: the smallest perturbation that crosses a decision boundary.

Croce & Hein, "Minimally distorted Adversarial Examples with a Fast Adaptive
Boundary Attack" (2020), targeted. It linearises the boundary between the label
and a target class and takes the shortest step onto that plane that stays in the
box. It starts at the image and climbs no loss, so it finds adversarial images
that masked gradients hide from other attacks.
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
    """True: the attack skips examples that are already fooled."""
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

  @jax.vmap
  def plane(domain, delta, placed, difference, gradient):
    """Returns the linearised boundary: its slope, and its gap from delta."""
    largest = jnp.max(jnp.abs(jnp.nan_to_num(gradient)))
    slope = norms.rescale(gradient)
    slope = the_map.pull_back(domain, delta, placed, slope)
    return slope, -difference / jnp.where(largest > 0, largest, 1)

  @jax.vmap
  def step(domain, delta, slope, gap):
    """Steps onto the plane, biased towards the image's own step onto it."""
    low, high = domain.low, domain.high
    here = norm.to_plane(slope, gap, low - delta, high - delta)
    gap += jnp.vdot(slope, delta, precision=lax.Precision.HIGHEST)
    from_image = norm.to_plane(slope, gap, low, high)
    near, far = norm.length(here), norm.length(from_image)
    bias = near / jnp.maximum(near + far, 1e-12)
    bias = jnp.clip(bias, 0, _MOST_BIAS)
    moved = (1 - bias) * (delta + _OVERSHOOT * here)
    moved += bias * _OVERSHOOT * from_image
    moved = jnp.clip(moved, low, high)
    if the_map.clip == 'strict' and the_map.space is not PIXEL:
      _, image = the_map.place(domain, moved)
      moved = the_map.enter(image).centre - domain.centre
    return moved

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
      placed, shown = problem.place(search.delta)
      (_, (loss, logits)), gradient = value_and_grad(shown, target)
      search, _ = record(search, search.delta, loss, logits)
      slope, gap = plane(domain, search.delta, placed, loss, gradient)
      delta = step(domain, search.delta, slope, gap)
      logits = logits_fn(problem.final_images(delta))
      loss = losses.targeted_margin(logits, labels, target)
      search, fooled = record(search, delta, loss, logits)
      back = jnp.where(fooled, _BACK, 1.0)[:, None]
      stuck = jnp.all(slope == 0, axis=1)
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
