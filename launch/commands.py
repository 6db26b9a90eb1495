"""Holds what the launchers share: options as flags, and commands to run.

A launcher is a dataclass of options, a pure function that turns them into
commands (lists of words, never a shell string), and a function that runs them.
"""

import dataclasses
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from absl import app, flags

from mwrobust.errors import UserError

MADE_BY = 'mwrobust-launch'  # The label of all that the launchers make.
FOLDER = 'runs/launch'  # For the files that the launchers write.
TIMEOUT = 600.0  # Seconds that a command may take.

flags.disclaim_key_flags()  # `--help` shows those of the module that is run.


def option(default: Any, text: str, at_least: int | None = None) -> Any:
  """Returns a field of the options; required if `default` is None."""
  return dataclasses.field(
    default=dataclasses.MISSING if default is None else default,
    metadata={'help': text, 'at_least': at_least},
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Holds the options of every launcher."""

  args: tuple[str, ...] = ()  # What follows `--`.
  workdir: str = option('', 'Folder of the results, passed on to the workers.')
  max_restarts: int = option(0, 'How often to resume a run that broke off.', 0)
  dry_run: bool = option(False, 'Show what would be run, and run nothing.')

  def __post_init__(self):
    for field in dataclasses.fields(self):
      least = field.metadata.get('at_least')
      if least is not None and getattr(self, field.name) < least:
        raise UserError(
          f'{field.name} = {getattr(self, field.name)} is less than {least}.'
        )
    if self.args and not self.args[0].startswith('-'):
      raise UserError(f'{self.args[0]!r} is not a flag of mwrobust.main.')

  @property
  def worker_args(self) -> list[str]:
    """The flags of mwrobust.main."""
    return [
      *([f'--workdir={self.workdir}'] if self.workdir else []),
      *self.args,
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedOptions(Options):
  """Holds the options of launchers whose runs outlive them."""

  name: str = option(None, 'The name of the run; the same name finds it again.')

  def __post_init__(self):
    super().__post_init__()
    if not re.fullmatch('[a-z]([-a-z0-9]{0,61}[a-z0-9])?', self.name):
      raise UserError(
        f'name = {self.name!r} must have at most 63 of a-z, 0-9 and -, begin '
        'with a letter and end with a letter or digit.'
      )


def run(launch: Callable[[Any], int], options: type[Options]) -> None:
  """Turns flags into options, launches, and exits with the run's code."""
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
  """Prints what the launcher does, apart from what the workers print."""
  print(f'launch: {text}', file=sys.stderr, flush=True)


def text_of(command: list[str]) -> str:
  """Returns the command as one could type it, long ones a flag per line."""
  if len(shlex.join(command)) <= 80:
    return shlex.join(command)
  lines = ''.join(
    (' \\\n  ' if word.startswith('--') else ' ') + shlex.quote(word)
    for word in command
  )
  return lines.removeprefix(' ')


def output(command: list[str]) -> str:
  """Returns what a command prints, or raises a UserError with its errors."""
  try:
    done = subprocess.run(
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
    raise UserError(f'{command[0]} takes more than {TIMEOUT:g} s.') from None
  if done.returncode:
    raise UserError(f'{shlex.join(command)} failed:\n{done.stderr.strip()}')
  return done.stdout


def call(command: list[str]) -> int:
  """Runs a command that prints for the user; returns its exit code."""
  try:
    return subprocess.call(command, stdin=subprocess.DEVNULL)
  except FileNotFoundError:
    raise UserError(f'{command[0]} is not on the PATH.') from None
