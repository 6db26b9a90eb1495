"""Tests the evaluation of any network."""

import dataclasses
import functools
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mwrobust import attacks, evaluation
from mwrobust.errors import UserError
from mwrobust.evaluation import inputs, plan, protocols

ROOT = pathlib.Path(__file__).parent.parent
CLASSES = 4
SHAPE = (8, 8, 1)
OWN = [attacks.apgd(6, restarts=2), attacks.square(20)]
quietly = functools.partial(evaluation.evaluate, progress=False)


def weights(shape=SHAPE, classes=CLASSES, seed=0):
  size = int(np.prod(shape))
  rng = np.random.default_rng(seed)
  hidden = rng.normal(size=(size, 16)).astype(np.float32) / size**0.5
  out = rng.normal(size=(16, classes)).astype(np.float32)
  return jnp.asarray(hidden), jnp.asarray(out)


def logits_fn(params, images):
  hidden, out = params
  flat = images.reshape(len(images), -1) - 0.5
  return jnp.tanh(4 * flat @ hidden) @ out


def make_examples(count=30, shape=SHAPE, classes=CLASSES, dtype=np.float32):
  """Returns random images, most of them classified correctly."""
  rng = np.random.default_rng(1)
  images = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
  params = weights(shape, classes)
  labels = logits_fn(params, images.astype(np.float32) / 255).argmax(axis=1)
  labels = np.array(labels)
  labels[::10] = (labels[::10] + 1) % classes
  if dtype != np.uint8:
    images = (images / np.float32(255)).astype(dtype)
  return images, labels


THREATS = [
  threat
  for threat in attacks.six_threats(0.02, 0.2, 1.0)
  if threat.name in ('pixel_linf', 'pixel_l2', 'dct_l2', 'dct_l1')
]


@pytest.fixture(scope='module')
def examples():
  return make_examples()


@pytest.fixture(scope='module')
def outcomes(examples):
  return quietly(logits_fn, *examples, THREATS, params=weights(), protocol=OWN)


# ------------------------------------------------------------------- survivors


def test_survivors_alone_give_what_attacking_everything_gives(
  examples, outcomes
):
  images, labels = examples
  logits = functools.partial(logits_fn, weights())
  natural = np.asarray(logits(images).argmax(axis=1) == labels)
  assert (outcomes.natural == natural).all()
  assert 0 < natural.sum() < len(labels)
  fell_late = False
  for i, threat in enumerate(THREATS):
    if threat.name == 'dct_l2':
      continue  # It is attacked as pixel_l2.
    stands = natural.copy()
    for stage, attack in enumerate(OWN):
      key = jax.random.fold_in(jax.random.key(0), stage)
      run = jax.jit(
        functools.partial(attacks.make_attack(threat, attack), logits)
      )
      for start in range(attack.tries):
        found = run(key, images, labels, start=jnp.int32(start))
        fooled = np.asarray(logits(found).argmax(axis=1) != labels)
        fell = stands & fooled
        assert (outcomes.fell[i][fell] == stage).all()
        fell_late |= fell.any() and start > 0
        stands &= ~fooled
    assert (outcomes.standing[threat] == stands).all(), threat.name
  assert fell_late


def test_a_set_that_two_threats_share_is_attacked_once(outcomes):
  names = list(outcomes.threats)
  pixel, dct = names.index('pixel_l2'), names.index('dct_l2')
  assert outcomes.spent[pixel].sum() > 0
  assert outcomes.spent[dct].sum() == 0
  for field in ('fell', 'tried', 'predicted', 'loss', 'distance'):
    array = getattr(outcomes, field)
    assert (array[pixel] == array[dct]).all()


def test_what_falls_in_a_ball_falls_in_a_larger_one(examples):
  small, large = (
    attacks.Threat(norm='linf', eps=eps, name=name)
    for eps, name in ((0.01, 'small'), (0.03, 'large'))
  )
  found = quietly(
    logits_fn, *examples, [large, small], params=weights(), protocol=OWN
  )
  alone = quietly(logits_fn, *examples, large, params=weights(), protocol=OWN)
  assert not (found.standing['large'] & ~found.standing['small']).any()
  assert (found.standing['large'] <= alone.standing['large']).all()


