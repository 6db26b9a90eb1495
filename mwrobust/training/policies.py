"""Policies pick the threat that the next mini batch is trained on.

A policy is a set of pure functions of a small state, as in optax:

>>> import jax
>>> from mwrobust.training import policies
>>> policy = policies.multiplicative_weights(k=3, eta=0.1)
>>> state = policy.init()

Before every mini batch, sample a threat. `step` counts mini batches:

>>> index = policy.choose(state, step=0, key=jax.random.key(0))

After it, pass the robust loss and accuracy of the batch. Most policies ignore
them; E-AT and the bandit learn only from them:

>>> state = policy.observe(state, index, loss=2.0, accuracy=0.4)

After every outer step, pass the losses and accuracies of all k threats on the
validation images. The worst threat is sampled more often from then on:

>>> found = policies.Validation(
...   losses=jax.numpy.array([1.0, 8.0, 1.0]),
...   accuracies=jax.numpy.array([0.7, 0.1, 0.7]),
... )
>>> state = policy.update(state, found)
>>> print(policy.probabilities(state, step=0).round(2))
[0.25 0.5  0.25]

All of it can be traced by `jax.jit`, and the state is a pytree of arrays, so it
can be part of a TrainState and its checkpoints. Losses and accuracies must be
finite, because a NaN would stay in the state: check them before.
"""

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mwrobust.errors import UserError, check_choice

Array = jax.Array
State = Any  # A pytree of arrays; () if there is no state.
Schedule = Callable[[Array], Array]  # As in optax: step -> value.

SIGNALS = ('loss', 'error')


class Validation(NamedTuple):
  """The result of a validation for each threat.

  Attributes:
    losses: [k], the mean robust losses.
    accuracies: [k], the robust accuracies, in [0, 1].
  """

  losses: Array
  accuracies: Array


def _keep(state: State, index: Array, loss: Array, accuracy: Array) -> State:
  del index, loss, accuracy
  return state


class Policy(NamedTuple):
  """Picks the next threat.

  Attributes:
    init: `init() -> state`, called before the first outer step.
    probabilities: `probabilities(state, step) -> p [k]`, the probability of
      each threat for mini batch number `step`.
    update: `update(state, validation) -> state`, called after the validation
      that ends an outer step.
    observe: `observe(state, index, loss, accuracy) -> state`, called after a
      mini batch with its mean robust loss and its robust accuracy under the
      chosen threat.
    validates_first: whether the first outer step needs an `update` before it.
  """

  init: Callable[[], State]
  probabilities: Callable[[State, Array | int], Array]
  update: Callable[[State, Validation], State]
  observe: Callable[[State, Array | int, Array, Array], State] = _keep
  validates_first: bool = False

  @property
  def observes(self) -> bool:
    """Whether the probabilities change with every mini batch."""
    return self.observe is not _keep

  def choose(self, state: State, step: Array | int, key: Array) -> Array:
    """Samples the index of the threat for mini batch number `step`."""
    p = self.probabilities(state, step)
    return jax.random.categorical(key, jnp.log(p))


# --------------------------------------------------------- the paper's policies


class MultiplicativeWeightsState(NamedTuple):
  """The weights w_i, scaled so that the largest is 1."""

  log_weights: Array
  outer_step: Array


def multiplicative_weights(
  k: int,
  eta: float | Schedule,
  signal: str = 'loss',
  memory: float = 1.0,
) -> Policy:
  r"""Makes the paper's policy (Figures ALG:multi-robust and -scalable).

  .. math::
    w_i = 1, \qquad w_i \leftarrow w_i^m e^{\eta L_i}, \qquad
    p_i = w_i / \sum_j w_j

  The paper has m = 1, for a network that answers all weights equally well. One
  that is still learning may need most of its mini batches for a threat that is
  hard at first and not the worst later; with m < 1 the weights forget.

  Args:
    k: The number of threats.
    eta: The scaling factor η, or a schedule that maps the outer step (from 0)
      to it. The Theorem's η is for losses divided by their bound R: it is
      `eta * R` here.
    signal: The meaning of L_i: `'loss'`, the validation loss, as in the Figure;
      or `'error'`, one minus the validation accuracy. The Theorem needs losses
      in [0, R]: the cross entropy has no such bound; the error has R = 1.
    memory: m, in (0, 1].

  Returns:
    The policy.
  """
  _check_share('memory', memory)
  if not callable(eta) and not _is_number(eta, above=0):
    raise UserError(
      f'eta = {eta!r}, but multiplicative_weights needs a positive, finite '
      'number: set eta, for example to 0.1.'
    )
  check_choice('signal', signal, SIGNALS)

  def init():
    return MultiplicativeWeightsState(
      log_weights=jnp.zeros(k), outer_step=jnp.zeros((), jnp.int32)
    )

  def probabilities(state, step):
    del step
    return jax.nn.softmax(state.log_weights)

  def update(state, validation):
    losses = signal_of(signal, *validation)
    eta_now = eta(state.outer_step) if callable(eta) else eta
    log_weights = memory * state.log_weights + eta_now * losses
    # Only ratios of weights matter. Scaling the largest to 1 after every update
    # avoids overflow, and the weights near it keep all their digits.
    return MultiplicativeWeightsState(
      log_weights - log_weights.max(), state.outer_step + 1
    )

  return Policy(init, probabilities, update)


