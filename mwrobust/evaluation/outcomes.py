"""The outcome of each threat for each example, the source of every figure.

An evaluation fills in the outcomes batch by batch and saves them regularly.
Tables, checks and pages only read them, so every figure can be computed again
from the file:

  outcomes = Outcomes.load('my_network/outcomes.npz')
  outcomes.accuracies()['union']
"""

import dataclasses
import io
import json
import math
import os
from typing import Any

import numpy as np

from mwrobust.attacks import Threat
from mwrobust.errors import UserError
from mwrobust.runtime import files
from mwrobust.runtime.archives import read_npz

STANDING = -1  # In `Outcomes.fell`.


class ByThreat(dict):
  """Values by the name of a threat, or by the `Threat` itself."""

  def __missing__(self, key):
    if isinstance(key, Threat):
      return self[key.name]
    raise KeyError(key)


@dataclasses.dataclass
class Outcomes:
  """The outcomes of k threats to N examples with the A attacks of a protocol.

  An example survives a threat if it is classified correctly without an attack
  and after every attack. The fields below describe the first adversarial image
  that fooled the network, else the one with the highest loss.

  Attributes:
    settings: the settings of the evaluation, as JSON holds them: `protocol`,
      `threats` (each with its attacks, and `attacked_clip` if they use another
      clip), `radii`, `seed`, `data`, and those that the caller added.
    labels: the classes, int32 [N].
    logits: the logits of the images without an attack, [N, K].
    images: the first P images, float32 [P, H, W, C].
    adversarial: their adversarial images, [k, P, H, W, C].
    fell: the number of the attack that fooled the network, or -1, int8 [k, N].
    tried: the number of tries so far, including one that fooled the network,
      int16 [k, N].
    predicted: the predicted class, int16 [k, N].
    loss: the cross entropy, [k, N].
    distance: the norm of the perturbation in the threat's space before the
      image is clipped to [0, 1], [k, N].
    distance_clipped: the same after the clip, [k, N].
    stuck: whether the last gradient of each try of a gradient attack was zero
      in every pixel, bool [k, N].
    spent: the numbers of gradients and of forward passes without one, per
      threat and attack, int64 [k, A, 2].
  """

  settings: dict[str, Any]
  labels: np.ndarray
  logits: np.ndarray
  images: np.ndarray
  adversarial: np.ndarray
  fell: np.ndarray
  tried: np.ndarray
  predicted: np.ndarray
  loss: np.ndarray
  distance: np.ndarray
  distance_clipped: np.ndarray
  stuck: np.ndarray
  spent: np.ndarray

  @classmethod
  def begin(
    cls,
    settings: dict[str, Any],
    labels: np.ndarray,
    logits: np.ndarray,
    images: np.ndarray,
  ) -> 'Outcomes':
    """Returns the outcomes before the first attack."""
    shape = len(settings['threats']), len(labels)
    attacks = len(settings['threats'][0]['attacks'])
    return cls(
      settings=settings,
      labels=labels,
      logits=logits,
      images=images,
      adversarial=np.tile(images, (shape[0], 1, 1, 1, 1)),
      fell=np.full(shape, STANDING, np.int8),
      tried=np.zeros(shape, np.int16),
      predicted=np.tile(logits.argmax(axis=1).astype(np.int16), (shape[0], 1)),
      loss=np.full(shape, -np.inf, np.float32),
      distance=np.zeros(shape, np.float32),
      distance_clipped=np.zeros(shape, np.float32),
      stuck=np.zeros(shape, bool),
      spent=np.zeros((shape[0], attacks, 2), np.int64),
    )

  # ---- figures

  @property
  def threats(self) -> tuple[str, ...]:
    """The names of the threats."""
    return tuple(threat['name'] for threat in self.settings['threats'])

  @property
  def eps(self) -> np.ndarray:
    """The radii of the threats, [k]."""
    return np.array([threat['eps'] for threat in self.settings['threats']])

  @property
  def attacks(self) -> tuple[str, ...]:
    """The names of the protocol's attacks, in order."""
    return tuple(self.settings['threats'][0]['attacks'])

  @property
  def natural(self) -> np.ndarray:
    """Whether each example is classified correctly without an attack, [N]."""
    return self.logits.argmax(axis=1) == self.labels

  @property
  def correct(self) -> np.ndarray:
    """Whether each example survives each threat, bool [k, N]."""
    return self.natural & (self.fell == STANDING)

  @property
  def union(self) -> np.ndarray:
    """Whether each example survives every threat, bool [N]."""
    return self.correct.all(axis=0)

  @property
  def standing(self) -> ByThreat:
    """By threat: whether each example survives, bool [N]."""
    return ByThreat(zip(self.threats, self.correct, strict=True))

  @property
  def fell_to(self) -> ByThreat:
    """By threat: the name of the attack that fooled each example, str [N].

    It is `''` for an example that survives, and `'misclassified'` for one that
    is wrong without an attack.
    """
    names = np.array(['', *self.attacks])[self.fell + 1]
    named = np.where(self.natural, names, 'misclassified')
    return ByThreat(zip(self.threats, named, strict=True))

  @property
  def complete(self) -> bool:
    """Whether nothing is left to attack."""
    tries = [
      sum(attack['tries'] for attack in threat['attacks'].values())
      for threat in self.settings['threats']
    ]
    return not (self.correct & (self.tried < np.array(tries)[:, None])).any()

  def correct_after(self, attack: int) -> np.ndarray:
    """Returns `correct` as it was after this attack of the protocol."""
    return self.correct | (self.natural & (self.fell > attack))

  def accuracies(self) -> dict[str, float]:
    """Returns accuracies in %: by threat, their `min`, `union`, `natural`."""
    return self._accuracies(self.correct)

  def accuracies_after(self, attack: int) -> dict[str, float]:
    """Returns `accuracies` as it was after this attack of the protocol."""
    return self._accuracies(self.correct_after(attack))

  def _accuracies(self, correct: np.ndarray) -> dict[str, float]:
    per_threat = dict(zip(self.threats, correct.mean(axis=1), strict=True))
    shares = per_threat | {
      'min': min(per_threat.values()),
      'union': correct.all(axis=0).mean(),
      'natural': self.natural.mean(),
    }
    return {name: 100 * float(share) for name, share in shares.items()}

  def curve(self) -> dict[str, list[tuple[float, float]]]:
    """Returns by threat: multiples of eps, and the accuracies there in %.

    Meant for outcomes of `evaluation.evaluate` with several radii.
    """
    radii = self.settings['radii']
    k = len(self.threats) // len(radii)
    natural = 100 * float(self.natural.mean())
    accuracies = 100 * self.correct.mean(axis=1).reshape(len(radii), k)
    return {
      threat['of']: [
        (0.0, natural),
        *zip(radii, accuracies[:, i].tolist(), strict=True),
      ]
      for i, threat in enumerate(self.settings['threats'][:k])
    }

  def overlap(self) -> np.ndarray:
    """Returns the number of images that both of two threats fool, [k, k]."""
    fooled = (self.natural & ~self.correct).astype(np.int64)
    return fooled @ fooled.T

  def unique_kills(self) -> np.ndarray:
    """Returns the number of images that only this threat fools, [k]."""
    fooled = self.natural & ~self.correct
    return (fooled & (fooled.sum(axis=0) == 1)).sum(axis=1)

  def evaluations(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns gradients and other forward passes, [2]: made, and in full.

    In full means to attack every example with every try of every attack under
    every threat. For an ensemble, one evaluation is one of each member.
    """
    full = [
      [attack['evaluations'] for attack in threat['attacks'].values()]
      for threat in self.settings['threats']
    ]
    return (
      self.spent.sum(axis=(0, 1)),
      len(self.labels) * np.sum(full, axis=(0, 1)),
    )

  def __str__(self) -> str:
    """Returns a table of the accuracies after each attack of the protocol."""
    after = [self.accuracies_after(a) for a in range(len(self.attacks))]
    eps = dict(zip(self.threats, self.eps, strict=True))
    header = ['accuracy, %', 'eps', *self.attacks, '95 % interval']
    rows = []
    for name, accuracy in self.accuracies().items():
      low, high = wilson(accuracy, len(self.labels))
      interval = f'{low:.1f} to {high:.1f}'
      radius = f'{eps[name]:.4g}' if name in eps else ''
      if name == 'natural':
        steps = [''] * (len(after) - 1) + [f'{accuracy:.1f}']
      else:
        steps = [f'{accuracies[name]:.1f}' for accuracies in after]
      rows.append([name, radius, *steps, interval])
    widths = [
      max(map(len, column)) for column in zip(header, *rows, strict=True)
    ]
    lines = [
      '  '.join(
        cell.rjust(width) if i else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
      ).rstrip()
      for row in [header, *rows]
    ]
    note = (
      f'{len(self.labels):,} images, protocol {self.settings["protocol"]}; '
      'each column gives the accuracy after that attack.'
    )
    return '\n'.join([*lines, note])

  # ---- on disk

  def save(self, path: str | os.PathLike) -> None:
    """Writes the outcomes as .npz, atomically."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    file = io.BytesIO()
    np.savez_compressed(
      file, **fields | {'settings': json.dumps(self.settings)}
    )
    files.write_bytes(path, file.getvalue())

  @classmethod
  def load(cls, path: str | os.PathLike) -> 'Outcomes':
    """Reads what `save` wrote, or raises a UserError."""
    names = tuple(field.name for field in dataclasses.fields(cls))
    settings, *arrays = read_npz(path, [names], f'The evaluation {path}')
    try:
      return cls(json.loads(str(settings)), *arrays)
    except ValueError as e:
      raise UserError(f'{path} cannot be read as an evaluation ({e}).') from e


def wilson(percent: float, count: int) -> tuple[float, float]:
  """Returns the 95 % interval of an accuracy in % measured on `count` examples.

  >>> [round(bound, 1) for bound in wilson(90.0, 1000)]
  [88.0, 91.7]
  """
  z, p = 1.959964, percent / 100
  centre = (p + z * z / (2 * count)) / (1 + z * z / count)
  half = z / (1 + z * z / count)
  half *= math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
  return 100 * max(0.0, centre - half), 100 * min(1.0, centre + half)
