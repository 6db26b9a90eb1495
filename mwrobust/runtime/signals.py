"""Handles SIGTERM and Ctrl-C at the next safe moment, and silences threads."""

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator

from mwrobust.runtime import devices


class Interrupted(Exception):  # noqa: N818
  """A signal stopped the program, which has saved its work."""

  def __init__(self, signum: int):
    super().__init__(f'Interrupted by {signal.Signals(signum).name}.')
    self.signum = signum


class Stop:
  """Remembers whether a signal to stop has arrived."""

  signum: int | None = None

  def check(self) -> None:
    """Raises Interrupted if a signal has arrived."""
    if self.signum is not None:
      raise Interrupted(self.signum)


class StopTogether(Stop):
  """Stops several processes, all at the same check.

  JAX receives the SIGTERM in any process and informs the others.
  """

  def __init__(self):
    self._checks = itertools.count()

  def check(self) -> None:
    """Raises Interrupted at the check on which all processes agreed."""
    if devices.stop_is_agreed(next(self._checks)):
      raise Interrupted(signal.SIGTERM)


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
  """Delays SIGTERM and Ctrl-C until the next check; a second stops at once."""
  if devices.is_distributed():
    before = signal.signal(  # JAX only handles SIGTERM.
      signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    )
    try:
      yield StopTogether()
    finally:
      signal.signal(signal.SIGINT, before)
    return
  stop = Stop()
  if threading.current_thread() is not threading.main_thread():
    yield stop  # Only the main thread can handle signals.
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


@contextlib.contextmanager
def silenced_threads() -> Iterator[None]:
  """Hides tracebacks of other threads, whose failures are raised here too."""
  hooks = threading.excepthook, sys.unraisablehook
  threading.excepthook = lambda args: None
  # From TensorStore, when it reports another failure to a closed event loop.
  sys.unraisablehook = lambda args: None
  try:
    yield
  finally:
    threading.excepthook, sys.unraisablehook = hooks
