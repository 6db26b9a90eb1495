"""Trains the MNIST networks on which the strength of attacks is compared.

```bash
python -m benchmarks.strength_networks --data=DIR --output=networks
python benchmarks/strength_peers.py --network=networks/linf.npz ...
```

| network | trained on | epochs |
|---|---|---|
| natural | natural images | 8 |
| linf | 10-step PGD, linf 0.3 | 8 |
| l2 | 10-step PGD, l2 1.5 | 8 |
| masked | 10-step PGD, one of linf 0.3, l2 2 and l1 10 per batch, by multiplicative weights | 12 |

Networks trained like `masked` misdirect gradient attacks in l2 and l1, so
attacks that agree on the other networks may differ there. Every file holds
`params/Conv_0/kernel` and so on, `mean` and `std`.
"""  # noqa: E501 (a table)

import os

import numpy as np
from absl import app, flags
from flax import traverse_util

from benchmarks import networks
from mwrobust import config as config_lib
from mwrobust.errors import check_choice

RECIPES = {  # The method, the radii of linf, l2 and l1, and the epochs.
  'natural': ('natural', (0.3, 1.5, 10.0), 8),
  'linf': ('single pixel_linf', (0.3, 1.5, 10.0), 8),
  'l2': ('single pixel_l2', (0.3, 1.5, 10.0), 8),
  'masked': ('multiplicative_weights', (0.3, 2.0, 10.0), 12),
}

DATA = flags.DEFINE_string(
  'data', None, 'The folder of the MNIST files, *-ubyte.gz.', required=True
)
OUTPUT = flags.DEFINE_string(
  'output', None, 'The folder for the networks.', required=True
)
NETWORKS = flags.DEFINE_list('networks', list(RECIPES), 'Networks to train.')
SEED = flags.DEFINE_integer('seed', 0, 'The seed of the weights and batches.')


def make_config(network: str):
  """Returns the config of a network's training."""
  method, radii, epochs = RECIPES[network]
  config = config_lib.preset('paper', 'mnist')
  config.seed = SEED.value
  config.data.dir = DATA.value
  config_lib.use_cnn(config)
  config.model.options.features = (16, 32)
  config.optimizer.learning_rate = 2e-3
  config_lib.set_threats(config, {'pixel': radii})
  config_lib.use_papers_attack(config)
  for fields in config_lib.threat_table(config).values():
    fields.attack = {}  # Ten steps also under l1.
  config.method, _, threat = method.partition(' ')
  config.policy.threat = threat or 'pixel_linf'
  config.policy.eta = 0.25
  config.train.T = epochs
  config.train.r = 1.0
  config.train.h = 1
  config.train.ramp = 0.3
  config.train.validation_examples = 1000
  config.train.check_examples = 0
  return config


def main(argv):
  """Trains the networks and writes them to files."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments: {argv[1:]}')
  for name in NETWORKS.value:
    check_choice('--networks', name, RECIPES)
  os.makedirs(OUTPUT.value, exist_ok=True)
  for name in NETWORKS.value:
    print(name, flush=True)
    job, (variables,) = networks.train(make_config(name))
    arrays = traverse_util.flatten_dict(variables, sep='/')
    np.savez(
      os.path.join(OUTPUT.value, f'{name}.npz'),
      mean=np.float32(job.data.mean),
      std=np.float32(job.data.std),
      **{key: np.asarray(value) for key, value in arrays.items()},
    )


if __name__ == '__main__':
  app.run(main)
