import dataclasses
import functools
import json
import re
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft
import scipy.optimize
from flax import nnx

from mwrobust import attacks
from mwrobust.attacks import geometry, losses, norms, problem, rules, spaces

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
CLIMBS = (
  'pgd',
  'slide',
  'momentum',
  'apgd',
  'apgd-t',
)  # A switch over them is fast.
ORD = {'linf': np.inf, 'l2': 2, 'l1': 1}
DUAL = {'linf': 1, 'l2': 2, 'l1': np.inf}
DCT_BASIS = scipy.fft.dctn(
  np.eye(64).reshape(64, 8, 8), axes=(1, 2), norm='ortho'
).reshape(64, 64).T  # fmt: skip


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


# ------------------------------------------------------------------ exactness


def test_pgd_reaches_the_optimum_of_a_linear_model():
  # The paper's steps are 2.5 radii long in total. From a random start on the
  # border they turn an l2 perturbation to within some 12 degrees of the best,
  # 0.975 of the optimum; from the centre, or with 5 radii, they reach it.
  six = attacks.six_threats(0.03, 0.1, 0.4)
  steps = {'linf': 40, 'l2': 40, 'l1': 100}
  pairs = [
    (threat, attacks.pgd(steps[threat.norm], **more(threat)))
    for more in (
      lambda threat: {},
      lambda threat: {'random_start': False},
      lambda threat: {'step_size': 5 * threat.eps / steps[threat.norm]},
    )
    for threat in six
  ]
  images = 0.45 + 0.1 * IMAGES  # So far inside that nothing is clipped.
  labels = LABELS % 2
  two_classes = functools.partial(linear, weights=WEIGHTS[:, :2])
  direction = WEIGHTS[:, 1] - WEIGHTS[:, 0]
  toward_error = (1 - 2 * labels)[:, None] * direction
  for (threat, attack), found in zip(
    pairs, run_each(pairs, two_classes, images, labels), strict=True
  ):
    change = np.asarray(found, np.float64) - images
    gain = np.sum(change.reshape(6, -1) * toward_error, axis=1)
    # In an orthonormal space the gradient is the transformed one.
    in_space = spaces.get(threat.space).forward(direction.reshape(SHAPE))
    dual = np.linalg.norm(np.ravel(in_space), DUAL[threat.norm])
    is_default = attack == attacks.pgd(steps[threat.norm])
    share = 0.97 if is_default and threat.norm == 'l2' else 0.99
    assert (gain >= share * threat.eps * dual).all(), threat
    assert (gain <= (1 + 1e-5) * threat.eps * dual).all(), threat


def best_in_pixels(slope, image, norm, eps):
  """Returns max slope @ d in ball and [0, 1], closed form in float64."""
  room = np.where(slope > 0, 1.0 - image, image)
  size = np.abs(slope).astype(np.float64)
  if norm == 'linf':
    return np.sum(size * np.minimum(eps, room))
  if norm == 'l1':  # The steepest pixels first, each up to its bound.
    order = np.argsort(-size)
    left = eps - np.append(0, np.cumsum(room[order])[:-1])
    return np.sum(size[order] * np.clip(left, 0, room[order]))
  if np.linalg.norm(room[size > 0]) <= eps:
    return np.sum(size * room)
  low, high = 0.0, 1e6
  for _ in range(200):
    middle = (low + high) / 2
    short = np.linalg.norm(np.minimum(middle * size, room)) < eps
    low, high = (middle, high) if short else (low, middle)
  return np.sum(size * np.minimum(low * size, room))


def best_in_ball_and_box(slope, image, norm, eps):
  """Returns the same in the DCT, by a linear program."""
  if norm == 'l2':
    return best_in_pixels(slope, image, norm, eps)  # A rotated ball is a ball.
  box = list(zip(-image, 1 - image, strict=True))
  if norm == 'linf':
    matrix, limits = np.vstack([DCT_BASIS, -DCT_BASIS]), np.full(128, eps)
    result = scipy.optimize.linprog(-slope, matrix, limits, bounds=box)
  else:  # With |basis @ d| <= t, entry by entry, and sum t <= eps.
    eye, none = np.eye(64), np.zeros((1, 64))
    matrix = np.block([[DCT_BASIS, -eye], [-DCT_BASIS, -eye], [none, none + 1]])
    limits = np.append(np.zeros(128), eps)
    costs = np.append(-slope, np.zeros(64))
    bounds = [*box, *[(0, None)] * 64]
    result = scipy.optimize.linprog(costs, matrix, limits, bounds=bounds)
  assert result.success
  return -result.fun


def gains(found, images):
  change = np.asarray(found, np.float64) - images
  return change.reshape(6, 64) @ WEIGHTS[:, 0]


@pytest.mark.parametrize('images', [IMAGES, BINARY], ids=['grey', 'binary'])
def test_apgd_reaches_the_optimum_with_a_box_in_the_way(images):
  threats = attacks.six_threats(0.3, 1.5, 6.0)
  pairs = [(threat, attacks.apgd(100, loss='margin')) for threat in threats]
  for threat, found in zip(
    threats, run_each(pairs, climbs, images, CLIMB_LABELS), strict=True
  ):
    for gain, image in zip(
      gains(found, images), images.reshape(6, 64), strict=True
    ):
      optimum = (
        best_in_pixels if threat.space == 'pixel' else best_in_ball_and_box
      )(WEIGHTS[:, 0], image, threat.norm, threat.eps)
      assert gain >= 0.99 * optimum, threat
      if threat.space == 'pixel':
        assert gain <= optimum * (1 + 1e-5), threat


def test_apgd_reaches_the_optimum_of_a_strict_threat():
  threats = attacks.six_threats(0.3, 1.5, 4.0, clip='strict')
  pairs = [
    (threat, attacks.apgd(100, loss='margin', radii=(1,))) for threat in threats
  ]
  for threat, found in zip(
    threats, run_each(pairs, climbs, BINARY, CLIMB_LABELS), strict=True
  ):
    length = length_in_ball(threat, BINARY, found)
    assert (length <= threat.eps * (1 + 1e-4)).all(), threat
    for gain, image in zip(
      gains(found, BINARY), BINARY.reshape(6, 64), strict=True
    ):
      optimum = (
        best_in_pixels if threat.space == 'pixel' else best_in_ball_and_box
      )(WEIGHTS[:, 0], image, threat.norm, threat.eps)
      # Ten rounds of Dykstra's algorithm leave a little of the radius unused.
      assert gain >= 0.98 * optimum, threat
      assert gain <= optimum * (1 + 1e-3), threat


def test_a_sparse_step_leaves_pixels_that_are_at_an_edge():
  """Checks that it moves more pixels than one step takes at once."""
  threat = attacks.Threat(norm='l1', eps=12.0)
  attack = attacks.make_attack(
    threat, attacks.slide(100, loss='margin', random_start=False)
  )
  found = run(attack, climbs, BINARY, CLIMB_LABELS)
  for gain, image in zip(
    gains(found, BINARY), BINARY.reshape(6, 64), strict=True
  ):
    assert gain >= 0.95 * best_in_pixels(WEIGHTS[:, 0], image, 'l1', 12.0)


def test_every_iterate_uses_the_whole_radius_in_ball_and_box():
  """Checks that l2 and l1 end at the border of the ball after a clip."""
  for threat in SIX[1:3]:
    attack = dataclasses.replace(TRAIN[threat.norm], loss='margin')
    made = attacks.make_attack(threat, attack)
    found = run(made, climbs, BINARY, CLIMB_LABELS)
    length = length_in_ball(threat, BINARY, found)
    np.testing.assert_allclose(length, threat.eps, rtol=1e-4)


# ----------------------------------------------------------------- APGD's rule


