import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft
import scipy.optimize

from mwrobust import attacks
from mwrobust.attacks import losses
from mwrobust.errors import UserError
from mwrobust.runtime import devices
from mwrobust.training import adversaries

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
SHAPE = (8, 8, 1)
IMAGES = RNG.uniform(size=(6, *SHAPE)).astype(np.float32)
BINARY = (IMAGES > 0.5).astype(np.float32)  # At the bounds of the box.
LABELS = RNG.integers(0, 5, size=6).astype(np.int32)
IDS = np.arange(10, 16)
WEIGHTS = RNG.normal(size=(64, 5)).astype(np.float32)
SLOPE = WEIGHTS[:, 0]
SIX = attacks.six_threats(0.3, 1.0, 4.0)
PAIRS = [
  (threat, attacks.pgd(20 if threat.norm == 'l1' else 10)) for threat in SIX
]
K = len(PAIRS)
ORD = {'linf': np.inf, 'l2': 2, 'l1': 1}


def curved(images):
  logits = images.reshape(len(images), -1) @ WEIGHTS
  return logits + jnp.sin(logits)


def rises(images):
  """Returns logits whose loss of class 1 rises with image @ SLOPE."""
  rise = images.reshape(len(images), -1) @ SLOPE
  return jnp.stack([rise, jnp.zeros_like(rise)], axis=1)


def perturb(
  kind, pairs, logits_fn, images, labels, *, index=0, scale=1.0, key=KEY
):
  """Runs an adversary inside jit, with everything traced."""
  adversary = adversaries.make_adversary(kind, pairs)
  return jax.jit(functools.partial(adversary.perturb, logits_fn))(
    jnp.int32(index), key, images, labels, IDS, scale
  )


def climb(pairs, images, **more):
  """Returns msd's images for a loss that rises with image @ SLOPE."""
  found = perturb('msd', pairs, rises, images, np.ones(6, np.int32), **more)
  return np.asarray(found.images, np.float64)


@functools.cache
def each_by_itself():
  """Returns the images of each of the six attacks, [k, B, ...]."""
  switch = jax.jit(functools.partial(attacks.make_switch(PAIRS), curved))
  return np.stack(
    [switch(jnp.int32(i), KEY, IMAGES, LABELS, IDS, 0.5) for i in range(K)]
  )


def distances(threat, before, after):
  """Returns the norms of the perturbations in the threat's space."""
  return np.asarray(attacks.distance(threat, before, jnp.float32(after)))


# ---------------------------------------------------------- one, max, avg, none


@pytest.mark.parametrize('index', [0, 2, 5])
def test_one_is_the_attack_of_the_threat_that_was_picked(index):
  found = perturb('one', PAIRS, curved, IMAGES, LABELS, index=index, scale=0.5)
  attack = jax.jit(
    functools.partial(attacks.make_attack(*PAIRS[index]), curved)
  )
  alone = attack(KEY, IMAGES, LABELS, IDS, 0.5)
  np.testing.assert_allclose(found.images, alone, atol=1e-5)
  np.testing.assert_array_equal(found.labels, LABELS)


def test_max_is_the_worst_of_all_attacks_for_each_example():
  found = perturb('max', PAIRS, curved, IMAGES, LABELS, scale=0.5)
  each = each_by_itself()
  loss = np.stack([losses.cross_entropy(curved(x), LABELS) for x in each])
  highest = loss.argmax(axis=0)
  assert len(set(highest)) > 1
  worst = each[highest, np.arange(len(IMAGES))]
  np.testing.assert_allclose(found.images, worst, atol=1e-5)
  np.testing.assert_array_equal(found.labels, LABELS)


def test_avg_has_the_images_of_all_attacks():
  found = perturb('avg', PAIRS, curved, IMAGES, LABELS, scale=0.5)
  assert found.images.shape == (K * 6, *SHAPE)
  # Example by example.
  by_example = np.swapaxes(each_by_itself(), 0, 1).reshape(-1, *SHAPE)
  np.testing.assert_allclose(found.images, by_example, atol=1e-5)
  np.testing.assert_array_equal(found.labels, np.repeat(LABELS, K))


def test_none_leaves_the_images_as_they_are():
  found = perturb('none', PAIRS, curved, IMAGES, LABELS)
  np.testing.assert_array_equal(found.images, IMAGES)
  np.testing.assert_array_equal(found.labels, LABELS)


