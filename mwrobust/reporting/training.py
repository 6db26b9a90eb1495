"""The parts of a report that are made from the metrics of training runs."""

from collections.abc import Sequence

from mwrobust.reporting import page
from mwrobust.reporting.accuracies import method_title
from mwrobust.reporting.document import Part, picture, table, text
from mwrobust.reporting.runs import Run
from mwrobust.runtime.progress import format_duration


def seeds_part(merged: Sequence[Run]) -> Part:
  """Returns a line that says which seeds of which methods these are."""
  seeds = {}
  for run in merged:
    seeds.setdefault(method_title(run.method), []).append(str(run.config.seed))
  which = '; '.join(
    f'{title} with seeds {", ".join(numbers)}'
    for title, numbers in seeds.items()
  )
  return text(f'Runs: {which}.')


def training_parts(run: Run) -> list[Part]:
  """Returns weights and losses over the outer steps, and what was trained."""
  if not run.outer:
    return [text('There are no metrics.')]
  names = list(run.outer[0]['weight'])

  def chart(field: str, y_label: str) -> str:
    series = {
      name: [(row['outer_step'], row[field][name]) for row in run.outer]
      for name in names
    }
    return page.line_chart(series, 'outer step', y_label)

  last = run.outer[-1]
  rows = [
    [
      name,
      f'{last["weight"][name]:.3f}',
      f'{last["validation_loss"][name]:.3f}',
    ]
    for name in names
  ]
  parts = [
    picture(chart('weight', 'share'), 'Weights'),
    picture(chart('validation_loss', 'loss'), 'Validation losses'),
    table(['threat', 'last weight', 'last validation loss'], rows),
  ]
  chosen = _choices(run, names)
  if any(sum(counts.values()) for counts in chosen.values()):
    shares = page.stacked_shares(list(chosen.items()), 'outer step')
    parts.append(picture(shares, 'Which threat was trained when'))
  return parts


def _choices(run: Run, names: Sequence[str]) -> dict[str, dict[str, int]]:
  """Returns how many mini batches each threat had, by outer step."""
  chosen = {
    str(row['outer_step']): dict.fromkeys(names, 0) for row in run.outer
  }
  for row in run.trained:
    for outer in run.outer:
      if row['step'] <= outer['step']:
        for name, count in row['chosen'].items():
          chosen[str(outer['outer_step'])][name] += count
        break
  return chosen


def cost_table(merged: Sequence[Run]) -> Part:
  """Returns what training and evaluating each run took."""
  rows = []
  for run in merged:
    last = run.outer[-1] if run.outer else {}
    spent = sum(
      outcomes.settings['members'] * int(outcomes.evaluations()[0][0])
      for group in (run.primary, *run.others)
      for outcomes in (
        *(o for found in group.evaluations.values() for o in found.values()),
        *group.curves.values(),
      )
    )
    rows.append(
      [
        f'{method_title(run.method)}, seed {run.config.seed}',
        f'{last.get("gradient_evaluations", 0):,}',
        format_duration(last.get('seconds', 0)),
        f'{spent:,}',
      ]
    )
  return table(
    ['run', 'training, gradients', 'training, time', 'evaluation, gradients'],
    rows,
    'A gradient is one image once forward and back through one network. '
    'Training includes its validations and, in time, compilation; evaluation '
    'counts all networks and protocols.',
  )
