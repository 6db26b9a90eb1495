"""The settings chosen for each method, and the candidates of a search.

Every method gets the same small search on validation images:

  python -m mwrobust.search --config=configs/mnist.py:balanced,cnn \
    --config.data.dir=DIR --config.train.budget=3000000 --config.train.T=10

prints its winners as entries of `CHOSEN`, which `python -m mwrobust.reproduce`
uses. `maini` had half the budget, and an earlier state of attacks and defaults.
"""

from typing import Any, NamedTuple

# The first candidate of every method, for batches of 100.
FIRST = {'optimizer.learning_rate': 12e-3, 'train.ramp': 0.3}
# The changes of the other candidates, one setting at a time.
CHANGES = ({'optimizer.learning_rate': 6e-3}, {'train.ramp': 0.6})
# The methods with a parameter of their own: its first value and another.
OWN = {
  'multiplicative_weights': {'policy.eta': (2.5, 1.0)},
  'ucb': {'policy.exploration': (1.0, 0.25)},
  'e_at': {'policy.decay': (0.98, 0.9)},
}
# The change of methods without such a parameter.
WITHOUT_OWN = {'optimizer.learning_rate': 24e-3}


class Chosen(NamedTuple):
  """The settings of a comparison."""

  how: str  # Completes 'The settings of ... were chosen'.
  settings: dict[str, dict[str, Any]]  # By method.


_MAINI = {
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
}


# The defaults when `maini` was searched.
_EARLIER = {'policy.signal': 'loss', 'train.validation_examples': 500}

_BALANCED = {
  'multiplicative_weights': {
    'optimizer.learning_rate': 0.00384,
    'train.ramp': 0.3,
    'policy.eta': 2.5,
  },
  'round_robin': {'optimizer.learning_rate': 0.00768, 'train.ramp': 0.3},
  'uniform': {'optimizer.learning_rate': 0.00768, 'train.ramp': 0.3},
  'greedy': {'optimizer.learning_rate': 0.00384, 'train.ramp': 0.3},
  'e_at': {
    'optimizer.learning_rate': 0.00384,
    'train.ramp': 0.6,
    'policy.decay': 0.98,
  },
  'ucb': {
    'optimizer.learning_rate': 0.00384,
    'train.ramp': 0.6,
    'policy.exploration': 1.0,
  },
  'max': {'optimizer.learning_rate': 0.00768, 'train.ramp': 0.3},
  'avg': {'optimizer.learning_rate': 0.00768, 'train.ramp': 0.3},
  'msd': {'optimizer.learning_rate': 0.00384, 'train.ramp': 0.6},
}

# By config, named as its folder of runs.
CHOSEN = {
  'mnist-maini-cnn': Chosen(
    'by the same search for each method on validation images, with an eta of '
    '0.25 or 1 for multiplicative weights',
    {method: own | _EARLIER for method, own in _MAINI.items()},
  ),
  'mnist-balanced-cnn': Chosen(
    'by the same search for each method on validation images, with earlier '
    'training attacks',
    _BALANCED,
  ),
}
