"""Whether the figures of an evaluation can be believed.

A robust accuracy is an upper bound: a better attack could lower it. What is
known to hide weak attacks leaves traces in the outcomes, which are looked for
here. That a network is randomised, or returns probabilities, is refused before
the first attack.
"""

from typing import NamedTuple

from mwrobust.evaluation.outcomes import Outcomes

POINTS = 0.2  # What may go wrong before it is worth a warning, in points.
_GRADIENT_FREE = 'square'


class Check(NamedTuple):
  """One thing that was looked at.

  Attributes:
    name: what it is about.
    passed: whether all is well.
    finding: what was seen, in a sentence.
    advice: what to do if it has not passed.
  """

  name: str
  passed: bool
  finding: str
  advice: str = ''


def checks(outcomes: Outcomes, curve: Outcomes | None = None) -> list[Check]:
  """Looks at an evaluation.

  Args:
    outcomes: of `evaluation.evaluate`.
    curve: of `evaluation.evaluate` with several radii, if there is one.
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
  # Those that fell had a gradient; those that stand may hide theirs.
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
    f'Before the clip the largest perturbation has {ratio[worst]:.4f} eps, '
    f'under {outcomes.threats[worst]}.',
    'This is a bug of mwrobust: please report it.',
  )


def _later_attacks(outcomes: Outcomes) -> Check:
  """What an attack fells that all gradient climbs before it left standing.

  That later attacks find a little more is what they are for. Much more means
  that the slope of the loss leads attacks astray.
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
    'The network masks its gradients there. The figures of this protocol hold '
    'as upper bounds; those of PGD alone do not. In training, use more steps '
    'and starts from larger balls.',
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
    'Gradients do not show the way there, so the true accuracy may be lower '
    'still: attack with more queries, attacks.square(20000).',
  )


def _weak_protocol(outcomes: Outcomes) -> Check:
  return Check(
    'protocol',
    False,
    f'The protocol {outcomes.settings["protocol"]!r} is one that networks '
    'learn to fool.',
    "Report the figures of protocol='standard'.",
  )


def _falls_to_zero(curve: Outcomes) -> Check:
  # Without limits every image can be made one of another class. Where eps is
  # tiny its widest multiple still has limits: there it must fall by a quarter.
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
    f'At {radius:g} eps the accuracy is {accuracy:.1f} % at most, under '
    f'{worst}, on {len(curve.labels)} images.',
    'It should fall to zero: at such radii every image can become one of '
    'another class. The attacks are misled.',
  )
