"""What the launchers share: options that are flags, and commands that run.

A launcher is a dataclass of options, a pure function that turns them into
commands (lists of words, never a shell string), and a function that runs them.
"""

import dataclasses
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from absl import app, flags

from mwrobust.errors import UserError

MADE_BY = 'mwrobust-launch'  # The label of all that the launchers make.
FOLDER = 'runs/launch'  # Of the files that the launchers write.
PAUSE = 15.0  # Seconds before the first retry, doubled before each other.
RETRIES = 4
TIMEOUT = 1800.0  # Seconds for a command that has to come back.

# Words of failures that last, and of those that pass by themselves.
_LASTING = ('not found', 'permission', 'quota')
_PASSING = (
  'connection', 'deadline', 'enough resources', 'internal error',
  'no more capacity', 'pool_exhausted', 'timed out', 'timeout', 'unavailable',
)  # fmt: skip

flags.disclaim_key_flags()  # `--help` shows those of the module that is run.


def option(default: Any, text: str, at_least: int | None = None) -> Any:
  """A field of the options; without a default where that is None."""
  return dataclasses.field(
    default=dataclasses.MISSING if default is None else default,
    metadata={'help': text, 'at_least': at_least},
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """The options of every launcher."""

  args: tuple[str, ...] = ()  # What follows `--`.
  workdir: str = option('', 'Folder of the results, passed on to the workers.')
  max_restarts: int = option(0, 'How often a run that broke off goes on.', 0)
  dry_run: bool = option(False, 'Show what would be run, and run nothing.')

  def __post_init__(self):
    for field in dataclasses.fields(self):
      least = field.metadata.get('at_least')
      if least is not None and getattr(self, field.name) < least:
        raise UserError(
          f'{field.name} = {getattr(self, field.name)} is less than {least}.'
        )
    if self.args and not self.args[0].startswith('-'):
      raise UserError(f'{self.args[0]!r} is no flag of mwrobust.main.')

  @property
  def worker_args(self) -> list[str]:
    """The flags of mwrobust.main."""
    return [
      *([f'--workdir={self.workdir}'] if self.workdir else []),
      *self.args,
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedOptions(Options):
  """The options of launchers that make something that outlives them."""

  name: str = option(None, 'Of the run: the same name finds it again.')
  delete: bool = option(False, 'Delete what the run of this name uses.')

  def __post_init__(self):
    super().__post_init__()
    if not re.fullmatch('[a-z]([-a-z0-9]{0,61}[a-z0-9])?', self.name):
      raise UserError(
        f'name = {self.name!r}, but clouds want at most 63 of a-z, 0-9 and -, '
        'from a letter to a letter or digit.'
      )


def run(launch: Callable[[Any], int], options: type[Options]) -> None:
  """The front end: flags to options to exit code."""
  define = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    bool: flags.DEFINE_boolean,
  }
  fields = [field for field in dataclasses.fields(options) if field.metadata]
  for field in fields:
    required = field.default is dataclasses.MISSING
    define[field.type](
      field.name,
      None if required else field.default,
      field.metadata['help'],
      required=required,
    )

  def parse(argv: list[str]) -> list[str]:
    try:
      return flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
      sys.exit(f'launch: {error}\nFlags of mwrobust.main go after ` -- `.')
    except flags.Error as error:
      sys.exit(f'launch: {error}')

  def main(argv: list[str]) -> None:
    values = {field.name: flags.FLAGS[field.name].value for field in fields}
    try:
      sys.exit(launch(options(args=tuple(argv[1:]), **values)))
    except UserError as error:
      sys.exit(f'launch: {error}')

  app.run(main, flags_parser=parse)


def say(text: str) -> None:
  """Tells the user what the launcher does, apart from what workers print."""
  print(f'launch: {text}', file=sys.stderr, flush=True)


def text_of(command: list[str]) -> str:
  """The command as one could type it; a flag a line where it is long."""
  if len(shlex.join(command)) <= 80:
    return shlex.join(command)
  lines = ''.join(
    (' \\\n  ' if word.startswith('--') else ' ') + shlex.quote(word)
    for word in command
  )
  return lines.removeprefix(' ')


def attempt(
  command: list[str], settled: Callable[[], bool] = lambda: False
) -> subprocess.CompletedProcess:
  """Runs a command, and again where its failure may pass by itself.

  Args:
    command: The words of the command. It reads nothing.
    settled: Asked before it is run again, as a command that timed out may have
      done its work nevertheless.

  Returns:
    The last result; of exit code 0 if it is settled.
  """
  for retry in range(RETRIES + 1):
    result = _run(command)
    reason = result.stderr.lower()
    if (
      result.returncode == 0
      or retry == RETRIES
      or any(word in reason for word in _LASTING)
      or not any(word in reason for word in _PASSING)
    ):
      break
    pause = PAUSE * 2**retry
    say(f'{result.stderr.strip()}\nlaunch: Trying again in {pause:g} s.')
    time.sleep(pause)
    if settled():
      return subprocess.CompletedProcess(command, 0, '', '')
  return result


def check(result: subprocess.CompletedProcess, hint: str = '') -> str:
  """What the command printed, or a UserError with what it complained of."""
  if result.returncode:
    reason = f'{result.stderr.strip()}\n{hint}'.rstrip()
    raise UserError(f'{shlex.join(result.args)} failed:\n{reason}')
  return result.stdout


def output(command: list[str], **kwargs: Any) -> str:
  """What the command prints, with the retries of `attempt`."""
  return check(attempt(command, **kwargs))


def call(command: list[str]) -> int:
  """Runs a command whose output is for the user; returns its exit code."""
  try:
    return subprocess.call(command, stdin=subprocess.DEVNULL)
  except FileNotFoundError:
    raise UserError(f'{command[0]} is not on the PATH.') from None


def keep_running(
  attempt: Callable[[], int], max_restarts: int, hopeless: int = 0
) -> int:
  """Starts a run again until it is done, or hopeless; returns its exit code."""
  for restart in range(max_restarts + 1):
    if restart:
      say(f'Restart {restart} of {max_restarts}.')
    code = attempt()
    if code in (0, hopeless):
      break
    say(f'The run broke off with exit code {code}.')
  return code


def _run(command: list[str]) -> subprocess.CompletedProcess:
  try:
    return subprocess.run(
      command,
      stdin=subprocess.DEVNULL,
      capture_output=True,
      encoding='utf-8',
      errors='replace',
      timeout=TIMEOUT,
    )
  except FileNotFoundError:
    raise UserError(f'{command[0]} is not on the PATH.') from None
  except subprocess.TimeoutExpired:
    return subprocess.CompletedProcess(
      command, 124, '', f'{command[0]} timed out after {TIMEOUT:g} s'
    )
