"""The main job, in the order of the paper's Figure 3.

`train_and_evaluate(config, workdir)` is the one entry for the command line,
tests and notebooks. It can be killed at any moment: run again, it goes on and
ends with the same parameters to the bit, because everything random is a
function of (seed, step) and a checkpoint is whole or not there.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import math
import pathlib
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from mwrobust import attacks, averaging, datasets, evaluate, models, report
from mwrobust import config as config_lib
from mwrobust import state as state_lib
from mwrobust.checkpoints import Checkpoints
from mwrobust.errors import UserError
from mwrobust.metrics import Metrics, Progress, write_json
from mwrobust.policies import Policy
from mwrobust.state import TrainState
from mwrobust.steps import Batch, make_eval_step, make_train_step

# What may differ between two calls on one workdir: it does not change training.
FREE_FIELDS = ('eval.examples', 'eval.pgd_steps', 'eval.slide_steps')
FREE_FIELDS += ('eval.percentile', 'train.log_every')


def train_and_evaluate(
  config: ml_collections.ConfigDict,
  workdir: str,
  say: Callable[[str], None] = print,
) -> dict[str, evaluate.Evaluation]:
  """Trains a network against all threats, then attacks it with each of them.

  Args:
    config: see `mwrobust/config.py`.
    workdir: where all results go. A run that is in it already is gone on with.
    say: told what a reader at the terminal should know.

  Returns:
    The evaluations, by the parameters they are of: `h=1`, `h=3`, ...
  """
  config_lib.validate(config)
  workdir = pathlib.Path(workdir)
  _refuse_another_run(workdir, config)
  job = prepare(config)
  if not (workdir / 'config.json').exists():
    write_json(workdir / 'config.json', json.loads(config.to_json()))
  keep = None if config.algorithm == 'ensemble' else max(2, config.train.h)

  def set_status(status: str) -> None:
    write_json(workdir / 'status.json', {'status': status})

  say(f'{report.describe(config)}\nWorkdir {workdir}')
  with (
    contextlib.closing(Checkpoints(workdir, keep)) as checkpoints,
    _stop_signals() as stop,
  ):
    set_status('running')
    try:
      state = train(job, workdir, checkpoints, stop, say)
      evaluations = _evaluate_all(job, workdir, state, checkpoints, stop, say)
    except BaseException as error:
      diverged = isinstance(error, Diverged)
      set_status('diverged' if diverged else 'interrupted')
      raise
    set_status('done')
  return evaluations


# ---------------------------------------------------------------- preparation


class Job(NamedTuple):
  """What a config says, as things to call."""

  config: ml_collections.ConfigDict
  data: datasets.Dataset
  model: Any
  threats: tuple[attacks.Threat, ...]
  policy: Policy
  learning_rate: Callable[[int], float]
  radius_scale: Callable[[int], float]
  init: Callable[[], TrainState]
  choose: Callable[[Any, jax.Array], jax.Array]
  train_step: Callable
  validate_step: Callable

  @property
  def names(self) -> tuple[str, ...]:
    """Of the threats."""
    return tuple(threat.name for threat in self.threats)

  @property
  def steps_per_epoch(self) -> int:
    """Whole mini batches in the training data."""
    return len(self.data.train.labels) // self.config.train.batch_size

  @property
  def steps_per_outer_step(self) -> int:
    """Mini batches between two updates of the weights."""
    return self.config.train.r * self.steps_per_epoch

  @property
  def steps(self) -> int:
    """Mini batches in all."""
    return self.config.train.T * self.steps_per_outer_step


def prepare(config: ml_collections.ConfigDict) -> Job:
  """Loads the data and makes the functions of a run."""
  data = _load_data(config)
  threats = config_lib.make_threats(config, 'train')
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
    jax.eval_shape(
      functools.partial(model.init, train=False), jax.random.key(0), images
    )
  except (TypeError, ValueError, ArithmeticError) as error:
    raise UserError(
      f'model.options = {config.model.options.to_dict()} do not make a '
      f'{config.model.name} for images {image_shape}: {error}'
    ) from error
  steps_per_epoch = len(data.train.labels) // config.train.batch_size
  steps = config.train.T * config.train.r * steps_per_epoch
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
    threats=threats,
    policy=policy,
    learning_rate=learning_rate,
    radius_scale=radius_scale,
    init=lambda: state_lib.create(
      init_key, model, image_shape, optimizer, policy
    ),
    choose=choose,
    train_step=make_train_step(
      model=model,
      threats=threats,
      key=train_key,
      radius_scale=radius_scale,
      augment=config.data.augment,
      attacked=policy.attacks,
    ),
    validate_step=make_eval_step(
      model=model, threats=threats, key=validation_key
    ),
  )


def _load_data(config: ml_collections.ConfigDict) -> datasets.Dataset:
  data = datasets.load(
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
      first = datasets.Split(images[:count], labels[:count])
      data = data._replace(**{name: first})
  if config.train.batch_size > len(data.train.labels):
    raise UserError(
      f'train.batch_size = {config.train.batch_size} is more than the '
      f'{len(data.train.labels)} training examples: lower it.'
    )
  return data


def _refuse_another_run(
  workdir: pathlib.Path, config: ml_collections.ConfigDict
) -> None:
  """Raises a UserError if the workdir has a run of another config."""
  path = workdir / 'config.json'
  try:
    theirs = json.loads(path.read_text())
    theirs = config_lib.flatten(theirs)
  except (FileNotFoundError, NotADirectoryError):
    return
  except (OSError, ValueError, AttributeError) as error:
    raise UserError(
      f'{path} is no config ({error}): choose another --workdir, or mend it.'
    ) from error
  ours = config_lib.flatten(json.loads(config.to_json()))
  differing = [
    f'  {field}: {theirs.get(field)!r} there, {ours.get(field)!r} here'
    for field in sorted(ours | theirs)
    if theirs.get(field) != ours.get(field)
    and field not in FREE_FIELDS
    # The raw files may have moved; tensorflow-datasets has another order.
    and not (field == 'data.dir' and theirs[field] and ours[field])
  ]
  if differing:
    raise UserError(
      '\n'.join([f'{workdir} holds a run of another config:', *differing])
      + '\nChoose another --workdir, or give the same config.'
    )


# ------------------------------------------------------------------- training


def train(
  job: Job,
  workdir: pathlib.Path,
  checkpoints: Checkpoints,
  stop: '_Stop',
  say: Callable[[str], None],
) -> TrainState:
  """Figure 3: T times, r epochs, then a validation and an update."""
  # ---- Go on from the last checkpoint, if there is one
  state = job.init()
  # On a device of its own choice, as a restored state is: what was compiled
  # for the one serves the other.
  state = jax.device_put(state, jax.devices()[0])
  restored = checkpoints.restore(state, say)
  if restored is not None:
    state = restored
    if int(state.outer_step) == job.config.train.T:
      say(f'{workdir} is trained already, all {job.steps} steps.')
      return state
    say(f'Going on from step {int(state.step)} of {job.steps} in {workdir}.')

  with (
    Metrics(
      workdir,
      resume_step=None if restored is None else int(state.step),
      outer_step=int(state.outer_step),
    ) as metrics,
    Progress(
      job.steps,
      start=int(state.step),
      batch_size=job.config.train.batch_size,
      log_every=job.config.train.log_every,
    ) as progress,
  ):
    log = _Log(job, metrics, progress, step=int(state.step))
    progress.update(log.step, 'compiling')

    def validate():
      progress.update(log.step, 'validating')
      losses = validation_losses(job, state, log.step, stop.check)
      log.count_validation()
      return losses

    try:
      if log.step == 0 and job.policy.validates_first:
        state = state.replace(
          policy=job.policy.update(state.policy, validate())
        )

      for t in range(int(state.outer_step), job.config.train.T):
        # ---- r epochs, each mini batch attacked by one threat
        for index, batch in mini_batches(job, state, t, log.step):
          stop.check()
          state, loss = job.train_step(state, index, batch)
          log.trained(index, loss)

        # ---- w_i <- w_i exp(eta L_i), L_i on the validation set
        losses = validate()
        state = state.replace(
          policy=job.policy.update(state.policy, losses),
          outer_step=state.outer_step + 1,
        )
        log.validated(t, losses, job.policy.probabilities(state.policy, 0))
        checkpoints.save(state)
    except Interrupted:
      log.flush()
      checkpoints.save_interrupted(state)
      raise
  return state


def mini_batches(
  job: Job, state: TrainState, t: int, start: int
) -> Iterator[tuple[np.int32, Batch]]:
  """The mini batches of outer step t from step `start`, each with its threat.

  The weights stand still during an outer step, so all its threats are sampled
  at once, with p_i = w_i / sum_j w_j.
  """
  first, last = (u * job.steps_per_outer_step for u in (t, t + 1))
  indices = np.asarray(job.choose(state.policy, jnp.arange(first, last)))
  train = job.data.train
  for step in range(start, last):
    rows = datasets.batch_indices(
      job.config.seed, step, len(train.labels), job.config.train.batch_size
    )
    batch = Batch(train.images[rows], train.labels[rows], rows)
    yield indices[step - first].astype(np.int32), batch


def validation_losses(
  job: Job, state: TrainState, step: int, pause: Callable[[], None]
) -> jax.Array:
  """The losses L_i on the validation set, with the radii of this step.

  Args:
    job: the run.
    state: whose network to attack.
    step: mini batches done.
    pause: called between batches; may raise to end it.
  """
  losses = evaluate.mean_losses(
    job.validate_step,
    state.variables,
    len(job.threats),
    job.data.validation,
    job.config.eval.batch_size,
    scale=job.radius_scale(max(0, step - 1)),
    pause=pause,
  )
  if not np.isfinite(losses).all():
    raise Diverged(
      f'A validation loss is not finite after step {step}: '
      f'{dict(zip(job.names, losses.tolist(), strict=True))}. {_WHAT_NOW}'
    )
  return jnp.asarray(losses, jnp.float32)


class _Log:
  """Turns what happens in training into rows of metrics and progress.

  A row per log interval and per outer step. Gradient evaluations count one
  image once forward and back, in attacks, updates and validation alike.
  """

  def __init__(self, job: Job, metrics: Metrics, progress: Progress, step: int):
    self.job, self.metrics, self.progress = job, metrics, progress
    self.step = step
    before = metrics.last_row or {}
    self._gradients = before.get('gradient_evaluations', 0)
    self._seconds_before = before.get('seconds', 0.0)
    self._started = time.monotonic()
    self._indices, self._losses = [], []

  def trained(self, index: int, loss: jax.Array) -> None:
    """One mini batch, attacked by threat number `index`."""
    job = self.job
    if self._losses:  # The host stays one step ahead of the device, not more.
      self._losses[-1].block_until_ready()
    self._indices.append(int(index))
    self._losses.append(loss)
    self.step += 1
    attack_steps = job.threats[index].steps if job.policy.attacks else 0
    self._gradients += job.config.train.batch_size * (attack_steps + 1)
    self.progress.update(self.step)
    if (
      self.step % job.config.train.log_every == 0
      or self.step % job.steps_per_outer_step == 0
    ):
      self.flush()

  def flush(self) -> None:
    """Writes the row of the mini batches since the last one."""
    if not self._losses:
      return
    losses = np.asarray(jax.device_get(self._losses))
    first = self.step - len(losses)
    if not np.isfinite(losses).all():
      raise Diverged(
        f'The training loss is not finite between steps {first} and '
        f'{self.step}. {_WHAT_NOW}'
      )
    counts = np.bincount(self._indices, minlength=len(self.job.threats))
    self.metrics.write(
      'train',
      self.step,
      epoch=self.step / self.job.steps_per_epoch,
      loss=losses.mean(),
      learning_rate=self.job.learning_rate(self.step - 1),
      images_per_second=self.progress.images_per_second,
      chosen=self._by_name(counts if self.job.policy.attacks else 0 * counts),
      **self._cost(),
    )
    self._indices, self._losses = [], []

  def count_validation(self) -> None:
    """Adds what the validation of all threats has cost."""
    images = len(self.job.data.validation.labels)
    self._gradients += images * sum(t.steps for t in self.job.threats)

  def validated(self, t: int, losses: jax.Array, weights: jax.Array) -> None:
    """The end of outer step t, counted from 0."""
    job = self.job
    self.metrics.write(
      'outer',
      self.step,
      outer_step=t + 1,
      validation_loss=self._by_name(losses),
      weight=self._by_name(weights),
      radius_scale=job.radius_scale(self.step - 1),
      **self._cost(),
    )
    worst = int(np.argmax(losses))
    self.progress.say(
      f'outer step {t + 1}/{job.config.train.T}: the worst validation loss is '
      f'{losses[worst]:.3f}, {job.names[worst]}; its weight is now '
      f'{weights[worst]:.2f}'
    )

  def _by_name(self, values) -> dict[str, Any]:
    return dict(zip(self.job.names, np.asarray(values).tolist(), strict=True))

  def _cost(self) -> dict[str, float]:
    seconds = self._seconds_before + time.monotonic() - self._started
    return {'gradient_evaluations': self._gradients, 'seconds': seconds}


_WHAT_NOW = (
  'Checkpoints before that are kept. Lower optimizer.learning_rate or raise '
  'train.ramp, in a new --workdir.'
)


class Diverged(UserError):  # noqa: N818
  """A loss is not finite."""


# ----------------------------------------------------------------- evaluation


def _evaluate_all(
  job: Job,
  workdir: pathlib.Path,
  state: TrainState,
  checkpoints: Checkpoints,
  stop: '_Stop',
  say: Callable[[str], None],
) -> dict[str, evaluate.Evaluation]:
  """The last parameters, and Figure 3's average or Figure 2's ensemble."""
  config = job.config
  threats = config_lib.make_threats(config, 'eval')
  outputs = {'h=1': lambda: (state.variables,)}
  if config.algorithm == 'ensemble':
    outputs[f'ensemble of {config.train.T}'] = lambda: tuple(
      member.variables for member in checkpoints.last(config.train.T, state)
    )
  elif config.train.h > 1:
    outputs[f'h={config.train.h}'] = lambda: (
      averaging.average(
        member.variables for member in checkpoints.last(config.train.h, state)
      ),
    )

  eval_step = make_eval_step(
    model=job.model, threats=threats, key=jax.random.key(config.seed)
  )
  settings = json.dumps([json.loads(config.eval.to_json()), str(threats)])
  digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
  evaluations = {}
  for name, members in outputs.items():
    path = workdir / 'eval' / f'{name.replace(" ", "_")}-{digest}.npz'
    if path.exists():
      try:
        evaluations[name] = evaluate.Evaluation.load(path)
        say(f'Already evaluated: {path}')
        continue
      except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        say(f'{path} cannot be read ({error}): evaluating again.')
    images = len(job.data.test.labels)
    passes = (len(threats) + 1) * math.ceil(images / config.eval.batch_size)
    say(f'Evaluating {name} on {images} test images: {passes} batches.')
    with Progress(
      passes,
      start=0,
      batch_size=config.eval.batch_size,
      log_every=math.ceil(passes / 4),
    ) as progress:
      done = itertools.count(1)

      def pause(progress=progress, done=done, name=name):
        progress.update(next(done), f'evaluating {name}')
        stop.check()

      evaluations[name] = evaluate.evaluate(
        eval_step,
        members(),
        job.names,
        job.data.test,
        config.eval.batch_size,
        pause=pause,
      )
    evaluations[name].save(path)
  report.write(workdir / 'report.md', config, evaluations)
  return evaluations


# -------------------------------------------------------------- interruptions


class Interrupted(Exception):  # noqa: N818
  """SIGTERM or Ctrl-C came; what was under way has been saved."""

  def __init__(self, signum: int):
    super().__init__(f'Interrupted by {signal.Signals(signum).name}.')
    self.signum = signum


class _Stop:
  """Whether a signal to stop has come."""

  signum: int | None = None

  def check(self) -> None:
    """Raises Interrupted if one has."""
    if self.signum is not None:
      raise Interrupted(self.signum)


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stop]:
  """Lets SIGTERM and Ctrl-C wait for the next safe moment; the second not."""
  stop = _Stop()
  if threading.current_thread() is not threading.main_thread():
    yield stop  # Only the main thread hears signals.
    return

  numbers = signal.SIGTERM, signal.SIGINT
  before = {number: signal.getsignal(number) for number in numbers}

  def restore():
    for number, handler in before.items():
      signal.signal(number, handler)

  def handle(signum, frame):
    del frame
    stop.signum = signum
    restore()

  for number in numbers:
    signal.signal(number, handle)
  try:
    yield stop
  finally:
    restore()
