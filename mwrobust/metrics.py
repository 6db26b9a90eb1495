"""What a run leaves behind and what it shows while it runs.

In the workdir, readable at any moment, even after `kill -9`:

  config.json     `write_json`: the resolved config
  status.json     `write_json`: running, done, interrupted, diverged or failed
  metrics.jsonl   `Metrics`: one row per log interval and per outer step
  tensorboard/    `Metrics`: the same numbers, `tensorboard --logdir=...`

On the terminal, or in the log file that stands in for it, a `Progress` line:

  with Metrics(workdir, resume_step) as metrics, Progress(...) as progress:
    metrics.write('train', step, loss=loss, learning_rate=rate)
    metrics.write('outer', step, validation_loss={'pixel_linf': 1.2, ...})
    progress.update(step, 'training')
    progress.say('outer step 3: worst loss dct_l1')
"""

import contextlib
import errno
import io
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from etils import epath

from mwrobust import sharding
from mwrobust.errors import UserError

# ---- Files ------------------------------------------------------------------


@contextlib.contextmanager
def _explained(path: str | os.PathLike) -> Iterator[None]:
  """Turns what the disk has to say about `path` into a `UserError`."""
  try:
    yield
  except OSError as error:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
      cure = 'Free some space and run again: it resumes from its checkpoint.'
    else:
      cure = 'Make it writable, or choose another workdir.'
    raise UserError(f'Cannot write {path}: {error}. {cure}') from error