def apgd_in_numpy(slopes, start, steps, eps, norm):
  """Runs AutoAttack's loop for the loss -sum((x - c)^2 s), in float64."""
  centre, curvature = slopes

  def loss_and_gradient(x):
    away = x - centre
    return -np.sum(curvature * away**2), -2 * curvature * away

  def project(x):
    if norm == 'linf':
      return np.clip(x, -eps, eps)
    return x * min(1, eps / max(np.linalg.norm(x), 1e-12))

  def direction(gradient):
    if norm == 'linf':
      return np.sign(gradient)
    return gradient / np.linalg.norm(gradient)

  x = old = best = start
  loss, gradient = loss_and_gradient(x)
  best_loss, best_gradient, at_check = loss, gradient, loss
  size, reduced, history = 2 * eps, True, [loss]
  checkpoints = rules.apgd_checkpoints(steps, norm)
  last, trace = 0, []
  for i in range(1, steps + 1):
    inertia, old = x - old, x
    share = 0.75 if i > 1 else 1.0
    step = project(x + size * direction(gradient))
    x = project(x + share * (step - x) + (1 - share) * inertia)
    loss, gradient = loss_and_gradient(x)
    history.append(loss)
    if loss > best_loss:
      best, best_loss, best_gradient = x, loss, gradient
    if i in checkpoints:
      window = history[last:]
      rises = np.sum(np.diff(window) > 0)
      stalls = rises <= 0.75 * (i - last)
      stalls |= not reduced and at_check >= best_loss
      if stalls:
        size, x, gradient = size / 2, best, best_gradient
      reduced, at_check, last = stalls, best_loss, i
    trace.append((size, x))
  return trace


def test_momentum_follows_a_trace_by_hand():
  # One step in the ball of 2 eps, which ends in that of eps, then three there.
  gradients = [(4.0, -1.0), (-2.0, -2.0), (1.0, 3.0), (0.0, 0.0)]
  planned = rules.plan(
    'momentum', steps=4, eps=0.5, norm='linf', features=2, radii=(2.0, 1.0)
  )
  sizes = [float(step.size) for step in planned]
  assert sizes == pytest.approx([1.0, 1 / 2, 1 / 3, 1 / 6])
  assert [float(step.eps) for step in planned] == [0.5, 0.5, 0.5, 0.5]
  free = jnp.full(2, jnp.inf)
  domain = geometry.Domain(jnp.zeros(2), -free, free)
  ball = geometry.Ball(norms.LINF)
  delta, velocity = np.zeros(2), np.zeros(2)
  state = rules.MOMENTUM.init(jnp.zeros(2), planned[0])
  for gradient, step in zip(gradients, planned, strict=True):
    total = np.abs(gradient).sum() or 1
    velocity = np.array(gradient) / total + 0.75 * velocity
    moved = delta + float(step.size) * np.sign(velocity)
    point = rules.Point(
      jnp.asarray(delta, jnp.float32), jnp.float32(0), jnp.asarray(gradient)
    )
    delta = np.clip(moved, -float(step.eps), float(step.eps))
    state, found = rules.MOMENTUM.update(state, point, step, ball, domain)
    np.testing.assert_allclose(found, delta, atol=1e-6)
    np.testing.assert_allclose(state.velocity, velocity, atol=1e-6)


def test_the_highest_loss_is_at_least_that_of_the_first_that_fools():
  labels = np.asarray(curved(IMAGES).argmax(axis=1), np.int32)
  threat = dataclasses.replace(SIX[1], eps=0.5)
  found = {
    result: attacks.make_attack(threat, attacks.apgd(20, result=result))(
      curved, KEY, IMAGES, labels
    )
    for result in ('highest', 'fooling')
  }
  loss = {
    result: np.asarray(losses.cross_entropy(curved(images), labels))
    for result, images in found.items()
  }
  assert (loss['highest'] >= loss['fooling'] - 1e-5).all()
  assert (loss['highest'] > loss['fooling'] + 0.1).any()


@pytest.mark.parametrize('norm', ['linf', 'l2'])
def test_apgd_follows_autoattacks_loop(norm):
  rng = np.random.default_rng(3)
  centre = rng.uniform(-0.6, 0.6, size=6)
  curvature = np.array([1.0, 30.0, 1.0, 5.0, 1.0, 0.1])
  start = rng.uniform(-0.3, 0.3, size=6)
  eps, steps = 0.5, 50
  expected = apgd_in_numpy((centre, curvature), start, steps, eps, norm)

  ball = geometry.Ball(norms.NORMS[norm])
  free = jnp.full(6, jnp.inf)
  domain = geometry.Domain(jnp.zeros(6), -free, free)

  @jax.jit
  def advance(state, delta, step):
    away = delta - centre
    loss, gradient = -jnp.sum(curvature * away**2), -2 * curvature * away
    point = rules.Point(delta, loss, gradient)
    return rules.APGD.update(state, point, step, ball, domain)

  with jax.enable_x64(True):
    planned = rules.plan('apgd', steps=steps, eps=eps, norm=norm, features=6)
    delta = jnp.asarray(start)
    state = rules.APGD.init(delta, planned[0])
    sizes = []
    for step, (size, x) in zip(
      planned, [(2 * eps, start), *expected[:-1]], strict=True
    ):
      state, delta = advance(state, delta, step)
      sizes.append(float(state.size))
      assert float(state.size) == pytest.approx(size)
      np.testing.assert_allclose(state.previous, x, atol=1e-6)
  assert len(set(sizes)) >= 4  # It halved more than once.


def test_apgd_adapts_its_sparsity_by_hand():
  """Checks l1: `keep` is the support / 1.5; if it shrank, the step is reset."""
  ball, eps = geometry.Ball(norms.L1), 2.0
  free = jnp.full(10, jnp.inf)
  domain = geometry.Domain(jnp.zeros(10), -free, free)
  planned = rules.plan('apgd', steps=50, eps=eps, norm='l1', features=10)
  assert [i for i, step in enumerate(planned) if step.checks] == list(
    range(2, 50, 2)
  )
  state = rules.APGD.init(jnp.zeros(10), planned[0])
  assert (float(state.keep), float(state.support)) == (2.0, 10.0)
  gradient = jnp.arange(10.0)
  delta = jnp.zeros(10)
  expected = [
    # After the check: size, keep, support.
    (eps, 2.0, 10.0),
    (eps, 2.0, 10.0),
    # The best has 2 of 10 coordinates: it shrank, the step is eps again.
    (eps, 2 / 1.5, 2.0),
    (eps, 2 / 1.5, 2.0),
    # Now it has 2 (those of the first step) as before: the step is smaller.
    (eps / 1.5, 2 / 1.5, 2.0),
  ]
  for i, (size, keep, support) in enumerate(expected):
    # The loss rises once and then stays: the first step's point is the best.
    point = rules.Point(delta, jnp.float32(min(i, 1)), gradient)
    state, delta = rules.APGD.update(state, point, planned[i], ball, domain)
    found = float(state.size), float(state.keep), float(state.support)
    assert found == pytest.approx((size, keep, support)), i


def test_apgd_restarts_from_its_best_in_the_next_smaller_ball():
  planned = rules.plan(
    'apgd', steps=10, eps=0.5, norm='linf', features=3, radii=(3, 2, 1)
  )
  assert [float(step.eps) for step in planned] == [1.5] * 2 + [1.0] * 3 + [
    0.5
  ] * 5
  assert [i for i, step in enumerate(planned) if step.renews] == [2, 5]
  ball = geometry.Ball(norms.LINF)
  free = jnp.full(3, jnp.inf)
  domain = geometry.Domain(jnp.zeros(3), -free, free)
  delta = jnp.array([1.2, -0.4, 0.1])
  state = rules.APGD.init(delta, planned[0])
  for i in range(3):  # The first point is the best of its ball.
    point = rules.Point(delta, jnp.float32(5 - i), jnp.array([1.0, 1.0, -1.0]))
    state, delta = rules.APGD.update(state, point, planned[i], ball, domain)
  np.testing.assert_allclose(delta, [1.0, -0.4, 0.1])
  assert float(state.size) == 2.0  # Twice the new radius.
  assert float(state.best.loss) == -np.inf
  assert not state.moved


# ------------------------------------------------------------- FAB and Square


