"""Writes reports on one network, on a training run, and on several runs."""

import os
from collections.abc import Callable, Sequence

from etils import epath

from mwrobust import config as config_lib
from mwrobust.errors import UserError
from mwrobust.evaluation import Outcomes
from mwrobust.reporting import accuracies, runs, sections, training
from mwrobust.reporting.accuracies import accuracy_parts, method_title
from mwrobust.reporting.document import (
  Part,
  Section,
  summary,
  table,
  text,
  write_files,
)
from mwrobust.reporting.runs import Run
from mwrobust.reporting.sections import Evaluated

Say = Callable[[str], None]


def write(
  outcomes: Outcomes | Sequence[Outcomes],
  folder: str | os.PathLike,
  curve: Outcomes | None = None,
  say: Say = print,
) -> None:
  """Writes report.html and report.md on one network.

  Args:
    outcomes: the result of `evaluation.evaluate`, or several of them for the
      same network, images and threats with different protocols. The first is
      the main one.
    folder: the folder for the files.
    curve: the result of `evaluation.evaluate` with several radii, if any.
    say: prints a summary of at most six lines, then the paths.
  """
  if isinstance(outcomes, Outcomes):
    outcomes = [outcomes]
  for each in outcomes:
    radii = each.settings['radii']
    if len(radii) > 1:
      raise UserError(
        f'outcomes has the radii {radii}: must have one. Pass a curve as '
        'reporting.write(outcomes, folder, curve).'
      )
  evaluated = Evaluated(tuple(outcomes), curve)
  runs.check_same([*outcomes, *([] if curve is None else [curve])])
  title = f'How robust is {sections.network(evaluated.main)}?'
  _write(folder, title, sections.sections(evaluated), _said(evaluated), say)


def write_run(
  run: Run,
  folder: str | os.PathLike,
  say: Say = print,
  threats: runs.Threats | None = None,
) -> None:
  """Writes report.html and report.md on one training run.

  The summary is on the given threats, by default on those of training.
  """
  network = run.output or next(iter(run.evaluations))
  evaluated = run.primary.evaluated(network)
  found = sections.sections(evaluated)
  _, verdict_parts = found[0]
  verdict_parts += _missing(run)
  found += [
    (
      'Training',
      [
        text(config_lib.describe(run.config)),
        *training.training_parts(run),
        training.cost_table([run]),
      ],
    ),
    ('All networks of this run', accuracy_parts([run])),
  ]
  if run.others:
    found.append(('Other evaluations', _other_parts(run)))
  title = f'{run.config.data.name}, {method_title(run.method)}'
  asked = run.under(threats) if threats else run.primary
  if network in asked.evaluations:
    evaluated = asked.evaluated(network)
  _write(folder, title, found, _said(evaluated), say)


def write_runs(
  merged: Sequence[Run], folder: str | os.PathLike, say: Say = print
) -> None:
  """Writes report.html and report.md on several runs.

  They share preset, data set and network; see `runs.check_mergeable`.
  """
  if len(merged) == 1:
    write_run(merged[0], folder, say)
    return
  runs.check_mergeable(merged)
  config = merged[0].config
  verdict = merged_verdict(merged)
  parts = [
    text(verdict, 'lead'),
    text(config_lib.describe(config, shared=True)),
    training.seeds_part(merged),
    *accuracy_parts(merged),
  ]
  found = [
    ('Accuracy', parts),
    ('Can these figures be believed?', check_parts(merged)),
    ('Cost', [training.cost_table(merged)]),
  ]
  said = [verdict, _masked_runs(merged)]
  title = f'{config.data.name}, {len(merged)} runs'
  _write(folder, title, found, said, say)


def _write(
  folder: str | os.PathLike,
  title: str,
  found: Sequence[Section],
  said: Sequence[str],
  say: Say,
) -> None:
  say(summary(said))
  write_files(epath.Path(folder, 'report'), title, found, say)


def _said(evaluated: Evaluated) -> list[str]:
  """Returns the paragraphs of the summary for the terminal."""
  main, checks = evaluated.main, evaluated.checks
  findings = [check.finding for check in checks if not check.passed]
  return [
    sections.verdict(main),
    sections.worst(main),
    ' '.join([sections.masking(checks), *findings[:1]]),
  ]


def _missing(run: Run) -> list[Part]:
  """Returns notes on what an unfinished run lacks."""
  parts = []
  if run.outer_step < run.config.train.T:
    words = f'The run is unfinished: trained to outer step {run.outer_step}.'
    parts.append(text(words))
  if run.output is None:
    command = runs.evaluation_command(run.workdir)
    words = f'The output of the algorithm is not evaluated yet: run {command}'
    parts.append(text(words))
  return parts


def _other_parts(run: Run) -> list[Part]:
  """Returns a table for each network under other threats or images."""
  parts = []
  for group in run.others:
    for network, protocols in group.evaluations.items():
      found = tuple(protocols.values())
      about = f'Network: {network}; {sections.images(found[0])}.'
      parts += [text(about, 'shown'), sections.accuracy_table(found)]
  return parts


# ----------------------------------------------------------------- several runs


def merged_verdict(merged: Sequence[Run]) -> str:
  """Returns the union of each method's output, the most robust first."""
  protocol, groups = next(iter(accuracies.group(merged).items()))
  outputs = {run.method: run.output for run in merged}
  found = []
  for (method, network), seeds in groups.items():
    if network == outputs[method]:
      union, spread = accuracies.mean_and_spread(seeds, 'union')
      over = f' ± {spread:.1f}' if len(seeds) > 1 else ''
      found.append((union, f'{method_title(method)} {union:.1f}{over}'))
  first = merged[0].primary.first
  whatever = sections.whatever(first.threats)
  methods = ', '.join(words for _, words in sorted(found, reverse=True))
  return (
    f'Percentage of {sections.images(first)} that stay correct {whatever} '
    f'(protocol {protocol}): {methods}.'
  )


def _failed(merged: Sequence[Run]):
  """Yields each run's name, its output and each failed check."""
  for run in merged:
    if run.output is not None:
      for check in run.primary.evaluated(run.output).checks:
        if not check.passed:
          name = f'{method_title(run.method)}, seed {run.config.seed}'
          yield name, run.output, check


def _masked_runs(merged: Sequence[Run]) -> str:
  failed = list(_failed(merged))
  if any(run.output is None for run in merged) and not failed:
    return 'The outputs of some runs are not evaluated yet.'
  if not failed:
    return 'Nothing looks like gradient masking in any run.'
  count = len({name for name, _, _ in failed})
  name, _, check = failed[0]
  return (
    f'Checks failed in {count} of {len(merged)} runs; {name}: {check.finding}'
  )


def check_parts(merged: Sequence[Run]) -> list[Part]:
  """Returns the failed checks of each run's output."""
  failed = list(_failed(merged))
  parts = [text(_masked_runs(merged))]
  if failed:
    rows = [
      [f'{name}: {network}', check.name, check.finding]
      for name, network, check in failed
    ]
    parts.append(table(['run', 'check', 'finding'], rows))
    advice = dict.fromkeys(check.advice for _, _, check in failed)
    parts += map(text, advice)
  return parts
