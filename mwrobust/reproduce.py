"""Makes a table of the paper: runs what is missing, then sets it beside it.

  python -m mwrobust.reproduce --table=mnist --seeds=0,1,2 --dry_run
  python -m mwrobust.reproduce --table=mnist --seeds=0,1,2 \
    --config=configs/mnist.py:cnn --config.data.dir=DIR
  python -m mwrobust.reproduce --table=restarts --config=configs/quickstart.py \
    --methods=multiplicative_weights,round_robin

Runs go to `runs/reproduce/<config>/<method>-seed<n>` and serve every table that
needs them. Killed, the same command goes on.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
from absl import flags
from etils import epath

from mwrobust import attacks, command_line, models
from mwrobust import config as config_lib
from mwrobust import data as data_lib
from mwrobust.errors import UserError, check_choice
from mwrobust.reporting import accuracies, document, paper, runs, training
from mwrobust.reporting.writing import check_parts
from mwrobust.runtime import devices, files
from mwrobust.runtime.progress import format_duration
from mwrobust.training import loop, setup
from mwrobust.training.setup import refuse_another_run


class TablePlan(NamedTuple):
  """A table of the paper.

  Attributes:
    methods: those it needs, and what is shown of each beside its output, as
      `config.eval.others` has it.
    rows: what is shown of these; () for all, `('time',)` for the training.
    protocol: one that it needs, beside those of `config.eval.protocols`.
    config: the file the paper's own setting is in.
    one_seed: methods of which the first seed is enough.
  """

  methods: Mapping[str, tuple[str, ...]]
  rows: tuple[str, ...] = ()
  protocol: str = 'paper'
  config: str = 'mnist.py'
  one_seed: tuple[str, ...] = ()


_POLICIES = {
  'greedy': ('last',),
  'round_robin': ('last',),
  'multiplicative_weights': ('last', 'ensemble'),
}
_SINGLE = {'single pixel_linf': ('last',), 'single dct_linf': ('last',)}
TABLES = {
  'tradeoff': TablePlan(
    _SINGLE, ('pixel_linf', 'dct_linf', 'natural'), config='cifar10.py'
  ),
  'cifar10': TablePlan(_POLICIES, config='cifar10.py'),
  # Beyond the paper's, to see what training against one threat is worth.
  'mnist': TablePlan(
    _POLICIES | dict.fromkeys(_SINGLE, ()), one_seed=tuple(_SINGLE)
  ),
  'restarts': TablePlan(_POLICIES, protocol='paper-20'),
  'time': TablePlan(dict.fromkeys(_SINGLE | _POLICIES, ()), ('time',)),
  'convexity': TablePlan({'multiplicative_weights': ('ensemble',)}),
}


class PlannedRun(NamedTuple):
  """A run that a table needs."""

  method: str
  config: ml_collections.ConfigDict
  workdir: epath.Path


def plan(
  table: TablePlan,
  config: ml_collections.ConfigDict,
  seeds: Sequence[int],
  folder: epath.Path,
) -> list[PlannedRun]:
  """The methods with each of the seeds.

  Args:
    table: what to make.
    config: what all runs share.
    seeds: of the runs.
    folder: of their workdirs.
  """
  if table == TABLES['convexity'] and config_lib.window(config) == 1:
    raise UserError('This table is about averages: it needs train.h > 1.')
  planned = []
  for method, others in table.methods.items():
    for seed in seeds[:1] if method in table.one_seed else seeds:
      ours = config.copy_and_resolve_references()
      ours.seed = seed
      name, _, threat = method.partition(' ')
      ours.method = name
      ours.policy.threat = threat or ours.policy.threat
      ours.eval.others = tuple(
        kind for kind in config.eval.others if kind in (*others, 'recalibrated')
      )
      ours.eval.protocols = tuple(
        dict.fromkeys([*config.eval.protocols, table.protocol])
      )
      workdir = folder / f'{method.replace(" ", "_")}-seed{seed}'
      config_lib.validate(ours)
      planned.append(PlannedRun(method, ours, workdir))
  return planned


# ------------------------------------------------------------------- the costs


def gradient_evaluations(
  config: ml_collections.ConfigDict,
) -> tuple[int, int]:
  """Estimates the gradients that training and evaluating take.

  It is not known which threats a policy will choose, so all count alike; nor
  which examples will fall, so the evaluation is an upper bound.
  """
  outline = _outline(config)
  known = outline.train, outline.validation, outline.test
  asked = (
    config.data.train_examples,
    config.train.validation_examples,
    config.eval.examples,
  )
  train_size, validation_size, test_size = (
    count or all_ for count, all_ in zip(asked, known, strict=True)
  )
  schedule = setup.make_schedule(config, train_size, validation_size)
  validations = config.train.T + config_lib.make_policy(config).validates_first
  training = schedule.steps * config.train.batch_size * setup.step_gradients(
    config
  ) + validations * validation_size * setup.validation_gradients(config)
  classes = outline.num_classes
  evaluation = setup.evaluation_gradients(config, test_size, classes)
  return round(training), round(evaluation)


def _outline(config: ml_collections.ConfigDict) -> data_lib.Outline:
  return data_lib.outline(config.data.name, config.data.dir)


def seconds_per_gradient(config: ml_collections.ConfigDict) -> float:
  """Measured on a few gradients of the network at its batch size."""
  outline = _outline(config)
  shape = outline.shape
  channels = shape[-1]
  model = models.create(
    config.model.name,
    num_classes=outline.num_classes,
    mean=(0.5,) * channels,
    std=(0.5,) * channels,
    **config.model.options,
  )
  images = jnp.full((config.train.batch_size, *shape), 0.5)
  shapes = jax.eval_shape(
    functools.partial(model.init, train=False), jax.random.key(0), images[:1]
  )
  variables = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  steps = 3
  attack = attacks.make_attack(
    attacks.Threat(norm='linf', eps=0.1), attacks.pgd(steps)
  )

  @jax.jit
  def probe(variables):
    logits_fn = functools.partial(model.apply, variables, train=False)
    labels = jnp.zeros(len(images), jnp.int32)
    return attack(logits_fn, jax.random.key(0), images, labels)

  times = []
  for _ in range(3):  # The first compiles.
    start = time.perf_counter()
    probe(variables).block_until_ready()
    times.append(time.perf_counter() - start)
  return min(times[1:]) / (steps * len(images))


def describe_plan(planned: Sequence[PlannedRun]) -> str:
  """Describes the runs with their cost, and the hours that are left.

  Refuses, before the first of them begins, a workdir with another run in it.
  """
  for run in planned:
    refuse_another_run(run.workdir, run.config)
  seconds = seconds_per_gradient(planned[0].config)
  rows, left = [], 0
  for run in planned:
    training_cost, evaluation_cost = gradient_evaluations(run.config)
    status, trained = _status(run)
    remaining = 0
    if status != 'done':
      remaining = max(0, training_cost - trained) + evaluation_cost
    left += remaining
    rows.append(
      [
        str(run.workdir),
        status,
        f'{training_cost:,}',
        f'{evaluation_cost:,}',
        f'{remaining * seconds / 3600:.2f}',
      ]
    )
  header = ['run', 'status', 'training', 'evaluation', 'hours left']
  return (
    document.markdown_table(header, rows)
    + '\n\nIn gradient evaluations, one image once forward and back; '
    f'{1 / seconds:,.0f} of them a second in a probe on one device, '
    f'{jax.devices()[0].device_kind}. The evaluation takes less if images '
    f'fall early.\nAt most about {format_duration(left * seconds)} left in all.'
  )


def _status(run: PlannedRun) -> tuple[str, float]:
  """Returns `'new'`, `'begun'` or `'done'`, and the training's gradients."""
  if not (run.workdir / 'config.json').exists():
    return 'new', 0
  last = (runs.read_metrics(run.workdir) or [{'gradient_evaluations': 0}])[-1]
  whole = last.get('outer_step') == run.config.train.T
  trained = math.inf if whole else last['gradient_evaluations']
  try:
    loaded = runs.load(run.workdir)
  except UserError:
    return 'begun', trained
  evaluated = {
    (network, protocol)
    for network, by_protocol in loaded.evaluations.items()
    for protocol in by_protocol
  }
  output = 'ensemble' if run.config.algorithm == 'ensemble' else 'average'
  wanted = {
    (config_lib.network_name(kind, run.config), protocol)
    for kind in (output, *run.config.eval.others)
    for protocol in run.config.eval.protocols
  }
  count = run.config.eval.examples or _outline(run.config).test
  first = loaded.primary.first
  is_done = (
    loaded.outer_step == run.config.train.T
    and wanted <= evaluated
    and len(first.labels) == count
    and runs.threats_of(first) == runs.own_threats(run.config)
    and (loaded.output in loaded.curves or not run.config.eval.curve_examples)
  )
  return 'done' if is_done else 'begun', trained