def test_a_round_is_one_try_under_sets_none_of_which_contains_another():
  six = attacks.six_threats(0.1, 1.0, 5.0)
  protocol = protocols.make_protocol('standard', classes=10)
  rounds = plan.make_rounds(plan.make_rows(six, (1.0,), protocol), protocol)
  assert len(rounds[0]) == 5  # l2 in pixels and in the DCT is one set.
  assert {(p.stage, p.start, p.number) for p in rounds[0]} == {(0, 0, 0)}
  wider = attacks.Threat(norm='linf', eps=0.2, name='wider')
  rows = plan.make_rows([*six, wider], (0.5, 1.0), protocol)
  rounds = plan.make_rounds(rows, protocol)
  for members in rounds:
    of_round = {p.row for p in members}
    assert all(set(rows[row].within) & of_round == {row} for row in of_round)
  passes = [p for members in rounds for p in members]
  for row in {p.row for p in passes}:
    numbers = [p.number for p in passes if p.row == row]
    assert numbers == list(range(len(numbers)))


def test_the_accuracies_are_those_of_the_matrix(outcomes):
  accuracies = outcomes.accuracies()
  correct = np.array([outcomes.standing[name] for name in outcomes.threats])
  assert accuracies['union'] == pytest.approx(100 * correct.all(0).mean())
  assert accuracies['min'] == pytest.approx(100 * correct.mean(1).min())
  assert accuracies['natural'] == pytest.approx(100 * outcomes.natural.mean())
  assert outcomes.standing[THREATS[0]] is not None  # Also by the threat itself.
  with pytest.raises(KeyError):
    outcomes.standing['pixel_l3']
  after = [outcomes.accuracies_after(a)['union'] for a in range(2)]
  assert after[0] >= after[1] == accuracies['union']


def test_it_says_which_attack_fooled_which_example(outcomes):
  for name in outcomes.threats:
    fell_to = outcomes.fell_to[name]
    assert set(fell_to) <= {'', 'misclassified', 'apgd-ce', 'square'}
    assert ((fell_to == '') == outcomes.standing[name]).all()
    assert ((fell_to == 'misclassified') == ~outcomes.natural).all()


def test_the_images_kept_are_those_that_were_judged(outcomes):
  logits = logits_fn(weights(), outcomes.adversarial.reshape(-1, *SHAPE))
  seen = logits.argmax(axis=1).reshape(len(THREATS), -1)
  pictured = seen.shape[1]
  attacked = outcomes.natural[:pictured]
  predicted = outcomes.predicted[:, :pictured]
  assert (np.asarray(seen) == predicted)[:, attacked].all()
  assert outcomes.adversarial.min() >= 0
  assert outcomes.adversarial.max() <= 1


def test_evaluations_are_counted(outcomes):
  done, full = outcomes.evaluations()
  assert (done > 0).all()
  assert (done < full).all()
  # Four threats x 30 images; two tries of APGD, each with a last forward pass.
  assert full.tolist() == [4 * 30 * 2 * 6, 4 * 30 * (2 + 20)]


def test_print_shows_a_table_within_80_columns(outcomes, examples):
  text = str(outcomes)
  assert all(len(line) <= 80 for line in text.splitlines())
  accuracies = outcomes.accuracies()
  for name in accuracies:
    assert any(line.startswith(name) for line in text.splitlines())
  names = evaluation.PROTOCOLS['standard']('linf', 9)
  threats = attacks.six_threats(8 / 255, 0.5, 12)
  as_long = dict.fromkeys(names, attacks.apgd(3))
  found = quietly(
    logits_fn, *examples, threats, params=weights(), protocol=as_long
  )
  assert all(len(line) <= 80 for line in str(found).splitlines())


def test_a_curve_falls_as_the_radius_grows(examples):
  found = quietly(
    logits_fn,
    *examples,
    THREATS[:2],
    params=weights(),
    protocol=OWN,
    radii=(0.5, 1.0, 4.0, 64.0),
  )
  curve = found.curve()
  assert list(curve) == ['pixel_linf', 'pixel_l2']
  natural = 100 * found.natural.mean()
  for line in curve.values():
    radii, accuracies = zip(*line, strict=True)
    assert radii == (0.0, 0.5, 1.0, 4.0, 64.0)
    assert list(accuracies) == sorted(accuracies, reverse=True)
    assert accuracies[0] == pytest.approx(natural)
    assert accuracies[-1] == 0


def test_batches_devices_and_types_do_not_matter(examples, outcomes):
  images, labels = examples
  for given, batch_size in (
    (np.round(images * 255).astype(np.uint8), 7),
    (jnp.asarray(images), 4),
  ):
    found = quietly(
      logits_fn,
      given,
      labels,
      THREATS,
      params=weights(),
      protocol=OWN,
      batch_size=batch_size,
    )
    assert (found.fell == outcomes.fell).all()


# ------------------------------------------------------------------- protocols


