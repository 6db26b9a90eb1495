"""Algorithm 1 (Figure ALG:multi-robust) keeps what Theorem thm:main promises.

What the Theorem's O() hides, and the scaling its proof leaves out. The update
is w_i <- w_i e^{eta L_i}, the losses lie in [0, R], p_i = w_i / sum_j w_j. Let
g = eta R <= 1. As e^x <= 1 + x + x^2 for x <= 1, the sum of the weights grows
in a round by

  sum_i p_i e^{eta L_i} <= 1 + (eta + eta g) sum_i p_i L_i
                        <= exp(eta (1 + g) sum_i p_i L_i),

and as it starts at k and is never below w_i = exp(eta sum_t L_i(theta_t)),

  (1 + g) mean_t sum_j p_{t,j} L_j(theta_t)
      >= mean_t L_i(theta_t) - log k / (eta T).                      (regret)

Divided by 1 + g, with 1 / (1 + g) >= 1 - g, this is eq:mw-1,

  mean_t sum_j p_{t,j} L_j(theta_t)
      >= (1 - g) mean_t L_i(theta_t) - R log k / (g T),

without the factor 2 of its last term, but with g = eta R where eq:mw-1 prints
eta: it speaks of updates by e^{eta L_i / R}. For updates by e^{eta L_i}, as in
the Figure, it follows as printed if 1/2 <= R <= 1, but is false for R = 100 and
for R = 0.01 (last test).

As L_i <= R, the two terms that this takes off mean_t L_i(theta_t) are at most
g R and R log k / (g T). Make each epsilon / 2, and eq:mw-2 follows:

  g = epsilon / (2 R), so eta = epsilon / (2 R^2),
  T = 4 R^2 log k / epsilon^2.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwrobust.training import policies

# L_i(theta) = |theta - c_i|^2. The first three centres are the corners of a
# triangle on the unit circle, the others lie inside, on one side of it.
CENTRES = np.array(
  [
    [1, 0],
    [-1 / 2, math.sqrt(3) / 2],
    [-1 / 2, -math.sqrt(3) / 2],
    [0.6, 0.2],
    [0.7, 0.1],
    [0.5, 0.2],
  ],
  np.float32,
)
K = len(CENTRES)
EPSILON = 0.1
MIN_MAX = 1  # min_theta max_i L_i(theta), at theta = 0.


def all_losses(theta):
  return ((theta[..., None, :] - CENTRES) ** 2).sum(axis=-1)


def cost_sensitive_oracle(delta, p, t):
  """Solves eq:robust-cost-sensitive up to delta, and misses it by no less.

  For weights that sum to 1, sum_i p_i L_i(theta) is its minimum, reached at
  the weighted mean of the centres, plus the squared distance to that mean.
  """
  astray = jnp.stack([jnp.cos(t), jnp.sin(t)])
  return p @ CENTRES + math.sqrt(delta) * astray


def play(policy, respond, rounds):
  """The game: p_t by the policy, then the losses [k] by respond(p_t, t).

  Returns all p_t [T, k] and all losses [T, k], as float64.
  """

  def one_round(state, t):
    p = policy.probabilities(state, t)
    losses = respond(p, t)
    found = policies.Validation(losses, accuracies=jnp.zeros(K))
    return policy.update(state, found), (p, losses)

  @jax.jit
  def game():
    return jax.lax.scan(one_round, policy.init(), jnp.arange(rounds))[1]

  return jax.tree.map(np.float64, game())


def running_means(p, losses):
  """For every T: T, mean_t sum_j p_{t,j} L_j(theta_t), mean_t L_i(theta_t)."""
  rounds = np.arange(1, len(p) + 1)[:, None]
  earned = np.cumsum((p * losses).sum(axis=1, keepdims=True), axis=0)
  return rounds, earned / rounds, np.cumsum(losses, axis=0) / rounds


def assert_regret_is_bounded(p, losses, eta, r):
  """Inequality (regret), after every round and for all i."""
  rounds, earned, each = running_means(p, losses)
  bound = each - math.log(K) / (eta * rounds)
  assert ((1 + eta * r) * earned >= bound - 1e-5 * r).all()


def theorem_numbers(delta):
  """R, eta and T of the Theorem."""
  # The triangle's side is sqrt(3), and theta_t within sqrt(delta) of it.
  r = (math.sqrt(3) + math.sqrt(delta)) ** 2
  rounds = math.ceil(4 * r**2 * math.log(K) / EPSILON**2)
  return r, EPSILON / (2 * r**2), rounds


def test_min_max_is_known():
  # From above by theta = 0; from below, for any weights p, by
  # min_theta sum_i p_i L_i(theta), here with p = 1/3 on the corners.
  assert all_losses(np.zeros(2)).max() == pytest.approx(MIN_MAX)
  p = np.array([1, 1, 1, 0, 0, 0]) / 3
  assert p @ all_losses(p @ CENTRES) == pytest.approx(MIN_MAX)


@pytest.mark.parametrize('delta', [0.0, 0.05])
def test_theorem(delta):
  r, eta, rounds = theorem_numbers(delta)
  oracle = functools.partial(cost_sensitive_oracle, delta)
  p, losses = play(
    policies.multiplicative_weights(K, eta),
    lambda p, t: all_losses(oracle(p, t)),
    rounds,
  )
  assert losses.min() >= 0
  assert losses.max() <= r + 1e-5
  least = (p * all_losses(p @ CENTRES)).sum(axis=1)
  np.testing.assert_allclose((p * losses).sum(axis=1), least + delta, atol=1e-5)
  assert_regret_is_bounded(p, losses, eta, r)

  # eq:guarantee, over the uniform distribution on theta_1, ..., theta_T.
  assert losses.mean(axis=0).max() <= MIN_MAX + EPSILON + delta
  # eq:guarantee-avg, for their average, as the losses are convex.
  theta = np.float64(jax.vmap(oracle)(p, np.arange(rounds)))
  assert all_losses(theta.mean(axis=0)).max() <= MIN_MAX + EPSILON + delta


@pytest.mark.parametrize('name', ['uniform', 'round_robin', 'greedy'])
def test_other_policies_do_not_solve_the_same_problem(name):
  _, _, rounds = theorem_numbers(0)
  oracle = functools.partial(cost_sensitive_oracle, 0)
  _, losses = play(
    policies.make(name, K), lambda p, t: all_losses(oracle(p, t)), rounds
  )
  assert losses.mean(axis=0).max() > MIN_MAX + EPSILON


# ----------------------------- losses in [0, 1] that make it hard for a policy


def least_likely(p, t):
  """All of the loss where the policy looks least."""
  del t
  return jax.nn.one_hot(p.argmin(), K)


def always_the_same(p, t):
  """The policy has to find the one loss there is."""
  del p, t
  return jax.nn.one_hot(0, K)


def away_from_the_leader(p, t):
  """Two losses take turns, each when the other has just come to lead."""
  del p
  return jnp.where(t == 0, 0.5, 1) * jax.nn.one_hot(t % 2, K)


def at_random(p, t):
  del p
  return jax.random.uniform(jax.random.key(t), K)


@pytest.mark.parametrize('g', [0.01, 0.1, 1.0])
@pytest.mark.parametrize(
  'respond', [least_likely, always_the_same, away_from_the_leader, at_random]
)
def test_regret_is_bounded_after_every_round(respond, g):
  r = 3
  p, losses = play(
    policies.multiplicative_weights(K, g / r),
    lambda p, t: r * respond(p, t),
    2_000,
  )
  assert_regret_is_bounded(p, losses, g / r, r)


@pytest.mark.parametrize(
  ('r', 'respond'), [(100, away_from_the_leader), (0.01, always_the_same)]
)
def test_the_printed_inequality_is_about_losses_divided_by_r(r, respond):
  eta = 0.1

  def holds(policy):
    # eq:mw-1 as it is printed, after every round and for all i.
    p, losses = play(policy, lambda p, t: r * respond(p, t), 500)
    rounds, earned, each = running_means(p, losses)
    bound = (1 - eta) * each - 2 * r * math.log(K) / (eta * rounds)
    return (earned >= bound - 1e-5 * r).all()

  assert holds(policies.multiplicative_weights(K, eta / r))
  assert not holds(policies.multiplicative_weights(K, eta))
