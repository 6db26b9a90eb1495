"""What a config says, as things to call."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from etils import epath

from mwrobust import attacks, models
from mwrobust import config as config_lib
from mwrobust import data as data_lib
from mwrobust import state as state_lib
from mwrobust import steps as steps_lib
from mwrobust.errors import UserError
from mwrobust.policies import Policy
from mwrobust.runtime import devices
from mwrobust.state import TrainState


class Job(NamedTuple):
  """What a config says, as things to call."""

  config: ml_collections.ConfigDict
  data: data_lib.Dataset
  model: Any
  pairs: tuple[tuple[attacks.Threat, attacks.Attack], ...]
  policy: Policy
  learning_rate: Callable[[int], float]
  radius_scale: Callable[[int], float]
  init: Callable[[], TrainState]
  choose: Callable[[Any, jax.Array], jax.Array]
  train_step: Callable
  validation_step: Callable
  steps_per_epoch: int  # Whole mini batches in the training data.
  steps: int  # Mini batches in all.

  @property
  def names(self) -> tuple[str, ...]:
    """Of the threats."""
    return tuple(threat.name for threat, _ in self.pairs)

  @property
  def steps_per_outer_step(self) -> int:
    """Mini batches between two updates of the weights."""
    return steps_per_outer_step(self.config.train, self.steps_per_epoch)


def steps_per_outer_step(
  train: ml_collections.ConfigDict, steps_per_epoch: int
) -> int:
  """Mini batches in r epochs."""
  return max(1, round(train.r * steps_per_epoch))


def prepare(config: ml_collections.ConfigDict) -> Job:
  """Loads the data and makes the functions of a run."""
  data = _load_data(config)
  pairs = config_lib.make_pairs(config)
  policy = config_lib.make_policy(config)
  model = models.create(
    config.model.name,
    num_classes=data.num_classes,
    mean=data.mean,
    std=data.std,
    **config.model.options,
  )
  image_shape = data.train.images.shape[1:]
  try:
    images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    variables = jax.eval_shape(
      functools.partial(model.init, train=False), jax.random.key(0), images
    )
  except (TypeError, ValueError, ArithmeticError) as error:
    raise UserError(
      f'model.options = {config.model.options.to_dict()} do not make a '
      f'{config.model.name} for images {image_shape}: {error}'
    ) from error
  if 'recalibrated' in config.eval.others and 'batch_stats' not in variables:
    raise UserError(
      f"eval.others has 'recalibrated', but {config.model.name} has no "
      'BatchNorm: leave it out.'
    )
  steps_per_epoch = len(data.train.labels) // config.train.batch_size
  steps = config.train.T * steps_per_outer_step(config.train, steps_per_epoch)
  optimizer, learning_rate = state_lib.make_optimizer(
    config.optimizer, steps_per_epoch, steps
  )
  ramp_steps = max(1.0, config.train.ramp * steps)
  key = jax.random.key(config.seed)
  init_key, train_key, choice_key, validation_key = jax.random.split(key, 4)

  def radius_scale(step):
    return jnp.minimum(1.0, (step + 1) / ramp_steps)

  @jax.jit
  def choose(policy_state, steps):
    keys = jax.vmap(jax.random.fold_in, (None, 0))(choice_key, steps)
    choose_each = jax.vmap(policy.choose, (None, 0, 0))
    return choose_each(policy_state, steps, keys)

  return Job(
    config=config,
    data=data,
    model=model,
    pairs=pairs,
    policy=policy,
    learning_rate=learning_rate,
    radius_scale=radius_scale,
    init=lambda: state_lib.create(
      init_key, model, image_shape, optimizer, policy
    ),
    choose=choose,
    train_step=steps_lib.make_train_step(
      model=model,
      pairs=pairs,
      key=train_key,
      radius_scale=radius_scale,
      augment=config.data.augment,
      attacked=policy.attacks,
    ),
    validation_step=steps_lib.make_validation_step(
      model=model, pairs=pairs, key=validation_key
    ),
    steps_per_epoch=steps_per_epoch,
    steps=steps,
  )


def check_training(job: Job) -> None:
  """Raises a UserError if the devices cannot share a mini batch."""
  batch_size, count = job.config.train.batch_size, devices.mesh().size
  if batch_size % count:
    lower, higher = (
      batch_size // count * count,
      devices.round_up(batch_size),
    )
    raise UserError(
      f'train.batch_size = {batch_size} cannot be shared by {count} devices: '
      f'choose {f"{lower} or " if lower else ""}{higher}, or fewer devices.'
    )


def training_batch(job: Job, step: int) -> steps_lib.Batch:
  """The mini batch of a step."""
  labels = job.data.train.labels
  rows = data_lib.batch_indices(
    job.config.seed, step, len(labels), job.config.train.batch_size
  )
  return make_batch(job.data.train, rows)


def make_batch(split: data_lib.Split, rows: np.ndarray) -> steps_lib.Batch:
  """These rows of a split, over all devices; their ids are their numbers."""
  ids = np.arange(len(split.labels), dtype=np.int32)
  return steps_lib.Batch(*devices.split_rows(rows, *split, ids))


def _load_data(config: ml_collections.ConfigDict) -> data_lib.Dataset:
  data = data_lib.load(
    config.data.name,
    directory=config.data.dir,
    validation=config.data.validation,
    seed=config.seed,
  )
  for name, field, count in (
    ('train', 'data.train_examples', config.data.train_examples),
    (
      'validation',
      'train.validation_examples',
      config.train.validation_examples,
    ),
    ('test', 'eval.examples', config.eval.examples),
  ):
    images, labels = getattr(data, name)
    if count > len(labels):
      raise UserError(
        f'{field} = {count} is more than the {len(labels)} there are: lower '
        'it, or set 0 for all.'
      )
    if count:
      first = data_lib.Split(images[:count], labels[:count])
      data = data._replace(**{name: first})
  if config.train.batch_size > len(data.train.labels):
    raise UserError(
      f'train.batch_size = {config.train.batch_size} is more than the '
      f'{len(data.train.labels)} training examples: lower it.'
    )
  return data


def refuse_another_run(
  workdir: epath.Path,
  config: ml_collections.ConfigDict,
  also_free: Sequence[str] = (),
) -> None:
  """Raises a UserError if the workdir has a run of another config.

  Args:
    workdir: of the run.
    config: what is to be done there.
    also_free: fields that may differ besides `config.FREE_FIELDS`.
  """
  if not (workdir / 'config.json').exists():
    return
  theirs = config_lib.flatten(config_lib.load(workdir))
  ours = config_lib.flatten(config)
  differing = [
    f'  {field}: {theirs.get(field)!r} there, {ours.get(field)!r} here'
    for field in sorted(ours | theirs)
    if theirs.get(field) != ours.get(field)
    and not field.startswith((*config_lib.FREE_FIELDS, *also_free))
    # The raw files may have moved; tensorflow-datasets has another order.
    and not (field == 'data.dir' and theirs[field] and ours[field])
  ]
  if differing:
    raise UserError(
      '\n'.join([f'{workdir} holds a run of another config:', *differing])
      + '\nChoose another --workdir, or give the same config.'
    )