def test_the_standard_protocol_is_autoattacks_order_and_shrinking_balls():
  protocol = protocols.make_protocol('standard', classes=10)
  assert protocol.attacks == ('apgd-ce', 'apgd-t', 'shrink', 'fab-t', 'square')
  linf = protocol.stages['linf']
  assert [attack.tries for attack in linf.values()] == [5, 9, 9, 9, 1]
  assert protocol.stages['l1']['apgd-ce'].restarts > 5
  assert all(
    stage.radii == (3.0, 2.0, 1.0) for stage in list(linf.values())[:2]
  )


@pytest.mark.parametrize('classes', [2, 3, 5])
def test_there_are_never_more_targets_than_other_classes(classes):
  for name in protocols.PROTOCOLS:
    for stages in protocols.make_protocol(name, classes).stages.values():
      for attack in stages.values():
        assert getattr(attack, 'targets', 0) < classes


def test_the_paper_clips_after_the_inverse_dct_only_in_its_own_protocol():
  dct, pixel = (
    attacks.Threat(space=s, norm='l1', eps=1) for s in ('dct', 'pixel')
  )
  paper = protocols.make_protocol('paper', 10)
  assert paper.attacked_as(dct).clip == 'end'
  assert paper.attacked_as(pixel).clip == 'inside'
  standard = protocols.make_protocol('standard', 10)
  assert standard.attacked_as(dct) == dct
  ends = dataclasses.replace(dct, clip='end')
  assert standard.attacked_as(ends) == dct


def solved(threats, protocol):
  protocol = protocols.make_protocol(protocol, 10)
  return [
    (row.solved.space, row.solved.clip, row.attacked)
    for row in plan.make_rows(threats, (1.0,), protocol)
  ]


@pytest.mark.parametrize('clip', ['inside', 'end'])
def test_only_the_paper_attacks_the_l2_ball_of_the_dct_there(clip):
  l2 = [t for t in attacks.six_threats(0.1, 1.0, 5.0, clip) if t.norm == 'l2']
  assert solved(l2, 'paper') == [*(('pixel', clip, True), ('dct', 'end', True))]
  for protocol in ('standard', [attacks.apgd(5)]):
    assert solved(l2, protocol) == [
      *(('pixel', 'inside', True), ('pixel', 'inside', False))
    ]


def test_the_paper_attacks_the_dct_as_its_authors_do(examples):
  images, labels = examples
  pixel, dct = (
    attacks.Threat(space=s, norm='l2', eps=0.3) for s in ('pixel', 'dct')
  )
  found = quietly(logits_fn, images, labels, [dct, pixel], weights(), 'paper')
  of_dct, of_pixel = found.settings['threats']
  assert (of_dct['clip'], of_dct['attacked_clip']) == ('inside', 'end')
  assert 'attacked_clip' not in of_pixel
  logits = functools.partial(logits_fn, weights())
  run = attacks.make_attack(
    dataclasses.replace(dct, clip='end'), attacks.pgd(40)
  )
  key = jax.random.fold_in(jax.random.key(0), 0)
  fooled = logits(run(logits, key, images, labels)).argmax(axis=1) != labels
  fooled = found.natural & np.asarray(fooled)
  assert fooled.any()
  assert not found.standing['dct_l2'][fooled].any()
  # The sets are the same, so what falls in one falls in the other.
  assert (found.fell[0] == found.fell[1]).all()


def test_own_attacks_get_names_of_their_own():
  own = [attacks.apgd(5), attacks.apgd(9), attacks.square(10), attacks.pgd(3)]
  protocol = protocols.make_protocol(own, 10)
  assert protocol.attacks == ('apgd-ce', 'apgd-ce 2', 'square', 'pgd')
  named = protocols.make_protocol({'mine': attacks.pgd(3)}, 10)
  assert named.attacks == ('mine',)


# ------------------------------------------------------- networks of all kinds


def linen_network(shape, classes):
  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Conv(4, (3, 3))(x)
      x = nn.BatchNorm(use_running_average=True)(nn.relu(x))
      return nn.Dense(classes)(x.reshape(len(x), -1))

  net = Net()
  return net.apply, net.init(jax.random.key(0), jnp.zeros((1, *shape)))


def nnx_network(shape, classes):
  class Net(nnx.Module):
    def __init__(self, rngs):
      self.conv = nnx.Conv(shape[-1], 4, (3, 3), rngs=rngs)
      self.norm = nnx.BatchNorm(4, rngs=rngs)
      self.dropout = nnx.Dropout(0.5, rngs=rngs)
      self.out = nnx.Linear(shape[0] * shape[1] * 4, classes, rngs=rngs)

    def __call__(self, x):
      x = self.dropout(nnx.relu(self.norm(self.conv(x))))
      return self.out(x.reshape(len(x), -1))

  net = Net(nnx.Rngs(0))
  net.eval()
  return net, None


