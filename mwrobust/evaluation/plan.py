"""The plan of an evaluation: its rows, and the order of its attacks."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mwrobust.attacks import Attack, Threat, spaces
from mwrobust.evaluation.protocols import (
  Protocol,
  evaluations,
  make_protocol,
)


class Row(NamedTuple):
  """A row of the outcomes: a threat at a multiple of its radius."""

  threat: Threat  # The threat with its radius multiplied.
  of: str  # The name of the threat at its own radius.
  # The threat at its own radius, in the space and with the clip with which it
  # is attacked.
  solved: Threat
  scale: float  # The factor of the radius.
  attacked: bool  # Whether this is the first of the `equal` rows.
  # The rows whose sets contain this one, including itself.
  within: tuple[int, ...]
  # The rows with the same set that are attacked in the same way, including
  # itself.
  equal: tuple[int, ...]


class Pass(NamedTuple):
  """One try of one attack on all examples that survive under one threat."""

  row: int  # The row of the outcomes.
  stage: int  # The number of the attack in the protocol.
  start: int  # The number of the try, from 0.
  number: int  # The number of earlier passes over this row.


def make_rows(
  threats: Sequence[Threat], radii: Sequence[float], protocol: Protocol
) -> list[Row]:
  """Lists the rows of the outcomes, radius by radius."""
  scaled = [
    dataclasses.replace(
      threat,
      eps=radius * threat.eps,
      name=threat.name if len(radii) == 1 else f'{threat.name} x{radius:g}',
    )
    for radius in radii
    for threat in threats
  ]
  solved = [_solved(threat, protocol) for threat in threats] * len(radii)
  rows = []
  for i, threat in enumerate(scaled):
    contains = [_contains(other, threat) for other in scaled]
    equal = [
      j
      for j, other in enumerate(scaled)
      if contains[j]
      and _contains(threat, other)
      and _how(solved[j]) == _how(solved[i])
    ]
    rows.append(
      Row(
        threat=threat,
        of=threats[i % len(threats)].name,
        solved=solved[i],
        scale=radii[i // len(threats)],
        attacked=equal[0] == i,
        within=tuple(np.flatnonzero(contains).tolist()),
        equal=tuple(equal),
      )
    )
  return rows


def _solved(threat: Threat, protocol: Protocol) -> Threat:
  attacked = protocol.attacked_as(threat)
  # In pixels, the climb of unclipped images would be another one.
  return attacked if attacked.clip == 'end' else _simplest(attacked)


def _how(threat: Threat) -> tuple[spaces.Space, str]:
  return spaces.get(threat.space), threat.clip


def _simplest(threat: Threat) -> Threat:
  """Returns the same set in pixels, where attacks are cheaper, if it exists.

  An orthonormal map preserves Euclidean lengths, so its l2 balls are those of
  pixels. In pixels the clip stays in the ball, so every `clip` is the same set.
  """
  if threat.norm == 'l2' and spaces.get(threat.space).orthonormal:
    return dataclasses.replace(threat, space='pixel', clip='inside')
  return threat


def _contains(outer: Threat, inner: Threat) -> bool:
  """Returns whether every image of `inner` is also one of `outer`."""
  outer, inner = _simplest(outer), _simplest(inner)
  return (
    spaces.get(outer.space) is spaces.get(inner.space)
    and outer.norm == inner.norm
    and outer.eps >= inner.eps
    and (outer.clip != 'strict' or inner.clip == 'strict')
  )


def make_rounds(
  rows: Sequence[Row], protocol: Protocol
) -> list[tuple[Pass, ...]]:
  """Lists all passes: radius by radius, attack by attack, try by try.

  The passes of a round are the same try under several threats. None of their
  sets contains another, so the finds of one pass do not change the examples
  that the others attack, and their order does not matter.
  """
  rounds, count = [], [0] * len(rows)
  for scale in dict.fromkeys(row.scale for row in rows):
    chosen = [i for i, r in enumerate(rows) if r.attacked and r.scale == scale]
    for stage, name in enumerate(protocol.attacks):
      tries = {
        i: protocol.stages[rows[i].solved.norm][name].tries for i in chosen
      }
      for start in range(max(tries.values(), default=0)):
        left = [i for i in chosen if start < tries[i]]
        while left:
          members = []
          for i in left:
            if not any(_are_nested(rows, i, other) for other in members):
              members.append(i)
          left = [i for i in left if i not in members]
          rounds.append(tuple(Pass(i, stage, start, count[i]) for i in members))
          for i in members:
            count[i] += 1
  return rounds


def _are_nested(rows: Sequence[Row], i: int, j: int) -> bool:
  return i in rows[j].within or j in rows[i].within


def round_costs(
  rows: Sequence[Row], rounds: Sequence[tuple[Pass, ...]], protocol: Protocol
) -> list[float]:
  """Returns the gradients of each round for one example that survives.

  Three forward passes count as a gradient.
  """

  def of_pass(a_pass: Pass) -> float:
    stages = protocol.stages[rows[a_pass.row].solved.norm]
    attack = stages[protocol.attacks[a_pass.stage]]
    gradients, forwards = evaluations(attack)
    return (gradients + forwards / 3) / attack.tries

  return [sum(map(of_pass, a_round)) for a_round in rounds]


def cost(
  threats: Sequence[Threat],
  protocol: str | Iterable[Attack] | Mapping[str, Attack],
  classes: int,
  radii: Sequence[float] = (1.0,),
) -> float:
  """Returns the gradients that an image takes which survives every attack.

  Three forward passes count as a gradient. The arguments are those of
  `evaluate`; `classes` is the number of logits.
  """
  protocol = make_protocol(protocol, classes)
  rows = make_rows(threats, radii, protocol)
  return sum(round_costs(rows, make_rounds(rows, protocol), protocol))
