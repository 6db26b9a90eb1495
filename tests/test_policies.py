import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwrobust.errors import UserError
from mwrobust.training import policies

K = 6
NAMES = (
  'multiplicative_weights',
  'greedy',
  'round_robin',
  'single',
  'uniform',
  'natural',
  'e_at',
  'ucb',
)


def make(name):
  return policies.make(name, K, eta=0.1, index=3)


def validation(*losses):
  """Returns losses, with accuracies that do not depend on them."""
  return policies.Validation(
    jnp.array(losses, float), jnp.full(len(losses), 0.5)
  )


def probabilities(policy, state, step=0):
  return policy.probabilities(state, step).tolist()


# ------------------------------------------- one trace by hand for each policy


def test_multiplicative_weights_follows_the_paper():
  # With eta = log 2 a loss of L multiplies its weight by 2^L.
  policy = policies.multiplicative_weights(3, eta=math.log(2))
  state = policy.init()  # w = 1, 1, 1
  np.testing.assert_allclose(probabilities(policy, state), [1 / 3] * 3, 1e-6)
  state = policy.update(state, validation(1.0, 2.0, 0.0))  # w = 2, 4, 1
  np.testing.assert_allclose(
    probabilities(policy, state), [2 / 7, 4 / 7, 1 / 7], 1e-6
  )
  state = policy.update(state, validation(0.0, 0.0, 2.0))  # w = 2, 4, 4
  np.testing.assert_allclose(
    probabilities(policy, state), [0.2, 0.4, 0.4], 1e-6
  )
  assert state.outer_step == 2


def test_multiplicative_weights_takes_a_schedule_over_outer_steps():
  policy = policies.multiplicative_weights(3, lambda t: math.log(2) * (t + 1))
  state = policy.update(policy.init(), validation(1.0, 0.0, 0.0))  # w = 2, 1, 1
  state = policy.update(state, validation(0.0, 1.0, 0.0))  # w = 2, 4, 1
  np.testing.assert_allclose(
    probabilities(policy, state), [2 / 7, 4 / 7, 1 / 7], 1e-6
  )


def test_multiplicative_weights_may_forget():
  policy = policies.multiplicative_weights(3, eta=math.log(2), memory=0.5)
  state = policy.init()
  for losses, expected in [
    ((4.0, 0.0, 0.0), [16 / 18, 1 / 18, 1 / 18]),  # w = 16, 1, 1
    ((0.0, 1.0, 0.0), [4 / 7, 2 / 7, 1 / 7]),  # w = 16^0.5, 2, 1
    ((0.0, 0.5, 0.0), [0.4, 0.4, 0.2]),  # w = 4^0.5, 2^0.5 2^0.5, 1
  ]:
    state = policy.update(state, validation(*losses))
    np.testing.assert_allclose(probabilities(policy, state), expected, 1e-6)
  with pytest.raises(UserError, match='memory = 0'):
    policies.multiplicative_weights(3, eta=0.1, memory=0)


def test_multiplicative_weights_may_follow_the_error():
  # With eta = log 4 an error of one half doubles a weight.
  policy = policies.multiplicative_weights(3, math.log(4), signal='error')
  found = policies.Validation(
    losses=jnp.array([0.0, 0.0, 100.0]), accuracies=jnp.array([0.0, 0.5, 1.0])
  )
  state = policy.update(policy.init(), found)  # w = 4, 2, 1
  np.testing.assert_allclose(
    probabilities(policy, state), [4 / 7, 2 / 7, 1 / 7], 1e-6
  )
  # It can only grow by e^eta, however high the loss is.
  assert state.log_weights.min() == pytest.approx(-math.log(4))


