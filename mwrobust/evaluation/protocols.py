"""Protocols: the attacks that are run under a threat, one after the other.

Each attack of a protocol attacks only the images that survived the ones before
it.

  standard   APGD-CE, targeted APGD-DLR, targeted FAB and Square: AutoAttack's
             order and numbers, but for more starts of APGD-CE; and `shrink`,
             climbs of the margin in balls that shrink from 6 eps to eps, which
             find more than all others where gradients are masked. This is the
             figure to report.
  fast       Climbs in shrinking balls and a short targeted FAB, at a tenth of
             the cost. Within a few points of `standard`, but more than ten
             above it where gradients are masked. For choices on validation
             images, and for curves.
  paper      the paper's: 40 steps of PGD, or 100 of SLIDE, from one random
             start. Networks can fool it; use it to compare with the paper.
  paper-20   the same from 20 random starts, as in the paper's appendix.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mwrobust.attacks import (
  Ascent,
  Attack,
  Fab,
  Square,
  Threat,
  apgd,
  fab,
  momentum,
  pgd,
  slide,
  square,
)
from mwrobust.attacks.climb import SHRINKING
from mwrobust.errors import UserError, check_choice

Stages = dict[str, Attack]  # The attacks by their names, in order.


def _standard(norm: str, targets: int) -> Stages:
  return {
    # Where gradients are masked, more starts find more than anything else of
    # their cost.
    'apgd-ce': apgd(100, restarts=10 if norm == 'l1' else 5),
    'apgd-t': apgd(100, loss='dlr', targets=targets),
    'shrink': _shrink(norm, steps=100, restarts=9),
    'fab-t': fab(100, targets=targets),
    'square': square(5000),
  }


def _shrink(norm: str, steps: int, restarts: int) -> Ascent:
  if norm == 'l1':  # APGD chooses the sparsity of its steps itself.
    return apgd(steps, loss='margin', radii=SHRINKING, restarts=restarts)
  return momentum(steps, loss='margin', restarts=restarts, result='fooling')


def _fast(norm: str, targets: int) -> Stages:
  # FAB finds more of what is left than targeted climbs at the same cost. Under
  # l1 more starts and targets help, else more steps.
  if norm == 'l1':
    return {
      'shrink': _shrink(norm, steps=50, restarts=5),
      'fab-t': fab(20, targets=targets),
    }
  return {
    'shrink': _shrink(norm, steps=100, restarts=2),
    'fab-t': fab(40, targets=min(4, targets)),
  }


def _paper(norm: str, restarts: int) -> Stages:
  if norm == 'l1':
    return {'pgd': slide(100, percentile=99.0, restarts=restarts)}
  return {'pgd': pgd(40, restarts=restarts)}


PROTOCOLS: dict[str, Callable[[str, int], Stages]] = {
  'standard': _standard,
  'fast': _fast,
  'paper': lambda norm, targets: _paper(norm, restarts=1),
  'paper-20': lambda norm, targets: _paper(norm, restarts=20),
}


@dataclasses.dataclass(frozen=True)
class Protocol:
  """A protocol for networks of a certain number of classes.

  Attributes:
    name: `'standard'`, ...; `'own'` for the caller's own attacks.
    stages: the attacks by their names, in order, for each norm.
    clip: if not None, the clip to use for threats in spaces other than pixels
      that have `clip='inside'`.
  """

  name: str
  stages: Mapping[str, Stages]
  clip: str | None = None

  @property
  def attacks(self) -> tuple[str, ...]:
    """The names of the attacks, in order; the same for each norm."""
    return tuple(self.stages['linf'])

  def attacked_as(self, threat: Threat) -> Threat:
    """Returns the threat with the clip that the attacks use.

    The paper clips the image once, after the inverse DCT. Attacks other than
    PGD treat `clip='end'` as `'inside'`.
    """
    clip = threat.clip
    if self.clip and clip == 'inside' and threat.space != 'pixel':
      clip = self.clip
    attacks = self.stages[threat.norm].values()
    if clip == 'end' and not any(
      isinstance(attack, Ascent) and attack.rule == 'pgd' for attack in attacks
    ):
      clip = 'inside'
    return dataclasses.replace(threat, clip=clip)


def make_protocol(
  protocol: str | Iterable[Attack] | Mapping[str, Attack], classes: int
) -> Protocol:
  """Makes a protocol from its name, or from attacks.

  Args:
    protocol: a name of `PROTOCOLS`; or attacks, such as `[attacks.apgd(50),
      attacks.square(1000)]`, which are run under every threat in this order;
      or a dict of them by names of your own.
    classes: how many logits the network has.
  """
  norms = ('linf', 'l2', 'l1')
  if isinstance(protocol, str):
    check_choice('protocol', protocol, PROTOCOLS)
    targets = min(9, classes - 1)
    stages = {norm: PROTOCOLS[protocol](norm, targets) for norm in norms}
    clip = 'end' if protocol.startswith('paper') else None
    return Protocol(protocol, stages, clip)
  own = _named(protocol)
  for name, attack in own.items():
    if attack.targets >= classes:
      raise UserError(
        f'protocol: {name} has targets={attack.targets}, but the network has '
        f'{classes} classes: lower it to at most {classes - 1}.'
      )
  return Protocol('own', dict.fromkeys(norms, own))


def _named(attacks: Iterable[Attack] | Mapping[str, Attack]) -> Stages:
  if isinstance(attacks, Attack):
    attacks = [attacks]
  if not isinstance(attacks, Iterable):
    raise UserError(
      f'protocol={attacks!r} is not allowed: must be one of '
      f'{", ".join(map(repr, PROTOCOLS))}, or attacks, such as '
      '[attacks.apgd(100)].'
    )
  if isinstance(attacks, Mapping):
    found = dict(attacks)
  else:
    found = {}
    for attack in attacks:
      name, number = _name(attack), 2
      while name in found:
        name, number = f'{_name(attack)} {number}', number + 1
      found[name] = attack
  for name, attack in found.items():
    if not isinstance(attack, Attack):
      raise UserError(
        f'protocol has {attack!r} as {name!r}: must be an attack, such as '
        'attacks.apgd(100).'
      )
  if not found:
    raise UserError('protocol is empty: name at least one attack.')
  return found


def _name(attack: Any) -> str:
  """Returns what tables call an attack: `'apgd-ce'`, `'fab-t'`, ..."""
  match attack:
    case Ascent(rule='pgd', loss='ce'):
      return 'pgd'
    case Ascent(loss='dlr') if attack.targets:
      return f'{attack.rule}-t'
    case Ascent():
      return f'{attack.rule}-{attack.loss}' + '-t' * bool(attack.targets)
    case Fab():
      return 'fab-t'
    case Square():
      return 'square'
  return type(attack).__name__


def evaluations(attack: Attack) -> tuple[int, int]:
  """Returns the most gradients and other forward passes that it takes.

  They are those of one example that survives all of its tries.
  """
  tries = attack.tries
  match attack:
    case Fab():  # Each try chooses its target, and judges its nearest point.
      return tries * attack.steps, tries * (attack.steps + 2)
    case Square():
      return 0, tries * attack.queries
  return tries * attack.steps, tries * (2 if attack.targets else 1)
