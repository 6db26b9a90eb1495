"""The gradient attacks: PGD, SLIDE and APGD are one loop with different rules.

Each iteration evaluates the loss and its gradient once, at the image shown to
the network, and lets the rule choose the next point.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mwrobust.attacks import norms, rules
from mwrobust.attacks.checks import (
  check_choice,
  check_count,
  check_radius,
  is_real,
  require,
)
from mwrobust.attacks.losses import LOSSES, TARGETED
from mwrobust.attacks.problem import Best, Problem, Tried, better, judge

Array = jax.Array

RESULTS = ('last', 'highest', 'fooling')
_SPREAD = 40.0  # See `Plan`.
# Balls that shrink from 6 eps to eps in equal ratios. Where gradients are
# masked, a climb that follows them ends at a far higher loss than one that
# starts near the image, or jumps from 3 eps to eps.
SHRINKING = tuple(round(6 ** (i / 7), 2) for i in range(7, -1, -1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ascent:
  """A gradient attack; made by `pgd`, `slide`, `momentum` or `apgd`.

  Attributes:
    rule: `'pgd'`, `'momentum'` or `'apgd'`.
    steps: the total number of gradient steps.
    loss: the loss to climb: `'ce'`, `'margin'`, `'dlr'` or
      `'probability_margin'`.
    targets: if above 0, the attack climbs towards each of this many likeliest
      wrong classes in turn.
    radii: the balls to climb in, one after the other, in multiples of eps.
      Starting in larger ones avoids masked gradients near the image.
    restarts: the number of random starts.
    step_size: the length of a step in the norm. If None, `pgd` takes 2.5 eps /
      steps, and `momentum` the radius of the ball, decaying to 0.
    percentile: with l1, a step moves the top (100 - percentile) %; `apgd`
      ignores it and adapts the number.
    random_start: whether to start at a random point of the ball, not the image.
    result: which iterate to return: `'last'`, as in the paper; `'highest'`, the
      one with the highest loss; or `'fooling'`, the first that fools the
      network, else the highest. `'fooling'` stops once the batch is fooled.
  """

  rule: str
  steps: int
  loss: str = 'ce'
  targets: int = 0
  radii: tuple[float, ...] = (1.0,)
  restarts: int = 1
  step_size: float | None = None
  percentile: float = 99.0
  random_start: bool = True
  result: str = 'last'

  def __post_init__(self):
    check_choice('rule', self.rule, rules.RULES)
    check_choice('result', self.result, RESULTS)
    check_count('steps', self.steps)
    check_choice('loss', self.loss, LOSSES)
    check_count('targets', self.targets, lowest=0)
    check_count('restarts', self.restarts)
    is_list = isinstance(self.radii, Iterable)
    object.__setattr__(
      self, 'radii', tuple(self.radii) if is_list else self.radii
    )
    require(
      is_list
      and bool(self.radii)
      and all(map(is_real, self.radii))
      and self.radii[-1] == 1
      and all(1 <= radius < 1e6 for radius in self.radii)
      and self.steps >= len(self.radii),
      f'radii={self.radii!r} is not allowed: must be at most '
      f'steps={self.steps} numbers >= 1, of which the last is 1.',
    )
    if self.step_size is not None:
      check_radius('step_size', self.step_size)
    require(
      is_real(self.percentile) and 0 <= self.percentile < 100,
      f'percentile={self.percentile!r} is not allowed: must be a number in '
      '[0, 100).',
    )
    require(
      isinstance(self.random_start, bool),
      f'random_start={self.random_start!r} is not allowed: must be True or '
      'False.',
    )
    require(
      self.random_start or self.restarts == 1,
      f'restarts={self.restarts} is not allowed: without random_start every '
      'start is the same.',
    )

  @property
  def tries(self) -> int:
    """The number of climbs: from each start, towards each target."""
    return self.restarts * max(1, self.targets)

  @property
  def stops_early(self) -> bool:
    """Whether the attack skips examples that are already fooled."""
    return self.result == 'fooling'

  def prepare(self, problem: Problem, eps: float, norm: norms.Norm):
    """Makes `attempt(number, tried) -> tried`."""
    features = problem.domain.centre.shape[1]
    return prepare(
      problem,
      make_plan(
        self, eps=eps, norm=norm.name, features=features, length=self.steps
      ),
      rule=self.rule,
      loss_fn=make_loss(self.loss, targeted=self.targets > 0),
      targets=self.targets,
      result=self.result,
      only_try=self.tries == 1,
    )


def pgd(
  steps: int = 40,
  *,
  percentile: float = 99.0,
  step_size: float | None = None,
  loss: str = 'ce',
  radii: Sequence[float] = (1.0,),
  random_start: bool = True,
  restarts: int = 1,
) -> Ascent:
  """Returns the paper's projected gradient ascent; see `Ascent`."""
  return Ascent(
    rule='pgd',
    steps=steps,
    loss=loss,
    radii=radii,
    restarts=restarts,
    step_size=step_size,
    percentile=percentile,
    random_start=random_start,
  )