@pytest.mark.parametrize('kind', ['max', 'avg', 'msd'])
def test_the_index_does_not_matter_to_those_that_use_all_threats(kind):
  pairs = PAIRS[:2]
  one, other = (
    perturb(kind, pairs, curved, IMAGES, LABELS, index=i) for i in (0, 1)
  )
  np.testing.assert_array_equal(one.images, other.images)


@pytest.mark.parametrize('kind', ['one', 'max', 'avg', 'msd'])
def test_k_threats_compile_one_gradient(kind):
  adversary = adversaries.make_adversary(kind, PAIRS)
  args = jnp.int32(0), KEY, IMAGES, LABELS, IDS, 1.0
  calls = []

  @jax.custom_jvp
  def watched(images):
    return images

  @watched.defjvp
  def _(primals, tangents):
    calls.append(kind)
    return primals[0], tangents[0]

  jax.eval_shape(
    functools.partial(adversary.perturb, lambda x: curved(watched(x))), *args
  )
  assert len(calls) == 1


# -------------------------------------------------------------------------- msd


def best_in_pixels(image, norm, eps):
  """Returns max SLOPE @ d in ball and [0, 1], closed form in float64."""
  slope, image = SLOPE.astype(np.float64), image.ravel()
  room, size = np.where(slope > 0, 1.0 - image, image), np.abs(slope)
  if norm == 'linf':
    return np.sum(size * np.minimum(eps, room))
  if norm == 'l1':  # The steepest pixels first, each up to its bound.
    order = np.argsort(-size)
    left = eps - np.append(0, np.cumsum(room[order])[:-1])
    return np.sum(size[order] * np.clip(left, 0, room[order]))
  low, high = 0.0, 1e6
  for _ in range(200):
    middle = (low + high) / 2
    short = np.linalg.norm(np.minimum(middle * size, room)) < eps
    low, high = (middle, high) if short else (low, middle)
  return np.sum(size * np.minimum(low * size, room))


def best_in_dct(threat):
  """Returns the same in the DCT, far from 0 and 1: eps x the dual norm."""
  slope = attacks.SPACES['dct'].forward(SLOPE.reshape(SHAPE))
  dual = {'linf': 1, 'l2': 2, 'l1': np.inf}[threat.norm]
  return threat.eps * np.linalg.norm(np.ravel(slope), dual)


def gains(found, images):
  return (found - images).reshape(6, 64) @ SLOPE.astype(np.float64)


@pytest.mark.parametrize('images', [IMAGES, BINARY], ids=['grey', 'binary'])
@pytest.mark.parametrize('threat', SIX[:3], ids=lambda threat: threat.name)
def test_msd_with_one_threat_reaches_its_optimum(threat, images):
  found = climb([(threat, attacks.pgd(20))], images)
  optimum = [best_in_pixels(x, threat.norm, threat.eps) for x in images]
  gain = gains(found, images)
  assert (gain >= 0.98 * np.array(optimum)).all()
  assert (gain <= 1.0001 * np.array(optimum)).all()
  assert (distances(threat, images, found) <= 1.0001 * threat.eps).all()


@pytest.mark.parametrize('images', [IMAGES, BINARY], ids=['grey', 'binary'])
@pytest.mark.parametrize(
  ('radii', 'leaders'),
  [
    ((0.3, 1.0, 2.0), {0}),
    ((0.05, 1.5, 2.0), {1}),
    ((0.05, 0.5, 6.0), {2}),
    # With steps of 2.5 eps / steps it would reach 0.78 of this one.
    ((0.1, 1.0, 6.0), {1, 2}),
  ],
)
def test_msd_reaches_the_largest_optimum_of_several_threats(
  radii, leaders, images
):
  threats = attacks.six_threats(*radii)[:3]
  found = climb([(threat, attacks.pgd(20)) for threat in threats], images)
  optima = np.array(
    [[best_in_pixels(x, t.norm, t.eps) for x in images] for t in threats]
  )
  assert set(optima.argmax(axis=0)) <= leaders
  gain, optimum = gains(found, images), optima.max(axis=0)
  assert (gain >= 0.98 * optimum).all()
  assert (gain <= 1.0001 * optimum).all()


