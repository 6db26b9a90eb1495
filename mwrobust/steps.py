"""The jitted functions of a run: a step of training, a step of validation."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mwrobust import attacks
from mwrobust import data as data_lib
from mwrobust.attacks import losses
from mwrobust.runtime import devices
from mwrobust.state import TrainState

Array = jax.Array


class Batch(NamedTuple):
  """Examples as they are stored: uint8 images, int32 labels and ids, [B]."""

  images: Array
  labels: Array
  ids: Array


def make_train_step(
  *,
  model: nn.Module,
  pairs: Sequence[tuple[attacks.Threat, attacks.Attack]],
  key: Array,
  radius_scale: Callable[[Array], Array],
  augment: bool,
  attacked: bool,
):
  """Makes `train_step(state, index, batch) -> (state, loss)`.

  The batch is attacked by threat number `index`, then the cross entropy on what
  came out takes one step down (the inner loop of Figure 3). The state is
  donated: use the one that is returned.

  Args:
    model: a linen module.
    pairs: the k threats, each with its attack.
    key: all randomness of a step is folded in from it and the step's number.
    radius_scale: by the step: what share of their radii the threats have.
    augment: crop and flip the images first.
    attacked: False leaves the images as they are (natural training).
  """
  attack = _make_attack(model, attacks.make_switch(pairs))

  def train_step(state: TrainState, index: Array, batch: Batch):
    attack_key, augment_key = jax.random.split(
      jax.random.fold_in(key, state.step)
    )
    images = _to_float(batch.images)
    if augment:
      images = data_lib.augment(augment_key, images, batch.ids)
    if attacked:
      shared = state.variables, index, attack_key, radius_scale(state.step)
      images = attack(shared, (images, batch.labels, batch.ids))

    def loss_fn(params):
      logits, updated = model.apply(
        {'params': params, 'batch_stats': state.batch_stats},
        images,
        train=True,
        mutable=['batch_stats'],
      )
      loss = losses.cross_entropy(logits, batch.labels).mean()
      return loss, updated.get('batch_stats', {})

    gradient_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, batch_stats), gradient = gradient_fn(state.params)
    state = state.apply_gradients(grads=gradient, batch_stats=batch_stats)
    return state, loss

  return jax.jit(
    train_step, donate_argnums=0, out_shardings=devices.replicated()
  )


def make_validation_step(
  *,
  model: nn.Module,
  pairs: Sequence[tuple[attacks.Threat, attacks.Attack]],
  key: Array,
):
  """Makes `validation_step(variables, index, batch, scale) -> losses [B]`.

  Args:
    model: a linen module.
    pairs: the k threats, each with its attack.
    key: all randomness is folded in from it and the examples' ids.
  """
  attack = _make_attack(model, attacks.make_switch(pairs))

  def validation_step(
    variables: Any, index: Array, batch: Batch, scale: Array
  ) -> Array:
    shared = variables, index, key, scale
    images = _to_float(batch.images)
    images = attack(shared, (images, batch.labels, batch.ids))
    logits = model.apply(variables, images, train=False)
    return losses.cross_entropy(logits, batch.labels)

  return jax.jit(validation_step, out_shardings=devices.replicated())


def _make_attack(model: nn.Module, switch: Callable[..., Any]):
  """Makes `attack(shared, (images, labels, ids))`, device by device.

  The examples share variables, index, key and scale.
  """

  def attack(shared, batch):
    variables, index, key, scale = shared
    # BatchNorm uses its running statistics.
    logits_fn = functools.partial(model.apply, variables, train=False)
    return switch(logits_fn, index, key, *batch, scale)

  return devices.by_example(attack)


def _to_float(images: Array) -> Array:
  return images.astype(jnp.float32) / 255
