"""Checkpoints; the only file that knows Orbax.

  checkpoints/<t>        the state after outer step t: the paper's theta_t
  interrupted/<step>     the state a run was interrupted in, between two t

A save is whole or it is not there. What cannot be read is put aside for the one
before it, and a run that goes on from there makes it again.
"""

import contextlib
import logging
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from mwrobust.errors import UserError
from mwrobust.state import TrainState


class Checkpoints:
  """The checkpoints of a run."""

  def __init__(self, workdir: pathlib.Path, keep: int | None):
    """Opens them, and clears away what a killed save left half done.

    Args:
      workdir: the folder of the run.
      keep: how many outer steps to keep; None for all.
    """
    self._workdir = workdir
    policies = ocp.training.preservation_policies
    outer = policies.PreserveAll() if keep is None else policies.LatestN(keep)
    self._outer = _open(workdir / 'checkpoints', outer)
    self._interrupted = _open(workdir / 'interrupted', policies.LatestN(1))

  def save(self, state: TrainState) -> None:
    """Saves the state after an outer step."""
    _save(self._outer, int(state.outer_step), state)

  def save_interrupted(self, state: TrainState) -> None:
    """Saves the state in the midst of an outer step."""
    _save(self._interrupted, int(state.step), state)

  def restore(
    self, like: TrainState, say: Callable[[str], None]
  ) -> TrainState | None:
    """The furthest state that can be read, or None if there is none.

    Args:
      like: a state of the same shapes.
      say: told of each checkpoint that could not be read.
    """
    found, unreadable = [], []
    for checkpointer in (self._outer, self._interrupted):
      for checkpoint in reversed(checkpointer.checkpoints):
        try:
          found.append(_load(checkpointer, checkpoint.step, like))
          break
        except Exception as error:
          unreadable.append((checkpointer, checkpoint.path))
          say(f'{checkpoint.path} cannot be read ({_reason(error)}).')
    if unreadable and not found:
      raise UserError(
        f'No checkpoint in {self._workdir} can be read. Choose another '
        '--workdir to start anew.'
      )
    for checkpointer, path in unreadable:
      aside = self._workdir / 'unreadable' / f'{path.parent.name}-{path.name}'
      say(f'Going back to the one before it; it is now {aside}.')
      aside.parent.mkdir(exist_ok=True)
      pathlib.Path(path).rename(aside)
      checkpointer.reload()
    return max(
      found,
      key=lambda state: (int(state.step), int(state.outer_step)),
      default=None,
    )

  def last(self, count: int, like: TrainState) -> list[TrainState]:
    """The states after the last `count` outer steps, oldest first."""
    steps = [checkpoint.step for checkpoint in self._outer.checkpoints]
    if len(steps) < count:
      raise UserError(
        f'{self._outer.directory} has the outer steps {steps}, but {count} are '
        'needed: train on, or lower train.h.'
      )
    states = []
    for step in steps[-count:]:
      try:
        states.append(_load(self._outer, step, like))
      except Exception as error:
        raise UserError(
          f'{self._outer.directory / str(step)} cannot be read '
          f'({_reason(error)}), and all of the last {count} are needed. '
          'Restore it from a backup, or train again in another --workdir.'
        ) from error
    return states

  def close(self) -> None:
    """Lets go of the folders."""
    for checkpointer in (self._outer, self._interrupted):
      # A save that failed has been told of, and would be raised again here.
      with _quiet(), contextlib.suppress(Exception):
        checkpointer.close()


def _open(directory: pathlib.Path, preservation_policy: Any):
  try:
    return ocp.training.Checkpointer(
      directory.absolute(),
      save_decision_policy=(
        ocp.training.save_decision_policies.FixedIntervalPolicy(1)
      ),
      preservation_policy=preservation_policy,
      cleanup_tmp_directories=True,
    )
  except OSError as error:
    raise UserError(
      f'Cannot write {directory}: {error}. Make it writable, or choose another '
      '--workdir.'
    ) from error


def _save(checkpointer, step: int, state: TrainState) -> None:
  if any(checkpoint.step == step for checkpoint in checkpointer.checkpoints):
    return  # Interrupted before the first step after a restore.
  try:
    with _quiet():
      if not checkpointer.save(step, state):
        raise ValueError('Orbax has declined it')
  except Exception as error:  # TensorStore has many words for a full disk.
    raise UserError(
      f'Cannot save a checkpoint in {checkpointer.directory}: '
      f'{_reason(error)}. The one before it is kept. Free some space or make '
      'the folder writable, and run the same command again.'
    ) from error


def _load(checkpointer, step: int, like: TrainState) -> TrainState:
  with _quiet():
    return checkpointer.load(step, jax.tree.map(_abstract, like))


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Keeps Orbax from printing the tracebacks of what it raises as well."""
  logger = logging.getLogger('absl')
  hook, level = threading.excepthook, logger.level
  threading.excepthook = lambda args: None
  logger.setLevel(logging.CRITICAL)
  try:
    yield
  finally:
    threading.excepthook = hook
    logger.setLevel(level)


def _reason(error: Exception) -> str:
  """The first line of the cause, where Orbax puts the useful text."""
  text = str(error.__cause__ or error).strip()
  return text.splitlines()[0] if text else type(error).__name__