@pytest.mark.parametrize('leader', ['pixel_linf', 'dct_l2', 'dct_l1'])
def test_msd_reaches_the_largest_optimum_across_spaces(leader):
  images = 0.45 + 0.1 * IMAGES  # So far inside that nothing is clipped.
  small = attacks.six_threats(0.01, 0.05, 0.1)
  large = attacks.six_threats(0.05, 0.3, 0.8)
  threats = [
    b if b.name == leader else a for a, b in zip(small, large, strict=True)
  ]
  found = climb([(threat, attacks.pgd(20)) for threat in threats], images)
  optima = {
    t.name: best_in_pixels(images[0], t.norm, t.eps)
    if t.space == 'pixel'
    else best_in_dct(t)
    for t in threats
  }
  assert max(optima, key=optima.get) == leader
  gain = gains(found, images)
  assert (gain >= 0.98 * optima[leader]).all()
  assert (gain <= 1.0001 * optima[leader]).all()


def least_dct_l1(before, after):
  """Returns the least l1 norm of a DCT perturbation with this clipped image.

  A pixel at 0 or 1 may have been beyond. A linear program finds out by how far.
  """
  basis = scipy.fft.dctn(
    np.eye(64).reshape(64, 8, 8), axes=(1, 2), norm='ortho'
  ).reshape(64, 64).T  # fmt: skip
  change, after = (after - before).ravel(), after.ravel()
  low = np.where(after <= 0, -np.inf, change - 1e-5)
  high = np.where(after >= 1, np.inf, change + 1e-5)
  # The least sum of t, with |basis @ d| <= t entry by entry.
  matrix = np.block([[basis, -np.eye(64)], [-basis, -np.eye(64)]])
  result = scipy.optimize.linprog(
    np.append(np.zeros(64), np.ones(64)),
    *(matrix, np.zeros(128)),
    bounds=[*zip(low, high, strict=True), *[(0, None)] * 64],
  )
  assert result.success
  return result.fun


@pytest.mark.parametrize('clip', ['inside', 'end', 'strict'])
def test_msd_stays_in_the_union_of_the_sets(clip):
  linf, l2, l1 = attacks.six_threats(0.11, 0.7, 3.2, clip)[:3]
  dct_l1 = attacks.Threat(space='dct', norm='l1', eps=2.6, clip=clip)
  threats = linf, l2, l1, dct_l1
  images = 0.1 + 0.8 * IMAGES  # Some pixels are clipped, but not all.
  pairs = [(threat, attacks.pgd(10)) for threat in threats]
  for scale in (1.0, 0.5):
    found = perturb('msd', pairs, curved, images, LABELS, scale=scale).images
    found = np.asarray(found, np.float64)
    assert found.min() >= 0
    assert found.max() <= 1
    lengths = [distances(threat, images, found) for threat in threats]
    if clip != 'strict':
      lengths[3] = [
        least_dct_l1(*pair) for pair in zip(images, found, strict=True)
      ]
    radii = scale * np.array([[threat.eps] for threat in threats])
    shares = np.array(lengths) / radii
    assert (shares.min(axis=0) <= 1.001).all()
    assert (shares.min(axis=0) >= 0.9).all()  # Each is near the border.
    assert len(set(shares.argmin(axis=0))) > 1  # Of more than one threat.


def test_msd_is_stronger_than_the_worst_attack_on_a_network(trained, digits):
  (images, labels), _ = digits
  images, labels = images[:6], labels[:6]
  threats = attacks.six_threats(0.1, 1.0, 5.0)
  pairs = [(threat, attacks.pgd(10)) for threat in threats]
  loss = {
    kind: losses.cross_entropy(
      trained(perturb(kind, pairs, trained, images, labels).images), labels
    ).mean()
    for kind in ('none', 'max', 'msd')
  }
  assert loss['none'] < 0.5
  assert loss['msd'] > loss['max']


def test_msd_takes_the_step_size_of_an_attack():
  threat = attacks.Threat(norm='linf', eps=0.2)
  images = 0.45 + 0.1 * IMAGES
  attack = attacks.pgd(3, step_size=0.01)
  found = climb([(threat, attack)], images)
  expected = images + 0.03 * np.sign(SLOPE).reshape(SHAPE)
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_msd_has_as_many_steps_as_the_longest_attack():
  threats = attacks.six_threats(0.2, 0.01, 0.01)
  pairs = [
    (threats[0], attacks.pgd(3, step_size=0.01)),
    (threats[1], attacks.pgd(7)),
  ]
  images = 0.45 + 0.1 * IMAGES
  found = climb(pairs, images)
  expected = images + 0.07 * np.sign(SLOPE).reshape(SHAPE)
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_msd_with_three_channels_and_without_a_slope():
  """Checks that images without a gradient stay as they are, and finite."""
  images = RNG.uniform(size=(6, 8, 8, 3)).astype(np.float32)
  labels = np.zeros(6, np.int32)
  slope = np.tile(SLOPE, 3)

  def logits_fn(images):  # Two classes; black images have no gradient.
    rise = images.reshape(len(images), -1) @ slope
    return jnp.stack(
      [jnp.zeros_like(rise), jnp.maximum(jnp.abs(rise) - 0.1, 0)], axis=1
    )

  images[0] = 0
  found = perturb('msd', PAIRS[1:4], logits_fn, images, labels).images
  assert found.shape == images.shape
  before, after = (
    losses.cross_entropy(logits_fn(x), labels) for x in (images, found)
  )
  assert (after > before + 1)[1:].all()
  np.testing.assert_allclose(found[0], 0, atol=1e-6)


