"""The jitted functions of a run: a step of training, a step of evaluation."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mwrobust import attacks, averaging, datasets, losses
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
  threats: Sequence[attacks.Threat],
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
    threats: the k losses.
    key: all randomness of a step is folded in from it and the step's number.
    radius_scale: by the step: what share of their radii the threats have.
    augment: crop and flip the images first.
    attacked: False leaves the images as they are (natural training).
  """
  switch = attacks.make_switch(threats)

  def train_step(state: TrainState, index: Array, batch: Batch):
    attack_key, augment_key = jax.random.split(
      jax.random.fold_in(key, state.step)
    )
    images = _to_float(batch.images)
    if augment:
      images = datasets.augment(augment_key, images, batch.ids)
    if attacked:

      def logits_fn(images):  # BatchNorm by its running statistics.
        return model.apply(state.variables, images, train=False)

      images = switch(
        logits_fn,
        index,
        attack_key,
        images,
        batch.labels,
        batch.ids,
        scale=radius_scale(state.step),
      )

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

  return jax.jit(train_step, donate_argnums=0)


def make_eval_step(
  *, model: nn.Module, threats: Sequence[attacks.Threat], key: Array
):
  """Makes `eval_step(members, index, batch, scale) -> (losses, correct)`.

  Both results are per example, [B]. `members` is a tuple of variables: one
  network, or several whose mean softmax is attacked as one. Index k, one past
  the threats, leaves the images as they are.

  Args:
    model: a linen module.
    threats: the k losses.
    key: all randomness is folded in from it and the examples' ids.
  """
  switch = attacks.make_switch(threats)

  @jax.jit
  def eval_step(
    members: tuple[Any, ...], index: Array, batch: Batch, scale: Array
  ):
    def member_fn(variables):
      return lambda images: model.apply(variables, images, train=False)

    member_fns = [member_fn(variables) for variables in members]
    if len(members) == 1:
      logits_fn = member_fns[0]
    else:
      logits_fn = averaging.ensemble(member_fns)

    def attacked(images):
      labels, ids = batch.labels, batch.ids
      return switch(logits_fn, index, key, images, labels, ids, scale=scale)

    images = _to_float(batch.images)
    images = jax.lax.cond(
      index < len(threats), attacked, lambda images: images, images
    )
    logits = logits_fn(images)
    correct = logits.argmax(-1) == batch.labels
    return losses.cross_entropy(logits, batch.labels), correct

  return eval_step


def _to_float(images: Array) -> Array:
  return images.astype(jnp.float32) / 255
