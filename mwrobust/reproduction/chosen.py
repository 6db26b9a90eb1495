"""The settings that each method was given, and what a search may set.

Every method gets the same small search, on validation images:

  python -m mwrobust.search --config=configs/mnist.py:maini,cnn \
    --config.train.budget=N

prints what goes into `CHOSEN`; `python -m mwrobust.reproduce` uses it.
"""

from typing import Any

# Each value with each other one, for every method,
GRID = {
  'optimizer.learning_rate': (3e-3, 6e-3),
  'train.ramp': (0.3, 0.6),
}
# and with those of the method's own parameter.
OWN = {
  'multiplicative_weights': {'policy.eta': (0.25, 1.0)},
  'ucb': {'policy.exploration': (0.25, 1.0)},
  'e_at': {'policy.decay': (0.9, 0.98)},
}
# Methods without a parameter of their own get as many candidates by these.
MORE_LEARNING_RATES = (1.5e-3, 12e-3)

# By config, as its folder of runs is called, and by method.
CHOSEN: dict[str, dict[str, dict[str, Any]]] = {}
