"""Per-example losses: what attacks climb and training descends.

Every loss maps logits [B, K] and labels [B] to [B] and rises as the network
comes nearer to an error. Each of `LOSSES` has a targeted form, which rises as
the class `targets` [B] comes nearer to being the answer.
"""

import jax
import jax.numpy as jnp

Array = jax.Array


def cross_entropy(logits: Array, labels: Array) -> Array:
  """Returns -log softmax(logits) of the label."""
  return -_pick(jax.nn.log_softmax(logits), labels)


def log_odds(logits: Array, labels: Array) -> Array:
  """Returns the log odds against the label, log((1 - p) / p) - log(K - 1).

  The cross entropy is a rising function of them, so climbing either takes the
  same steps. But where the network is very confident, p rounds to 1 and the
  cross entropy to 0, and where its logits hardly differ, the cross entropy
  rounds to log K: scaling the logits would stop the climb. The log odds are
  accurate at every scale.
  """
  others = ~jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
  ahead = logits - _pick(logits, labels)[:, None]
  ahead = jnp.where(others, ahead, -jnp.inf)
  most = jnp.max(ahead, axis=-1)
  # Near 0, `expm1` and `log1p` keep the digits that a shift would lose.
  shifted = (jnp.abs(most) > 1) & jnp.isfinite(most)
  shift = jax.lax.stop_gradient(jnp.where(shifted, most, 0))
  odds = jnp.expm1(ahead - shift[:, None])
  return shift + jnp.log1p(jnp.mean(odds, axis=-1, where=others))


def margin(logits: Array, labels: Array) -> Array:
  """Returns the largest other logit minus the label's: above 0 is an error.

  Its gradient does not vanish where the network is very confident.
  """
  return _largest_other(logits, labels) - _pick(logits, labels)


def probability_margin(logits: Array, labels: Array) -> Array:
  """Returns the largest other probability minus the label's."""
  return margin(jax.nn.softmax(logits), labels)


def dlr(logits: Array, labels: Array) -> Array:
  """Returns the margin, divided by the largest minus the third largest logit.

  This is AutoAttack's loss: the scale of the logits cancels. With two classes
  there is no third logit, and the margin itself is returned: the scale does not
  change the direction of its gradient.
  """
  if logits.shape[-1] < 3:
    return margin(logits, labels)
  largest, _, third = _largest(logits, 3)
  return _quotient(margin(logits, labels), largest - third)


def targeted_log_odds(logits: Array, labels: Array, targets: Array) -> Array:
  """Returns the log odds of the target."""
  del labels
  return -log_odds(logits, targets)


def targeted_margin(logits: Array, labels: Array, targets: Array) -> Array:
  """Returns the target's logit minus the label's."""
  return _pick(logits, targets) - _pick(logits, labels)


def targeted_probability_margin(
  logits: Array, labels: Array, targets: Array
) -> Array:
  """Returns the target's probability minus the label's."""
  return targeted_margin(jax.nn.softmax(logits), labels, targets)


def targeted_dlr(logits: Array, labels: Array, targets: Array) -> Array:
  """Returns AutoAttack's targeted loss, scaled by the four largest logits.

  With three classes the target may itself be the third and the quotient a
  constant, so no gradient flows through the scale. With two, see `dlr`.
  """
  margins = targeted_margin(logits, labels, targets)
  classes = logits.shape[-1]
  if classes < 3:
    return margins
  if classes == 3:
    largest, _, third = jax.lax.stop_gradient(_largest(logits, 3))
    return margins / (largest - third + 1e-12)
  largest, _, third, fourth = _largest(logits, 4)
  return _quotient(margins, largest - (third + fourth) / 2)


def _quotient(margins: Array, scale: Array) -> Array:
  """Returns margins / scale, with a gradient also where logits are tied.

  If all other logits are equal, as behind a ReLU, the scale is the margin and
  the quotient a constant. No gradient flows through the scale there.
  """
  is_constant = scale <= jnp.abs(margins)
  scale = jnp.where(is_constant, jax.lax.stop_gradient(scale), scale)
  return margins / (scale + 1e-12)


def _pick(values: Array, labels: Array) -> Array:
  return jnp.take_along_axis(values, labels[:, None], axis=-1)[:, 0]


def _largest_other(logits: Array, labels: Array) -> Array:
  is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
  return jnp.max(jnp.where(is_label, -jnp.inf, logits), axis=-1)


def _largest(logits: Array, count: int) -> list[Array]:
  """Returns the `count` largest logits, largest first.

  For so few, one argmax after the other is faster than a sort; so is its
  gradient.
  """
  found = []
  for _ in range(count):
    place = jnp.argmax(logits, axis=-1)
    found.append(_pick(logits, place))
    taken = jax.nn.one_hot(place, logits.shape[-1], dtype=bool)
    logits = jnp.where(taken, -jnp.inf, logits)
  return found


LOSSES = {
  'ce': log_odds,  # Climbs like the cross entropy, at any scale of the logits.
  'margin': margin,
  'dlr': dlr,
  'probability_margin': probability_margin,
}
TARGETED = {
  'ce': targeted_log_odds,
  'margin': targeted_margin,
  'dlr': targeted_dlr,
  'probability_margin': targeted_probability_margin,
}
