"""Files from elsewhere, checked before they are loaded.

What a file says of its own size is not trusted: a few kilobytes can unpack to
more than the memory holds.
"""

import gzip
import math
import os
import pathlib
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import IO

import numpy as np
from numpy.lib import format as npy

# Of an archive, beyond the files that are wanted: headers, a page about them.
_MOST_EXTRA_BYTES = 2**20


def read_npz(
  path: str | os.PathLike, choices: Iterable[tuple[str, ...]]
) -> tuple[list[np.ndarray], list[str]]:
  """Reads the arrays of an .npz file, and nothing else of it.

  Pickles are never read: a pickle can run any program.

  Args:
    path: the file.
    choices: names of arrays that belong together; the first that are all there
      are read.

  Returns:
    The arrays, [] if none of the choices is there, and the names of all.

  Raises:
    Exception: of many kinds, if the file is damaged; ValueError if an array is
      not what its header says, or does not fit into memory.
  """
  with zipfile.ZipFile(path) as archive:
    members = {
      info.filename.removesuffix('.npy'): info for info in archive.infolist()
    }
    names = next((each for each in choices if {*each} <= {*members}), ())
    total = 0
    for name in names:
      with archive.open(members[name]) as file:
        total += _declared_size(file, members[name].file_size, name)
    memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    if total > memory:
      raise ValueError(
        f'{", ".join(names)} have {total:,} bytes, and the memory {memory:,}'
      )
    arrays = []
    for name in names:
      with archive.open(members[name]) as file:
        arrays.append(npy.read_array(file, allow_pickle=False))
  return arrays, list(members)


def _declared_size(file: zipfile.ZipExtFile, size: int, name: str) -> int:
  """Returns the bytes of an array by its header; checks that they are there.

  Args:
    file: at the start of the header.
    size: of the file, which cannot be read beyond it.
    name: of the array.
  """
  version = npy.read_magic(file)
  if version not in ((1, 0), (2, 0)):
    raise ValueError(f'{name} is of version {version} of the format')
  is_first = version == (1, 0)
  read = npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
  shape, _, dtype = read(file)
  if dtype.hasobject:
    raise ValueError(f'{name} holds Python objects')
  found = size - file.tell()
  declared = math.prod(shape) * dtype.itemsize
  if declared != found:
    raise ValueError(
      f'{name} is {dtype} {list(shape)}, {declared:,} bytes, but has {found:,}'
    )
  return declared


def unpack(
  path: pathlib.Path, sizes: Mapping[str, int]
) -> Iterator[tuple[str, bytes]]:
  """Yields the files of a .tar.gz, the one in a .gz, or the file itself.

  Nothing is written, so it does not matter where the names in an archive point.

  Args:
    path: the archive.
    sizes: by the name of a file, the bytes it must have. Other files of an
      archive are passed over.

  Raises:
    ValueError: a file is of another size, or an archive unpacks to much more
      than all of them. No more than that is unpacked.
  """
  if path.name.endswith('.tar.gz'):
    most = sum(sizes.values()) + _MOST_EXTRA_BYTES
    with (
      gzip.open(path) as file,
      tarfile.open(fileobj=_Limited(file, most), mode='r|') as archive,
    ):
      for member in filter(tarfile.TarInfo.isfile, archive):
        name = pathlib.PurePosixPath(member.name).name
        if name in sizes:
          yield name, _read(archive.extractfile(member), name, sizes[name])
  else:
    is_gzip = path.suffix == '.gz'
    name = path.stem if is_gzip else path.name
    with (gzip.open if is_gzip else open)(path, 'rb') as file:
      yield name, _read(file, name, sizes[name])


class _Limited:
  """A file of which only so much can be read."""

  def __init__(self, file: IO[bytes], most: int):
    self._file = file
    self._most = most
    self._read = 0

  def read(self, size: int) -> bytes:
    self._read += size
    if self._read > self._most:
      raise ValueError(f'it unpacks to more than {self._most:,} bytes')
    return self._file.read(size)


def _read(file: IO[bytes], name: str, size: int) -> bytes:
  content = file.read(size + 1)
  if len(content) != size:
    found = 'more' if len(content) > size else f'{len(content):,}'
    raise ValueError(
      f'{name} has {found} bytes, not the {size:,} of the published file'
    )
  return content
