import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

from mwrobust import attacks, data
from mwrobust.training import policies, state, steps
from mwrobust.training.adversaries import make_adversary

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
PAIRS = tuple(
  (
    threat,
    attacks.slide(20, percentile=95)
    if threat.norm == 'l1'
    else attacks.pgd(10),
  )
  for threat in attacks.six_threats(0.1, 0.5, 2.0)
)
BATCH = steps.Batch(
  RNG.integers(0, 256, (12, 8, 8, 1), dtype=np.uint8),
  RNG.integers(0, 3, 12).astype(np.int32),
  np.arange(12, dtype=np.int32),
)


class Network(nn.Module):
  """Has BatchNorm, and counts how often it is traced."""

  traced = []  # noqa: RUF012

  @nn.compact
  def __call__(self, images, train):
    self.traced.append(train)
    x = nn.relu(nn.Conv(4, (3, 3), 2)(images))
    x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
    return nn.Dense(3)(x.reshape(len(x), -1))


def make(adversary='one', policy=None, **changes):
  policy = policy or policies.uniform(6)
  first = state.create(KEY, Network(), (8, 8, 1), optax.sgd(1.0), policy)
  options = {
    'model': Network(),
    'adversary': make_adversary(adversary, PAIRS),
    'policy': policy,
    'key': KEY,
    'progress': lambda chosen: 0.5,
    'learning_rate': lambda step, progress: 0.1,
    'radius_scale': lambda progress: 1.0,
  }
  return first, steps.make_train_step(**(options | changes))


def test_one_trace_serves_every_index_and_every_step():
  now, train_step = make()
  Network.traced.clear()
  for index in range(6):
    now, loss = train_step(now, np.int32(index), BATCH)
    assert np.isfinite(loss)
  # Once in the attack, with running statistics, and once in the update.
  assert Network.traced == [False, True]
  assert train_step._cache_size() == 1
  assert int(now.step) == 6


def test_the_step_is_the_attack_then_sgd_on_what_came_out():
  for index in (0, 5):
    now, train_step = make()
    copy = jax.tree.map(jnp.copy, now)
    key, *_ = jax.random.split(jax.random.fold_in(KEY, 0), 3)
    images = BATCH.images.astype(np.float32) / 255

    def infer(images, copy=copy):
      return Network().apply(copy.variables, images, train=False)

    adversarial = attacks.make_attack(*PAIRS[index])(
      infer, key, images, BATCH.labels, BATCH.ids
    )

    def loss_fn(params, copy=copy, adversarial=adversarial):
      logits, updated = Network().apply(
        {'params': params, 'batch_stats': copy.batch_stats},
        adversarial,
        train=True,
        mutable=['batch_stats'],
      )
      losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, BATCH.labels
      )
      return losses.mean(), updated['batch_stats']

    (expected_loss, stats), gradient = jax.value_and_grad(
      loss_fn, has_aux=True
    )(copy.params)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, copy.params, gradient)

    now, loss = train_step(now, np.int32(index), BATCH)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    close(loss, expected_loss)
    jax.tree.map(close, now.params, expected)
    # One update of the statistics: the attack made none.
    jax.tree.map(close, now.batch_stats, stats)


def test_radii_follow_the_scale():
  losses = {}
  for scale in (0.0, 0.5, 1.0):
    now, train_step = make(radius_scale=lambda progress, scale=scale: scale)
    losses[scale] = [
      float(train_step(jax.tree.map(jnp.copy, now), np.int32(i), BATCH)[1])
      for i in range(6)
    ]
  now, natural = make('none')
  _, unattacked = natural(now, np.int32(0), BATCH)
  np.testing.assert_allclose(losses[0.0], unattacked, rtol=1e-5)
  assert (np.array(losses[0.5]) > np.array(losses[0.0])).all()
  assert (np.array(losses[1.0]) > np.array(losses[0.5])).all()


