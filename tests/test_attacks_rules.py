"""The rules of ascent follow a loop in NumPy and traces by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import IMAGES, KEY, SIX, curved

from mwrobust import attacks
from mwrobust.attacks import geometry, losses, norms, rules


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
