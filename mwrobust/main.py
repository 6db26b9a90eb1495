"""Trains one network to stand up to many attacks, and measures it.

  python -m mwrobust.main
  python -m mwrobust.main --config=configs/mnist.py:cnn --config.data.dir=DIR

Intentionally short: the flags, and one call.
"""

import functools
import os
import pathlib
import sys

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from mwrobust import config as config_lib
from mwrobust import report, train
from mwrobust.errors import UserError

_QUICKSTART = pathlib.Path(__file__).parents[1] / 'configs' / 'quickstart.py'

_CONFIG = config_flags.DEFINE_config_file(
  'config',
  None,
  'File of the run: configs/mnist.py, or with variants configs/mnist.py:cnn; '
  'configs/quickstart.py by default.',
  # model.options may get fields; `config.check_field` refuses all others.
  lock_config=False,
  accept_new_attributes=True,
)
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Folder of the results; runs/<config name> by default.'
)


def main(argv: list[str]) -> None:
  """Runs the main job; what the user can mend is told without a traceback."""
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {" ".join(argv[1:])}')
  logging.set_verbosity(logging.WARNING)
  if not jax.config.jax_compilation_cache_dir:  # A restart compiles nothing.
    cache = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
    jax.config.update(
      'jax_compilation_cache_dir', str(pathlib.Path(cache, 'mwrobust', 'jax'))
    )
  workdir = _WORKDIR.value or default_workdir()
  try:
    evaluations = train.train_and_evaluate(
      _CONFIG.value, workdir, functools.partial(print, flush=True)
    )
  except UserError as error:
    sys.exit(f'mwrobust: {error}')
  except train.Interrupted as interrupted:
    print(f'\n{interrupted} Run the same command again to go on.')
    sys.exit(128 + interrupted.signum)
  except KeyboardInterrupt:
    print('\nStopped at once. Run the same command again to go on.')
    sys.exit(130)
  print(f'\n{report.table(evaluations)}\n')
  for what in ('report.md', 'checkpoints', 'metrics.jsonl', 'tensorboard'):
    print(f'{what:14}{pathlib.Path(workdir, what)}')


def default_workdir() -> str:
  """`runs/mnist-cnn` for `--config=configs/mnist.py:cnn`."""
  path, _, variants = config_flags.get_config_filename(
    flags.FLAGS['config']
  ).rpartition('.py')
  words = [pathlib.Path(path).name, *variants.strip(':').split(',')]
  return os.path.join('runs', '-'.join(filter(None, words)))


def parse_flags(argv: list[str]) -> list[str]:
  """The parser of absl, with the quickstart as default and clear errors."""
  words = [arg.lstrip('-').partition('=')[0] for arg in argv[1:]]
  if 'config' not in words:
    argv = [argv[0], f'--config={_QUICKSTART}', *argv[1:]]
  try:
    for word in words:
      if word.startswith('config.'):
        config_lib.check_field(word.removeprefix('config.'))
    rest = app.parse_flags_with_usage(argv)
    _ = _CONFIG.value.preset  # A file that could not be read says so now.
    return rest
  except (UserError, OSError, AttributeError) as error:
    sys.exit(f'mwrobust: {error}')


if __name__ == '__main__':
  app.run(main, flags_parser=parse_flags)
