"""The paper's table: accuracies by method and network, and its own beside them.

One run has a 95 % interval in each cell; several seeds of a method have their
mean and standard deviation.
"""

import statistics
from collections.abc import Iterable, Sequence

import ml_collections

from mwrobust import config as config_lib
from mwrobust import datasets, paper
from mwrobust.document import Part, table, text
from mwrobust.outcomes import Outcomes, wilson
from mwrobust.runs import Run

METHODS = {
  'multiplicative_weights': 'Mult. weights',
  'round_robin': 'Round robin',
  'greedy': 'Greedy',
  'uniform': 'Uniform',
  'natural': 'Natural',
}
Column = tuple[str, str]  # A method, and the network of it that is evaluated.


def method_title(method: str) -> str:
  """Of a column: `'Mult. weights'`."""
  return METHODS.get(method, method.capitalize())


def accuracy_parts(
  merged: Sequence[Run],
  columns: Sequence[Column] = (),
  rows: Sequence[str] = (),
) -> list[Part]:
  """The table in the paper's layout, and the same beside the paper's own.

  Args:
    merged: the runs.
    columns: the methods and networks to show; all there are by default.
    rows: of the table; all there are by default.
  """
  groups = group(merged)
  if columns:
    groups = {column: groups[column] for column in columns if column in groups}
  outcomes = next(iter(groups.values()))[0]
  starts = outcomes.restarts
  rows = rows or (*outcomes.threats, 'min', 'union', 'natural')
  names = column_names(groups)
  steps = sorted({int(n) for n in outcomes.steps})
  count = len(outcomes.labels)
  _, _, whole = datasets.SIZES[merged[0].config.data.name]
  parts = [
    text(
      f'On {"all" if count == whole else "the first"} {count:,} test images, '
      f'{"one start" if starts == 1 else f"{starts} starts"}, '
      f'{" and ".join(map(str, steps))} steps. '
      + 'Min is the lowest of the rows above it; union counts the images that '
      'stand up to every one of the attacks. '
      * ('union' in rows)
      + 'As in the paper, all images are attacked, also those that are wrong '
      'before. Beside each its 95 % interval, or ± the standard deviation over '
      'the seeds.'
    ),
    table(
      ['accuracy, %', *names.values()],
      [
        [row, *(accuracy_cell(seeds, row) for seeds in groups.values())]
        for row in rows
      ],
    ),
  ]
  figures = paper.ACCURACIES.get((paper_data(merged[0].config), starts), {})
  figures = {column: figures[column] for column in groups if column in figures}
  # Over other threats, the worst and the union are something else.
  six = outcomes.threats == paper.THREATS
  if figures:
    header, cells = ['beside the paper'], [[row] for row in rows]
    for column, theirs in figures.items():
      header += [f'{names[column]}\npaper', 'verdict']
      for row, line in zip(rows, cells, strict=True):
        comparable = six or row not in ('min', 'union')
        figure = theirs.get(row) if comparable else None
        line += beside_the_paper(groups[column], figure, row)
    differences = comparability(evaluated_config(merged[0]))
    parts += [
      table(header, cells),
      text(
        f'{differences} Alike means: within one standard deviation of the '
        "paper's own runs."
      ),
    ]
  return parts


def beside_the_paper(
  seeds: Sequence[Outcomes], theirs: paper.Figure | None, row: str
) -> tuple[str, str]:
  """Our mean over the seeds and the paper's, and whether they are alike.

  They are if ours is within the spread of the paper's own runs.
  """
  ours = statistics.mean(outcomes.accuracies()[row] for outcomes in seeds)
  if theirs is None:
    return f'{ours:.2f}', '-'
  difference = ours - theirs.mean
  word = 'higher' if difference > 0 else 'lower'
  if abs(difference) <= theirs.std:
    word = 'alike'
  return (
    f'{ours:.2f}\n{theirs.mean:.2f} ± {theirs.std:.2f}',
    f'{word}\n{difference:+.1f}',
  )


def column_names(
  groups: Iterable[Column],
) -> dict[Column, str]:
  """Of the columns: the network, with the method if there are several."""
  several = len({method for method, _ in groups}) > 1
  return {
    (method, network): f'{method_title(method)} ' * several + network
    for method, network in groups
  }


def group(merged: Sequence[Run]) -> dict[Column, list[Outcomes]]:
  """The evaluations of all seeds, by method and network."""
  groups = {}
  for run in merged:
    for network, outcomes in run.evaluations.items():
      groups.setdefault((run.method, network), []).append(outcomes)
  return groups


def accuracy_cell(seeds: Sequence[Outcomes], row: str) -> str:
  """The mean over the seeds and their spread, or one with its interval."""
  values = [outcomes.accuracies()[row] for outcomes in seeds]
  if len(values) == 1:
    low, high = wilson(values[0], len(seeds[0].labels))
    return f'{values[0]:.2f}\n{low:.1f} to {high:.1f}'
  return f'{statistics.mean(values):.2f}\n± {statistics.stdev(values):.2f}'


def paper_data(config: ml_collections.ConfigDict) -> str:
  """The paper's data set that stands nearest to the run's."""
  return 'cifar10' if config.data.name == 'cifar10' else 'mnist'


def comparability(config: ml_collections.ConfigDict) -> str:
  """What the paper's figures were made with that a run was not.

  Args:
    config: see `evaluated_config`.
  """
  theirs = config_lib.flatten(config_lib.preset('paper', paper_data(config)))
  ours = config_lib.flatten(config)
  skipped = ('seed', 'preset', 'policy.name', 'policy.threat', 'data.dir')
  skipped += ('eval.restarts', 'eval.batch_size', 'eval.health_examples')
  skipped += ('eval.strict', 'eval.others', 'train.log_every')
  differing = [
    f'{field} {ours.get(field)} (paper: {theirs.get(field)})'
    for field in sorted(ours | theirs)
    if ours.get(field) != theirs.get(field) and not field.startswith(skipped)
  ]
  if not differing:
    return 'Network, data and numbers are those of the paper.'
  return (
    f"NOT the paper's setting: {'; '.join(differing)}. The comparison says "
    'where this run stands, not which method is better.'
  )


def evaluated_config(run: Run) -> ml_collections.ConfigDict:
  """The run's config, with the fields its evaluation was really made with."""
  config = run.config.copy_and_resolve_references()
  outcomes = next(iter(run.evaluations.values()))
  images = len(outcomes.labels)
  everything = images == datasets.SIZES[config.data.name][2]
  config.eval.examples = 0 if everything else images
  for pair in outcomes.settings['attacks']:
    attack = pair['attack']
    if pair['threat']['norm'] == 'l1':
      config.eval.slide_steps = attack['steps']
      config.eval.percentile = attack['percentile']
    else:
      config.eval.pgd_steps = attack['steps']
  return config