def slide(steps: int = 100, **options: Any) -> Ascent:
  """Returns `pgd`, which under l1 takes the sparse steps of SLIDE."""
  return pgd(steps, **options)


def momentum(
  steps: int = 10,
  *,
  percentile: float = 99.0,
  loss: str = 'ce',
  radii: Sequence[float] | None = None,
  random_start: bool = True,
  restarts: int = 1,
  result: str = 'last',
) -> Ascent:
  """Returns PGD with momentum in balls that shrink to the threat's own.

  A network trained against few steps learns to misdirect them; these steps are
  harder to misdirect than those of `pgd` and `apgd`. See `Ascent` for the
  arguments; `radii` are by default `SHRINKING`, or the last of them if there
  are fewer steps.
  """
  check_count('steps', steps)
  return Ascent(
    rule='momentum',
    steps=steps,
    loss=loss,
    radii=SHRINKING[-steps:] if radii is None else radii,
    restarts=restarts,
    percentile=percentile,
    random_start=random_start,
    result=result,
  )


def apgd(
  steps: int = 100,
  *,
  loss: str = 'ce',
  targets: int = 0,
  radii: Sequence[float] | None = None,
  restarts: int = 1,
  result: str = 'fooling',
) -> Ascent:
  """Returns AutoAttack's APGD, which chooses its step sizes itself.

  It starts in larger balls for every norm (AutoAttack does so only for l1),
  which finds most of what gradient masking hides. `radii=(1,)` gives the
  original.

  Args:
    steps: the total number of gradient steps.
    loss: see `Ascent`.
    targets: see `Ascent`. `loss='dlr', targets=9` is AutoAttack's APGD-T.
    radii: see `Ascent`; by default (3, 2, 1), or the last of them if there are
      fewer steps.
    restarts: the number of random starts.
    result: see `Ascent`; use `'highest'` for training.
  """
  check_count('steps', steps)
  return Ascent(
    rule='apgd',
    steps=steps,
    loss=loss,
    targets=targets,
    radii=(3.0, 2.0, 1.0)[-steps:] if radii is None else radii,
    restarts=restarts,
    result=result,
  )


class Plan(NamedTuple):
  """An `Ascent` against a threat as arrays, so that a switch can choose one.

  Attributes:
    count: the number of steps.
    targets: see `Ascent`.
    start_eps: the radius of the ball to start in.
    spread: `apgd`: the start is a uniform point of a ball this many times
      larger, projected. With l1 it then has a few large entries, which differ
      more from start to start than many small ones.
    random_start: see `Ascent`.
    steps: a `rules.Step` of arrays, with an entry for each step.
    counts: for each point, including the last, whether it is in the threat's
      own ball and so may be the result.
  """

  count: Array
  targets: Array
  start_eps: Array
  spread: Array
  random_start: Array
  steps: rules.Step
  counts: Array


def make_plan(
  ascent: Ascent, *, eps: float, norm: str, features: int, length: int
) -> Plan:
  """Makes the plan of a climb, padded to `length` steps for a switch."""
  steps = rules.plan(
    ascent.rule,
    steps=ascent.steps,
    eps=eps,
    norm=norm,
    features=features,
    step_size=ascent.step_size,
    percentile=ascent.percentile,
    radii=ascent.radii,
  )
  start_eps = np.float32(eps * ascent.radii[0])
  radii = np.array([start_eps, *(step.eps for step in steps)])
  padding = length - ascent.steps
  return Plan(
    count=np.int32(ascent.steps),
    targets=np.int32(ascent.targets),
    start_eps=start_eps,
    spread=np.float32(_SPREAD if norm == 'l1' else 1),
    random_start=np.bool_(ascent.random_start),
    steps=jax.tree.map(
      lambda *rows: np.stack(rows), *steps, *[steps[-1]] * padding
    ),
    counts=np.pad(radii <= np.float32(eps), (0, padding)),
  )


def make_loss(
  name: str, targeted: bool
) -> Callable[[Array, Array, Array], Array]:
  """Makes `loss_fn(logits, labels, targets)`."""
  if targeted:
    return TARGETED[name]
  return lambda logits, labels, targets: LOSSES[name](logits, labels)


