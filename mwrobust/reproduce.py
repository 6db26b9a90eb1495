"""Makes a table of the paper: runs what is missing, then sets it beside it.

  python -m mwrobust.reproduce --table=mnist --seeds=0,1,2 --dry_run
  python -m mwrobust.reproduce --table=mnist --seeds=0,1,2 \
    --config=configs/mnist.py:cnn --config.data.dir=DIR
  python -m mwrobust.reproduce --table=restarts --config=configs/quickstart.py

Runs go to `runs/reproduce/<config>/<method>-seed<n>` and serve every table that
needs them. Killed, the same command goes on.
"""

import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
from absl import flags
from etils import epath

from mwrobust import (
  attacks,
  command_line,
  datasets,
  evaluate,
  metrics,
  models,
  paper,
  report,
  runs,
  train,
)
from mwrobust import config as config_lib
from mwrobust.errors import UserError
from mwrobust.metrics import format_duration

POLICIES = ('greedy', 'round_robin', 'multiplicative_weights')
SINGLE = ('single pixel_linf', 'single dct_linf')
_MW = 'multiplicative_weights'


class TablePlan(NamedTuple):
  """A table of the paper.

  Attributes:
    methods: whose runs it needs.
    networks: what is shown of them, with the run's h for 3; () for the times.
    rows: what is shown of these; () for all.
    restarts: random starts of the evaluation.
    config: the file the paper's own setting is in.
  """

  methods: tuple[str, ...]
  networks: tuple[str, ...]
  rows: tuple[str, ...] = ()
  restarts: int = 1
  config: str = 'mnist.py'


_ALL_NETWORKS = ('h=1', 'h={h} ensemble', 'h={h} average')
TABLES = {
  'tradeoff': TablePlan(
    SINGLE, ('h=1',), ('pixel_linf', 'dct_linf', 'natural'), config='cifar10.py'
  ),
  'cifar10': TablePlan(POLICIES, _ALL_NETWORKS, config='cifar10.py'),
  'mnist': TablePlan(POLICIES, _ALL_NETWORKS),
  'restarts': TablePlan(POLICIES, _ALL_NETWORKS, restarts=20),
  'time': TablePlan((*SINGLE, *POLICIES), ()),
  'convexity': TablePlan((_MW,), ('h={h} ensemble', 'h={h} average')),
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
  planned = []
  for method in table.methods:
    for seed in seeds:
      ours = config.copy_and_resolve_references()
      ours.seed = seed
      name, _, threat = method.partition(' ')
      ours.policy.name = name
      ours.policy.threat = threat or ours.policy.threat
      workdir = folder / f'{method.replace(" ", "_")}-seed{seed}'
      config_lib.validate(ours)
      planned.append(PlannedRun(method, ours, workdir))
  return planned


# ------------------------------------------------------------------- the costs


def gradient_evaluations(
  config: ml_collections.ConfigDict, restarts: int
) -> tuple[int, int]:
  """What training and evaluating will take, about.

  Which threats a policy will choose is not known before: they count alike. Nor
  is it known who will fall: every start attacks every image.
  """
  known = datasets.SIZES[config.data.name]
  asked = (
    config.data.train_examples,
    config.train.validation_examples,
    config.eval.examples,
  )
  train_size, validation_size, test_size = (
    count or all_ for count, all_ in zip(asked, known, strict=True)
  )
  steps = {
    threat.name: threat.steps
    for threat in config_lib.make_threats(config, 'train')
  }
  policy = config_lib.make_policy(config)
  attack_steps = statistics.mean(steps.values())
  if config.policy.name == 'single':
    attack_steps = steps[config.policy.threat]
  elif not policy.attacks:
    attack_steps = 0
  schedule = config.train
  batches = schedule.T * schedule.r * (train_size // schedule.batch_size)
  training = batches * schedule.batch_size * (attack_steps + 1)
  validations = schedule.T + policy.validates_first
  training += validations * validation_size * sum(steps.values())

  eval_steps = sum(t.steps for t in config_lib.make_threats(config, 'eval'))
  h = schedule.h
  networks = 1 if h == 1 else 2 + h  # h=1, the average, the h of the ensemble.
  evaluation = networks * restarts * test_size * eval_steps
  if config.eval.health_examples:
    evaluation += 4 * min(config.eval.health_examples, test_size) * eval_steps
  return round(training), round(evaluation)


def seconds_per_gradient(config: ml_collections.ConfigDict) -> float:
  """Measured on a few gradients of the network at its batch size."""
  shape = datasets.SHAPES[config.data.name]
  channels = shape[-1]
  model = models.create(
    config.model.name,
    num_classes=10,
    mean=(0.5,) * channels,
    std=(0.5,) * channels,
    **config.model.options,
  )
  images = jnp.full((config.train.batch_size, *shape), 0.5)
  variables = model.init(jax.random.key(0), images[:1], train=False)
  steps = 3
  attack = attacks.make_attack(
    attacks.Threat(norm='linf', eps=0.1, steps=steps)
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


def describe_plan(planned: Sequence[PlannedRun], restarts: int) -> str:
  """The runs with their cost, and the hours that are left."""
  seconds = seconds_per_gradient(planned[0].config)
  rows, left = [], 0
  for run in planned:
    training, evaluation = gradient_evaluations(run.config, restarts)
    status, done = _status(run, restarts)
    remaining = max(0, training - done) + evaluation * (status != 'done')
    remaining *= status != 'done'
    left += remaining
    rows.append(
      [
        str(run.workdir),
        status,
        f'{training:,}',
        f'{evaluation:,}',
        f'{remaining * seconds / 3600:.2f}',
      ]
    )
  header = ['run', 'status', 'training', 'evaluation', 'hours left']
  return (
    report.markdown_table(header, rows)
    + '\n\nIn gradient evaluations, one image once forward and back; '
    f'{1 / seconds:,.0f} of them a second in a probe on {jax.device_count()} x '
    f'{jax.devices()[0].device_kind}.\n'
    f'About {format_duration(left * seconds)} left in all.'
  )


def _status(run: PlannedRun, restarts: int) -> tuple[str, int]:
  """`'new'`, `'begun'` or `'done'`; and the gradient evaluations so far."""
  if not (run.workdir / 'config.json').exists():
    return 'new', 0
  try:
    loaded = runs.load(run.workdir, _settings(run, restarts))
  except UserError:
    rows = runs.read_metrics(run.workdir)
    return 'begun', rows[-1]['gradient_evaluations'] if rows else 0
  return 'done' if loaded.output in loaded.evaluations else 'begun', 0


def _settings(run: PlannedRun, restarts: int) -> str:
  config = run.config.copy_and_resolve_references()
  config.eval.restarts = restarts
  return evaluate.changed_settings(config, run.workdir)


# ------------------------------------------------------------------- the table


def run_missing(
  planned: Sequence[PlannedRun],
  restarts: int,
  say: Callable[[str], None],
) -> list[runs.Run]:
  """Trains and evaluates what is not there yet; goes on with what is begun."""
  found = []
  for number, run in enumerate(planned, start=1):
    say(f'\n---- run {number} of {len(planned)}: {run.workdir}')
    train.train_and_evaluate(run.config, str(run.workdir), say)
    if restarts != run.config.eval.restarts:
      config = run.config.copy_and_resolve_references()
      config.eval.restarts = restarts
      evaluate.evaluate_run(config, str(run.workdir), say)
    found.append(runs.load(run.workdir, _settings(run, restarts)))
  return found


def accuracy_section(
  table: TablePlan, found: Sequence[runs.Run]
) -> report.Section:
  """The table of accuracies, and the paper's."""
  h = found[0].config.train.h
  networks = [network.format(h=h) for network in table.networks]
  columns = [(method, n) for method in table.methods for n in networks]
  return 'Accuracy', report.accuracy_parts(found, columns, table.rows)


def time_section(table: TablePlan, found: Sequence[runs.Run]) -> report.Section:
  """Hours of training by method, over those of the first, and the paper's."""
  theirs = paper.HOURS[report.paper_data(found[0].config)]
  hours = {
    method: statistics.mean(
      run.outer[-1]['seconds'] / 3600 for run in found if run.method == method
    )
    for method in table.methods
  }
  first = table.methods[0]
  rows = [
    [
      report.method_title(method),
      f'{hours[method]:.3f}',
      f'{hours[method] / hours[first]:.2f}',
      f'{theirs[method]:.2f}',
      f'{theirs[method] / theirs[first]:.2f}',
    ]
    for method in table.methods
  ]
  over = f'over {report.method_title(first).lower()}'
  header = ['training', 'hours', over, 'paper, hours', f'paper, {over}']
  return 'Training time', [
    report.table(header, rows),
    report.text(report.comparability(found[0].config)),
  ]


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
        'config': json.loads(run.config.to_json()),
        'training': {
          field: run.outer[-1][field]
          for field in ('gradient_evaluations', 'seconds')
        },
        'accuracies': {
          network: outcomes.accuracies()
          | {'images': len(outcomes.labels), 'starts': outcomes.restarts}
          for network, outcomes in run.evaluations.items()
        },
      }
      for run in found
    ],
  }


