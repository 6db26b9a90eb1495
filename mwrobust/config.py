"""What a run is made of: every field, the presets, and what is allowed.

Config files (`configs/*.py`) start from `preset(name, data)` and change what
differs. Every result names its preset:

  paper      the numbers of the paper; where it gives none, the usual ones
  released   the numbers of the authors' released code, where they differ
"""

import json
import math
import numbers
import os
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections
from etils import epath

from mwrobust import attacks, policies
from mwrobust import data as data_lib
from mwrobust.attacks import norms, spaces
from mwrobust.errors import UserError, check_choice
from mwrobust.evaluation import PROTOCOLS

ConfigDict = ml_collections.ConfigDict

# These do not change training, so they may differ between two calls on one
# workdir. A name that ends with a dot stands for all fields below it.
FREE_FIELDS = ('eval.', 'train.log_every')

# Radii (linf, l2, l1), the same in every space, by preset and data set.
EPS = {
  'paper': {'mnist': (0.4, 1.0, 5.0), 'cifar10': (0.06, 0.1, 7.84)},
  'released': {
    'mnist': (0.2, 2.0, 10.0),
    'cifar10': (8 / 255, 1.0, 2000 / 255),
  },
}


def base() -> ConfigDict:
  """Every field there is, with the values that all presets share."""
  config = ConfigDict()
  config.preset = ''  # Which numbers these are; results are labelled with it.
  config.seed = 0  # Of the parameters, the data order and all else.
  # 'scalable' (Figure 3): the average of the last h parameters is the output.
  # 'ensemble' (Figure 2): all T are kept, the output is their mean softmax;
  # for small networks, as it holds T of them at once.
  config.algorithm = 'scalable'

  config.data = data = ConfigDict()
  # mnist, cifar10, mnist5k, tfds:NAME, or the path of an .npz file or folder.
  data.name = 'mnist'
  # Folder of the published raw files, of tensorflow-datasets, or of the path;
  # '' for tensorflow-datasets' own folder, and the current one.
  data.dir = ''
  data.validation = 'seed'  # The 10 % of train: chosen by the seed, or 'last'.
  data.augment = False  # Random crops of the image padded by 4, and flips.
  data.train_examples = 0  # The first so many only; 0 for all.

  config.model = model = ConfigDict()
  model.name = 'resnet50'  # See mwrobust/models.
  model.options = ConfigDict()  # Its own fields, such as width.

  config.threats = threats = ConfigDict()  # Each space with each norm.
  threats.spaces = ('pixel', 'dct')
  threats.norms = ('linf', 'l2', 'l1')
  threats.eps_linf = 0.4
  threats.eps_l2 = 1.0
  threats.eps_l1 = 5.0

  config.policy = policy = ConfigDict()
  policy.name = 'multiplicative_weights'  # See mwrobust/policies.py.
  policy.eta = 0.1  # multiplicative_weights: the paper's scaling factor.
  policy.eta_schedule = 'constant'  # Or 'inverse_sqrt': eta / sqrt(t).
  policy.threat = 'pixel_linf'  # single: which one.

  config.optimizer = optimizer = ConfigDict()
  optimizer.name = 'sgd'  # Or 'adam'.
  optimizer.learning_rate = 0.1  # The highest.
  optimizer.schedule = 'steps'  # Or 'one_cycle' (cosine, up and down).
  optimizer.drops = (100, 150)  # steps: epochs after which it is divided by 10.
  optimizer.momentum = 0.9  # sgd
  optimizer.l2 = 1e-4  # Times the sum of squares of the convolution kernels.

  config.train = train = ConfigDict()
  train.T = 40  # Outer steps.
  train.r = 5.0  # Epochs in each, or a part of one; then comes the update.
  train.h = 3  # How many of the last parameters are averaged.
  train.batch_size = 128
  train.ramp = 0.0  # Share of training in which the radii grow from 0.
  train.validation_examples = 0  # To estimate the losses on; 0 for all.
  train.pgd_steps = 10  # linf and l2
  train.slide_steps = 20  # l1
  train.percentile = 95.0  # l1: a step moves the largest 5 %.
  train.log_every = 100  # Steps between two rows of metrics.

  config.eval = evaluation = ConfigDict()
  evaluation.examples = 0  # The first so many test images; 0 for all.
  evaluation.batch_size = 250  # Also of validation.
  # See mwrobust/evaluation/protocols.py; the appendix of the paper has
  # 'paper-20', and 'fast' takes a tenth of the time of 'standard'.
  evaluation.protocols = ('paper', 'standard')
  # What to evaluate beside the output, which is the average of the last h: the
  # 'last' alone, their 'ensemble', and the average 'recalibrated', with new
  # BatchNorm statistics.
  evaluation.others = ('last', 'ensemble')
  # On the first so many, the output's accuracy as the radii grow; 0 for none.
  evaluation.curve_examples = 250
  return config