def haiku_network(shape, classes):
  haiku = pytest.importorskip('haiku')
  net = haiku.without_apply_rng(
    haiku.transform(
      lambda x: haiku.Sequential(
        [
          haiku.Conv2D(4, 3),
          jax.nn.relu,
          haiku.Flatten(),
          haiku.Linear(classes),
        ]
      )(x)
    )
  )
  return net.apply, net.init(jax.random.key(0), jnp.zeros((1, *shape)))


def equinox_network(shape, classes):
  eqx = pytest.importorskip('equinox')
  first, second = jax.random.split(jax.random.key(0))
  height, width, channels = shape
  net = eqx.nn.Sequential(
    [
      eqx.nn.Conv2d(channels, 4, 3, padding=1, key=first),
      eqx.nn.Lambda(jax.nn.relu),
      eqx.nn.Lambda(jnp.ravel),
      eqx.nn.Linear(4 * height * width, classes, key=second),
    ]
  )
  return lambda net, x: jax.vmap(net)(x.transpose(0, 3, 1, 2)), net


@pytest.mark.parametrize(
  ('make', 'shape', 'classes'),
  [
    (linen_network, (28, 28, 1), 10),
    (nnx_network, (6, 9, 3), 2),
    (haiku_network, (8, 8, 3), 3),
    (equinox_network, (7, 8, 3), 5),
  ],
)
def test_any_network(make, shape, classes):
  network, params = make(shape, classes)
  images, _ = make_examples(12, shape, classes, np.uint8)
  floats = jnp.asarray(images / np.float32(255))
  logits = network(floats) if params is None else network(params, floats)
  labels = np.asarray(logits.argmax(axis=1))
  threat = attacks.Threat(norm='linf', eps=0.2)
  own = [attacks.apgd(4), attacks.fab(3, targets=1)]
  found = quietly(network, images, labels, threat, params, own)
  assert found.accuracies()['natural'] == 100
  assert found.accuracies()['pixel_linf'] < 100
  assert found.logits.shape == (12, classes)


def test_large_images():
  shape = (224, 224, 3)
  images, labels = make_examples(4, shape, 3)
  found = quietly(
    logits_fn,
    images,
    labels,
    attacks.Threat(norm='linf', eps=1 / 255),
    params=weights(shape, 3),
    protocol=[attacks.apgd(3)],
  )
  assert found.adversarial.shape == (1, 4, *shape)


def test_a_network_with_a_loop_of_its_own(examples):
  def looped(images):
    start = jnp.zeros((CLASSES,)), jnp.float32(0)

    def add(carry, row):
      total, count = carry
      return (total + row, count + 1), None

    logits = logits_fn(weights(), images)
    one = jax.vmap(lambda row: jax.lax.scan(add, start, row[None])[0][0])
    return one(logits)

  found = quietly(looped, *examples, THREATS[0], protocol=OWN)
  assert found.accuracies()['pixel_linf'] < 100


# ---------------------------------------------------------------------- checks


def check_of(outcomes, name, **others):
  found = {c.name: c for c in evaluation.checks(outcomes, **others)}
  return found[name]


def test_a_network_without_gradients_is_noticed(examples):
  def steep(images):  # Its logits change, but its gradient is zero.
    rounded = jnp.round(images * 4) / 4
    return logits_fn(weights(), jax.lax.stop_gradient(rounded) + 0 * images)

  images, _ = examples
  labels = np.asarray(steep(images).argmax(axis=1))
  found = quietly(
    steep,
    images,
    labels,
    attacks.Threat(norm='linf', eps=0.02),
    protocol=[attacks.apgd(4), attacks.square(300)],
  )
  assert found.stuck[0][found.natural].all()  # Square changes nothing in it.
  assert not check_of(found, 'zero gradients').passed
  assert not check_of(found, 'gradient-free attack').passed
  assert not check_of(found, 'gradient masking').passed


def test_an_honest_network_passes_the_checks(outcomes):
  for name in ('zero gradients', 'inside the ball'):
    assert check_of(outcomes, name).passed


def test_the_papers_protocol_is_never_called_healthy(examples):
  found = quietly(
    logits_fn, *examples, THREATS[-1], params=weights(), protocol='paper'
  )
  assert found.attacks == ('pgd',)
  assert not check_of(found, 'protocol').passed


