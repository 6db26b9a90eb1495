"""Attacks work with any space, shape, framework, precision and transform."""

import functools
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toys import (
  IMAGES,
  KEY,
  KINDS,
  LABELS,
  OWN,
  PAIRS,
  SIX,
  WEIGHTS,
  curved,
  length_in_ball,
  linear,
  of_every_kind,
  run,
  run_each,
)

from mwrobust import attacks
from mwrobust.attacks import losses

# ------------------------------------------------ spaces, classes and shapes


@pytest.mark.parametrize('name', OWN)
def test_a_space_of_ones_own(name):
  images = 0.3 + 0.4 * IMAGES  # Where nothing is clipped.
  labels = np.argmax(curved(images), axis=1).astype(np.int32)
  before = losses.margin(curved(images), labels)
  threats = [
    attacks.Threat(space=OWN[name], norm=norm, eps=eps)
    for norm, eps in (('linf', 0.1), ('l2', 0.5), ('l1', 0.4))
  ]
  pairs = of_every_kind(threats)
  for (threat, attack), found in zip(
    pairs, run_each(pairs, curved, images, labels), strict=True
  ):
    after = losses.margin(curved(found), labels)
    assert after.mean() > before.mean() - 1e-6, (threat, attack)
    if not isinstance(attack, attacks.Fab):  # It may find nothing so near.
      assert after.mean() > before.mean() + 1e-3, (threat, attack)
    assert ((found >= 0) & (found <= 1)).all()
    if name != 'frame':  # Not one to one.
      length = length_in_ball(threat, images, found)
      assert (length <= threat.eps * (1 + 1e-4)).all(), (threat, attack)


def test_a_switch_over_spaces_of_different_sizes():
  pairs = [
    (attacks.Threat(space=space, norm='l2', eps=0.25), attacks.pgd(5))
    for space in ('pixel', OWN['frame'], 'dct', OWN['rotation'])
  ]
  for pair, found in zip(
    pairs, run_each(pairs, curved, IMAGES, LABELS), strict=True
  ):
    alone = run(attacks.make_attack(*pair), curved, IMAGES, LABELS)
    np.testing.assert_allclose(found, alone, atol=1e-5)


@pytest.mark.parametrize(
  ('classes', 'shape'), [(2, (6, 10, 1)), (3, (10, 6, 3))]
)
def test_few_classes_channels_and_sizes_that_are_not_square(classes, shape):
  rng = np.random.default_rng(1)
  images = rng.uniform(size=(4, *shape)).astype(np.float32)
  weights = rng.normal(size=(images[0].size, classes)).astype(np.float32)
  logits_fn = functools.partial(linear, weights=weights)
  labels = np.argmax(logits_fn(images), axis=1).astype(np.int32)
  before = losses.margin(logits_fn(images), labels)
  names = ['pixel', 'dct', 'block_dct', 'haar', *['colour'] * (shape[2] == 3)]
  pairs = of_every_kind(
    [
      attacks.Threat(space=space, norm=norm, eps=eps)
      for space in names
      for norm, eps in (('linf', 0.3), ('l2', 2.0), ('l1', 10.0))
    ]
  )
  for (threat, attack), found in zip(
    pairs, run_each(pairs, logits_fn, images, labels), strict=True
  ):
    after = losses.margin(logits_fn(found), labels)
    assert after.mean() > before.mean(), (threat, attack)
    if not isinstance(attack, attacks.Square):
      assert (after > 0).any(), (threat, attack)


# --------------------------------------------------------- others' frameworks


class Linen(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Conv(4, (3, 3))(x))
    x = nn.BatchNorm(use_running_average=True)(x)
    return nn.Dense(5)(x.reshape(len(x), -1))


class NNX(nnx.Module):
  def __init__(self, rngs):
    self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
    self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
    self.dense = nnx.Linear(256, 5, rngs=rngs)

  def __call__(self, x):
    x = self.norm(nnx.relu(self.conv(x)))
    return self.dense(x.reshape(len(x), -1))


def linen_logits():
  model = Linen()
  return functools.partial(model.apply, model.init(KEY, IMAGES))


FRAMEWORKS = {
  'plain': lambda: curved,
  'linen': linen_logits,
  'nnx': lambda: NNX(nnx.Rngs(0)),
}


