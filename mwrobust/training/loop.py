"""The training loop, in the order of the paper's Figure 3.

`train_and_evaluate(config, workdir)` is the entry for the command line, tests
and notebooks. It can be killed at any time: the next call resumes and ends with
the same parameters, bit for bit, because everything random is a function of
(seed, step) and checkpoints are atomic.
"""

import contextlib
import textwrap
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from etils import epath

from mwrobust import config as config_lib
from mwrobust import data
from mwrobust.errors import UserError
from mwrobust.runtime import devices, files
from mwrobust.runtime.metrics import Metrics
from mwrobust.runtime.progress import Progress
from mwrobust.runtime.signals import Interrupted, Stop, stop_signals
from mwrobust.training import evaluation, game, setup
from mwrobust.training.checkpoints import Checkpoints
from mwrobust.training.policies import Validation
from mwrobust.training.setup import Job
from mwrobust.training.state import TrainState


def train_and_evaluate(
  config: ml_collections.ConfigDict,
  workdir: str,
  say: Callable[[str], None] = print,
) -> evaluation.Evaluations:
  """Trains a network against all threats, then attacks it with each of them.

  Args:
    config: see `mwrobust/config.py`.
    workdir: the folder for all results. A run in it is resumed, and extended if
      `train.T` is larger and nothing depends on the length.
    say: prints messages for the user.

  Returns:
    The outcomes by network (`'h=1'`, `'h=3 average'`, ...) and protocol.
  """
  config_lib.validate(config)
  workdir = epath.Path(workdir)
  setup.check_workdir(workdir, config)
  job = setup.prepare(config)

  def set_status(status: str) -> None:
    files.write_json(workdir / 'status.json', {'status': status})

  with files.locked(workdir), stop_signals() as stop:
    setup.record(workdir, config)
    say(f'{config_lib.describe(config)}\nWorkdir {workdir}')
    set_status('running')
    try:
      train(job, workdir, stop, say)
      found = evaluation.evaluate(job, config, workdir, stop.check, say)
    except BaseException as error:
      set_status(_STATUSES.get(type(error), 'failed'))
      raise
    set_status('done')
  return found


# ------------------------------------------------------------------- training


def train(
  job: Job, workdir: epath.Path, stop: Stop, say: Callable[[str], None]
) -> None:
  """Runs Figure 3: T times r epochs, a validation and an update."""
  config = job.config
  keep = None if config.algorithm == 'ensemble' else max(2, config.train.h)
  with contextlib.closing(Checkpoints(workdir, keep)) as checkpoints:
    # ---- Resume from the last checkpoint, if there is one
    setup.check_training(job)
    state = job.init()
    restored = checkpoints.restore(state, say)
    if restored is not None:
      state = restored
      if int(state.outer_step) == config.train.T:
        say(f'{workdir} is already trained, all {int(state.step)} steps.')
        return
      steps = job.schedule.expected_steps(np.asarray(state.chosen))
      say(f'Resuming from step {int(state.step)} of {steps} in {workdir}.')

    with _Log(job, workdir, state, resumed=restored is not None) as log:

      def validate_now() -> Measured:
        log.show('validating')
        return validate(job, state, stop.check)

      try:
        if log.step == 0 and job.policy.validates_first:
          before = validate_now()
          log.count_validation()
          state = state.replace(
            policy=job.policy.update(state.policy, before.validation)
          )

        for t in range(int(state.outer_step), config.train.T):
          # ---- r epochs, each mini batch attacked by one threat
          probabilities = shares(job, state)
          while job.schedule.has_room(log.chosen, t):
            stop.check()
            index = job.choose(state.policy, log.step)
            batch = setup.training_batch(job, log.step)
            state, loss = job.train_step(state, index, batch)
            log.trained(index, loss)
          log.flush()

          # ---- w_i <- w_i exp(eta L_i), L_i on the validation set
          measured = validate_now()
          log.count_validation()
          state = state.replace(
            policy=job.policy.update(state.policy, measured.validation),
            outer_step=state.outer_step + 1,
          )
          log.validated(t, measured, probabilities, shares(job, state))
          checkpoints.save(state)
      except Interrupted:
        log.flush()
        checkpoints.save_interrupted(state)
        raise


def shares(job: Job, state: TrainState) -> np.ndarray:
  """Returns the share of each threat in future mini batches."""
  turns = range(len(job.names))
  each = [job.policy.probabilities(state.policy, turn) for turn in turns]
  return np.mean(each, axis=0)


# ----------------------------------------------------------------- validation


class Measured(NamedTuple):
  """The result of a validation.

  Attributes:
    validation: the loss and accuracy under each threat, for the policy.
    natural: the accuracy without an attack.
    reached: the losses under the attacks of training, on the images of the
      check, [k].
    possible: the losses under `setup.PROBE` on the same images, [k].
  """

  validation: Validation
  natural: float
  reached: np.ndarray
  possible: np.ndarray


