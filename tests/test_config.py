import functools
import json
import pathlib

import pytest
from ml_collections import config_flags  # noqa: F401

from mwrobust import attacks
from mwrobust import config as config_lib
from mwrobust.errors import UserError
from mwrobust.evaluation import protocols
from mwrobust.training import policies

CONFIGS = pathlib.Path(__file__).parent.parent / 'configs'


def load(name, variants=''):
  scope = {}
  source = (CONFIGS / f'{name}.py').read_text()
  exec(compile(source, name, 'exec'), scope)
  return scope['get_config'](variants)


@pytest.mark.parametrize(
  ('name', 'variants'),
  [
    ('quickstart', ''),
    ('quickstart', 'runlocal'),
    ('mnist', ''),
    ('mnist', 'released'),
    ('mnist', 'cnn'),
    ('mnist', 'released,cnn'),
    ('mnist', 'maini,cnn'),
    ('mnist', 'balanced'),
    ('mnist', 'balanced,cnn'),
    ('mnist', 'runlocal'),
    ('cifar10', ''),
    ('cifar10', 'released'),
    ('cifar10', 'small'),
    ('cifar10', 'runlocal'),
  ],
)
def test_every_config_is_valid(name, variants):
  config_lib.validate(load(name, variants))


def test_the_order_of_variants_does_not_matter():
  assert load('mnist', 'cnn,released') == load('mnist', 'released,cnn')


def test_the_papers_threats_are_those_of_the_library():
  config = config_lib.preset('paper', 'mnist')
  # The paper clips once, after the inverse DCT.
  pixel, dct = (
    attacks.six_threats(0.4, 1.0, 5.0, clip=clip) for clip in ('inside', 'end')
  )
  expected = (*pixel[:3], *dct[3:])
  assert config_lib.make_threats(config) == expected
  threats, _ = zip(*config_lib.make_pairs(config), strict=True)
  assert threats == expected


def test_the_presets_hold_the_numbers_of_the_paper_and_of_the_code():
  def numbers(config):
    threats, train, optimizer = config.threats, config.train, config.optimizer
    return (
      tuple(threats[f'dct_{norm}'].eps for norm in ('linf', 'l2', 'l1')),
      (config.model.name, config.policy.eta, config.data.validation),
      (train.T, train.r, train.h, train.batch_size, train.ramp),
      (optimizer.name, optimizer.learning_rate, optimizer.drops),
      config.data.augment,
    )

  sgd = ('sgd', 0.1, (100, 150))
  assert numbers(load('cifar10')) == (
    (0.06, 0.1, 7.84),
    ('resnet50', 0.1, 'seed'),
    (40, 5, 3, 128, 0.0),
    sgd,
    True,
  )
  assert numbers(load('cifar10', 'released')) == (
    (8 / 255, 1.0, 2000 / 255),
    ('resnet_v1_50', 0.1, 'last'),
    (40, 5, 3, 128, 0.0),
    sgd,
    True,
  )
  sgd = ('sgd', 1e-3, (30, 45))
  assert numbers(load('mnist')) == (
    (0.4, 1.0, 5.0),
    ('resnet50', 0.1, 'seed'),
    (20, 3, 3, 100, 0.0),
    sgd,
    False,
  )
  assert numbers(load('mnist', 'released')) == (
    (0.2, 2.0, 10.0),
    ('resnet_v1_50', 0.1, 'last'),
    (20, 3, 3, 100, 0.0),
    sgd,
    True,
  )
  for config in (load('mnist'), load('cifar10', 'released')):
    assert (config.optimizer.momentum, config.optimizer.l2) == (0.9, 1e-4)
    pairs = config_lib.make_pairs(config)
    assert all(attack.random_start for _, attack in pairs)
    assert {(threat.norm, attack) for threat, attack in pairs} == {
      ('linf', attacks.pgd(10, percentile=95.0)),
      ('l2', attacks.pgd(10, percentile=95.0)),
      ('l1', attacks.slide(20, percentile=95.0)),
    }
  protocol = protocols.make_protocol('paper', classes=10)
  assert protocol.stages == {
    'linf': {'pgd': attacks.pgd(40)},
    'l2': {'pgd': attacks.pgd(40)},
    'l1': {'pgd': attacks.slide(100, percentile=99.0)},
  }


