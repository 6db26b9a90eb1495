"""The main job, in the order of the paper's Figure 3.

`train_and_evaluate(config, workdir)` is the one entry for the command line,
tests and notebooks. It can be killed at any moment: run again, it goes on and
ends with the same parameters to the bit, because everything random is a
function of (seed, step) and a checkpoint is whole or not there.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from etils import epath

from mwrobust import config as config_lib
from mwrobust import data as data_lib
from mwrobust import run_evaluation
from mwrobust.checkpoints import Checkpoints
from mwrobust.errors import UserError
from mwrobust.job import (
  Job,
  check_training,
  make_batch,
  prepare,
  refuse_another_run,
  training_batch,
)
from mwrobust.run_evaluation import Evaluations
from mwrobust.runtime import devices
from mwrobust.runtime.files import write_json
from mwrobust.runtime.metrics import Metrics
from mwrobust.runtime.progress import Progress
from mwrobust.runtime.signals import Interrupted, Stop, stop_signals
from mwrobust.state import TrainState
from mwrobust.steps import Batch


def train_and_evaluate(
  config: ml_collections.ConfigDict,
  workdir: str,
  say: Callable[[str], None] = print,
) -> Evaluations:
  """Trains a network against all threats, then attacks it with each of them.

  Args:
    config: see `mwrobust/config.py`.
    workdir: where all results go. A run that is in it already is gone on with.
    say: told what a reader at the terminal should know.

  Returns:
    The outcomes by network (`'h=1'`, `'h=3 average'`, ...) and protocol.
  """
  config_lib.validate(config)
  workdir = epath.Path(workdir)
  refuse_another_run(workdir, config)
  job = prepare(config)
  if not (workdir / 'config.json').exists():
    write_json(workdir / 'config.json', json.loads(config.to_json()))
  keep = None if config.algorithm == 'ensemble' else max(2, config.train.h)

  def set_status(status: str) -> None:
    write_json(workdir / 'status.json', {'status': status})

  say(f'{config_lib.describe(config)}\nWorkdir {workdir}')
  with (
    contextlib.closing(Checkpoints(workdir, keep)) as checkpoints,
    stop_signals() as stop,
  ):
    set_status('running')
    try:
      train(job, workdir, checkpoints, stop, say)
      evaluations = run_evaluation.evaluate(
        job, config, workdir, stop.check, say
      )
    except BaseException as error:
      set_status(_STATUSES.get(type(error), 'failed'))
      raise
    set_status('done')
  return evaluations


# ------------------------------------------------------------------- training


def train(
  job: Job,
  workdir: epath.Path,
  checkpoints: Checkpoints,
  stop: Stop,
  say: Callable[[str], None],
) -> None:
  """Figure 3: T times, r epochs, then a validation and an update."""
  # ---- Go on from the last checkpoint, if there is one
  check_training(job)
  state = job.init()
  restored = checkpoints.restore(state, say)
  if restored is not None:
    state = restored
    if int(state.outer_step) == job.config.train.T:
      say(f'{workdir} is trained already, all {job.steps} steps.')
      return
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
        log.validated(t, losses, shares(job, state))
        checkpoints.save(state)
    except Interrupted:
      log.flush()
      checkpoints.save_interrupted(state)
      raise


def mini_batches(
  job: Job, state: TrainState, t: int, start: int
) -> Iterator[tuple[np.int32, Batch]]:
  """The mini batches of outer step t from step `start`, each with its threat.

  The weights stand still during an outer step, so all its threats are sampled
  at once, with p_i = w_i / sum_j w_j.
  """
  first, last = (u * job.steps_per_outer_step for u in (t, t + 1))
  indices = np.asarray(job.choose(state.policy, jnp.arange(first, last)))
  for step in range(start, last):
    yield indices[step - first].astype(np.int32), training_batch(job, step)


def shares(job: Job, state: TrainState) -> np.ndarray:
  """How often each threat is to be chosen from now on; turns are averaged."""
  turns = range(len(job.pairs))
  each = [job.policy.probabilities(state.policy, turn) for turn in turns]
  return np.mean(each, axis=0)


def validation_losses(
  job: Job, state: TrainState, step: int, check_stop: Callable[[], None]
) -> jax.Array:
  """The losses L_i on the validation set, with the radii of this step.

  Args:
    job: the run.
    state: whose network to attack.
    step: mini batches done.
    check_stop: may raise to end it, between batches.
  """
  labels = job.data.validation.labels
  scale = job.radius_scale(max(0, step - 1))
  totals = np.zeros(len(job.pairs))
  batch_size = devices.round_up(job.config.eval.batch_size)
  for rows, mask in data_lib.padded_batches(len(labels), batch_size):
    batch = make_batch(job.data.validation, rows)
    for index in range(len(job.pairs)):
      losses = job.validation_step(
        state.variables, jnp.int32(index), batch, scale
      )
      totals[index] += np.sum(np.asarray(losses, np.float64), where=mask)
      check_stop()
  losses = totals / len(labels)
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
    before = metrics.rows[-1] if metrics.rows else {}
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
    _, attack = job.pairs[index]
    attack_steps = attack.steps if job.policy.attacks else 0
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
    counts = np.bincount(self._indices, minlength=len(self.job.pairs))
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
    steps = sum(attack.steps for _, attack in self.job.pairs)
    self._gradients += images * steps

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


_STATUSES = {
  Interrupted: 'interrupted',
  KeyboardInterrupt: 'interrupted',
  Diverged: 'diverged',
}
