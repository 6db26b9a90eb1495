"""What all attacks share: the batch, the network, and the results so far."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mwrobust.attacks import convolutions
from mwrobust.attacks.checks import check_logits, require
from mwrobust.attacks.geometry import Domain, Geometry

Array = jax.Array


class Best(NamedTuple):
  """The best perturbation so far of each example.

  Attributes:
    delta: [B, n], in the coefficients of the threat's space.
    loss: [B], the loss that the attack climbs; -inf before the first point.
    fooled: bool [B], whether the network is wrong there.
  """

  delta: Array
  loss: Array
  fooled: Array


class Spent(NamedTuple):
  """The evaluations of the batch that an example was in, int32 [B].

  Attributes:
    gradients: the number of loss gradients, each with its forward pass.
    forwards: the number of forward passes without a gradient.
  """

  gradients: Array
  forwards: Array

  def plus(self, *, gradients: Array | int = 0, forwards: Array | int = 0):
    """Returns the counts with these added."""
    return Spent(self.gradients + gradients, self.forwards + forwards)


class Tried(NamedTuple):
  """The outcome of all tries so far.

  Attributes:
    best: the best perturbation found.
    stuck: bool [B], whether the last gradient was zero in every pixel.
    spent: the evaluations made.
  """

  best: Best
  stuck: Array
  spent: Spent


class Batch(NamedTuple):
  """The checked arguments of an attack besides the network."""

  images: Array
  labels: Array
  key: Array
  ids: Array
  scale: Array


class Problem(NamedTuple):
  """A batch and its threat; fields per example have a first axis B."""

  logits_fn: Callable[[Array], Array]
  images: Array
  labels: Array
  key: Array
  ids: Array
  scale: Array  # Multiplies the radius.
  geometry: Geometry
  domain: Domain

  @property
  def nothing(self) -> Tried:
    """The result before the first try: the images themselves."""
    loss = jnp.full_like(self.images[:, 0, 0, 0], -jnp.inf)
    delta = jnp.zeros_like(self.domain.centre)
    no, zero = jnp.zeros_like(loss, bool), jnp.zeros_like(loss, jnp.int32)
    return Tried(Best(delta, loss, no), no, Spent(zero, zero))

  def keys(self, number: Array) -> Array:
    """Returns a key for each example, from its id and the number of the try."""
    key = jax.random.fold_in(self.key, number)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, self.ids)

  def place(self, delta: Array) -> tuple[Array, Array]:
    """Returns the perturbed images, and the images shown to the network."""
    return jax.vmap(self.geometry.map.place)(self.domain, delta)

  def final_images(self, delta: Array) -> Array:
    """Returns the perturbed images as they are judged."""
    return jnp.clip(self.place(delta)[0], 0, 1)

  def logits(self, images: Array) -> Array:
    """Returns the network's logits in float32."""
    return check_logits(self.logits_fn(images), self.labels)

  def likeliest_others(self, count: int) -> Array:
    """Returns the `count` likeliest wrong classes of each image, [B, count]."""
    logits = self.constant(self.logits)(self.images)
    classes = logits.shape[1]
    require(
      count < classes,
      f'targets={count} is not allowed: must be at most {classes - 1}, as the '
      f'network has {classes} classes.',
    )
    is_label = jax.nn.one_hot(self.labels, classes, dtype=bool)
    logits = jnp.where(is_label, -jnp.inf, jnp.nan_to_num(logits))
    order = jnp.argsort(logits, axis=1, descending=True)[:, :count]
    return order.astype(self.labels.dtype)

  def constant(self, function: Callable, *more: Array) -> Callable:
    """Traces `function(images, *more)` with its closure held constant.

    An attack inside a loss is then not differentiated with that loss. The
    result is evaluated with convolutions that are fast inside loops.
    """
    traced, shape = jax.make_jaxpr(function, return_shape=True)(
      self.images, *more
    )
    consts = lax.stop_gradient(traced.consts)
    tree = jax.tree.structure(shape)

    def call(*args):
      flat = jax.tree.leaves(args)
      results = convolutions.eval_jaxpr(traced.jaxpr, consts, *flat)
      return jax.tree.unflatten(tree, results)

    return call


def make_problem(
  logits_fn: Callable[[Array], Array], batch: Batch, geometry: Geometry
) -> Problem:
  """Makes the problem of a batch and a threat's geometry."""
  domain = jax.vmap(geometry.map.enter)(batch.images)
  return Problem(logits_fn, *batch, geometry, domain)


def judge(delta: Array, loss: Array, logits: Array, labels: Array) -> Best:
  """Returns whether the network is fooled; NaN logits count as fooled.

  A loss can also be NaN where the logits are not: infinity minus infinity. Such
  a point is the worst of those that do not fool the network.
  """
  is_nan = jnp.isnan(logits).any(axis=1)
  fooled = is_nan | (logits.argmax(axis=1) != labels)
  loss = jnp.where(jnp.isnan(loss), -jnp.inf, loss)
  loss = jnp.where(is_nan, jnp.inf, loss)
  return Best(delta, loss, fooled)


def better(best: Best, found: Best, holds: Array | bool = True) -> Best:
  """Keeps the better of two for each example: fooling first, then by loss.

  Args:
    best: the best so far.
    found: the candidate.
    holds: bool [B] or scalar; where it is False, `best` is kept.
  """
  higher = (found.fooled == best.fooled) & (found.loss > best.loss)
  replaces = holds & ((found.fooled & ~best.fooled) | higher)
  return Best(
    jnp.where(replaces[:, None], found.delta, best.delta),
    jnp.where(replaces, found.loss, best.loss),
    jnp.where(replaces, found.fooled, best.fooled),
  )
