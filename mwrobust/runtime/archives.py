"""Reads untrusted archives, with checks before they are loaded.

The declared size of a file is not trusted: a few kilobytes can unpack to more
than the memory holds.
"""

import gzip
import math
import os
import pathlib
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

import numpy as np
from etils import epath
from numpy.lib import format as npy

from mwrobust.errors import UserError

# Allowed in an archive besides the wanted files: headers, a readme.
_MOST_EXTRA_BYTES = 2**20


def read_npz(
  path: str | os.PathLike, choices: Sequence[tuple[str, ...]], source: str
) -> list[np.ndarray]:
  """Reads some arrays of an .npz file.

  Pickles are never read, because a pickle can run any program.

  Args:
    path: the file.
    choices: sets of names; the first set of which the file has all is read.
    source: what the user asked for, for error messages.

  Raises:
    UserError: if the file is damaged or has none of the sets, or if an array
      does not match its header or does not fit into memory.
  """
  try:
    with (
      epath.Path(path).open('rb') as file,
      zipfile.ZipFile(file) as archive,
    ):
      members = {
        info.filename.removesuffix('.npy'): info for info in archive.infolist()
      }
      names = next((each for each in choices if {*each} <= {*members}), ())
      total = sum(members[name].file_size for name in names)
      memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
      if total > memory:
        raise ValueError(
          f'{", ".join(names)} have {total:,} bytes; the memory has {memory:,}'
        )
      for name in names:
        with archive.open(members[name]) as array:
          _check_header(array, members[name].file_size, name)
      arrays = []
      for name in names:
        with archive.open(members[name]) as array:
          arrays.append(npy.read_array(array, allow_pickle=False))
  except FileNotFoundError as error:
    raise UserError(f'{source} does not exist.') from error
  except Exception as error:  # A damaged archive raises many kinds.
    raise UserError(
      f'{source} cannot be read ({error}): it must be an .npz file of plain '
      'arrays, as written by numpy.savez.'
    ) from error
  if not arrays:
    wanted = ', or '.join(', '.join(names) for names in choices)
    raise UserError(
      f'{source} has the arrays {", ".join(members) or "none"}: it must have '
      f'{wanted}.'
    )
  return arrays


def _check_header(file: IO[bytes], size: int, name: str) -> None:
  """Raises a ValueError if the header of an array does not fit its file.

  Args:
    file: the file, at the start of the header.
    size: the size of the file; nothing beyond it can be read.
    name: the name of the array.
  """
  version = npy.read_magic(file)
  # The headers of later versions can have gigabytes; plain arrays need none.
  if version != (1, 0):
    raise ValueError(f'{name} has version {version} of the format, not (1, 0)')
  try:
    shape, _, dtype = npy.read_array_header_1_0(file)
  except ValueError as error:  # Its text may advise to trust the file.
    raise ValueError(f'{name} has a damaged header') from error
  if dtype.hasobject:
    raise ValueError(f'{name} holds Python objects')
  found = size - file.tell()
  declared = math.prod(shape) * dtype.itemsize
  if declared != found:
    raise ValueError(
      f'{name} is {dtype} {list(shape)}, {declared:,} bytes, but has {found:,}'
    )


def unpack(
  path: pathlib.Path, sizes: Mapping[str, int]
) -> Iterator[tuple[str, bytes]]:
  """Yields the files of a .tar.gz, the one in a .gz, or the file itself.

  Nothing is written, so the paths in an archive do no harm.

  Args:
    path: the archive.
    sizes: the required size of each wanted file, by name, in bytes. Other files
      of an archive are skipped.

  Raises:
    ValueError: if a file has another size, or an archive unpacks to much more
      than all of them; the rest is not unpacked.
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
  """A file that raises a ValueError after a given number of bytes."""

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
