"""Checks whether the figures of an evaluation can be trusted.

A robust accuracy is an upper bound: a better attack could lower it. The known
reasons for weak attacks leave traces in the outcomes, which these checks look
for. Networks that are randomised or return probabilities are refused before the
first attack.
"""

from typing import NamedTuple

import numpy as np

from mwrobust.evaluation.outcomes import Outcomes

POINTS = 0.2  # Up to so many percentage points, nothing is reported.
_FEWEST = 3  # Nor for fewer images: single ones fall by chance.
# A ball counts as large if its radius is at least this share of the longest
# distance in [0, 1]^d. Attacks that work leave no image correct there.
_LARGE = {'linf': 0.5, 'l2': 0.1, 'l1': 0.05}
_NEAR = 3  # In multiples of eps: the largest balls that APGD begins in.
_ADVICE = "Report the figures of protocol='standard'."


class Check(NamedTuple):
  """The result of one check.

  Attributes:
    name: the subject of the check.
    passed: whether it passed.
    finding: what it found, in a sentence.
    advice: what to do if it has not passed.
  """

  name: str
  passed: bool
  finding: str
  advice: str = ''


def checks(outcomes: Outcomes, curve: Outcomes | None = None) -> list[Check]:
  """Checks an evaluation.

  Args:
    outcomes: the result of `evaluation.evaluate`.
    curve: the result of `evaluation.evaluate` with several radii, if any.
  """
  if not outcomes.natural.any():
    return [
      Check(
        'attacked images',
        False,
        'No image was attacked, because none is classified correctly.',
        'Check the labels, and that logits_fn normalises the images as the '
        'training did.',
      )
    ]
  attacks = list(outcomes.settings['threats'][0]['attacks'].values())
  kinds = [attack['attack'] for attack in attacks]
  climbs = _places(kinds, 'Ascent')
  # Climbs that begin far away are less misdirected, as are other attacks.
  near = [i for i in climbs if max(attacks[i].get('radii', [1])) <= _NEAR]
  gradients = _places(kinds, 'Ascent', 'Fab')
  found = [_inside(outcomes)]
  if gradients:
    found.append(_zero_gradients(outcomes))
  if climbs and climbs[-1] + 1 < len(kinds):
    found.append(_later_attacks(outcomes, (near or climbs)[-1]))
  else:
    found.append(_weak_protocol(outcomes, climbs))
  if gradients and gradients[-1] + 1 < len(kinds):
    found.append(_gradient_free(outcomes, gradients[-1]))
  if curve is not None and (large := _large(curve)):
    found.append(_falls_to_zero(curve, large))
  return found


def _places(kinds: list[str], *wanted: str) -> list[int]:
  return [place for place, kind in enumerate(kinds) if kind in wanted]


def _are_few(percent: float, outcomes: Outcomes, points: float) -> bool:
  """Returns whether so few images of the outcomes mean nothing."""
  count = round(percent / 100 * len(outcomes.labels))
  return bool(percent <= points or count < _FEWEST)


def _zero_gradients(outcomes: Outcomes) -> Check:
  # A zero gradient matters only where the attacks failed.
  stuck = 100 * (outcomes.stuck & outcomes.correct).mean(axis=1)
  worst = int(stuck.argmax())
  return Check(
    'zero gradients',
    _are_few(stuck[worst], outcomes, POINTS),
    f'At most {stuck[worst]:.1f} % of the images stay correct while their '
    f'gradient is exactly zero, under {outcomes.threats[worst]}.',
    'Gradient attacks cannot move these images. Evaluate the network in '
    'float32, and without quantisation or saturated activations.',
  )


def _inside(outcomes: Outcomes) -> Check:
  ratio = (outcomes.distance / outcomes.eps[:, None]).max(axis=1)
  worst = int(ratio.argmax())
  return Check(
    'inside the ball',
    bool(ratio[worst] <= 1 + 1e-3),
    f'Before the clip, the largest perturbation is {ratio[worst]:.4f} eps, '
    f'under {outcomes.threats[worst]}.',
    'This is a bug in mwrobust: please report it.',
  )


