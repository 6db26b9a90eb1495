"""The networks of the benchmarks: with random weights, or from a file."""

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import traverse_util

from mwrobust import attacks, models

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
  """A network and a batch to time.

  Attributes:
    logits_fn: `logits_fn(variables, images)`.
    variables: its random weights.
    images: a random batch.
    labels: the network's predictions, so that no example is misclassified.
    pairs: the paper's six threats, each with its training attack.
  """

  logits_fn: Callable[[Any, jax.Array], jax.Array]
  variables: Any
  images: jax.Array
  labels: jax.Array
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
