"""Makes the data and functions of a run from its config."""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from etils import epath

from mwrobust import attacks, data, models
from mwrobust import config as config_lib
from mwrobust.errors import UserError
from mwrobust.runtime import devices, files
from mwrobust.training import state as state_lib
from mwrobust.training import steps as steps_lib
from mwrobust.training.adversaries import Adversary, make_adversary
from mwrobust.training.policies import Policy
from mwrobust.training.state import TrainState

# The stronger attack that checks the training attack during training.
PROBE = attacks.apgd(50, result='highest')


class Job(NamedTuple):
  """The data and functions of a run."""

  config: ml_collections.ConfigDict  # See `mwrobust/config.py`.
  data: data.Dataset  # All examples, in memory.
  # The examples of `eval.split` that an evaluation attacks.
  evaluated: data.Split
  model: Any  # A linen module.
  names: tuple[str, ...]  # The names of the threats.
  policy: Policy  # Picks the threat of a mini batch.
  adversary: Adversary  # Makes the images that a mini batch is trained on.
  init: Callable[[], TrainState]  # Makes the state before the first step.
  # `choose(policy_state, step) -> index` of the threat.
  choose: Callable[[Any, int], jax.Array]
  train_step: Callable  # See `steps.make_train_step`.
  # See `steps.make_validation_step`; uses its attacks.
  validation_step: Callable
  # The same with the attacks of training; the same function if they agree.
  trained_step: Callable
  probe_step: Callable  # The same with `PROBE`.
  natural_step: Callable  # See `steps.make_natural_step`.
  # A function of the step and the progress, see `Schedule`.
  learning_rate: Callable[[int, float], jax.Array]
  # The factor of the radii, a function of the progress.
  radius_scale: Callable[[float], jax.Array]
  schedule: 'Schedule'  # The length of training.
  # The gradients per mini batch, by its threat, [k].
  batch_gradients: np.ndarray
  validation_gradients: float  # The gradients of a validation of all examples.


class Schedule(NamedTuple):
  """The length of training.

  A mini batch costs 1 if the length is given in epochs, and its gradient
  evaluations if it is given as a budget. The number of mini batches of a budget
  is not known in advance, because it depends on the threats that are chosen.

  `chosen` is the number of mini batches of each threat so far, [k].
  """

  steps_per_epoch: int  # The number of whole mini batches in the training data.
  outer_steps: int  # T.
  # The cost of a mini batch, by its threat, int [k]. A budget is in thirds of a
  # gradient, the cost of a forward pass, so that costs are exact.
  costs: np.ndarray
  total: int  # The cost of all mini batches together.
  # The gradients of training with its validations, if all threats are chosen
  # equally often.
  gradients: float

  def progress(self, chosen: Any) -> Any:
    """Returns the share of training that is done; `chosen` may be traced."""
    return (chosen * (self.costs / self.total)).sum()

  def has_room(self, chosen: np.ndarray, t: int) -> bool:
    """Returns whether any mini batch still fits into outer step t, from 0."""
    spent = chosen @ self.costs + self.costs.max()
    return bool(spent * self.outer_steps <= (t + 1) * self.total)

  def expected_steps(self, chosen: np.ndarray) -> int:
    """Returns the expected number of steps, if choices continue as so far."""
    done = int(chosen.sum())
    if not self.has_room(chosen, self.outer_steps - 1):
      return done
    so_far = chosen if done else np.ones_like(chosen)
    mean = so_far @ self.costs / so_far.sum()
    return done + max(1, int((self.total - chosen @ self.costs) / mean))


def make_schedule(
  config: ml_collections.ConfigDict, train_size: int, validation_size: int
) -> Schedule:
  """Makes a schedule of T outer steps, by epochs or by `train.budget`."""
  train = config.train
  steps_per_epoch = train_size // train.batch_size
  gradients = batch_gradients(config)
  validations = train.T + config_lib.make_policy(config).validates_first
  validating = validations * validation_size * validation_gradients(config)
  if train.budget:
    costs = np.rint(3 * gradients).astype(np.int64)
    total = 3 * train.budget - round(3 * validating)
  else:
    costs = np.ones(len(gradients), np.int64)
    total = train.T * max(1, round(train.r * steps_per_epoch))
  if total < train.T * costs.max():
    least = train.T * gradients.max() + validating
    raise UserError(
      f'train.budget = {train.budget} is too small for train.T = {train.T} '
      f'outer steps: they take at least {least:,.0f} gradient evaluations, '
      'with their validations. Raise it, or lower train.T or '
      'train.validation_examples.'
    )
  steps = int(total / costs.mean())
  planned = steps * float(gradients.mean()) + validating
  return Schedule(steps_per_epoch, train.T, costs, total, planned)


