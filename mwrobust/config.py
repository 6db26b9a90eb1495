"""The config of a run: every field, the presets, and the allowed values.

Config files (`configs/*.py`) start from `preset(name, data)` and change what
differs. Every result names its preset:

  paper      the numbers of the paper, or usual ones where it gives none
  released   the numbers of the authors' released code, where they differ
  maini      pixel linf 0.3, l2 2, l1 10 on MNIST, as in multi-norm training
  balanced   six equally hard threats on MNIST, each with its own radius
"""

import fnmatch
import json
import math
import numbers
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_collections
from etils import epath

from mwrobust import attacks, data
from mwrobust.attacks import norms, rules
from mwrobust.attacks.climb import SHRINKING
from mwrobust.errors import UserError, check_choice, did_you_mean
from mwrobust.evaluation import PROTOCOLS
from mwrobust.importing import import_object
from mwrobust.training import policies

ConfigDict = ml_collections.ConfigDict

# The radii of linf, l2 and l1, by preset and data set, then by space.
EPS = {
  ('paper', 'mnist'): {'pixel': (0.4, 1.0, 5.0), 'dct': (0.4, 1.0, 5.0)},
  ('paper', 'cifar10'): {'pixel': (0.06, 0.1, 7.84), 'dct': (0.06, 0.1, 7.84)},
  ('released', 'mnist'): {'pixel': (0.2, 2.0, 10.0), 'dct': (0.2, 2.0, 10.0)},
  ('released', 'cifar10'): {
    'pixel': (8 / 255, 1.0, 2000 / 255),
    'dct': (8 / 255, 1.0, 2000 / 255),
  },
  ('maini', 'mnist'): {'pixel': (0.3, 2.0, 10.0)},
  # By `python -m mwrobust.search --radii=...`, see results/README.md: a network
  # that is trained against one threat alone keeps about 80 %.
  ('balanced', 'mnist'): {
    'pixel': (0.4, 1.75, 9.4),
    'dct': (0.107, 1.75, 9.3),
  },
}
# These do not change training, so they may differ between two calls on one
# workdir. A name that ends with a dot means all fields below it.
FREE_FIELDS = ('eval.', 'train.check_examples', 'train.log_every')
# A search tunes these for each method, besides those of its policy.
TUNED_FIELDS = ('optimizer.learning_rate', 'train.ramp')
# The groups in which a threat's own attacks differ.
_ATTACKS = ('attack', 'validation_attack')
REQUIRED_OF_THREATS = ('space', 'norm', 'eps')
THREAT_FIELDS = (*REQUIRED_OF_THREATS, 'clip', *_ATTACKS)
# How the training attack differs from `config.attack`, by space and norm.
# Chosen by the loss they reach on trained networks compared to 100 steps of
# APGD: pixel linf is hardly masked, l2 and l1 need more steps, and momentum is
# best for dct linf. `MASKED_ATTACKS` are better where gradients are masked.
TRAINING_ATTACKS = {
  ('pixel', 'linf'): {'steps': 10, 'radii': (1.0,)},
  ('pixel', 'l2'): {'steps': 25},
  ('pixel', 'l1'): {'steps': 40},
  ('dct', 'linf'): {'rule': 'momentum', 'radii': (2.0, 1.0)},
  ('dct', 'l2'): {'steps': 25},
  ('dct', 'l1'): {'steps': 30},
}
# A network that is also trained against a large pixel linf ignores small
# changes of a pixel, and so misdirects dense steps from near the image: they
# have to begin far away, in balls that shrink.
_SHRINK = {'rule': 'momentum', 'radii': SHRINKING}
MASKED_ATTACKS = {
  ('pixel', 'l2'): _SHRINK,
  ('pixel', 'l1'): {'steps': 40, 'radii': (6.0, 3.8, 2.4, 1.6, 1.0)},
  ('dct', 'linf'): _SHRINK,
  ('dct', 'l2'): _SHRINK,
  ('dct', 'l1'): {
    'rule': 'momentum',
    'steps': 30,
    'radii': (3.0, 1.0),
    'percentile': 99.8,
  },
}
# There, FAB sees more than climbs do under dct l1, and less under the others.
# It looks for the nearest adversarial image, not for the highest loss, so the
# policy has to compare errors.
MASKED_VALIDATION = {('dct', 'l1'): {'rule': 'fab', 'steps': 20, 'targets': 3}}