@pytest.mark.parametrize('norm', ['linf', 'l2', 'l1'])
@pytest.mark.parametrize('space', ['pixel', 'dct'])
def test_fab_finds_the_nearest_point_of_a_linear_boundary(norm, space):
  """Checks that it finds the boundary within 1 %, also with a box."""
  slope = WEIGHTS[:, 0].astype(np.float64)
  if space == 'pixel':
    images = IMAGES
    optimum = best_in_pixels
  else:  # So far inside that nothing is clipped.
    images = (0.45 + 0.1 * IMAGES).astype(np.float32)

    def optimum(slope, image, norm, eps):
      return eps * np.linalg.norm(DCT_BASIS @ slope, DUAL[norm])

  radius = {'linf': 0.2, 'l2': 1.0, 'l1': 4.0}[norm]
  if space == 'dct':
    radius /= 10
  # The boundary of each image is where the ball of that radius just reaches.
  reach = np.array(
    [optimum(slope, x, norm, radius) for x in images.reshape(6, 64)]
  )
  limits = images.reshape(6, 64) @ slope + reach

  def logits_fn(images, ids):
    rise = images.reshape(len(images), -1) @ WEIGHTS[:, 0]
    zero = jnp.zeros_like(rise)
    return jnp.stack([rise - limits.astype(np.float32), zero, zero - 50], 1)

  fab = attacks.fab(60, targets=2)
  for scale, fooled in ((1.01, True), (0.99, False)):
    threat = attacks.Threat(space=space, norm=norm, eps=scale * radius)
    found = run(
      attacks.make_attack(threat, fab),
      functools.partial(logits_fn, ids=None), images, CLIMB_LABELS,
    )  # fmt: skip
    answers = logits_fn(found, None).argmax(axis=1)
    assert ((answers != 1) == fooled).all(), scale
    assert (length_in_ball(threat, images, found) <= threat.eps * 1.0001).all()


def test_fab_allows_for_the_clip_outside_pixels():
  """Compares l2 balls of the DCT with the same sets in pixels.

  All pixels are at 0 or 1, so that half of any step is clipped away.
  """
  slope, radius = WEIGHTS[:, 0].astype(np.float64), 1.0
  reach = [
    best_in_pixels(slope, x, 'l2', radius) for x in BINARY.reshape(6, 64)
  ]
  limits = (BINARY.reshape(6, 64) @ slope + reach).astype(np.float32)

  def logits_fn(images):
    rise = images.reshape(6, -1) @ WEIGHTS[:, 0]
    return jnp.stack([rise - limits, jnp.zeros(6)], axis=1)

  for scale, fooled in ((1.02, True), (0.98, False)):
    threat = attacks.Threat(space='dct', norm='l2', eps=scale * radius)
    attack = attacks.make_attack(threat, attacks.fab(20, targets=1))
    found = run(attack, logits_fn, BINARY, CLIMB_LABELS)
    assert ((logits_fn(found).argmax(axis=1) == 0) == fooled).all(), scale


@EACH_OF_SIX
def test_square_lowers_the_margin(threat):
  attack = attacks.make_attack(threat, attacks.square(200))
  found = run(attack, climbs, IMAGES, CLIMB_LABELS)
  first = attacks.make_attack(threat, attacks.square(1))
  start = run(first, climbs, IMAGES, CLIMB_LABELS)
  assert (gains(found, IMAGES) > gains(start, IMAGES) + 1).all()
  if threat.space == 'pixel':
    length = length_in_ball(threat, IMAGES, found)
    assert (length <= threat.eps * (1 + 1e-5)).all()
    best = [
      best_in_pixels(WEIGHTS[:, 0], image, threat.norm, threat.eps)
      for image in IMAGES.reshape(6, 64)
    ]
    share = {'linf': 0.25, 'l2': 0.3, 'l1': 0.5}[threat.norm]
    assert (gains(found, IMAGES) > share * np.array(best)).all()


def test_square_reaches_the_last_row_and_column():
  """Checks that it fools a network that only uses the last pixel."""

  def logits_fn(images):
    return jnp.stack([images[:, -1, -1, 0], jnp.full(len(images), 0.6)], axis=1)

  images = np.full((6, *SHAPE), 0.5, np.float32)
  attack = attacks.make_attack(SIX[0], attacks.square(200))
  found = run(attack, logits_fn, images, CLIMB_LABELS)
  assert (logits_fn(found).argmax(axis=1) == 0).all()


def test_square_finds_a_single_channel():
  """Attacks a network that sees only red, in steps that hide its gradient."""
  images = np.random.default_rng(1).uniform(0.2, 0.8, (20, 8, 8, 3))
  images = images.astype(np.float32)

  def logits_fn(images):
    return linear(jnp.round(16 * images[..., :1]) / 16)

  labels = np.argmax(logits_fn(images), axis=1).astype(np.int32)
  threat = attacks.Threat(norm='l1', eps=3.0)
  attack = attacks.make_attack(threat, attacks.square(300))
  found = run(attack, logits_fn, images, labels)
  # A mass of 3 in one channel moves the logits as far as 9 in all of them.
  assert np.mean(logits_fn(found).argmax(axis=1) != labels) > 0.5


# --------------------------------------------------------------- the clip rules


@pytest.mark.parametrize('clip', ['inside', 'strict', 'end'])
def test_returns_images_in_the_set(clip):
  pairs = of_every_kind(attacks.six_threats(*EPS, clip=clip))
  for (threat, attack), found in zip(
    pairs, run_each(pairs, curved, BINARY, LABELS, details=True), strict=True
  ):
    assert found.images.shape == IMAGES.shape
    assert found.images.dtype == jnp.float32
    assert ((found.images >= 0) & (found.images <= 1)).all()
    assert (found.distance <= threat.eps * (1 + 1e-4)).all(), (threat, attack)
    # In pixels, clipping does not leave the ball.
    if threat.space == 'pixel' or clip == 'strict':
      length = length_in_ball(threat, BINARY, found.images)
      assert (length <= threat.eps * (1 + 1e-4)).all(), (threat, attack)


def test_a_network_hides_outside_of_the_box_from_a_clip_at_the_end():
  def trap(images):
    # To fool it, pixels must rise to 0.24 on average. Below 0, falling seems to
    # help more, but is clipped away.
    seen = jnp.where(images < 0, -5 * images, images)
    dark = jnp.full(len(images), 0.24)
    return jnp.stack([dark, seen.mean((1, 2, 3))], axis=1)

  images, labels = jnp.zeros((4, 8, 8, 1)), jnp.zeros(4, jnp.int32)
  end = attacks.Threat(norm='linf', eps=0.4, clip='end')
  inside = attacks.Threat(norm='linf', eps=0.4)
  for threat, attack, stands in (
    (end, attacks.pgd(10), True),
    (inside, attacks.pgd(10), False),
    # The set is the same: only the paper's attacks go outside [0, 1].
    (end, attacks.apgd(10), False),
    (end, attacks.fab(10, targets=1), False),
    (end, attacks.square(1000), False),
  ):
    found = run(attacks.make_attack(threat, attack), trap, images, labels)
    assert ((trap(found).argmax(axis=1) == 0) == stands).all(), attack


def test_attacks_raise_their_loss():
  pairs = [
    (threat, dataclasses.replace(TRAIN[threat.norm], loss=loss))
    for threat in SIX
    for loss in losses.LOSSES
  ]
  for (threat, attack), found in zip(
    pairs, run_each(pairs, curved, IMAGES, LABELS), strict=True
  ):
    before, after = (
      losses.cross_entropy(curved(x), LABELS) for x in (IMAGES, found)
    )
    assert after.mean() > before.mean() + 0.5, (threat, attack.loss)