def _gain(outcomes: Outcomes, after: int) -> tuple[float, str, str]:
  """Returns how much the attacks after this one lowered the accuracy.

  Returns:
    The percentage points under the threat where they are most, that threat, and
    the names of the attacks.
  """
  before = outcomes.correct_after(after).mean(axis=1)
  gains = 100 * (before - outcomes.correct.mean(axis=1))
  worst = int(gains.argmax())
  *others, last = outcomes.attacks[after + 1 :]
  names = f'{", ".join(others)} and {last}' if others else last
  return float(gains[worst]), outcomes.threats[worst], names


def _later_attacks(outcomes: Outcomes, last_climb: int) -> Check:
  """Checks how much other attacks find after the gradient climbs from nearby.

  Later attacks are expected to find a little more, and a few points more if
  they are the first that aim at single classes. Much more means that the
  gradient of the loss misdirects attacks.
  """
  points, threat, names = _gain(outcomes, last_climb)
  attacks = list(outcomes.settings['threats'][0]['attacks'].values())
  aimed = any(attack.get('targets') for attack in attacks[: last_climb + 1])
  return Check(
    'gradient masking',
    _are_few(points, outcomes, 3 if aimed else 10),
    f'After the first gradient climbs, {names} lowered the accuracy by '
    f'{points:.1f} more points, under {threat}.',
    'The network may mask its gradients there. The figures of this protocol '
    'are upper bounds; those of PGD alone are too high. In training, use more '
    'steps and start in larger balls.',
  )


def _gradient_free(outcomes: Outcomes, last_gradient: int) -> Check:
  points, threat, names = _gain(outcomes, last_gradient)
  return Check(
    'gradient-free attack',
    _are_few(points, outcomes, POINTS),
    f'After all gradient attacks, {names} lowered the accuracy without '
    f'gradients by {points:.1f} points, under {threat}.',
    'Gradients may misdirect attacks there, so the true accuracy may be even '
    'lower: attack with more queries, attacks.square(20000).',
  )


def _weak_protocol(outcomes: Outcomes, climbs: list[int]) -> Check:
  """Returns a failed check: only attacks of two kinds reveal masking."""
  protocol = outcomes.settings['protocol']
  if climbs:
    finding = (
      'No attack of another kind follows the gradient climbs of the protocol '
      f'{protocol!r}.'
    )
  else:
    finding = f'The protocol {protocol!r} has no gradient climb.'
  return Check('protocol', False, finding, _ADVICE)


def _large(curve: Outcomes) -> list[str]:
  """Returns the threats whose largest ball is large."""
  size = float(np.prod(curve.settings['data']['images'][1:]))
  longest = {'linf': 1.0, 'l2': size**0.5, 'l1': size}
  k = len(curve.threats) // len(curve.settings['radii'])
  return [
    threat['of']
    for threat in curve.settings['threats'][-k:]
    if threat['eps'] >= _LARGE[threat['norm']] * longest[threat['norm']]
  ]


def _falls_to_zero(curve: Outcomes, names: list[str]) -> Check:
  lines, stays = curve.curve(), {}
  for name in names:
    *_, (_, before), (_, last) = lines[name]
    # A robust network may need a still larger ball, so a fall by a quarter
    # suffices.
    stays[name] = last if last > 0.75 * before else 0.0
  worst = max(names, key=lambda name: (stays[name], lines[name][-1][1]))
  radius, accuracy = lines[worst][-1]
  return Check(
    'large radii',
    _are_few(stays[worst], curve, POINTS),
    f'At {radius:g} eps the accuracy is at most {accuracy:.1f} %, under '
    f'{worst}, on {len(curve.labels)} images.',
    'It should fall to zero: at such radii every image can become one of '
    'another class. The network may misdirect the attacks.',
  )
