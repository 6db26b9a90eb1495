r"""The paper's game between the weights and the network.

In outer step s the weights play the probabilities p_s, the network answers with
parameters θ_s and pays the losses L(θ_s), one per threat. Theorem thm:main
compares two sides of this game after t outer steps:

- the mixture's loss, :math:`\frac1t \sum_s \langle p_s, L(\theta_s) \rangle`.
  It is at most :math:`\min_\theta \max_i L_i(\theta) + \delta` if the network
  answers every p_s up to an error of δ;
- the worst threat's loss, :math:`\max_i \frac1t \sum_s L_i(\theta_s)`, which
  the Theorem bounds (eq:guarantee).

The worst threat's loss is never below that of a fixed mixture, and t times the
gap between the two sides is the regret of the weights. So if the network's
answers were good, a small regret per outer step means that no other network
does much better against its worst threat:

>>> from mwrobust.training import game
>>> played = game.observe(
...   probabilities=[[0.5, 0.5], [0.25, 0.75]], losses=[[1.0, 2.0], [1.0, 3.0]]
... )
>>> played.mixture.tolist(), played.worst.tolist()
([1.5, 2.5], [2.0, 3.0])
>>> played.mean_mixture.tolist(), played.mean_worst.tolist()
([1.5, 2.0], [2.0, 2.5])
>>> played.regret.tolist()
[0.5, 1.0]
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mwrobust.training.policies import signal_of

Array = jax.Array
FOOLED = 1.5  # A better attack may reach this many times the loss.


class Game(NamedTuple):
  """The two sides of the game and the regret; every entry is [T]."""

  mixture: Array  # <p_s, L(s)>, the loss of the mixture that s was trained on.
  worst: Array  # max_i L_i(s), the loss of the worst threat after s.
  mean_mixture: Array  # The mean of `mixture` so far.
  mean_worst: Array  # max_i of the mean of L_i so far.
  # max_i sum_s L_i(s) - sum_s <p_s, L(s)>: how much more the weights would have
  # earned so far on the worst threat in hindsight.
  regret: Array


@jax.jit
def observe(probabilities: Array, losses: Array) -> Game:
  """Returns both sides of the game, and the regret, after every outer step.

  Args:
    probabilities: [T, k], those that each outer step was trained with, before
      its update. If they change within an outer step, the shares of its mini
      batches.
    losses: [T, k], the losses of the validation that ended each outer step, or
      the errors if the weights follow those.
  """
  p, losses = jnp.asarray(probabilities), jnp.asarray(losses)
  mixture = jnp.sum(p * losses, axis=1)
  steps = jnp.arange(1, len(losses) + 1)
  earned = jnp.cumsum(mixture)
  best = jnp.max(jnp.cumsum(losses, axis=0), axis=1)
  return Game(
    mixture=mixture,
    worst=jnp.max(losses, axis=1),
    mean_mixture=earned / steps,
    mean_worst=best / steps,
    regret=best - earned,
  )


def of_last(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
  """Returns the outer steps of the game that the last one belongs to.

  The game begins when the radii have grown. Until then every outer step is a
  game of its own, because its threats are others.

  Args:
    rows: the metrics of all outer steps so far.
  """
  return [row for row in rows if row['radius_scale'] >= 1] or rows[-1:]


def last(rows: Sequence[Mapping[str, Any]], signal: str) -> dict[str, float]:
  """Returns the game after the last of these rows, by the names of `Game`."""
  played, losses, accuracies = (
    np.array([list(row[field].values()) for row in of_last(rows)])
    for field in ('played', 'validation_loss', 'validation_accuracy')
  )
  found = observe(played, signal_of(signal, losses, accuracies))
  found = jax.device_get(found)
  return {name: float(values[-1]) for name, values in found._asdict().items()}


def attack_is_fooled(reached: float, possible: float) -> bool:
  """Returns whether a network has learnt to fool the training attack.

  That attack has `reached` a loss on some images, and a stronger attack shows
  what is `possible`.
  """
  return possible > max(FOOLED * reached, reached + 0.1)