def validate(
  job: Job, state: TrainState, check_stop: Callable[[], None]
) -> Measured:
  """Measures a network on the validation set, with the radii of training.

  Args:
    job: the run.
    state: the state with the network to attack.
    check_stop: called between batches; may raise to stop.
  """
  split = job.data.validation
  count = job.config.train.check_examples
  first = data.Split(*(array[:count] for array in split))
  scale = job.radius_scale(job.schedule.progress(np.asarray(state.chosen)))

  def attacked(step_fn, split):
    """Returns loss and correctness of each example and threat, [k, N]."""
    each = [
      _judge(
        job,
        split,
        lambda batch, i=i: step_fn(state.variables, jnp.int32(i), batch, scale),
        check_stop,
      )
      for i in range(len(job.names))
    ]
    return [np.stack(rows) for rows in zip(*each, strict=True)]

  losses, correct = attacked(job.validation_step, split)
  reached = possible = losses[:, : count or None]
  if count:
    possible = attacked(job.probe_step, first)[0]
    if job.trained_step is not job.validation_step:
      reached = attacked(job.trained_step, first)[0]
  _, natural = _judge(
    job,
    split,
    lambda batch: job.natural_step(state.variables, batch),
    check_stop,
  )
  mean_losses = losses.mean(axis=1)
  if not np.isfinite(mean_losses).all():
    named = dict(zip(job.names, mean_losses.tolist(), strict=True))
    raise Diverged(
      f'A validation loss is not finite after step {int(state.step)}: {named}. '
      f'{_WHAT_NOW}'
    )
  return Measured(
    validation=Validation(
      losses=jnp.asarray(mean_losses, jnp.float32),
      accuracies=jnp.asarray(correct.mean(axis=1), jnp.float32),
    ),
    natural=float(natural.mean()),
    reached=reached.mean(axis=1),
    possible=possible.mean(axis=1),
  )


def _judge(job, split, judge, check_stop) -> tuple[np.ndarray, np.ndarray]:
  """Returns loss and correctness of each example of a split, [N]."""
  size = devices.round_up(min(job.config.train.batch_size, len(split.labels)))
  found = []
  for rows, mask in data.padded_batches(len(split.labels), size):
    judged = judge(setup.make_batch(split, rows))
    found.append([np.asarray(column, np.float64)[mask] for column in judged])
    check_stop()
  losses, correct = (np.concatenate(c) for c in zip(*found, strict=True))
  return losses, correct


# -------------------------------------------------------------------- the log


