import functools
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jax_core

from mwrobust import models
from mwrobust.errors import UserError
from mwrobust.models.cnn import Conv

SMALL = {
  'cnn': {'features': (4, 8), 'hidden': 16},
  'resnet50': {'stage_sizes': (1, 1), 'width': 4},
  'resnet_v1_50': {'depth': 8, 'width': 4},
  'preact_resnet18': {'stage_sizes': (1, 1), 'width': 4},
}
WITH_BATCH_NORM = [name for name in SMALL if name != 'cnn']
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
IMAGES = np.random.default_rng(1).uniform(size=(6, 8, 8, 3)).astype('float32')
NORMALISED = (IMAGES - np.float32(MEAN)) / np.float32(STD)
# The first image again, in a batch with other images.
OTHERS = np.concatenate([IMAGES[:1], 1 - IMAGES[1:]])


def small(name, mean=MEAN, std=STD):
  return models.create(name, num_classes=5, mean=mean, std=std, **SMALL[name])


@functools.cache
def variables_of(name):
  """Returns random variables, with positive statistics."""
  shapes = jax.eval_shape(
    functools.partial(small(name).init, train=False), jax.random.key(0), IMAGES
  )
  rng = np.random.default_rng(0)
  variables = jax.tree.map(
    lambda leaf: np.float32(rng.normal(scale=0.3, size=leaf.shape)), shapes
  )
  if 'batch_stats' in variables:
    variables['batch_stats'] = jax.tree.map(
      lambda leaf: np.abs(leaf) + 0.5, variables['batch_stats']
    )
  return variables


@functools.partial(jax.jit, static_argnames=('model', 'train'))
def run(model, variables, images, *, train):
  """Returns the logits, `batch_stats` afterwards, and all gradients."""

  def loss_fn(params, images):
    logits, updated = model.apply(
      {**variables, 'params': params}, images, train, mutable='batch_stats'
    )
    return -nn.log_softmax(logits)[:, 0].sum(), (logits, updated)

  gradients, (logits, updated) = jax.grad(
    loss_fn, argnums=(0, 1), has_aux=True
  )(variables['params'], images)
  return logits, updated.get('batch_stats', {}), gradients


@pytest.mark.parametrize(
  ('name', 'shape', 'count'),
  [
    # 4*4*1*32+32 + 4*4*32*64+64 + 7*7*64*200+200 + 200*10+10.
    ('cnn', (28, 28, 1), 662_786),
    ('resnet50', (32, 32, 3), 23_520_842),
    ('resnet50', (28, 28, 1), 23_519_690),
    # The released code's, as Keras counts its trainable parameters.
    ('resnet_v1_50', (32, 32, 3), 760_266),
    ('resnet_v1_50', (28, 28, 1), 759_978),
    ('preact_resnet18', (32, 32, 3), 11_172_170),
    ('preact_resnet18', (28, 28, 1), 11_171_018),
  ],
)
def test_parameter_count_and_logits(name, shape, count):
  mean = std = (0.5,) * shape[-1]
  model = models.create(name, num_classes=10, mean=mean, std=std)
  logits, variables = jax.eval_shape(
    functools.partial(model.init_with_output, train=False),
    jax.random.key(0),
    jax.ShapeDtypeStruct((2, *shape), jnp.float32),
  )
  params = jax.tree.leaves(variables['params'])
  assert sum(leaf.size for leaf in params) == count
  assert (logits.shape, logits.dtype) == ((2, 10), jnp.float32)
  assert all(leaf.dtype == jnp.float32 for leaf in params)


def products_of(jaxpr):
  """Yields the dots and convolutions of a jaxpr, also of inner ones."""
  for equation in jaxpr.eqns:
    if equation.primitive.name in ('dot_general', 'conv_general_dilated'):
      yield equation
    for inner in jax_core.jaxprs_in_params(equation.params):
      yield from products_of(inner)