@pytest.mark.parametrize('loss', losses.TARGETED)
def test_targeted_attacks_come_nearer_to_their_class(loss):
  labels = np.argmax(curved(IMAGES), axis=1).astype(np.int32)

  def sure(images):  # Of the labels, so that nothing is fooled on the way.
    return curved(images) + 6.0 * jax.nn.one_hot(labels, 5)

  def gap(images, targets):
    logits = np.asarray(curved(images))
    rows = np.arange(6)
    return logits[rows, targets] - logits[rows, labels]

  attack = attacks.make_attack(
    attacks.Threat(norm='l2', eps=0.2),
    attacks.apgd(10, loss=loss, targets=3, radii=(1,)),
  )
  order = np.argsort(-curved(IMAGES), axis=1)
  for rank in range(3):
    found = run(attack, sure, IMAGES, labels, start=jnp.int32(rank))
    targets = order[:, 1 + rank]
    gain = gap(found, targets) - gap(IMAGES, targets)
    assert gain.mean() > 0.3
    assert np.median(gain) > 0


# ---------------------------------------------------------- degenerate networks


DEGENERATE = {
  'zero': lambda images: 0 * linear(images),
  'constant': lambda images: jnp.ones((len(images), 5)),
  'tiny': lambda images: 1e-20 * linear(images),
  'huge': lambda images: 1e30 * linear(images),
  'infinite': lambda images: jnp.float32(1e38) * 100 * linear(images),
  'not a number': lambda images: jnp.nan * linear(images),
}


def test_degenerate_models_give_images():
  names = list(DEGENERATE)
  pairs = [
    *((threat, attacks.pgd(3)) for threat in SIX),
    *((threat, attacks.apgd(6)) for threat in SIX),
    *((SIX[1], attacks.apgd(6, loss=loss)) for loss in losses.LOSSES),
    *(
      (SIX[1], attacks.apgd(6, loss=loss, targets=1)) for loss in losses.LOSSES
    ),
    *((threat, KINDS['fab']) for threat in SIX),
    *((threat, KINDS['square']) for threat in SIX),
  ]
  switch = attacks.make_switch(pairs)

  @jax.jit
  def run_one(index, network):
    branches = [DEGENERATE[name] for name in names]
    logits_fn = functools.partial(jax.lax.switch, network, branches)
    return switch(logits_fn, index, KEY, IMAGES, LABELS)

  for network, name in enumerate(names):
    for index, pair in enumerate(pairs):
      found = run_one(jnp.int32(index), jnp.int32(network))
      assert ((found >= 0) & (found <= 1)).all(), (name, pair)


def test_a_network_that_answers_nan_is_fooled():
  """Fools the network where a pixel is above 0.6, and only there."""

  def logits_fn(images):
    rise = jnp.max(images, axis=(1, 2, 3))
    rise = jnp.where(rise > 0.6, jnp.nan, rise)
    return jnp.stack([rise, jnp.full_like(rise, 9.0)], axis=1)

  images = np.full((6, *SHAPE), 0.5, np.float32)
  for attack in (*KINDS.values(), attacks.pgd(5, restarts=2)):
    if attack in (KINDS['pgd'], KINDS['slide']):
      continue  # Their result is the last iterate, fooling or not.
    made = attacks.make_attack(SIX[0], attack)
    found = run(made, logits_fn, images, CLIMB_LABELS)
    assert jnp.isnan(logits_fn(found)).any(axis=1).all(), attack


def test_one_infinite_slope_hides_no_other():
  """Attacks the square root, whose slope at a black pixel is infinite."""
  rng = np.random.default_rng(2)
  images = np.where(rng.uniform(size=IMAGES.shape) < 0.5, 0, IMAGES)
  images = images.astype(np.float32)

  def fooled(attack, floor):
    logits_fn = lambda x: linear(jnp.sqrt(x + floor))  # noqa: E731
    labels = np.argmax(logits_fn(images), axis=1).astype(np.int32)
    found = run(attack, logits_fn, images, labels)
    return int(np.sum(logits_fn(found).argmax(axis=1) != labels))

  for threat, attack in (
    (SIX[0], attacks.pgd(10)),
    (SIX[1], attacks.apgd(10, radii=(1,))),
    *((threat, attacks.fab(10, targets=2)) for threat in SIX[:2]),
  ):
    threat = dataclasses.replace(threat, eps=threat.eps / 2)
    attack = attacks.make_attack(threat, attack)
    assert fooled(attack, floor=0.0) == fooled(attack, floor=1e-8) == 6, threat


def test_a_loss_that_is_not_a_number_is_no_success():
  logits = jnp.array([[jnp.inf, jnp.inf], [jnp.nan, 0.0], [1.0, 0.0]])
  labels = jnp.zeros(3, jnp.int32)
  loss = losses.margin(logits, labels)
  found = problem.judge(jnp.zeros((3, 1)), loss, logits, labels)
  assert found.fooled.tolist() == [False, True, False]
  assert found.loss.tolist() == [-np.inf, np.inf, -1.0]


def test_a_tiny_gradient_is_as_good_as_any():
  pairs = [
    (threat, dataclasses.replace(attack, loss='margin'))
    for threat, attack in PAIRS
  ]
  plain = run_each(pairs, linear, IMAGES, LABELS)
  tiny = run_each(pairs, DEGENERATE['tiny'], IMAGES, LABELS)
  for expected, found in zip(plain, tiny, strict=True):
    np.testing.assert_allclose(expected, found, atol=1e-5)


def test_the_scale_of_the_logits_does_not_stop_a_climb():
  """Scales logits: at 1e6 the cross entropy rounds to 0, at 1e-9 to log K."""
  labels = np.argmax(curved(IMAGES), axis=1).astype(np.int32)
  attack = attacks.make_attack(
    attacks.Threat(norm='l2', eps=0.2), attacks.apgd(10, radii=(1,))
  )

  def gain(scale):
    def sure(images):  # Of the labels, so that nothing is fooled on the way.
      return scale * (curved(images) + 6.0 * jax.nn.one_hot(labels, 5))

    found = run(attack, sure, IMAGES, labels)
    before, after = (losses.margin(curved(x), labels) for x in (IMAGES, found))
    return np.mean(after - before)

  plain = gain(1.0)
  assert plain > 0.3
  assert gain(1e6) > 0.8 * plain
  # There the climb is of the mean of the other logits, not the largest.
  assert gain(1e-9) > 0.5 * plain


# ------------------------------------------------ spaces, classes and shapes


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


@pytest.mark.parametrize('name', OWN)
def test_a_space_of_ones_own(name):
  images = 0.3 + 0.4 * IMAGES  # Where nothing is clipped.
  labels = np.argmax(curved(images), axis=1).astype(np.int32)
  before = losses.margin(curved(images), labels)
  threats = [
    attacks.Threat(space=OWN[name], norm=norm, eps=eps)
    for norm, eps in (('linf', 0.1), ('l2', 0.5), ('l1', 0.4))
  ]
  pairs = of_every_kind(threats)
  for (threat, attack), found in zip(
    pairs, run_each(pairs, curved, images, labels), strict=True
  ):
    after = losses.margin(curved(found), labels)
    assert after.mean() > before.mean() - 1e-6, (threat, attack)
    if not isinstance(attack, attacks.Fab):  # It may find nothing so near.
      assert after.mean() > before.mean() + 1e-3, (threat, attack)
    assert ((found >= 0) & (found <= 1)).all()
    if name != 'frame':  # Not one to one.
      length = length_in_ball(threat, images, found)
      assert (length <= threat.eps * (1 + 1e-4)).all(), (threat, attack)


def test_a_switch_over_spaces_of_different_sizes():
  pairs = [
    (attacks.Threat(space=space, norm='l2', eps=0.25), attacks.pgd(5))
    for space in ('pixel', OWN['frame'], 'dct', OWN['rotation'])
  ]
  for pair, found in zip(
    pairs, run_each(pairs, curved, IMAGES, LABELS), strict=True
  ):
    alone = run(attacks.make_attack(*pair), curved, IMAGES, LABELS)
    np.testing.assert_allclose(found, alone, atol=1e-5)


