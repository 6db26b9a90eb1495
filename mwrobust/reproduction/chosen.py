"""The settings chosen for each method, and the candidates of a search.

Every method gets the same small search on validation images:

  python -m mwrobust.search --config=configs/mnist.py:maini,cnn \
    --config.train.budget=N

prints the entries of `CHOSEN`, which `python -m mwrobust.reproduce` uses.
"""

from typing import Any

<<<<<<< HEAD
# The first candidate of every method,
FIRST = {'optimizer.learning_rate': 12e-3, 'train.ramp': 0.3}
# and what the others change, one setting at a time.
CHANGES = ({'optimizer.learning_rate': 6e-3}, {'train.ramp': 0.6})
# The methods with a parameter of their own: its first value, and another.
=======
# The first candidate of every method.
FIRST = {'optimizer.learning_rate': 6e-3, 'train.ramp': 0.3}
# The changes of the other candidates, one setting at a time.
CHANGES = ({'optimizer.learning_rate': 3e-3}, {'train.ramp': 0.6})
# The methods with a parameter of their own: its first value and another.
>>>>>>> english
OWN = {
  'multiplicative_weights': {'policy.eta': (0.25, 1.0)},
  'ucb': {'policy.exploration': (1.0, 0.25)},
  'e_at': {'policy.decay': (0.98, 0.9)},
}
<<<<<<< HEAD
# The methods without one get this in its place.
WITHOUT_OWN = {'optimizer.learning_rate': 24e-3}
=======
# The change of methods without such a parameter.
WITHOUT_OWN = {'optimizer.learning_rate': 12e-3}
>>>>>>> english

# By config, named as its folder of runs, and by method.
CHOSEN: dict[str, dict[str, dict[str, Any]]] = {}