class GreedyState(NamedTuple):
  """The losses, or errors, of the last validation."""

  losses: Array


def greedy(k: int, signal: str = 'loss') -> Policy:
  """Makes the policy of the worst loss at the last validation (ALG:greedy).

  With the signal `'error'`, of the lowest accuracy.
  """
  check_choice('signal', signal, SIGNALS)
  return Policy(
    init=lambda: GreedyState(jnp.zeros(k)),
    probabilities=lambda state, step: jax.nn.one_hot(state.losses.argmax(), k),
    update=lambda state, validation: GreedyState(
      jnp.asarray(signal_of(signal, *validation))
    ),
    validates_first=True,
  )


def _blind(probabilities: Callable[[Any], Array]) -> Policy:
  """Makes a policy that ignores losses and depends at most on the step."""
  return Policy(
    init=lambda: (),
    probabilities=lambda state, step: probabilities(step),
    update=lambda state, validation: state,
  )


def round_robin(k: int) -> Policy:
  """Makes a policy that takes turns by mini batch (Figure ALG:round-robin).

  The Figure's `(index + 1) mod k + 1` would skip every other threat of an even
  k; the authors' code visits them all, as here.
  """
  return _blind(lambda step: jax.nn.one_hot(step % k, k))


def single(k: int, index: int) -> Policy:
  """Makes adversarial training against threat number `index`, from 0."""
  if index not in range(k):
    raise UserError(
      f'index = {index!r}, but the policy single needs the number of one of '
      f'the {k} threats: set index to one of 0 to {k - 1}.'
    )
  return _blind(lambda step: jax.nn.one_hot(index, k))


def natural(k: int) -> Policy:
  """Makes natural training: no threat has a probability above 0.

  The result of `choose` is meaningless.
  """
  return _blind(lambda step: jnp.zeros(k))


# ------------------------------------------------------------------- its rivals


def uniform(k: int) -> Policy:
  """Makes SAT, which picks every threat with the same probability.

  Madaan, Shin & Hwang, "Learning to Generate Noise for Multi-Attack Robustness"
  (2021), call it stochastic adversarial training.
  """
  return _blind(lambda step: jnp.full(k, 1 / k))


class MeansState(NamedTuple):
  """Running means of the values of mini batches, for each threat.

  Attributes:
    totals: [k], the sums of the observed values, in which older ones decay.
    counts: [k], the number of values with the same decay; 0 if there are none.
  """

  totals: Array
  counts: Array

  def means(self) -> Array:
    """Returns totals / counts, and 0 for a threat that was never observed."""
    return self.totals / jnp.where(self.counts > 0, self.counts, 1)


def e_at(k: int, decay: float = 0.98) -> Policy:
  r"""Makes E-AT, which picks threats with a lower accuracy more often.

  .. math::
    p_i = (1 - a_i) / \sum_j (1 - a_j)

  where :math:`a_i` is the robust accuracy of the mini batches trained on threat
  i so far. It is 0 before the first of them. Croce & Hein, "Adversarial
  Robustness against Multiple and Single lp-Threat Models via Quick Fine-Tuning
  of Robust Classifiers" (2022), fine-tune for a few epochs and take the mean
  over all batches, `decay=1`. A network that is trained from scratch changes
  more, so here older batches decay.

  Args:
    k: The number of threats.
    decay: In (0, 1]: the factor of a batch's weight with each later batch of
      the same threat.

  Returns:
    The policy.
  """
  _check_share('decay', decay)

  def probabilities(state, step):
    del step
    errors = 1 - state.means()
    # If every accuracy is 1, all threats are equally likely.
    return jnp.where(
      errors.sum() > 0, errors / jnp.maximum(errors.sum(), 1e-30), 1 / k
    )

  def observe(state, index, loss, accuracy):
    del loss
    chosen = jax.nn.one_hot(index, k)
    fade = jnp.where(chosen > 0, decay, 1.0)
    return MeansState(
      fade * state.totals + chosen * accuracy,
      fade * state.counts + chosen,
    )

  return Policy(
    init=lambda: MeansState(jnp.zeros(k), jnp.zeros(k)),
    probabilities=probabilities,
    update=lambda state, validation: state,
    observe=observe,
  )