def _replace(path: epath.Path, data: bytes) -> None:
  """Writes a file whole or, whatever happens, not at all."""
  if _is_in_bucket(path):  # Objects appear whole.
    path.write_bytes(data)
    return
  temporary = path.with_name(f'.{path.name}.tmp')
  try:
    with open(temporary, 'wb') as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
  """`value` as strict JSON knows it: no arrays, null for NaN and infinity."""
  if hasattr(value, 'tolist'):  # NumPy and JAX, scalars and arrays.
    value = value.tolist()
  if isinstance(value, dict):
    return {str(key): _plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
  """Writes a file: a reader sees the old one or the new, never half of it.

  Of several processes, the first writes.

  Args:
    path: the file; its folder is made where it is missing.
    data: what is to be in it.

  Raises:
    UserError: the disk is full, or the file may not be written.
  """
  if not sharding.is_first_process():
    return
  path = epath.Path(path)
  with _explained(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, data)


def write_json(path: str | os.PathLike, value: Any) -> None:
  """Writes `value` as JSON, as `write_bytes` does.

  Args:
    path: the file.
    value: dicts, lists, strings and numbers, NumPy's and JAX's among them. NaN
      and infinity become null.
  """
  text = json.dumps(_plain(value), indent=2, allow_nan=False) + '\n'
  write_bytes(path, text.encode())


# ---- Metrics ----------------------------------------------------------------


def _open_log(path: epath.Path, mode: str) -> io.RawIOBase:
  """Opens a file to append to, or to create, with its folder."""
  with _explained(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    return (_LogInBucket if _is_in_bucket(path) else _Log)(path, mode)


def _is_in_bucket(path: epath.Path) -> bool:
  return '://' in os.fspath(path)


class _LogInBucket(io.RawIOBase):
  """A log as an object, which cannot be appended to: it is written anew.

  At most once a minute and when it is flushed or closed, so a kill may cost a
  minute of what was written since.
  """

  _SECONDS_BETWEEN_WRITES = 60.0

  def __init__(self, path: epath.Path, mode: str):
    self._path = path
    self._data = path.read_bytes() if mode == 'a' and path.exists() else b''
    self._written_at = -math.inf
    self._is_new = True

  def write(self, data: bytes) -> None:
    self._data += data
    self._is_new = True
    if time.monotonic() - self._written_at > self._SECONDS_BETWEEN_WRITES:
      self.flush()

  def flush(self) -> None:
    if self._is_new:
      with _explained(self._path):
        self._path.write_bytes(self._data)
      self._written_at = time.monotonic()
      self._is_new = False


class _Log(io.FileIO):
  """A file whose writes are whole and leave the process at once."""

  def write(self, data: bytes) -> None:
    with _explained(self.name):
      while data:  # A disk that fills up takes a part before it complains.
        data = data[super().write(data) :]


class Metrics:
  """Writes rows of numbers to metrics.jsonl and TensorBoard.

  A run that resumes writes the rows after its checkpoint again, so they are
  dropped here first, and with them a last line that a kill cut short. Log a
  step before its checkpoint is saved, and no row is lost or doubled.

  Attributes:
    last_row: of those that were there and stay; None if there is none.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    resume_step: int | None,
    outer_step: float = math.inf,
  ):
    """Opens the logs of a run.

    Args:
      workdir: the folder of the run, made where it is missing.
      resume_step: the step of the checkpoint the run resumes from: later rows
        are dropped. None where it starts from the beginning: all are.
      outer_step: the outer steps complete at that checkpoint: a row that ends a
        later one is dropped even if its step is not later.

    Raises:
      UserError: the workdir cannot be written, or metrics.jsonl is not ours.
    """
    # Imported here because it is slow. The record writer, because the event
    # file writer around it imports TensorFlow where that is installed, and
    # meets a full disk in a thread of its own.
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    last_step = -1 if resume_step is None else int(resume_step)
    rows = epath.Path(workdir, 'metrics.jsonl')
    # A new file each time, as appending to a record that a kill cut short hides
    # all that follows. TensorBoard reads them in the order of their names.
    events = epath.Path(
      workdir, 'tensorboard', f'events.out.tfevents.{time.time_ns()}'
    )
    if sharding.is_first_process():
      with _explained(rows):
        self.last_row = _drop_rows(rows, last_step, outer_step)
      self._rows = _open_log(rows, 'a')
      self._events = RecordWriter(_open_log(events, 'x'))
    else:
      nowhere = epath.Path(os.devnull)
      self.last_row = None
      self._rows = _open_log(nowhere, 'a')
      self._events = RecordWriter(_open_log(nowhere, 'a'))
    self._event = Event
    self._write_event(file_version='brain.Event:2')
    # TensorBoard's word for: forget what you have seen from this step on.
    self._write_event(step=last_step + 1, session_log={'status': 'START'})

  def write(self, kind: str, step: int, **values: Any) -> None:
    """Writes one row, which a kill from then on cannot lose.

    In a bucket this holds for rows of kind 'outer', after which a checkpoint is
    saved, and for what came before them.

    In TensorBoard a dict is a group of its own, `validation_loss/dct_l1`, and
    any other number belongs to its kind, `train/loss`. Text stays in the JSONL.

    Args:
      kind: which sort of row: 'train' or 'outer'.
      step: the training step, the x axis.
      **values: numbers, arrays and dicts of them by name.
    """
    step = int(step)
    row = _plain({'kind': kind, 'step': step, **values})
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
) -> dict[str, Any] | None:
  """Drops the rows of later steps or outer steps, and a torn last line.

  Returns:
    The last row that stays.
  """
  if not path.exists():
    return None
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
        'Mend the line, or move the file away to start a new one.'
      ) from error
  if kept != lines:
    _replace(path, b''.join(kept))
  return json.loads(kept[-1]) if kept else None


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


# ---- Progress ---------------------------------------------------------------


def format_duration(seconds: float) -> str:
  """Formats a duration as a clock does.

  >>> [format_duration(s) for s in (0.4, 192, 3723, 183845)]
  ['0:00', '3:12', '1:02:03', '2d 3:04:05']
  """
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  days, hours = divmod(hours, 24)
  if days:
    return f'{days}d {hours}:{minutes:02}:{seconds:02}'
  if hours:
    return f'{hours}:{minutes:02}:{seconds:02}'
  return f'{minutes}:{seconds:02}'


def progress_line(
  step: int,
  total: int,
  images_per_second: float | None,
  seconds_left: float | None,
  width: int | None,
  note: str,
) -> str:
  """Formats one line of progress.

  >>> progress_line(1200, 9000, 842.3, 571.0, None, 'training')
  'training  step 1200/9000  13%  842 images/s  9:31 left'
  >>> progress_line(1200, 9000, 842.3, 571.0, 68, 'training')
  'training  step 1200/9000  13%  842 images/s  9:31 left  [#---------]'

  Args:
    step: steps done.
    total: steps in the whole run.
    images_per_second: None where it is not known yet.
    seconds_left: None where it is not known yet.
    width: columns to fill with a bar and not to exceed; None for no bar.
    note: what the run is doing.
  """
  parts = [
    note,
    f'step {step:{len(str(total))}}/{total}',
    f'{100 * step // total:2}%',  # Rounded down: 100% means done.
  ]
  if images_per_second is not None:
    digits = '.2g' if images_per_second < 10 else '.0f'
    parts.append(f'{images_per_second:{digits}} images/s')
  if seconds_left is not None:
    parts.append(f'{format_duration(seconds_left)} left')
  line = '  '.join(parts)
  if width is None:
    return line
  room = width - len(line) - len('  []')
  if room >= 10:
    done = room * step // total
    line += f'  [{"#" * done}{"-" * (room - done)}]'
  return line[:width]


class Progress:
  """Tells how far the run is: a live bar on a terminal, lines in a log file.

  The rate is taken over this process's own steps, without the first, which
  compiles: a resumed run does not count what another did. Validation is inside
  it, so that the time left is the time the user waits.
  """

  _SECONDS_BETWEEN_REDRAWS = 0.2

  def __init__(
    self,
    total: int,
    *,
    start: int,
    batch_size: int,
    log_every: int,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Prepares the progress of a run; nothing is shown before `update`.

    Args:
      total: steps in the whole run.
      start: steps done before this process began.
      batch_size: images in a step.
      log_every: steps between two lines in a log file; a terminal is redrawn
        some five times a second.
      stream: where to show it, stderr by default.
      clock: the seconds since any fixed moment.
    """
    self._total = total
    self._start = start
    self._batch_size = batch_size
    self._log_every = log_every
    if stream is None:
      first = sharding.is_first_process()
      stream = sys.stderr if first else open(os.devnull, 'w')  # noqa: SIM115
    self._stream = stream
    self._clock = clock
    self._live = self._stream.isatty()
    self._first: tuple[int, float] | None = None  # (step, seconds) to time from
    self._last = (start, clock())  # (step, seconds) of the last update
    self._note = ''
    self._bar = ''  # What stands on the last line of a terminal now.
    self._drawn_at = -math.inf
    self._logged_step: int | None = None

  @property
  def images_per_second(self) -> float | None:
    """The rate at the last update; None before the second step of ours."""
    if self._first is None:
      return None
    steps = self._last[0] - self._first[0]
    seconds = self._last[1] - self._first[1]
    return steps * self._batch_size / seconds if steps and seconds else None

  def update(self, step: int, note: str = 'training') -> None:
    """Says that `step` steps are done; call it at every step, it is cheap.

    Args:
      step: steps done in the whole run.
      note: what the run does next; a new note is shown at once on a terminal.
    """
    now = self._clock()
    self._last = step, now
    if self._first is None and step > self._start:
      self._first = self._last
    changed = note != self._note
    self._note = note
    if self._live:
      idle = now - self._drawn_at >= self._SECONDS_BETWEEN_REDRAWS
      if idle or changed or step == self._total:
        self._drawn_at = now
        # The last column stays free: some terminals wrap when it is filled.
        width = shutil.get_terminal_size().columns - 1
        self._bar = self._line(width).ljust(width)
        self._show('\r' + self._bar)
    elif step != self._logged_step and (
      step % self._log_every == 0 or step == self._total
    ):
      self._logged_step = step
      self._show(self._line(None) + '\n')

  def say(self, text: str) -> None:
    """Prints `text` on lines of its own, above the bar."""
    erase = '\r' + ' ' * len(self._bar) + '\r' if self._bar else ''
    self._show(erase + text + '\n' + self._bar)

  def close(self) -> None:
    """Leaves the bar as it is and the cursor below it."""
    if self._bar:
      self._show('\n')
      self._bar = ''

  def __enter__(self) -> 'Progress':
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def _line(self, width: int | None) -> str:
    step, rate = self._last[0], self.images_per_second
    left = (self._total - step) * self._batch_size / rate if rate else None
    return progress_line(step, self._total, rate, left, width, self._note)

  def _show(self, text: str) -> None:
    # A terminal that went away must not end a training of days.
    with contextlib.suppress(OSError):
      self._stream.write(text)
      self._stream.flush()