def of_attacks(kinds, fell, count=40, radii=(1.0,), eps=0.5, targets=9):
  """Makes outcomes of attacks of these kinds by hand.

  Args:
    kinds: their classes, in order.
    fell: the number of images that each fools.
    count: the number of images.
    radii: multiples of the radius.
    eps: the radius.
    targets: the number of classes at which each aims.
  """
  attack = {'tries': 1, 'evaluations': [1, 1], 'targets': targets}
  threats = [
    {
      'name': f'x{radius}',
      'of': 'pixel_l2',
      'norm': 'l2',
      'eps': eps * radius,
      'attacks': {
        f'my {place}': attack | {'attack': kind}
        for place, kind in enumerate(kinds)
      },
    }
    for radius in radii
  ]
  settings = {
    'protocol': 'own',
    'threats': threats,
    'radii': list(radii),
    'data': {'images': [count, 10, 10, 1]},
  }
  labels = np.zeros(count, np.int32)
  logits = np.eye(2, dtype=np.float32)[labels]
  found = evaluation.Outcomes.begin(settings, labels, logits, IMAGES[:0])
  by_attack = np.repeat(np.arange(len(kinds)), fell)
  found.fell[:, : len(by_attack)] = by_attack
  found.tried[:] = len(kinds)
  return found


FREE = 'gradient-free attack'


@pytest.mark.parametrize(
  ('kinds', 'fell', 'failed'),
  [
    (['Ascent', 'Square'], [9, 0], []),
    (['Ascent', 'Square'], [9, 2], []),  # By chance.
    (['Ascent', 'Fab'], [9, 3], ['gradient masking']),
    (['Ascent', 'Square', 'Fab'], [9, 3, 0], ['gradient masking']),
    (['Ascent', 'Fab', 'Square'], [9, 3, 0], ['gradient masking']),
    (['Ascent', 'Fab', 'Square'], [9, 0, 3], ['gradient masking', FREE]),
    (['Fab', 'Square'], [9, 3], ['protocol', FREE]),
    (['Ascent'], [9], ['protocol']),
    (['Ascent', 'Ascent'], [9, 3], ['protocol']),
    (['Square'], [9], ['protocol']),
    (['Square', 'Ascent'], [9, 3], ['protocol']),
    (['Ascent', 'Square', 'Ascent'], [9, 9, 9], ['protocol']),
  ],
)  # fmt: skip
def test_what_a_protocol_cannot_tell_does_not_pass(kinds, fell, failed):
  found = of_attacks(kinds, fell)
  assert [c.name for c in evaluation.checks(found) if not c.passed] == failed


def test_the_first_attack_that_aims_at_classes_finds_some_more():
  found = of_attacks(['Ascent', 'Fab'], [9, 3], targets=0)
  assert check_of(found, 'gradient masking').passed
  found = of_attacks(['Ascent', 'Fab'], [9, 9], targets=0)
  assert not check_of(found, 'gradient masking').passed


def test_the_sentences_name_the_attacks_after_the_climbs():
  found = of_attacks(['Square', 'Ascent', 'Fab', 'Square'], [9, 9, 2, 3])
  finding = check_of(found, 'gradient masking').finding
  assert 'my 2 and my 3' in finding
  assert '12.5 more points' in finding
  finding = check_of(found, 'gradient-free attack').finding
  assert 'my 3' in finding
  assert '7.5 points' in finding


def test_where_nothing_is_attacked_nothing_passes():
  found = of_attacks(['Ascent', 'Square'], [0, 0])
  found.labels[:] = 1
  (check,) = evaluation.checks(found)
  assert not check.passed


@pytest.mark.parametrize(
  ('eps', 'failed'), [(0.05, []), (0.3, ['large radii'])]
)
def test_only_large_balls_must_fool_every_image(eps, failed):
  main = of_attacks(['Ascent', 'Square'], [9, 0])
  # At 4 eps, 0.2 or 1.2 of a diagonal of 10, most images stay correct.
  curve = of_attacks(['Ascent', 'Square'], [9, 0], radii=(1.0, 4.0), eps=eps)
  found = evaluation.checks(main, curve)
  assert [check.name for check in found if not check.passed] == failed


# ------------------------------------------------------------ saved and resumed


def test_a_folder_holds_the_evaluation(tmp_path, examples, outcomes):
  run = functools.partial(
    quietly, logits_fn, *examples, params=weights(), protocol=OWN,
    folder=tmp_path,
  )  # fmt: skip
  run(THREATS)
  assert [path.name for path in tmp_path.iterdir()] == [evaluation.FILE]
  loaded = evaluation.Outcomes.load(tmp_path / evaluation.FILE)
  assert loaded.settings == outcomes.settings
  assert (loaded.fell == outcomes.fell).all()
  before = (tmp_path / evaluation.FILE).read_bytes()
  run(THREATS)  # Nothing is left to do.
  assert (tmp_path / evaluation.FILE).read_bytes() == before
  wider = attacks.Threat(norm='linf', eps=0.03)
  with pytest.raises(UserError, match=r'pixel_linf\.eps: 0\.02 there, 0\.03'):
    run([wider, *THREATS[1:]])
  with pytest.raises(UserError, match='seed: 0 there, 1 here'):
    run(THREATS, seed=1)
  with pytest.raises(UserError, match='another network'):
    run(THREATS, params=weights(seed=5))
  assert (tmp_path / evaluation.FILE).read_bytes() == before


