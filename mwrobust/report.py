"""Results as tables."""

import pathlib

import ml_collections

from mwrobust import metrics
from mwrobust.evaluate import Evaluation


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
  """The rows as a Markdown table whose columns line up."""
  widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

  def line(cells: list[str]) -> str:
    (name, width), *others = zip(cells, widths, strict=True)
    padded = [name.ljust(width)] + [cell.rjust(w) for cell, w in others]
    return '| ' + ' | '.join(padded) + ' |'

  rule = '|' + '|'.join('-' * (width + 2) for width in widths) + '|'
  return '\n'.join([line(header), rule, *map(line, rows)])


def table(evaluations: dict[str, Evaluation]) -> str:
  """Accuracies in percent, a row per threat, as in the paper's tables.

  Args:
    evaluations: by the name of their column, such as `'h=1'`.
  """
  columns = [evaluation.accuracies() for evaluation in evaluations.values()]
  rows = [
    [row, *(f'{accuracies[row]:.2f}' for accuracies in columns)]
    for row in columns[0]
  ]
  return markdown_table(['accuracy, %', *evaluations], rows)


def describe(config: ml_collections.ConfigDict) -> str:
  """What a run is, in a few lines."""
  threats = config.threats
  train, spaces, norms = config.train, threats.spaces, threats.norms
  radii = ', '.join(f'{n} {threats[f"eps_{n}"]:.4g}' for n in norms)
  return (
    f'Data {config.data.name}, model {config.model.name}, policy '
    f'{config.policy.name}; preset {config.preset}, seed {config.seed}.\n'
    f'Threats in {" and ".join(spaces)}, with radii {radii}.\n'
    f'T = {train.T} outer steps of r = {train.r} epochs, batches of '
    f'{train.batch_size}, h = {train.h}.'
  )


def write(
  path: pathlib.Path,
  config: ml_collections.ConfigDict,
  evaluations: dict[str, Evaluation],
) -> None:
  """Writes report.md: the table, and what it is of."""
  examples = len(next(iter(evaluations.values())).natural)
  steps = f'{config.eval.pgd_steps} steps of PGD, {config.eval.slide_steps}'
  text = (
    f'# {config.data.name}, {config.policy.name}\n\n'
    f'{describe(config)}\n\n'
    f'On the first {examples} test images, one start, {steps} of SLIDE.\n'
    '`min` is the lowest of the rows above it; `union` counts the images '
    'that stand up to every one of the attacks.\n\n'
    f'{table(evaluations)}\n'
  )
  metrics.write_bytes(path, text.encode())
