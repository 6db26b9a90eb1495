"""Checkpoints; the only file that uses Orbax.

  checkpoints/<t>        the state after outer step t: the paper's theta_t
  interrupted/<step>     the state of a run interrupted within an outer step

Saves are atomic. A checkpoint that cannot be read is put aside, and the run
resumes from the one before it.
"""

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from mwrobust.errors import UserError
from mwrobust.runtime import devices
from mwrobust.runtime.signals import silenced_threads
from mwrobust.training.state import TrainState


class Checkpoints:
  """The checkpoints of a run."""

  def __init__(self, workdir: epath.Path, keep: int | None):
    """Opens the checkpoints and removes what a killed save left behind.

    The last `keep` outer steps are kept, or all.
    """
    self._workdir = epath.Path(workdir)
    self._interrupted_folder = self._workdir / 'interrupted'
    self._outer = _open(workdir / 'checkpoints', keep, cleanup=True)
    self._interrupted = None
    if self._interrupted_folder.is_dir():
      self._open_interrupted()
    self._until_closed = contextlib.ExitStack()

  def save(self, state: TrainState) -> None:
    """Saves the state after an outer step, and removes interrupted states."""
    self._save(self._outer, int(state.outer_step), state)
    if self._interrupted:
      self._interrupted.close()
      self._interrupted = None
      if devices.is_first_process():
        self._interrupted_folder.rmtree()
      devices.wait_for_all('the interrupted state is removed')

  def save_interrupted(self, state: TrainState) -> None:
    """Saves the state in the middle of an outer step."""
    if not self._interrupted:
      self._open_interrupted()
    self._save(self._interrupted, int(state.step), state)

  def _open_interrupted(self) -> None:
    self._interrupted = _open(self._interrupted_folder, 1, cleanup=True)

  @property
  def _opened(self) -> list:
    return list(filter(None, (self._outer, self._interrupted)))

  def _save(self, checkpointer, step: int, state: TrainState) -> None:
    if any(checkpoint.step == step for checkpoint in checkpointer.checkpoints):
      return  # Interrupted before the first step after a restore.
    with contextlib.ExitStack() as quiet:
      quiet.enter_context(_quiet())
      try:
        with devices.others_do_not_ask_to_stop():
          if not checkpointer.save(step, state):
            raise ValueError('Orbax declined to save it')
      except Exception as error:
        # TensorStore raises many kinds for a full disk, and the threads of the
        # save continue to fail until everything is closed.
        self._until_closed.enter_context(quiet.pop_all())
        raise UserError(
          f'Cannot save a checkpoint in {checkpointer.directory}: '
          f'{_reason(error)}. The previous one is kept. Free some space or '
          'make the folder writable, and run the same command again.'
        ) from error

  def restore(
    self, like: TrainState, say: Callable[[str], None]
  ) -> TrainState | None:
    """Returns the latest state that can be read, or None if there is none.

    `like` is a state of the same shapes.
    """
    found, aside = [], []
    for checkpointer in self._opened:
      for checkpoint in reversed(checkpointer.checkpoints):
        try:
          state, reason = _load(checkpointer, checkpoint.step, like), ''
        except UserError:
          raise
        except Exception as error:
          if _may_pass(error):
            raise UserError(
              f'{checkpoint.path} could not be read just now '
              f'({_reason(error)}). Nothing was changed: run the same command '
              'again.'
            ) from error
          state, reason = None, _reason(error)
        # If one process cannot read it, none resumes from it.
        if all(devices.of_all_processes(state is not None)):
          found.append((checkpointer, checkpoint.path, state))
          break
        aside.append((checkpointer, checkpoint.path))
        reason = reason or 'in another process'
        say(f'{checkpoint.path} cannot be read ({reason}).')
    if aside and not found:
      raise UserError(
        f'No checkpoint in {self._workdir} can be read. Choose another '
        '--workdir to start again.'
      )
    # A lost outer step is trained again even if there is a later state, because
    # its parameters will be averaged.
    lost = [int(path.name) for c, path in aside if c is self._outer]
    states = []
    for checkpointer, path, state in found:
      if lost and int(state.outer_step) >= min(lost):
        aside.append((checkpointer, path))
      else:
        states.append(state)
    for checkpointer, path in aside:
      name = f'{path.parent.name}-{path.name}-{time.time_ns()}'
      to = self._workdir / 'put_aside' / name
      say(f'Resuming from before {path}, which was moved to {to}.')
      devices.wait_for_all('all have read')
      if devices.is_first_process():
        to.parent.mkdir(exist_ok=True)
        epath.Path(path).rename(to)
      devices.wait_for_all('it is put aside')
      checkpointer.reload()
    return max(
      states,
      key=lambda state: (int(state.step), int(state.outer_step)),
      default=None,
    )

  def close(self) -> None:
    """Closes the folders."""
    for checkpointer in self._opened:
      # A failed save has been reported, and would be raised again here.
      with _quiet(), contextlib.suppress(Exception):
        checkpointer.close()
    self._until_closed.close()


