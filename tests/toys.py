"""Toy images, networks, spaces, threats and attacks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwrobust import attacks
from mwrobust.attacks import spaces

KEY = jax.random.key(0)
SHAPE = (8, 8, 1)
RNG = np.random.default_rng(0)
IMAGES = RNG.uniform(size=(6, *SHAPE)).astype(np.float32)
BINARY = (IMAGES > 0.5).astype(np.float32)  # At the bounds of the box.
LABELS = RNG.integers(0, 5, size=6).astype(np.int32)
WEIGHTS = RNG.normal(size=(64, 5)).astype(np.float32)
EPS = (0.3, 1.0, 4.0)
SIX = attacks.six_threats(*EPS)
# The paper's training attacks: PGD, and SLIDE for l1.
TRAIN = {
  'linf': attacks.pgd(10),
  'l2': attacks.pgd(10),
  'l1': attacks.slide(20, percentile=95.0),
}
PAIRS = [(threat, TRAIN[threat.norm]) for threat in SIX]
EACH_OF_SIX = pytest.mark.parametrize('threat', SIX, ids=lambda t: t.name)
# One of every kind, fast to run.
KINDS = {
  'pgd': attacks.pgd(5),
  'slide': attacks.slide(5),
  'momentum': attacks.momentum(5),
  'apgd': attacks.apgd(6),
  'apgd-t': attacks.apgd(6, loss='dlr', targets=1),
  'fab': attacks.fab(5, targets=1),
  'square': attacks.square(20),
}
CLIMBS = ('pgd', 'slide', 'momentum', 'apgd', 'apgd-t')  # Fast in one switch.
ORD = {'linf': np.inf, 'l2': 2, 'l1': 1}


def linear(images, weights=WEIGHTS):
  return images.reshape(len(images), -1) @ weights


def curved(images, weights=WEIGHTS):
  logits = linear(images, weights)
  return logits + jnp.sin(logits)


# The loss rises with image @ WEIGHTS[:, 0], and the network is never fooled.
CLIMB_LABELS = np.ones(6, np.int32)


def climbs(images):
  rise = images.reshape(len(images), -1) @ WEIGHTS[:, 0]
  return jnp.stack([rise, jnp.full_like(rise, 1e3)], axis=1)


def own_rotation():
  matrix, _ = np.linalg.qr(RNG.normal(size=(64, 64)))
  matrix = matrix.astype(np.float32)
  return spaces.Space(
    'rotation',
    lambda image: matrix @ image.ravel(),
    lambda coefficients: (matrix.T @ coefficients).reshape(SHAPE),
    orthonormal=True,
  )


def own_curve():
  """Returns a nonlinear space: roughly, perceived brightness."""
  return spaces.Space(
    'gamma', lambda image: jnp.sqrt(image + 1e-3), lambda z: z * z - 1e-3
  )


def own_frame():
  """Returns a space with more coefficients than pixels: the image twice."""
  return spaces.Space(
    'frame', lambda x: jnp.stack([x, x]), lambda z: (z[0] + z[1]) / 2
  )


OWN = {s.name: s for s in (own_rotation(), own_curve(), own_frame())}


def run(attack, logits_fn, images, labels, ids=None, key=KEY, **more):
  """Runs an attack inside jit."""
  return jax.jit(functools.partial(attack, logits_fn))(
    key, images, labels, ids, **more
  )


def run_each(pairs, logits_fn, images, labels, scale=1.0, details=False):
  """Returns the result of each pair for the batch, compiled once."""
  switch = attacks.make_switch(pairs, details=details)
  switch = jax.jit(functools.partial(switch, logits_fn))
  return [
    switch(jnp.int32(index), KEY, images, labels, scale=scale)
    for index in range(len(pairs))
  ]


def of_every_kind(threats):
  """Returns each threat with each climb, and FAB and Square once per norm."""
  climbs = [(threat, KINDS[kind]) for threat in threats for kind in CLIMBS]
  by_norm = {threat.norm: threat for threat in threats}.values()
  others = [
    (threat, KINDS[kind]) for kind in ('fab', 'square') for threat in by_norm
  ]
  return [*climbs, *others]


def length_in_ball(threat, before, after):
  """Returns the norm of the perturbation in the threat's space, in float64."""
  to_space = jax.vmap(spaces.get(threat.space).forward)
  with jax.enable_x64(True):
    before, after = (
      np.asarray(to_space(np.asarray(x, np.float64))) for x in (before, after)
    )
  flat = (after - before).reshape(len(before), -1)
  return np.linalg.norm(flat, ORD[threat.norm], axis=1)