def test_msd_needs_gradients():
  pairs = [(SIX[0], attacks.square(10))]
  with pytest.raises(UserError, match='pixel_linf'):
    adversaries.make_adversary('msd', pairs)


# ------------------------------------------------- properties of all of them


@pytest.mark.parametrize('kind', ['one', 'max', 'avg', 'msd'])
def test_no_gradient_flows_through_the_images(kind):
  pairs = [(threat, attacks.pgd(2)) for threat in SIX[:2]]
  adversary = adversaries.make_adversary(kind, pairs)

  @jax.jit
  @jax.grad
  def gradient(weights):
    logits_fn = lambda x: x.reshape(len(x), -1) @ weights  # noqa: E731
    found = adversary.perturb(
      logits_fn, jnp.int32(1), KEY, IMAGES, LABELS, IDS, 1.0
    )
    return found.images.sum()

  assert not gradient(WEIGHTS).any()


@pytest.mark.parametrize('kind', ['one', 'max', 'avg', 'msd', 'none'])
def test_devices_share_a_batch_without_changing_it(kind):
  pairs = [(threat, attacks.pgd(3)) for threat in SIX[1:4]]
  adversary = adversaries.make_adversary(kind, pairs)

  def run(shared, batch):
    index, key = shared
    return adversary.perturb(curved, index, key, *batch, 1.0)

  args = (jnp.int32(1), KEY), (IMAGES, LABELS, IDS)
  together, alone = (
    jax.jit(function)(*args) for function in (devices.by_example(run), run)
  )
  np.testing.assert_allclose(together.images, alone.images, atol=1e-5)
  np.testing.assert_array_equal(together.labels, alone.labels)


def test_costs_are_in_gradient_evaluations():
  costs = {
    kind: adversaries.make_adversary(kind, PAIRS)
    for kind in ('one', 'max', 'avg', 'msd', 'none')
  }
  expected = {
    'one': [10, 10, 20, 10, 10, 20],
    'max': [80 + 6 / 3] * 6,  # With a forward pass for each of the six.
    'avg': [80] * 6,
    'msd': [20 * (1 + 6 / 3)] * 6,
    'none': [0] * 6,
  }
  for kind, adversary in costs.items():
    np.testing.assert_allclose(adversary.gradients, expected[kind])
  copies = {kind: adversary.copies for kind, adversary in costs.items()}
  assert copies == {'one': 1, 'max': 1, 'avg': 6, 'msd': 1, 'none': 1}


@pytest.mark.parametrize(
  'attack',
  [
    attacks.pgd(3),
    attacks.pgd(3, restarts=2),
    attacks.momentum(4),
    attacks.apgd(5, result='highest'),
    attacks.apgd(5),
    attacks.apgd(5, loss='dlr', targets=2, restarts=2),
    attacks.fab(3, targets=2),
    attacks.square(7),
  ],
  ids=[
    *('pgd', 'restarts', 'momentum', 'highest', 'apgd', 'targets', 'fab'),
    'square',
  ],
)
def test_costs_are_what_an_attack_spends_if_it_does_not_stop(attack):
  pair = (attacks.Threat(norm='l2', eps=1e-3), attack)
  labels = np.asarray(curved(IMAGES).argmax(axis=1), np.int32)
  run = attacks.make_attack(*pair, details=True)
  found = jax.jit(functools.partial(run, curved))(KEY, IMAGES, labels)
  spent = found.gradients + found.forwards / 3
  (cost,) = adversaries.make_adversary('one', [pair]).gradients
  np.testing.assert_allclose(spent.max(), cost, rtol=1e-6)


def test_an_unknown_adversary_is_refused():
  with pytest.raises(UserError, match=r"adversary = 'msb'.*'msd'"):
    adversaries.make_adversary('msb', PAIRS)
