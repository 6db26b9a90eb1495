"""The parts of a report that show the outcomes of an evaluation."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mwrobust import evaluation
from mwrobust.evaluation import Check, Outcomes, wilson
from mwrobust.reporting import charts, page
from mwrobust.reporting.document import (
  Part,
  Section,
  callout,
  picture,
  table,
  text,
)

_NUMBERS = (
  *('no', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight'),
  *('nine', 'ten', 'eleven', 'twelve'),
)
# Checks that are not about gradient masking.
_OTHER_CHECKS = ('attacked images', 'inside the ball', 'protocol')


class Evaluated(NamedTuple):
  """The evaluations of one network under the same threats."""

  # Its outcomes, one for each protocol; the first is the main one.
  protocols: Sequence[Outcomes]
  curve: Outcomes | None = None  # Its outcomes at several radii, or None.

  @property
  def main(self) -> Outcomes:
    """The outcomes of the main protocol."""
    return self.protocols[0]

  @property
  def checks(self) -> list[Check]:
    """The results of `evaluation.checks`."""
    return evaluation.checks(self.main, self.curve)


def sections(evaluated: Evaluated) -> list[Section]:
  """Returns all sections on one network."""
  main, curve = evaluated.main, evaluated.curve
  found = [
    ('Verdict', verdict_parts(evaluated)),
    ('Pictures', [picture(shown(main).html), *picture_parts(main)]),
    ('Images fooled by each threat', [shown(main), *overlap_parts(main)]),
    ('Cost', [shown(main, with_protocol=False), cost_table(evaluated)]),
  ]
  if curve is not None:
    found.insert(
      3, ('Accuracy over the radius', [shown(curve), *curve_parts(curve)])
    )
  return found


def network(outcomes: Outcomes) -> str:
  """Returns the name of the network."""
  return outcomes.settings.get('network', 'the network')


def protocol(outcomes: Outcomes) -> str:
  """Returns the name of the protocol."""
  return outcomes.settings['protocol']


def shown(outcomes: Outcomes, with_protocol: bool = True) -> Part:
  """Returns a line with the network, protocol and images of a section."""
  about = f'Network: {network(outcomes)}'
  if with_protocol:
    about += f'; protocol: {protocol(outcomes)}'
  return text(f'{about}; {images(outcomes)}.', 'shown')


def images(outcomes: Outcomes) -> str:
  """Returns the number and split of the images: `'1,000 test images'`."""
  split = outcomes.settings.get('split', 'test')  # Only runs have this field.
  count = len(outcomes.labels)
  return f'{count:,} {split} image{"s" * (count != 1)}'


# ------------------------------------------------------------------ the verdict


def verdict(outcomes: Outcomes) -> str:
  """Returns the result in one sentence."""
  accuracies = outcomes.accuracies()
  return (
    f'Of {images(outcomes)}, {accuracies["natural"]:.1f} % '
    f'are classified correctly; {accuracies["union"]:.1f} % stay correct '
    f'{whatever(outcomes.threats)}.'
  )


def whatever(threats: Sequence[str]) -> str:
  """Returns a clause for a union: `'whatever any of the six threats does'`."""
  count = len(threats)
  if count == 1:
    return f'under {threats[0]}'
  number = _NUMBERS[count] if count < len(_NUMBERS) else f'{count}'
  which = 'either' if count == 2 else 'any'
  return f'whatever {which} of the {number} threats does'


def worst(outcomes: Outcomes) -> str:
  """Returns a sentence on the threat that fools the network most often."""
  accuracies = outcomes.accuracies()
  name = min(outcomes.threats, key=accuracies.get)
  low, high = wilson(accuracies[name], len(outcomes.labels))
  return (
    f'Worst threat ({protocol(outcomes)}): {name}, {accuracies[name]:.1f} % '
    f'(95 % interval {low:.1f} to {high:.1f}).'
  )


def masking(checks: Sequence[Check]) -> str:
  """Returns a sentence on whether anything looks like gradient masking."""
  failed = [check.name for check in checks if not check.passed]
  if any(name not in _OTHER_CHECKS for name in failed):
    return 'This looks like gradient masking: the true accuracy may be lower.'
  if 'attacked images' in failed:
    return 'Nothing was attacked.'
  if 'protocol' in failed:
    return 'This protocol cannot tell whether the network masks its gradients.'
  if failed:
    return 'Something is wrong with this evaluation.'
  return 'Nothing looks like gradient masking.'


def masking_part(checks: Sequence[Check]) -> Part:
  """Returns the same as a box, with the failed checks and their advice."""
  failed = [check for check in checks if not check.passed]
  return callout(
    'bad' if failed else 'good',
    masking(checks),
    *(f'{check.finding} {check.advice}' for check in failed),
  )


def verdict_parts(evaluated: Evaluated) -> list[Part]:
  """Returns the verdict, its charts and tables, and the checks."""
  main, checks = evaluated.main, evaluated.checks

  def with_radius(threat):
    clip = threat.get('attacked_clip', threat['clip'])
    about = f' (clip {clip})' if clip != 'inside' else ''
    return f'{threat["name"]} {threat["eps"]:.4g}{about}'

  radii = ', '.join(map(with_radius, main.settings['threats']))
  parts = [
    text(verdict(main), 'lead'),
    masking_part(checks),
    text(
      f'The network is {network(main)}, the protocol {protocol(main)} '
      f'({", ".join(main.attacks)}). Threats with their radii: {radii}.'
    ),
    picture(charts.bar_chart(bars(evaluated.protocols))),
    text(
      'An image counts as correct under a threat if no attack within the '
      "threat's radius makes the network misclassify it. Min is the accuracy "
      'under the worst threat. Union counts the images that stay correct under '
      'every threat, because an adversary may choose any of them. The 95 % '
      'interval reflects the number of images: 95 of 100 such intervals '
      'contain the accuracy on all images of this kind.'
    ),
    accuracy_table(evaluated.protocols),
  ]
  if not main.complete:
    words = 'This evaluation is not finished: accuracies can still fall.'
    parts.insert(1, callout('bad', words))
  for other in evaluated.protocols[1:]:
    if words := _weaker(main, other):
      parts.append(text(words))
  if len(main.attacks) > 1:
    parts.append(after_table(main))
  passed = [check.name for check in checks if check.passed]
  if passed:
    parts.append(text(f'Checks passed: {", ".join(passed)}.', 'shown'))
  return parts


def bars(protocols: Sequence[Outcomes]) -> dict[str, list[charts.Bar]]:
  """Returns bars for natural, each threat and union; main protocol last."""
  groups = {}
  for name in ('natural', *protocols[0].threats, 'union'):
    groups[name] = []
    for outcomes in protocols[:1] if name == 'natural' else protocols[::-1]:
      value = outcomes.accuracies()[name]
      low, high = wilson(value, len(outcomes.labels))
      kind = f'protocol {protocol(outcomes)}' * (name != 'natural')
      groups[name].append(charts.Bar(value, low, high, kind))
  return groups


def accuracy_table(protocols: Sequence[Outcomes]) -> Part:
  """Returns the accuracies by protocol with their intervals."""
  main = protocols[0]
  eps = dict(zip(main.threats, main.eps, strict=True))
  by_protocol = [outcomes.accuracies() for outcomes in protocols]
  rows = []
  for name in by_protocol[0]:
    cells = [with_interval(a[name], len(main.labels)) for a in by_protocol]
    rows.append([name, f'{eps[name]:.4g}' if name in eps else '', *cells])
  header = ['accuracy, %', 'eps', *map(protocol, protocols)]
  return table(header, rows, 'With 95 % intervals.')


def with_interval(accuracy: float, count: int) -> str:
  """Returns a cell: an accuracy in %, and its 95 % interval below it."""
  low, high = wilson(accuracy, count)
  return f'{accuracy:.1f}\n{low:.1f} to {high:.1f}'


def _weaker(main: Outcomes, other: Outcomes) -> str:
  """Returns a sentence on how weak another protocol is, or ''."""
  ours, theirs = main.accuracies(), other.accuracies()
  more = {name: theirs[name] - ours[name] for name in main.threats}
  name = max(more, key=more.get)
  if more[name] <= 0:
    return ''
  return (
    f'The protocol {protocol(other)} overstates the accuracy by up to '
    f'{more[name]:.1f} points, under {name}, and the union by '
    f'{theirs["union"] - ours["union"]:.1f}: what an attack fails to find is '
    'not robustness.'
  )


def after_table(outcomes: Outcomes) -> Part:
  """Returns the accuracies after each attack of the protocol."""
  after = [outcomes.accuracies_after(a) for a in range(len(outcomes.attacks))]
  rows = [
    [name, *(f'{accuracies[name]:.1f}' for accuracies in after)]
    for name in after[0]
    if name != 'natural'
  ]
  return table(
    ['accuracy after, %', *outcomes.attacks],
    rows,
    f'The attacks of the protocol {protocol(outcomes)}, in order; each attacks '
    'only the images that survived the ones before it.',
  )


# ----------------------------------------------------------------- other parts


def picture_parts(outcomes: Outcomes) -> list[Part]:
  """Returns images, their adversarial images, and the differences."""
  rows = []
  for i, clean in enumerate(outcomes.images):
    label = int(outcomes.labels[i])

    def seen(predicted, label=label):
      mark = '✓' if predicted == label else '✗'
      return f'seen as {predicted}\N{NO-BREAK SPACE}{mark}'

    natural = f'{label}, {seen(int(outcomes.logits[i].argmax()))}'
    attacked = [(_picture(clean), natural)]
    difference = [('', '')]
    for k, adversarial in enumerate(outcomes.adversarial[:, i]):
      delta = adversarial - clean
      largest = float(np.abs(delta).max())
      attacked.append(
        (_picture(adversarial), seen(int(outcomes.predicted[k, i])))
      )
      magnified = 0.5 + delta / max(1e-6, 2 * largest)
      difference.append((_picture(magnified), f'l∞ {largest:.3f}'))
    rows += [(f'image {i}', attacked), ('difference', difference)]
  return [
    picture(
      page.paragraph(
        'Each image and its adversarial image under each threat: the first '
        'that fooled the network (✗), else the one with the highest loss. '
        'Below is the difference, magnified until its largest entry is black '
        'or white (grey is zero), with its l∞ distance in pixels: an image '
        'that is near in one space may be far away in another.'
      )
      + page.picture_grid(['image', *outcomes.threats], rows)
    )
  ]


def _picture(image: np.ndarray) -> str:
  if image.shape[2] not in (1, 3):
    image = image.mean(axis=2, keepdims=True)
  return page.picture(np.round(255 * np.clip(image, 0, 1)).astype(np.uint8))


def overlap_parts(outcomes: Outcomes) -> list[Part]:
  """Returns how many images each threat and attack fools, and the overlap."""
  overlap = outcomes.overlap()
  fooled = np.diag(overlap)
  names, alone = outcomes.threats, outcomes.unique_kills()
  rows = [
    [
      name,
      f'{fooled[i]:,}',
      f'{alone[i]:,}',
      *(f'{(outcomes.fell_to[name] == a).sum():,}' for a in outcomes.attacks),
    ]
    for i, name in enumerate(names)
  ]
  shares = [
    [100 * both / count if count else None for both in row]
    for row, count in zip(overlap, fooled, strict=True)
  ]
  caption = (
    "Of the images that the row's threat fools, the percentage that the "
    "column's threat also fools."
  )
  as_text = [
    [name, *('-' if share is None else f'{share:.0f}' for share in row)]
    for name, row in zip(names, shares, strict=True)
  ]
  parts = [
    table(
      ['threat', 'images fooled', 'only by it', *outcomes.attacks],
      rows,
      'Of the images that are classified correctly without an attack: how many '
      'each threat fools, how many only this threat fools, and how many each '
      'attack was the first to fool.',
    )
  ]
  if len(names) > 1:
    heat_map = page.heat_map(names, names, shares, caption)
    as_table = table(['', *names], as_text, caption)
    parts.append(Part(heat_map, as_table.markdown))
  return parts


def curve_parts(curve: Outcomes) -> list[Part]:
  """Returns the accuracy at growing radii, which should fall to 0."""
  lines = curve.curve()
  radii = curve.settings['radii']
  names = {math.log2(radius): f'{radius:.4g}' for radius in radii}
  series = {
    name: [(math.log2(radius), y) for radius, y in line if radius]
    for name, line in lines.items()
  }
  return [
    picture(
      charts.line_chart(
        series, 'radius in multiples of eps', 'accuracy, %', names
      )
    ),
    table(
      ['accuracy, % at', '0', *(f'{name} eps' for name in names.values())],
      [
        [name, *(f'{accuracy:.1f}' for _, accuracy in line)]
        for name, line in lines.items()
      ],
      'As the radius grows, the accuracy must fall to zero: in a large enough '
      'ball every image can be turned into any other.',
    ),
  ]


def cost_table(evaluated: Evaluated) -> Part:
  """Returns a table of the cost of the evaluations."""
  found = {protocol(outcomes): outcomes for outcomes in evaluated.protocols}
  if evaluated.curve is not None:
    found['the radii'] = evaluated.curve

  def cell(done, full):
    share = f'{100 * done / full:.0f} % of {full:,}' if full else '-'
    return f'{done:,}\n{share}'

  rows = [
    [name, *map(cell, *map(np.ndarray.tolist, outcomes.evaluations()))]
    for name, outcomes in found.items()
  ]
  return table(
    ['evaluation', 'gradients', 'other forward passes'],
    rows,
    'Each counts one image. The percentage is relative to attacking every '
    'image with every try of every attack under every threat: an image that is '
    'fooled is not attacked again, and equal threats are attacked once.',
  )
