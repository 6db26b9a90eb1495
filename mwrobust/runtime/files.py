"""Atomic writes of files, and locks of folders.

`write_bytes` and `write_json` replace a file atomically, so that even after
`kill -9` a reader finds the old file or the new one. Errors of the disk become
a `UserError`.

  with locked(workdir):
    write_json(workdir / 'status.json', {'state': 'running'})
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import socket
from collections.abc import Iterator
from typing import Any, TextIO

from etils import epath

from mwrobust.errors import UserError
from mwrobust.runtime import devices


@contextlib.contextmanager
def explained(path: str | os.PathLike) -> Iterator[None]:
  """Turns an OSError while writing `path` into a `UserError`."""
  try:
    yield
  except OSError as error:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
      cure = 'Free some space, then run the same command again to resume.'
    else:
      cure = 'Make it writable, or choose another folder.'
    raise UserError(f'Cannot write {path}: {error}. {cure}') from error


def is_in_bucket(path: str | os.PathLike) -> bool:
  """Returns whether the path is in a bucket, such as `gs://bucket/run`."""
  return '://' in os.fspath(path)


def replace(path: epath.Path, data: bytes) -> None:
  """Writes a file atomically."""
  if is_in_bucket(path):  # Objects are written atomically.
    path.write_bytes(data)
    return
  temporary = path.with_name(f'.{path.name}.tmp')
  try:
    with open(temporary, 'wb') as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def plain(value: Any) -> Any:
  """Converts to strict JSON: lists for arrays, None for NaN and infinity."""
  if hasattr(value, 'tolist'):  # NumPy and JAX, scalars and arrays.
    value = value.tolist()
  if isinstance(value, dict):
    return {str(key): plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [plain(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
  """Writes a file atomically, with its folder; only the first process does.

  Raises:
    UserError: if the file cannot be written.
  """
  if not devices.is_first_process():
    return
  path = epath.Path(path)
  with explained(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, data)


def write_json(path: str | os.PathLike, value: Any) -> None:
  """Writes JSON as `write_bytes` does; NaN and infinity become null."""
  text = json.dumps(plain(value), indent=2, allow_nan=False) + '\n'
  write_bytes(path, text.encode())


class InUse(UserError):  # noqa: N818
  """Another process is using the folder."""


@contextlib.contextmanager
def locked(folder: str | os.PathLike) -> Iterator[None]:
  """Locks a folder, so that no other process uses it at the same time.

  The lock is on `folder/.lock`, which names the host and the process and is
  removed at the end. The kernel releases the lock of a killed process, so a
  file left behind does not block the next one. Of several JAX processes only
  the first takes the lock; in a bucket there is none.

  Args:
    folder: the folder; it is created if it is missing.

  Raises:
    InUse: if another process is using the folder.
    UserError: if the folder cannot be written.
  """
  if is_in_bucket(folder) or not devices.is_first_process():
    yield
    return
  path = epath.Path(folder, '.lock')
  with explained(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _open_locked(path)
  with file:  # Closing it releases the lock.
    try:
      yield
    finally:
      # Before the release, because afterwards the file may be another's.
      with contextlib.suppress(OSError):
        path.unlink()


def _open_locked(path: epath.Path) -> TextIO:
  """Opens the lock file, locks it and writes this process into it."""
  while True:
    with contextlib.ExitStack() as stack:
      file = stack.enter_context(open(path, 'a+'))
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        raise InUse(_held(path, file)) from error
      # The last holder may have removed the file since it was opened here; then
      # the lock is on a file that nobody else can see, so try again.
      with contextlib.suppress(FileNotFoundError):
        if os.path.samefile(path, file.fileno()):
          file.truncate(0)
          file.write(f'{socket.gethostname()} {os.getpid()}\n')
          file.flush()
          stack.pop_all()
          return file


def _held(path: epath.Path, file: TextIO) -> str:
  """Returns a message that says which process holds the lock and what to do."""
  file.seek(0)
  match file.read().split():
    case [host, pid]:
      holder = f'process {pid} on {host}'
    case _:  # The holder has not written its name yet.
      holder = 'another process'
  return (
    f'{path.parent} is in use by {holder}. Wait until it has finished, or '
    'choose another folder.'
  )
