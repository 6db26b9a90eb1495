"""Step rules: how a climb goes from one point to the next.

A rule has optax's shape: `init` makes its state, a NamedTuple, and `update`
turns the state and the point that was just evaluated into a new state and the
next delta. Both are written for one example; `climb` vmaps them.

>>> import jax.numpy as jnp
>>> from mwrobust.attacks import geometry, norms
>>> ball = geometry.Ball(norms.LINF)
>>> low, high = jnp.array([-0.5, -0.5]), jnp.array([0.5, 0.0])
>>> domain = geometry.Domain(jnp.zeros(2), low, high)
>>> point = Point(jnp.zeros(2), jnp.float32(1.0), jnp.array([3.0, 2.0]))
>>> (step,) = plan('pgd', steps=1, eps=0.25, norm='linf', features=2)
>>> state = PGD.init(point.delta, step)
>>> state, delta = PGD.update(state, point, step, ball, domain)
>>> delta.tolist()
[0.25, 0.0]
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mwrobust.attacks.geometry import Ball, Domain

Array = jax.Array

_MOMENTUM = 0.75  # The weight of a gradient one step later.


class Point(NamedTuple):
  """A perturbation that was evaluated, with its loss and gradient."""

  delta: Array
  loss: Array
  gradient: Array


class Step(NamedTuple):
  """The settings of one step.

  Attributes:
    eps: the radius of the ball that must contain the next point.
    size: `pgd`, `momentum`: the length of the step.
    keep: l1: the number of coordinates that a step moves, at first.
    sparse: whether the norm is l1.
    renews: whether the next point is the first in a smaller ball.
    checks: `apgd`: whether to look back and adapt.
    window: `apgd`: the number of steps to look back over.
  """

  eps: Array
  size: Array
  keep: Array
  sparse: Array
  renews: Array
  checks: Array
  window: Array


class Rule(NamedTuple):
  """A step rule.

  Attributes:
    init: `init(delta, step) -> state`, called before the first step.
    update: `update(state, point, step, ball, domain) -> (state, delta)`.
  """

  init: Callable
  update: Callable


# ------------------------------------------------------------------------ PGD


class PgdState(NamedTuple):
  """PGD has no state."""


def _pgd_init(delta: Array, step: Step) -> PgdState:
  del delta, step
  return PgdState()


def _pgd_update(
  state: PgdState, point: Point, step: Step, ball: Ball, domain: Domain
) -> tuple[PgdState, Array]:
  """Takes the steepest step, then projects back into the ball."""
  x, gradient = point.delta, point.gradient
  ascent = step.size * ball.ascend(x, gradient, domain, step.keep)
  return state, ball.project(x + ascent, domain, step.eps)


PGD = Rule(_pgd_init, _pgd_update)


# ------------------------------------------------------------------- momentum


class MomentumState(NamedTuple):
  """The sum of the gradients so far, in which older ones weigh less."""

  velocity: Array


def _momentum_init(delta: Array, step: Step) -> MomentumState:
  del step
  return MomentumState(jnp.zeros_like(delta))


def _momentum_update(
  state: MomentumState, point: Point, step: Step, ball: Ball, domain: Domain
) -> tuple[MomentumState, Array]:
  """Takes PGD's step along the decaying sum of the gradients."""
  size = jnp.sum(jnp.abs(point.gradient))
  velocity = point.gradient / jnp.where(size > 0, size, 1)
  velocity += _MOMENTUM * state.velocity
  state = MomentumState(velocity)
  _, delta = _pgd_update(
    PgdState(), point._replace(gradient=velocity), step, ball, domain
  )
  return state, delta


MOMENTUM = Rule(_momentum_init, _momentum_update)


# ----------------------------------------------------------------------- APGD


