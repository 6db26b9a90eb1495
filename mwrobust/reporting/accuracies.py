"""Tables over methods and seeds, and the paper's own figures beside them.

One run has a 95 % interval in each cell; several seeds of a method have their
mean and standard deviation.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import ml_collections

from mwrobust import config as config_lib
from mwrobust.evaluation import Outcomes
from mwrobust.reporting import paper
from mwrobust.reporting.document import Part, table, text
from mwrobust.reporting.runs import SEEDS_DIFFER, Run
from mwrobust.reporting.sections import images, with_interval

METHODS = {
  'multiplicative_weights': 'Mult. weights',
  'round_robin': 'Round robin',
  'greedy': 'Greedy',
  'uniform': 'Uniform',
  'natural': 'Natural',
  'e_at': 'E-AT',
  'ucb': 'UCB',
  'max': 'MAX',
  'avg': 'AVG',
  'msd': 'MSD',
}
# The random starts of the paper's tables, by protocol.
STARTS = {'paper': 1, 'paper-20': 20}
Column = tuple[str, str]  # A method, and the network of it that is evaluated.
Columns = dict[Column, list[Outcomes]]  # The outcomes of all seeds.


def method_title(method: str) -> str:
  """Returns the title of a method: `'Mult. weights'`."""
  return METHODS.get(method, method.capitalize())


def accuracy_parts(
  merged: Sequence[Run],
  columns: Sequence[Column] = (),
  rows: Sequence[str] = (),
) -> list[Part]:
  """Returns a table for each protocol, and the same beside the paper's.

  By default with all methods and networks as columns; the rows are union, min,
  each threat and natural.
  """
  first = merged[0].primary.first
  rows = rows or ('union', 'min', *first.threats, 'natural')
  parts = [
    text(
      f'On {images(first)}. Min is the accuracy under the '
      'worst threat; union counts the images that stay correct under every '
      'threat. Each has its 95 % interval, or ± the standard deviation over '
      'the seeds.'
    )
  ]
  differs = unlike_the_paper(merged[0])
  for protocol, groups in group(merged).items():
    if columns:
      groups = {
        column: groups[column] for column in columns if column in groups
      }
    for caption, shown in _tables(groups, whole=bool(columns)).items():
      cells = [
        [row, *(accuracy_cell(seeds, row) for seeds in shown.values())]
        for row in rows
      ]
      header = ['accuracy, %', *column_names(shown).values()]
      parts.append(table(header, cells, f'Protocol {protocol}{caption}.'))
    if not differs and protocol in STARTS:
      parts += _beside(groups, protocol, rows, merged[0].config)
  if differs:
    parts.append(text(f"Not compared with the paper's tables: {differs}."))
  return parts


def _tables(groups: Columns, whole: bool) -> dict[str, Columns]:
  """Returns the columns of each table: several methods have one per network."""
  if whole or len({method for method, _ in groups}) == 1:
    return {'': groups} if groups else {}
  tables = {}
  # What the algorithms return comes first.
  for (method, network), seeds in sorted(
    groups.items(), key=lambda item: not item[1][0].settings['is_output']
  ):
    columns = tables.setdefault(f', network {network}', {})
    columns[method, network] = seeds
  return tables


def group(merged: Sequence[Run]) -> dict[str, Columns]:
  """Returns the outcomes of all seeds, by protocol, then by column."""
  found = {}
  for run in merged:
    for network, protocols in run.evaluations.items():
      for protocol, outcomes in protocols.items():
        columns = found.setdefault(protocol, {})
        columns.setdefault((run.method, network), []).append(outcomes)
  return found


def column_names(columns: Iterable[Column]) -> dict[Column, str]:
  """Returns names that distinguish columns: the network, the method or both."""
  methods, networks = map(set, zip(*columns, strict=True))

  def name(method: str, network: str) -> str:
    if len(methods) == 1:
      return network
    title = method_title(method)
    return title if len(networks) == 1 else f'{title} {network}'

  return {column: name(*column) for column in columns}


def mean_and_spread(seeds: Sequence[Outcomes], row: str) -> tuple[float, float]:
  """Returns the mean of a row and its deviation, 0 for one seed, in %."""
  values = [outcomes.accuracies()[row] for outcomes in seeds]
  spread = statistics.stdev(values) if len(values) > 1 else 0.0
  return statistics.mean(values), spread


def accuracy_cell(seeds: Sequence[Outcomes], row: str) -> str:
  """Returns the mean and its spread, or that of one seed with its interval."""
  mean, spread = mean_and_spread(seeds, row)
  if len(seeds) == 1:
    return with_interval(mean, len(seeds[0].labels))
  return f'{mean:.1f}\n± {spread:.1f}'


# -------------------------------------------------------------------- the paper


def paper_data(config: ml_collections.ConfigDict) -> str:
  """Returns the paper's data set that is nearest to the run's."""
  return 'cifar10' if config.data.name == 'cifar10' else 'mnist'


def unlike_the_paper(run: Run) -> str:
  """Returns how data, network or threats differ from the paper's, or ''."""
  config = run.config
  theirs = config_lib.preset('paper', paper_data(config))
  threats = run.primary.first.settings['threats']

  def described(threats):
    return ', '.join(map(_described, threats))

  compared = {
    'data': (config.data.name, theirs.data.name),
    'network': (
      ' '.join([config.model.name, *map(str, config.model.options.items())]),
      theirs.model.name,
    ),
    'threats': (
      described(threats),
      described(t.to_dict() for t in config_lib.make_threats(theirs)),
    ),
  }
  return '; '.join(
    f'{what} {ours} (paper: {other})'
    for what, (ours, other) in compared.items()
    if ours != other
  )