def test_greedy_picks_the_worst_of_the_last_validation():
  policy = policies.greedy(3)
  assert policy.validates_first
  state = policy.update(policy.init(), validation(0.3, 0.9, 0.1))
  assert probabilities(policy, state) == [0, 1, 0]
  state = policy.update(state, validation(0.3, 0.2, 0.4))
  assert probabilities(policy, state) == [0, 0, 1]
  state = policy.update(
    state, validation(0.4, 0.4, 0.4)
  )  # The first of equal losses.
  assert probabilities(policy, state) == [1, 0, 0]


def test_greedy_can_compare_errors():
  policy = policies.greedy(2, signal='error')
  found = policies.Validation(jnp.array([2.0, 1.0]), jnp.array([0.5, 0.4]))
  state = policy.update(policy.init(), found)
  assert probabilities(policy, state) == [0, 1]


def test_round_robin_visits_all_losses():
  policy = policies.round_robin(K)
  choose = jax.vmap(policy.choose, in_axes=(None, 0, None))
  chosen = choose(policy.init(), jnp.arange(8), jax.random.key(0))
  assert chosen.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]


def test_single_stays():
  policy = policies.single(3, index=1)
  state = policy.update(policy.init(), validation(9.0, 0.0, 9.0))
  assert [probabilities(policy, state, step) for step in (0, 7)] == [
    [0, 1, 0]
  ] * 2


def test_e_at_and_ucb_change_with_every_mini_batch():
  assert [name for name in NAMES if make(name).observes] == ['e_at', 'ucb']


def test_uniform_stays():
  policy = policies.uniform(4)
  state = policy.update(policy.init(), validation(9.0, 0.0, 9.0, 0.0))
  assert probabilities(policy, state, step=7) == [0.25] * 4


def test_natural_attacks_nothing():
  policy = policies.natural(3)
  state = policy.update(policy.init(), validation(9.0, 0.0, 9.0))
  assert probabilities(policy, state) == [0, 0, 0]


def test_e_at_goes_by_the_robust_error_of_the_mini_batches():
  policy = policies.e_at(3, decay=0.5)
  state = policy.init()
  expected = [[1 / 3, 1 / 3, 1 / 3]]
  seen = [probabilities(policy, state)]
  for index, accuracy, errors in (
    (0, 0.5, [1 / 2, 1, 1]),
    (1, 0.75, [1 / 2, 1 / 4, 1]),
    # The mean of 0.5 and 1, the first of which counts half: 1.25 / 1.5.
    (0, 1.0, [1 / 6, 1 / 4, 1]),
    (2, 0.0, [1 / 6, 1 / 4, 1]),
  ):
    state = policy.observe(state, index, loss=9.0, accuracy=accuracy)
    seen.append(probabilities(policy, state))
    expected.append(np.array(errors) / sum(errors))
  np.testing.assert_allclose(seen, expected, 1e-6)
  # A validation changes nothing.
  after = policy.update(state, validation(9.0, 0.0, 0.0))
  assert probabilities(policy, after) == seen[-1]


def test_e_at_without_decay_is_the_mean_over_all_batches():
  policy = policies.e_at(2, decay=1)
  state = policy.init()
  for index, accuracy in ((0, 0.0), (0, 0.5), (1, 0.5), (0, 1.0)):
    state = policy.observe(state, index, 1.0, accuracy)
  assert probabilities(policy, state) == [0.5, 0.5]


def test_e_at_chooses_alike_where_nothing_is_wrong():
  policy = policies.e_at(3)
  state = policy.init()
  for step in range(100):
    state = policy.observe(state, step % 3, loss=0.0, accuracy=1.0)
  np.testing.assert_allclose(probabilities(policy, state), [1 / 3] * 3, 1e-6)


