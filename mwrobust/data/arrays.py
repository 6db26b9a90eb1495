"""The arrays of a data set, and checks that all sources share."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from mwrobust.errors import UserError

# A tenth of the training examples, at least one, is for validation.
FEWEST_EXAMPLES = 10
# Higher labels are probably not classes, and a network with so many logits
# would not fit into memory.
MOST_CLASSES = 100_000
_RESIZE = 'Resize them to one height, width and number of channels.'


class Split(NamedTuple):
  """Examples: `images` uint8 [N, H, W, C], `labels` int32 [N]."""

  images: np.ndarray
  labels: np.ndarray


class Dataset(NamedTuple):
  """The splits, and the constants with which models normalise their input.

  `mean` and `std` are per channel, over all training images in [0, 1].
  """

  name: str
  train: Split
  validation: Split
  test: Split
  num_classes: int
  mean: tuple[float, ...]
  std: tuple[float, ...]


def make_split(images: Any, labels: Any, source: str) -> Split:
  """Returns arrays as a split, or raises a UserError.

  Args:
    images: uint8, or floating point in [0, 1], which is rounded; [N, H, W, C],
      or [N, H, W] for grey images.
    labels: Integers of at least 0; [N] or [N, 1].
    source: Where they come from, for error messages.
  """
  split = Split(_make_images(images, source), _make_labels(labels, source))
  if len(split.images) != len(split.labels):
    raise UserError(
      f'{source} has {len(split.images)} images, but {len(split.labels)} '
      'labels: there must be one label for each image.'
    )
  return split


def stack(
  named_images: Iterable[tuple[str, np.ndarray]], source: str
) -> np.ndarray:
  """Returns images [H, W, C] as one array, or refuses several sizes.

  The names of the images and the source are for the error message.
  """
  images, first = [], ''
  for name, image in named_images:
    first = first or name
    if images and image.shape != images[0].shape:
      raise UserError(
        f'{source} has images of several sizes: {first} is '
        f'{_size(images[0])}, {name} is {_size(image)}. {_RESIZE}'
      )
    images.append(image)
  return np.stack(images) if images else np.zeros((0, 1, 1, 1), np.uint8)


def check(train: Split, test: Split, source: str) -> None:
  """Raises a UserError if a network cannot be trained or tested on these.

  `train` includes the examples for validation.
  """
  if len(train.labels) < FEWEST_EXAMPLES:
    raise UserError(
      f'{source} has {len(train.labels)} training examples: at least '
      f'{FEWEST_EXAMPLES} are needed, because a tenth is for validation.'
    )
  if not len(test.labels):
    raise UserError(f'{source} has no test examples.')
  shapes = [split.images.shape[1:] for split in (train, test)]
  if shapes[0] != shapes[1]:
    raise UserError(
      f'{source} has images of several sizes: {_size(train.images[0])} for '
      f'training, {_size(test.images[0])} for testing. {_RESIZE}'
    )
  classes = np.unique(train.labels)
  if len(classes) < 2:
    raise UserError(
      f'{source} has only one class: all {len(train.labels)} training labels '
      f'are {classes[0]}. A classifier needs at least two.'
    )
  unknown = np.setdiff1d(test.labels, classes)
  if len(unknown):
    raise UserError(
      f'{source} has the class {unknown[0]} in its test labels, but not in '
      'its training labels: a network cannot learn it. Remove these test '
      'examples, or add training examples.'
    )


def mean_and_std(
  images: np.ndarray,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Returns mean and standard deviation per channel of images in [0, 1].

  Both have 4 digits, as they are usually published. The deviation of a constant
  channel is 1, so that images can be divided by it.
  """
  means, stds = [], []
  levels = np.arange(256) / 255
  for channel in range(images.shape[-1]):
    histogram = sum(  # In parts, because bincount copies to 8 bytes each.
      np.bincount(images[i : i + 1000, ..., channel].ravel(), minlength=256)
      for i in range(0, len(images), 1000)
    )
    share = histogram / histogram.sum()
    mean = levels @ share
    std = ((levels - mean) ** 2 @ share) ** 0.5
    means.append(float(f'{mean:.4g}'))
    stds.append(float(f'{std:.4g}') if np.count_nonzero(histogram) > 1 else 1.0)
  return tuple(means), tuple(stds)


def _make_images(images: Any, source: str) -> np.ndarray:
  images = np.asarray(images)
  if images.ndim == 3:
    images = images[..., None]
  found = f'{source} has {images.dtype} images {list(images.shape)}'
  if images.ndim != 4 or 0 in images.shape[1:]:
    raise UserError(f'{found}: they must be [N, H, W, C], or [N, H, W].')
  _, height, width, channels = images.shape
  if height in (1, 3) and channels > 4 and width > 4:
    raise UserError(
      f'{found}, which looks like [N, C, H, W]: they must be [N, H, W, C]. '
      'Save images.transpose(0, 2, 3, 1).'
    )
  if images.dtype == np.uint8:
    return images
  if not np.issubdtype(images.dtype, np.floating):
    raise UserError(
      f'{found}: they must be uint8, or floating point in [0, 1].'
    )
  if images.size:
    low, high = float(images.min()), float(images.max())
    if not (low >= 0 and high <= 1):  # True for NaN.
      raise UserError(
        f'{found} in [{low:.3g}, {high:.3g}]: they must lie in [0, 1]. Models '
        'normalise their input themselves, so save images without it.'
      )
  return np.rint(images * 255).astype(np.uint8)


def _make_labels(labels: Any, source: str) -> np.ndarray:
  labels = np.asarray(labels)
  found = f'{source} has {labels.dtype} labels {list(labels.shape)}'
  if labels.ndim == 2 and labels.shape[1] == 1:  # As in Keras.
    labels = labels[:, 0]
  if labels.ndim != 1:
    raise UserError(
      f'{found}: they must be [N], one class for each image. Save one-hot '
      'labels as labels.argmax(-1).'
    )
  if not np.issubdtype(labels.dtype, np.integer):
    raise UserError(f'{found}: they must be integers, 0 for the first class.')
  if len(labels):
    low, high = int(labels.min()), int(labels.max())
    if low < 0:
      raise UserError(
        f'{found}, of which the lowest is {low}: they must be at least 0, the '
        'first class.'
      )
    if high >= MOST_CLASSES:
      raise UserError(
        f'{found}, of which the highest is {high}: number the classes 0, 1, '
        f'2, ... below {MOST_CLASSES}.'
      )
  return labels.astype(np.int32)


def _size(image: np.ndarray) -> str:
  return ' x '.join(map(str, image.shape))
