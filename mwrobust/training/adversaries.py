"""Adversaries make the images that a mini batch is trained on.

A policy picks one threat per mini batch; the adversary makes the images:

  one   the attack of the chosen threat
  max   all k attacks; for each example, the image with the highest loss
  avg   all k attacks and all their images: the training loss is their mean
  msd   one climb that takes the best of k steps, one per threat, at each step
  none  the images as they are

>>> import jax, jax.numpy as jnp
>>> from mwrobust import attacks
>>> from mwrobust.training import adversaries
>>> threats = attacks.six_threats(linf=0.3, l2=1.0, l1=5.0)
>>> pairs = [(threat, attacks.pgd(steps=10)) for threat in threats]
>>> weights = jnp.linspace(-1, 1, 8 * 8 * 10).reshape(-1, 10)
>>> logits_fn = lambda images: images.reshape(len(images), -1) @ weights
>>> images, labels = jnp.full((4, 8, 8, 1), 0.5), jnp.array([0, 1, 2, 3])
>>> adversary = adversaries.make_adversary('avg', pairs)
>>> index, key, ids, scale = jnp.int32(2), jax.random.key(0), jnp.arange(4), 1.0
>>> images, labels = adversary.perturb(
...   logits_fn, index, key, images, labels, ids, scale
... )
>>> images.shape, labels.tolist()[:8]
((24, 8, 8, 1), [0, 0, 0, 0, 0, 0, 1, 1])

Methods are compared at equal cost. Per example, a mini batch of threat i takes
`gradients[i]` gradient evaluations to make and `copies` to train on:

>>> adversary.gradients.tolist(), adversary.copies
([60.0, 60.0, 60.0, 60.0, 60.0, 60.0], 6)
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mwrobust import attacks
from mwrobust.attacks import losses, norms, spaces
from mwrobust.attacks.checks import (
  check_batch,
  check_key,
  check_logits,
  check_space,
)
from mwrobust.attacks.geometry import make_geometry
from mwrobust.attacks.problem import Batch, Problem, make_problem
from mwrobust.errors import UserError, check_choice

Array = jax.Array
LogitsFn = Callable[[Array], Array]
Pairs = Sequence[tuple[attacks.Threat, attacks.Attack]]

# A forward pass costs a third of a gradient, which also goes back.
_FORWARD = 1 / 3
_FIRST = 2.0  # The length of MSD's first step, in radii.


class Perturbed(NamedTuple):
  """A mini batch to train on.

  Attributes:
    images: [m * B, H, W, C]. The m images of an example are adjacent, so that
      the order does not depend on how a batch is divided among devices.
    labels: the labels of the images, [m * B].
  """

  images: Array
  labels: Array


class Adversary(NamedTuple):
  """Makes the images that a mini batch is trained on.

  Attributes:
    perturb: `perturb(logits_fn, index, key, images, labels, ids, scale)`
      returns the mini batch to train on if the policy has picked threat number
      `index`, which may be traced. The other arguments are those of an attack.
      No gradient flows through the result.
    gradients: float [k], the gradient evaluations of `perturb` per example, by
      index. A forward pass alone counts as a third. An attack that stops early
      takes fewer.
    copies: the number m of images for each example.
  """

  perturb: Callable[..., Perturbed]
  gradients: np.ndarray
  copies: int = 1


def make_adversary(kind: str, pairs: Pairs) -> Adversary:
  """Makes an adversary by name, as configs do.

  Args:
    kind: `'one'`, `'max'`, `'avg'`, `'msd'` or `'none'`.
    pairs: the k threats, each with its attack.
  """
  makers = {
    'one': one,
    'max': worst,
    'avg': every,
    'msd': steepest,
    'none': none,
  }
  check_choice('adversary', kind, makers)
  return makers[kind](pairs)


def one(pairs: Pairs) -> Adversary:
  """Makes an adversary that attacks with the chosen threat."""
  switch = attacks.make_switch(pairs)

  def perturb(logits_fn, index, key, images, labels, ids, scale):
    found = switch(logits_fn, index, key, images, labels, ids, scale)
    return Perturbed(found, labels)

  return Adversary(perturb, _costs(pairs))


def worst(pairs: Pairs) -> Adversary:
  """Makes MAX: for each example, the attacked image with the highest loss.

  Tramer & Boneh, "Adversarial Training and Robustness for Multiple
  Perturbations" (2019).
  """
  switch, k = attacks.make_switch(pairs), len(pairs)

  def perturb(logits_fn, index, key, images, labels, ids, scale):
    del index
    batch = check_batch(images, labels, ids, scale)
    loss_fn = _make_loss(logits_fn, *batch[:2])

    def attack(index):
      found = switch(logits_fn, index, key, *batch)
      return found, loss_fn(found)

    # A `map`, so that attacks with the same rule share a compiled gradient.
    found, _ = _take_highest(*lax.map(attack, jnp.arange(k)))
    return Perturbed(lax.stop_gradient(found), labels)

  return Adversary(perturb, np.full(k, _costs(pairs).sum() + k * _FORWARD))


def every(pairs: Pairs) -> Adversary:
  """Makes AVG: the images of all attacks, so the loss is the mean over threats.

  Tramer & Boneh, "Adversarial Training and Robustness for Multiple
  Perturbations" (2019).
  """
  switch, k = attacks.make_switch(pairs), len(pairs)

  def perturb(logits_fn, index, key, images, labels, ids, scale):
    del index
    attack = lambda index: switch(  # noqa: E731
      logits_fn, index, key, images, labels, ids, scale
    )
    found = jnp.swapaxes(lax.map(attack, jnp.arange(k)), 0, 1)
    by_example = found.reshape(-1, *found.shape[2:])
    return Perturbed(by_example, jnp.repeat(labels, k))

  return Adversary(perturb, np.full(k, _costs(pairs).sum()), copies=k)


def none(pairs: Pairs) -> Adversary:
  """Makes natural training: the images stay as they are."""

  def perturb(logits_fn, index, key, images, labels, ids, scale):
    del logits_fn, index, key, ids, scale
    return Perturbed(images, labels)

  return Adversary(perturb, np.zeros(len(pairs)))


# -------------------------------------------------------------------------- MSD


class _Climb(NamedTuple):
  """The state of the climb.

  Attributes:
    placed: the perturbed images, before the clip to [0, 1]. Each is in the ball
      of the threat that made it.
    best: the images with the highest loss so far, in [0, 1].
    loss: the loss of `best`, [B].
  """

  placed: Array
  best: Array
  loss: Array


def steepest(pairs: Pairs) -> Adversary:
  """Makes MSD: one climb whose every step is the best of k, one per threat.

  Maini, Wong & Kolter, "Adversarial Robustness Against the Union of Multiple
  Perturbation Models" (2020), for threats in any spaces. From the same image
  each threat takes the steepest step of its norm, in its space, and projects
  the result onto its own set around the clean image. Each example continues
  from the candidate with the highest loss, so every image is in the set of at
  least one threat. The result is the best of all steps.

  The climb starts at the image and has as many steps as the longest attack.
  Steps have the attack's `step_size` if it is set. Otherwise the first is two
  radii long, and the length falls linearly to 0: a long step leads from any
  point to near the best of each ball, so that the threats are compared fairly.
  With short steps the climb can get stuck in the ball that leads at the start.
  """
  for threat, attack in pairs:
    if not isinstance(attack, attacks.Ascent):
      raise UserError(
        f'The attack on {threat.name} is {attack!r}, but the adversary msd '
        'climbs gradients: use attacks.pgd(...) or attacks.momentum(...).'
      )
  k, steps = len(pairs), max(attack.steps for _, attack in pairs)

  def perturb(logits_fn, index, key, images, labels, ids, scale):
    del index
    images, labels, ids, scale = check_batch(images, labels, ids, scale)
    key = check_key(key)
    problems = [
      _problem(threat, logits_fn, Batch(images, labels, key, ids, scale))
      for threat, _ in pairs
    ]
    step_fns = [
      _make_step(*pair, problem, steps)
      for pair, problem in zip(pairs, problems, strict=True)
    ]

    loss_fn = _make_loss(logits_fn, images, labels)
    gradient_fn = problems[0].constant(
      jax.grad(lambda images: jnp.sum(_loss(logits_fn, images, labels)))
    )

    def step(i, now: _Climb) -> _Climb:
      # Only the direction matters; rescaling avoids under- and overflow.
      gradient = gradient_fn(jnp.clip(now.placed, 0, 1))
      gradient = jax.vmap(norms.rescale)(gradient)
      placed = jnp.stack([fn(i, now.placed, gradient) for fn in step_fns])
      # A `map`, because k forward passes at once are slower on a CPU.
      loss = lax.map(loss_fn, jnp.clip(placed, 0, 1))
      placed, loss = _take_highest(placed, loss)
      is_best = (loss > now.loss)[:, None, None, None]
      best = jnp.where(is_best, jnp.clip(placed, 0, 1), now.best)
      return _Climb(placed, best, jnp.maximum(loss, now.loss))

    lowest = jnp.full_like(images[:, 0, 0, 0], -jnp.inf)
    start = _Climb(placed=images, best=images, loss=lowest)
    end = lax.fori_loop(0, steps, step, start)
    return Perturbed(lax.stop_gradient(end.best), labels)

  return Adversary(perturb, np.full(k, steps * (1 + k * _FORWARD)))


def _problem(threat: attacks.Threat, logits_fn, batch: Batch) -> Problem:
  """Returns the batch with the geometry of one threat."""
  space, images = spaces.get(threat.space), batch.images
  image = jax.ShapeDtypeStruct(images.shape[1:], images.dtype)
  # The set of 'end' is that of 'inside', which is easier to climb in.
  clip = 'inside' if threat.clip == 'end' else threat.clip
  geometry = make_geometry(space, threat.norm, clip, check_space(space, image))
  return make_problem(logits_fn, batch, geometry)


def _make_step(
  threat: attacks.Threat, attack: attacks.Ascent, problem: Problem, steps: int
) -> Callable[[Array, Array, Array], Array]:
  """Makes `step(i, placed, gradient)`: the candidates of one threat."""
  the_map, ball = problem.geometry
  features = problem.domain.centre.shape[1]
  keep = max(1, features - math.floor(attack.percentile * features / 100))
  if attack.step_size is None:
    sizes = _FIRST * threat.eps * (1 - np.arange(steps) / steps)
  else:
    sizes = np.full(steps, attack.step_size)
  keeps = np.full(steps, keep)
  if spaces.get(threat.space) is spaces.PIXEL:
    # A pixel can move by at most 1, so a longer sparse step needs more pixels.
    keeps = np.maximum(keeps, np.ceil(sizes))
  eps, sizes, keeps = (
    jnp.asarray(values, jnp.float32) for values in (threat.eps, sizes, keeps)
  )
  eps, sizes = problem.scale * eps, problem.scale * sizes

  def step(i, placed, gradient):
    @jax.vmap
    def candidate(domain, placed, gradient):
      delta = the_map.enter(placed).centre - domain.centre
      gradient = the_map.pull_back(domain, delta, placed, gradient)
      ascent = ball.ascend(delta, gradient, domain, keeps[i])
      delta = ball.project(delta + sizes[i] * ascent, domain, eps)
      return the_map.place(domain, delta)[0]

    return candidate(problem.domain, placed, gradient)

  return step


# ---------------------------------------------------------- shared functions


def _loss(logits_fn: LogitsFn, images: Array, labels: Array) -> Array:
  """Returns the cross entropy of each example, infinite where it is NaN."""
  loss = losses.cross_entropy(check_logits(logits_fn(images), labels), labels)
  return jnp.where(jnp.isnan(loss), jnp.inf, loss)


def _make_loss(
  logits_fn: LogitsFn, images: Array, labels: Array
) -> Callable[[Array], Array]:
  """Makes `loss_fn(images)`, fast inside loops, for images of this shape."""
  problem = Problem(logits_fn, images, labels, *[None] * 5)
  return problem.constant(lambda images: _loss(logits_fn, images, labels))


def _take_highest(images: Array, loss: Array) -> tuple[Array, Array]:
  """Returns from images [k, B, ...] those with the highest loss [k, B]."""
  highest = jnp.argmax(loss, axis=0)[None]
  place = highest[:, :, None, None, None]
  return (
    jnp.take_along_axis(images, place, axis=0)[0],
    jnp.take_along_axis(loss, highest, axis=0)[0],
  )


def _costs(pairs: Pairs) -> np.ndarray:
  """Returns the gradient evaluations of each attack, if it does not stop early.

  Forward passes alone rank the targets, evaluate the last point of a try
  (unless it is always the result), and evaluate each step of FAB.
  """

  def cost(attack: attacks.Attack) -> float:
    if isinstance(attack, attacks.Square):
      return attack.tries * attack.queries * _FORWARD
    gradients = attack.tries * attack.steps
    forwards = int(attack.targets > 0)
    if isinstance(attack, attacks.Fab):
      forwards += gradients + attack.tries
    elif attack.result != 'last' or attack.tries > 1:
      forwards += attack.tries
    return gradients + forwards * _FORWARD

  return np.array([cost(attack) for _, attack in pairs])