def preset(name: str, data: str) -> ConfigDict:
  """The preset's numbers for a data set."""
  check_choice('preset', name, EPS)
  check_choice('data.name', data, EPS[name])
  config = base()
  config.preset = name
  config.data.name = data
  threats = config.threats
  threats.eps_linf, threats.eps_l2, threats.eps_l1 = EPS[name][data]
  config.data.augment = data == 'cifar10'
  if name == 'released':
    config.model.name = 'resnet_v1_50'
    config.data.validation = 'last'
    config.data.augment = True
  if data == 'mnist':
    config.train.T = 20
    config.train.r = 3
    config.train.batch_size = 100
    config.optimizer.learning_rate = 1e-3
    config.optimizer.drops = (30, 45)
  return config


def use_cnn(config: ConfigDict) -> None:
  """Puts a network and an optimizer for CPUs into the config."""
  config.model.name = 'cnn'
  config.optimizer.name = 'adam'
  config.optimizer.learning_rate = 3e-3
  config.optimizer.schedule = 'one_cycle'
  config.optimizer.l2 = 0.0


def flatten(config: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """A tree of fields as `{'train.h': 3, ...}`."""
  flat = {}
  for name, value in config.items():
    if isinstance(value, Mapping | ConfigDict):
      flat |= flatten(value, f'{prefix}{name}.')
    else:
      flat[prefix + name] = value
  return flat


def check_field(field: str) -> None:
  """Raises a UserError if there is no such field; models have their own."""
  if not field.startswith('model.options.'):
    check_choice('config', field, flatten(base()))


def apply_variants(
  config: ConfigDict,
  words: str,
  variants: dict[str, Callable[[ConfigDict], None]],
) -> ConfigDict:
  """Applies `file.py:word,word` variants; refuses unknown ones.

  Args:
    config: changed in place, and returned.
    words: comma-separated, in any order; '' for none.
    variants: what each word does to the config, in the order that it is done.
  """
  words = list(filter(None, words.split(',')))
  for word in words:
    check_choice('The variant', word, variants)
  for word, change in variants.items():
    if word in words:
      change(config)
  return config


def load(workdir: str | os.PathLike) -> ConfigDict:
  """The config of the run in a workdir, as its config.json has it."""
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
      f'{path} is no config ({error}): choose another --workdir, or mend it.'
    ) from error


def to_share(config: ConfigDict) -> dict[str, Any]:
  """As JSON has it, without what is of this machine."""
  fields = json.loads(config.to_json())
  fields['data']['dir'] = ''
  return fields


def _with_tuples(value: Any) -> Any:
  if isinstance(value, dict):
    return {name: _with_tuples(item) for name, item in value.items()}
  return tuple(value) if isinstance(value, list) else value


def make_threats(config: ConfigDict) -> tuple[attacks.Threat, ...]:
  """Makes the threats: each space with each norm."""
  return tuple(
    attacks.Threat(space=space, norm=norm, eps=config.threats[f'eps_{norm}'])
    for space in config.threats.spaces
    for norm in config.threats.norms
  )


def make_pairs(
  config: ConfigDict,
) -> tuple[tuple[attacks.Threat, attacks.Attack], ...]:
  """Gives each threat its attack in training and validation."""
  train = config.train
  by_norm = {
    'linf': attacks.pgd(train.pgd_steps),
    'l2': attacks.pgd(train.pgd_steps),
    'l1': attacks.slide(train.slide_steps, percentile=train.percentile),
  }
  threats = make_threats(config)
  return tuple((threat, by_norm[threat.norm]) for threat in threats)


def window(config: ConfigDict) -> int:
  """Returns how many parameters make the output: the last h, or all T."""
  all_are_kept = config.algorithm == 'ensemble'  # Figure 2, against Figure 3.
  return config.train.T if all_are_kept else config.train.h


def network_name(kind: str, config: ConfigDict) -> str:
  """Returns what is made of the last h: `'h=3 average'`; `'h=1'` for one."""
  h = window(config)
  return 'h=1' if kind == 'last' or h == 1 else f'h={h} {kind}'


def describe(config: ConfigDict, shared: bool = False) -> str:
  """Describes a run in a few lines; or only what the runs of a table share."""
  threats, train = config.threats, config.train
  radii = ', '.join(f'{n} {threats[f"eps_{n}"]:.4g}' for n in threats.norms)
  own = '' if shared else f', policy {config.policy.name}, seed {config.seed}'
  return (
    f'Data {config.data.name}, network {config.model.name}, preset '
    f'{config.preset}{own}.\n'
    f'Threats in {" and ".join(threats.spaces)}, with radii {radii}.\n'
    f'T = {train.T} outer steps of r = {train.r:g} epochs, batches of '
    f'{train.batch_size}, h = {train.h}.'
  )