# ------------------------------------------------------------------- the table


def run_missing(
  planned: Sequence[PlannedRun], say: Callable[[str], None]
) -> list[runs.Run]:
  """Trains and evaluates what is not there yet; resumes what is begun."""
  found = []
  for number, run in enumerate(planned, start=1):
    say(f'\n---- run {number} of {len(planned)}: {run.workdir}')
    if _status(run)[0] != 'done':
      loop.train_and_evaluate(run.config, str(run.workdir), say)
    loaded = runs.load(run.workdir)
    # Another table may have needed other protocols, and not of every method.
    evaluations = {}
    for network, by_protocol in loaded.evaluations.items():
      for protocol, outcomes in by_protocol.items():
        if protocol in run.config.eval.protocols:
          evaluations.setdefault(network, {})[protocol] = outcomes
    primary = loaded.primary._replace(evaluations=evaluations)
    found.append(loaded._replace(primary=primary))
  return found


def accuracy_section(
  table: TablePlan, found: Sequence[runs.Run]
) -> document.Section:
  """The table of accuracies, and the paper's."""
  config, output = found[0].config, found[0].output
  columns = [
    (method, network)
    for method, others in table.methods.items()
    for network in dict.fromkeys(
      [*(config_lib.network_name(kind, config) for kind in others), output]
    )
  ]
  return 'Accuracy', accuracies.accuracy_parts(found, columns, table.rows)


