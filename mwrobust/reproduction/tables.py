"""The tables: the runs each needs, and the sections it shows."""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
from etils import epath

from mwrobust import config as config_lib
from mwrobust.errors import UserError, check_choice
from mwrobust.reporting import accuracies, document, paper, runs, training
from mwrobust.reporting.sections import images
from mwrobust.reporting.writing import check_parts
from mwrobust.reproduction.chosen import OWN, Chosen
from mwrobust.reproduction.planning import PlannedRun, make_config
from mwrobust.runtime import files


class TablePlan(NamedTuple):
  """A table."""

  # The methods, each with the networks to show besides its output, as in
  # `config.eval.others`.
  methods: Mapping[str, tuple[str, ...]]
  rows: tuple[str, ...] = ()  # The rows to show; () for all.
  # A protocol it needs besides `config.eval.protocols`.
  protocol: str = 'paper'
  config: str = 'mnist.py'  # The config file.
  one_seed: tuple[str, ...] = ()  # The methods that use only the first seed.
  # The kind of table: `'accuracy'`, a table for each protocol with the paper's
  # figures; `'comparison'`, one table with the cost of training; or `'time'`.
  section: str = 'accuracy'
  # Config fields, unless the command line sets them.
  fields: Mapping[str, Any] = {}
  title: str = ''  # What the table shows, in a few words.


_POLICIES = {
  'greedy': ('last',),
  'round_robin': ('last',),
  'multiplicative_weights': ('last', 'ensemble'),
}
_SINGLE = {'single pixel_linf': ('last',), 'single dct_linf': ('last',)}
RIVALS = (
  *('multiplicative_weights', 'round_robin', 'uniform', 'greedy', 'e_at'),
  *('ucb', 'max', 'avg', 'msd'),
)
# All methods of a comparison get the same budget and the same test images.
_COMPARISON = TablePlan(
  dict.fromkeys(RIVALS, ()),
  section='comparison',
  fields={
    'train.budget': 6_000_000,
    'train.T': 20,
    'eval.examples': 1000,
    'eval.curve_examples': 0,
  },
)
_TWO = _COMPARISON._replace(methods=dict.fromkeys(RIVALS[:2], ()))
TABLES = {
  'maini': _COMPARISON._replace(
    config='mnist.py:maini,cnn', title='all methods, radii of Maini et al.'
  ),
  'balanced': _COMPARISON._replace(
    config='mnist.py:balanced,cnn', title='all methods, equally hard radii'
  ),
  'released': _TWO._replace(
    config='mnist.py:released,cnn', title='two methods, the released radii'
  ),
  'paper': _TWO._replace(
    config='mnist.py:cnn', title="two methods, the paper's radii"
  ),
  # The tables of the paper. --config=configs/cifar10.py is its full setting.
  'cifar10': TablePlan(
    _POLICIES, config='cifar10.py:small', title="the paper's CIFAR-10 table"
  ),
  # Includes training against one threat, which the paper's table does not.
  'mnist': TablePlan(
    _POLICIES | dict.fromkeys(_SINGLE, ()),
    one_seed=tuple(_SINGLE),
    title="the paper's MNIST table",
  ),
  'tradeoff': TablePlan(
    _SINGLE,
    ('pixel_linf', 'dct_linf', 'natural'),
    config='cifar10.py',
    title='training against one threat alone',
  ),
  'restarts': TablePlan(
    _POLICIES, protocol='paper-20', title='attacks with 20 random starts'
  ),
  'time': TablePlan(
    dict.fromkeys(_SINGLE | _POLICIES, ()),
    section='time',
    title='the hours of training',
  ),
  'convexity': TablePlan(
    {'multiplicative_weights': ('ensemble',)},
    title='one averaged network or an ensemble',
  ),
}


def plan(
  table: TablePlan,
  config: ml_collections.ConfigDict,
  seeds: Mapping[str, Sequence[int]],
  folder: epath.Path,
  *,
  chosen: Mapping[str, Mapping[str, Any]] | None = None,
  given: Collection[str] = (),
) -> list[PlannedRun]:
  """Plans the runs of a table, each in a folder of its own.

  `seeds` and further fields (`Chosen.settings`) are by method; the fields that
  are `given` on the command line keep their values.
  """
  if table == TABLES['convexity'] and config_lib.window(config) == 1:
    raise UserError('This table compares averages: it needs train.h > 1.')
  planned = []
  for method, others in table.methods.items():
    fields = {**table.fields, **(chosen or {}).get(method, {})}
    fields = {f: value for f, value in fields.items() if f not in given}
    fields['eval.others'] = tuple(
      kind for kind in config.eval.others if kind in (*others, 'recalibrated')
    )
    fields['eval.protocols'] = tuple(
      dict.fromkeys([*config.eval.protocols, table.protocol])
    )
    for seed in seeds[method]:
      ours = make_config(config, method, seed=seed, **fields)
      workdir = folder / f'{method.replace(" ", "_")}-seed{seed}'
      planned.append(PlannedRun(method, ours, workdir))
  return planned


def restrict(table: TablePlan, methods: Sequence[str]) -> TablePlan:
  """Returns the table with only these methods; with all if none is named."""
  for method in methods:
    check_choice('--methods', method, table.methods)
  shown = {
    method: others
    for method, others in table.methods.items()
    if method in methods or not methods
  }
  return table._replace(methods=shown)


# -------------------------------------------------------------------- sections


