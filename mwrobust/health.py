"""Whether the attacks were strong enough to be believed.

A robust accuracy is an upper bound: a better attack could lower it. So the
first examples are attacked once more in other ways, and what is known to hide
weak attacks is looked for. Every check is computed from saved outcomes.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mwrobust import attacks as attacks_lib
from mwrobust.outcomes import Outcomes

Pair = tuple[attacks_lib.Threat, attacks_lib.Attack]
POINTS = 0.5  # What a stronger attack may gain before it is worth a warning.
LOSS_RATIO = 2.0  # What stronger attacks than those of training may add.
# The ways in which the first examples are attacked again.
_CHANGES = {
  'one more start': lambda threat, attack: attack,
  'margin loss': lambda threat, attack: dataclasses.replace(
    attack, loss='margin'
  ),
  # Steps of the same size: twice as many of half the size lead no further.
  'twice the steps': lambda threat, attack: dataclasses.replace(
    attack,
    steps=2 * attack.steps,
    step_size=2.5 * threat.eps / attack.steps,
  ),
  # What masks the gradients near the image is seen over from further away.
  'apgd from larger balls': lambda threat, attack: attacks_lib.apgd(
    # Each ball takes a step.
    attack.steps,
    loss='dlr',
    radii=(3.0, 2.0, 1.0)[-attack.steps :],
  ),
}
WAYS = tuple(_CHANGES)
RADII = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # Times eps, for a curve.
CURVE_EXAMPLES = 250  # At most, for a curve.


class Check(NamedTuple):
  """One thing that was looked at.

  Attributes:
    name: what it is about.
    passed: whether all is well.
    finding: what was seen, in a sentence.
  """

  name: str
  passed: bool
  finding: str


def probes(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
  """Returns the same threats attacked in all of the `WAYS`: first as before."""
  return tuple(
    (threat, change(threat, attack))
    for change in _CHANGES.values()
    for threat, attack in pairs
  )


def wider(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
  """Returns the threats with each of the `RADII`."""
  return tuple(
    (dataclasses.replace(threat, eps=scale * threat.eps), attack)
    for scale in RADII
    for threat, attack in pairs
  )


def describe(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
  """Returns the pairs as JSON can hold them."""
  fields = [
    {'threat': threat.to_dict(), 'attack': dataclasses.asdict(attack)}
    for threat, attack in pairs
  ]
  return json.loads(json.dumps(fields))  # As a file gives them back.


def settings(outcomes: Outcomes, pairs: Sequence[Pair]) -> dict[str, Any]:
  """By which saved outcomes of further attacks tell what attacked whom.

  Args:
    outcomes: the evaluation whose first examples were attacked again.
    pairs: `probes` or `wider`.
  """
  return outcomes.settings | {'attacks': describe(pairs)}


def curve(
  outcomes: Outcomes, widened: Outcomes
) -> dict[str, list[tuple[float, float]]]:
  """By threat: the radius over eps, and the accuracy there in percent.

  A ball holds all smaller ones: who fell there has fallen.

  Args:
    outcomes: the evaluation.
    widened: what `wider` did to its first examples.
  """
  k, count = len(outcomes.threats), len(widened.labels)
  correct = widened.correct.reshape(-1, k, count)
  rows = zip(RADII, np.logical_and.accumulate(correct), strict=True)
  stands = {0.0: np.tile(outcomes.natural[:count], (k, 1))} | dict(rows)
  return {
    name: [(scale, 100 * stood[i].mean()) for scale, stood in stands.items()]
    for i, name in enumerate(outcomes.threats)
  }


def unions(outcomes: Outcomes, probed: Outcomes) -> dict[str, float]:
  """How many of the probed examples stand up to every threat, in percent.

  As they were evaluated; when each of the `WAYS` is tried, too; and when all of
  them are.

  Args:
    outcomes: the evaluation.
    probed: what `probes` did to the survivors among its first examples.
  """
  before, after = _before_and_after(outcomes, probed)
  stands = {'as evaluated': before} | after
  stands['all of these'] = np.logical_and.reduce(list(after.values()))
  return {
    name: 100 * float(correct.all(axis=0).mean())
    for name, correct in stands.items()
  }


def _before_and_after(
  outcomes: Outcomes, probed: Outcomes
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
  """Whether the probed examples stood, by threat; and, by way, still do."""
  k, count = len(outcomes.threats), len(probed.labels)
  after = probed.correct.reshape(len(WAYS), k, count)
  return outcomes.correct[:, :count], dict(zip(WAYS, after, strict=True))


def checks(
  outcomes: Outcomes,
  validation_loss: Mapping[str, float] | None,
  probed: Outcomes | None,
  widened: Outcomes | None,
) -> list[Check]:
  """Looks at an evaluation.

  Args:
    outcomes: the evaluation.
    validation_loss: of the last validation, by threat; None if unknown.
    probed: what `probes` did to the survivors among its first examples; None
      if that was not done.
    widened: what `wider` did to its first examples, or None.
  """
  found = [
    _zero_gradients(outcomes),
    _logits(outcomes),
    _deterministic(outcomes),
    _norm(outcomes),
  ]
  if validation_loss is not None:
    found.append(_training_attacks(outcomes, validation_loss))
  if outcomes.restarts > 1:
    found.append(_restarts(outcomes))
  if probed is not None:
    before, after = _before_and_after(outcomes, probed)
    for name, correct in after.items():
      found.append(_gain(name, outcomes.threats, before, correct))
  if widened is not None:
    found.append(_falls_to_zero(curve(outcomes, widened), len(widened.labels)))
  return found


def _zero_gradients(outcomes: Outcomes) -> Check:
  # A fooled network has a gradient; it is those that stand who may hide one.
  stuck = (outcomes.stuck & outcomes.correct).mean(axis=1)
  worst = int(stuck.argmax())
  return Check(
    'zero gradients',
    bool(100 * stuck[worst] <= POINTS),
    f'{100 * stuck[worst]:.1f} % of the examples stand while their gradient is '
    f'exactly zero, at most, under {outcomes.threats[worst]}',
  )


def _logits(outcomes: Outcomes) -> Check:
  logits = outcomes.logits
  sums = logits.sum(axis=1)
  probabilities = (logits >= 0).all() and np.allclose(sums, 1, atol=1e-3)
  return Check(
    'logits',
    not probabilities,
    'the network returns probabilities, not logits: the attacks climb a '
    'softmax of a softmax'
    if probabilities
    else f'they range from {logits.min():.3g} to {logits.max():.3g}',
  )


def _deterministic(outcomes: Outcomes) -> Check:
  again = outcomes.logits_again
  first = outcomes.logits[: len(again)]
  scale = max(1.0, float(np.abs(first).max()))
  difference = float(np.abs(again - first).max())
  return Check(
    'deterministic',
    difference <= 1e-3 * scale,
    f'the logits of {len(again)} examples, seen again in another order, differ '
    f'by {difference:.2g} at most',
  )


def _norm(outcomes: Outcomes) -> Check:
  ratio = (outcomes.norm / outcomes.eps[:, None]).max(axis=1)
  worst = int(ratio.argmax())
  return Check(
    'inside the ball',
    bool(ratio[worst] <= 1 + 1e-3),
    f'before the clip the largest norm is {ratio[worst]:.4f} eps, '
    f'{outcomes.threats[worst]}',
  )


def _training_attacks(
  outcomes: Outcomes, validation_loss: Mapping[str, float]
) -> Check:
  # A network may learn to hide from the few steps it is trained against, which
  # is known as catastrophic overfitting.
  losses = dict(zip(outcomes.threats, outcomes.loss.mean(axis=1), strict=True))
  ratios = {
    # Twice next to nothing is nothing to look at.
    name: loss / max(0.1, validation_loss[name])
    for name, loss in losses.items()
  }
  worst = max(ratios, key=ratios.get)
  return Check(
    "training's attacks",
    ratios[worst] <= LOSS_RATIO,
    f'under {worst} the mean loss is {losses[worst]:.2f}, and was '
    f'{validation_loss[worst]:.2f} in the last validation, whose attacks are '
    'those of training',
  )


def _restarts(outcomes: Outcomes) -> Check:
  half = outcomes.restarts // 2
  return _gain(
    f'starts {half + 1} to {outcomes.restarts}',
    outcomes.threats,
    outcomes.correct_after(half),
    outcomes.correct,
  )


def _falls_to_zero(
  accuracies: dict[str, list[tuple[float, float]]], count: int
) -> Check:
  # Without limits every image can be made one of another class. Where eps is
  # tiny its widest multiple still has limits: there it must fall by a quarter.
  last = {name: line[-1][1] for name, line in accuracies.items()}
  stays = {
    name: line[-1][1] if line[-1][1] > 0.75 * line[-2][1] else 0.0
    for name, line in accuracies.items()
  }
  worst = max(last, key=lambda name: (stays[name], last[name]))
  return Check(
    'wide radii',
    stays[worst] <= POINTS,
    f'at {RADII[-1]:g} eps the accuracy is {last[worst]:.1f} % '
    f'{"and hardly falls further" if stays[worst] > POINTS else "at most"}, '
    f'{worst}, on {count} examples',
  )


def _gain(
  name: str, threats: Sequence[str], before: np.ndarray, after: np.ndarray
) -> Check:
  """Whether `after`, which attacked what stood `before`, is much lower."""
  gains = 100 * (before.mean(axis=1) - after.mean(axis=1))
  union = 100 * (before.all(axis=0).mean() - after.all(axis=0).mean())
  worst = int(gains.argmax())
  return Check(
    name,
    bool(max(gains[worst], union) <= POINTS),
    f'lowers the accuracy by {gains[worst]:.1f} points at most, '
    f'{threats[worst]}, and the union by {union:.1f}, on {before.shape[1]} '
    'examples',
  )
