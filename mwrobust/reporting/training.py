"""The parts of a report that show the metrics of training runs."""

from collections.abc import Mapping, Sequence

from mwrobust.reporting import charts
from mwrobust.reporting.accuracies import method_title
from mwrobust.reporting.document import Part, picture, table, text
from mwrobust.reporting.runs import Run
from mwrobust.runtime.progress import format_duration
from mwrobust.training.game import FOOLED, attack_is_fooled, of_last


def seeds_part(merged: Sequence[Run]) -> Part:
  """Returns a line with the methods and seeds of the runs."""
  seeds = {}
  for run in merged:
    seeds.setdefault(method_title(run.method), []).append(str(run.config.seed))
  which = '; '.join(
    f'{title} with seeds {", ".join(numbers)}'
    for title, numbers in seeds.items()
  )
  return text(f'Runs: {which}.')


def training_parts(run: Run) -> list[Part]:
  """Returns charts over the outer steps, and the last validation."""
  if not run.outer:
    return [text('There are no metrics.')]
  names = list(run.outer[0]['weight'])

  def chart(field: str, shown: Mapping[str, str], y_label: str) -> str:
    """Returns a chart of entries of a field, with the titles to show."""
    series = {
      title: [
        (row['outer_step'], row[field][name])
        for row in run.outer
        if field in row
      ]
      for name, title in shown.items()
    }
    return charts.line_chart(series, 'outer step', y_label)

  threats = dict(zip(names, names, strict=True))
  sides = {'mean_mixture': 'mixture', 'mean_worst': 'worst threat'}
  parts = [
    picture(chart('weight', threats, 'share'), 'Weights'),
    picture(chart('validation_loss', threats, 'loss'), 'Validation losses'),
  ]
  if 'game' in run.outer[-1]:
    unit = run.config.policy.signal
    mean = chart('game', sides, f'mean {unit} so far')
    regret = chart('game', {'regret': 'regret'}, unit)
    parts += [
      picture(mean, 'Both sides of the game'),
      picture(regret, 'Regret'),
    ]
  parts += _last_step_parts(run, names)
  chosen = _choices(run, names)
  if any(sum(counts.values()) for counts in chosen.values()):
    shares = charts.stacked_shares(list(chosen.items()), 'outer step')
    parts.append(picture(shares, 'Mini batches of each threat'))
  return parts


def _last_step_parts(run: Run, names: Sequence[str]) -> list[Part]:
  """Returns the last validation, and whether its attack was fooled."""
  last = run.outer[-1]
  # Runs of earlier versions have it only in their config.
  checked = last.get('check_examples', run.config.train.check_examples)
  probed, possible = last['probed_loss'], last['possible_loss']
  header = ['threat', 'weight', 'loss', 'accuracy, %']
  rows = [
    [
      name,
      f'{last["weight"][name]:.3f}',
      f'{last["validation_loss"][name]:.3f}',
      f'{100 * last["validation_accuracy"][name]:.1f}',
    ]
    for name in names
  ]
  rows.append(['natural', '-', '-', f'{100 * last["natural_accuracy"]:.1f}'])
  caption = 'On the validation images, after the last outer step.'
  if checked:
    header += ['training attack, loss', 'APGD, loss']
    for row, name in zip(rows, names, strict=False):
      row += [f'{probed[name]:.3f}', f'{possible[name]:.3f}']
    rows[-1] += ['-', '-']
    caption += (
      ' The training attack is checked against a longer APGD, both on the '
      f'first {checked} of them.'
    )
  words = ''
  if game := last.get('game'):
    words = (
      f'The regret is {game["regret"]:.3f}: the gap between the sides of the '
      f'game, {game["mean_worst"]:.3f} and {game["mean_mixture"]:.3f}, times '
      f'{len(of_last(run.outer))} outer steps with the final radii. '
    )
  fooled = [
    name for name in names if attack_is_fooled(probed[name], possible[name])
  ]
  if not checked:
    words += 'Whether the network fooled the training attack was not checked.'
  elif fooled:
    words += (
      f'The network fooled the training attack under {", ".join(fooled)}: '
      f'APGD finds more than {FOOLED:g} times its loss.'
    )
  else:
    words += (
      'The network did not fool the training attack: under no threat does '
      f'APGD find more than {FOOLED:g} times its loss.'
    )
  return [table(header, rows, caption), text(words)]


def _choices(run: Run, names: Sequence[str]) -> dict[str, dict[str, int]]:
  """Returns the number of mini batches of each threat, by outer step."""
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
  """Returns a table of the cost of training and evaluation of each run."""
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