def base() -> ConfigDict:
  """Returns every field, with the values that all presets share."""
  config = ConfigDict()
  config.preset = ''  # The name of the preset; results are labelled with it.
  config.seed = 0  # The seed of everything random.
  # 'scalable' (Figure 3): the output is the average of the last h parameters.
  # 'ensemble' (Figure 2): the output is the mean softmax of all T networks; for
  # small networks, because it holds T of them at once.
  config.algorithm = 'scalable'
  # How the threat of a mini batch is picked: multiplicative_weights, greedy,
  # round_robin, uniform, single, natural, e_at, ucb. Or all threats at once:
  # max, avg, msd.
  config.method = 'multiplicative_weights'

  config.data = data_fields = ConfigDict()
  # mnist, cifar10, mnist5k, tfds:NAME, or your own .npz file or folder.
  data_fields.name = 'mnist'
  # Folder of the published raw files; '' for tensorflow-datasets.
  data_fields.dir = ''
  data_fields.validation = 'seed'  # Chooses 10 % of train; or the 'last' 10 %.
  data_fields.augment = False  # Random crops of the padded image, and flips.
  data_fields.train_examples = 0  # Use only the first N; 0 for all.

  config.model = model = ConfigDict()
  model.name = 'resnet50'  # See mwrobust/models; or your own module:Class.
  model.options = ConfigDict()  # The model's own fields, such as width.

  # By name: space, norm, eps and clip (see mwrobust.attacks.Threat), and how
  # the attacks of training and of validation differ; clip is 'inside' and the
  # attacks are the same unless they are given. A space of your own is
  # module:NAME.
  config.threats = ConfigDict()
  config.threats.only = ()  # The names of the threats to use; () for all.

  # For training and validation. The method msd uses only steps, step_size and
  # percentile.
  config.attack = attack = ConfigDict()
  # How a step is made: 'apgd' adapts its size, 'momentum' is PGD with momentum
  # and decaying steps, 'pgd' is plain; see mwrobust.attacks.Ascent. Or 'fab',
  # which uses only steps, targets and restarts; see mwrobust.attacks.Fab.
  attack.rule = 'apgd'
  attack.steps = 20
  attack.step_size = 0.0  # In multiples of eps; 0 for the rule's default.
  attack.radii = (3.0, 2.0, 1.0)  # The balls to climb in, one after the other.
  attack.loss = 'ce'  # Or 'margin', 'dlr', 'probability_margin'.
  attack.percentile = 99.0  # l1: a step of pgd or momentum moves the top 1 %.
  attack.random_start = True
  attack.restarts = 1  # The number of random starts.
  attack.targets = 0  # Aim at the N likeliest wrong classes, one by one.
  config.validation_attack = ConfigDict()  # How validation differs.

  config.policy = policy = ConfigDict()  # Each method uses its own fields.
  policy.eta = 0.1  # multiplicative_weights: the paper's scaling factor.
  policy.eta_schedule = 'constant'  # Or 'inverse_sqrt': eta / sqrt(t).
  # multiplicative_weights: the power of the old weights in an update, in
  # (0, 1]. The paper's is 1; below it, older losses are forgotten.
  policy.memory = 1.0
  # What multiplicative_weights, greedy and ucb follow; or 'error', in [0, 1].
  policy.signal = 'loss'
  policy.threat = 'pixel_linf'  # single: the threat.
  policy.exploration = 1.0  # ucb: the weight of the exploration bonus.
  policy.decay = 0.98  # e_at: the decay of older mini batches.

  config.optimizer = optimizer = ConfigDict()
  optimizer.name = 'sgd'  # Or 'adam', 'adamw'.
  optimizer.learning_rate = 0.1  # The highest of the schedule.
  # Or 'one_cycle' (cosine, up and down), 'cosine'.
  optimizer.schedule = 'steps'
  # steps: epochs after which it is divided by 10. With train.budget, each is a
  # share of train.T x train.r, and the drop comes at that share of the budget.
  optimizer.drops = (100, 150)
  optimizer.momentum = 0.9  # sgd
  optimizer.l2 = 1e-4  # Times the sum of squares of the convolution kernels.
  optimizer.weight_decay = 1e-4  # adamw

  config.train = train = ConfigDict()
  train.T = 40  # The number of outer steps.
  train.r = 5.0  # Epochs per outer step, may be a fraction; then an update.
  # Gradient evaluations (one image once forward and back) of the whole
  # training, including its validations, instead of r; 0 to use r. Every method
  # spends it up to one mini batch, so that methods can be compared.
  train.budget = 0
  train.h = 3  # The number of last parameters to average.
  train.batch_size = 128
  train.ramp = 0.0  # The share of training in which the radii grow from 0.
  train.validation_examples = 0  # Images to estimate the losses on; 0 for all.
  # On the first N of them, a stronger attack checks after every outer
  # step whether the network fools the training attack; 0 for no check.
  train.check_examples = 50
  train.precision = 'float32'  # Or 'bfloat16', for the network only.
  train.log_every = 100  # The number of steps between two rows of metrics.

  config.eval = evaluation = ConfigDict()
  evaluation.split = 'test'  # Or 'validation', to choose settings.
  evaluation.examples = 0  # Use only the first N images; 0 for all.
  evaluation.batch_size = 250
  # See mwrobust/evaluation/protocols.py; the appendix of the paper uses
  # 'paper-20', and 'fast' takes a tenth of the time of 'standard'.
  evaluation.protocols = ('paper', 'standard')
  # Networks to evaluate besides the output, the average of the last h: the
  # 'last' alone, the 'ensemble' of the last h, and the average 'recalibrated'
  # with new BatchNorm statistics.
  evaluation.others = ('last', 'ensemble')
  # Images for the output's accuracy at growing radii; 0 to skip it.
  evaluation.curve_examples = 250
  return config