@pytest.mark.parametrize('train', [False, True])
@pytest.mark.parametrize('name', [*SMALL, 'maini'])
def test_half_precision_images_and_parameters_make_half_precision_products(
  name, train
):
  model = models.create(
    name, num_classes=5, mean=MEAN, std=STD, **SMALL.get(name, {})
  )
  init = functools.partial(model.init, train=False)
  variables = jax.eval_shape(init, jax.random.key(0), IMAGES)
  params, images = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
    (variables['params'], IMAGES),
  )
  apply = functools.partial(model.apply, train=train, mutable='batch_stats')
  jaxpr = jax.make_jaxpr(apply)({**variables, 'params': params}, images)
  products = list(products_of(jaxpr.jaxpr))
  assert len(products) >= 4
  for product in products:
    assert {v.aval.dtype.name for v in product.invars} == {'bfloat16'}


@pytest.mark.parametrize('name', SMALL)
def test_normalisation_is_inside(name):
  variables = variables_of(name)
  images = np.float32(MEAN) + np.float32(STD) * IMAGES
  logits, _, _ = run(small(name), variables, images, train=False)
  plain = small(name, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
  plain_logits = jax.jit(functools.partial(plain.apply, train=False))
  np.testing.assert_allclose(
    logits, plain_logits(variables, IMAGES), rtol=1e-4, atol=1e-5
  )
  assert not np.allclose(logits, plain_logits(variables, images), rtol=1e-4)


@pytest.mark.parametrize('name', WITH_BATCH_NORM)
def test_without_train_statistics_stay_and_examples_are_independent(name):
  model, variables = small(name), variables_of(name)
  logits, batch_stats, _ = run(model, variables, IMAGES, train=False)
  jax.tree.map(
    np.testing.assert_array_equal, batch_stats, variables['batch_stats']
  )
  in_other_company, _, _ = run(model, variables, OTHERS, train=False)
  np.testing.assert_allclose(logits[0], in_other_company[0], rtol=1e-5)


@pytest.mark.parametrize('name', WITH_BATCH_NORM)
def test_with_train_statistics_move_and_examples_share_them(name):
  model, variables = small(name), variables_of(name)
  logits, batch_stats, _ = run(model, variables, IMAGES, train=True)
  moved = jax.tree.map(np.not_equal, batch_stats, variables['batch_stats'])
  assert all(leaf.any() for leaf in jax.tree.leaves(moved))
  in_other_company, _, _ = run(model, variables, OTHERS, train=True)
  assert not np.allclose(logits[0], in_other_company[0], atol=1e-3)


@pytest.mark.parametrize('train', [False, True])
@pytest.mark.parametrize('name', SMALL)
def test_gradients_are_finite(name, train):
  _, _, gradients = run(small(name), variables_of(name), IMAGES, train=train)
  assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
  assert jnp.all(jnp.any(gradients[1] != 0, axis=(1, 2, 3)))


class PlainCNN(nn.Module):
  """Is `CNN` with ordinary convolutions, for normalised images."""

  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Conv(4, (4, 4), strides=2)(x))
    x = nn.relu(nn.Conv(8, (4, 4), strides=2)(x))
    x = nn.relu(nn.Dense(16)(x.reshape(x.shape[0], -1)))
    return nn.Dense(5)(x)


def test_cnn_equals_ordinary_convolutions_on_the_same_parameters():
  variables = variables_of('cnn')
  np.testing.assert_allclose(
    run(small('cnn'), variables, IMAGES, train=False)[0],
    jax.jit(PlainCNN().apply)(variables, NORMALISED),
    rtol=1e-4,
    atol=1e-4,
  )


