"""The metrics of a run; they can be read at any time, even after `kill -9`.

In the workdir:

  metrics.jsonl   one row per log interval and per outer step
  tensorboard/    the same numbers, `tensorboard --logdir=...`

  with Metrics(workdir, resume_step) as metrics:
    metrics.write('train', step, loss=loss, learning_rate=rate)
    metrics.write('outer', step, validation_loss={'pixel_linf': 1.2, ...})
"""

import io
import json
import math
import os
import time
from collections.abc import Iterator
from typing import Any

from etils import epath

from mwrobust.errors import UserError
from mwrobust.runtime import devices, files


def _open_log(path: epath.Path) -> io.RawIOBase:
  """Opens a file to append to, or to create, with its folder."""
  with files.explained(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    return _LogInBucket(path) if files.is_in_bucket(path) else _Log(path, 'a')


class _LogInBucket(io.RawIOBase):
  """A log as an object, which cannot be appended to.

  It is rewritten as a whole, at most once a minute and when flushed or closed,
  so a kill may cost the rows of a minute.
  """

  _SECONDS_BETWEEN_WRITES = 60.0

  def __init__(self, path: epath.Path):
    self._path = path
    self._data = path.read_bytes() if path.exists() else b''
    self._written_at = -math.inf
    self._is_new = True

  def write(self, data: bytes) -> None:
    self._data += data
    self._is_new = True
    if time.monotonic() - self._written_at > self._SECONDS_BETWEEN_WRITES:
      self.flush()

  def flush(self) -> None:
    if self._is_new:
      with files.explained(self._path):
        self._path.write_bytes(self._data)
      self._written_at = time.monotonic()
      self._is_new = False


class _Log(io.FileIO):
  """A file without a buffer, whose writes are complete."""

  def write(self, data: bytes) -> None:
    with files.explained(self.name):
      while data:  # A disk that fills up takes a part before it complains.
        data = data[super().write(data) :]


class Metrics:
  """Writes rows of numbers to metrics.jsonl and TensorBoard.

  A run that resumes writes the rows after its checkpoint again, so they are
  dropped here first, and with them a last line that a kill cut short. Log a
  step before its checkpoint is saved, and no row is lost or doubled.

  Attributes:
    rows: the earlier rows that were kept.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    resume_step: int | None,
    outer_step: float = math.inf,
  ):
    """Opens the logs of a run.

    Args:
      workdir: the folder of the run, created if it is missing.
      resume_step: the step of the checkpoint the run resumes from: later rows
        are dropped. None if it starts from the beginning: all are dropped.
      outer_step: the outer steps complete at that checkpoint: a row that ends a
        later one is dropped even if its step is not later.

    Raises:
      UserError: the workdir cannot be written, or metrics.jsonl is not valid.
    """
    # Imported here because it is slow. The record writer, because the event
    # file writer around it imports TensorFlow where that is installed, and
    # fails in another thread if the disk is full.
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    last_step = -1 if resume_step is None else int(resume_step)
    rows = epath.Path(workdir, 'metrics.jsonl')
    # A new file each time, as appending to a record that a kill cut short hides
    # all that follows. TensorBoard reads them in the order of their names.
    events = epath.Path(
      workdir, 'tensorboard', f'events.out.tfevents.{time.time_ns()}'
    )
    if not devices.is_first_process():
      rows = events = epath.Path(os.devnull)
    with files.explained(rows):
      self.rows = _drop_rows(rows, last_step, outer_step)
    self._rows = _open_log(rows)
    self._events = RecordWriter(_open_log(events))
    self._event = Event
    self._write_event(file_version='brain.Event:2')
    # Tells TensorBoard to drop what it has read from this step on.
    self._write_event(step=last_step + 1, session_log={'status': 'START'})

  def write(self, kind: str, step: int, **values: Any) -> None:
    """Writes one row of numbers, arrays and dicts; a kill cannot lose it.

    In a bucket this holds for rows of kind 'outer', after which a checkpoint is
    saved, and for what came before them.

    In TensorBoard a dict is a group of its own, `validation_loss/dct_l1`, and
    any other number belongs to its kind, `train/loss`. Text stays in the JSONL.
    """
    step = int(step)
    row = files.plain({'kind': kind, 'step': step, **values})
    self._rows.write(json.dumps(row, allow_nan=False).encode() + b'\n')
    if kind == 'outer':
      self._rows.flush()
    scalars = [
      {'tag': tag, 'simple_value': number}
      for name, value in values.items()
      for tag, number in _scalars(
        name if isinstance(value, dict) else f'{kind}/{name}', value
      )
    ]
    self._write_event(step=step, summary={'value': scalars})

  def close(self) -> None:
    """Closes both logs."""
    self._rows.close()
    self._events.close()

  def __enter__(self) -> 'Metrics':
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def _write_event(self, **fields: Any) -> None:
    event = self._event(wall_time=time.time(), **fields)
    self._events.write(event.SerializeToString())


def _drop_rows(
  path: epath.Path, step: int, outer_step: float
) -> list[dict[str, Any]]:
  """Drops the rows of later steps or outer steps, and a torn last line.

  Returns:
    The rows that stay.
  """
  if not path.exists():
    return []
  lines = path.read_bytes().splitlines(keepends=True)
  kept = []
  for number, line in enumerate(lines, start=1):
    if not line.endswith(b'\n'):
      break
    try:
      row = json.loads(line)
      if row['step'] <= step and row.get('outer_step', 0) <= outer_step:
        kept.append(line)
    except (ValueError, TypeError, KeyError) as error:
      raise UserError(
        f'{path}, line {number}: not a row of metrics: {line[:40]!r}. '
        'Fix the line, or move the file away to start a new one.'
      ) from error
  if kept != lines:
    files.replace(path, b''.join(kept))
  return [json.loads(line) for line in kept]


def _scalars(tag: str, value: Any) -> Iterator[tuple[str, float]]:
  """Yields the numbers inside `value`, named by the path that leads to them."""
  if hasattr(value, 'tolist'):
    value = value.tolist()
  if isinstance(value, list | tuple):
    value = dict(enumerate(value))
  if isinstance(value, dict):
    for name, item in value.items():
      yield from _scalars(f'{tag}/{name}', item)
  elif isinstance(value, int | float):
    yield tag, value
