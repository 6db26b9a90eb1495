"""Policies: who picks the loss L_i that the next mini batch is trained on.

A policy is a set of pure functions over a small state, in the shape of optax:

>>> import jax
>>> from mwrobust import policies
>>> policy = policies.multiplicative_weights(k=3, eta=0.1)
>>> state = policy.init()

Before every mini batch, sample a loss. `step` counts mini batches:

>>> index = policy.choose(state, step=0, key=jax.random.key(0))

After every outer step, hand over the k validation losses. The worst of them is
sampled more often from now on:

>>> state = policy.update(state, jax.numpy.array([1.0, 8.0, 1.0]))
>>> print(policy.probabilities(state, step=0).round(2))
[0.25 0.5  0.25]

All of it can be traced by `jax.jit`, and the state is a pytree of arrays, so it
lives inside a TrainState and in its checkpoints. The losses must be finite: a
policy carries a NaN on into its state, so look at them before the update.
"""

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mwrobust.errors import UserError, check_choice

State = Any  # A pytree of arrays; () where there is nothing to keep.
Schedule = Callable[[jax.Array], jax.Array]  # As in optax: step -> value.


class Policy(NamedTuple):
  """Who picks the next loss.

  Attributes:
    init: `init() -> state`, before the first outer step.
    probabilities: `probabilities(state, step) -> p [k]`, the chance of each
      loss to be the one of mini batch number `step`.
    update: `update(state, losses [k]) -> state`, after the validation that ends
      an outer step.
    validates_first: Whether the first outer step needs an `update` before it.
    attacks: False where mini batches are to be left as they are; no loss has a
      chance then, and what `choose` returns means nothing.
  """

  init: Callable[[], State]
  probabilities: Callable[[State, jax.Array | int], jax.Array]
  update: Callable[[State, jax.Array], State]
  validates_first: bool = False
  attacks: bool = True

  def choose(
    self, state: State, step: jax.Array | int, key: jax.Array
  ) -> jax.Array:
    """Samples the index of the loss for mini batch number `step`."""
    p = self.probabilities(state, step)
    return jax.random.categorical(key, jnp.log(p))


class MultiplicativeWeightsState(NamedTuple):
  """The weights w_i, scaled so that the largest is 1."""

  log_weights: jax.Array
  outer_step: jax.Array


def multiplicative_weights(k: int, eta: float | Schedule) -> Policy:
  r"""The paper's policy (Figures ALG:multi-robust and -scalable).

  .. math::
    w_i = 1, \qquad w_i \leftarrow w_i e^{\eta L_i}, \qquad
    p_i = w_i / \sum_j w_j

  Args:
    k: The number of losses.
    eta: The scaling factor η, or a schedule that maps the outer step (from 0)
      to it. The Theorem's η is for losses divided by their bound R: what it
      calls η is `eta * R` here.

  Returns:
    The policy.
  """
  if not callable(eta) and not (
    isinstance(eta, numbers.Real) and 0 < eta < math.inf
  ):
    raise UserError(
      f'policy.eta = {eta!r}, but multiplicative_weights needs a positive, '
      'finite number: set policy.eta, for example to 0.1.'
    )

  def init():
    return MultiplicativeWeightsState(
      log_weights=jnp.zeros(k), outer_step=jnp.zeros((), jnp.int32)
    )

  def probabilities(state, step):
    del step
    return jax.nn.softmax(state.log_weights)

  def update(state, losses):
    eta_now = eta(state.outer_step) if callable(eta) else eta
    log_weights = state.log_weights + eta_now * losses
    # Only ratios of weights matter: scaled to 1 after every update, the largest
    # never overflows, and those near it keep all their digits.
    return MultiplicativeWeightsState(
      log_weights - log_weights.max(), state.outer_step + 1
    )

  return Policy(init, probabilities, update)


class GreedyState(NamedTuple):
  """The losses of the last validation."""

  losses: jax.Array


def greedy(k: int) -> Policy:
  """The loss that was worst at the last validation (Figure ALG:greedy)."""
  return Policy(
    init=lambda: GreedyState(jnp.zeros(k)),
    probabilities=lambda state, step: jax.nn.one_hot(state.losses.argmax(), k),
    update=lambda state, losses: GreedyState(jnp.asarray(losses)),
    validates_first=True,
  )


def _blind(probabilities: Callable[[Any], jax.Array], **fields) -> Policy:
  """A policy that looks at no losses, only (perhaps) at the step."""
  return Policy(
    init=lambda: (),
    probabilities=lambda state, step: probabilities(step),
    update=lambda state, losses: state,
    **fields,
  )


def round_robin(k: int) -> Policy:
  """All losses in turn, one mini batch each (Figure ALG:round-robin).

  The Figure's `(index + 1) mod k + 1` would skip every other loss of an even k;
  the authors' code visits them all, as here.
  """
  return _blind(lambda step: jax.nn.one_hot(step % k, k))


def single(k: int, index: int) -> Policy:
  """Always loss number `index`, counted from 0: plain adversarial training."""
  if index not in range(k):
    raise UserError(
      f'index = {index!r}, but the policy single needs the number of one of '
      f'the {k} threats: set index to one of 0 to {k - 1}.'
    )
  return _blind(lambda step: jax.nn.one_hot(index, k))


def uniform(k: int) -> Policy:
  """Every loss with the same chance."""
  return _blind(lambda step: jnp.full(k, 1 / k))


def natural(k: int) -> Policy:
  """No loss at all: training on the images as they are."""
  return _blind(lambda step: jnp.zeros(k), attacks=False)


def make(
  name: str,
  k: int,
  *,
  eta: float | Schedule | None = None,
  index: int | None = None,
) -> Policy:
  """Makes a policy by name, as configs do.

  Args:
    name: One of the policies above.
    k: The number of losses.
    eta: For `multiplicative_weights`; the others leave it alone, so that a
      config can change its policy and nothing else.
    index: For `single`, likewise.

  Returns:
    The policy.
  """
  makers = {
    'multiplicative_weights': lambda: multiplicative_weights(k, eta),
    'greedy': lambda: greedy(k),
    'round_robin': lambda: round_robin(k),
    'single': lambda: single(k, index),
    'uniform': lambda: uniform(k),
    'natural': lambda: natural(k),
  }
  check_choice('policy.name', name, makers)
  return makers[name]()
