r"""Makes a table: runs what is missing, then writes .md, .html and .json.

  python -m mwrobust.reproduce --table=maini --config.data.dir=DIR --dry_run
  python -m mwrobust.reproduce --table=maini --config.data.dir=DIR \
    --seeds=0,1,2 --seeds_for=multiplicative_weights,msd --output=results/maini
  python -m mwrobust.reproduce --table=cifar10 --config=configs/cifar10.py
  python -m mwrobust.reproduce --table=restarts --config=configs/quickstart.py \
    --methods=multiplicative_weights,round_robin

Runs go to `runs/reproduce/<config>/<method>-seed<n>` and serve every table that
needs them. After a kill, the same command resumes. Start it twice, on two cores
or on two machines with a shared folder, and the processes divide the runs.
"""

import functools
from collections.abc import Sequence

from absl import flags
from etils import epath

from mwrobust import command_line
from mwrobust.errors import UserError, check_choice
from mwrobust.reproduction import planning
from mwrobust.reproduction.chosen import CHOSEN, Chosen
from mwrobust.reproduction.tables import (
  TABLES,
  TablePlan,
  plan,
  restrict,
  write,
)
from mwrobust.runtime import devices


def define_flags() -> None:
  """Defines the flags of this program; programs that import it have others."""
  command_line.define_config(
    'The config that all runs share; by default that of the table.'
  )
  flags.DEFINE_string(
    'table', None, 'The table to make; without it, lists them.'
  )
  flags.DEFINE_list(
    'seeds',
    ['0'],
    'The seeds of each method, such as 0,1,2; some methods use only the first.',
  )
  flags.DEFINE_list(
    'seeds_for',
    [],
    'The methods that get all seeds, while the others get the first one; by '
    'default all methods.',
  )
  flags.DEFINE_list(
    'methods', [], 'Only these methods of the table: multiplicative_weights,...'
  )
  planning.define_flags('runs/reproduce')


def main(argv: list[str]) -> None:
  """Plans the runs, makes the missing ones and writes the table."""
  command_line.no_arguments(argv)
  given = flags.FLAGS
  if given.table is None:
    print('Choose one of these tables:')
    for name, table in TABLES.items():
      print(f'  --table={name:9}  {table.title:36} {table.config}')
    return
  check_choice('--table', given.table, TABLES)
  if devices.among_slurm_tasks():
    raise UserError('Run this once, not in each task: srun --ntasks=1.')
  table = restrict(TABLES[given.table], given.methods)
  name = command_line.config_name()
  folder = epath.Path(given.workdir) / name
  chosen = CHOSEN.get(name, Chosen('', {}))
  planned = plan(
    table,
    given.config,
    seeds_by_method(table, given.seeds, given.seeds_for),
    folder,
    chosen=chosen.settings,
    given=command_line.given_fields(),
  )
  say = functools.partial(print, flush=True)
  planning.announce(planned, say)
  if not given.dry_run:
    planning.make_missing(planned, say)
    found = [planning.load(run) for run in planned]
    output = epath.Path(given.output or folder / given.table)
    write(given.table, table, found, chosen, output, say)


def seeds_by_method(
  table: TablePlan, words: Sequence[str], several: Sequence[str]
) -> dict[str, list[int]]:
  """Returns the seeds of each method.

  Only the `several` methods get all seeds, by default all that use several.
  """
  if not words or not all(word.isdecimal() for word in words):
    raise UserError(
      f'--seeds={",".join(words)} must be integers of at least 0: 0,1,2.'
    )
  for method in several:
    check_choice('--seeds_for', method, table.methods)
  seeds = list(dict.fromkeys(map(int, words)))
  return {
    method: seeds
    if method in several or not (several or method in table.one_seed)
    else seeds[:1]
    for method in table.methods
  }


def default_config(given: dict[str, str]) -> str:
  """Returns the config file of the table."""
  table = TABLES.get(given.get('table', ''), TABLES['mnist'])
  return str(command_line.CONFIGS / table.config)


if __name__ == '__main__':
  define_flags()
  command_line.run(main, default_config)
