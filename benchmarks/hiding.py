"""How a network hides outside of [0, 1] from attacks that clip at the end.

  python -m benchmarks.hiding --data_dir=DIR

Trains a small network on MNIST against the paper's two linf threats, twice:
free to answer as it likes outside of [0, 1], and as all networks of `mwrobust`
do, which answer there as for the clipped image. Both are then attacked with
the clip at the end, which the paper has, and with a clip at every step. About
ten minutes on two CPU cores.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from mwrobust import config as config_lib
from mwrobust import datasets, job, policies, state, steps
from mwrobust.models.cnn import Conv
from mwrobust.models.normalise import normalise
from mwrobust.report import markdown_table

_DATA_DIR = flags.DEFINE_string(
  'data_dir', '', 'Folder of the raw MNIST files; empty: tensorflow-datasets.'
)
_EPOCHS = flags.DEFINE_integer('epochs', 6, 'Of training.')
EXAMPLES = 500  # Of the test set.


class Network(nn.Module):
  """A convolution and a dense layer, smooth."""

  mean: tuple[float, ...]
  std: tuple[float, ...]
  free: bool  # Outside of [0, 1].

  @nn.compact
  def __call__(self, images: jax.Array, train: bool) -> jax.Array:
    """Returns the logits; `train` changes nothing here."""
    del train
    if self.free:
      x = (images - self.mean[0]) / self.std[0]
    else:
      x = normalise(images, self.mean, self.std)
    x = nn.silu(Conv(8)(x)).reshape(len(x), -1)
    return nn.Dense(10)(nn.silu(nn.Dense(200)(x)))


def train(network: Network, config, data: datasets.Dataset):
  """The trained variables."""
  batch_size = config.train.batch_size
  epoch = len(data.train.labels) // batch_size
  total = _EPOCHS.value * epoch
  optimizer, _ = state.make_optimizer(config.optimizer, epoch, total)
  threats = config_lib.make_threats(config, 'train')
  policy = policies.make('round_robin', len(threats))
  step = steps.make_train_step(
    model=network,
    threats=threats,
    key=jax.random.key(1),
    radius_scale=lambda step: jnp.minimum(1.0, (step + 1) / (total / 2)),
    augment=False,
    attacked=True,
  )
  shape = data.train.images.shape[1:]
  current = state.create(jax.random.key(0), network, shape, optimizer, policy)
  for number in range(total):
    rows = datasets.batch_indices(0, number, len(data.train.labels), batch_size)
    batch = job.make_batch(data.train, rows)
    current, _ = step(current, np.int32(number % len(threats)), batch)
  return current.variables


def accuracy(network: Network, variables, threat, batch) -> float:
  """In percent, under one attack."""
  attack = steps.make_attack_step(
    model=network, threats=[threat], key=jax.random.key(2)
  )
  found = attack((variables,), np.int32(0), np.int32(0), np.float32(1), batch)
  return 100 * float(np.mean(found.predicted == batch.labels))


def main(_):
  """Trains, attacks, prints a table."""
  config = config_lib.preset('paper', 'mnist')
  config_lib.use_cnn(config)
  config.threats.norms = ('linf',)
  data = datasets.load(
    'mnist', directory=_DATA_DIR.value, validation='last', seed=0
  )
  batch = job.make_batch(data.test, np.arange(EXAMPLES))
  rows = []
  for free in (True, False):
    network = Network(data.mean, data.std, free)
    variables = train(network, config, data)
    for threat in config_lib.make_threats(config, 'eval'):
      found = [
        accuracy(
          network, variables, dataclasses.replace(threat, clip=clip), batch
        )
        for clip in ('end', 'step')
      ]
      name = 'free' if free else 'as clipped'
      rows.append([name, threat.name, *(f'{x:.1f}' for x in found)])
      print(rows[-1], flush=True)
  header = ['outside of [0, 1]', 'threat', 'clip at the end', 'at every step']
  print(f'\n{markdown_table(header, rows)}')


if __name__ == '__main__':
  app.run(main)