def make_policy(config: ConfigDict) -> policies.Policy:
  """The policy over the config's threats."""
  names = [threat.name for threat in make_threats(config)]
  eta = config.policy.eta
  if config.policy.eta_schedule == 'inverse_sqrt':
    schedule = lambda t: eta / (t + 1.0) ** 0.5  # noqa: E731
  else:
    schedule = eta
  return policies.make(
    config.policy.name,
    len(names),
    eta=schedule,
    index=names.index(config.policy.threat)
    if config.policy.name == 'single'
    else None,
  )


def validate(config: ConfigDict) -> None:
  """Raises a UserError that names the first field that is wrong."""
  _check_fields(config)
  data_lib.check_name(config.data.name, config.data.dir)
  check_choice('algorithm', config.algorithm, ('scalable', 'ensemble'))
  check_choice('data.validation', config.data.validation, ('seed', 'last'))
  from mwrobust import models  # Flax, which a report does without.

  models.create(  # Only to have its name and the names of its options checked.
    config.model.name,
    num_classes=10,
    mean=(0.5,),
    std=(0.5,),
    **config.model.options,
  )
  for space in config.threats.spaces:
    check_choice('threats.spaces', space, spaces.SPACES)
  for norm in config.threats.norms:
    check_choice('threats.norms', norm, norms.NORMS)
  check_choice(
    'policy.eta_schedule',
    config.policy.eta_schedule,
    ('constant', 'inverse_sqrt'),
  )
  check_choice('optimizer.name', config.optimizer.name, ('sgd', 'adam'))
  check_choice(
    'optimizer.schedule', config.optimizer.schedule, ('steps', 'one_cycle')
  )
  for field in (
    *('train.T', 'train.h', 'train.batch_size', 'train.log_every'),
    *('train.pgd_steps', 'train.slide_steps', 'eval.batch_size'),
  ):
    _check_range(config, field, lowest=1)
  for field in (
    *('data.train_examples', 'train.validation_examples', 'eval.examples'),
    *('optimizer.l2', 'optimizer.momentum', 'eval.curve_examples'),
  ):
    _check_range(config, field, lowest=0)
  for field in (
    *('threats.eps_linf', 'threats.eps_l2', 'threats.eps_l1'),
    *('optimizer.learning_rate', 'policy.eta', 'train.r'),
  ):
    _check_range(config, field, above=0)
  _check_range(config, 'seed', lowest=0, below=2**32)
  _check_range(config, 'train.ramp', lowest=0, highest=1)
  if not all(isinstance(e, int) and e > 0 for e in config.optimizer.drops):
    raise UserError(
      f'optimizer.drops = {config.optimizer.drops!r} is not allowed: it must '
      'be epochs, whole numbers above 0.'
    )
  _check_range(config, 'train.percentile', lowest=0, below=100)
  if not (config.threats.spaces and config.threats.norms):
    raise UserError(
      'threats.spaces and threats.norms must each name at least one.'
    )
  if config.train.h > config.train.T:
    raise UserError(
      f'train.h = {config.train.h} is more than train.T = {config.train.T}: '
      'there are not so many parameters to average. Lower h or raise T.'
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
      "eval.others has 'recalibrated', the average of the last h with other "
      "statistics: it needs train.h > 1 and algorithm = 'scalable'."
    )
  names = [threat.name for threat in make_threats(config)]
  if len(set(names)) < len(names):
    raise UserError(f'threats.spaces and threats.norms repeat one: {names}.')
  if config.policy.name == 'single':
    check_choice('policy.threat', config.policy.threat, names)
  make_policy(config)


def _check_fields(config: ConfigDict) -> None:
  """The config has the fields of `base()`, of the same types, and no others."""
  ours, expected = flatten(config), flatten(base())
  for field, value in ours.items():
    check_field(field)
    if field in expected and not _same_kind(value, expected[field]):
      raise UserError(
        f'{field} = {value!r} is of the wrong type: expected '
        f'{type(expected[field]).__name__}, such as {expected[field]!r}.'
      )
  for field in expected:
    if field not in ours:
      raise UserError(
        f'The config field {field} is missing: start from '
        'mwrobust.config.preset(...) or base() and change what differs.'
      )


def _same_kind(value, expected) -> bool:
  if isinstance(expected, float):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
  return type(value) is type(expected)


def _check_range(
  config: ConfigDict,
  field: str,
  *,
  lowest: float = -math.inf,
  highest: float = math.inf,
  above: float = -math.inf,
  below: float = math.inf,
) -> None:
  group, _, name = field.rpartition('.')
  value = config[group][name] if group else config[name]
  if lowest <= value <= highest and above < value < below:
    return
  bounds = [
    f'{word} {bound:g}'
    for word, bound in (
      ('at least', lowest),
      ('more than', above),
      ('at most', highest),
      ('less than', below),
    )
    if math.isfinite(bound)
  ]
  raise UserError(
    f'{field} = {value!r} is not allowed: it must be finite and '
    f'{" and ".join(bounds)}.'
  )
