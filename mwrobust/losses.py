"""Per-example losses: what attacks climb and training descends."""

import jax
import jax.numpy as jnp

Array = jax.Array


def cross_entropy(logits: Array, labels: Array) -> Array:
  """-log softmax(logits) of the label, [B]."""
  return -_pick(jax.nn.log_softmax(logits), labels)


def margin(logits: Array, labels: Array) -> Array:
  """The largest other logit minus the label's, [B]: above 0 is an error.

  Its gradient does not vanish where the network is sure of itself, as that of
  the cross entropy does.
  """
  is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
  others = jnp.where(is_label, -jnp.inf, logits)
  return jnp.max(others, axis=-1) - _pick(logits, labels)


def _pick(values: Array, labels: Array) -> Array:
  return jnp.take_along_axis(values, labels[:, None], axis=-1)[:, 0]


LOSSES = {'ce': cross_entropy, 'margin': margin}