def preset(name: str, data: str) -> ConfigDict:
  """Returns the preset's numbers for a data set."""
  check_choice('preset', name, dict.fromkeys(preset for preset, _ in EPS))
  check_choice('data.name', data, [of for preset, of in EPS if preset == name])
  config = base()
  config.preset = name
  config.data.name = data
  set_threats(config, EPS[name, data])
  if data == 'mnist':
    config.train.T = 20
    config.train.r = 3.0
    config.train.batch_size = 100
    config.optimizer.learning_rate = 1e-3
    config.optimizer.drops = (30, 45)
  if name in ('paper', 'released'):
    use_papers_attack(config)
    config.data.augment = data == 'cifar10'
    for fields in threat_table(config).values():
      if fields.space == 'dct' or name == 'released':
        fields.clip = 'end'
  if name == 'released':
    config.model.name = 'resnet_v1_50'
    config.data.validation = 'last'
    config.data.augment = True
  if name in ('maini', 'balanced'):
    config.model.name = 'maini'
    config.optimizer.name = 'adam'
    config.optimizer.schedule = 'one_cycle'
    config.optimizer.l2 = 0.0
    config.train.r = 0.75
    use_strong_attack(config)
  return config


def set_threats(
  config: ConfigDict, radii: Mapping[str, tuple[float, float, float]]
) -> None:
  """Sets the threats of a config to linf, l2 and l1 in each space."""
  config.threats = ConfigDict({'only': ()})
  for space, of_norms in radii.items():
    for norm, eps in zip(norms.NORMS, of_norms, strict=True):
      config.threats[f'{space}_{norm}'] = ConfigDict(
        {
          'space': space,
          'norm': norm,
          'eps': float(eps),
          'clip': 'inside',
          'attack': {},
          'validation_attack': {},
        }
      )


def use_preset(config: ConfigDict, name: str, data: str) -> None:
  """Replaces all fields of a config by those of a preset."""
  config.threats = ConfigDict()
  config.update(preset(name, data))