@pytest.mark.parametrize(
  ('classes', 'shape'), [(2, (6, 10, 1)), (3, (10, 6, 3))]
)
def test_few_classes_channels_and_sizes_that_are_not_square(classes, shape):
  rng = np.random.default_rng(1)
  images = rng.uniform(size=(4, *shape)).astype(np.float32)
  weights = rng.normal(size=(images[0].size, classes)).astype(np.float32)
  logits_fn = functools.partial(linear, weights=weights)
  labels = np.argmax(logits_fn(images), axis=1).astype(np.int32)
  before = losses.margin(logits_fn(images), labels)
  names = ['pixel', 'dct', 'block_dct', 'haar', *['colour'] * (shape[2] == 3)]
  pairs = of_every_kind(
    [
      attacks.Threat(space=space, norm=norm, eps=eps)
      for space in names
      for norm, eps in (('linf', 0.3), ('l2', 2.0), ('l1', 10.0))
    ]
  )
  for (threat, attack), found in zip(
    pairs, run_each(pairs, logits_fn, images, labels), strict=True
  ):
    after = losses.margin(logits_fn(found), labels)
    assert after.mean() > before.mean(), (threat, attack)
    if not isinstance(attack, attacks.Square):
      assert (after > 0).any(), (threat, attack)


# ------------------------------------------------------------------- contract


def test_six_threats_are_the_papers():
  expected = [
    (space, norm, eps, 'inside', f'{space}_{norm}')
    for space in ('pixel', 'dct')
    for norm, eps in (('linf', 0.4), ('l2', 1.0), ('l1', 5.0))
  ]
  six = attacks.six_threats(linf=0.4, l2=1.0, l1=5.0)
  assert [(t.space, t.norm, t.eps, t.clip, t.name) for t in six] == expected


def test_a_threat_has_a_name_of_its_own_and_can_be_written_down():
  threat = attacks.Threat(space=OWN['gamma'], norm='l2', eps=0.5, name='wide')
  assert threat.name == 'wide'
  written = json.loads(json.dumps(threat.to_dict()))
  assert written == {
    'space': 'gamma',
    'norm': 'l2',
    'eps': 0.5,
    'clip': 'inside',
    'name': 'wide',
  }
  plain = attacks.Threat(space='dct', norm='l1', eps=1.0)
  assert attacks.Threat(**plain.to_dict()) == plain


def test_default_step_size_is_two_and_a_half_radii_over_all_steps():
  explicit = attacks.pgd(10, step_size=2.5 * SIX[0].eps / 10)
  found = [
    run(attacks.make_attack(SIX[0], attack), curved, IMAGES, LABELS)
    for attack in (attacks.pgd(10), explicit)
  ]
  assert (found[0] == found[1]).all()


def test_switch_does_what_the_attacks_do():
  more = [
    (SIX[1], attacks.pgd(7, loss='margin')),
    (dataclasses.replace(SIX[0], clip='end'), attacks.pgd(10)),
    (SIX[2], attacks.apgd(12)),
    (SIX[3], attacks.apgd(9, loss='dlr', targets=2)),
    (SIX[0], attacks.fab(5, targets=2)),
    (SIX[5], attacks.square(20)),
  ]
  pairs = [*PAIRS, *more]
  switch = attacks.make_switch(pairs)
  for index, found in enumerate(run_each(pairs, curved, IMAGES, LABELS)):
    expected = run(attacks.make_attack(*pairs[index]), curved, IMAGES, LABELS)
    np.testing.assert_allclose(found, expected, atol=1e-5)
  concrete = switch(curved, index, KEY, IMAGES, LABELS)
  np.testing.assert_allclose(concrete, expected, atol=1e-5)


def test_switch_takes_threats_with_one_attack_or_one_for_each():
  expected = run_each(PAIRS, curved, IMAGES, LABELS)[2]
  switch = attacks.make_switch(SIX, [attack for _, attack in PAIRS])
  found = switch(curved, 2, KEY, IMAGES, LABELS)
  np.testing.assert_allclose(found, expected, atol=1e-5)
  switch = attacks.make_switch(SIX, PAIRS[2][1])
  found = switch(curved, 2, KEY, IMAGES, LABELS)
  np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize('attack', [attacks.pgd(10), attacks.apgd(10)])
@pytest.mark.parametrize('count', [1, 6, 24])
def test_switch_holds_one_gradient_however_many_threats(count, attack):
  threats = [
    dataclasses.replace(threat, eps=threat.eps * scale)
    for scale in (0.5, 1.0, 1.5, 2.0)
    for threat in SIX
  ]
  switch = attacks.make_switch(threats[:count], attack)
  program = jax.jit(functools.partial(switch, curved)).lower(
    jnp.int32(0), KEY, IMAGES, LABELS
  )
  # The matmul with the network's weights: once forward, once back; and once
  # more forward for the last iterate of APGD.
  forward = 2 if attack.stops_early else 1
  text = program.as_text()
  assert text.count('tensor<64x5xf32>) ->') == forward + 1


def test_restarts_keep_the_highest_loss():
  threat = SIX[0]

  def loss(restarts):
    attack = attacks.make_attack(threat, attacks.pgd(10, restarts=restarts))
    found = run(attack, curved, IMAGES, LABELS)
    return np.asarray(losses.cross_entropy(curved(found), LABELS))

  found = {n: loss(n) for n in (1, 2, 5)}
  assert (found[2] >= found[1] - 1e-6).all()
  assert (found[5] >= found[2] - 1e-6).all()
  assert (found[5] > found[1] + 1e-3).any()


def test_restarts_keep_one_that_fools_before_one_with_a_higher_loss():
  def logits_fn(images):
    is_bright = images[:, 0, 0, :1] > 0.5
    return jnp.where(is_bright, jnp.array([0, 0.2, -9]), jnp.array([0.1, 0, 0]))

  images, labels = jnp.full((6, *SHAPE), 0.5), jnp.zeros(6, jnp.int32)
  attack = attacks.make_attack(SIX[0], attacks.pgd(10, restarts=8))
  found = logits_fn(run(attack, logits_fn, images, labels))
  assert (found.argmax(axis=1) == 1).all()
  higher = losses.cross_entropy(logits_fn(0.9 * images), labels)
  assert (losses.cross_entropy(found, labels) < higher).all()


def test_a_start_is_one_of_the_restarts():
  attack = attacks.pgd(10, restarts=3)
  for threat in (SIX[0], SIX[5]):
    made = attacks.make_attack(threat, attack)
    found = [run(made, curved, IMAGES, LABELS, start=i) for i in range(3)]
    loss = np.array(
      [losses.cross_entropy(curved(images), LABELS) for images in found]
    )
    assert len(np.unique(loss[:, 0])) == 3
    best = run(made, curved, IMAGES, LABELS)
    np.testing.assert_allclose(
      losses.cross_entropy(curved(best), LABELS), loss.max(axis=0), rtol=1e-5
    )
    # Beyond the restarts there are more.
    further = run(made, curved, IMAGES, LABELS, start=jnp.int32(7))
    assert np.abs(further - found[0]).max() > 1e-3


@pytest.mark.parametrize(
  'attack',
  [
    attacks.apgd(6, restarts=2),
    attacks.fab(5, targets=2, restarts=2),
    attacks.square(10, restarts=3),
  ],
  ids=lambda attack: type(attack).__name__,
)
def test_all_tries_together_find_what_any_of_them_finds(attack):
  threat = attacks.Threat(norm='l2', eps=0.4)
  made = attacks.make_attack(threat, attack)
  fooled = [
    run(made, curved, IMAGES, LABELS, start=jnp.int32(i))
    for i in range(attack.tries)
  ]
  fooled = np.array([curved(x).argmax(1) != LABELS for x in fooled]).any(axis=0)
  together = curved(run(made, curved, IMAGES, LABELS)).argmax(1) != LABELS
  assert (together == fooled).all()


def test_memory_does_not_grow_with_restarts():
  def memory(restarts):
    attack = attacks.make_attack(SIX[0], attacks.pgd(10, restarts=restarts))
    program = jax.jit(functools.partial(attack, curved)).lower(
      KEY, IMAGES, LABELS
    )
    return program.compile().memory_analysis().temp_size_in_bytes

  assert memory(50) == memory(2)