def test_augmentation_is_that_of_the_data_set():
  now, train_step = make('none', augment=True)
  _, augment_key, _ = jax.random.split(jax.random.fold_in(KEY, 0), 3)
  images = data.augment(
    augment_key, BATCH.images.astype(np.float32) / 255, BATCH.ids
  )
  bytes_ = np.round(np.asarray(images) * 255).astype(np.uint8)
  _, expected = make('none')[1](
    jax.tree.map(jnp.copy, now), np.int32(0), BATCH._replace(images=bytes_)
  )
  _, loss = train_step(now, np.int32(0), BATCH)
  np.testing.assert_allclose(loss, expected, rtol=1e-4)


def test_validation_measures_the_loss_under_each_threat():
  variables = make()[0].variables
  validation_step = steps.make_validation_step(
    model=Network(), pairs=PAIRS, key=KEY
  )
  logits_fn = functools.partial(Network().apply, variables, train=False)
  images = BATCH.images.astype(np.float32) / 255
  loss = optax.softmax_cross_entropy_with_integer_labels
  for index, pair in enumerate(PAIRS):
    losses, correct = validation_step(variables, jnp.int32(index), BATCH, 1.0)
    attack = jax.jit(functools.partial(attacks.make_attack(*pair), logits_fn))
    attacked = attack(KEY, images, BATCH.labels, BATCH.ids)
    expected = loss(logits_fn(attacked), BATCH.labels)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    seen = logits_fn(attacked).argmax(axis=1)
    assert (correct == (seen == BATCH.labels)).all()
    assert losses.mean() > loss(logits_fn(images), BATCH.labels).mean()


def test_the_policy_sees_every_mini_batch():
  policy = policies.ucb(6)
  now, train_step = make(policy=policy)
  first = jax.tree.map(np.asarray, now.policy)
  now, loss = train_step(now, np.int32(2), BATCH)
  expected = policy.observe(first, 2, loss, jnp.float32(0))
  jax.tree.map(np.testing.assert_allclose, now.policy, expected)


def test_all_threats_at_once_are_the_mean_of_each_alone():
  (start, one), (now, avg) = make(), make('avg')
  alone = [
    one(jax.tree.map(jnp.copy, start), np.int32(i), BATCH) for i in range(6)
  ]
  now, mean = avg(now, np.int32(0), BATCH)
  assert float(mean) == pytest.approx(
    np.mean([float(loss) for _, loss in alone]), rel=1e-5
  )
  jax.tree.map(
    lambda found, *each: np.testing.assert_allclose(
      found, np.mean(each, axis=0), rtol=1e-4, atol=1e-6
    ),
    now.params,
    *[then.params for then, _ in alone],
  )


def test_half_precision_is_for_the_network_only():
  now, train_step = make(precision='bfloat16')
  exact_now, exact_step = make()
  now, loss = train_step(now, np.int32(0), BATCH)
  _, exact = exact_step(exact_now, np.int32(0), BATCH)
  assert float(loss) == pytest.approx(float(exact), rel=0.05)
  assert float(loss) != float(exact)
  for leaf in jax.tree.leaves(now.params):
    assert leaf.dtype == jnp.float32


class WithDropout(nn.Module):
  @nn.compact
  def __call__(self, images, train):
    x = images.reshape(len(images), -1)
    return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x))


def test_dropout_works():
  policy = policies.uniform(6)
  first = state.create(KEY, WithDropout(), (8, 8, 1), optax.sgd(1.0), policy)
  step = steps.make_train_step(
    model=WithDropout(),
    adversary=make_adversary('none', PAIRS),
    policy=policy,
    key=KEY,
    progress=lambda chosen: 0.5,
    learning_rate=lambda step, progress: 0.1,
    radius_scale=lambda progress: 1.0,
  )
  losses = []
  for number in range(2):
    now = jax.tree.map(jnp.copy, first).replace(step=jnp.int32(number))
    losses.append(float(step(now, np.int32(0), BATCH)[1]))
  assert losses[0] != losses[1]


