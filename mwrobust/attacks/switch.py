"""One attack function for many threats, selected by a traced index."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mwrobust.attacks import climb
from mwrobust.attacks.checks import check_index, require
from mwrobust.attacks.climb import Ascent
from mwrobust.attacks.geometry import Choice, Geometry
from mwrobust.attacks.norms import NORMS
from mwrobust.attacks.problem import Batch, make_problem
from mwrobust.attacks.solve import (
  Attack,
  Found,
  check_arguments,
  check_pair,
  geometry_of,
  report,
  run_tries,
  solve,
)
from mwrobust.attacks.threats import Threat

Array = jax.Array
Pair = tuple[Threat, Attack]


def make_switch(
  threats: Sequence[Threat] | Sequence[Pair],
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
    batch = check_arguments(key, images, labels, ids, scale)
    index = check_index('index', index, len(pairs))
    if isinstance(index, int):
      found = solve(*pairs[index], logits_fn, batch, start)
    else:
      found = _solve_one_of(pairs, index, logits_fn, batch, start)
    return found if details else found.images

  return switch


def _pairs(threats, attacks) -> list[Pair]:
  pairs = [threats] if isinstance(threats, Threat) else list(threats)
  if attacks is not None:
    many = [attacks] * len(pairs) if isinstance(attacks, Attack) else attacks
    require(
      isinstance(many, Sequence),
      f'attacks={many!r} is not allowed: must be one attack, or a list.',
    )
    require(
      len(many) == len(pairs),
      f'attacks has {len(many)} entries: must be one attack, or one for each '
      f'of the {len(pairs)} threats.',
    )
    pairs = list(zip(pairs, many, strict=True))
  require(bool(pairs), 'threats=[] is not allowed: must be at least one.')
  for pair in pairs:
    check_pair(pair)
  return pairs


def _solve_one_of(
  pairs: list[Pair],
  index: Array,
  logits_fn: Callable[[Array], Array],
  batch: Batch,
  start: Array | int | None,
) -> Found:
  """Solves pair number `index`; pairs of one group share a branch."""
  geometries = [geometry_of(*pair, batch) for pair in pairs]
  groups = _groups(pairs, geometries)
  group_of, place_of = np.zeros((2, len(pairs)), np.int32)
  branches = []
  for number, members in enumerate(groups):
    group_of[members], place_of[members] = number, range(len(members))
    of_group = [pairs[i] for i in members], [geometries[i] for i in members]
    branches.append(
      functools.partial(_climb_one_of, *of_group, logits_fn, batch, start)
      if len(members) > 1
      else lambda _, pair=pairs[members[0]]: solve(
        *pair, logits_fn, batch, start
      )
    )
  place = jnp.asarray(place_of)[index]
  if len(branches) == 1:
    return branches[0](place)
  return lax.switch(jnp.asarray(group_of)[index], branches, place)


def _groups(pairs: list[Pair], geometries: list[Geometry]) -> list[list[int]]:
  """Groups the pairs that can share one loop, as indices into `pairs`."""
  groups = {}
  for i, (_, attack) in enumerate(pairs):
    kind = i
    if isinstance(attack, Ascent):
      features = math.prod(geometries[i].map.shape)
      kind = attack.rule, attack.result, features
    groups.setdefault(kind, []).append(i)
  return list(groups.values())


def _climb_one_of(
  pairs: list[tuple[Threat, Ascent]],
  geometries: list[Geometry],
  logits_fn: Callable[[Array], Array],
  batch: Batch,
  start: Array | int | None,
  index: Array,
) -> Found:
  """Climbs by pair number `index`, with one loop for all of them."""
  geometry = Geometry(
    _choose([g.map for g in geometries], index),
    _choose([g.ball for g in geometries], index),
  )
  problem = make_problem(logits_fn, batch, geometry)
  ascents = [attack for _, attack in pairs]
  tries = [ascent.tries for ascent in ascents]
  attempt = climb.prepare(
    problem,
    _choose_plan(pairs, problem.domain.centre.shape[1], index),
    rule=ascents[0].rule,
    loss_fn=_choose_loss(ascents, index),
    targets=max(ascent.targets for ascent in ascents),
    result=ascents[0].result,
    only_try=max(tries) == 1,
  )
  tried = run_tries(
    problem,
    attempt,
    tries=jnp.asarray(tries)[index],
    most=max(tries),
    ranks=any(ascent.targets for ascent in ascents),
    stops_early=ascents[0].stops_early,
    start=start,
  )
  norm = _choose([NORMS[threat.norm] for threat, _ in pairs], index)
  return report(problem, tried, norm.length)


def _choose_plan(pairs: list[Pair], features: int, index: Array) -> climb.Plan:
  plans = [
    climb.make_plan(
      ascent,
      eps=threat.eps,
      norm=threat.norm,
      features=features,
      length=max(other.steps for _, other in pairs),
    )
    for threat, ascent in pairs
  ]
  return jax.tree.map(
    lambda *leaves: jnp.asarray(np.stack(leaves))[index], *plans
  )


def _choose_loss(ascents: list[Ascent], index: Array):
  """Returns `loss_fn(logits, labels, targets)` of the ascent at the index."""
  kinds = [(ascent.loss, ascent.targets > 0) for ascent in ascents]
  distinct, column = _distinct(kinds)
  loss_fns = [climb.make_loss(*kind) for kind in distinct]
  if len(loss_fns) == 1:
    return loss_fns[0]
  which = jnp.asarray(column)[index]
  return lambda *args: lax.switch(which, loss_fns, *args)


def _choose(options: list, index: Array):
  distinct, column = _distinct(options)
  if len(distinct) == 1:
    return distinct[0]
  return Choice(distinct, jnp.asarray(column)[index])


def _distinct(values: list) -> tuple[list, np.ndarray]:
  """Returns the distinct values, and the index of each value among them."""
  distinct = list(dict.fromkeys(values))
  return distinct, np.array([distinct.index(v) for v in values], np.int32)
