import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwrobust import policies
from mwrobust.errors import UserError

K = 6
NAMES = (
  'multiplicative_weights',
  'greedy',
  'round_robin',
  'single',
  'uniform',
  'natural',
)


def make(name):
  return policies.make(name, K, eta=0.1, index=3)


def probabilities(policy, state, step=0):
  return policy.probabilities(state, step).tolist()


# ------------------------------------------- one trace by hand for each policy


def test_multiplicative_weights_follows_the_paper():
  # With eta = log 2 a loss of L multiplies its weight by 2^L.
  policy = policies.multiplicative_weights(3, eta=math.log(2))
  state = policy.init()  # w = 1, 1, 1
  np.testing.assert_allclose(probabilities(policy, state), [1 / 3] * 3, 1e-6)
  state = policy.update(state, jnp.array([1.0, 2.0, 0.0]))  # w = 2, 4, 1
  np.testing.assert_allclose(
    probabilities(policy, state), [2 / 7, 4 / 7, 1 / 7], 1e-6
  )
  state = policy.update(state, jnp.array([0.0, 0.0, 2.0]))  # w = 2, 4, 4
  np.testing.assert_allclose(
    probabilities(policy, state), [0.2, 0.4, 0.4], 1e-6
  )
  assert state.outer_step == 2


def test_multiplicative_weights_takes_a_schedule_over_outer_steps():
  policy = policies.multiplicative_weights(3, lambda t: math.log(2) * (t + 1))
  state = policy.update(
    policy.init(), jnp.array([1.0, 0.0, 0.0])
  )  # w = 2, 1, 1
  state = policy.update(state, jnp.array([0.0, 1.0, 0.0]))  # w = 2, 4, 1
  np.testing.assert_allclose(
    probabilities(policy, state), [2 / 7, 4 / 7, 1 / 7], 1e-6
  )


def test_greedy_picks_the_worst_of_the_last_validation():
  policy = policies.greedy(3)
  assert policy.validates_first
  state = policy.update(policy.init(), jnp.array([0.3, 0.9, 0.1]))
  assert probabilities(policy, state) == [0, 1, 0]
  state = policy.update(state, jnp.array([0.3, 0.2, 0.4]))
  assert probabilities(policy, state) == [0, 0, 1]
  state = policy.update(
    state, jnp.array([0.4, 0.4, 0.4])
  )  # The first of equals.
  assert probabilities(policy, state) == [1, 0, 0]


def test_round_robin_visits_all_losses():
  policy = policies.round_robin(K)
  choose = jax.vmap(policy.choose, in_axes=(None, 0, None))
  chosen = choose(policy.init(), jnp.arange(8), jax.random.key(0))
  assert chosen.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]


def test_single_stays():
  policy = policies.single(3, index=1)
  state = policy.update(policy.init(), jnp.array([9.0, 0.0, 9.0]))
  assert [probabilities(policy, state, step) for step in (0, 7)] == [
    [0, 1, 0]
  ] * 2


def test_uniform_stays():
  policy = policies.uniform(4)
  state = policy.update(policy.init(), jnp.array([9.0, 0.0, 9.0, 0.0]))
  assert probabilities(policy, state, step=7) == [0.25] * 4


def test_natural_attacks_nothing():
  policy = policies.natural(3)
  state = policy.update(policy.init(), jnp.array([9.0, 0.0, 9.0]))
  assert not policy.attacks
  assert probabilities(policy, state) == [0, 0, 0]


# -------------------------------------------------- what all policies must hold


@pytest.mark.parametrize('name', NAMES)
def test_traces_once_and_keeps_its_state_a_pytree_of_arrays(name):
  policy = make(name)
  traces = []

  @jax.jit
  def outer_step(state, step, key, losses):
    traces.append(name)
    index = policy.choose(state, step, key)
    return (
      policy.update(state, losses),
      policy.probabilities(state, step),
      index,
    )

  state = policy.init()
  shapes = jax.eval_shape(policy.init)
  for step in range(K + 1):
    key = jax.random.key(step)
    losses = jax.random.uniform(key, K)
    by_hand = (
      policy.update(state, losses),
      policy.probabilities(state, step),
      policy.choose(state, step, key),
    )
    state, p, index = outer_step(state, jnp.int32(step), key, losses)
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6),
      (state, p, index),
      by_hand,
    )
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert jax.eval_shape(lambda x: x, state) == shapes
    assert index.shape == ()
    assert index.dtype == jnp.int32
    assert p.sum() == pytest.approx(1 if policy.attacks else 0)
    assert not policy.attacks or p[index] > 0
  assert len(traces) == 1


