"""Parses the flags of the programs and prints errors without tracebacks."""

import ast
import contextlib
import fractions
import functools
import itertools
import os
import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

from mwrobust import config as config_lib
from mwrobust.errors import UserError, did_you_mean
from mwrobust.runtime import devices
from mwrobust.runtime.signals import Interrupted, silenced_threads

flags.disclaim_key_flags()  # `--help` shows `--config` as the program's own.

_CACHE_BYTES = 2**30  # Of compiled programs.
_until_the_end = contextlib.ExitStack()
_HERE = pathlib.Path(__file__).parent
# A wheel has the configs inside the package, a checkout beside it.
CONFIGS = next(
  folder / 'configs'
  for folder in (_HERE, _HERE.parent)
  if (folder / 'configs').is_dir()
)
# The fields that `--help` shows, and what each means.
FIELDS = {
  'method=greedy': 'how the threat of the next mini batch is picked',
  'data.name=mine.npz': 'mnist, cifar10, tfds:NAME, or your own',
  'data.dir=DIR': 'folder of the published files',
  'model.name=cnn': 'see mwrobust/models, or module:Class',
  'threats.only=pixel_linf,dct_l1': 'which threats to use',
  'threats.dct_l2.eps=1/2': 'the radius of one of them',
  'train.T=10': 'outer steps',
  'train.r=2': 'epochs per outer step',
  'train.batch_size=100': 'images in a mini batch',
  'eval.examples=500': 'use only the first N test images; 0 for all',
  'eval.protocols=standard,fast': 'how hard the evaluation attacks',
  'seed=1': 'the seed of everything random',
}


class NumberParser(flags.ArgumentParser):
  """Reads a number such as `0.3` or `8/255`.

  >>> NumberParser().parse('51/255')
  0.2
  """

  syntactic_help = 'a number'
  examples = '0.3 or 8/255'

  def parse(self, argument: str | float) -> float:
    """Returns the number, or raises a ValueError."""
    try:
      if isinstance(argument, str):
        argument = fractions.Fraction(argument.replace(' ', ''))
      return float(argument)
    except (ValueError, ArithmeticError) as error:
      raise ValueError(
        f'It must be {self.syntactic_help}, such as {self.examples}.'
      ) from error


class IntegerParser(NumberParser):
  """Reads an integer such as `10`, `9_000_000` or `5e6`.

  >>> [IntegerParser().parse(text) for text in ('10', '9_000_000', '5e6')]
  [10, 9000000, 5000000]
  """

  syntactic_help = 'an integer'
  examples = '10 or 5e6'

  def parse(self, argument: str | int) -> int:
    """Returns the integer, or raises a ValueError."""
    number = super().parse(argument)
    if number != int(number):
      raise ValueError(f'It must be an integer, such as {self.examples}.')
    return int(number)