def use_strong_attack(config: ConfigDict) -> None:
  """Trains with attacks on the clipped image that are harder to fool."""
  config.attack = base().attack
  training, validation = TRAINING_ATTACKS, {}
  if config.preset == 'balanced':
    training, validation = training | MASKED_ATTACKS, MASKED_VALIDATION
    config.policy.signal = 'error'
  for fields in threat_table(config).values():
    of = fields.space, fields.norm
    fields.clip = 'inside'
    fields.attack = ConfigDict(training.get(of, {}))
    fields.validation_attack = ConfigDict(validation.get(of, {}))


def use_papers_attack(config: ConfigDict) -> None:
  """Trains with the paper's attacks: ten steps of PGD, 20 of SLIDE for l1."""
  config.attack.rule = 'pgd'
  config.attack.steps = 10
  config.attack.radii = (1.0,)
  config.attack.percentile = 95.0
  for fields in threat_table(config).values():
    fields.attack = ConfigDict({'steps': 20} if fields.norm == 'l1' else {})


def use_cnn(config: ConfigDict) -> None:
  """Sets a network and an optimizer that suit CPUs."""
  config.model.name = 'cnn'
  config.optimizer.name = 'adam'
  config.optimizer.learning_rate = 3e-3
  config.optimizer.schedule = 'one_cycle'
  config.optimizer.l2 = 0.0