@pytest.mark.parametrize(
  ('field', 'value', 'suggested'),
  [
    ('algorithm', 'figure4', 'ensemble'),
    ('data.validation', 'first', 'last'),
    ('model.name', 'resnet5', "'resnet50'"),
    ('threats.dct_l1.space', 'dkt', "'dct'"),
    ('threats.dct_l1.space', 'no.where:X', ''),
    ('threats.dct_l1.space', 'json:nope', 'json has no nope'),
    ('threats.dct_l1.space', 'json:loads', 'function'),
    ('threats.dct_l1.norm', 'l3', 'linf'),
    ('threats.dct_l1.clip', 'once', 'inside'),
    ('threats.only', ('dct_l3',), "'dct_l"),
    ('threats.only', ('dct_l1', 'dct_l1'), ''),
    ('threats.dct_l1.attack', {'step': 3}, "'threats.dct_l1.attack.steps'"),
    ('threats.dct_l1.validation_attack', 5, 'dict'),
    ('threats.dct_l1.space', 5, 'module:NAME'),
    ('validation_attack', {'step': 3}, "'validation_attack.steps'"),
    ('attack.restarts', 0, '1'),
    ('attack.rule', 'fgsm', 'apgd'),
    ('attack.steps', 0, '1'),
    ('train.precision', 'float16', 'bfloat16'),
    ('train.budget', -1, '0'),
    ('optimizer.drops', (-1,), '0'),
    ('data.name', 'minst', "'mnist'"),
    ('threats.dct_l2.eps', 0.0, '0'),
    ('method', 'gredy', "'greedy'"),
    ('policy.eta', -1.0, '0'),
    ('optimizer.name', 'sdg', "'sgd'"),
    ('optimizer.schedule', 'linear', 'one_cycle'),
    ('train.h', 21, 'train.T = 20'),
    ('train.T', 0, '1'),
    ('train.r', 0.0, '0'),
    ('eval.protocols', ('papr',), "'paper'"),
    ('eval.protocols', (), ''),
    ('eval.others', ('average',), 'ensemble'),
    ('train.ramp', 1.5, '1'),
    ('attack.percentile', 100.0, ''),
    ('optimizer.learning_rate', float('nan'), '0'),
    ('seed', -1, '0'),
    ('policy.decay', 0.0, '0'),
    ('eval.split', 'train', 'validation'),
  ],
)
def test_a_bad_value_is_named_and_another_suggested(field, value, suggested):
  config = load('mnist')
  group, _, name = field.rpartition('.')
  target = config[group] if group else config
  with target.unlocked(), target.ignore_type():
    target[name] = value
  with pytest.raises(UserError) as caught:
    config_lib.validate(config)
  said = str(caught.value)
  # An attack names its arguments, which are the fields of one group.
  assert name in said
  first = next(iter(value), '') if isinstance(value, tuple | dict) else value
  assert str(first) in said
  assert suggested in said.replace(str(first), '', 1)


def test_what_is_shared_names_no_folder_of_this_machine():
  config = load('mnist')
  config.data.dir = '/home/me/mnist'
  shared = config_lib.to_share(config)
  assert shared['data'].pop('dir') == ''
  ours = json.loads(config.to_json())
  assert ours['data'].pop('dir') == '/home/me/mnist'
  assert shared == ours