def test_the_progress_ends_at_100_percent(examples, capsys):
  threat = attacks.Threat(norm='linf', eps=1.0)  # Every image falls at once.
  found = evaluation.evaluate(
    logits_fn, *examples, threat, params=weights(), protocol=OWN
  )
  assert found.accuracies()['union'] == 0
  assert '100%' in capsys.readouterr().err.splitlines()[-1]


def test_the_cost_is_that_of_an_image_that_survives(capsys):
  def blind(images):
    return 2 * jax.nn.one_hot(jnp.zeros(len(images), int), 3)

  images, labels = np.full((20, 6, 5, 1), 0.5), np.zeros(20, int)
  # The two sets of l2 are the same, so only one of them is attacked.
  threats = [
    attacks.Threat(space=space, norm=norm, eps=0.5)
    for space, norm in (('pixel', 'l2'), ('dct', 'l2'), ('dct', 'l1'))
  ]
  cost = evaluation.cost(threats, OWN, classes=3)
  seen = {}
  for then in (0.0, 1e12):
    found = evaluation.evaluate(
      blind, images, labels, threats, protocol=OWN, then=then
    )
    seen[then] = capsys.readouterr().err
  (gradients, forwards), _ = found.evaluations()
  assert cost * 20 == pytest.approx(gradients + forwards / 3)
  assert seen[0.0].splitlines()[-1].endswith('0:00 left')
  assert 'd ' in seen[1e12].splitlines()[-1]  # Days.


def test_numpy_scalars_are_numbers(examples):
  threat = attacks.Threat(norm='linf', eps=np.float32(0.1))
  protocol = [attacks.fab(2, targets=np.int64(1))]
  images, labels = (array[:4] for array in examples)
  args = logits_fn, images, labels, threat
  found = quietly(*args, params=weights(), protocol=protocol, seed=np.int64(3))
  assert found.complete


def test_a_torn_file_is_named(tmp_path, examples):
  (tmp_path / evaluation.FILE).write_bytes(b'PK torn')
  with pytest.raises(UserError, match=evaluation.FILE):
    quietly(logits_fn, *examples, THREATS, params=weights(), folder=tmp_path)


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
import conftest
import test_evaluation as t
from mwrobust.evaluation import survivors
survivors.SECONDS_BETWEEN_SAVES = -1
calls = 0
def on_batch(outcomes):
  global calls
  calls += 1
  if calls == {after}:
    {end}