def test_ucb_tries_what_may_be_the_worst():
  policy = policies.ucb(2, exploration=1.0, discount=0.5)
  state = policy.init()
  chosen = []
  for loss in (2.0, 1.0, 0.0, 3.0):
    index = int(np.argmax(probabilities(policy, state)))
    state = policy.observe(state, index, loss, accuracy=0.0)
    chosen.append(index)
  # First the threats never tried, in order. Then n = (1/2, 1): the bounds are
  # 2 + sqrt(log(3/2) / (1/2)) = 2.90 and 1 + sqrt(log(3/2)) = 1.64. Then
  # n = (5/4, 1/2), the means are 0.4 and 1, the bounds 1.07 and 2.06.
  assert chosen == [0, 1, 0, 1]
  np.testing.assert_allclose(state.counts, [5 / 8, 5 / 4])
  np.testing.assert_allclose(state.totals, [1 / 4, 13 / 4])


@pytest.mark.parametrize(('exploration', 'expected'), [(0.01, 0), (10.0, 1)])
def test_ucb_explores_as_much_as_it_is_told(exploration, expected):
  policy = policies.ucb(2, exploration, discount=0.5)
  state = policy.init()
  for index, loss in ((0, 2.0), (1, 1.0), (0, 2.0)):
    state = policy.observe(state, index, loss, accuracy=0.0)
  # The means are 2 and 1, n = (5/4, 1/2): bonuses of 0.67 c and 1.06 c.
  assert np.argmax(probabilities(policy, state)) == expected


def test_ucb_may_go_by_the_error():
  policy = policies.ucb(2, exploration=0.01, discount=1, signal='error')
  state = policy.observe(policy.init(), 0, loss=9.0, accuracy=0.75)
  state = policy.observe(state, 1, loss=0.0, accuracy=0.25)
  np.testing.assert_allclose(state.means(), [0.25, 0.75])
  assert probabilities(policy, state) == [0, 1]


def test_ucb_follows_a_network_that_changes():
  """Checks that it follows the worst threat, which changes over time."""
  policy = policies.ucb(3, discount=0.9)

  def play(state, step):
    index = policy.choose(state, step, jax.random.key(0))
    loss = jnp.where(index == step // 200, 2.0, 1.0)
    return policy.observe(state, index, loss, 0.5), index

  chosen = jax.lax.scan(play, policy.init(), jnp.arange(600))[1]
  counts = [np.bincount(part, minlength=3) for part in np.split(chosen, 3)]
  assert [count.argmax() for count in counts] == [0, 1, 2]
  assert all((count >= 5).all() and count.max() > 100 for count in counts)


# --------------------------------------------------- properties of all policies


@pytest.mark.parametrize('name', NAMES)
def test_traces_once_and_keeps_its_state_a_pytree_of_arrays(name):
  policy = make(name)
  traces = []

  def outer_step(state, step, key, found):
    index = policy.choose(state, step, key)
    p = policy.probabilities(state, step)
    state = policy.observe(state, index, 2.0, found.accuracies[index])
    return policy.update(state, found), p, index

  @jax.jit
  def traced(*args):
    traces.append(name)
    return outer_step(*args)

  state = policy.init()
  shapes = jax.eval_shape(policy.init)
  for step in range(K + 1):
    key = jax.random.key(step)
    losses, accuracies = jax.random.uniform(key, (2, K))
    found = policies.Validation(losses, accuracies)
    by_hand = outer_step(state, step, key, found)
    state, p, index = traced(state, jnp.int32(step), key, found)
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6),
      (state, p, index),
      by_hand,
    )
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert jax.eval_shape(lambda x: x, state) == shapes
    assert index.shape == ()
    assert index.dtype == jnp.int32
    assert p.sum() == pytest.approx(float(name != 'natural'))
    assert name == 'natural' or p[index] > 0
  assert len(traces) == 1