def test_unknown_missing_and_mistyped_fields_are_named():
  config = load('mnist')
  config.train.epochs = 3
  with pytest.raises(UserError, match=r'train\.epochs.*train\.T x train\.r'):
    config_lib.validate(config)
  config = load('mnist')
  del config.train['ramp']
  with pytest.raises(UserError, match=r'train\.ramp is missing'):
    config_lib.validate(config)
  config = load('mnist')
  with config.ignore_type():
    config.train.T = '20'
  with pytest.raises(UserError, match=r"train\.T = '20'.*expected int"):
    config_lib.validate(config)


def test_the_single_threat_must_be_one_of_the_threats():
  config = load('mnist')
  config.policy.threat = 'pixel_l3'
  config_lib.validate(config)
  config.method = 'single'
  with pytest.raises(UserError, match=r"policy\.threat = 'pixel_l3'.*Did you"):
    config_lib.validate(config)


def test_unknown_variants_are_refused():
  with pytest.raises(UserError, match=r"'relased'.*Did you mean 'released'"):
    load('mnist', 'relased')


def test_eta_may_follow_a_schedule():
  config = load('mnist')
  config.policy.eta_schedule = 'inverse_sqrt'
  policy = config_lib.make_policy(config)
  state = policy.init()
  for t, eta in enumerate((0.1, 0.1 / 2**0.5, 0.1 / 3**0.5)):
    before = state.log_weights
    losses = 1.0 * (before == before).cumsum()
    state = policy.update(state, policies.Validation(losses, 0 * losses))
    gained = (state.log_weights - before)[-1] - (state.log_weights - before)[0]
    assert gained == pytest.approx(5 * eta, rel=1e-5), t


def test_threats_are_a_table_of_any_number():
  config = load('mnist')
  config.threats.only = ('dct_l1', 'pixel_linf')
  config.threats.wide = {
    'space': f'{__name__}:FLIP',
    'norm': 'l2',
    'eps': 3.0,
    'clip': 'strict',
    'attack': {'steps': 7},
  }
  config_lib.validate(config)
  names = [threat.name for threat in config_lib.make_threats(config)]
  assert names == ['pixel_linf', 'dct_l1']
  config.threats.only = ('wide',)
  config.validation_attack = {'steps': 30}
  config_lib.validate(config)
  ((threat, attack),) = config_lib.make_pairs(config)
  assert (threat.space, threat.eps, attack.steps) == (FLIP, 3.0, 7)
  ((_, attack),) = config_lib.make_pairs(config, 'validation')
  assert attack.steps == 30
  config.threats.wide.validation_attack = {'rule': 'fab', 'targets': 2}
  config_lib.validate(config)
  ((_, attack),) = config_lib.make_pairs(config, 'validation')
  assert attack == attacks.fab(30, targets=2)


def test_a_threat_needs_a_space_a_norm_and_a_radius():
  config = load('mnist')
  config.threats.wide = {'space': 'pixel', 'norm': 'l2', 'eps': 3.0}
  config.threats.only = ('wide',)
  config_lib.validate(config)
  ((threat, attack),) = config_lib.make_pairs(config)
  assert threat.clip == 'inside'
  assert attack == attacks.pgd(config.attack.steps, percentile=95.0)
  for field in ('space', 'norm', 'eps'):
    lacking = config.copy_and_resolve_references()
    del lacking.threats.wide[field]
    with pytest.raises(UserError, match=rf'threats\.wide\.{field} is missing'):
      config_lib.validate(lacking)


@pytest.mark.parametrize(
  ('group', 'name', 'value'),
  [
    ('threats.dct_l1.attack', 'step_size', '1/4'),
    ('threats.dct_l1.attack', 'step_size', -1.0),
    ('threats.dct_l1.attack', 'radii', 1),
    ('threats.dct_l1.attack', 'restarts', 0),
    ('validation_attack', 'steps', 'x'),
    ('validation_attack', 'rule', 'fgsm'),
    ('validation_attack', 'targets', -1),
  ],
)
def test_a_bad_change_of_the_attack_is_named(group, name, value):
  config = load('mnist')
  config_lib.get(config, group)[name] = value
  with pytest.raises(UserError) as caught:
    config_lib.validate(config)
  said = str(caught.value).replace(' ', '')
  assert said.startswith(f'{group}.{name}={value!r}')


