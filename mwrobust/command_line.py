"""What the programs share: the config flag, and errors told in one line."""

import fractions
import functools
import os
import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax
import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

from mwrobust import config as config_lib
from mwrobust.errors import UserError
from mwrobust.runtime import devices
from mwrobust.runtime.signals import Interrupted

CONFIGS = pathlib.Path(__file__).parents[1] / 'configs'


def define_config(text: str) -> flags.FlagHolder[ml_collections.ConfigDict]:
  """Defines `--config` and all of `--config.field`."""
  return config_flags.DEFINE_config_file(
    'config',
    None,
    text,
    # model.options may get fields; `config.check_field` refuses all others.
    lock_config=False,
    accept_new_attributes=True,
  )


def config_name() -> str:
  """`'mnist-cnn'` for `--config=configs/mnist.py:cnn`."""
  path, _, variants = config_flags.get_config_filename(
    flags.FLAGS['config']
  ).rpartition('.py')
  words = [pathlib.Path(path).name, *variants.strip(':').split(',')]
  return '-'.join(filter(None, words))


def given_fields() -> set[str]:
  """Returns the fields that `--config.field=value` has set."""
  return set(config_flags.get_override_values(flags.FLAGS['config']))


def run(
  main: Callable[[list[str]], None],
  default_config: Callable[[dict[str, str]], str] | None = None,
) -> None:
  """Runs a program; what its user can mend is told in a line.

  Args:
    main: gets what is no flag; reads its flags itself.
    default_config: from the flags that are given, the config file to take if
      that is none of them; None for a program without a config.
  """
  app.run(
    functools.partial(call, main),
    flags_parser=functools.partial(_parse, default_config),
  )


def call(main: Callable[[list[str]], None], argv: list[str]) -> None:
  """Calls main with what is no flag."""
  logging.set_verbosity(logging.WARNING)
  if not jax.config.jax_compilation_cache_dir:  # A restart compiles nothing.
    home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
    cache = pathlib.Path(home, 'mwrobust', 'jax')
    jax.config.update('jax_compilation_cache_dir', str(cache))
  try:
    main(argv[1:])
  except UserError as error:
    _leave(f'mwrobust: {error}')
  except Interrupted as interrupted:
    if devices.is_first_process():
      print(f'\n{interrupted} Run the same command again to go on.')
    sys.exit(128 + interrupted.signum)
  except Exception:
    if not devices.is_distributed():
      raise
    _leave(traceback.format_exc())
  except KeyboardInterrupt:
    print('\nStopped at once. Run the same command again to go on.')
    sys.exit(130)


def _leave(message: str) -> NoReturn:
  """Ends with the message and exit code 1."""
  if not devices.is_distributed():
    sys.exit(message)
  # At once: an orderly end would wait for the others, who wait for us.
  print(message, file=sys.stderr, flush=True)
  os._exit(1)


def _given_flags(argv: list[str]) -> dict[str, str]:
  """What `--name=value` and `--name value` say, before absl has parsed them."""
  given = {}
  for arg, following in zip(argv, [*argv, ''][1:], strict=True):
    if arg.startswith('-'):
      name, equals, value = arg.lstrip('-').partition('=')
      given[name] = value if equals else following
  return given


def number(text: str, field: str) -> float:
  """Reads a number such as `0.3` or `8/255`.

  >>> number('51/255', '--linf')
  0.2
  """
  try:
    return float(fractions.Fraction(text.replace(' ', '')))
  except (ValueError, ArithmeticError) as error:
    raise UserError(
      f'{field}={text} must be a number, such as 0.3 or 8/255.'
    ) from error


def without_fractions(argv: list[str]) -> list[str]:
  """Writes the fractions of `--config` fields that are numbers as decimals.

  >>> without_fractions(['--config.threats.dct_l1.eps=51/255', '--workdir=1/2'])
  ['--config.threats.dct_l1.eps=0.2', '--workdir=1/2']
  """
  fields = config_lib.flatten(config_lib.base())

  def is_number(flag: str) -> bool:
    field = flag.removeprefix('--config.')
    is_radius = field.startswith('threats.') and field.endswith('.eps')
    return is_radius or isinstance(fields.get(field), float)

  found, previous = [], ''
  for arg in argv:
    name, equals, value = arg.partition('=')
    if not equals:  # A flag's value may be a word of its own.
      name, value = previous, arg
    previous = arg
    if is_number(name) and '/' in value:
      value = repr(number(value, name))
      arg = f'{name}={value}' if equals else value
    found.append(arg)
  return found


def no_arguments(argv: list[str]) -> None:
  """Refuses words that are no flags."""
  if argv:
    raise app.UsageError(f'Unknown arguments: {" ".join(argv)}')


def _parse(
  default_config: Callable[[dict[str, str]], str] | None, argv: list[str]
) -> list[str]:
  given = _given_flags(argv[1:])
  try:
    for word in given:
      if word.startswith('config.'):
        config_lib.check_field(word.removeprefix('config.'))
    if default_config and 'config' not in given:
      argv = [argv[0], f'--config={default_config(given)}', *argv[1:]]
    argv = [argv[0], *without_fractions(argv[1:])]
    rest = flags.FLAGS(argv)
    if default_config:
      _ = flags.FLAGS.config.preset  # What could not be read says so now.
    return rest
  except (UserError, OSError, AttributeError) as error:
    sys.exit(f'mwrobust: {error}')
  except flags.Error as error:
    sys.exit(f'mwrobust: {_from_config(error) or error}')


def _from_config(error: BaseException) -> UserError | None:
  """Returns the UserError of a config file, which flags wrap in tracebacks."""
  found = None
  while error := error.__context__:
    found = error if isinstance(error, UserError) else found
  return found