@pytest.mark.parametrize(
  'attack',
  [
    attacks.apgd(50, radii=(1,)),
    attacks.fab(50, targets=1),
    attacks.square(50),
  ],
  ids=lambda attack: type(attack).__name__,
)
def test_a_batch_that_is_fooled_is_left_alone(attack):
  calls = []

  def logits_fn(images):
    jax.debug.callback(lambda: calls.append(1))
    return linear(images)

  wrong = (np.argmax(linear(IMAGES), axis=1).astype(np.int32) + 1) % 5
  made = attacks.make_attack(SIX[0], attack)
  jax.block_until_ready(run(made, logits_fn, IMAGES, wrong))
  jax.effects_barrier()
  assert 1 <= len(calls) <= 5


def test_same_success_at_any_batch_size_place_and_padding(trained, digits):
  (images, labels), _ = digits
  images, labels, ids = images[:128], labels[:128], np.arange(1000, 1128)
  six = attacks.six_threats(0.1, 1.0, 8.0)
  pairs = [
    *((threat, TRAIN[threat.norm]) for threat in six),
    *((threat, attacks.apgd(10)) for threat in six),
    (six[1], attacks.apgd(10, loss='dlr', targets=2)),
    *((threat, attacks.fab(5, targets=1)) for threat in (six[1], six[3])),
    *((threat, attacks.square(30)) for threat in (six[2], six[3])),
  ]
  attack = jax.jit(functools.partial(attacks.make_switch(pairs), trained))
  answer = jax.jit(trained)

  def success(rows):
    """Returns which examples are fooled, [pair, row]."""
    return np.stack(
      [
        answer(
          attack(jnp.int32(index), KEY, images[rows], labels[rows], ids[rows])
        ).argmax(-1)
        != labels[rows]
        for index in range(len(pairs))
      ]
    )

  together = success(np.arange(128))
  assert (together.mean(1)[:13] > 0.1).all()
  assert (together.mean(1) < 1).all()
  shuffled = RNG.permutation(128)
  assert (success(shuffled) == together[:, shuffled]).all()
  padded = success(np.arange(128) % 100)
  assert (padded[:, :100] == together[:, :100]).all()
  for start in (0, 7, 119):
    rows = np.arange(start, start + 7)
    assert (success(rows) == together[:, rows]).all()
  for row in range(3):
    assert (success(np.array([row])) == together[:, [row]]).all()


def test_gradients_do_not_flow_through_the_attack():
  for threat, attack in (
    (SIX[4], attacks.pgd(5, restarts=2)),
    *((SIX[0], KINDS[kind]) for kind in ('apgd-t', 'fab', 'square')),
  ):
    made = attacks.make_attack(threat, attack)

    def robust_loss(weights, frozen=None, made=made):
      logits_fn = functools.partial(curved, weights=weights)
      found = frozen
      if frozen is None:
        found = made(logits_fn, KEY, IMAGES, LABELS)
      return losses.cross_entropy(logits_fn(found), LABELS).mean()

    frozen = made(curved, KEY, IMAGES, LABELS)
    found = jax.jit(jax.grad(robust_loss))(WEIGHTS)
    expected = jax.jit(jax.grad(robust_loss))(WEIGHTS, frozen)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)

  def of_images(images):
    attack = attacks.make_attack(SIX[0], attacks.pgd(5))
    return jnp.sum(attack(curved, KEY, images, LABELS))

  assert (jax.grad(of_images)(jnp.asarray(IMAGES)) == 0).all()


# --------------------------------------------------------- others' frameworks


class Linen(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Conv(4, (3, 3))(x))
    x = nn.BatchNorm(use_running_average=True)(x)
    return nn.Dense(5)(x.reshape(len(x), -1))


class NNX(nnx.Module):
  def __init__(self, rngs):
    self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
    self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
    self.dense = nnx.Linear(256, 5, rngs=rngs)

  def __call__(self, x):
    x = self.norm(nnx.relu(self.conv(x)))
    return self.dense(x.reshape(len(x), -1))


def linen_logits():
  model = Linen()
  return functools.partial(model.apply, model.init(KEY, IMAGES))


FRAMEWORKS = {
  'plain': lambda: curved,
  'linen': linen_logits,
  'nnx': lambda: NNX(nnx.Rngs(0)),
}


@pytest.mark.parametrize('framework', FRAMEWORKS)
def test_works_with_any_framework_jitted_vmapped_and_sharded(framework):
  logits_fn = FRAMEWORKS[framework]()
  attack = functools.partial(attacks.make_attack(*PAIRS[5]), logits_fn)
  expected = attack(KEY, IMAGES, LABELS)
  jitted = jax.jit(attack)
  np.testing.assert_allclose(jitted(KEY, IMAGES, LABELS), expected, atol=1e-5)

  keys = jax.random.split(KEY, 3)
  over_keys = jax.jit(jax.vmap(attack, (0, None, None)))
  found = over_keys(keys, IMAGES, LABELS)
  for key, one in zip(keys, found, strict=True):
    np.testing.assert_allclose(one, jitted(key, IMAGES, LABELS), atol=1e-5)

  mesh = jax.make_mesh((2,), ('data',), (jax.sharding.AxisType.Auto,))
  by_example = jax.sharding.NamedSharding(mesh, jax.P('data'))
  sharded = jax.jit(
    attack,
    in_shardings=(None, by_example, by_example),
    out_shardings=by_example,
  )(KEY, IMAGES, LABELS)
  assert len(sharded.sharding.device_set) == 2
  np.testing.assert_allclose(sharded, expected, atol=1e-5)


def test_an_nnx_model_that_learned_is_attacked_as_it_is_now():
  model = NNX(nnx.Rngs(0))
  attack = attacks.make_attack(*PAIRS[0])
  before = attack(model, KEY, IMAGES, LABELS)
  model.dense.kernel[...] = -model.dense.kernel[...]
  after = attack(model, KEY, IMAGES, LABELS)
  assert np.abs(before - after).max() > 0.1


def test_importing_the_attacks_imports_jax_and_little_else():
  code = """
import sys
import jax, numpy
before = set(sys.modules)
import mwrobust.attacks
loaded = {name.split('.')[0] for name in set(sys.modules) - before}
print(sorted(loaded - {'jax'}), 'absl.flags' in sys.modules)
"""
  result = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert result.stdout.strip() == "['mwrobust'] False"


def test_works_in_double_precision_mode():
  with jax.enable_x64(True):
    images = jnp.asarray(IMAGES, jnp.float32)
    for threat, attack in (
      *PAIRS,
      *((SIX[2], attack) for attack in KINDS.values()),
    ):
      attack = attacks.make_attack(threat, attack)
      found = attack(linear, jax.random.key(0), images, LABELS, scale=0.5)
      assert found.dtype == jnp.float32

    def double(images):
      return linear(images.astype(jnp.float64), WEIGHTS.astype(np.float64))

    found = attack(double, jax.random.key(0), images, LABELS)
    assert found.dtype == jnp.float32


def test_a_half_precision_network_is_climbed_in_single_precision():
  def half(images):
    return linear(images).astype(jnp.bfloat16)

  attack = attacks.make_attack(*PAIRS[1])
  found = run(attack, half, IMAGES, LABELS)
  full = run(attack, linear, IMAGES, LABELS)
  np.testing.assert_allclose(found, full, atol=0.02)


@pytest.mark.parametrize('impl', ['threefry2x32', 'rbg', 'unsafe_rbg'])
def test_ids_hold_for_every_generator(impl):
  key = jax.random.key(0, impl=impl)
  attack = attacks.make_attack(*PAIRS[0])
  ids = np.arange(6)
  together = run(attack, curved, IMAGES, LABELS, ids, key)
  backwards = run(attack, curved, IMAGES[::-1], LABELS[::-1], ids[::-1], key)
  np.testing.assert_allclose(together, backwards[::-1], atol=1e-6)
  alone = run(attack, curved, IMAGES[2:3], LABELS[2:3], ids[2:3], key)
  np.testing.assert_allclose(together[2:3], alone, atol=1e-6)


