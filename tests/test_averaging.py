import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwrobust.training import averaging

H = 3


def test_average_is_the_mean_of_each_leaf():
  rng = np.random.default_rng(0)
  trees = [
    {
      'params': {'kernel': rng.normal(size=(4, 5)).astype(np.float32)},
      'batch_stats': (rng.uniform(size=7).astype(np.float32),),
    }
    for _ in range(H)
  ]
  expected = jax.tree.map(lambda *x: np.mean(np.float64(x), axis=0), *trees)
  for result in (averaging.average(trees), jax.jit(averaging.average)(trees)):
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=5e-7),
      result,
      expected,
    )
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(result))


def test_average_of_one_is_itself():
  tree = {'w': jnp.array([0.1, -3e38])}
  np.testing.assert_array_equal(averaging.average([tree])['w'], tree['w'])


def test_average_rounds_half_precision_once():
  # Summed in bfloat16, 256 + 1 + 1 would stay at 256.
  leaves = [jnp.array(x, jnp.bfloat16) for x in (256, 1, 1)]
  result = averaging.average(leaves)
  assert result.dtype == jnp.bfloat16
  assert result == jnp.array(258 / 3, jnp.bfloat16)


def test_average_keeps_the_last_counter():
  trees = [{'count': jnp.int32(x), 'seen': jnp.bool(x)} for x in (2**30, 0, 7)]
  result = averaging.average(trees)
  assert result == {'count': 7, 'seen': True}
  assert result['count'].dtype == jnp.int32


def test_average_refuses_trees_of_other_shapes():
  with pytest.raises(ValueError, match='shape'):
    averaging.average([{'w': jnp.ones(2)}, {'w': jnp.ones(1)}])


def linear_members(scale):
  """Returns H linear models and images, with logits of about this scale."""
  rng = np.random.default_rng(1)
  images = rng.uniform(size=(4, 2, 2, 1)).astype(np.float32)
  kernels = (scale * rng.normal(size=(H, 4, 5))).astype(np.float32)
  members = [lambda x, w=w: x.reshape(len(x), -1) @ w for w in kernels]
  return members, kernels, images


def log_mean_softmax(kernels, images):
  """Returns the ensemble's logits [B, K] and the softmaxes [H, B, K]."""
  logits = np.float64(images).reshape(len(images), -1) @ np.float64(kernels)
  logits -= logits.max(axis=-1, keepdims=True)
  log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
  return np.logaddexp.reduce(log_p) - np.log(len(kernels)), np.exp(log_p)


@pytest.mark.parametrize('scale', [1.0, 1e4])
def test_ensemble_is_the_log_of_the_mean_softmax(scale):
  members, kernels, images = linear_members(scale)
  expected, _ = log_mean_softmax(kernels, images)
  result = jax.jit(averaging.ensemble(iter(members)))(images)
  assert result.shape == (4, 5)
  # At 1e4 softmax itself is 0 or 1 in float32, and its log would be -inf.
  np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6 * scale)


def test_ensemble_has_the_gradient_of_one_model():
  members, kernels, images = linear_members(1.0)
  labels = np.array([0, 1, 2, 4])
  rows = np.arange(len(labels))

  def loss(images):
    return averaging.ensemble(members)(images)[rows, labels].sum()

  # d log mean_h p_h[y] = sum_h (p_h[y] / sum_g p_g[y]) (e_y - p_h) W_h^T.
  _, p = log_mean_softmax(kernels, images)
  share = p[:, rows, labels] / p[:, rows, labels].sum(axis=0)
  towards = share[..., None] * (np.eye(5)[labels] - p)
  expected = np.einsum('hbk,hdk->bd', towards, np.float64(kernels))
  np.testing.assert_allclose(
    jax.grad(loss)(images).reshape(4, -1), expected, rtol=1e-4, atol=1e-5
  )


def test_ensemble_of_sure_members_has_a_finite_gradient():
  members, _, images = linear_members(1e4)
  gradient = jax.grad(lambda x: averaging.ensemble(members)(x)[:, 0].sum())(
    images
  )
  assert jnp.isfinite(gradient).all()
