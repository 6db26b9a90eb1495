"""The jitted functions of a run: a training step and a validation step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax

from mwrobust import attacks, data
from mwrobust.attacks import convolutions, losses
from mwrobust.runtime import devices
from mwrobust.training.adversaries import Adversary
from mwrobust.training.policies import Policy
from mwrobust.training.state import TrainState

Array = jax.Array
Pairs = Sequence[tuple[attacks.Threat, attacks.Attack]]


class Batch(NamedTuple):
  """Examples as stored: uint8 images, int32 labels and ids, [B]."""

  images: Array
  labels: Array
  ids: Array


def make_train_step(
  *,
  model: nn.Module,
  adversary: Adversary,
  policy: Policy,
  key: Array,
  progress: Callable[[Array], Array],
  learning_rate: Callable[[Array, Array], Array],
  radius_scale: Callable[[Array], Array],
  augment: bool = False,
  precision: str = 'float32',
):
  """Makes `train_step(state, index, batch) -> (state, loss)`.

  The adversary perturbs the batch, with threat number `index` if it uses only
  one; then the optimizer takes one step on the cross entropy of the result (the
  inner loop of Figure 3). The state is donated: use the returned one.

  Args:
    model: a linen module.
    adversary: makes the images that a mini batch is trained on.
    policy: observes the loss and accuracy of each mini batch.
    key: the source of all randomness, together with the step's number.
    progress: `progress(chosen)` is the share of training done.
    learning_rate: a function of the step and the progress before it.
    radius_scale: the factor of the radii, by the progress after the step.
    augment: whether to crop and flip the images first.
    precision: the dtype of the network in training; attacks use float32.
  """

  def perturb(shared, batch):
    variables, index, key, scale = shared
    logits_fn = _logits_fn(model, variables)
    return adversary.perturb(logits_fn, index, key, *batch, scale)

  perturb = devices.by_example(perturb)
  gradient_fn = _make_gradient(model, adversary.copies, precision)

  def train_step(state: TrainState, index: Array, batch: Batch):
    attack_key, augment_key, dropout_key = jax.random.split(
      jax.random.fold_in(key, state.step), 3
    )
    images = _to_float(batch.images)
    if augment:
      images = data.augment(augment_key, images, batch.ids)
    chosen = state.chosen.at[index].add(1)
    scale = radius_scale(progress(chosen))
    shared = state.variables, index, attack_key, scale
    images, labels = perturb(shared, (images, batch.labels, batch.ids))

    batch_stats, (loss, accuracy, gradient) = gradient_fn(
      state, dropout_key, images, labels
    )
    state = state.apply_gradients(
      grads=gradient,
      learning_rate=learning_rate(state.step, progress(state.chosen)),
      chosen=chosen,
      batch_stats=batch_stats,
      policy=policy.observe(state.policy, index, loss, accuracy),
    )
    return state, loss

  return jax.jit(
    train_step, donate_argnums=0, out_shardings=devices.replicated()
  )


def _make_gradient(model: nn.Module, copies: int, precision: str):
  """Makes the function that differentiates the mean loss of a mini batch.

  The copies of the examples go through the network one after the other: all at
  once would leave the cache, and take half as long again on a CPU. BatchNorm
  normalises each by its own statistics, as in separate forward passes.

  Returns:
    `gradient_fn(state, key, images, labels)`, which returns
    `(batch_stats, (loss, accuracy, gradient))`.
  """

  def loss_fn(params, batch_stats, key, images, labels):
    params, images = jax.tree.map(
      lambda x: x.astype(precision), (params, images)
    )
    logits, updated = model.apply(
      {'params': params, 'batch_stats': batch_stats},
      images,
      train=True,
      mutable=['batch_stats'],
      rngs={'dropout': key},
    )
    logits = logits.astype(jnp.float32)
    loss = losses.cross_entropy(logits, labels).mean()
    accuracy = jnp.mean(logits.argmax(axis=1) == labels)
    return loss, (accuracy, updated.get('batch_stats', {}))

  def of_one_copy(params, batch_stats, batch):
    (loss, (accuracy, batch_stats)), gradient = jax.value_and_grad(
      loss_fn, has_aux=True
    )(params, batch_stats, *batch)
    return batch_stats, (loss, accuracy, gradient)

  def gradient_fn(state: TrainState, key: Array, images: Array, labels: Array):
    if copies == 1:
      batch = key, images, labels
      return of_one_copy(state.params, state.batch_stats, batch)

    def by_copy(x: Array) -> Array:
      return x.reshape(-1, copies, *x.shape[1:]).swapaxes(0, 1)

    def add(carry, batch):
      batch_stats, total = carry
      batch_stats, found = fast(of_one_copy)(state.params, batch_stats, batch)
      return (batch_stats, jax.tree.map(jnp.add, total, found)), None

    fast = convolutions.fast
    nothing = jnp.zeros(()), jnp.zeros(()), optax.tree.zeros_like(state.params)
    keys = jax.random.split(key, copies)
    batches = keys, by_copy(images), by_copy(labels)
    start = state.batch_stats, nothing
    (batch_stats, total), _ = lax.scan(add, start, batches)
    return batch_stats, jax.tree.map(lambda x: x / copies, total)

  return gradient_fn


class Judged(NamedTuple):
  """The cross entropy of each example, and whether it is correct, [B]."""

  losses: Array
  correct: Array


def make_validation_step(*, model: nn.Module, pairs: Pairs, key: Array):
  """Makes `validation_step(variables, index, batch, scale) -> Judged`.

  Args:
    model: a linen module.
    pairs: the k threats, each with its attack.
    key: the source of all randomness, together with the examples' ids.
  """
  switch = attacks.make_switch(pairs)

  def attack(shared, batch):
    variables, index, scale = shared
    logits_fn = _logits_fn(model, variables)
    return switch(logits_fn, index, key, *batch, scale)

  attack = devices.by_example(attack)

  def validation_step(
    variables: Any, index: Array, batch: Batch, scale: Array
  ) -> Judged:
    images, labels = _to_float(batch.images), batch.labels
    images = attack((variables, index, scale), (images, labels, batch.ids))
    return _judge(model, variables, images, labels)

  return jax.jit(validation_step, out_shardings=devices.replicated())


def make_natural_step(*, model: nn.Module):
  """Makes `natural_step(variables, batch) -> Judged`, without an attack."""

  def natural_step(variables: Any, batch: Batch) -> Judged:
    return _judge(model, variables, _to_float(batch.images), batch.labels)

  return jax.jit(natural_step, out_shardings=devices.replicated())


def _judge(model, variables, images, labels) -> Judged:
  logits = _logits_fn(model, variables)(images)
  correct = logits.argmax(axis=1) == labels
  return Judged(losses.cross_entropy(logits, labels), correct)


def _logits_fn(model: nn.Module, variables: Any):
  """Returns the network for attacks; BatchNorm uses its running statistics."""
  return functools.partial(model.apply, variables, train=False)


def _to_float(images: Array) -> Array:
  return images.astype(jnp.float32) / 255
