"""Shows how far a run is: a live bar on a terminal, plain lines in a log file.

with Progress(total, start=0, batch_size=128, log_every=100) as progress:
  progress.update(step, 'training')
  progress.say('outer step 3: worst loss dct_l1')
"""

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from mwrobust.runtime import devices


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


class Progress:
  """Shows a live bar on a terminal, or plain lines in a log file.

    training  step 1200/9000  13%  842 images/s  9:31 left  [#---------]

  The rate counts the steps of this process only, without the first, which
  compiles. Validation counts too, so the time left is the time the user waits.
  These two rules, and `after`, are why the bar is not tqdm's.
  """

  _SECONDS_BETWEEN_REDRAWS = 0.2

  def __init__(
    self,
    total: float,
    *,
    log_every: float,
    start: float = 0,
    batch_size: int | None = None,
    after: float = 0,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Prepares the progress of a run; nothing is shown before `update`.

    Args:
      total: steps in the whole run, or its cost in any unit.
      log_every: steps between two lines in a log file; a terminal is redrawn
        about five times a second.
      start: steps done before this process began.
      batch_size: images in a step; None if a step is not a mini batch: then
        only the share done and the time left are shown.
      after: the cost of what follows the last step, in steps; it is part of
        the time left.
      stream: where to show it, stderr by default.
      clock: the seconds since any fixed moment.
    """
    self._total = total
    self._start = start
    self._batch_size = batch_size
    self._after = after
    self._log_every = log_every
    if stream is None:
      first = devices.is_first_process()
      stream = sys.stderr if first else open(os.devnull, 'w')  # noqa: SIM115
    self._stream = stream
    self._clock = clock
    self._live = self._stream.isatty()
    self._first: tuple[float, float] | None = (
      None  # The step and the seconds of the first update
    )
    self._last = (start, clock())  # (step, seconds) of the last update
    self._note = ''
    self._bar = ''  # What the last line of the terminal shows now.
    self._drawn_at = -math.inf
    self._logged = start // log_every  # How many intervals have been logged.

  @property
  def images_per_second(self) -> float | None:
    """The rate at the last update; None before this process's second step."""
    rate = self._steps_per_second
    return rate * self._batch_size if rate and self._batch_size else None

  @property
  def _steps_per_second(self) -> float | None:
    if self._first is None:
      return None
    steps = self._last[0] - self._first[0]
    seconds = self._last[1] - self._first[1]
    return steps / seconds if steps and seconds else None

  def update(
    self, step: float, note: str = 'training', total: float | None = None
  ) -> None:
    """Shows that `step` steps are done; call it at every step, it is cheap.

    Args:
      step: steps done in the whole run.
      note: what the run does next; a new note is shown at once on a terminal.
      total: steps in the whole run, if a better estimate is known by now.
    """
    now = self._clock()
    self._total = self._total if total is None else total
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
    else:
      intervals = math.inf if step == self._total else step // self._log_every
      if intervals > self._logged:
        self._logged = intervals
        self._show(self._line() + '\n')

  def say(self, text: str) -> None:
    """Prints `text` on lines of its own, above the bar."""
    erase = '\r' + ' ' * len(self._bar) + '\r' if self._bar else ''
    self._show(erase + text + '\n' + self._bar)

  def close(self) -> None:
    """Moves the cursor below the bar, which stays as it is."""
    if self._bar:
      self._show('\n')
      self._bar = ''

  def __enter__(self) -> 'Progress':
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def _line(self, width: int | None = None) -> str:
    """Returns the line, with a bar that fills the width if that is given."""
    step, total, rate = self._last[0], self._total, self._steps_per_second
    line = self._note
    if self._batch_size is not None:
      line += f'  step {step:{len(str(total))}}/{total}'
    line += f'  {math.floor(100 * step / total):2}%'  # 100% means done.
    if images := self.images_per_second:
      line += f'  {images:{".2g" if images < 10 else ".0f"}} images/s'
    if rate:
      left = (total - step + self._after) / rate
      line += f'  {format_duration(left)} left'
    if width is None:
      return line
    room = width - len(line) - len('  []')
    if room >= 10:
      done = math.floor(room * step / total)
      line += f'  [{"#" * done}{"-" * (room - done)}]'
    return line[:width]

  def _show(self, text: str) -> None:
    # A terminal that has gone away must not end a run that takes days.
    with contextlib.suppress(OSError):
      self._stream.write(text)
      self._stream.flush()