@pytest.mark.parametrize(
  'shape', [(28, 28, 1), (8, 6, 3), (7, 5, 2), (1, 2, 4)]
)
def test_conv_equals_nn_conv_in_values_and_gradients(shape):
  rng = np.random.default_rng(2)
  images, kernel, bias = (
    np.float32(rng.normal(size=size))
    for size in [(3, *shape), (4, 4, shape[-1], 6), (6,)]
  )
  variables = {'params': {'kernel': kernel, 'bias': bias}}

  @functools.partial(jax.jit, static_argnums=0)
  def values_and_gradients(conv):
    values, pullback = jax.vjp(conv.apply, variables, images)
    return values, pullback(jnp.cos(values))

  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4),
    values_and_gradients(Conv(6)),
    values_and_gradients(nn.Conv(6, (4, 4), strides=2)),
  )


def test_create_makes_hashable_modules_from_lists_and_arrays():
  model = models.create(
    'cnn',
    num_classes=5,
    mean=list(MEAN),
    std=np.array(STD),
    features=[4, 8],
    hidden=16,
  )
  assert model == small('cnn')
  assert hash(model) == hash(small('cnn'))


def test_unknown_names_and_options_are_explained():
  common = {'num_classes': 10, 'mean': (0.5,), 'std': (0.5,)}
  with pytest.raises(UserError, match=r"'resnet5'.*Did you mean 'resnet50'\?"):
    models.create('resnet5', **common)
  with pytest.raises(
    UserError, match=r"model\.name = 'x'.*Choose one of: cnn, "
  ):
    models.create('x', **common)
  with pytest.raises(UserError, match=r"model\.options\.widht.*'width'"):
    models.create('resnet_v1_50', widht=8, **common)


def test_impossible_depth_and_channels_are_explained():
  model = models.create(
    'resnet_v1_50', num_classes=10, mean=MEAN, std=STD, depth=18
  )
  with pytest.raises(UserError, match='depth = 18'):
    model.init(jax.random.key(0), IMAGES, train=False)
  with pytest.raises(UserError, match=r' 1 .*mean = '):
    small('cnn').init(jax.random.key(0), IMAGES[..., :1], train=False)


# The user's own modules.