class ApgdState(NamedTuple):
  """APGD's state for one example.

  Attributes:
    previous: the delta before the last step.
    moved: whether there has been a step yet.
    size: the length of a step.
    best: the point with the highest loss in this ball.
    last_loss: the loss at the previous point.
    rises: the number of times the loss rose since the last check.
    loss_at_check: the highest loss at the last check.
    reduced: whether the last check made the steps smaller.
    keep: l1: the number of coordinates that a step moves.
    support: l1: the number of nonzero coordinates of the best point at the last
      check.
  """

  previous: Array
  moved: Array
  size: Array
  best: Point
  last_loss: Array
  rises: Array
  loss_at_check: Array
  reduced: Array
  keep: Array
  support: Array


def _apgd_init(delta: Array, step: Step) -> ApgdState:
  features = jnp.float32(delta.size)
  return _apgd_begin(delta, step, step.keep, features)


def _apgd_begin(
  delta: Array, step: Step, keep: Array, support: Array
) -> ApgdState:
  # Inside a shard_map the whole state must vary over the devices as delta does.
  zero = jnp.zeros_like(delta[0])
  lowest = zero - jnp.inf
  return ApgdState(
    previous=delta,
    moved=zero > 0,
    size=zero + jnp.where(step.sparse, 1, 2) * step.eps,
    best=Point(delta, lowest, jnp.zeros_like(delta)),
    last_loss=-lowest,
    rises=zero,
    loss_at_check=lowest,
    reduced=zero == 0,
    keep=zero + keep,
    support=zero + support,
  )


def _apgd_update(
  state: ApgdState, point: Point, step: Step, ball: Ball, domain: Domain
) -> tuple[ApgdState, Array]:
  """Steps with momentum; if stuck, halves the step and returns to the best.

  AutoAttack's rule: x' = P(x + 0.75 (P(x + size d) - x) + 0.25 (x - x_old)).
  With l1 there is no momentum, and the checks adapt the sparsity of the steps.
  """
  best = _where(point.loss > state.best.loss, point, state.best)
  rises = state.rises + (point.loss > state.last_loss).astype(jnp.float32)
  state = state._replace(best=best, last_loss=point.loss, rises=rises)

  # `checks` and `renews` are the same for the whole batch, so the `cond` stays
  # one under vmap and skips the work when it is not due.
  state, start = lax.cond(
    step.checks,
    lambda: _apgd_look_back(state, point, step, domain),
    lambda: (state, point),
  )

  def propose():
    x, old = start.delta, state.previous
    proposal = x + state.size * ball.ascend(
      x, start.gradient, domain, state.keep
    )
    proposal = ball.project_for_momentum(proposal, domain, step.eps)
    share = jnp.where(state.moved & ~step.sparse, 0.75, 1.0)
    return x + share * (proposal - x) + (1 - share) * (x - old)

  delta = lax.cond(step.renews, lambda: best.delta, propose)
  delta = ball.project(delta, domain, step.eps)

  def renew():
    keep, support = _fewer(delta, step, domain), _support(delta, step)
    return _apgd_begin(delta, step, keep, support)

  def step_on():
    moved = jnp.ones_like(state.moved)
    return state._replace(previous=start.delta, moved=moved)

  return lax.cond(step.renews, renew, step_on), delta


def _apgd_look_back(
  state: ApgdState, point: Point, step: Step, domain: Domain
) -> tuple[ApgdState, Point]:
  """Adapts the steps; also returns the point where the next one starts."""
  best = state.best
  support = _support(best.delta, step)
  shrank = support < 0.95 * state.support
  sparse_size = jnp.where(shrank, step.eps, state.size / 1.5)
  sparse_size = jnp.clip(sparse_size, step.eps / 10, step.eps)
  stalls = state.rises <= 0.75 * step.window
  stalls |= ~state.reduced & (state.loss_at_check >= best.loss)
  dense_size = jnp.where(stalls, state.size / 2, state.size)
  adapted = state._replace(
    size=jnp.where(step.sparse, sparse_size, dense_size),
    rises=jnp.zeros_like(state.rises),
    loss_at_check=best.loss,
    reduced=stalls,
    keep=_fewer(best.delta, step, domain),
    support=support,
  )
  goes_back = jnp.where(step.sparse, shrank, stalls)
  return adapted, _where(goes_back, best, point)


