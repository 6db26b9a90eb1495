"""What all attacks share: the batch, the network, and what was found so far."""

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
    loss: [B], what the attack climbs; -inf before the first.
    fooled: bool [B], whether the network is wrong there.
  """

  delta: Array
  loss: Array
  fooled: Array


class Spent(NamedTuple):
  """What was evaluated while an example was in the batch, int32 [B].

  Attributes:
    gradients: gradients of the loss, each with its forward pass.
    forwards: forward passes without a gradient.
  """

  gradients: Array
  forwards: Array

  def plus(self, *, gradients: Array | int = 0, forwards: Array | int = 0):
    """Returns the sum."""
    return Spent(self.gradients + gradients, self.forwards + forwards)


class Tried(NamedTuple):
  """The outcome of all tries so far.

  Attributes:
    best: what they have found.
    stuck: bool [B], whether the last gradient was zero in every pixel.
    spent: what they have cost.
  """

  best: Best
  stuck: Array
  spent: Spent


class Problem(NamedTuple):
  """A batch and the threat to it; what is per example has a first axis B."""

  logits_fn: Callable[[Array], Array]
  images: Array
  labels: Array
  key: Array
  ids: Array
  scale: Array  # What multiplies the radius.
  geometry: Geometry
  domain: Domain

  @property
  def nothing(self) -> Tried:
    """What there is before the first try: the images themselves."""
    loss = jnp.full_like(self.images[:, 0, 0, 0], -jnp.inf)
    delta = jnp.zeros_like(self.domain.centre)
    no, zero = jnp.zeros_like(loss, bool), jnp.zeros_like(loss, jnp.int32)
    return Tried(Best(delta, loss, no), no, Spent(zero, zero))

  def keys(self, number: Array) -> Array:
    """Returns a key for each example, by its id and the number of the try."""
    key = jax.random.fold_in(self.key, number)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, self.ids)

  def place(self, delta: Array) -> tuple[Array, Array]:
    """Returns the perturbed images, and what the network is shown of them."""
    return jax.vmap(self.geometry.map.place)(self.domain, delta)

  def final_images(self, delta: Array) -> Array:
    """Returns the perturbed images as they are judged."""
    return jnp.clip(self.place(delta)[0], 0, 1)

  def logits(self, images: Array) -> Array:
    """Returns the network's answer in float32."""
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
    """Traces `function(images, *more)` once, what it closes over held constant.

    An attack inside a loss is then no part of that loss's derivative. It is
    evaluated with convolutions that are fast inside loops.
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


def judge(delta: Array, loss: Array, logits: Array, labels: Array) -> Best:
  """Tells whether the network is fooled. One that answers NaN is."""
  is_nan = jnp.isnan(logits).any(axis=1)
  fooled = is_nan | (logits.argmax(axis=1) != labels)
  loss = jnp.where(is_nan | jnp.isnan(loss), jnp.inf, loss)
  return Best(delta, loss, fooled)


def better(best: Best, found: Best, holds: Array | bool = True) -> Best:
  """Keeps, for each example, what fools the network, then the higher loss.

  Args:
    best: so far.
    found: another.
    holds: bool [B] or scalar; where it is False, `best` stays.
  """
  higher = (found.fooled == best.fooled) & (found.loss > best.loss)
  replaces = holds & ((found.fooled & ~best.fooled) | higher)
  return Best(
    jnp.where(replaces[:, None], found.delta, best.delta),
    jnp.where(replaces, found.loss, best.loss),
    jnp.where(replaces, found.fooled, best.fooled),
  )
