"""The settings chosen for each method, and the candidates of a search.

Every method gets the same small search on validation images:

  python -m mwrobust.search --config=configs/mnist.py:maini,cnn \
    --config.data.dir=DIR --config.train.budget=1500000 --config.train.T=10

prints the entries of `CHOSEN`, which `python -m mwrobust.reproduce` uses.
"""

from typing import Any

# The first candidate of every method.
FIRST = {'optimizer.learning_rate': 12e-3, 'train.ramp': 0.3}
# The changes of the other candidates, one setting at a time.
CHANGES = ({'optimizer.learning_rate': 6e-3}, {'train.ramp': 0.6})
# The methods with a parameter of their own: its first value and another.
OWN = {
  'multiplicative_weights': {'policy.eta': (1.0, 0.25)},
  'ucb': {'policy.exploration': (1.0, 0.25)},
  'e_at': {'policy.decay': (0.98, 0.9)},
}
# The change of methods without such a parameter.
WITHOUT_OWN = {'optimizer.learning_rate': 24e-3}

# By config, named as its folder of runs, and by method.
CHOSEN: dict[str, dict[str, dict[str, Any]]] = {
  'mnist-maini-cnn': {
    'multiplicative_weights': {
      'optimizer.learning_rate': 0.012,
      'train.ramp': 0.3,
      'policy.eta': 0.25,
      'policy.memory': 1.0,
    },
    'round_robin': {'optimizer.learning_rate': 0.024, 'train.ramp': 0.3},
    'uniform': {'optimizer.learning_rate': 0.012, 'train.ramp': 0.3},
    'greedy': {'optimizer.learning_rate': 0.006, 'train.ramp': 0.3},
    'e_at': {
      'optimizer.learning_rate': 0.012,
      'train.ramp': 0.3,
      'policy.decay': 0.98,
    },
    'ucb': {
      'optimizer.learning_rate': 0.012,
      'train.ramp': 0.3,
      'policy.exploration': 1.0,
    },
    'max': {'optimizer.learning_rate': 0.024, 'train.ramp': 0.3},
    'avg': {'optimizer.learning_rate': 0.024, 'train.ramp': 0.3},
    'msd': {'optimizer.learning_rate': 0.024, 'train.ramp': 0.3},
  },
}
# A search of its own is still to be made. Until then all methods have their
# settings of `maini`, with a third of the learning rate for a third of the
# batch size; but the weights forget.
CHOSEN['mnist-balanced-cnn'] = {
  method: settings
  | {'optimizer.learning_rate': settings['optimizer.learning_rate'] / 3}
  for method, settings in CHOSEN['mnist-maini-cnn'].items()
}
CHOSEN['mnist-balanced-cnn']['multiplicative_weights'] |= {
  'policy.eta': 1.0,
  'policy.memory': 0.5,
}