@pytest.mark.parametrize('name', ['multiplicative_weights', 'uniform'])
def test_choose_follows_the_probabilities(name):
  policy = policies.make(name, K, eta=0.5)
  state = policy.update(policy.init(), jnp.arange(K, dtype=jnp.float32))
  n = 10_000
  keys = jax.random.split(jax.random.key(0), n)
  choose = jax.jit(jax.vmap(policy.choose, in_axes=(None, None, 0)))
  seen = np.bincount(choose(state, 0, keys), minlength=K)
  expected = n * np.float64(policy.probabilities(state, 0))
  # Chi-square with K - 1 = 5 degrees of freedom: above 25.7 once in 10,000.
  assert np.sum((seen - expected) ** 2 / expected) < 25.7


# ---------------------------------------------------------------- large numbers


@pytest.mark.parametrize('spread', [1e3, 2.0])
def test_multiplicative_weights_neither_overflow_nor_drift(spread):
  # A wide spread of losses throws the lead about, a narrow one keeps all
  # weights in the race. The sums of eta * L reach 1e5; e^1e5 fits no float.
  rounds, eta = 1_000, np.float32(0.1)
  losses = 1e3 - np.random.default_rng(0).uniform(0, spread, (rounds, K))
  losses = losses.astype(np.float32)

  policy = policies.multiplicative_weights(K, eta)

  def play(state, losses):
    state = policy.update(state, losses)
    return state, policy.probabilities(state, 0)

  _, p = jax.jit(lambda losses: jax.lax.scan(play, policy.init(), losses))(
    losses
  )

  log_weights = np.cumsum(np.float64(eta) * np.float64(losses), axis=0)
  weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
  expected = weights / weights.sum(axis=1, keepdims=True)

  # The leaders' log weights stay near 0, so an update rounds eta * L, and its
  # sum with the old log weight, at about 100: by up to 2^-18, or 2.2e-6 root
  # mean square. Two such roundings for each of two rivals come to 4.4e-6 a
  # round, and as a random walk to 1.4e-4 in 1,000 rounds; p moves by at most
  # p(1 - p) <= 1/4 of that, 3.5e-5. The bound is three times as much. (Without
  # the scaling they would be rounded at up to 1e5, 1,000 times as coarsely.)
  np.testing.assert_allclose(p, expected, rtol=0, atol=1e-4)


def test_multiplicative_weights_bear_any_finite_gap():
  policy = policies.multiplicative_weights(3, eta=1e3)
  state = policy.init()
  for _ in range(3):
    state = policy.update(state, jnp.array([0.0, 1e30, 1e30]))
  assert probabilities(policy, state) == [0, 0.5, 0.5]
  assert policy.choose(state, 0, jax.random.key(0)) in (1, 2)


# ---------------------------------------------------------------- from a config


@pytest.mark.parametrize(
  ('name', 'policy'),
  [
    ('multiplicative_weights', policies.multiplicative_weights(K, eta=0.1)),
    ('greedy', policies.greedy(K)),
    ('round_robin', policies.round_robin(K)),
    ('single', policies.single(K, index=3)),
    ('uniform', policies.uniform(K)),
    ('natural', policies.natural(K)),
  ],
)
def test_names_make_the_policy_of_that_name(name, policy):
  losses = jnp.array([1.0, 0.0, 0.0, 0.0, 0.0, 4.0])  # No two p are the same.
  state = policy.update(policy.init(), losses)
  np.testing.assert_array_equal(
    make(name).probabilities(make(name).update(make(name).init(), losses), 1),
    policy.probabilities(state, 1),
  )


@pytest.mark.parametrize(
  ('name', 'settings', 'message'),
  [
    ('greedi', {}, r"policy\.name = 'greedi' .* Did you mean 'greedy'"),
    (
      'mw',
      {},
      r"policy\.name = 'mw' .* one of: multiplicative_weights, greedy",
    ),
    ('multiplicative_weights', {}, 'eta = None'),
    ('multiplicative_weights', {'eta': 0.0}, 'eta = 0.0'),
    ('multiplicative_weights', {'eta': -0.1}, 'eta = -0.1'),
    ('multiplicative_weights', {'eta': math.nan}, 'eta = nan'),
    ('multiplicative_weights', {'eta': math.inf}, 'eta = inf'),
    ('multiplicative_weights', {'eta': '0.1'}, "eta = '0.1'"),
    ('single', {}, 'index = None'),
    ('single', {'index': 6}, 'index = 6.*one of 0 to 5'),
    ('single', {'index': -1}, 'index = -1'),
  ],
)
def test_bad_values_are_named(name, settings, message):
  with pytest.raises(UserError, match=message):
    policies.make(name, K, **settings)