class _Log(contextlib.AbstractContextManager):
  """Writes rows of metrics and shows progress.

  There is a row per log interval and per outer step. A gradient evaluation is
  one image once forward and back, in attacks, updates and validations. The
  check of the training attack and the forward passes that judge the images of
  a validation are not counted.

  Attributes:
    step: the number of mini batches so far.
    chosen: the number of mini batches of each threat so far, [k].
  """

  def __init__(
    self, job: Job, workdir: epath.Path, state: TrainState, resumed: bool
  ):
    self.job, self.step = job, int(state.step)
    self.chosen = np.array(state.chosen, np.int64)
    train = job.config.train
    self.metrics = Metrics(
      workdir,
      resume_step=self.step if resumed else None,
      outer_step=int(state.outer_step),
    )
    evaluation_cost = evaluation.gradients(
      job.config, len(job.evaluated.labels), job.data.num_classes
    )
    self.progress = Progress(
      job.schedule.expected_steps(self.chosen),
      start=self.step,
      batch_size=train.batch_size,
      log_every=train.log_every,
      after=evaluation_cost / job.batch_gradients.mean(),
    )
    rows = self.metrics.rows
    before = rows[-1] if rows else {}
    self._outer = [row for row in rows if row['kind'] == 'outer']
    last_step = self._outer[-1]['step'] if self._outer else 0
    self._chosen_before = sum(  # This outer step.
      (
        np.array(list(row['chosen'].values()))
        for row in rows
        if row['kind'] == 'train' and row['step'] <= last_step
      ),
      start=np.zeros_like(self.chosen),
    )
    self._validations = int(state.outer_step)
    self._validations += bool(job.policy.validates_first and self.step)
    self._seconds_before = before.get('seconds', 0.0)
    self._started = time.monotonic()
    self._indices, self._losses = [], []
    self.show('compiling')

  def __exit__(self, *_) -> None:
    self.progress.close()
    self.metrics.close()

  def show(self, note: str) -> None:
    """Shows the progress of training."""
    self.progress.update(
      self.step, note, self.job.schedule.expected_steps(self.chosen)
    )

  def trained(self, index: jax.Array, loss: jax.Array) -> None:
    """Records one mini batch, attacked by threat number `index`."""
    if self._losses:  # The host stays only one step ahead of the device.
      self._losses[-1].block_until_ready()
    # The index was known before the device began this step, so this is fast.
    self._indices.append(int(index))
    self._losses.append(loss)
    self.step += 1
    self.chosen[self._indices[-1]] += 1
    self.show('training')
    if self.step % self.job.config.train.log_every == 0:
      self.flush()

  def flush(self) -> None:
    """Writes a row for the mini batches since the last one."""
    if not self._losses:
      return
    job = self.job
    losses = np.asarray(jax.device_get(self._losses))
    first = self.step - len(losses)
    if not np.isfinite(losses).all():
      raise Diverged(
        f'The training loss is not finite between steps {first} and '
        f'{self.step}. {_WHAT_NOW}'
      )
    before = self.chosen.copy()
    before[self._indices[-1]] -= 1
    chosen = np.bincount(self._indices, minlength=len(job.names))
    one_is_chosen = config_lib.METHODS[job.config.method][0] == 'one'
    self.metrics.write(
      'train',
      self.step,
      epoch=self.step / job.schedule.steps_per_epoch,
      loss=losses.mean(),
      learning_rate=job.learning_rate(
        self.step - 1, job.schedule.progress(before)
      ),
      images_per_second=self.progress.images_per_second,
      chosen=self._by_name(chosen if one_is_chosen else 0 * chosen),
      **self._cost(),
    )
    self._indices, self._losses = [], []

  def count_validation(self) -> None:
    """Counts a validation of all threats."""
    self._validations += 1

  def validated(
    self,
    t: int,
    measured: Measured,
    probabilities: np.ndarray,
    weights: np.ndarray,
  ) -> None:
    """Records the end of an outer step.

    Args:
      t: the number of the outer step, from 0.
      measured: the result of its validation.
      probabilities: the share of each threat, as known before this outer step.
      weights: the share of each threat in the next one.
    """
    job = self.job
    losses, accuracies = map(np.asarray, measured.validation)
    radius_scale = job.radius_scale(job.schedule.progress(self.chosen))
    row = {
      'radius_scale': float(radius_scale),
      'validation_loss': self._by_name(losses),
      'validation_accuracy': self._by_name(accuracies),
    }
    kind, _ = config_lib.METHODS[job.config.method]
    if kind in ('one', 'avg'):  # Else no mixture of the threats is played.
      counts = self.chosen - self._chosen_before
      self._chosen_before = self.chosen.copy()
      played = counts / counts.sum() if job.policy.observes else probabilities
      row['played'] = self._by_name(played)
      self._outer.append(row)
      row['game'] = game.last(self._outer, job.config.policy.signal)
    self.metrics.write(
      'outer',
      self.step,
      outer_step=t + 1,
      natural_accuracy=measured.natural,
      **row,
      weight=self._by_name(weights),
      check_examples=job.config.train.check_examples,
      probed_loss=self._by_name(measured.reached),
      possible_loss=self._by_name(measured.possible),
      **self._cost(),
    )
    worst = int(np.argmin(accuracies))
    self.progress.say(
      f'outer step {t + 1}/{job.config.train.T}: natural '
      f'{100 * measured.natural:.1f} %, worst {job.names[worst]} '
      f'{100 * accuracies[worst]:.1f} % (weight {weights[worst]:.2f})'
    )
    fooled = [
      f'{name} ({reached:.2f}, APGD {possible:.2f})'
      for name, reached, possible in zip(
        job.names, measured.reached, measured.possible, strict=True
      )
      if game.attack_is_fooled(reached, possible)
    ]
    if fooled:
      words = 'the network fools the training attack under '
      self.progress.say(textwrap.fill(words + ', '.join(fooled), 80))

  def _by_name(self, values) -> dict[str, Any]:
    return dict(zip(self.job.names, np.asarray(values).tolist(), strict=True))

  def _cost(self) -> dict[str, float]:
    seconds = self._seconds_before + time.monotonic() - self._started
    training = float(self.chosen @ self.job.batch_gradients)
    validating = self._validations * self.job.validation_gradients
    gradients = round(training + validating)
    return {'gradient_evaluations': gradients, 'seconds': seconds}


_WHAT_NOW = (
  'Earlier checkpoints are kept. Lower optimizer.learning_rate or raise '
  'train.ramp, in a new --workdir.'
)


class Diverged(UserError):  # noqa: N818
  """A loss is not finite."""


_STATUSES = {
  Interrupted: 'interrupted',
  KeyboardInterrupt: 'interrupted',
  Diverged: 'diverged',
}