t.quietly(
  t.logits_fn, *t.make_examples(), t.THREATS, params=t.weights(),
  protocol=t.OWN, batch_size=8, folder={folder!r}, on_batch=on_batch,
)
"""


def in_another_process(folder, after=-1, end='pass'):
  program = KILLED.format(
    paths=[str(ROOT / 'tests'), str(ROOT)],
    folder=str(folder),
    after=after,
    end=end,
  )
  return subprocess.run(
    [sys.executable, '-c', program], capture_output=True, text=True, check=False
  )


def test_killed_it_resumes_to_the_same_bytes(tmp_path, examples):
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  quietly(
    logits_fn, *examples, THREATS, params=weights(), protocol=OWN,
    batch_size=8, folder=whole,
  )  # fmt: skip
  kill = 'os.kill(os.getpid(), signal.SIGKILL)'
  for after in (3, 11):
    ended = in_another_process(killed, after, kill)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    partial = evaluation.Outcomes.load(killed / evaluation.FILE)
    assert not partial.complete
  ended = in_another_process(killed)
  assert ended.returncode == 0, ended.stderr
  assert (killed / evaluation.FILE).read_bytes() == (
    whole / evaluation.FILE
  ).read_bytes()
  assert evaluation.Outcomes.load(whole / evaluation.FILE).complete


def test_a_second_process_in_the_folder_is_refused(tmp_path, examples):
  refused = []

  def on_batch(outcomes):
    if not refused:
      refused.append(in_another_process(tmp_path))

  quietly(
    logits_fn, *examples, THREATS[0], params=weights(), protocol=OWN,
    folder=tmp_path, on_batch=on_batch,
  )  # fmt: skip
  assert refused[0].returncode != 0
  assert str(os.getpid()) in refused[0].stderr
  assert str(tmp_path) in refused[0].stderr


# ------------------------------------------------------------------- bad input


def bad(message, **changes):
  return pytest.param(changes, message, id=message)


IMAGES, LABELS = make_examples(6)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    bad(r'images lie in \[0, 254', images=IMAGES * 254.0),
    bad(r'images lie in \[-1', images=IMAGES - 1),
    bad('images contain NaN: 6 of 6', images=IMAGES * np.nan),
    bad(r'looks like \[N, C, H, W\]', images=np.zeros((6, 3, 8, 8))),
    bad(r'images\[\.\.\., None\]', images=np.zeros((6, 8, 8))),
    bad('images are int64', images=np.zeros((6, 8, 8, 1), np.int64)),
    bad('images are empty', images=IMAGES[:0], labels=LABELS[:0]),
    bad(r'labels\.argmax', labels=np.eye(4)[LABELS]),
    bad(r'Pass labels\[:, 0\]', labels=LABELS[:, None]),
    bad('labels are float', labels=LABELS.astype(np.float32)),
    bad('5 entries for 6 images', labels=LABELS[:5]),
    bad(r'labels lie in \[0, 7\]', labels=np.array([0, 7, 1, 2, 3, 0])),
    bad(r'labels lie in \[-1', labels=np.array([0, -1, 1, 2, 3, 0])),
    bad('logits_fn is a str', logits_fn='network'),
    bad(r'\[2, 4, 1\]', logits_fn=lambda x: logits_fn(weights(), x)[..., None]),
    bad('returned a tuple', logits_fn=lambda x: (x, x)),
    bad('int32', logits_fn=lambda x: jnp.zeros((len(x), 3), jnp.int32)),
    bad('K >= 2', logits_fn=lambda x: jnp.zeros((len(x), 1))),
    bad('NaN', logits_fn=lambda x: logits_fn(weights(), x) * jnp.nan),
    bad(
      'probabilities',
      logits_fn=lambda x: jax.nn.softmax(logits_fn(weights(), x)),
    ),
    bad('failed on float32 images', logits_fn=lambda x: x @ jnp.ones((3, 4))),
    bad("'pixel_l2' twice", threats=[THREATS[1], THREATS[1]]),
    bad('threats is empty', threats=[]),
    bad('threats=None is not allowed', threats=None),
    bad('must be an attacks.Threat', threats=['pixel_linf']),
    bad("'gauss'", protocol='gauss'),
    bad('protocol is empty', protocol=[]),
    bad("'pgd'", protocol=['pgd']),
    bad('protocol=None is not allowed', protocol=None),
    bad('protocol=<function apgd', protocol=attacks.apgd),
    bad('radii', radii=(2.0, 1.0)),
    bad('radii=2.0 is not allowed', radii=2.0),
    bad('radii=.* is not allowed', radii=('a',)),
    bad('pictures=-1', pictures=-1),
    bad('about .*tolist', about={'mean': np.zeros(3)}),
    bad('batch_size', batch_size=0),
    bad('seed', seed=-1),
    bad('seed', seed=2**40),
    bad('images or labels are not arrays', images=[[1], [1, 2]]),
    bad(r'labels lie in \[4294967296', labels=LABELS.astype(np.int64) + 2**32),
    bad('targets=9', protocol=[attacks.fab(3, targets=9)]),
    bad(
      "name 'union'", threats=attacks.Threat(norm='l2', eps=1.0, name='union')
    ),
    bad(
      'bfloat16|probabilities',
      logits_fn=lambda x: jax.nn.softmax(
        logits_fn(weights(), x).astype(jnp.bfloat16)
      ),
    ),
    bad('colour', threats=attacks.Threat(space='colour', norm='l2', eps=1)),
  ],
)
def test_bad_input_is_refused(changes, message):
  arguments = {
    'logits_fn': lambda x: logits_fn(weights(), x),
    'images': IMAGES,
    'labels': LABELS,
    'threats': THREATS,
    'protocol': OWN,
  } | changes
  with pytest.raises(ValueError, match=message):
    quietly(**arguments)


def test_a_network_in_training_mode_is_refused(examples):
  images, labels = examples
  with_dropout, _ = nnx_network(SHAPE, CLASSES)
  with_dropout.train()
  with pytest.raises(UserError, match=r'model\.eval\(\)'):
    quietly(with_dropout, images, labels, THREATS)

  def with_batch_statistics(x):
    logits = logits_fn(weights(), x)
    return logits - logits[:3].mean(axis=0, keepdims=True)

  with pytest.raises(UserError, match=r'model\.eval\(\)'):
    quietly(with_batch_statistics, images, labels, THREATS)


def linen_in_training():
  class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
      x = nn.Dense(8)(x.reshape(len(x), -1))
      x = nn.BatchNorm(use_running_average=not train)(x)
      return nn.Dense(CLASSES)(nn.relu(x))

  net = Net()
  variables = net.init(jax.random.key(0), jnp.zeros((1, *SHAPE)), train=False)

  def train(variables, x):
    return net.apply(variables, x, train=True, mutable=['batch_stats'])[0]

  return train, variables


def nnx_in_training():
  net = nnx.BatchNorm(SHAPE[0], rngs=nnx.Rngs(0))
  return lambda x: net(x.mean(axis=(2, 3))), None


def nnx_in_training_with_its_state():
  net = nnx.BatchNorm(SHAPE[0], rngs=nnx.Rngs(0))
  graph, state = nnx.split(net)
  return (
    lambda state, x: nnx.merge(graph, state)(x.mean(axis=(2, 3))),
    state,
  )


@pytest.mark.parametrize('count', [1, 2, 7, 30])
@pytest.mark.parametrize(
  'make',
  [linen_in_training, nnx_in_training, nnx_in_training_with_its_state],
)
def test_batch_statistics_are_refused(make, count):
  images, labels = make_examples(count)
  network, params = make()
  with pytest.raises(UserError, match=r'model\.eval\(\)'):
    quietly(network, images, labels, THREATS, params)


def test_rounding_is_no_batch_statistic(examples):
  """Checks that another order of additions passes, even in bfloat16."""

  def rounded(x):
    low = jax.tree.map(lambda array: array.astype(jnp.bfloat16), weights())
    logits = logits_fn(low, x.astype(jnp.bfloat16))
    # As if kernels for even and odd places rounded differently.
    places = jnp.arange(len(x))[:, None] % 2
    return logits * (1 + jnp.finfo(jnp.bfloat16).eps * places)

  quietly(rounded, *examples, THREATS[0], protocol=[attacks.apgd(3)])


def linen_dropout(x):
  return nn.Dropout(0.5, deterministic=False).apply({}, x)


def linen_statistics(x):
  net = nn.BatchNorm(use_running_average=False)
  return net.apply(net.init(jax.random.key(0), x), x)


def haiku_dropout(x):
  haiku = pytest.importorskip('haiku')
  net = haiku.transform(lambda x: haiku.dropout(haiku.next_rng_key(), 0.5, x))
  return net.apply({}, None, x)


def equinox_dropout(x):
  return pytest.importorskip('equinox').nn.Dropout(0.5)(x)


@pytest.mark.parametrize(
  ('network', 'hint'),
  [
    (linen_dropout, 'train=False'),
    (linen_statistics, 'train=False'),
    (haiku_dropout, 'is_training=False'),
    (equinox_dropout, 'inference_mode'),
    (lambda x: np.asarray(x).mean(axis=(1, 2)), 'use jax.numpy'),
    (lambda x: x if x.sum() > 0 else -x, 'use jax.numpy'),
    (lambda x: [x, -x][x.argmax()], 'use jax.numpy'),
    (lambda x: x @ jnp.ones((3, 4)), 'Call it once'),
  ],
)
def test_the_advice_fits_the_error_of_the_network(network, hint):
  with pytest.raises(UserError) as error:
    inputs.check_network(network, None, inputs.Examples(IMAGES, LABELS))
  _, _, advice = str(error.value).partition('). ')
  assert hint in advice
  hints = {'train=False', 'use jax.numpy', 'Call it once'} - {hint}
  if hint in ('inference_mode', 'is_training=False'):
    hints.remove('train=False')
  assert not any(other in advice for other in hints)


def test_radii_may_be_an_array():
  found = inputs.check_radii(np.array([0.5, 2], np.float32))
  assert found == [0.5, 2.0]
  assert all(type(radius) is float for radius in found)


def test_a_randomised_network_is_refused(examples):
  rng = np.random.default_rng(0)

  def randomised(x):
    return logits_fn(weights(), x) + jnp.float32(rng.normal())

  with pytest.raises(UserError, match='differ'):
    quietly(randomised, *examples, THREATS)


def test_the_room_knows_nothing_of_training():
  program = textwrap.dedent(
    """
    import sys
    from mwrobust import evaluation
    for name in sys.modules:
      assert name.split('.')[0] not in (
        'flax', 'orbax', 'optax', 'tensorflow', 'tensorflow_datasets',
        'ml_collections', 'tensorboard',
      ), name
    ours = {n for n in sys.modules if n.startswith('mwrobust.')}
    rooms = {n.split('.')[1] for n in ours}
    assert rooms <= {'attacks', 'evaluation', 'runtime', 'errors'}, rooms
    """
  )
  subprocess.run([sys.executable, '-c', program], check=True, cwd=ROOT)