def test_near_images_are_not_compared_with_high_losses():
  config = load('mnist')
  fab = {'rule': 'fab', 'targets': 3}
  config.threats.dct_l1.validation_attack = fab
  with pytest.raises(UserError, match=r"policy\.signal = 'loss'"):
    config_lib.validate(config)
  config.policy.signal = 'error'
  config_lib.validate(config)
  config_lib.check_targets(config, num_classes=4)
  with pytest.raises(
    UserError, match=r'threats\.dct_l1\.validation_attack\.targets = 3'
  ):
    config_lib.check_targets(config, num_classes=3)
  config.threats.dct_l1.validation_attack = {'rule': 'fab'}
  with pytest.raises(
    UserError, match=r'^threats\.dct_l1\.validation_attack\.targets=0'
  ):
    config_lib.validate(config)


def test_msd_climbs():
  config = load('mnist')
  config.method, config.attack.rule, config.attack.targets = 'msd', 'fab', 1
  with pytest.raises(UserError, match=r"attack\.rule = 'fab'"):
    config_lib.validate(config)


def test_an_attack_may_start_more_than_once():
  config = load('mnist')
  config.attack.restarts = 3
  config.threats.dct_l1.attack.restarts = 2
  config_lib.validate(config)
  found = {t.name: a.tries for t, a in config_lib.make_pairs(config)}
  assert found.pop('dct_l1') == 2
  assert {*found.values()} == {3}


FLIP = attacks.Space(
  'flip', lambda x: x[::-1], lambda z: z[::-1], orthonormal=True
)


@pytest.mark.parametrize('variants', ['cnn', 'balanced,cnn'])
def test_the_attack_of_training_may_differ_by_threat(variants):
  config = load('mnist', variants)
  found = {t.name: attack for t, attack in config_lib.make_pairs(config)}
  highest = functools.partial(attacks.apgd, result='highest')
  assert found['pixel_linf'] == highest(10, radii=(1.0,))
  if variants == 'cnn':
    assert found['dct_linf'] == attacks.momentum(20, radii=(2.0, 1.0))
    assert found['dct_l2'] == highest(25)
    assert found['dct_l1'] == highest(30)
  else:  # In shrinking balls.
    sparse = attacks.momentum(30, radii=(3.0, 1.0), percentile=99.8)
    assert found['dct_linf'] == found['dct_l2'] == attacks.momentum(20)
    assert found['dct_l1'] == sparse
  assert {t.clip for t in config_lib.make_threats(config)} == {'inside'}


@pytest.mark.parametrize(('preset', 'data'), config_lib.EPS)
def test_a_preset_has_a_radius_for_each_space_and_norm(preset, data):
  threats = config_lib.make_threats(config_lib.preset(preset, data))
  assert {(t.space, t.norm): t.eps for t in threats} == {
    (space, norm): eps
    for space, radii in config_lib.EPS[preset, data].items()
    for norm, eps in zip(('linf', 'l2', 'l1'), radii, strict=True)
  }


def test_balanced_has_six_threats_on_the_clipped_image():
  config = load('mnist', 'balanced,cnn')
  assert config.preset == 'balanced'
  assert len(config_lib.make_threats(config)) == 6
  assert {t.clip for t in config_lib.make_threats(config)} == {'inside'}


def test_maini_has_three_threats_in_pixels():
  config = load('mnist', 'maini')
  threats = config_lib.make_threats(config)
  assert threats == attacks.six_threats(0.3, 2.0, 10.0)[:3]
  assert config.model.name == 'maini'
  config_lib.validate(config)


def test_a_config_survives_its_file(tmp_path):
  config = load('mnist', 'cnn')
  (tmp_path / 'config.json').write_text(config.to_json())
  assert config_lib.load(tmp_path) == config
