"""Attacks do what their documentation says."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import (
  BINARY,
  EACH_OF_SIX,
  EPS,
  IMAGES,
  KEY,
  KINDS,
  LABELS,
  OWN,
  PAIRS,
  RNG,
  SHAPE,
  SIX,
  TRAIN,
  WEIGHTS,
  curved,
  length_in_ball,
  linear,
  of_every_kind,
  run,
  run_each,
)

from mwrobust import attacks
from mwrobust.attacks import losses

# --------------------------------------------------------------- the clip rules


@pytest.mark.parametrize('clip', ['inside', 'strict', 'end'])
def test_returns_images_in_the_set(clip):
  threats = attacks.six_threats(*EPS, clip=clip)
  pairs = of_every_kind(threats)
  if clip == 'end':  # All but the paper's attacks use `'inside'` instead.
    pairs = [(t, KINDS[kind]) for t in threats for kind in ('pgd', 'slide')]
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
