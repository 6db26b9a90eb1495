"""Loads image classification data sets of tensorflow-datasets."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mwrobust.data.arrays import Split, make_split, stack
from mwrobust.errors import UserError, did_you_mean


def load(
  name: str, directory: str = '', *, source: str, instead: str = ''
) -> tuple[Split, Split]:
  """Loads the training and the test examples of a data set.

  A data set prepared as array_record is read without TensorFlow; all others
  need it, and are downloaded if they are missing.

  Args:
    name: The name in tensorflow-datasets: `fashion_mnist`, `emnist/letters`.
    directory: Where tensorflow-datasets keeps its data; '' for its default.
    source: What the user asked for, for error messages.
    instead: What the user can do without tensorflow-datasets.

  Returns:
    The splits train and test, or train and validation if there is no test.
  """
  folder = pathlib.Path(directory).expanduser() if directory else None
  if folder and not folder.is_dir():
    raise UserError(
      f'data.dir={directory} is not a directory: create it, or leave data.dir '
      'empty for the folder that tensorflow-datasets uses by default.'
    )
  try:
    return _load(name, folder and str(folder), source)
  except UserError:
    raise
  except ImportError as error:
    raise UserError(
      f'{source} needs tensorflow-datasets and TensorFlow ({error}). Run pip '
      f"install -e '.[tfds]'{instead or '.'}"
    ) from error
  except Exception as error:  # From the network, the disk, TensorFlow, ...
    raise UserError(
      f'{source}: tensorflow-datasets could not prepare {name} ({error}). Try '
      f'again{instead or "."}'
    ) from error


def _load(name: str, folder: str | None, source: str) -> tuple[Split, Split]:
  import tensorflow_datasets as tfds

  try:
    builder = tfds.builder(name, data_dir=folder)
  except tfds.core.DatasetNotFoundError as error:
    names = tfds.list_builders(with_community_datasets=False)
    hint = did_you_mean(f'tfds:{name}', [f'tfds:{other}' for other in names])
    raise UserError(
      f'{source}: tensorflow-datasets has no {name!r}.{hint} Its list is at '
      'https://www.tensorflow.org/datasets/catalog/overview.'
    ) from error

  # Before the download, which may be large.
  image_key, label_key = _find_keys(builder.info, tfds.features, source)
  is_array_record = builder.info.file_format.value == 'array_record'
  without_tensorflow = builder.is_prepared() and is_array_record
  if not without_tensorflow:
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # It is already running.
      tf.config.set_visible_devices([], 'GPU')  # Their memory is for JAX.
    builder.download_and_prepare()

  def read(split: str) -> Iterator[Mapping[str, Any]]:
    if without_tensorflow:
      return iter(builder.as_data_source(split))
    return iter(tfds.as_numpy(builder.as_dataset(split=split)))

  def load_split(split: str) -> Split:
    label_list = []

    def named_images():
      for number, example in enumerate(read(split)):
        label_list.append(int(example[label_key]))
        yield f'{split} image {number}', example[image_key]

    images = stack(named_images(), source)
    labels = np.array(label_list, np.int64)
    return make_split(images, labels, f'{source} ({split})')

  splits = builder.info.splits
  test = next((s for s in ('test', 'validation') if s in splits), None)
  if 'train' not in splits or test is None:
    raise UserError(
      f'{source} has the splits {", ".join(splits) or "none"}: it must have '
      'train and test, or train and validation.'
    )
  return load_split('train'), load_split(test)


def _find_keys(info: Any, kinds: Any, source: str) -> tuple[str, str]:
  """Returns the names of the image and of the label in each example."""
  features = dict(sorted(info.features.items()))
  supervised = info.supervised_keys or (None, None)

  def find(what, kind, usual):
    found = [key for key, one in features.items() if isinstance(one, kind)]
    if usual in found:
      return usual
    if len(found) == 1:
      return found[0]
    raise UserError(
      f'{source} has {", ".join(found) or "nothing"} for the {what}: it must '
      'be a data set for image classification, with one image and one class '
      f'label in each example. Its features are: {", ".join(features)}.'
    )

  return (
    find('image', kinds.Image, supervised[0]),
    find('label', kinds.ClassLabel, supervised[1]),
  )
