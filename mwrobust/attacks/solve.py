"""Makes attack functions: for one threat, or many with a traced index."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mwrobust.attacks import climb, losses, spaces
from mwrobust.attacks.checks import (
  check_batch,
  check_index,
  check_key,
  check_space,
  require,
)
from mwrobust.attacks.climb import Ascent
from mwrobust.attacks.fab import Fab
from mwrobust.attacks.geometry import Choice, Geometry, make_geometry
from mwrobust.attacks.norms import NORMS
from mwrobust.attacks.problem import Problem
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
  switch = make_switch([(threat, attack)], details=details)

  def run(logits_fn, key, images, labels, ids=None, scale=1.0, start=None):
    return switch(logits_fn, 0, key, images, labels, ids, scale, start)

  return run


def make_switch(
  threats: Sequence[Threat] | Sequence[tuple[Threat, Attack]],
  attacks: Attack | Sequence[Attack] | None = None,
  *,
  details: bool = False,
) -> Callable[..., Array | Found]:
  """Makes `switch(logits_fn, index, key, images, labels, ids, scale, start)`.

  With index i it does what `make_attack` of the i-th pair does. The index is an
  int32 scalar, usually traced. Use one index per batch: under a vmap over the
  index, every branch would run for every example.

  Pairs with the same rule (`pgd` and `slide` share one, `apgd` has another)
  share one loop and so one gradient, which is the expensive part; what differs
  between them is chosen inside the loop.

  Args:
    threats: threats, or pairs of a threat and its attack.
    attacks: if only threats are given: one attack for all, or one for each.
    details: whether to return all of `Found`, not only the images.
  """
  pairs = _pairs(threats, attacks)

  def switch(
    logits_fn, index, key, images, labels, ids=None, scale=1.0, start=None
  ):
    images, labels, ids, scale = check_batch(images, labels, ids, scale)
    index = check_index('index', index, len(pairs))
    key = check_key(key)
    image = jax.ShapeDtypeStruct(images.shape[1:], images.dtype)
    shapes = [
      check_space(spaces.get(threat.space), image) for threat, _ in pairs
    ]

    def solve(members, place):
      return _solve(
        [pairs[member] for member in members],
        [shapes[member] for member in members],
        place,
        *(logits_fn, key, images, labels, ids, scale, start),
      )

    if isinstance(index, int):
      found = solve([index], 0)
    else:
      groups, group_of, place_of = _groups(pairs, shapes)
      branches = [functools.partial(solve, members) for members in groups]
      place = jnp.asarray(place_of)[index]
      if len(branches) == 1:
        found = branches[0](place)
      else:
        found = lax.switch(jnp.asarray(group_of)[index], branches, place)
    return found if details else found.images

  return switch


def distance(threat: Threat, images: Array, perturbed: Array) -> Array:
  """Returns the norm of the perturbations in the threat's space, [B]."""
  space, norm = spaces.get(threat.space), NORMS[threat.norm]
  return jax.vmap(
    lambda x, z: norm.length((space.forward(z) - space.forward(x)).ravel())
  )(images, perturbed)


def _pairs(threats, attacks) -> list[tuple[Threat, Attack]]:
  pairs = [threats] if isinstance(threats, Threat) else list(threats)
  if attacks is not None:
    many = [attacks] * len(pairs) if isinstance(attacks, Attack) else attacks
    require(
      len(many) == len(pairs),
      f'attacks has {len(many)} entries: must be one attack, or one for each '
      f'of the {len(pairs)} threats.',
    )
    pairs = list(zip(pairs, many, strict=True))
  require(bool(pairs), 'threats=[] is not allowed: must be at least one.')
  for pair in pairs:
    require(
      isinstance(pair, tuple)
      and len(pair) == 2
      and isinstance(pair[0], Threat)
      and isinstance(pair[1], Attack),
      f'threats contains {pair!r}: must be a Threat with its attack, '
      f'{_ATTACKS}.',
    )
  return pairs


def _groups(pairs, shapes) -> tuple[list[list[int]], np.ndarray, np.ndarray]:
  """Groups the pairs that can share one loop.

  Returns:
    The groups, as lists of indices into `pairs`; for each pair, the number of
    its group; and its position within that group.
  """
  groups = {}
  for i, ((_, attack), shape) in enumerate(zip(pairs, shapes, strict=True)):
    shared = isinstance(attack, Ascent)
    kind = i
    if shared:
      kind = attack.rule, attack.result, int(np.prod(shape))
    groups.setdefault(kind, []).append(i)
  group_of, place = np.zeros((2, len(pairs)), np.int32)
  for number, members in enumerate(groups.values()):
    group_of[members], place[members] = number, range(len(members))
  return list(groups.values()), group_of, place