def test_arrays_closed_over_inside_jit():
  images, labels = jnp.asarray(IMAGES), jnp.asarray(LABELS)
  switch = attacks.make_switch(PAIRS)
  found = jax.jit(lambda k: switch(linear, jnp.int32(1), k, images, labels))(
    KEY
  )
  expected = run(attacks.make_attack(*PAIRS[1]), linear, IMAGES, LABELS)
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_works_inside_shard_map():
  mesh = jax.make_mesh((2,), ('data',), (jax.sharding.AxisType.Auto,))
  for threat, attack in (
    (SIX[2], attacks.pgd(5, restarts=2)),
    *((SIX[1], KINDS[kind]) for kind in ('apgd-t', 'fab', 'square')),
  ):
    attack = functools.partial(attacks.make_attack(threat, attack), linear)
    sharded = jax.shard_map(
      attack,
      mesh=mesh,
      in_specs=(jax.P(), jax.P('data'), jax.P('data'), jax.P('data')),
      out_specs=jax.P('data'),
    )
    ids = np.arange(6)
    found = jax.jit(sharded)(KEY, IMAGES, LABELS, ids)
    expected = jax.jit(attack)(KEY, IMAGES, LABELS, ids)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_scale_multiplies_the_radius_and_the_step():
  pairs = [
    *PAIRS,
    *((SIX[1], KINDS[kind]) for kind in ('apgd', 'apgd-t', 'fab', 'square')),
  ]
  halves = [
    (dataclasses.replace(threat, eps=threat.eps / 2), attack)
    for threat, attack in pairs
  ]
  found = run_each(pairs, linear, IMAGES, LABELS, scale=0.5)
  expected = run_each(halves, linear, IMAGES, LABELS)
  none = run_each(pairs, linear, IMAGES, LABELS, scale=0.0)
  for pair, *images in zip(pairs, found, expected, none, strict=True):
    np.testing.assert_allclose(images[0], images[1], atol=1e-5, err_msg=pair)
    np.testing.assert_allclose(images[2], IMAGES, atol=1e-6, err_msg=pair)


# ------------------------------------------------------------------ bad input


GOOD = {'space': 'dct', 'norm': 'l2', 'eps': 0.3}


@pytest.mark.parametrize(
  ('field', 'value', 'allowed'),
  [
    ('space', 'wavelet', "'dct', 'haar', 'pixel'"),
    ('space', None, "'dct', 'haar', 'pixel'"),
    ('norm', 'l3', "'linf', 'l2', 'l1'"),
    ('norm', 2, "'linf', 'l2', 'l1'"),
    ('eps', 0, 'finite number > 0'),
    ('eps', -0.1, 'finite number > 0'),
    ('eps', float('nan'), 'finite number > 0'),
    ('eps', float('inf'), 'finite number > 0'),
    ('eps', '0.3', 'finite number > 0'),
    ('eps', 10**39, 'finite number > 0'),
    ('eps', 1e-50, 'finite number > 0'),
    ('clip', 'step', "'inside', 'strict', 'end'"),
    ('name', 3, 'string'),
  ],
)
def test_bad_threats_are_refused(field, value, allowed):
  with pytest.raises(ValueError, match=f'{field}={value!r}.*{allowed}'):
    attacks.Threat(**(GOOD | {field: value}))


@pytest.mark.parametrize(
  ('make', 'field', 'value', 'allowed'),
  [
    (attacks.pgd, 'steps', 0, 'integer >= 1'),
    (attacks.pgd, 'steps', 2.5, 'integer >= 1'),
    (attacks.pgd, 'steps', True, 'integer >= 1'),
    (attacks.pgd, 'step_size', 0.0, 'finite number > 0'),
    (attacks.pgd, 'step_size', -1.0, 'finite number > 0'),
    (attacks.slide, 'percentile', 100.0, r'\[0, 100\)'),
    (attacks.slide, 'percentile', -1, r'\[0, 100\)'),
    (attacks.pgd, 'random_start', 1, 'True or False'),
    (attacks.pgd, 'restarts', 0, 'integer >= 1'),
    (attacks.pgd, 'loss', 'mse', "'ce', 'margin', 'dlr'"),
    (attacks.pgd, 'radii', (), 'numbers >= 1'),
    (attacks.apgd, 'radii', (1, 2), 'numbers >= 1'),
    (attacks.apgd, 'radii', (0.5, 1), 'numbers >= 1'),
    (attacks.apgd, 'targets', -1, 'integer >= 0'),
    (attacks.fab, 'targets', 0, 'integer >= 1'),
    (attacks.fab, 'steps', 0, 'integer >= 1'),
    (attacks.square, 'queries', 0, 'integer >= 1'),
    (attacks.square, 'restarts', 1.5, 'integer >= 1'),
  ],
)
def test_bad_attacks_are_refused(make, field, value, allowed):
  shown = re.escape(repr(value))
  with pytest.raises(ValueError, match=f'{field}={shown}.*{allowed}'):
    make(**{field: value})


def test_other_refusals():
  with pytest.raises(ValueError, match=r'restarts=2.*random_start'):
    attacks.pgd(10, random_start=False, restarts=2)
  with pytest.raises(ValueError, match=r"'strict'.*orthonormal.*'gamma'"):
    attacks.Threat(space=OWN['gamma'], norm='l2', eps=1.0, clip='strict')
  with pytest.raises(ValueError, match=r'threats=\[\]'):
    attacks.make_switch([])
  with pytest.raises(ValueError, match=r"threats.*'pixel_linf'.*Threat"):
    attacks.make_switch(['pixel_linf'], attacks.pgd(10))
  with pytest.raises(ValueError, match=r'Threat.*attacks\.pgd'):
    attacks.make_switch(SIX)
  with pytest.raises(ValueError, match=r'attacks has 2 .* 6 threats'):
    attacks.make_switch(SIX, [attacks.pgd(10)] * 2)
  with pytest.raises(ValueError, match=r"'pgd'.*attacks\.pgd"):
    attacks.make_attack(SIX[0], 'pgd')
  for attack in (attacks.fab(5), attacks.apgd(5, loss='dlr', targets=9)):
    with pytest.raises(ValueError, match=r'targets=9.*at most 4.*5 classes'):
      attacks.make_attack(SIX[0], attack)(linear, KEY, IMAGES, LABELS)


def test_few_steps_climb_in_the_last_balls():
  found = [attacks.apgd(steps).radii for steps in (1, 2, 3, 100)]
  assert found == [(1,), (2, 1), (3, 2, 1), (3, 2, 1)]
  with pytest.raises(ValueError, match='steps=0'):
    attacks.apgd(0)