# ------------------------------------------------------------------------ main

_CONFIG = command_line.define_config(
  'What all runs share; by default the file of the setting of the paper.'
)
_TABLE = flags.DEFINE_enum('table', None, list(TABLES), 'Which one to make.')
_SEEDS = flags.DEFINE_list('seeds', ['0'], 'Of the runs of each method: 0,1,2.')
_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/reproduce', 'Folder of the runs and the tables.'
)
_DRY_RUN = flags.DEFINE_bool(
  'dry_run', False, 'Only list the runs, with their cost and the hours left.'
)
flags.mark_flag_as_required('table')


def main(argv: list[str]) -> None:
  """Plans, runs what is missing, writes the table."""
  command_line.no_arguments(argv)
  table, folder = TABLES[_TABLE.value], epath.Path(_WORKDIR.value)
  folder /= command_line.config_name()
  say = functools.partial(print, flush=True)
  planned = plan(table, _CONFIG.value, parse_seeds(_SEEDS.value), folder)
  say(describe_plan(planned, table.restarts))
  if _DRY_RUN.value:
    return
  found = run_missing(planned, table.restarts, say)
  runs.check_mergeable(found)
  make_section = accuracy_section if table.networks else time_section
  sections = [
    ('Setting', [report.text(report.describe(found[0].config, seeds=False))]),
    make_section(table, found),
    ('Were the attacks strong enough?', [report.health_part(found)]),
    ('Cost', [report.cost_table(found)]),
  ]
  say('\n' + report.to_markdown(sections))
  title = f"The paper's table: {_TABLE.value}"
  report.write_files(folder / _TABLE.value, title, sections, say)
  metrics.write_json(folder / f'{_TABLE.value}.json', as_json(found))


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
  command_line.run(main, default_config)