def ucb(
  k: int,
  exploration: float = 1.0,
  discount: float = 0.99,
  signal: str = 'loss',
) -> Policy:
  r"""Makes a bandit that picks the threat with the highest upper bound.

  Discounted UCB (Garivier & Moulines, "On Upper-Confidence Bound Policies for
  Switching Bandit Problems", 2011), which suits a network that changes. If mini
  batch s was trained on threat :math:`i_s` and had the reward :math:`r_s`, then
  mini batch t is trained on the threat with the highest

  .. math::
    \bar r_i + c \sqrt{\log(n) / n_i}, \qquad
    n_i = \sum_{s < t,\, i_s = i} \gamma^{t-1-s}, \qquad
    \bar r_i = \frac1{n_i} \sum_{s < t,\, i_s = i} \gamma^{t-1-s} r_s

  with :math:`n = \sum_i n_i`. Threats that were never tried come first, in
  their order. With :math:`\gamma = 1`, n is the number of batches: plain UCB1.
  CAS (Wang et al., "Calibrated Adversarial Sampling", 2025) is also a UCB
  bandit over attacks; its reward includes the gains and losses of the other
  threats, so each of them would have to be attacked.

  Args:
    k: The number of threats.
    exploration: c, in the units of the reward.
    discount: γ, in (0, 1]: the factor of a batch's weight with each later one.
    signal: The reward: `'loss'`, the robust loss of the batch; or `'error'`,
      one minus its robust accuracy.

  Returns:
    The policy.
  """
  if not _is_number(exploration, above=0):
    raise UserError(
      f'exploration = {exploration!r}, but ucb needs a positive, finite '
      'number: set exploration, for example to 1.'
    )
  _check_share('discount', discount)
  check_choice('signal', signal, SIGNALS)

  def probabilities(state, step):
    del step
    tried = state.counts > 0
    # After the first batch the sum is at least 1.
    log_n = jnp.log(jnp.maximum(state.counts.sum(), 1))
    bonus = jnp.sqrt(log_n / jnp.where(tried, state.counts, 1))
    bound = jnp.where(tried, state.means() + exploration * bonus, jnp.inf)
    return jax.nn.one_hot(bound.argmax(), k)

  def observe(state, index, loss, accuracy):
    chosen = jax.nn.one_hot(index, k)
    reward = signal_of(signal, loss, accuracy)
    return MeansState(
      discount * state.totals + chosen * reward,
      discount * state.counts + chosen,
    )

  return Policy(
    init=lambda: MeansState(jnp.zeros(k), jnp.zeros(k)),
    probabilities=probabilities,
    update=lambda state, validation: state,
    observe=observe,
  )


# ---------------------------------------------------------------------- by name


def make(
  name: str,
  k: int,
  *,
  eta: float | Schedule | None = None,
  signal: str = 'loss',
  memory: float = 1.0,
  index: int | None = None,
  decay: float = 0.98,
  exploration: float = 1.0,
  discount: float = 0.99,
) -> Policy:
  """Makes a policy by name, as configs do.

  A policy ignores the parameters of the others, so that a config can change
  only its policy.

  Args:
    name: One of the policies above.
    k: The number of threats.
    eta: For `multiplicative_weights`.
    signal: For `multiplicative_weights`, `greedy` and `ucb`.
    memory: For `multiplicative_weights`.
    index: For `single`.
    decay: For `e_at`.
    exploration: For `ucb`.
    discount: For `ucb`.

  Returns:
    The policy.
  """
  makers = {
    'multiplicative_weights': lambda: multiplicative_weights(
      k, eta, signal, memory
    ),
    'greedy': lambda: greedy(k, signal),
    'round_robin': lambda: round_robin(k),
    'single': lambda: single(k, index),
    'uniform': lambda: uniform(k),
    'natural': lambda: natural(k),
    'e_at': lambda: e_at(k, decay),
    'ucb': lambda: ucb(k, exploration, discount, signal),
  }
  check_choice('policy', name, makers)
  return makers[name]()


def signal_of(signal: str, loss: Array, accuracy: Array) -> Array:
  """Returns the loss, or one minus the accuracy if the signal is 'error'."""
  return loss if signal == 'loss' else 1 - accuracy


def _is_number(value: Any, *, above: float) -> bool:
  return (
    isinstance(value, numbers.Real)
    and not isinstance(value, bool)
    and above < value < math.inf
  )


def _check_share(field: str, value: Any) -> None:
  if not (_is_number(value, above=0) and value <= 1):
    raise UserError(
      f'{field} = {value!r} is not allowed: must be a number above 0 and at '
      'most 1.'
    )