def last(workdir: epath.Path, count: int, like: TrainState) -> list[TrainState]:
  """Returns the states after the last `count` outer steps, oldest first.

  It only reads, so it does not disturb a training in the workdir.
  """
  folder = workdir / 'checkpoints'
  if not folder.is_dir():
    raise UserError(
      f'{workdir} has no checkpoints: train there first, or name the --workdir '
      'of a run.'
    )
  with contextlib.closing(_open(folder, None, cleanup=False)) as checkpointer:
    steps = [checkpoint.step for checkpoint in checkpointer.checkpoints]
    if len(steps) < count:
      raise UserError(
        f'{folder} has the outer steps {steps}, but {count} are needed: '
        'continue the training.'
      )
    steps = steps[-count:]
    if steps != list(range(steps[0], steps[0] + count)):
      raise UserError(
        f'{folder} lacks one of its last {count} outer steps; it has {steps}: '
        'continue the training, or train again in another --workdir.'
      )
    states = []
    for step in steps:
      try:
        states.append(_load(checkpointer, step, like))
      except UserError:
        raise
      except Exception as error:
        raise UserError(
          f'{folder / str(step)} cannot be read ({_reason(error)}), and all of '
          f'the last {count} are needed. Restore it from a backup, or train '
          'again in another --workdir.'
        ) from error
    return states


def _open(directory: epath.Path, keep: int | None, *, cleanup: bool):
  policies = ocp.training.preservation_policies
  try:
    return ocp.training.Checkpointer(
      directory if '://' in os.fspath(directory) else directory.absolute(),
      save_decision_policy=(
        ocp.training.save_decision_policies.FixedIntervalPolicy(1)
      ),
      preservation_policy=(
        policies.PreserveAll() if keep is None else policies.LatestN(keep)
      ),
      cleanup_tmp_directories=cleanup,
    )
  except OSError as error:
    raise UserError(
      f'Cannot write {directory}: {error}. Make it writable, or choose another '
      '--workdir.'
    ) from error


def _load(checkpointer, step: int, like: TrainState) -> TrainState:
  with _quiet():
    theirs = _shapes(checkpointer.metadata(step).metadata)
    ours = _shapes(like)
    # Without metadata the checkpoint is damaged, and `load` raises.
    names = ours.keys() | theirs.keys() if theirs else ()
    # The parameters come first, because a user knows those.
    for leaf in sorted(names, key=lambda n: (not n.startswith('params'), n)):
      there, here = theirs.get(leaf, 'not'), ours.get(leaf, 'not')
      if there != here:
        raise UserError(
          f'{checkpointer.directory / str(step)} holds another network: {leaf} '
          f'is {there} there, {here} here. Give the config of its training.'
        )
    return checkpointer.load(step, jax.tree.map(_abstract, like))


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of the leaves by name."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): tuple(leaf.shape)
    for path, leaf in leaves
  }


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Keeps Orbax from printing tracebacks of errors that it also raises."""
  logger = logging.getLogger('absl')
  level = logger.level
  logger.setLevel(logging.CRITICAL)
  try:
    with silenced_threads():
      yield
  finally:
    logger.setLevel(level)


def _may_pass(error: BaseException | None) -> bool:
  """Returns whether the error may be temporary, so that a retry may succeed."""
  if error is None:
    return False
  kinds = ConnectionError, TimeoutError, PermissionError, InterruptedError
  numbers = errno.EIO, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ESTALE
  words = 'UNAVAILABLE', 'DEADLINE_EXCEEDED', 'PERMISSION_DENIED'
  return (
    isinstance(error, kinds)
    or getattr(error, 'errno', None) in numbers
    or any(word in str(error) for word in words)
    or _may_pass(error.__cause__)
  )


def _reason(error: Exception) -> str:
  """Returns the first line of the cause, where Orbax puts the useful text."""
  text = str(error.__cause__ or error).strip()
  return text.splitlines()[0] if text else type(error).__name__