def flatten(config: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Returns a tree of fields as `{'train.h': 3, ...}`."""
  flat = {}
  for name, value in config.items():
    if isinstance(value, Mapping | ConfigDict):
      flat |= flatten(value, f'{prefix}{name}.')
    else:
      flat[prefix + name] = value
  return flat


def check_field(field: str) -> None:
  """Raises a UserError if the config has no such field."""
  match field.split('.'):
    case ['threats', threat, _, *_]:
      pass
    case _:
      threat = 'NAME'
  attack = list(base().attack)
  fields = [
    *flatten(base()),
    *(f'threats.{threat}.{name}' for name in THREAT_FIELDS),
    *(f'threats.{threat}.{own}.{name}' for own in _ATTACKS for name in attack),
    *(f'validation_attack.{name}' for name in attack),
  ]
  if field in fields or field.startswith('model.options.'):
    return
  if field in ('epochs', 'train.epochs'):
    raise UserError(
      f'There is no config.{field}: the epochs are train.T x train.r, or '
      'follow from train.budget.'
    )
  names = _names_in(f'{field}.', fields)
  if names:
    raise UserError(
      f'config.{field} is a group of fields: set one of '
      f'{", ".join(f"{field}.{name}" for name in names)}.'
    )
  group, _, name = field.rpartition('.')
  if group == 'model' and name not in fields:
    raise UserError(
      f'There is no config.{field}. config.model.* can be: name, options.NAME. '
      f"Fields of the network are options: 'model.options.{name}'."
    )
  same = [f for f in fields if f.lower().rpartition('.')[2] == name.lower()]
  hint = did_you_mean(field, fields)
  if same:
    hint = f' Did you mean {" or ".join(map(repr, same))}?'
  prefix = f'{group}.' if _names_in(f'{group}.', fields) else ''
  raise UserError(
    f'There is no config.{field}.{hint} '
    f'config.{prefix}* can be: {", ".join(_names_in(prefix, fields))}.'
  )


def _names_in(prefix: str, fields: Iterable[str]) -> list[str]:
  """Returns the names after a prefix, up to the next dot."""
  found = [f.removeprefix(prefix) for f in fields if f.startswith(prefix)]
  return list(dict.fromkeys(name.partition('.')[0] for name in found))


def attack_default(field: str) -> Any:
  """Returns the default of a field that changes `attack`, else None.

  >>> attack_default('threats.dct_l1.attack.steps')
  20
  """
  match field.split('.'):
    case ['validation_attack', name]:
      return base().attack.get(name)
    case ['threats', _, own, name] if own in _ATTACKS:
      return base().attack.get(name)
  return None


def apply_variants(
  config: ConfigDict,
  words: str,
  variants: dict[str, Callable[[ConfigDict], None]],
) -> ConfigDict:
  """Applies `file.py:word,word` variants; refuses unknown ones.

  Args:
    config: changed in place, and returned.
    words: comma-separated, in any order; '' for none.
    variants: the change that each word makes, in the order of application.
  """
  words = list(filter(None, words.split(',')))
  for word in words:
    check_choice('variant', word, variants)
  for word, change in variants.items():
    if word in words:
      change(config)
  return config


def load(workdir: str | os.PathLike) -> ConfigDict:
  """Returns the config of the run in a workdir, from its config.json."""
  path = epath.Path(workdir, 'config.json')
  try:
    fields = json.loads(path.read_text())
    config = base()
    config.update(_with_tuples(fields))
    return config
  except (FileNotFoundError, NotADirectoryError) as error:
    raise UserError(
      f'{workdir} holds no run: it has no config.json. Train first, or name '
      'the --workdir of a run.'
    ) from error
  except (OSError, ValueError, AttributeError, TypeError) as error:
    raise UserError(
      f'{path} is not a config ({error}): choose another --workdir, or fix it.'
    ) from error


def to_share(config: ConfigDict) -> dict[str, Any]:
  """Returns the fields as in JSON, without machine-specific paths."""
  fields = json.loads(config.to_json())
  fields['data']['dir'] = ''
  if os.path.isabs(fields['data']['name']):
    fields['data']['name'] = os.path.basename(fields['data']['name'])
  return fields


def _with_tuples(value: Any) -> Any:
  if isinstance(value, dict):
    return {name: _with_tuples(item) for name, item in value.items()}
  return tuple(value) if isinstance(value, list) else value


# ------------------------------------------------------- what the fields make


def threat_table(config: ConfigDict) -> dict[str, ConfigDict]:
  """Returns the fields of the threats in use, by name.

  Pixels come first, then linf, l2 and l1, as in the paper.
  """
  table = {
    name: fields for name, fields in config.threats.items() if name != 'only'
  }

  def place(name: str) -> tuple:
    fields = table[name]
    norm = list(norms.NORMS).index(fields.norm)
    return fields.space != 'pixel', fields.space, norm, fields.eps, name

  chosen = config.threats.only or table
  return {name: table[name] for name in sorted(chosen, key=place)}


def make_threats(config: ConfigDict) -> tuple[attacks.Threat, ...]:
  """Makes the threats of the config's table."""
  threats = []
  for name, fields in threat_table(config).items():
    space = _load_space(fields.space, f'threats.{name}.space')
    try:
      threats.append(
        attacks.Threat(
          space=space,
          norm=fields.norm,
          eps=float(fields.eps),
          clip=fields.get('clip', 'inside'),
          name=name,
        )
      )
    except ValueError as error:  # It begins with the name of the field.
      raise UserError(f'threats.{name}.{error}') from error
  return tuple(threats)


def _load_space(space: str, field: str) -> str | attacks.Space:
  """Returns the name of a space, or the space itself for `module:NAME`."""
  if ':' not in space:
    check_choice(field, space, [*attacks.SPACES, 'module:NAME'])
    return space
  return import_object(
    space,
    f'{field} = {space!r}',
    'my_spaces:FOURIER',
    'an attacks.Space',
    lambda found: isinstance(found, attacks.Space),
  )


def make_pairs(
  config: ConfigDict, phase: str = 'train'
) -> tuple[tuple[attacks.Threat, attacks.Attack], ...]:
  """Returns each threat with its attack in `'train'` or `'validation'`."""
  pairs = []
  for threat in make_threats(config):
    fields, groups = _attack_fields(config, threat.name, phase)
    try:
      check_choice('rule', fields['rule'], (*rules.RULES, 'fab'))
      pairs.append((threat, _make_attack(fields, threat.eps)))
    except ValueError as error:  # It begins with the name of the field.
      name = re.match(r'\w+', str(error))[0]
      raise UserError(f'{groups[name]}{error}') from error
  return tuple(pairs)


def check_targets(config: ConfigDict, num_classes: int) -> None:
  """Raises a UserError if an attack aims at more classes than are wrong."""
  for phase in ('train', 'validation'):
    for name in threat_table(config):
      fields, groups = _attack_fields(config, name, phase)
      if fields['targets'] >= num_classes:
        raise UserError(
          f'{groups["targets"]}targets = {fields["targets"]} is not allowed: '
          f'the data has {num_classes} classes, so at most {num_classes - 1}.'
        )


def _attack_fields(
  config: ConfigDict, threat: str, phase: str
) -> tuple[dict[str, Any], dict[str, str]]:
  """Returns the fields of an attack, and the group that each comes from."""
  own = threat_table(config)[threat]
  groups = {'attack.': config.attack}
  groups[f'threats.{threat}.attack.'] = own.get('attack', {})
  if phase == 'validation':
    name = 'validation_attack'
    groups[f'{name}.'] = config.validation_attack
    groups[f'threats.{threat}.{name}.'] = own.get(name, {})
  fields, source = {}, {}
  for group, changes in groups.items():
    fields |= changes
    source |= dict.fromkeys(changes, group)
    if changes.get('rule') == 'fab':  # Only it needs targets.
      source['targets'] = group
  return fields, source


def _make_attack(fields: Mapping[str, Any], eps: float) -> attacks.Attack:
  """Makes the attack of the fields of `config.attack`."""
  if fields['rule'] == 'fab':
    targets, restarts = fields['targets'], fields['restarts']
    return attacks.fab(fields['steps'], targets=targets, restarts=restarts)
  size = fields['step_size']
  return attacks.Ascent(
    **{name: value for name, value in fields.items() if name != 'step_size'},
    step_size=size * eps if size else None,
    result='highest' if fields['rule'] == 'apgd' else 'last',
  )


METHODS = {  # By method: its adversary and its policy.
  'multiplicative_weights': ('one', 'multiplicative_weights'),
  'greedy': ('one', 'greedy'),
  'round_robin': ('one', 'round_robin'),
  'uniform': ('one', 'uniform'),
  'single': ('one', 'single'),
  'e_at': ('one', 'e_at'),
  'ucb': ('one', 'ucb'),
  'natural': ('none', 'natural'),
  'max': ('max', 'uniform'),
  'avg': ('avg', 'uniform'),
  'msd': ('msd', 'uniform'),
}


def make_policy(config: ConfigDict) -> policies.Policy:
  """Makes the policy of the config's method."""
  names = list(threat_table(config))
  eta = config.policy.eta
  if config.policy.eta_schedule == 'inverse_sqrt':
    schedule = lambda t: eta / (t + 1.0) ** 0.5  # noqa: E731
  else:
    schedule = eta
  _, policy = METHODS[config.method]
  is_single = config.method == 'single'
  return policies.make(
    policy,
    len(names),
    eta=schedule,
    signal=config.policy.signal,
    memory=config.policy.memory,
    index=names.index(config.policy.threat) if is_single else None,
    exploration=config.policy.exploration,
    decay=config.policy.decay,
  )


def window(config: ConfigDict) -> int:
  """Returns the number of parameters in the output: the last h, or all T."""
  all_are_kept = config.algorithm == 'ensemble'  # Figure 2, against Figure 3.
  return config.train.T if all_are_kept else config.train.h


def network_name(kind: str, config: ConfigDict) -> str:
  """Returns the name of a network: such as `'h=3 average'`, or `'h=1'`."""
  h = window(config)
  return 'h=1' if kind == 'last' or h == 1 else f'h={h} {kind}'


def describe(config: ConfigDict, shared: bool = False) -> str:
  """Describes a run in a few lines, or what the runs of a table share."""
  train = config.train
  threats = ', '.join(
    f'{name} {fields.eps:.4g}' for name, fields in threat_table(config).items()
  )
  own = '' if shared else f', method {config.method}, seed {config.seed}'
  length = f'r = {train.r:g} epochs each'
  cost = f'for the same {train.T * train.r:g} epochs, not at equal cost'
  if train.budget:
    length = f'a budget of {train.budget:,} gradient evaluations'
    cost = f'with the same budget of {train.budget:,} gradient evaluations'
  equal = f'\nEvery method was trained {cost}.' if shared else ''
  lines = (
    f'Data {config.data.name}, network {config.model.name}, preset '
    f'{config.preset}{own}.\n'
    f'Threats: {threats}.\n'
    f'T = {train.T} outer steps, {length}, batches of {train.batch_size}, '
    f'h = {train.h}.{equal}'
  ).splitlines()
  return '\n'.join(
    textwrap.fill(line, 80, break_long_words=False) for line in lines
  )


# ------------------------------------------------------------------- validation


_CHOICES = {
  'algorithm': ('scalable', 'ensemble'),
  'method': tuple(METHODS),
  'data.validation': ('seed', 'last'),
  'policy.eta_schedule': ('constant', 'inverse_sqrt'),
  'policy.signal': ('loss', 'error'),
  'optimizer.name': ('sgd', 'adam', 'adamw'),
  'optimizer.schedule': ('steps', 'one_cycle', 'cosine'),
  'train.precision': ('float32', 'bfloat16'),
  'eval.split': ('test', 'validation'),
}
_AT_LEAST_1 = 'at least 1', lambda value: value >= 1
_AT_LEAST_0 = 'at least 0', lambda value: value >= 0
_POSITIVE = 'more than 0', lambda value: value > 0
_SHARE = 'more than 0 and at most 1', lambda value: 0 < value <= 1
_RANGES = {  # A * stands for any text.
  'seed': ('at least 0 and less than 2**32', lambda seed: 0 <= seed < 2**32),
  'data.train_examples': _AT_LEAST_0,
  'threats.*.eps': _POSITIVE,
  '*attack.step_size': _AT_LEAST_0,
  'policy.eta': _POSITIVE,
  'policy.exploration': _POSITIVE,
  'policy.decay': _SHARE,
  'policy.memory': _SHARE,
  'optimizer.learning_rate': _POSITIVE,
  'optimizer.momentum': _AT_LEAST_0,
  'optimizer.l2': _AT_LEAST_0,
  'optimizer.weight_decay': _AT_LEAST_0,
  'train.T': _AT_LEAST_1,
  'train.r': _POSITIVE,
  'train.budget': _AT_LEAST_0,
  'train.h': _AT_LEAST_1,
  'train.batch_size': _AT_LEAST_1,
  'train.ramp': ('at least 0 and at most 1', lambda value: 0 <= value <= 1),
  'train.validation_examples': _AT_LEAST_0,
  'train.check_examples': _AT_LEAST_0,
  'train.log_every': _AT_LEAST_1,
  'eval.examples': _AT_LEAST_0,
  'eval.batch_size': _AT_LEAST_1,
  'eval.curve_examples': _AT_LEAST_0,
}


def validate(config: ConfigDict) -> None:
  """Raises a UserError that names the first wrong field."""
  from mwrobust import models  # Imports Flax, which reports do not need.

  _check_fields(config)
  data.check_name(config.data.name, config.data.dir)
  for option in ('num_classes', 'mean', 'std', 'name'):
    if option in config.model.options:
      raise UserError(
        f'model.options.{option} = {config.model.options[option]!r} is not '
        'allowed: it follows from the data and model.name.'
      )
  models.create(  # Checks its name and the names of its options.
    config.model.name,
    num_classes=10,
    mean=(0.5,),
    std=(0.5,),
    **config.model.options,
  )
  for field, allowed in _CHOICES.items():
    check_choice(field, get(config, field), allowed)
  for field, value in flatten(config).items():
    for pattern, (allowed, holds) in _RANGES.items():
      if fnmatch.fnmatch(field, pattern) and not (
        same_kind(value, 0.0) and math.isfinite(value) and holds(value)
      ):
        raise UserError(
          f'{field} = {value!r} is not allowed: must be finite and {allowed}.'
        )
  if not all(isinstance(e, int) and e > 0 for e in config.optimizer.drops):
    raise UserError(
      f'optimizer.drops = {config.optimizer.drops!r} is not allowed: must be '
      'epochs, integers above 0.'
    )
  _check_threats(config)
  if config.train.h > config.train.T:
    raise UserError(
      f'train.h = {config.train.h} is more than train.T = {config.train.T}, '
      'the number of parameters to average. Lower h or raise T.'
    )
  if not config.eval.protocols:
    raise UserError('eval.protocols must name at least one protocol.')
  for protocol in config.eval.protocols:
    check_choice('eval.protocols', protocol, PROTOCOLS)
  for network in config.eval.others:
    check_choice('eval.others', network, ('last', 'ensemble', 'recalibrated'))
  if 'recalibrated' in config.eval.others and (
    config.train.h == 1 or config.algorithm == 'ensemble'
  ):
    raise UserError(
      "eval.others has 'recalibrated', the average of the last h with new "
      "statistics: it needs train.h > 1 and algorithm = 'scalable'."
    )
  make_policy(config)


def _check_threats(config: ConfigDict) -> None:
  names = [name for name in config.threats if name != 'only']
  for name in names:
    fields = config.threats[name]
    for field in REQUIRED_OF_THREATS:
      if field not in fields:
        raise UserError(
          f'threats.{name}.{field} is missing: a threat needs '
          f'{", ".join(REQUIRED_OF_THREATS)}.'
        )
    check_choice(f'threats.{name}.norm', fields.norm, norms.NORMS)
    for field in _ATTACKS:
      changes = fields.get(field, {})
      if not isinstance(changes, Mapping | ConfigDict):
        raise UserError(
          f'threats.{name}.{field} = {changes!r} is not allowed: must be a '
          "dict of the fields to change, such as {'steps': 10}."
        )
    if not isinstance(fields.space, str):
      raise UserError(
        f'threats.{name}.space = {fields.space!r} is not allowed: must be the '
        "name of a space, or 'module:NAME'."
      )
  for name in config.threats.only:
    check_choice('threats.only', name, names)
    if config.threats.only.count(name) > 1:
      raise UserError(f'threats.only = {config.threats.only!r} repeats {name}.')
  if not names:
    raise UserError('threats is empty: name at least one threat.')
  pairs = make_pairs(config), make_pairs(config, 'validation')
  kinds = [{type(attack) for _, attack in of_phase} for of_phase in pairs]
  if config.method == 'msd' and attacks.Fab in kinds[0]:
    raise UserError(
      "attack.rule = 'fab' is not for the method msd, which climbs: choose "
      'another rule or method.'
    )
  if config.policy.signal == 'loss' and len(kinds[1]) > 1:
    raise UserError(
      "policy.signal = 'loss' cannot compare the threats, because only some "
      'are validated with FAB, which looks for near images and not for high '
      "losses: set policy.signal='error'."
    )
  if config.method == 'single':
    check_choice('policy.threat', config.policy.threat, threat_table(config))


def _check_fields(config: ConfigDict) -> None:
  """Checks that the config has exactly the fields of `base()`, and types."""
  ours, expected = flatten(config), flatten(base())
  for field, value in ours.items():
    check_field(field)
    like = expected.get(field, attack_default(field))
    if like is not None and not same_kind(value, like):
      raise UserError(
        f'{field} = {value!r} is of the wrong type: expected '
        f'{type(like).__name__}, such as {like!r}.'
      )
  for field in expected:
    if field not in ours:
      raise UserError(
        f'The config field {field} is missing: start from '
        'mwrobust.config.preset(...) or base() and change what differs.'
      )


def same_kind(value: Any, expected: Any) -> bool:
  """Returns whether a value has the type of another; integers are floats."""
  if isinstance(expected, float):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
  return type(value) is type(expected)


def get(config: ConfigDict, field: str) -> Any:
  """Returns the value of a field such as `'train.h'`."""
  value = config
  for name in field.split('.'):
    value = value[name]
  return value
