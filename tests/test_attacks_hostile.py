"""Attacks cope with degenerate networks and refuse bad input."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import (
  CLIMB_LABELS,
  IMAGES,
  KEY,
  KINDS,
  LABELS,
  OWN,
  PAIRS,
  SHAPE,
  SIX,
  curved,
  linear,
  run,
  run_each,
)

from mwrobust import attacks
from mwrobust.attacks import losses, problem, spaces

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
