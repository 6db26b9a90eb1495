"""The networks of the benchmarks: random, newly trained, or from a file."""

import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
from etils import epath
from flax import traverse_util

from mwrobust import attacks, models
from mwrobust.runtime.signals import stop_signals
from mwrobust.training import evaluation, loop, setup

# Network: (image shape, batch size, the paper's eps for linf, l2, l1).
SETTINGS = {
  'cnn': ((28, 28, 1), 100, (0.4, 1.0, 5.0)),
  'resnet_v1_50': ((32, 32, 3), 32, (0.06, 0.1, 7.84)),
  'resnet50': ((32, 32, 3), 32, (0.06, 0.1, 7.84)),
}
# The paper's training attacks.
ATTACKS = {
  'linf': attacks.pgd(10),
  'l2': attacks.pgd(10),
  'l1': attacks.slide(20, percentile=95),
}


class Loaded(NamedTuple):
  """A network and a batch to time."""

  # `logits_fn(variables, images)`.
  logits_fn: Callable[[Any, jax.Array], jax.Array]
  variables: Any  # Its random weights.
  images: jax.Array  # A random batch.
  # The network's predictions, so that no example is misclassified.
  labels: jax.Array
  # The paper's six threats, each with its training attack.
  pairs: tuple[tuple[attacks.Threat, attacks.Attack], ...]


def load(network: str) -> Loaded:
  """Returns a network with random weights and a random batch."""
  shape, batch_size, eps = SETTINGS[network]
  channels = shape[-1]
  model = models.create(
    network, num_classes=10, mean=(0.5,) * channels, std=(0.5,) * channels
  )
  images = jax.random.uniform(jax.random.key(0), (batch_size, *shape))
  variables = model.init(jax.random.key(2), images[:1], train=False)

  def logits_fn(variables, images):
    return model.apply(variables, images, train=False)

  labels = jax.jit(logits_fn)(variables, images).argmax(-1)
  threats = attacks.six_threats(*eps)
  pairs = tuple((threat, ATTACKS[threat.norm]) for threat in threats)
  return Loaded(logits_fn, variables, images, labels, pairs)


def train(config: ml_collections.ConfigDict):
  """Trains a run, and returns its job and the members of its output."""
  # Nothing is evaluated: otherwise it would be part of the time left.
  config.eval.examples, config.eval.curve_examples = 1, 0
  job = setup.prepare(config)
  with tempfile.TemporaryDirectory() as folder, stop_signals() as stop:
    workdir = epath.Path(folder)
    loop.train(job, workdir, stop, print)
    found = evaluation.networks(job, workdir, stop.check, print)
    (output,) = (network for network in found if network.is_output)
  return job, output.members


def load_trained(path: str | os.PathLike):
  """Returns `logits_fn(variables, images)` and the variables of an .npz file.

  The file has the parameters of a `cnn` by path, and its mean and std.
  """
  with np.load(path, allow_pickle=False) as arrays:
    arrays = dict(arrays)
  mean, std = (
    tuple(arrays.pop(name).ravel().tolist()) for name in ('mean', 'std')
  )
  variables = traverse_util.unflatten_dict(arrays, sep='/')
  params = variables['params']
  model = models.create(
    'cnn',
    num_classes=len(params['Dense_1']['bias']),
    mean=mean,
    std=std,
    features=tuple(len(params[f'Conv_{i}']['bias']) for i in (0, 1)),
    hidden=len(params['Dense_0']['bias']),
  )
  return functools.partial(model.apply, train=False), variables
