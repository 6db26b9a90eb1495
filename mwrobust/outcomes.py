"""The matrix behind every figure: what each threat made of each example.

An evaluation fills it in, batch by batch, and saves it as it goes; a table, a
check or a plot only ever reads it. Nothing else is kept, so every number that
is printed can be computed again from the .npz file:

  outcomes = Outcomes.load('runs/mine/eval/h=3_average.npz')
  outcomes.correct.mean(axis=1)         # accuracy under each threat
  outcomes.correct.all(axis=0).mean()   # the union
"""

import dataclasses
import io
import json
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from mwrobust import attacks
from mwrobust.errors import UserError
from mwrobust.runtime import devices, files
from mwrobust.steps import Attacked


@dataclasses.dataclass
class Outcomes:
  """What k threats did to N examples, each from up to `restarts` starts.

  Of several starts the one that fooled the network is told of, or else the one
  with the highest loss.

  Attributes:
    settings: how it was made, as JSON knows it.
    threats: their names, k.
    eps: their radii, [k].
    steps: the gradient steps of one start, [k].
    restarts: random starts for an example that stands.
    labels: their classes, int32 [N].
    logits: of the examples as they are, [N, K].
    logits_again: of the first B once more, in the reverse order, [B, K].
    images: the first P examples, uint8 [P, H, W, C].
    adversarial: what the threats made of them, [k, P, H, W, C].
    correct: bool [k, N], classified correctly after every start so far.
    starts: int16 [k, N], starts so far: none follows one that fooled.
    predicted: the class, int16 [k, N].
    loss: the cross entropy, [k, N].
    norm: of the perturbation in the threat's own space, [k, N].
    norm_clipped: the same after the clip to [0, 1], [k, N].
    stuck: bool [k, N], the last gradient was zero.
  """

  settings: dict[str, Any]
  threats: tuple[str, ...]
  eps: np.ndarray
  steps: np.ndarray
  restarts: int
  labels: np.ndarray
  logits: np.ndarray
  logits_again: np.ndarray
  images: np.ndarray
  adversarial: np.ndarray
  correct: np.ndarray
  starts: np.ndarray
  predicted: np.ndarray
  loss: np.ndarray
  norm: np.ndarray
  norm_clipped: np.ndarray
  stuck: np.ndarray

  @classmethod
  def begin(
    cls,
    settings: dict[str, Any],
    pairs: Sequence[tuple[attacks.Threat, attacks.Attack]],
    restarts: int,
    labels: np.ndarray,
    logits: np.ndarray,
    logits_again: np.ndarray,
    images: np.ndarray,
    correct: np.ndarray | None = None,
  ) -> 'Outcomes':
    """Before the first start; `correct` is who stands, everyone by default."""
    shape = len(pairs), len(labels)
    if correct is None:
      correct = np.ones(shape, bool)
    return cls(
      settings=settings,
      threats=tuple(threat.name for threat, _ in pairs),
      eps=np.array([threat.eps for threat, _ in pairs]),
      steps=np.array([attack.steps for _, attack in pairs]),
      restarts=restarts,
      labels=labels,
      logits=logits,
      logits_again=logits_again,
      images=images,
      adversarial=np.zeros((shape[0], *images.shape), np.float32),
      correct=correct.copy(),
      starts=np.zeros(shape, np.int16),
      predicted=np.zeros(shape, np.int16),
      loss=np.full(shape, -np.inf, np.float32),
      norm=np.zeros(shape, np.float32),
      norm_clipped=np.zeros(shape, np.float32),
      stuck=np.zeros(shape, bool),
    )

  # ---- filling it in

  def survivors(self, threat: int, start: int) -> np.ndarray:
    """The rows that this start of this threat has still to attack."""
    return np.flatnonzero(self.correct[threat] & (self.starts[threat] == start))

  def record(self, threat: int, rows: np.ndarray, attacked: Attacked) -> None:
    """Writes down one more start of a threat for some rows."""
    # Where the network answers NaN, it is fooled.
    correct = attacked.predicted == self.labels[rows]
    correct &= ~np.isnan(attacked.loss)
    tell = ~correct | (attacked.loss > self.loss[threat, rows])
    for name in ('predicted', 'loss', 'norm', 'norm_clipped', 'stuck'):
      getattr(self, name)[threat, rows[tell]] = getattr(attacked, name)[tell]
    shown = tell & (rows < len(self.images))
    self.adversarial[threat, rows[shown]] = attacked.images[shown]
    self.correct[threat, rows] &= correct
    self.starts[threat, rows] += 1

  @property
  def complete(self) -> bool:
    """Whether nothing is left to attack."""
    return bool((~self.correct | (self.starts == self.restarts)).all())

  # ---- what it says

  @property
  def natural(self) -> np.ndarray:
    """Classified correctly without an attack, bool [N]."""
    return self.logits.argmax(axis=1) == self.labels

  @property
  def union(self) -> np.ndarray:
    """Classified correctly under every threat, bool [N]."""
    return self.correct.all(axis=0)

  def correct_after(self, starts: int) -> np.ndarray:
    """What `correct` was after so many starts."""
    return self.correct | (self.starts > starts)

  def accuracies(self) -> dict[str, float]:
    """In percent: per threat; `min`, the lowest of them; `union`; `natural`."""
    per_threat = dict(zip(self.threats, self.correct.mean(axis=1), strict=True))
    shares = per_threat | {
      'min': min(per_threat.values()),
      'union': self.union.mean(),
      'natural': self.natural.mean(),
    }
    return {name: 100 * float(share) for name, share in shares.items()}

  def overlap(self) -> np.ndarray:
    """Images that both threats fool, of those that need fooling, [k, k]."""
    fooled = (self.natural & ~self.correct).astype(np.int64)
    return fooled @ fooled.T

  def unique_kills(self) -> np.ndarray:
    """Images that this threat fools and no other does, [k]."""
    fooled = self.natural & ~self.correct
    return (fooled & (fooled.sum(axis=0) == 1)).sum(axis=1)

  def gradient_evaluations(self) -> tuple[int, int]:
    """Done; and of the full protocol, every start on every example.

    An ensemble takes one for each of its members.
    """
    members = self.settings.get('members', 1)
    done = (self.starts.sum(axis=1, dtype=np.int64) * self.steps).sum()
    full = self.restarts * len(self.labels) * self.steps.sum()
    return int(members * done), int(members * full)

  # ---- on disk

  def save(self, path: epath.Path) -> None:
    """Writes all of it as .npz: whole, or not at all."""
    if not devices.is_first_process():
      return
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    file = io.BytesIO()
    np.savez_compressed(
      file, **fields | {'settings': json.dumps(self.settings)}
    )
    files.write_bytes(path, file.getvalue())

  @classmethod
  def load(cls, path: str | os.PathLike) -> 'Outcomes':
    """Reads what `save` wrote; a UserError says why it cannot."""
    try:
      data = io.BytesIO(epath.Path(path).read_bytes())
      with np.load(data, allow_pickle=False) as arrays:
        fields = {f.name: arrays[f.name] for f in dataclasses.fields(cls)}
      return cls(
        **fields
        | {
          'settings': json.loads(str(fields['settings'])),
          'threats': tuple(fields['threats'].tolist()),
          'restarts': int(fields['restarts']),
        }
      )
    except Exception as e:  # A torn archive has many words for it.
      raise UserError(f'{path} cannot be read as an evaluation ({e}).') from e


def wilson(percent: float, count: int) -> tuple[float, float]:
  """The 95 % interval of an accuracy in percent measured on `count` examples.

  >>> [round(bound, 1) for bound in wilson(90.0, 1000)]
  [88.0, 91.7]
  """
  z, p = 1.959964, percent / 100
  centre = (p + z * z / (2 * count)) / (1 + z * z / count)
  half = z / (1 + z * z / count)
  half *= math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
  return 100 * max(0.0, centre - half), 100 * min(1.0, centre + half)
