"""The settings chosen for each method, and the candidates of a search.

Every method gets the same small search on validation images:

  python -m mwrobust.search --config=configs/mnist.py:maini,cnn \
    --config.data.dir=DIR --config.train.budget=1500000 --config.train.T=10

prints the entries of `CHOSEN`, which `python -m mwrobust.reproduce` uses.
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

  how: str  # Completes 'These settings were chosen ...'.
  settings: dict[str, dict[str, Any]]  # By method.


_MAINI = {
  'multiplicative_weights': {
    'optimizer.learning_rate': 0.012,
    'train.ramp': 0.3,
    'policy.signal': 'loss',
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


def _for_batches_of_32() -> dict[str, dict[str, Any]]:
  """Returns the settings of `maini` with a third of the learning rate."""
  rate = 'optimizer.learning_rate'
  found = {m: own | {rate: own[rate] / 3} for m, own in _MAINI.items()}
  # The weights of the paper stay with the threat that is hard at first.
  found['multiplicative_weights'] |= {'policy.eta': 1.0, 'policy.memory': 0.5}
  return found


# By config, named as its folder of runs.
CHOSEN = {
  'mnist-maini-cnn': Chosen(
    'by the same search for each method on validation images', _MAINI
  ),
  # A search of its own is still to be made.
  'mnist-balanced-cnn': Chosen(
    'by the search on maini, with a third of the learning rate for a third of '
    'the batch size; eta and memory after two other runs on validation images',
    _for_batches_of_32(),
  ),
}
