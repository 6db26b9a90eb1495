"""Checks whether the figures of an evaluation can be trusted.

A robust accuracy is an upper bound: a better attack could lower it. The known
reasons for weak attacks leave traces in the outcomes, which these checks look
for. Networks that are randomised or return probabilities are refused before the
first attack.
"""

from typing import NamedTuple

from mwrobust.evaluation.outcomes import Outcomes

POINTS = 0.2  # Up to so many percentage points, nothing is reported.
_GRADIENT_FREE = 'square'


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
  found = [_zero_gradients(outcomes), _inside(outcomes)]
  if len(outcomes.attacks) > 1:
    found.append(_later_attacks(outcomes))
  if _GRADIENT_FREE in outcomes.attacks[1:]:
    found.append(_gradient_free(outcomes))
  if outcomes.attacks == ('pgd',):
    found.append(_weak_protocol(outcomes))
  if curve is not None:
    found.append(_falls_to_zero(curve))
  return found


def _zero_gradients(outcomes: Outcomes) -> Check:
  # A zero gradient matters only where the attacks failed.
  stuck = 100 * (outcomes.stuck & outcomes.correct).mean(axis=1)
  worst = int(stuck.argmax())
  return Check(
    'zero gradients',
    bool(stuck[worst] <= POINTS),
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


def _later_attacks(outcomes: Outcomes) -> Check:
  """Checks how much other attacks find after all gradient climbs.

  Later attacks are expected to find a little more. Much more means that the
  gradient of the loss misdirects attacks.
  """
  names = outcomes.attacks
  climbs = [
    a for a, name in enumerate(names) if name.startswith(('apgd', 'pgd'))
  ]
  others = [a for a in range(len(names)) if a not in climbs]
  if not climbs or not others or others[0] < climbs[-1]:
    return Check('gradient masking', True, 'Only one kind of attack was used.')
  before = outcomes.correct_after(climbs[-1])
  gains = 100 * (before.mean(axis=1) - outcomes.correct.mean(axis=1))
  worst = int(gains.argmax())
  return Check(
    'gradient masking',
    bool(gains[worst] <= 3),
    f'After the gradient climbs, {" and ".join(names[a] for a in others)} '
    f'lowered the accuracy by {gains[worst]:.1f} more points, under '
    f'{outcomes.threats[worst]}.',
    'The network masks its gradients there. The figures of this protocol are '
    'upper bounds; those of PGD alone are too high. In training, use more '
    'steps and start in larger balls.',
  )


def _gradient_free(outcomes: Outcomes) -> Check:
  last = outcomes.attacks.index(_GRADIENT_FREE)
  before, after = (
    100 * outcomes.correct_after(a).mean(axis=1) for a in (last - 1, last)
  )
  gains = before - after
  worst = int(gains.argmax())
  return Check(
    'gradient-free attack',
    bool(gains[worst] <= POINTS),
    f'Square, which uses no gradients, lowered the accuracy by '
    f'{gains[worst]:.1f} points after all gradient attacks, under '
    f'{outcomes.threats[worst]}.',
    'Gradients misdirect attacks there, so the true accuracy may be even '
    'lower: attack with more queries, attacks.square(20000).',
  )


def _weak_protocol(outcomes: Outcomes) -> Check:
  return Check(
    'protocol',
    False,
    f'Networks can learn to fool the protocol '
    f'{outcomes.settings["protocol"]!r}.',
    "Report the figures of protocol='standard'.",
  )


def _falls_to_zero(curve: Outcomes) -> Check:
  # In a large enough ball every image can become one of another class. If eps
  # is tiny, its largest multiple may be too small: then a fall by a quarter
  # suffices.
  lines = curve.curve()
  stays = {
    name: line[-1][1] if line[-1][1] > 0.75 * line[-2][1] else 0.0
    for name, line in lines.items()
  }
  worst = max(lines, key=lambda name: (stays[name], lines[name][-1][1]))
  radius, accuracy = lines[worst][-1]
  return Check(
    'large radii',
    stays[worst] <= POINTS,
    f'At {radius:g} eps the accuracy is at most {accuracy:.1f} %, under '
    f'{worst}, on {len(curve.labels)} images.',
    'It should fall to zero: at such radii every image can become one of '
    'another class. The network misdirects the attacks.',
  )
