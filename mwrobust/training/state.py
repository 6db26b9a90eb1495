"""The state of a run, as one pytree."""

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
  """Flax's TrainState with BatchNorm statistics and the policy's state."""

  outer_step: jax.Array  # The number t of complete outer steps.
  chosen: jax.Array  # int32 [k], the mini batches of each threat so far.
  batch_stats: Any
  policy: policies.State

  def apply_gradients(
    self, *, grads: Any, learning_rate: jax.Array, **changes: Any
  ) -> 'TrainState':
    """Takes one step of the optimizer, scaled by `learning_rate`."""
    updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
    updates = jax.tree.map(lambda update: learning_rate * update, updates)
    return self.replace(
      step=self.step + 1,
      params=optax.apply_updates(self.params, updates),
      opt_state=opt_state,
      **changes,
    )

  @property
  def variables(self) -> dict[str, Any]:
    """The variables of `model.apply`: parameters and BatchNorm statistics."""
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
    policy_state = policy.init()
    k = len(policy.probabilities(policy_state, 0))
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      apply_fn=model.apply,
      params=variables['params'],
      tx=optimizer,
      opt_state=optimizer.init(variables['params']),
      outer_step=jnp.zeros((), jnp.int32),
      chosen=jnp.zeros(k, jnp.int32),
      batch_stats=variables.get('batch_stats', {}),
      policy=policy_state,
    )

  return jax.jit(init, out_shardings=devices.replicated())()


def make_learning_rate(
  config: ml_collections.ConfigDict,
  steps_per_epoch: int,
  epochs: float | None = None,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Makes `learning_rate(step, progress)` for the schedule of the config.

  `'one_cycle'` and `'cosine'` follow the progress, which goes from 0 to 1 over
  the whole training; `'steps'` follows the epochs.

  Args:
    config: the fields of `config.optimizer`.
    steps_per_epoch: the number of mini batches in an epoch.
    epochs: with a budget, whose epochs are not known in advance, the number of
      epochs that the drops of `'steps'` are a share of.
  """
  rate = config.learning_rate
  if config.schedule == 'one_cycle':
    whole = 10_000  # Optax needs an integer number of steps.
    cycle = optax.cosine_onecycle_schedule(whole, rate)
    return lambda step, progress: cycle(whole * progress)
  if config.schedule == 'cosine':
    decay = optax.cosine_decay_schedule(rate, 1)
    return lambda step, progress: decay(progress)
  whole = steps_per_epoch if epochs is None else 1 / epochs
  drops = {epoch * whole: 0.1 for epoch in config.drops}
  constant = optax.piecewise_constant_schedule(rate, drops)
  if epochs is None:
    return lambda step, progress: constant(step)
  return lambda step, progress: constant(progress)


def make_optimizer(
  config: ml_collections.ConfigDict,
) -> optax.GradientTransformation:
  """Makes the optimizer of the config, with a learning rate of 1."""
  optimizer = {
    'sgd': lambda: optax.sgd(1.0, config.momentum),
    'adam': lambda: optax.adam(1.0),
    'adamw': lambda: optax.adamw(1.0, weight_decay=config.weight_decay),
  }[config.name]()
  if config.l2:
    # The gradient of l2 * sum(kernel^2), Keras's l2 regularisation.
    decay = optax.add_decayed_weights(2 * config.l2, _is_conv_kernel)
    optimizer = optax.chain(decay, optimizer)
  return optimizer


def _is_conv_kernel(params: Any) -> Any:
  return jax.tree.map(lambda leaf: leaf.ndim == 4, params)