def optimizer_config(**changes):
  return ml_collections.ConfigDict(
    {
      'name': 'sgd',
      'learning_rate': 0.1,
      'schedule': 'steps',
      'drops': (2, 3),
      'momentum': 0.9,
      'l2': 0.0,
      'weight_decay': 0.01,
    }
    | changes
  )


def test_learning_rate_drops_at_the_epochs():
  rate = state.make_learning_rate(optimizer_config(), 10)
  found = [float(rate(step, 0.5)) for step in (0, 19, 21, 29, 31, 49)]
  np.testing.assert_allclose(found, [0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3])


def test_with_a_budget_learning_rate_drops_at_shares_of_the_progress():
  # Epochs 2 and 3 of 5, however many steps the budget is enough for.
  rate = state.make_learning_rate(optimizer_config(), 10, epochs=5)
  found = [float(rate(7, share)) for share in (0, 0.39, 0.41, 0.59, 0.61, 1)]
  np.testing.assert_allclose(found, [0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3])
  assert float(rate(1000, 0.39)) == pytest.approx(0.1)


def test_one_cycle_rises_and_falls():
  config = optimizer_config(schedule='one_cycle', name='adam')
  rate = state.make_learning_rate(config, 10)
  expected = optax.cosine_onecycle_schedule(100, 0.1)
  for step in range(101):
    np.testing.assert_allclose(rate(0, step / 100), expected(step), rtol=1e-4)
  rates = [float(rate(0, step / 100)) for step in range(100)]
  assert max(rates) == pytest.approx(0.1, rel=1e-3)
  assert rates[0] < 0.05
  assert rates[-1] < 0.001


def test_cosine_falls_to_zero_and_adamw_decays():
  config = optimizer_config(schedule='cosine', name='adamw')
  rate = state.make_learning_rate(config, 10)
  rates = [float(rate(0, progress)) for progress in (0, 0.5, 1)]
  np.testing.assert_allclose(rates, [0.1, 0.05, 0.0], atol=1e-6)
  optimizer = state.make_optimizer(config)
  params = {'dense': jnp.ones((2, 2))}
  zero = jax.tree.map(jnp.zeros_like, params)
  updates, _ = optimizer.update(zero, optimizer.init(params), params)
  np.testing.assert_allclose(updates['dense'], -0.01, rtol=1e-5)


def test_l2_is_keras_l2_on_convolution_kernels_only():
  optimizer = state.make_optimizer(optimizer_config(l2=0.01, momentum=0.0))
  params = {'conv': jnp.ones((3, 3, 1, 2)), 'dense': jnp.ones((4, 2))}

  def regularised(params):
    return 0.01 * jnp.sum(params['conv'] ** 2)

  zero = jax.tree.map(jnp.zeros_like, params)
  updates, _ = optimizer.update(zero, optimizer.init(params), params)
  expected = jax.tree.map(jnp.negative, jax.grad(regularised)(params))
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-6), updates, expected
  )


def test_rate_and_radii_follow_the_mini_batches_of_each_threat():
  seen = []

  def note(name, value):
    jax.debug.callback(lambda value: seen.append((name, float(value))), value)
    return jnp.float32(0)

  now, train_step = make(
    progress=lambda chosen: chosen[0] / 4 + chosen[1] / 2,
    learning_rate=lambda step, progress: note('rate', progress),
    radius_scale=lambda progress: note('radii', progress),
  )
  for index in (0, 1, 0):
    now, _ = train_step(now, np.int32(index), BATCH)
  jax.effects_barrier()
  assert now.chosen.tolist() == [2, 1, 0, 0, 0, 0]
  # The rate uses the progress before the mini batch, the radii that after it.
  assert sorted({v for name, v in seen if name == 'rate'}) == [0, 0.25, 0.75]
  assert sorted({v for name, v in seen if name == 'radii'}) == [0.25, 0.75, 1]
