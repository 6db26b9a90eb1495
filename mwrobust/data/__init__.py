"""Image classification data in memory, and the order in which it is used.

A data set is a few uint8 arrays: a published one, any of tensorflow-datasets,
or your own .npz file or folder (see `load`). The examples of a batch and their
augmentation are pure functions of the seed and the step, so a run resumes
anywhere without iterator state:

  from mwrobust import data as data_lib

  data = data_lib.load('tfds:fashion_mnist', seed=0)
  rows = data_lib.batch_indices(0, step, len(data.train.labels), 128)
  images = data.train.images[rows].astype(np.float32) / 255
  images = data_lib.augment(jax.random.fold_in(key, step), images, rows)
"""

from mwrobust.data.arrays import Dataset, Split
from mwrobust.data.loaders import NAMES, Outline, check_name, load, outline
from mwrobust.data.order import augment, batch_indices, padded_batches

__all__ = [
  'NAMES',
  'Dataset',
  'Outline',
  'Split',
  'augment',
  'batch_indices',
  'check_name',
  'load',
  'outline',
  'padded_batches',
]
