import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwrobust.training import game, policies

# Three outer steps against two threats.
P = np.array([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]])
LOSSES = np.array([[1.0, 3.0], [4.0, 2.0], [1.0, 6.0]])


def test_a_game_by_hand():
  played = game.observe(P, LOSSES)
  # 0.5 + 1.5, 1 + 1.5, 1.
  np.testing.assert_allclose(played.mixture, [2.0, 2.5, 1.0])
  np.testing.assert_allclose(played.worst, [3.0, 4.0, 6.0])
  np.testing.assert_allclose(played.mean_mixture, [2.0, 2.25, 5.5 / 3])
  # The sums are (1, 3), (5, 5) and (6, 11).
  np.testing.assert_allclose(played.mean_worst, [3.0, 2.5, 11 / 3])
  np.testing.assert_allclose(played.regret, [1.0, 0.5, 5.5])


def test_regret_is_the_number_of_steps_times_the_gap():
  played = game.observe(P, LOSSES)
  gap = played.mean_worst - played.mean_mixture
  np.testing.assert_allclose(played.regret, gap * np.arange(1, 4), rtol=1e-6)


def test_the_best_threat_in_hindsight_has_no_regret():
  always_second = np.tile([[0.0, 1.0]], (3, 1))
  played = game.observe(always_second, LOSSES)
  np.testing.assert_allclose(played.regret, [0.0, 0.0, 0.0], atol=1e-6)


def test_a_mixture_that_foresees_the_worst_earns_more_than_any_threat():
  foreseen = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
  played = game.observe(foreseen, LOSSES)
  np.testing.assert_allclose(played.mixture, played.worst)
  np.testing.assert_allclose(played.regret, [0.0, -2.0, -2.0])  # 11 - 13.


@pytest.mark.parametrize(('signal', 'earned'), [('loss', 5.0), ('error', 0.5)])
def test_the_last_game_of_metrics_uses_what_the_weights_follow(signal, earned):
  rows = [
    {
      'radius_scale': 1.0,
      'played': {'a': 1.0, 'b': 0.0},
      'validation_loss': {'a': 1.0, 'b': 3.5},
      'validation_accuracy': {'a': 0.75, 'b': 0.5},
    }
  ] * 2
  found = game.last(rows, signal)
  assert found['regret'] == pytest.approx(earned)


def test_a_game_begins_when_the_radii_have_grown():
  def row(loss, radius_scale):
    return {
      'radius_scale': radius_scale,
      'played': {'a': 1.0, 'b': 0.0},
      'validation_loss': {'a': 1.0, 'b': loss},
      'validation_accuracy': {'a': 0.5, 'b': 0.5},
    }

  rows = [row(9.0, 0.4), row(5.0, 0.8), row(4.0, 1.0), row(3.0, 1.0)]
  regrets = [game.last(rows[:t], 'loss')['regret'] for t in range(1, 5)]
  assert regrets == pytest.approx([8.0, 4.0, 3.0, 5.0])


def test_can_be_traced():
  traced = jax.jit(game.observe)(jnp.asarray(P), jnp.asarray(LOSSES))
  np.testing.assert_allclose(traced.regret, [1.0, 0.5, 5.5], rtol=1e-6)


def test_weights_on_errors_keep_the_bound_of_the_theorem():
  """Checks regret <= eta * sum of earnings + log k / eta, for errors <= 1."""
  k, rounds, eta = 6, 200, 0.3
  policy = policies.multiplicative_weights(k, eta, signal='error')
  state, p, errors = policy.init(), [], []
  for t in range(rounds):
    p.append(policy.probabilities(state, t))
    errors.append(jax.nn.one_hot(p[-1].argmin(), k))  # The least likely threat.
    # Unbounded losses, which must not matter.
    found = policies.Validation(1e6 * jnp.arange(k), 1 - errors[-1])
    state = policy.update(state, found)
  played = game.observe(jnp.stack(p), jnp.stack(errors))
  earned = np.cumsum(played.mixture)
  assert (played.regret <= eta * earned + np.log(k) / eta + 1e-3).all()
