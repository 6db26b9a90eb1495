"""Who still stands: accuracy under each threat, their minimum, their union."""

import io
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mwrobust import datasets, metrics
from mwrobust.steps import Batch


class Evaluation(NamedTuple):
  """Per-example results; every accuracy is computed from these.

  Attributes:
    threats: their names, k.
    correct: bool [k, N], still classified correctly under each threat.
    natural: bool [N], without an attack.
  """

  threats: tuple[str, ...]
  correct: np.ndarray
  natural: np.ndarray

  def accuracies(self) -> dict[str, float]:
    """Per threat; `min` over the threats; `union`: correct under all; natural.

    In percent.
    """
    per_threat = dict(zip(self.threats, self.correct.mean(axis=1), strict=True))
    shares = per_threat | {
      'min': min(per_threat.values()),
      'union': self.correct.all(axis=0).mean(),
      'natural': self.natural.mean(),
    }
    return {name: 100 * float(share) for name, share in shares.items()}

  def save(self, path: pathlib.Path) -> None:
    """Writes them as .npz."""
    file = io.BytesIO()
    np.savez_compressed(file, **self._asdict())
    metrics.write_bytes(path, file.getvalue())

  @classmethod
  def load(cls, path: pathlib.Path) -> 'Evaluation':
    """Reads what `save` wrote."""
    data = io.BytesIO(path.read_bytes())
    with np.load(data, allow_pickle=False) as arrays:
      fields = {name: arrays[name] for name in cls._fields}
    return cls(**fields | {'threats': tuple(fields['threats'].tolist())})


def batches(
  split: datasets.Split, batch_size: int
) -> Iterator[tuple[Batch, np.ndarray]]:
  """The split in batches of one shape, with masks of what is no filler."""
  for rows, mask in datasets.padded_batches(len(split.labels), batch_size):
    yield Batch(split.images[rows], split.labels[rows], rows), mask


def mean_losses(
  eval_step: Callable,
  variables: Any,
  count: int,
  split: datasets.Split,
  batch_size: int,
  scale: float,
  pause: Callable[[], None] = lambda: None,
) -> np.ndarray:
  """The losses L_i^val [count] of one network on a split.

  Args:
    eval_step: of `steps.make_eval_step`.
    variables: the network's.
    count: of the threats.
    split: what to attack.
    batch_size: of every batch, the last one filled up.
    scale: of the radii.
    pause: called between batches; may raise to end it.
  """
  totals = np.zeros(count)
  for batch, mask in batches(split, batch_size):
    for index in range(count):
      losses, _ = eval_step((variables,), jnp.int32(index), batch, scale)
      totals[index] += np.sum(np.asarray(losses, np.float64), where=mask)
      pause()
  return totals / len(split.labels)


def evaluate(
  eval_step: Callable,
  members: tuple[Any, ...],
  threats: tuple[str, ...],
  split: datasets.Split,
  batch_size: int,
  pause: Callable[[], None] = lambda: None,
) -> Evaluation:
  """Attacks a network, or the ensemble of several, with every threat."""
  rows = [[] for _ in range(len(threats) + 1)]
  for batch, mask in batches(split, batch_size):
    for index, row in enumerate(rows):
      _, correct = eval_step(members, jnp.int32(index), batch, 1.0)
      row.append(np.asarray(correct)[mask])
      pause()
  *attacked, natural = map(np.concatenate, rows)
  return Evaluation(threats, np.stack(attacked), natural)
