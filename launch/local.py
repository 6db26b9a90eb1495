"""Runs many processes on this machine, over loopback.

  python -m launch.local --num_processes=2 -- --config=configs/mnist.py:cnn

Ends all if one dies. With `--max_restarts` it starts all of them again; a
killed worker costs only the steps since the last checkpoint.
"""

import contextlib
import dataclasses
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from launch import commands
from launch.commands import option, say

MAIN = (sys.executable, '-m', 'mwrobust.main')
GRACE = 5.0  # The seconds that workers have to end after one of them has died.
PATIENCE = 60.0  # The same on Ctrl-C or SIGTERM: they save a checkpoint.

_OUTPUT = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(commands.Options):
  """Holds the options of `python -m launch.local`."""

  num_processes: int = option(2, 'The number of workers.', 1)


def build(
  options: Options, port: int | str, main: Sequence[str] = MAIN
) -> list[list[str]]:
  """Returns one command per worker."""
  return [
    [
      *main,
      f'--coordinator_address=127.0.0.1:{port}',
      f'--num_processes={options.num_processes}',
      f'--process_id={i}',
      *options.worker_args,
    ]
    for i in range(options.num_processes)
  ]


def launch(options: Options, main: Sequence[str] = MAIN) -> int:
  """Runs the workers; returns the exit code of the first that failed, or 0."""
  if options.dry_run:
    print('\n'.join(map(commands.text_of, build(options, 'PORT', main))))
    return 0
  with _signals() as received:
    for restart in range(options.max_restarts + 1):
      if restart:
        say(f'Restart {restart} of {options.max_restarts}.')
      # A new port for each try: the old one may linger.
      failed = _run(build(options, _free_port(), main), received)
      if failed is None:
        return 0
      if received:
        return 128 + received[0]
      if failed.complained and failed.exit_code == 1:  # It would fail again.
        break
  return failed.exit_code


class Worker:
  """Runs a process in its own group, and a thread that prints its lines."""

  def __init__(self, index: int, command: list[str]):
    self.index = index
    self.complained = False  # It printed a UserError.
    self.process = subprocess.Popen(
      command,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      env=os.environ | {'PYTHONUNBUFFERED': '1'},
      encoding='utf-8',
      errors='replace',
      process_group=0,
    )
    self._thread = threading.Thread(target=self._print_lines, daemon=True)
    self._thread.start()

  def _print_lines(self) -> None:
    with self.process.stdout as lines:  # Once closed, no worker waits for it.
      for line in lines:  # A carriage return ends a line, too.
        self.complained |= line.startswith('mwrobust: ')
        with _OUTPUT:
          sys.stdout.write(f'[{self.index}] {line}'.rstrip() + '\n')
          sys.stdout.flush()

  def kill(self) -> None:
    """Ends the process and all that it started, at once."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.process.pid, signal.SIGKILL)
    self.process.wait()
    self._thread.join(timeout=5)

  @property
  def exit_code(self) -> int:
    """The exit code as in a shell: 128 + the signal that killed it."""
    code = self.process.returncode
    return code if code >= 0 else 128 - code

  def __str__(self):
    code = self.process.returncode
    if code >= 0:
      return f'process {self.index} ended with exit code {code}'
    return f'process {self.index} was killed by {signal.Signals(-code).name}'


def _run(workers: list[list[str]], received: list[int]) -> Worker | None:
  """Runs all; returns the first that failed, once all have ended."""
  running, failed = [], None
  passed_on, deadline = 0, math.inf
  try:
    for i, command in enumerate(workers):
      running.append(Worker(i, command))
    while True:
      ended = _ended(running)  # Asked first, so that every failure is reported.
      if len(received) > passed_on:
        passed_on = len(received)
        say(f'{signal.Signals(received[-1]).name}; waiting for the workers.')
        deadline = min(deadline, time.monotonic() + PATIENCE)
        for worker in running:
          worker.process.terminate()  # They agree on a step, save and end.
      elif not (received or failed) and (failed := _first_failed(running)):
        say(f'{failed}{"" if _ended(running) else ", ending the others"}.')
        deadline = min(deadline, time.monotonic() + GRACE)
        for worker in running:
          worker.process.terminate()
      if ended:
        return failed or _first_failed(running)
      if time.monotonic() > deadline:
        say('Not all workers ended in time; killing them.')
        for worker in running:
          worker.kill()
      time.sleep(0.02)
  finally:
    for worker in running:
      worker.kill()


def _ended(workers: list[Worker]) -> bool:
  return all(worker.process.poll() is not None for worker in workers)


def _first_failed(workers: list[Worker]) -> Worker | None:
  """Returns the worker that failed first; the others died of that.

  Of several seen at once: one that printed a UserError, else one that was
  killed.
  """
  failed = [worker for worker in workers if worker.process.poll()]
  return min(
    failed,
    key=lambda worker: (not worker.complained, worker.process.returncode),
    default=None,
  )


@contextlib.contextmanager
def _signals():
  """Collects the signals that arrive, in place of their usual effect."""
  received = []
  before = {
    number: signal.signal(number, lambda number, _: received.append(number))
    for number in (signal.SIGINT, signal.SIGTERM)
  }
  try:
    yield received
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _free_port() -> int:
  with socket.create_server(('127.0.0.1', 0)) as server:
    return server.getsockname()[1]


if __name__ == '__main__':
  commands.run(launch, Options)