def _support(delta: Array, step: Step, where: Array | None = None) -> Array:
  """Counts the coordinates that are larger than rounding errors."""
  holds = jnp.abs(delta) > 1e-5 * step.eps
  return jnp.sum(holds, dtype=delta.dtype, where=where)


def _fewer(delta: Array, step: Step, domain: Domain) -> Array:
  """Returns two thirds of the support, without coordinates at their bounds.

  Only coordinates that are free to move get a share of a sparse step.
  """
  edge = 1e-6
  free = (delta > domain.low + edge) & (delta < domain.high - edge)
  return jnp.maximum(_support(delta, step, free) / 1.5, 1)


APGD = Rule(_apgd_init, _apgd_update)
RULES = {'pgd': PGD, 'momentum': MOMENTUM, 'apgd': APGD}


def _where(holds, yes, no):
  return jax.tree.map(lambda y, n: jnp.where(holds, y, n), yes, no)


# ---------------------------------------------------------------- the schedule


def plan(
  rule: str,
  *,
  steps: int,
  eps: float,
  norm: str,
  features: int,
  step_size: float | None = None,
  percentile: float = 99.0,
  radii: Sequence[float] = (1.0,),
) -> list[Step]:
  """Returns the settings of every step of a climb.

  Args:
    rule: `'pgd'`, `'momentum'` or `'apgd'`.
    steps: the total number of gradient steps.
    eps: the radius of the threat.
    norm: the name of its norm.
    features: the number of coefficients.
    step_size: the length of a step. If None, `pgd` takes 2.5 eps / steps, and
      `momentum` the radius of the ball, decaying to 0.
    percentile: with l1, a step moves the top (100 - percentile) %; `apgd`
      ignores it and adapts the number.
    radii: the balls to climb in, one after the other, in multiples of eps.
  """
  lengths = stage_lengths(steps, len(radii))
  if rule != 'apgd':
    keep = max(1, features - math.floor(percentile * features / 100))
  else:
    keep = max(1, math.floor(0.2 * features))
  planned = []
  for stage, (radius, length) in enumerate(zip(radii, lengths, strict=True)):
    checkpoints = [0, *apgd_checkpoints(length, norm)]
    window = dict(zip(checkpoints[1:], np.diff(checkpoints), strict=True))
    for i in range(length):
      renews = i == length - 1 and stage < len(radii) - 1
      if step_size is not None:
        size = step_size
      elif rule == 'momentum':  # From the radius down to 0 in each ball.
        size = radius * eps * (1 - i / length)
      else:
        size = 2.5 * eps / steps
      planned.append(
        Step(
          eps=np.float32(eps * (radii[stage + 1] if renews else radius)),
          size=np.float32(size),
          keep=np.float32(keep),
          sparse=np.bool_(norm == 'l1'),
          renews=np.bool_(renews),
          checks=np.bool_(i in window),
          window=np.float32(window.get(i, 0)),
        )
      )
  return planned


def stage_lengths(steps: int, stages: int) -> list[int]:
  """Divides the steps among the balls; the last ball gets the most.

  >>> stage_lengths(100, 3)
  [30, 30, 40]
  >>> stage_lengths(4, 3)
  [1, 1, 2]
  """
  if stages == 1:
    return [steps]
  before = max(1, math.floor(0.9 * steps / stages))
  return [*[before] * (stages - 1), steps - (stages - 1) * before]


def apgd_checkpoints(steps: int, norm: str) -> list[int]:
  """Returns the steps after which APGD looks back and adapts.

  >>> apgd_checkpoints(100, 'linf')
  [22, 41, 57, 70, 80, 87, 93, 99]
  """
  if norm == 'l1':
    every = max(1, int(0.04 * steps))
    return list(range(every, steps, every))
  window, shortest = max(1, int(0.22 * steps)), max(1, int(0.06 * steps))
  shorter = max(1, int(0.03 * steps))
  checkpoints = [window]
  while True:
    window = max(window - shorter, shortest)
    if checkpoints[-1] + window >= steps:
      return checkpoints
    checkpoints.append(checkpoints[-1] + window)
