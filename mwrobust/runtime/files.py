"""Files that are whole at any moment, and folders that one process works in.

`write_bytes` and `write_json` replace a file at once, so that even after
`kill -9` a reader finds the old one or the new. What the disk refuses becomes
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
  """Turns what the disk has to say about `path` into a `UserError`."""
  try:
    yield
  except OSError as error:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
      cure = 'Free some space and run again: it resumes from its checkpoint.'
    else:
      cure = 'Make it writable, or choose another workdir.'
    raise UserError(f'Cannot write {path}: {error}. {cure}') from error


def is_in_bucket(path: str | os.PathLike) -> bool:
  """Whether the path is an object's, such as `gs://bucket/run`."""
  return '://' in os.fspath(path)


def replace(path: epath.Path, data: bytes) -> None:
  """Writes a file whole or, whatever happens, not at all."""
  if is_in_bucket(path):  # Objects appear whole.
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
  """`value` as strict JSON knows it: no arrays, null for NaN and infinity."""
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
  """Writes a file: a reader sees the old one or the new, never half of it.

  Of several processes, the first writes.

  Args:
    path: the file; its folder is made where it is missing.
    data: what is to be in it.

  Raises:
    UserError: the disk is full, or the file may not be written.
  """
  if not devices.is_first_process():
    return
  path = epath.Path(path)
  with explained(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, data)


def write_json(path: str | os.PathLike, value: Any) -> None:
  """Writes `value` as JSON, as `write_bytes` does.

  Args:
    path: the file.
    value: dicts, lists, strings and numbers, NumPy's and JAX's among them. NaN
      and infinity become null.
  """
  text = json.dumps(plain(value), indent=2, allow_nan=False) + '\n'
  write_bytes(path, text.encode())


class InUse(UserError):  # noqa: N818
  """Another process works in the folder."""


@contextlib.contextmanager
def locked(folder: str | os.PathLike) -> Iterator[None]:
  """Keeps other processes out of a folder while this one works in it.

  The lock is on `folder/.lock`, which names the host and the process and is
  removed at the end. The kernel releases the lock of a process that is killed,
  so a file left behind does not block the next one. Of several JAX processes
  only the first takes the lock; in a bucket there is none.

  Args:
    folder: created if it is missing.

  Raises:
    InUse: another process works in the folder.
    UserError: it cannot be written.
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
      # Before it is released: afterwards the file may be another's.
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
      # The last holder may have removed the file since it was opened here: then
      # the lock is on a file that nobody else can see.
      with contextlib.suppress(FileNotFoundError):
        if os.path.samefile(path, file.fileno()):
          file.truncate(0)
          file.write(f'{socket.gethostname()} {os.getpid()}\n')
          file.flush()
          stack.pop_all()
          return file


def _held(path: epath.Path, file: TextIO) -> str:
  """Says who holds the lock and what to do."""
  file.seek(0)
  match file.read().split():
    case [host, pid]:
      holder = f'process {pid} on {host}'
    case _:  # It has the lock and is about to write its name.
      holder = 'another process'
  return (
    f'{path.parent} is in use by {holder}. Wait until it has finished, or '
    'choose another folder.'
  )