def batch_gradients(config: ml_collections.ConfigDict) -> np.ndarray:
  """Returns the gradients of a mini batch, by its threat, [k]."""
  kind, _ = config_lib.METHODS[config.method]
  adversary = make_adversary(kind, config_lib.make_pairs(config))
  gradients = adversary.gradients
  if config.method == 'single':  # The others are never chosen.
    names = list(config_lib.threat_table(config))
    gradients = np.full_like(
      gradients, gradients[names.index(config.policy.threat)]
    )
  return config.train.batch_size * (gradients + adversary.copies)


def validation_gradients(config: ml_collections.ConfigDict) -> float:
  """Returns the gradients of the validation of one example."""
  pairs = config_lib.make_pairs(config, 'validation')
  return float(make_adversary('one', pairs).gradients.sum())


def prepare(config: ml_collections.ConfigDict) -> Job:
  """Loads the data and makes the functions of a run."""
  dataset, evaluated = _load_data(config)
  model = models.create(
    config.model.name,
    num_classes=dataset.num_classes,
    mean=dataset.mean,
    std=dataset.std,
    **config.model.options,
  )
  image_shape = dataset.train.images.shape[1:]
  _check_model(config, model, image_shape)
  config_lib.check_targets(config, dataset.num_classes)
  pairs = config_lib.make_pairs(config)
  kind, _ = config_lib.METHODS[config.method]
  adversary = make_adversary(kind, pairs)
  policy = config_lib.make_policy(config)
  schedule = make_schedule(
    config, len(dataset.train.labels), len(dataset.validation.labels)
  )
  optimizer = state_lib.make_optimizer(config.optimizer)
  epochs = config.train.T * config.train.r if config.train.budget else None
  learning_rate = state_lib.make_learning_rate(
    config.optimizer, schedule.steps_per_epoch, epochs
  )
  init_key, train_key, choice_key, validation_key = jax.random.split(
    jax.random.key(config.seed), 4
  )

  def radius_scale(progress):
    if not config.train.ramp:
      return jnp.float32(1)
    # Above 0, so that a validation before the first step can compare threats.
    least = schedule.costs.min() / schedule.total
    return jnp.clip(progress, least, config.train.ramp) / config.train.ramp

  @functools.partial(jax.jit, out_shardings=devices.replicated())
  def choose(policy_state, step):
    key = jax.random.fold_in(choice_key, step)
    return policy.choose(policy_state, step, key).astype(jnp.int32)

  validation = functools.partial(
    steps_lib.make_validation_step, model=model, key=validation_key
  )
  threats = [threat for threat, _ in pairs]
  trained_step = validation(pairs=pairs)
  validated = config_lib.make_pairs(config, 'validation')
  return Job(
    config=config,
    data=dataset,
    evaluated=evaluated,
    model=model,
    names=tuple(threat.name for threat in threats),
    policy=policy,
    adversary=adversary,
    init=lambda: state_lib.create(
      init_key, model, image_shape, optimizer, policy
    ),
    choose=choose,
    train_step=steps_lib.make_train_step(
      model=model,
      adversary=adversary,
      policy=policy,
      key=train_key,
      progress=schedule.progress,
      learning_rate=learning_rate,
      radius_scale=radius_scale,
      augment=config.data.augment,
      precision=config.train.precision,
    ),
    validation_step=(
      trained_step if validated == pairs else validation(pairs=validated)
    ),
    trained_step=trained_step,
    probe_step=validation(pairs=[(threat, PROBE) for threat in threats]),
    natural_step=steps_lib.make_natural_step(model=model),
    learning_rate=learning_rate,
    radius_scale=radius_scale,
    schedule=schedule,
    batch_gradients=batch_gradients(config),
    validation_gradients=len(dataset.validation.labels)
    * validation_gradients(config),
  )


def check_training(job: Job) -> None:
  """Raises a UserError if the devices cannot share a mini batch."""
  batch_size, count = job.config.train.batch_size, devices.mesh().size
  if batch_size % count:
    lower, higher = batch_size // count * count, devices.round_up(batch_size)
    raise UserError(
      f'train.batch_size = {batch_size} cannot be shared by {count} devices: '
      f'choose {f"{lower} or " if lower else ""}{higher}, or fewer devices.'
    )


def training_batch(job: Job, step: int) -> steps_lib.Batch:
  """Returns the mini batch of a step."""
  rows = data.batch_indices(
    job.config.seed,
    step,
    len(job.data.train.labels),
    job.config.train.batch_size,
  )
  return make_batch(job.data.train, rows)


def make_batch(split: data.Split, rows: np.ndarray) -> steps_lib.Batch:
  """Returns rows of a split, over all devices; ids are row numbers."""
  ids = np.arange(len(split.labels), dtype=np.int32)
  return steps_lib.Batch(*devices.split_rows(rows, *split, ids))