def test_threats_and_attacks_are_hashable_and_frozen():
  assert len({attacks.Threat(**GOOD), attacks.Threat(**GOOD)}) == 1
  assert len({attacks.apgd(radii=[2, 1]), attacks.apgd(radii=(2, 1))}) == 1
  with pytest.raises(dataclasses.FrozenInstanceError):
    attacks.Threat(**GOOD).eps = 1.0


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'images': IMAGES[0]}, r'images are float32 \[8, 8, 1\].*float32 \[B, H'),
    ({'images': (IMAGES * 255).astype(np.uint8)}, 'images are uint8'),
    ({'images': IMAGES.astype(np.float16)}, 'images are float16'),
    (
      {'images': IMAGES.transpose(0, 3, 1, 2)},
      r'\[6, 1, 8, 8\].*looks like \[B, C, H, W\]',
    ),
    ({'images': 2 * IMAGES - 1}, r'images lie in \[-.*Normalise inside'),
    ({'images': IMAGES * np.nan}, r'images lie in \[nan'),
    ({'labels': LABELS[:3]}, r'labels are int32 \[3\].*B=6'),
    ({'labels': LABELS.astype(np.float32)}, 'labels are float32.*integers'),
    ({'labels': np.eye(5, dtype=np.int32)[LABELS]}, r'labels are int32 \[6, 5'),
    ({'ids': np.arange(5)}, r'ids are int.* \[5\].*B=6'),
    ({'ids': np.ones(6, np.float32)}, 'ids are float32'),
    ({'logits_fn': lambda x: x.mean((1, 2, 3))}, r'logits_fn returned .*\[6\]'),
    ({'logits_fn': lambda x: linear(x)[:, :1]}, r'\[6, 1\].*K >= 2'),
    ({'logits_fn': lambda x: linear(x).astype(int)}, r'returned int32'),
    ({'logits_fn': lambda x: (linear(x), {})}, r'logits_fn returned tuple'),
    ({'labels': LABELS + 5}, r'labels lie in \[.*must lie in \[0, 5\)'),
    ({'scale': -1.0}, r'scale=-1.0.*finite number >= 0'),
    ({'scale': np.ones(6)}, r'scale=.*one finite number'),
    ({'key': 0}, r'key=0 .*jax\.random\.key'),
    ({'key': np.zeros(3, np.uint32)}, r'key=.*jax\.random\.key'),
    ({'start': 0.5}, r'start=0\.5.*integer'),
    ({'start': -1}, r'start=-1'),
  ],
)
def test_bad_batches_are_refused(change, message):
  good = {'logits_fn': linear, 'images': IMAGES, 'labels': LABELS, 'key': KEY}
  for kind in ('pgd', 'fab', 'square'):
    attack = attacks.make_attack(SIX[0], KINDS[kind])
    with pytest.raises(ValueError, match=message):
      attack(**(good | change))
  if (
    'lie in' in message or 'scale=-1' in message or 'key=0' in message
    or 'start=-1' in message
  ):  # fmt: skip
    return  # Values are not known when traced.
  logits_fn = change.get('logits_fn', linear)
  arrays = {k: v for k, v in (good | change).items() if k != 'logits_fn'}
  if 'logits_fn' not in change and 'lie in' not in message:
    attack = functools.partial(attacks.make_attack(*PAIRS[0]), logits_fn)
    with pytest.raises(ValueError, match=message.replace(r'0\.5', '')):
      jax.jit(attack)(**arrays)


@pytest.mark.parametrize('index', [-1, 6, 1.0, np.array([0, 1])])
def test_bad_indices_are_refused(index):
  with pytest.raises(ValueError, match='index='):
    attacks.make_switch(PAIRS)(linear, index, KEY, IMAGES, LABELS)


@pytest.mark.parametrize(
  ('forward', 'inverse', 'message'),
  [
    (jnp.fft.fft2, jnp.fft.ifft2, "forward of space 'own'"),
    (lambda x: (x, x), lambda z: z[0], "forward of space 'own'"),
    (lambda x: x, lambda z: z[:4], "inverse of space 'own'"),
  ],
)
def test_spaces_that_do_not_fit_are_refused(forward, inverse, message):
  space = spaces.Space('own', forward, inverse)
  threat = attacks.Threat(space=space, norm='l2', eps=1.0)
  attack = attacks.make_attack(threat, attacks.pgd(1))
  with pytest.raises(ValueError, match=message):
    attack(linear, KEY, IMAGES, LABELS)


def test_check_looks_at_what_jit_cannot_see():
  attacks.check(IMAGES, LABELS)
  attacks.check(IMAGES, LABELS, linear, SIX)
  for images, labels, logits_fn, message in (
    (IMAGES + 1, LABELS, None, r'images lie in'),
    (IMAGES, LABELS + 5, linear, r'labels lie in'),
    (IMAGES, LABELS - 9, linear, r'labels lie in'),
    (IMAGES.transpose(0, 3, 1, 2), LABELS, None, r'looks like \[B, C, H, W\]'),
    (IMAGES, LABELS, lambda x: x.sum(), r'logits_fn returned'),
  ):
    with pytest.raises(ValueError, match=message):
      attacks.check(images, labels, logits_fn)


def test_check_refuses_a_space_whose_inverse_is_none():
  half = spaces.Space('half', lambda x: x / 2, lambda z: z)
  stretched = spaces.Space('longer', lambda x: 2 * x, lambda z: z / 2, True)
  for space, message in ((half, "inverse of space 'half'"), (
    stretched, "'longer' says orthonormal"
  )):  # fmt: skip
    threat = attacks.Threat(space=space, norm='l2', eps=1.0)
    with pytest.raises(ValueError, match=message):
      attacks.check(IMAGES, LABELS, threats=[threat])


# ---------------------------------------------------------------- the details


def test_an_attack_that_does_not_move_says_so():
  def half_flat(images):  # The first three examples have no gradient.
    moves = (jnp.arange(len(images)) >= 3)[:, None]
    return curved(jnp.where(moves[..., None, None], images, 0.5))

  labels = np.argmax(half_flat(IMAGES), axis=1).astype(np.int32)
  pairs = [
    (dataclasses.replace(threat, eps=1e-5), attack)  # Nothing is fooled there.
    for threat, attack in (
      *PAIRS,
      *((SIX[1], KINDS[kind]) for kind in ('apgd', 'fab')),
    )
  ]
  for pair, found in zip(
    pairs, run_each(pairs, half_flat, IMAGES, labels, details=True), strict=True
  ):
    assert found.stuck.tolist() == [True] * 3 + [False] * 3, pair


# Attack: (gradients, forwards) if never fooled, and if always fooled.
SPENT = {
  attacks.pgd(5): ((5, 0), (5, 0)),
  attacks.slide(5, restarts=3): ((15, 3), (15, 3)),
  attacks.momentum(6): ((6, 0), (6, 0)),
  attacks.apgd(6, result='highest'): ((6, 1), (6, 1)),
  attacks.apgd(10): ((10, 1), (7, 1)),  # The first six are in larger balls.
  attacks.apgd(10, loss='dlr', targets=3, restarts=2): ((60, 7), (7, 2)),
  attacks.fab(5, targets=2): ((10, 13), (1, 3)),
  attacks.square(20, restarts=2): ((0, 40), (0, 1)),
}


@pytest.mark.parametrize('attack', SPENT, ids=repr)
def test_counts_what_was_evaluated(attack):
  calls = []

  def says_one(images):
    jax.debug.callback(lambda: calls.append(1))
    return curved(images).at[:, 1].add(1e3)

  threat, other = SIX[2], SIX[3]
  never, always = SPENT[attack]
  alone = attacks.make_attack(threat, attack, details=True)
  alone = jax.jit(functools.partial(alone, says_one))
  for label, expected in ((1, never), (0, always)):
    found = alone(KEY, IMAGES, np.full(6, label, np.int32))
    assert spent(found) == [expected] * 6
    jax.effects_barrier()
    assert len(calls) == sum(expected)
    calls.clear()

  # ---- in a switch, on two devices of which one may stop early
  pairs = [(other, attacks.pgd(1)), (threat, attack)]
  switch = attacks.make_switch(pairs, details=True)
  sharded = jax.shard_map(
    functools.partial(switch, says_one),
    mesh=jax.make_mesh((2,), ('data',), (jax.sharding.AxisType.Auto,)),
    in_specs=(jax.P(), jax.P(), jax.P('data'), jax.P('data')),
    out_specs=jax.P('data'),
  )
  labels = np.array([1, 1, 1, 0, 0, 0], np.int32)
  found = jax.jit(sharded)(jnp.int32(1), KEY, IMAGES, labels)
  assert spent(found) == [never] * 3 + [always] * 3


def spent(found):
  return list(
    zip(found.gradients.tolist(), found.forwards.tolist(), strict=True)
  )


@EACH_OF_SIX
def test_distance_is_the_norm_in_the_space(threat):
  other = IMAGES[::-1]
  expected = length_in_ball(threat, IMAGES, other)
  np.testing.assert_allclose(
    attacks.distance(threat, IMAGES, other), expected, rtol=1e-5
  )