OWN = """
import flax.linen as nn
import jax.numpy as jnp
from flax import nnx


class Full(nn.Module):
  num_classes: int
  widths: tuple = (16,)

  @nn.compact
  def __call__(self, x, train: bool):
    x = x.reshape(len(x), -1)
    for width in self.widths:
      x = nn.relu(nn.BatchNorm(not train)(nn.Dense(width)(x)))
    x = nn.Dropout(0.5, deterministic=not train)(x)
    return nn.Dense(self.num_classes)(x)


class Other(nn.Module):
  '''The same, otherwise put.'''

  num_classes: int

  def setup(self):
    self.dense, self.norm = nn.Dense(16), nn.BatchNorm()
    self.dropout, self.last = nn.Dropout(0.5), nn.Dense(self.num_classes)

  def __call__(self, x, *, deterministic=True, use_running_average=True):
    x = self.dense(x.reshape(len(x), -1))
    x = nn.relu(self.norm(x, use_running_average=use_running_average))
    return self.last(self.dropout(x, deterministic=deterministic))


class Plain(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(5, dtype=jnp.bfloat16)(x.mean(axis=(1, 2)))


class Needy(nn.Module):
  depth: int
  settings: dict = None

  def __call__(self, x):
    return x, self.depth


class NNX(nnx.Module):
  pass


def function(x):
  return x
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
  """Creates modules of a file in the current folder."""
  (tmp_path / 'my_nets.py').write_text(OWN)
  (tmp_path / 'broken_nets.py').write_text('1 / 0')
  monkeypatch.chdir(tmp_path)
  before = [*sys.path]
  create = functools.partial(
    models.create, num_classes=5, mean=MEAN, std=list(STD)
  )
  yield create
  assert sys.path == before
  sys.modules.pop('my_nets', None)


def logits_of(model, variables, *, train=False, images=IMAGES, key=0):
  return model.apply(
    variables,
    images,
    train,
    rngs={'dropout': jax.random.key(key)} if train else None,
    mutable=['batch_stats'],
  )


@pytest.mark.parametrize('name', ['Full', 'Other'])
def test_own_module_trains_with_dropout_and_batch_norm(own, name):
  model = own(f'my_nets:{name}')
  variables = model.init(jax.random.key(0), IMAGES, train=False)
  logits, updated = logits_of(model, variables)
  assert (logits.shape, logits.dtype) == ((6, 5), jnp.float32)
  jax.tree.map(
    np.testing.assert_array_equal,
    updated['batch_stats'],
    variables['batch_stats'],
  )
  first, updated = logits_of(model, variables, train=True, key=1)
  second, _ = logits_of(model, variables, train=True, key=2)
  again, _ = logits_of(model, variables, train=True, key=1)
  np.testing.assert_array_equal(first, again)
  assert not np.allclose(first, second)
  moved = jax.tree.map(
    np.not_equal, updated['batch_stats'], variables['batch_stats']
  )
  assert all(leaf.any() for leaf in jax.tree.leaves(moved))


def test_own_module_gets_normalised_images_and_keeps_its_variables(own):
  model = own('my_nets:Full', widths=[8, 4])
  variables = model.init(jax.random.key(0), IMAGES, train=False)
  itself = sys.modules['my_nets'].Full(num_classes=5, widths=(8, 4))
  expected = itself.apply(variables, NORMALISED, train=False)
  found, _ = logits_of(model, variables)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
  assert {'Dense_0', 'Dense_1', 'Dense_2'} < {*variables['params']}


def test_own_module_without_train_or_num_classes(own):
  model = own('my_nets:Plain')
  variables = model.init(jax.random.key(0), IMAGES, train=False)
  for train in False, True:
    logits, _ = logits_of(model, variables, train=train)
    assert (logits.shape, logits.dtype) == ((6, 5), jnp.float32)
  model = models.create('my_nets:Plain', num_classes=7, mean=MEAN, std=STD)
  with pytest.raises(UserError, match=r'Plain .*\(6, 5\) .* 7 '):
    model.init(jax.random.key(0), IMAGES, train=False)


def test_own_module_is_static_and_hashable(own):
  model = own('my_nets:Full', widths=[8])
  same, other = own('my_nets:Full', widths=(8,)), own('my_nets:Full')
  assert model == same
  assert hash(model) == hash(same)
  assert model != other
  assert hash(own('my_nets:Needy', depth=1, settings={'a': [1, {'b': 2}]}))
  with pytest.raises(UserError, match=r'my_nets:Needy .*depth'):
    own('my_nets:Needy', depth=np.zeros(3))
  variables = model.init(jax.random.key(0), IMAGES, train=False)
  _, _, gradients = run(model, variables, IMAGES, train=False)
  assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
  ('name', 'options', 'message'),
  [
    ('no_such:Net', {}, r'no_such cannot be imported \(ModuleNotFoundError'),
    ('broken_nets:Net', {}, r'broken_nets cannot be imported \(ZeroDivision'),
    ('my_nets:Ful', {}, 'my_nets has no Ful. It has: Full, Othe'),
    ('my_nets:NNX', {}, 'NNX.* not a subclass of flax.linen.Module'),
    ('my_nets:function', {}, 'function.* not a subclass of flax.linen.Module'),
    (':Full', {}, 'must be module:name'),
    ('my_nets:', {}, 'must be module:name'),
    ('.my_nets:Full', {}, 'must be module:name'),
    ('my_nets:Full', {'width': 3}, r"model\.options.*Did you mean 'widths'"),
    ('my_nets:Plain', {'width': 3}, 'my_nets:Plain has no options'),
    ('my_nets:Needy', {}, r'needs depth: set model\.options\.depth'),
  ],
)
def test_own_module_that_cannot_be_made(own, name, options, message):
  with pytest.raises(UserError, match=message) as error:
    own(name, **options)
  assert name in str(error.value)


def test_own_module_that_returns_no_logits(own):
  model = own('my_nets:Needy', depth=3)
  with pytest.raises(UserError, match=r'Needy .*tuple'):
    model.init(jax.random.key(0), IMAGES, train=False)