def _check_model(config, model, image_shape: tuple[int, ...]) -> None:
  try:
    images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    variables = jax.eval_shape(
      functools.partial(model.init, train=False), jax.random.key(0), images
    )
  except (TypeError, ValueError, ArithmeticError) as error:
    raise UserError(
      f'model.options = {config.model.options.to_dict()} are not valid for '
      f'{config.model.name} and images {image_shape}: {error}'
    ) from error
  collections = set(variables)
  if not {'params'} <= collections <= {'params', 'batch_stats'}:
    raise UserError(
      f'model.name = {config.model.name!r} has the collections '
      f'{sorted(collections)}: it must have params, and may have batch_stats.'
    )
  if 'recalibrated' in config.eval.others and 'batch_stats' not in variables:
    raise UserError(
      f"eval.others has 'recalibrated', but {config.model.name} has no "
      'BatchNorm: remove it.'
    )


def _load_data(
  config: ml_collections.ConfigDict,
) -> tuple[data.Dataset, data.Split]:
  """Returns the data to train and validate on, and the images to evaluate."""
  dataset = data.load(
    config.data.name,
    directory=config.data.dir,
    validation=config.data.validation,
    seed=config.seed,
  )

  def first(name: str, field: str, count: int) -> data.Split:
    images, labels = getattr(dataset, name)
    if count > len(labels):
      raise UserError(
        f'{field} = {count} is more than the {len(labels)} available: lower '
        'it, or set 0 for all.'
      )
    return data.Split(images[: count or None], labels[: count or None])

  evaluated = first(config.eval.split, 'eval.examples', config.eval.examples)
  dataset = dataset._replace(
    train=first('train', 'data.train_examples', config.data.train_examples),
    validation=first(
      'validation',
      'train.validation_examples',
      config.train.validation_examples,
    ),
  )
  if config.train.batch_size > len(dataset.train.labels):
    raise UserError(
      f'train.batch_size = {config.train.batch_size} is more than the '
      f'{len(dataset.train.labels)} training examples: lower it.'
    )
  return dataset, evaluated


# ------------------------------------------------------------------ the workdir


def refuse_another_run(
  workdir: epath.Path,
  config: ml_collections.ConfigDict,
  also_free: Sequence[str] = (),
) -> None:
  """Raises a UserError if the workdir has a run of another config.

  The fields in `also_free` may differ, as may those in `config.FREE_FIELDS`.
  """
  if not (workdir / 'config.json').exists():
    return
  theirs = config_lib.flatten(config_lib.load(workdir))
  ours = config_lib.flatten(config)
  differing = [
    field
    for field in sorted(ours | theirs)
    if theirs.get(field) != ours.get(field)
    and not field.startswith((*config_lib.FREE_FIELDS, *also_free))
    # The raw files may have moved. tensorflow-datasets has another order.
    and not (field == 'data.dir' and theirs[field] and ours[field])
  ]
  if differing:
    lines = [
      f'  {field}: {theirs.get(field)!r} there, {ours.get(field)!r} here'
      for field in differing
    ]
    raise UserError(
      '\n'.join([f'{workdir} holds a run of another config:', *lines])
      + '\nChoose another --workdir, or give the same config.'
      + _why_not_longer(config, {f: theirs.get(f) for f in differing})
    )


def _why_not_longer(
  config: ml_collections.ConfigDict, before: dict[str, Any]
) -> str:
  """Returns why a run of fields that differ cannot be extended, or ''."""
  lengths = ('train.T', 'train.budget')
  is_longer = all(
    field in lengths and 0 < value < config_lib.get(config, field)
    for field, value in before.items()
  )
  reasons = _depend_on_length(config)
  if not (is_longer and reasons):
    return ''
  return (
    f' {" and ".join(before)} cannot grow: the schedule follows the length of '
    f'the whole training, because {" and ".join(reasons)}.'
  )


def _depend_on_length(config: ml_collections.ConfigDict) -> list[str]:
  """Returns the fields for which the length of training matters."""
  independent = {
    'optimizer.schedule': 'steps',
    'train.ramp': 0,
    'train.budget': 0,
  }
  return [
    f'{field} = {config_lib.get(config, field)!r}'
    for field, value in independent.items()
    if config_lib.get(config, field) != value
  ]


def check_workdir(
  workdir: epath.Path, config: ml_collections.ConfigDict
) -> None:
  """Raises a UserError if the workdir has a run that this does not continue.

  A larger T extends a run if nothing depends on the length of its training.
  """
  if not (workdir / 'config.json').exists():
    return
  is_longer = config_lib.load(workdir).train.T < config.train.T
  extends = is_longer and not _depend_on_length(config)
  refuse_another_run(workdir, config, ('train.T',) if extends else ())


def record(workdir: epath.Path, config: ml_collections.ConfigDict) -> None:
  """Writes the config of a new run, or the larger T of an extended one."""
  path = workdir / 'config.json'
  longest = config.train.T
  if path.exists():
    config = config_lib.load(workdir)
    if longest <= config.train.T:
      return
    config.train.T = longest
  files.write_json(path, json.loads(config.to_json()))