@pytest.mark.parametrize('name', ['multiplicative_weights', 'uniform'])
def test_choose_follows_the_probabilities(name):
  policy = policies.make(name, K, eta=0.5)
  state = policy.update(policy.init(), validation(*range(K)))
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
  # With a wide spread of losses the leader changes often; with a narrow one all
  # weights stay close. The sums of eta * L reach 1e5; e^1e5 fits no float.
  rounds, eta = 1_000, np.float32(0.1)
  losses = 1e3 - np.random.default_rng(0).uniform(0, spread, (rounds, K))
  losses = losses.astype(np.float32)

  policy = policies.multiplicative_weights(K, eta)

  def play(state, losses):
    found = policies.Validation(losses, jnp.zeros(K))
    state = policy.update(state, found)
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
    state = policy.update(state, validation(0.0, 1e30, 1e30))
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
    ('e_at', policies.e_at(K)),
    ('ucb', policies.ucb(K)),
  ],
)
def test_names_make_the_policy_of_that_name(name, policy):
  def play(policy):  # No two policies have the same p.
    state = policy.init()
    for index in range(K):
      state = policy.observe(state, index, index % 5, index / K)
    found = validation(1.0, 0.0, 0.0, 0.0, 0.0, 4.0)
    return policy.probabilities(policy.update(state, found), 1)

  np.testing.assert_array_equal(play(make(name)), play(policy))


def test_names_hand_over_every_parameter():
  mw = policies.make('multiplicative_weights', 2, eta=1.0, signal='error')
  found = policies.Validation(jnp.array([0.0, 9.0]), jnp.array([0.0, 1.0]))
  state = mw.update(mw.init(), found)
  np.testing.assert_allclose(state.log_weights, [0, -1])
  e_at = policies.make('e_at', 1, decay=0.25)
  ucb = policies.make('ucb', 1, discount=0.5, signal='error')
  for policy, totals, counts in ((e_at, 0.3125, 1.25), (ucb, 1.125, 1.5)):
    state = policy.init()
    for _ in range(2):
      state = policy.observe(state, 0, loss=9.0, accuracy=0.25)
    assert state == (totals, counts)
  # As in test_ucb_explores_as_much_as_it_is_told.
  ucb = policies.make('ucb', 2, exploration=10.0, discount=0.5)
  state = ucb.init()
  for index, loss in ((0, 2.0), (1, 1.0), (0, 2.0)):
    state = ucb.observe(state, index, loss, accuracy=0.0)
  assert probabilities(ucb, state) == [0, 1]


@pytest.mark.parametrize(
  ('name', 'settings', 'message'),
  [
    ('greedi', {}, r"policy = 'greedi' .* Did you mean 'greedy'"),
    (
      'mw',
      {},
      r"policy = 'mw' .* one of: multiplicative_weights, greedy",
    ),
    ('multiplicative_weights', {}, 'eta = None'),
    ('multiplicative_weights', {'eta': 0.0}, 'eta = 0.0'),
    ('multiplicative_weights', {'eta': -0.1}, 'eta = -0.1'),
    ('multiplicative_weights', {'eta': math.nan}, 'eta = nan'),
    ('multiplicative_weights', {'eta': math.inf}, 'eta = inf'),
    ('multiplicative_weights', {'eta': '0.1'}, "eta = '0.1'"),
    (
      'multiplicative_weights',
      {'eta': 0.1, 'signal': 'eror'},
      r"signal = 'eror' .* Did you mean 'error'",
    ),
    ('ucb', {'signal': 'accuracy'}, r"signal = 'accuracy' .* loss, error"),
    ('ucb', {'exploration': 0.0}, 'exploration = 0.0'),
    ('ucb', {'exploration': None}, 'exploration = None'),
    ('ucb', {'discount': 1.5}, 'discount = 1.5'),
    ('e_at', {'decay': 0.0}, 'decay = 0.0'),
    ('e_at', {'decay': True}, 'decay = True'),
    ('single', {}, 'index = None'),
    ('single', {'index': 6}, 'index = 6.*one of 0 to 5'),
    ('single', {'index': -1}, 'index = -1'),
  ],
)
def test_bad_values_are_named(name, settings, message):
  with pytest.raises(UserError, match=message):
    policies.make(name, K, **settings)
