"""How robust is your network? Evaluates any JAX network.

>>> import jax, numpy as np
>>> from mwrobust import attacks, evaluation
>>> weights = jax.random.normal(jax.random.key(0), (64, 3))
>>> def logits_fn(weights, images):  # linen, NNX, Haiku, Equinox, plain
...   return images.reshape(len(images), -1) @ weights
>>> images = np.random.default_rng(0).uniform(size=(30, 8, 8, 1))
>>> labels = logits_fn(weights, images).argmax(axis=1)
>>> threats = [
...   attacks.Threat(norm='linf', eps=0.02),
...   attacks.Threat(space='dct', norm='l1', eps=0.5),
... ]
>>> outcomes = evaluation.evaluate(
...   logits_fn, images, labels, threats,
...   params=weights, protocol='fast', progress=False,
... )  # fmt: skip
>>> sorted(outcomes.accuracies())
['dct_l1', 'min', 'natural', 'pixel_linf', 'union']
>>> outcomes.standing['pixel_linf'].shape
(30,)

`print(outcomes)` shows the table, `outcomes.fell_to['dct_l1']` names the attack
that fooled each image, and `evaluation.checks(outcomes)` says whether the
figures can be trusted. With `folder=`, an interrupted evaluation resumes.

This package knows nothing about training: it imports neither Flax nor a config.
"""

from mwrobust.evaluation.checks import Check, checks
from mwrobust.evaluation.outcomes import Outcomes, wilson
from mwrobust.evaluation.plan import cost
from mwrobust.evaluation.protocols import PROTOCOLS
from mwrobust.evaluation.survivors import FILE, RADII, evaluate

__all__ = [
  'FILE',
  'PROTOCOLS',
  'RADII',
  'Check',
  'Outcomes',
  'checks',
  'cost',
  'evaluate',
  'wilson',
]