def accuracy_section(
  table: TablePlan, found: Sequence[runs.Run]
) -> document.Section:
  """Returns a table for each protocol with the paper's figures."""
  config, output = found[0].config, found[0].output
  columns = [
    (method, network)
    for method, others in table.methods.items()
    for network in dict.fromkeys(
      [*(config_lib.network_name(kind, config) for kind in others), output]
    )
  ]
  return 'Accuracy', accuracies.accuracy_parts(found, columns, table.rows)


def comparison_section(
  table: TablePlan, found: Sequence[runs.Run]
) -> document.Section:
  """Returns one table of all methods: accuracies and the cost of training."""
  first = found[0].primary.first
  output = found[0].output
  methods = [m for m in table.methods if any(run.method == m for run in found)]
  rows = []
  for number, (protocol, groups) in enumerate(accuracies.group(found).items()):
    names = table.rows or ('union', 'min', *first.threats, 'natural')
    for row in names if number == 0 else names[:-1]:
      cells = [
        accuracies.accuracy_cell(groups[method, output], row)
        for method in methods
      ]
      rows.append([row if number == 0 else f'{row}, {protocol}', *cells])
  for title, field, unit in (
    ('training, million gradients', 'gradient_evaluations', 1e6),
    ('training, minutes', 'seconds', 60),
  ):
    cells = [f'{_of_training(found, m, field) / unit:.1f}' for m in methods]
    rows.append([title, *cells])
  header = ['accuracy, %', *map(accuracies.method_title, methods)]
  protocol = next(iter(accuracies.group(found)))
  words = (
    f'On {images(first)}, network {output}, protocol {protocol} unless another '
    'is named. Min is the accuracy under the worst threat; union counts the '
    'images that stay correct under every threat. One seed is shown with its '
    '95 % interval, several with their mean ± the standard deviation.'
  )
  if found[0].config.preset == 'maini':
    for method, figures in paper.MAINI.items():
      header.append(f'{accuracies.method_title(method)}, published')
      for row in rows:
        row.append(f'{figures[row[0]]:.1f}' if row[0] in figures else '-')
    words += (
      ' Published: Maini, Wong and Kolter (2020), with their network and '
      'attacks, ten restarts each.'
    )
  return 'Accuracy', [document.text(words), document.table(header, rows)]


def _of_training(found: Sequence[runs.Run], method: str, field: str) -> float:
  """Returns the mean of a field over the trainings of a method."""
  return statistics.mean(
    run.outer[-1][field] for run in found if run.method == method
  )


def time_section(
  table: TablePlan, found: Sequence[runs.Run]
) -> document.Section:
  """Returns the hours of training by method, relative to the first.

  The paper's hours are omitted if data, network or threats differ.
  """
  hours = {
    method: _of_training(found, method, 'seconds') / 3600
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


_SECTIONS = {
  'accuracy': accuracy_section,
  'comparison': comparison_section,
  'time': time_section,
}


def setting_parts(
  found: Sequence[runs.Run], chosen: Chosen
) -> list[document.Part]:
  """Returns the shared setting, and how those of each method were chosen."""
  parts = [
    document.text(config_lib.describe(found[0].config, shared=True)),
    training.seeds_part(found),
  ]
  flat = {run.method: config_lib.flatten(run.config) for run in found}
  fields = {}  # By method: those that a search may set, or has set.
  for method, config in flat.items():
    own = *OWN.get(method, ()), *chosen.settings.get(method, ())
    tuned = dict.fromkeys((*config_lib.TUNED_FIELDS, *own))
    fields[method] = {name: config[name] for name in tuned}
  names = list(dict.fromkeys(name for own in fields.values() for name in own))
  rows = [
    [
      accuracies.method_title(method),
      *(_setting(own[name]) if name in own else '-' for name in names),
    ]
    for method, own in fields.items()
  ]
  titles = [
    accuracies.method_title(method)
    for method, own in fields.items()
    if own == chosen.settings.get(method)
  ]
  caption = 'These settings were not chosen by a search.'
  if titles:
    is_all = len(titles) == len(fields)
    whose = 'The settings of all methods'
    if not is_all:
      whose = f'Only the settings of {", ".join(titles)}'
    caption = f'{whose} were chosen {chosen.how}.'
  return [*parts, document.table(['method', *names], rows, caption)]


def _setting(value: float | str) -> str:
  return value if isinstance(value, str) else f'{value:g}'


# ----------------------------------------------------------------------- files


def write(
  name: str,
  table: TablePlan,
  found: Sequence[runs.Run],
  chosen: Chosen,
  output: epath.Path,
  say: Callable[[str], None],
) -> None:
  """Writes a table over its runs as .md, .html and .json.

  `output` is the path of the files without a suffix.
  """
  runs.check_mergeable(found)
  sections = [
    ('Setting', setting_parts(found, chosen)),
    _SECTIONS[table.section](table, found),
    ('Can these figures be believed?', check_parts(found)),
    ('Cost', [training.cost_table(found)]),
  ]
  title = f'Table {name}, on {found[0].config.data.name}'
  write_all(output, title, sections, as_json(found), say)


def write_all(
  output: epath.Path,
  title: str,
  sections: Sequence[document.Section],
  figures: Any,
  say: Callable[[str], None],
) -> None:
  """Prints sections and writes them as .md and .html, the figures as .json."""
  say('\n' + document.to_markdown(sections))
  document.write_files(output, title, sections, say)
  path = output.with_name(f'{output.name}.json')
  files.write_json(path, figures)
  say(str(path))


def as_json(found: Sequence[runs.Run]) -> dict[str, Any]:
  """Returns the figures of all runs for the JSON file."""
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