class TupleParser(flags.ArgumentParser):
  """Reads `linf,l2`, one word, or a Python tuple.

  >>> [TupleParser().parse(text) for text in ('linf,l2', "('l1',)", '3,2', '')]
  [('linf', 'l2'), ('l1',), (3, 2), ()]
  """

  def parse(self, argument: str | tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the tuple; words that are not numbers become strings."""
    if isinstance(argument, str):
      try:
        argument = ast.literal_eval(argument)
      except (SyntaxError, ValueError):
        words = argument.strip(' ()').split(',')
        argument = filter(None, (word.strip(' \'"') for word in words))
      else:
        is_one = not isinstance(argument, tuple | list)
        argument = [argument] if is_one else argument
    return tuple(argument)


class BooleanParser(flags.BooleanParser):
  """Reads `true` or `false`."""

  def parse(self, argument: str | bool) -> bool:
    """Returns the value, or raises a ValueError."""
    try:
      return super().parse(argument)
    except ValueError as error:
      raise ValueError('It must be true or false.') from error


_PARSERS = {
  bool: BooleanParser(),
  int: IntegerParser(),
  float: NumberParser(),
  tuple: TupleParser(),
}
for _type, _parser in _PARSERS.items():
  config_flags.register_flag_parser_for_type(_type, _parser)


def define_config(text: str) -> flags.FlagHolder[ml_collections.ConfigDict]:
  """Defines `--config` and `--config.field` for every field."""
  text = '\n'.join(
    [
      text,
      '',
      *_describe_configs(),
      '',
      'mwrobust/config.py describes all of its fields. Each has a flag:',
      *(f'--config.{field}  {meaning}' for field, meaning in FIELDS.items()),
    ]
  )
  return config_flags.DEFINE_config_file(
    'config',
    None,
    text,
    # model.options may get fields; `config.check_field` refuses all others.
    lock_config=False,
    accept_new_attributes=True,
  )


def _describe_configs() -> list[str]:
  """Returns a line on each file in `CONFIGS`: its purpose and its variants."""
  lines = []
  for path in sorted(CONFIGS.glob('*.py')):
    module = ast.parse(path.read_text())
    (function,) = (
      node
      for node in module.body
      if isinstance(node, ast.FunctionDef) and node.name == 'get_config'
    )
    first_lines = [
      (ast.get_docstring(node) or '').partition('\n')[0]
      for node in (module, function)
    ]
    lines.append(' '.join([f'configs/{path.name}:', *first_lines]))
  return lines


def config_name() -> str:
  """Returns `'mnist-cnn'` for `--config=configs/mnist.py:cnn`."""
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
  """Runs a program; errors that its user can fix are printed as messages.

  Args:
    main: the program; it gets the arguments that are not flags.
    default_config: returns the config file to use without `--config`, from the
      given flags; None for a program without a config.
  """
  try:
    app.run(
      functools.partial(call, main),
      flags_parser=functools.partial(_parse, default_config),
    )
  except SystemExit as end:
    # Keeps the message last: threads of a failed save continue to fail.
    _until_the_end.enter_context(silenced_threads())
    if not isinstance(end.code, str):
      raise
    print(end.code, file=sys.stderr, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.exit(1)


def call(main: Callable[[list[str]], None], argv: list[str]) -> None:
  """Calls main with the arguments that are not flags."""
  # Orbax logs the errors of its threads, which it also raises.
  logging.set_verbosity(logging.FATAL)
  if not jax.config.jax_compilation_cache_dir:  # So that restarts are fast.
    home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
    cache = pathlib.Path(home, 'mwrobust', 'jax')
    limit_cache(cache, _CACHE_BYTES)
    jax.config.update('jax_compilation_cache_dir', str(cache))
  try:
    main(argv[1:])
  except UserError as error:
    _leave(f'mwrobust: {error}')
  except Interrupted as interrupted:
    if devices.is_first_process():
      print(f'\n{interrupted} Run the same command again to resume.')
    sys.exit(128 + interrupted.signum)
  except Exception:
    if not devices.is_distributed():
      raise
    _leave(traceback.format_exc())
  except KeyboardInterrupt:
    print('\nStopped at once. Run the same command again to resume.')
    sys.exit(130)


def limit_cache(folder: pathlib.Path, most: int) -> None:
  """Deletes the oldest compiled programs until `most` bytes are left.

  JAX has a limit of its own, `jax_compilation_cache_max_size`, but refuses to
  cache anything once a kill between two writes has left an entry incomplete.
  """
  with contextlib.suppress(OSError):  # Another process may do the same.
    entries = [(path.stat(), path) for path in folder.glob('*-cache')]
    entries.sort(key=lambda entry: entry[0].st_mtime, reverse=True)
    size = 0
    for stat, path in entries:
      size += stat.st_size
      if size > most:
        path.unlink()


def _leave(message: str) -> NoReturn:
  """Exits with the message and code 1."""
  if not devices.is_distributed():
    sys.exit(message)
  # An orderly exit would wait for the other processes, which wait for this one.
  print(message, file=sys.stderr, flush=True)
  os._exit(1)


def _given_flags(argv: list[str]) -> dict[str, str]:
  """Returns the flags `--name=value` and `--name value`, before absl parses."""
  given = {}
  for arg, following in zip(argv, [*argv, ''][1:], strict=True):
    if arg.startswith('-'):
      name, equals, value = arg.lstrip('-').partition('=')
      given[name] = value if equals else following
  return given


def _config_first(argv: list[str]) -> list[str]:
  """Moves `--config=FILE` or `--config FILE` before all other flags.

  >>> _config_first(['main', '--config.seed=1', '--config', 'a.py', '--mode=x'])
  ['main', '--config', 'a.py', '--config.seed=1', '--mode=x']
  """
  first, others, words = [], [], iter(argv[1:])
  for word in words:
    name, equals, _ = word.lstrip('-').partition('=')
    if word.startswith('-') and name == 'config':
      first += [word] if equals else [word, *itertools.islice(words, 1)]
    else:
      others.append(word)
  return [*argv[:1], *first, *others]


def no_arguments(argv: list[str]) -> None:
  """Refuses arguments that are not flags."""
  if argv:
    raise app.UsageError(f'Unknown arguments: {" ".join(argv)}')


def _parse(
  default_config: Callable[[dict[str, str]], str] | None, argv: list[str]
) -> list[str]:
  # ml_collections wants --config before its fields, and reads sys.argv itself.
  argv = sys.argv = _config_first(argv)
  given = _given_flags(argv[1:])
  try:
    for word in given:
      if word.startswith('config.'):
        config_lib.check_field(word.removeprefix('config.'))
    if default_config and 'config' not in given:
      argv = [argv[0], f'--config={default_config(given)}', *argv[1:]]
    elif default_config:
      _check_config_file(given['config'])
    rest = flags.FLAGS([_find_config(arg) for arg in argv])
    if default_config:
      _ = flags.FLAGS.config.preset  # Raises if the config cannot be read.
      _convert_new_fields(flags.FLAGS.config)
    return rest
  except (UserError, OSError, AttributeError) as error:
    sys.exit(f'mwrobust: {error}')
  except KeyError as error:  # Of a group such as threats.NAME.
    missing = _missing_group(argv) or f'config has no {error.args[0]}'
    sys.exit(f'mwrobust: {". ".join(missing.splitlines())}')
  except flags.Error as error:
    sys.exit(f'mwrobust: {_from_config(error) or error}')


def _missing_group(argv: list[str]) -> str | None:
  """Returns what to say if a flag is of a threat that the config lacks.

  Or of a threat that lacks the group of the flag.
  """
  values = flags.FlagValues()
  config_flags.DEFINE_config_file('config', flag_values=values, sys_argv=[])
  given = _given_flags(argv[1:])
  values([argv[0], _find_config(f'--config={given["config"]}')])
  threats = [name for name in values.config.threats if name != 'only']
  for word in given:
    match word.split('.'):
      case ['config', 'threats', name, _, *_] if name not in threats:
        return (
          f'There is no threat {name!r}.{did_you_mean(name, threats)} The '
          f'config has {", ".join(threats)}. Add others in a config file.'
        )
      case ['config', 'threats', name, group, _] if (
        group not in values.config.threats[name]
      ):
        return (
          f'threats.{name} has no {group} of its own to change: give it '
          f'{group} = {{}} in the config file.'
        )
  return None


def _convert_new_fields(config: ml_collections.ConfigDict) -> None:
  """Converts fields that the config file lacks.

  ml_collections does not know the types of those that change `attack`.
  """
  for field in given_fields():
    like = config_lib.attack_default(field)
    value = config_lib.get(config, field)
    parser = _PARSERS.get(type(like))
    if parser and not config_lib.same_kind(value, like):
      # A text that cannot be converted is refused with the whole config.
      with contextlib.suppress(ValueError), config.ignore_type():
        value = parser.parse(str(value))
        config.update_from_flattened_dict({field: value})


def _find_config(arg: str) -> str:
  """Finds configs/NAME.py in the package if the current folder has none."""
  flag, found, name = arg.partition('configs/')
  is_path = found and flag in ('', '--config=', '-config=')
  file, _, _ = name.partition(':')
  if is_path and not pathlib.Path('configs', file).exists():
    return f'{flag}{CONFIGS / name}'
  return arg


def _check_config_file(config: str) -> None:
  """Raises a UserError if the file of `FILE` or `FILE:VARIANTS` is missing."""
  name, dot, _ = config.partition('.py')
  if not pathlib.Path(_find_config(name + dot)).exists():
    known = [f'configs/{path.name}' for path in sorted(CONFIGS.glob('*.py'))]
    raise UserError(
      f'--config={config}: there is no such file.'
      f'{did_you_mean(name + dot, known)} There are {", ".join(known)}.'
    )


def _from_config(error: BaseException) -> UserError | None:
  """Returns the UserError of a config file from the chain of a flag error."""
  found = None
  while error := error.__context__:
    found = error if isinstance(error, UserError) else found
  return found