def _solve(
  pairs, shapes, index, logits_fn, key, images, labels, ids, scale, start
) -> Found:
  """Runs attack number `index` of pairs that share one loop."""
  geometries = [
    make_geometry(
      spaces.get(threat.space), threat.norm, _clip(threat, attack), shape
    )
    for (threat, attack), shape in zip(pairs, shapes, strict=True)
  ]
  geometry = Geometry(
    _choose([g.map for g in geometries], index),
    _choose([g.ball for g in geometries], index),
  )
  domain = jax.vmap(geometry.map.enter)(images)
  problem = Problem(
    *(logits_fn, images, labels, key, ids, scale, geometry, domain)
  )
  tries = _pick([attack.tries for _, attack in pairs], index)
  most = max(attack.tries for _, attack in pairs)
  attempt = _prepare(problem, pairs, index, only_try=most == 1)
  if start is not None:
    start = check_index('start', start)
  nothing = problem.nothing
  if any(attack.targets for _, attack in pairs):
    nothing = nothing._replace(spent=nothing.spent.plus(forwards=1))
  if start is not None or most == 1:
    tried = attempt(0 if start is None else start, nothing)
  else:
    stops_early = pairs[0][1].stops_early

    def goes_on(state):
      number, tried = state
      more = number < tries
      return more & ~jnp.all(tried.best.fooled) if stops_early else more

    def attempt_next(state):
      number, tried = state
      return number + 1, attempt(number, tried)

    _, tried = lax.while_loop(goes_on, attempt_next, (jnp.int32(0), nothing))
  length = _choose([NORMS[threat.norm] for threat, _ in pairs], index).length
  best, stuck, spent = lax.stop_gradient(tried)
  found = lax.stop_gradient(problem.final_images(best.delta))
  return Found(found, jax.vmap(length)(best.delta), stuck, *spent)


def _clip(threat: Threat, attack: Attack) -> str:
  """Returns the clip to use: only the paper's attacks can use `'end'`."""
  is_papers = isinstance(attack, Ascent) and attack.rule == 'pgd'
  if threat.clip == 'end' and not is_papers:
    return 'inside'
  return threat.clip


def _prepare(problem: Problem, pairs, index, only_try: bool):
  if not isinstance(pairs[0][1], Ascent):
    ((threat, attack),) = pairs
    return attack.prepare(problem, threat.eps, NORMS[threat.norm])
  ascents = [attack for _, attack in pairs]
  plans = [
    climb.make_plan(
      attack,
      eps=threat.eps,
      norm=threat.norm,
      features=problem.domain.centre.shape[1],
      length=max(ascent.steps for ascent in ascents),
    )
    for threat, attack in pairs
  ]
  plan = jax.tree.map(lambda *leaves: _pick(np.stack(leaves), index), *plans)
  names = [(ascent.loss, ascent.targets > 0) for ascent in ascents]
  distinct, column = _distinct(names)
  loss_fns = [_loss_fn(*name) for name in distinct]
  which = _pick(column, index)

  def loss_fn(logits, labels, targets):
    if len(loss_fns) == 1:
      return loss_fns[0](logits, labels, targets)
    return lax.switch(which, loss_fns, logits, labels, targets)

  return climb.prepare(
    problem,
    plan,
    rule=ascents[0].rule,
    loss_fn=loss_fn,
    targets=max(ascent.targets for ascent in ascents),
    result=ascents[0].result,
    only_try=only_try,
  )


def _loss_fn(name: str, targeted: bool):
  if targeted:
    return losses.TARGETED[name]
  return lambda logits, labels, targets: losses.LOSSES[name](logits, labels)


def _pick(column, index):
  """Returns an entry of a column, which is traced if there are several."""
  return column[0] if len(column) == 1 else jnp.asarray(column)[index]


def _choose(options: list, index):
  distinct, column = _distinct(options)
  if len(distinct) == 1:
    return distinct[0]
  return Choice(distinct, _pick(column, index))


def _distinct(values: list) -> tuple[list, np.ndarray]:
  """Returns the distinct values, and the index of each value among them."""
  distinct = list(dict.fromkeys(values))
  return distinct, np.array([distinct.index(v) for v in values], np.int32)