def time_section(
  table: TablePlan, found: Sequence[runs.Run]
) -> document.Section:
  """The hours of training by method, over those of the first, and the paper's.

  The paper's are left out where data, network or threats are others.
  """
  hours = {
    method: statistics.mean(
      run.outer[-1]['seconds'] / 3600 for run in found if run.method == method
    )
    for method in table.methods
  }
  first = next(iter(table.methods))
  over = f'over {accuracies.method_title(first).lower()}'
  header = ['training', 'hours', over]
  rows = [
    [
      accuracies.method_title(method),
      f'{hours[method]:.3f}',
      f'{hours[method] / hours[first]:.2f}',
    ]
    for method in table.methods
  ]
  if differs := accuracies.unlike_the_paper(found[0]):
    note = f"Not compared with the paper's hours: {differs}."
  else:
    note = accuracies.other_fields(found[0].config)
    theirs = paper.HOURS[accuracies.paper_data(found[0].config)]
    header += ['paper, hours', f'paper, {over}']
    for row, method in zip(rows, table.methods, strict=True):
      row += [
        f'{theirs[method]:.2f}',
        f'{theirs[method] / theirs[first]:.2f}',
      ]
  return 'Training time', [document.table(header, rows), document.text(note)]


def as_json(found: Sequence[runs.Run]) -> dict[str, Any]:
  """Every figure by run, for programs."""
  return {
    'jax': jax.__version__,
    'device': f'{jax.device_count()} x {jax.devices()[0].device_kind}',
    'runs': [
      {
        'method': run.method,
        'seed': run.config.seed,
        'preset': run.config.preset,
        'config': config_lib.to_share(run.config),
        'training': {
          field: run.outer[-1][field]
          for field in ('gradient_evaluations', 'seconds')
        },
        'accuracies': {
          network: {
            protocol: outcomes.accuracies() | {'images': len(outcomes.labels)}
            for protocol, outcomes in by_protocol.items()
          }
          for network, by_protocol in run.evaluations.items()
        },
      }
      for run in found
    ],
  }


