"""SIGTERM and Ctrl-C, heard at the next safe moment; threads, not heard."""

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator

from mwrobust.runtime import devices


class Interrupted(Exception):  # noqa: N818
  """A signal came; what was under way has been saved."""

  def __init__(self, signum: int):
    super().__init__(f'Interrupted by {signal.Signals(signum).name}.')
    self.signum = signum


class Stop:
  """Whether a signal to stop has come."""

  signum: int | None = None

  def check(self) -> None:
    """Raises Interrupted if one has."""
    if self.signum is not None:
      raise Interrupted(self.signum)


class StopTogether(Stop):
  """The same for several processes: all stop at the same of their checks.

  JAX hears the SIGTERM, of whichever process, and tells the others.
  """

  def __init__(self):
    self._checks = itertools.count()

  def check(self) -> None:
    """Raises Interrupted if one has, and all processes have come this far."""
    if devices.stop_is_agreed(next(self._checks)):
      raise Interrupted(signal.SIGTERM)


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
  """Lets SIGTERM and Ctrl-C wait for the next safe moment; the second not."""
  if devices.is_distributed():
    before = signal.signal(  # JAX hears only SIGTERM.
      signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    )
    try:
      yield StopTogether()
    finally:
      signal.signal(signal.SIGINT, before)
    return
  stop = Stop()
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


@contextlib.contextmanager
def silenced_threads() -> Iterator[None]:
  """Prints no traceback of other threads, whose failure is raised here too."""
  hooks = threading.excepthook, sys.unraisablehook
  threading.excepthook = lambda args: None
  # Of TensorStore, when it tells a closed event loop of one more failure.
  sys.unraisablehook = lambda args: None
  try:
    yield
  finally:
    threading.excepthook, sys.unraisablehook = hooks