class _Climb(NamedTuple):
  """The state of a climb."""

  i: Array
  delta: Array
  state: Any
  best: Best
  stuck: Array


def prepare(
  problem: Problem,
  plan: Plan,
  *,
  rule: str,
  loss_fn: Callable[[Array, Array, Array], Array],
  targets: int,
  result: str,
  only_try: bool,
) -> Callable[[Array, Tried], Tried]:
  """Makes `attempt(number, tried) -> tried`, which climbs once.

  Args:
    problem: the batch, the network and the threat.
    plan: the steps; their values may be traced.
    rule: see `Ascent`.
    loss_fn: `loss_fn(logits, labels, targets)`.
    targets: the highest number of targets that the plan may have.
    result: see `Ascent`.
    only_try: whether this is the only climb, with no other to compare.
  """
  keeps_last, stops = result == 'last', result == 'fooling'
  init, update = rules.RULES[rule]
  labels, scale, domain = problem.labels, problem.scale, problem.domain
  the_map, ball = problem.geometry
  others = problem.likeliest_others(targets) if targets else labels[:, None]

  def total_loss(images, target):
    logits = problem.logits(images)
    loss = loss_fn(logits, labels, target)
    return jnp.sum(loss), (loss, logits)

  value_and_grad = problem.constant(
    jax.value_and_grad(total_loss, has_aux=True), labels
  )
  judges_last = not (keeps_last and only_try)
  if judges_last:
    value = problem.constant(lambda *args: total_loss(*args)[1], labels)

  def is_open(best: Best) -> Array:
    """Returns whether a later point may replace the best so far."""
    return ~best.fooled if stops else jnp.ones_like(best.fooled)

  def step_at(i):
    step = jax.tree.map(lambda column: jnp.asarray(column)[i], plan.steps)
    return step._replace(eps=scale * step.eps, size=scale * step.size)

  def attempt(number, tried):
    every_target = jnp.maximum(plan.targets, 1)
    target = jnp.take(others, number % every_target, axis=1)
    keys = problem.keys(number)

    # ---- the start: a random point of the first ball
    start_eps = scale * plan.start_eps
    uniform = jax.vmap(lambda key: noise(key, domain.centre.shape[1]))(keys)

    def start_at(uniform, domain):
      if rule != 'apgd':
        delta = ball.random_start(uniform, start_eps)
        return ball.settle(delta, domain, start_eps)
      delta = ball.random_start(uniform, plan.spread * start_eps)
      return ball.project(delta, domain, start_eps)

    delta = jax.vmap(start_at)(uniform, domain)
    delta = jnp.where(plan.random_start, delta, 0)
    state = jax.vmap(lambda delta: init(delta, step_at(0)))(delta)

    # ---- the steps: loss and gradient once, then the rule
    def step(now: _Climb) -> _Climb:
      placed, shown = problem.place(now.delta)
      (_, (loss, logits)), gradient = value_and_grad(shown, target)
      found = judge(now.delta, loss, logits, labels)
      best = now.best
      if not keeps_last:
        counts = jnp.asarray(plan.counts)[now.i]
        best = better(best, found, counts & is_open(best))
      stuck = jnp.all(gradient == 0, axis=(1, 2, 3))
      # Only the direction matters; rescaling avoids under- and overflow.
      gradient = jax.vmap(norms.rescale)(gradient)
      gradient = jax.vmap(the_map.pull_back)(
        domain, now.delta, placed, gradient
      )
      row = step_at(now.i)
      state, delta = jax.vmap(
        lambda state, point, domain: update(state, point, row, ball, domain)
      )(now.state, rules.Point(now.delta, found.loss, gradient), domain)
      return _Climb(now.i + 1, delta, state, best, stuck)

    def goes_on(now: _Climb) -> Array:
      more = now.i < plan.count
      return more & jnp.any(is_open(now.best)) if stops else more

    start = _Climb(jnp.int32(0), delta, state, tried.best, tried.stuck)
    end = lax.while_loop(goes_on, step, start)
    spent = tried.spent.plus(gradients=end.i)

    # ---- the last point has not been evaluated yet
    if not judges_last:
      return Tried(tried.best._replace(delta=end.delta), end.stuck, spent)
    loss, logits = value(problem.final_images(end.delta), target)
    found = judge(end.delta, loss, logits, labels)
    best = better(end.best, found, is_open(end.best))
    return Tried(best, end.stuck, spent.plus(forwards=1))

  return attempt


def noise(key: Array, size: int) -> Array:
  """Returns the noise that `norms.Norm.random_start` takes."""
  above = np.nextafter(np.float32(-1), np.float32(0))
  return jax.random.uniform(key, (size + 2,), jnp.float32, minval=above)
