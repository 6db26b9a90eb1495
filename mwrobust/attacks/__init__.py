"""Attacks that any JAX project can import: pure functions, and only JAX.

A `Threat` says what the adversary may do, an attack how hard it tries, and
`make_attack` makes a function of the two that attacks any network:

>>> import jax, jax.numpy as jnp
>>> from mwrobust import attacks
>>> weights = jnp.linspace(-1, 1, 8 * 8 * 3 * 10).reshape(-1, 10)
>>> def logits_fn(images):  # linen, NNX, Haiku, Equinox, plain: any function
...   return images.reshape(len(images), -1) @ weights
>>> images = jnp.full((4, 8, 8, 3), 0.5)
>>> labels = jnp.array([0, 1, 2, 3])
>>> threat = attacks.Threat(space='dct', norm='l1', eps=7.84)
>>> attack = attacks.make_attack(threat, attacks.slide(steps=100))
>>> adversarial = attack(logits_fn, jax.random.key(0), images, labels)
>>> adversarial.shape
(4, 8, 8, 3)

Call it inside `jax.jit` as you would call `jax.grad`, with the parameters as an
argument of the jitted function. Values cannot be checked there, so check them
once before:

>>> attacks.check(images, labels, logits_fn, [threat])
>>> @jax.jit
... def perturb(weights, key, images, labels):
...   logits_fn = lambda x: x.reshape(len(x), -1) @ weights
...   return attack(logits_fn, key, images, labels)

The attacks, for every norm and space:

  pgd(40), slide(100)                the paper's; the last iterate is the result
  momentum(20)                       in shrinking balls: few steps, hard to fool
  apgd(100, loss='ce')               AutoAttack's APGD
  apgd(100, loss='dlr', targets=9)   the same, towards each of nine classes
  fab(100, targets=9)                the nearest decision boundary
  square(5000)                       random search, without gradients

Each takes `restarts`. AutoAttack runs the last four in that order, each on the
images that survived the ones before. Those four stop when the whole batch is
fooled and return the first image that fools the network, else the one with the
highest loss; the others return the last iterate.

`make_switch` selects one of many threats by a traced index. Threats with the
same rule share one compiled gradient, however many there are:

>>> threats = attacks.six_threats(linf=0.3, l2=1.0, l1=5.0)
>>> [threat.name for threat in threats]
['pixel_linf', 'pixel_l2', 'pixel_l1', 'dct_linf', 'dct_l2', 'dct_l1']
>>> switch = attacks.make_switch(threats, attacks.pgd(steps=10))
>>> index = jnp.int32(3)
>>> switch(logits_fn, index, jax.random.key(0), images, labels).shape
(4, 8, 8, 3)

All attacks take and return float32 images [B, H, W, C] in [0, 1];
normalisation is the network's business. Gradients do not flow through the
result. `ids` (int32 [B]) seeds each example by its own id, so that the result
for an image does not depend on its batch. `scale`, which may be traced,
multiplies the radius and the step size, for a curriculum.
"""

from mwrobust.attacks.checks import check
from mwrobust.attacks.climb import Ascent, apgd, momentum, pgd, slide
from mwrobust.attacks.fab import Fab, fab
from mwrobust.attacks.solve import (
  Attack,
  Found,
  distance,
  make_attack,
)
from mwrobust.attacks.spaces import SPACES, Space
from mwrobust.attacks.square import Square, square
from mwrobust.attacks.switch import make_switch
from mwrobust.attacks.threats import Threat, six_threats

__all__ = [
  'SPACES',
  'Ascent',
  'Attack',
  'Fab',
  'Found',
  'Space',
  'Square',
  'Threat',
  'apgd',
  'check',
  'distance',
  'fab',
  'make_attack',
  'make_switch',
  'momentum',
  'pgd',
  'six_threats',
  'slide',
  'square',
]
