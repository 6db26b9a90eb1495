r"""Trains one network to be robust to many attacks, and evaluates it.

  python -m mwrobust.main
  python -m mwrobust.main --config=configs/mnist.py:cnn --config.data.dir=DIR
  python -m mwrobust.main --mode=eval --workdir=RUN \
    --config.threats.dct_l2.eps=2
  python -m mwrobust.main --mode=export --workdir=RUN

Run the same command again to resume an interrupted run.
"""

import functools
import pathlib

from absl import flags

from mwrobust import command_line, export, reporting
from mwrobust.errors import UserError
from mwrobust.reporting import runs
from mwrobust.runtime import devices
from mwrobust.training import evaluation, loop

_CONFIG = command_line.define_config(
  'What to run, FILE or FILE:VARIANT,VARIANT. By default '
  'configs/quickstart.py, or for eval and export the config of the run.'
)
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Folder for the results; runs/<config name> by default.'
)
_OF_A_RUN = ('eval', 'export')  # Modes that need a workdir with a run.
_MODE = flags.DEFINE_enum(
  'mode',
  'train',
  ['train', *_OF_A_RUN],
  'train: train and evaluate. eval: evaluate the run in the workdir, also with '
  'other --config.eval and --config.threats. export: write its network as '
  'safetensors.',
)


_DISTRIBUTED = flags.DEFINE_enum(
  'distributed',
  'auto',
  ['auto', 'on', 'off'],
  'Whether this is one of several processes. auto detects TPU hosts, SLURM '
  'tasks, the three flags of processes and the variables '
  f'{", ".join(devices.VARIABLES)}.',
)
_COORDINATOR_ADDRESS = flags.DEFINE_string(
  'coordinator_address', None, 'The address of process 0, host:port.'
)
_NUM_PROCESSES = flags.DEFINE_integer(
  'num_processes', None, 'The number of processes of the job.'
)
_PROCESS_ID = flags.DEFINE_integer(
  'process_id', None, 'The number of this process, from 0.'
)


def main(argv: list[str]) -> None:
  """Runs the job and reports on it."""
  command_line.no_arguments(argv)
  devices.initialize(
    _DISTRIBUTED.value,
    _COORDINATOR_ADDRESS.value,
    _NUM_PROCESSES.value,
    _PROCESS_ID.value,
  )
  config = _CONFIG.value
  devices.use_all_cores(config.train.batch_size)
  workdir = _WORKDIR.value or f'runs/{command_line.config_name()}'
  job = {
    'train': loop.train_and_evaluate,
    'eval': evaluation.evaluate_run,
    'export': export.export,
  }[_MODE.value]
  say = functools.partial(print, flush=True)
  if not devices.is_first_process():
    say = lambda text: None  # noqa: E731
  job(config, workdir, say)
  if _MODE.value != 'export' and devices.is_first_process():
    run = runs.load(workdir, config.eval.split)
    reporting.write_run(run, workdir, say, runs.own_threats(config))


def default_config(given: dict[str, str]) -> str:
  """Returns the quickstart, or the config of the run in the workdir."""
  if given.get('mode', 'train') not in _OF_A_RUN:
    return str(command_line.CONFIGS / 'quickstart.py')
  if not given.get('workdir'):
    raise UserError('Name the --workdir of a run.')
  of_the_run = pathlib.Path(__file__).with_name('run_config.py')
  return f'{of_the_run}:{given["workdir"]}'


if __name__ == '__main__':
  command_line.run(main, default_config)