@pytest.mark.parametrize('framework', FRAMEWORKS)
def test_works_with_any_framework_jitted_vmapped_and_sharded(framework):
  logits_fn = FRAMEWORKS[framework]()
  attack = functools.partial(attacks.make_attack(*PAIRS[5]), logits_fn)
  expected = attack(KEY, IMAGES, LABELS)
  jitted = jax.jit(attack)
  np.testing.assert_allclose(jitted(KEY, IMAGES, LABELS), expected, atol=1e-5)

  keys = jax.random.split(KEY, 3)
  over_keys = jax.jit(jax.vmap(attack, (0, None, None)))
  found = over_keys(keys, IMAGES, LABELS)
  for key, one in zip(keys, found, strict=True):
    np.testing.assert_allclose(one, jitted(key, IMAGES, LABELS), atol=1e-5)

  mesh = jax.make_mesh((2,), ('data',), (jax.sharding.AxisType.Auto,))
  by_example = jax.sharding.NamedSharding(mesh, jax.P('data'))
  sharded = jax.jit(
    attack,
    in_shardings=(None, by_example, by_example),
    out_shardings=by_example,
  )(KEY, IMAGES, LABELS)
  assert len(sharded.sharding.device_set) == 2
  np.testing.assert_allclose(sharded, expected, atol=1e-5)


def test_an_nnx_model_that_learned_is_attacked_as_it_is_now():
  model = NNX(nnx.Rngs(0))
  attack = attacks.make_attack(*PAIRS[0])
  before = attack(model, KEY, IMAGES, LABELS)
  model.dense.kernel[...] = -model.dense.kernel[...]
  after = attack(model, KEY, IMAGES, LABELS)
  assert np.abs(before - after).max() > 0.1


def test_importing_the_attacks_imports_jax_and_little_else():
  code = """
import sys
import jax, numpy
before = set(sys.modules)
import mwrobust.attacks
loaded = {name.split('.')[0] for name in set(sys.modules) - before}
print(sorted(loaded - {'jax'}), 'absl.flags' in sys.modules)
"""
  result = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert result.stdout.strip() == "['mwrobust'] False"


def test_works_in_double_precision_mode():
  with jax.enable_x64(True):
    images = jnp.asarray(IMAGES, jnp.float32)
    for threat, attack in (
      *PAIRS,
      *((SIX[2], attack) for attack in KINDS.values()),
    ):
      attack = attacks.make_attack(threat, attack)
      found = attack(linear, jax.random.key(0), images, LABELS, scale=0.5)
      assert found.dtype == jnp.float32

    def double(images):
      return linear(images.astype(jnp.float64), WEIGHTS.astype(np.float64))

    found = attack(double, jax.random.key(0), images, LABELS)
    assert found.dtype == jnp.float32


def test_a_half_precision_network_is_climbed_in_single_precision():
  def half(images):
    return linear(images).astype(jnp.bfloat16)

  attack = attacks.make_attack(*PAIRS[1])
  found = run(attack, half, IMAGES, LABELS)
  full = run(attack, linear, IMAGES, LABELS)
  np.testing.assert_allclose(found, full, atol=0.02)


@pytest.mark.parametrize('impl', ['threefry2x32', 'rbg', 'unsafe_rbg'])
def test_ids_hold_for_every_generator(impl):
  key = jax.random.key(0, impl=impl)
  attack = attacks.make_attack(*PAIRS[0])
  ids = np.arange(6)
  together = run(attack, curved, IMAGES, LABELS, ids, key)
  backwards = run(attack, curved, IMAGES[::-1], LABELS[::-1], ids[::-1], key)
  np.testing.assert_allclose(together, backwards[::-1], atol=1e-6)
  alone = run(attack, curved, IMAGES[2:3], LABELS[2:3], ids[2:3], key)
  np.testing.assert_allclose(together[2:3], alone, atol=1e-6)


def test_arrays_closed_over_inside_jit():
  images, labels = jnp.asarray(IMAGES), jnp.asarray(LABELS)
  switch = attacks.make_switch(PAIRS)
  found = jax.jit(lambda k: switch(linear, jnp.int32(1), k, images, labels))(
    KEY
  )
  expected = run(attacks.make_attack(*PAIRS[1]), linear, IMAGES, LABELS)
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_works_inside_shard_map():
  mesh = jax.make_mesh((2,), ('data',), (jax.sharding.AxisType.Auto,))
  for threat, attack in (
    (SIX[2], attacks.pgd(5, restarts=2)),
    *((SIX[1], KINDS[kind]) for kind in ('apgd-t', 'fab', 'square')),
  ):
    attack = functools.partial(attacks.make_attack(threat, attack), linear)
    sharded = jax.shard_map(
      attack,
      mesh=mesh,
      in_specs=(jax.P(), jax.P('data'), jax.P('data'), jax.P('data')),
      out_specs=jax.P('data'),
    )
    ids = np.arange(6)
    found = jax.jit(sharded)(KEY, IMAGES, LABELS, ids)
    expected = jax.jit(attack)(KEY, IMAGES, LABELS, ids)
    np.testing.assert_allclose(found, expected, atol=1e-5)