def _described(threat: dict[str, Any]) -> str:
  """Returns `'dct_l1 7.84'`, with the space and norm if the name lacks them."""
  name, ball = threat['name'], f'{threat["space"]}_{threat["norm"]}'
  about = '' if name == ball else f' ({ball})'
  return f'{name}{about} {threat["eps"]:.4g}'


def other_fields(config: ml_collections.ConfigDict) -> str:
  """Returns the other differences from the paper in a sentence, or ''."""
  theirs = config_lib.flatten(config_lib.preset('paper', paper_data(config)))
  ours = config_lib.flatten(config)
  differing = [
    f'{field} {ours.get(field)} (paper: {theirs.get(field)})'
    for field in sorted(ours | theirs)
    if ours.get(field) != theirs.get(field)
    and not field.startswith((*SEEDS_DIFFER, 'method', 'policy.', 'preset'))
  ]
  return (
    f'The run also differs in {"; ".join(differing)}. ' if differing else ''
  )


def _beside(
  groups: Columns,
  protocol: str,
  rows: Sequence[str],
  config: ml_collections.ConfigDict,
) -> list[Part]:
  """Returns our figures beside the paper's, a table for each of its columns."""
  figures = paper.ACCURACIES[paper_data(config), STARTS[protocol]]
  parts = []
  for (method, network), seeds in groups.items():
    if theirs := figures.get((method, network)):
      cells = [
        [row, *beside_the_paper(seeds, theirs.get(row), row)] for row in rows
      ]
      caption = f'{method_title(method)}, {network}, protocol {protocol}.'
      header = ['beside the paper', 'ours', "the paper's", 'verdict']
      parts.append(table(header, cells, caption))
  if parts:
    words = (
      f'{other_fields(config)}Within 1 sd means: within one standard deviation '
      "of the paper's own runs."
    )
    parts.append(text(words))
  return parts


def beside_the_paper(
  seeds: Sequence[Outcomes], theirs: paper.Figure | None, row: str
) -> tuple[str, str, str]:
  """Returns our mean, the paper's, and how they compare."""
  ours, _ = mean_and_spread(seeds, row)
  if theirs is None:
    return f'{ours:.2f}', '-', '-'
  difference = ours - theirs.mean
  word = 'higher' if difference > 0 else 'lower'
  if abs(difference) <= theirs.std:
    word = 'within 1 sd'
  return (
    f'{ours:.2f}',
    f'{theirs.mean:.2f} ± {theirs.std:.2f}',
    f'{word}, {difference:+.1f}',
  )
