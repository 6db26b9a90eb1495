"""All that changes during a run, as one pytree."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import optax
from flax.training import train_state

from mwrobust.runtime import devices
from mwrobust.training import policies


class TrainState(train_state.TrainState):
  """Flax's TrainState, with BatchNorm's statistics and the policy's state."""

  outer_step: jax.Array  # Outer steps t that are complete.
  batch_stats: Any
  policy: policies.State

  @property
  def variables(self) -> dict[str, Any]:
    """What `model.apply` takes: parameters and BatchNorm's statistics."""
    return {'params': self.params, 'batch_stats': self.batch_stats}


def create(
  key: jax.Array,
  model: nn.Module,
  image_shape: tuple[int, ...],
  optimizer: optax.GradientTransformation,
  policy: policies.Policy,
) -> TrainState:
  """Makes the state before the first step."""

  def init():
    images = jnp.zeros((1, *image_shape))
    variables = model.init(key, images, train=False)
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      apply_fn=model.apply,
      params=variables['params'],
      tx=optimizer,
      opt_state=optimizer.init(variables['params']),
      outer_step=jnp.zeros((), jnp.int32),
      batch_stats=variables.get('batch_stats', {}),
      policy=policy.init(),
    )

  return jax.jit(init, out_shardings=devices.replicated())()


def make_optimizer(
  config: ml_collections.ConfigDict, steps_per_epoch: int, total_steps: int
) -> tuple[optax.GradientTransformation, Callable[[int], jax.Array]]:
  """Makes the optimizer of the config, and its learning rate by step."""
  rate = config.learning_rate
  if config.schedule == 'one_cycle':
    schedule = optax.cosine_onecycle_schedule(total_steps, rate)
  elif config.schedule == 'cosine':
    schedule = optax.cosine_decay_schedule(rate, total_steps)
  else:
    drops = {epoch * steps_per_epoch: 0.1 for epoch in config.drops}
    schedule = optax.piecewise_constant_schedule(rate, drops)
  optimizer = {
    'sgd': lambda: optax.sgd(schedule, config.momentum),
    'adam': lambda: optax.adam(schedule),
    'adamw': lambda: optax.adamw(schedule, weight_decay=config.weight_decay),
  }[config.name]()
  if config.l2:
    # The slope of l2 * sum(kernel^2), which Keras calls l2 regularisation.
    decay = optax.add_decayed_weights(2 * config.l2, _is_conv_kernel)
    optimizer = optax.chain(decay, optimizer)
  return optimizer, schedule


def _is_conv_kernel(params: Any) -> Any:
  return jax.tree.map(lambda leaf: leaf.ndim == 4, params)
