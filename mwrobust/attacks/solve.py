"""Makes the attack function of a threat; `switch.py` makes that of many."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mwrobust.attacks import spaces
from mwrobust.attacks.checks import (
  check_batch,
  check_index,
  check_key,
  check_space,
  require,
)
from mwrobust.attacks.climb import Ascent
from mwrobust.attacks.fab import Fab
from mwrobust.attacks.geometry import Geometry, make_geometry
from mwrobust.attacks.norms import NORMS
from mwrobust.attacks.problem import Batch, Problem, Tried, make_problem
from mwrobust.attacks.square import Square
from mwrobust.attacks.threats import Threat

Array = jax.Array
Attack = Ascent | Fab | Square
_ATTACKS = 'attacks.pgd(...), momentum(...), apgd(...), fab(...) or square(...)'


class Found(NamedTuple):
  """What an attack found for each example.

  Attributes:
    images: the adversarial images, in [0, 1].
    distance: the norm of the perturbation in the threat's space, before the
      clip to [0, 1].
    stuck: whether the last gradient was zero in every pixel, so that the attack
      could not move.
    gradients: int32, the number of loss gradients evaluated for the batch of
      the example, over all tries; less than the steps if the attack stopped
      early.
    forwards: int32, the number of forward passes without a gradient: those of
      FAB and Square, one that ranks the targets, and one that evaluates the
      last point of each climb.
  """

  images: Array
  distance: Array
  stuck: Array
  gradients: Array
  forwards: Array


def make_attack(
  threat: Threat, attack: Attack, *, details: bool = False
) -> Callable[..., Array | Found]:
  """Makes `attack(logits_fn, key, images, labels, ids, scale, start)`.

  Args:
    threat: what the adversary may do.
    attack: how hard it tries: `pgd(...)`, `apgd(...)`, ...
    details: whether to return all of `Found`, not only the images.

  Returns:
    A pure function that returns the adversarial images. `ids` (int32 [B]) seeds
    each example by its own id. `scale` multiplies the radius. `start` selects
    one try (a random start and a target) by its number, which may exceed
    `attack.tries`; without it all tries run, and the best result of each
    example is returned.
  """
  check_pair((threat, attack))

  def run(logits_fn, key, images, labels, ids=None, scale=1.0, start=None):
    batch = check_arguments(key, images, labels, ids, scale)
    found = solve(threat, attack, logits_fn, batch, start)
    return found if details else found.images

  return run


def solve(
  threat: Threat,
  attack: Attack,
  logits_fn: Callable[[Array], Array],
  batch: Batch,
  start: Array | int | None,
) -> Found:
  """Attacks a batch."""
  norm = NORMS[threat.norm]
  problem = make_problem(logits_fn, batch, geometry_of(threat, attack, batch))
  attempt = attack.prepare(problem, threat.eps, norm)
  tried = run_tries(
    problem,
    attempt,
    tries=attack.tries,
    most=attack.tries,
    ranks=attack.targets > 0,
    stops_early=attack.stops_early,
    start=start,
  )
  return report(problem, tried, norm.length)


def run_tries(
  problem: Problem,
  attempt: Callable[[Array, Tried], Tried],
  *,
  tries: Array | int,
  most: int,
  ranks: bool,
  stops_early: bool,
  start: Array | int | None,
) -> Tried:
  """Makes one try after the other, or only the one that `start` selects.

  Args:
    problem: the batch, the network and the threat.
    attempt: makes one try, given its number and the result so far.
    tries: the number of tries, which may be traced.
    most: the highest number of tries.
    ranks: whether a forward pass ranked the targets.
    stops_early: whether to stop when the whole batch is fooled.
    start: the number of the only try, or None for all.
  """
  nothing = problem.nothing
  if ranks:
    nothing = nothing._replace(spent=nothing.spent.plus(forwards=1))
  if start is not None:
    return attempt(check_index('start', start), nothing)
  if most == 1:
    return attempt(0, nothing)

  def goes_on(state):
    number, tried = state
    more = number < tries
    return more & ~jnp.all(tried.best.fooled) if stops_early else more

  def attempt_next(state):
    number, tried = state
    return number + 1, attempt(number, tried)

  return lax.while_loop(goes_on, attempt_next, (jnp.int32(0), nothing))[1]


def report(
  problem: Problem, tried: Tried, length: Callable[[Array], Array]
) -> Found:
  """Returns the best of all tries."""
  best, stuck, spent = lax.stop_gradient(tried)
  found = lax.stop_gradient(problem.final_images(best.delta))
  return Found(found, jax.vmap(length)(best.delta), stuck, *spent)


def distance(threat: Threat, images: Array, perturbed: Array) -> Array:
  """Returns the norm of the perturbations in the threat's space, [B]."""
  space, norm = spaces.get(threat.space), NORMS[threat.norm]
  return jax.vmap(
    lambda x, z: norm.length((space.forward(z) - space.forward(x)).ravel())
  )(images, perturbed)


def check_pair(pair: tuple[Threat, Attack]) -> None:
  """Raises a ValueError unless this is a threat with its attack."""
  require(
    isinstance(pair, tuple)
    and len(pair) == 2
    and isinstance(pair[0], Threat)
    and isinstance(pair[1], Attack),
    f'threats contains {pair!r}: must be a Threat with its attack, {_ATTACKS}.',
  )


def check_arguments(key, images, labels, ids, scale) -> Batch:
  """Returns the arguments of an attack, or raises a ValueError."""
  images, labels, ids, scale = check_batch(images, labels, ids, scale)
  return Batch(images, labels, check_key(key), ids, scale)


def geometry_of(threat: Threat, attack: Attack, batch: Batch) -> Geometry:
  """Returns a threat's geometry; only the paper's attacks can use `'end'`."""
  images, space = batch.images, spaces.get(threat.space)
  image = jax.ShapeDtypeStruct(images.shape[1:], images.dtype)
  is_papers = isinstance(attack, Ascent) and attack.rule == 'pgd'
  clip = threat.clip
  if clip == 'end' and not is_papers:
    clip = 'inside'
  return make_geometry(space, threat.norm, clip, check_space(space, image))
