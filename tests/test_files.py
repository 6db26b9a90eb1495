import contextlib
import errno
import fcntl
import json
import os
import socket
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from made import fail_with, hundred_byte_files, strict_loads

from mwrobust.errors import UserError
from mwrobust.runtime import devices, files

# ---- write_json -------------------------------------------------------------


def test_write_json_makes_the_folder_and_leaves_only_the_file(tmp_path):
  path = tmp_path / 'runs' / 'first' / 'config.json'
  files.write_json(path, {'eps': (0.4, np.float32(0.5)), 'bad': float('nan')})
  files.write_json(path, {'eps': jnp.array([0.25, np.inf]), 'é': np.bool_(1)})
  assert strict_loads(path.read_text()) == {'eps': [0.25, None], 'é': True}
  assert os.listdir(path.parent) == ['config.json']


@pytest.mark.parametrize('function', ['fsync', 'replace'])
@pytest.mark.parametrize(
  ('code', 'cure'),
  [(errno.ENOSPC, 'Free some space'), (errno.EACCES, 'choose another folder')],
)
def test_write_json_that_fails_keeps_the_old_file(
  tmp_path, monkeypatch, function, code, cure
):
  path = tmp_path / 'status.json'
  files.write_json(path, 'running')
  monkeypatch.setattr(os, function, fail_with(code))
  with pytest.raises(UserError, match=cure) as caught:
    files.write_json(path, 'done')
  assert f'{path}: [Errno {code}]' in str(caught.value)
  assert json.loads(path.read_text()) == 'running'
  assert os.listdir(tmp_path) == ['status.json']


def test_write_json_removes_what_it_wrote_by_half(tmp_path):
  path = tmp_path / 'config.json'
  files.write_json(path, 'old')
  with hundred_byte_files(), pytest.raises(UserError, match='File too large'):
    files.write_json(path, 'new' * 10_000)
  assert json.loads(path.read_text()) == 'old'
  assert os.listdir(tmp_path) == ['config.json']


def test_write_json_refuses_what_is_not_json_and_writes_nothing(tmp_path):
  with pytest.raises(TypeError, match='not JSON serializable'):
    files.write_json(tmp_path / 'config.json', {'model': object()})
  assert os.listdir(tmp_path) == []


# ---- locked -----------------------------------------------------------------

HOLDER = """
import sys
from mwrobust.runtime import files
with files.locked(sys.argv[1]):
  print('locked', flush=True)
  sys.stdin.read()
"""


@contextlib.contextmanager
def holder(folder):
  """Starts a process that holds the lock until its stdin is closed."""
  with subprocess.Popen(
    [sys.executable, '-c', HOLDER, folder],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    assert process.stdout.readline() == 'locked\n'
    yield process


def test_a_second_process_is_refused_and_the_holder_named(tmp_path):
  folder = tmp_path / 'runs' / 'first'
  with files.locked(folder):
    second = subprocess.run(
      [sys.executable, '-c', HOLDER, folder], capture_output=True, text=True
    )
    assert second.returncode == 1
    assert second.stdout == ''
    message = second.stderr.splitlines()[-1]
    assert message.startswith('mwrobust.runtime.files.InUse: ')
    for part in (folder, f'process {os.getpid()} on {socket.gethostname()}'):
      assert str(part) in message
    assert os.listdir(folder) == ['.lock']  # Not removed.
  assert os.listdir(folder) == []


def test_a_killed_holder_does_not_block(tmp_path):
  with holder(tmp_path) as process:
    with pytest.raises(UserError, match=f'process {process.pid} on '):
      files.locked(tmp_path).__enter__()
    process.kill()
  assert (tmp_path / '.lock').read_text().split()[1] == str(process.pid)
  with files.locked(tmp_path):
    text = (tmp_path / '.lock').read_text()
    assert text == f'{socket.gethostname()} {os.getpid()}\n'
  assert os.listdir(tmp_path) == []


def test_a_lock_ends_with_an_error_and_can_be_taken_again(tmp_path):
  for _ in range(2):
    with pytest.raises(OSError, match='mine'), files.locked(tmp_path):
      raise OSError('mine')
    assert os.listdir(tmp_path) == []


def test_a_lock_that_was_removed_while_it_was_opened_is_opened_again(
  tmp_path, monkeypatch
):
  flock, calls = fcntl.flock, []

  def removed_before(file, operation):
    if not calls:
      (tmp_path / '.lock').unlink()
    calls.append(file)
    flock(file, operation)

  monkeypatch.setattr(fcntl, 'flock', removed_before)
  with files.locked(tmp_path):
    assert len(calls) == 2
    assert calls[0].closed
    with pytest.raises(UserError, match=f'process {os.getpid()} on '):
      files.locked(tmp_path).__enter__()
  assert os.listdir(tmp_path) == []


def test_only_the_first_process_locks_and_only_outside_of_buckets(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  with files.locked('gs://bucket/run'), files.locked('gs://bucket/run'):
    pass
  monkeypatch.setattr(devices, 'is_first_process', lambda: False)
  with files.locked('run'), files.locked('run'):
    pass
  assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_locked_is_explained(tmp_path):
  (tmp_path / 'file').write_text('mine')
  with pytest.raises(UserError, match=r'Cannot write .*/file/\.lock: '):
    files.locked(tmp_path / 'file').__enter__()