# ------------------------------------------------------------------------ main


def define_flags() -> None:
  """Those of this program; programs that import it have others."""
  command_line.define_config(
    'What all runs share; by default the file of the setting of the paper.'
  )
  flags.DEFINE_enum(
    'table', None, list(TABLES), 'Which one to make; without it, lists them.'
  )
  flags.DEFINE_list(
    'seeds', ['0'], 'Of the runs of each method: 0,1,2. Some need the first.'
  )
  flags.DEFINE_list(
    'methods', [], 'Only these of its methods: multiplicative_weights,...'
  )
  flags.DEFINE_string(
    'workdir', 'runs/reproduce', 'Folder of the runs and the tables.'
  )
  flags.DEFINE_string(
    'output',
    None,
    'Where the table goes, as OUTPUT.md, .html and .json; beside its runs by '
    'default.',
  )
  flags.DEFINE_bool(
    'dry_run', False, 'Only list the runs, with their cost and the hours left.'
  )


def main(argv: list[str]) -> None:
  """Plans, runs what is missing, writes the table."""
  command_line.no_arguments(argv)
  given = flags.FLAGS
  if given.table is None:
    print('Choose one of these tables of the paper:')
    for name, table in TABLES.items():
      data = table.config.removesuffix('.py')
      print(f'  --table={name:10} on {data}: {", ".join(table.methods)}')
    return
  table = restrict(TABLES[given.table], given.methods)
  seeds = parse_seeds(given.seeds)
  folder = epath.Path(given.workdir) / command_line.config_name()
  if devices.among_slurm_tasks():
    raise UserError('Run this once, not in each task: srun --ntasks=1.')
  say = functools.partial(print, flush=True)
  planned = plan(table, given.config, seeds, folder)
  say(describe_plan(planned))
  if not given.dry_run:
    found = run_missing(planned, say)
    output = epath.Path(given.output or folder / given.table)
    write(given.table, table, found, output, say)


def write(
  name: str,
  table: TablePlan,
  found: Sequence[runs.Run],
  output: epath.Path,
  say: Callable[[str], None],
) -> None:
  """Writes a table over its runs as .md, .html and .json.

  Args:
    name: of the table.
    table: what it shows.
    found: its runs.
    output: where it goes, without the suffix.
    say: told the table.
  """
  runs.check_mergeable(found)
  make_section = time_section if table.rows == ('time',) else accuracy_section
  setting = config_lib.describe(found[0].config, shared=True)
  sections = [
    ('Setting', [document.text(setting), training.seeds_part(found)]),
    make_section(table, found),
    ('Can these figures be believed?', check_parts(found)),
    ('Cost', [training.cost_table(found)]),
  ]
  say('\n' + document.to_markdown(sections))
  title = f"The paper's table {name}, on {found[0].config.data.name}"
  document.write_files(output, title, sections, say)
  path = output.with_name(f'{output.name}.json')
  files.write_json(path, as_json(found))
  say(str(path))


def restrict(table: TablePlan, methods: Sequence[str]) -> TablePlan:
  """The table with these of its methods only; all of them if none is named."""
  if not methods:
    return table
  for method in methods:
    check_choice('--methods', method, table.methods)
  shown = {
    method: others
    for method, others in table.methods.items()
    if method in methods
  }
  return table._replace(methods=shown)


def parse_seeds(words: Sequence[str]) -> list[int]:
  """Whole numbers, each once."""
  if not words or not all(word.isdecimal() for word in words):
    raise UserError(f'--seeds={",".join(words)} must be numbers: 0,1,2.')
  return list(dict.fromkeys(map(int, words)))


def default_config(given: dict[str, str]) -> str:
  """The file of the setting of the paper."""
  table = TABLES.get(given.get('table', ''), TABLES['mnist'])
  return str(command_line.CONFIGS / table.config)


if __name__ == '__main__':
  define_flags()
  command_line.run(main, default_config)
