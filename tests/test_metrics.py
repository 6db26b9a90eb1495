import errno
import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from made import fail_with, hundred_byte_files, strict_loads

from mwrobust.errors import UserError
from mwrobust.runtime import files, metrics


def read_rows(workdir):
  text = (workdir / 'metrics.jsonl').read_text()
  return [strict_loads(line) for line in text.splitlines()]


def write_steps(workdir, resume_step, steps):
  with metrics.Metrics(workdir, resume_step) as log:
    for step in steps:
      log.write('train', step, loss=1 / (1 + step))


def steps_of(workdir):
  return [row['step'] for row in read_rows(workdir)]


# ---- Metrics: the rows ------------------------------------------------------


def test_rows_are_strict_json_of_plain_values(tmp_path):
  with metrics.Metrics(tmp_path, None) as log:
    log.write(
      'outer',
      jnp.int32(10),
      loss=np.float32(0.5),
      bfloat=jnp.bfloat16(1.5),
      diverged=jnp.float32(np.nan),
      weights=jnp.array([0.25, -np.inf]),
      validation_loss={'pixel_linf': np.float64(2), 'dct_l1': np.inf},
      counts={'pixel_linf': np.int64(3)},
      note='text "quoted"\n\u2028',
    )
  assert read_rows(tmp_path) == [
    {
      'kind': 'outer',
      'step': 10,
      'loss': 0.5,
      'bfloat': 1.5,
      'diverged': None,
      'weights': [0.25, None],
      'validation_loss': {'pixel_linf': 2.0, 'dct_l1': None},
      'counts': {'pixel_linf': 3},
      'note': 'text "quoted"\n\u2028',
    }
  ]


def test_a_row_can_be_read_as_soon_as_it_is_written(tmp_path):
  with metrics.Metrics(tmp_path, None) as log:
    log.write('train', 1, loss=1.0)
    assert steps_of(tmp_path) == [1]


@pytest.mark.parametrize('torn', [b'', b'{"kind": "tra', b'\0\0\0\0'])
@pytest.mark.parametrize(
  ('resume_step', 'kept'),
  [(4, [0, 2, 4]), (5, [0, 2, 4]), (0, [0]), (None, [])],
)
def test_resuming_drops_later_rows_and_a_torn_line(
  tmp_path, torn, resume_step, kept
):
  write_steps(tmp_path, None, [0, 2, 4, 6, 8])
  path = tmp_path / 'metrics.jsonl'
  lines = path.read_bytes().splitlines(keepends=True)
  path.write_bytes(b''.join(lines) + torn)
  write_steps(tmp_path, resume_step, [])
  assert path.read_bytes() == b''.join(lines[: len(kept)])
  assert sorted(os.listdir(tmp_path)) == ['metrics.jsonl', 'tensorboard']
  write_steps(tmp_path, resume_step, [6])
  assert steps_of(tmp_path) == [*kept, 6]


def test_rows_survive_a_failure_while_later_ones_are_dropped(
  tmp_path, monkeypatch
):
  write_steps(tmp_path, None, range(5))
  monkeypatch.setattr(os, 'replace', fail_with(errno.ENOSPC))
  with pytest.raises(UserError, match=r'metrics\.jsonl: .*No space left'):
    metrics.Metrics(tmp_path, 2)
  assert steps_of(tmp_path) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize('line', ['step,loss', '[1, 2]', '{"loss": 1}', '\xff'])
def test_a_strange_line_is_named_and_left_alone(tmp_path, line):
  write_steps(tmp_path, None, [1])
  path = tmp_path / 'metrics.jsonl'
  path.write_bytes(path.read_bytes() + line.encode('latin1') + b'\n')
  before = path.read_bytes()
  with pytest.raises(UserError, match=r'metrics\.jsonl, line 2'):
    metrics.Metrics(tmp_path, 1)
  assert path.read_bytes() == before


def test_a_killed_run_resumes_where_its_rows_end(tmp_path):
  program = (
    'import itertools, sys\n'
    'from mwrobust.runtime.metrics import Metrics\n'
    'log = Metrics(sys.argv[1], None)\n'
    'for step in itertools.count():\n'
    '  log.write("train", step, loss=0.5)\n'
    '  print(step, flush=True)\n'
  )
  with subprocess.Popen(
    [sys.executable, '-c', program, tmp_path], stdout=subprocess.PIPE, text=True
  ) as process:
    seen = [int(process.stdout.readline()) for _ in range(20)]
    process.kill()
  write_steps(tmp_path, seen[-1], [20])
  assert steps_of(tmp_path) == list(range(21))
  steps = [step for step, _ in read_tensorboard(tmp_path)['train/loss']]
  assert steps == list(range(21))


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='no /dev/full')
def test_a_full_disk_is_explained():
  with (
    metrics._Log(pathlib.Path('/dev/full'), 'a') as log,
    pytest.raises(UserError, match=r'/dev/full: .*No space'),
  ):
    log.write(b'row')


def test_a_row_that_only_half_fits_is_an_error(tmp_path):
  with metrics._Log(tmp_path / 'metrics.jsonl', 'a') as log:
    log.write(b'r' * 60)
    with hundred_byte_files(), pytest.raises(UserError, match='File too large'):
      log.write(b'r' * 60)


def test_a_workdir_that_cannot_be_is_explained(tmp_path):
  (tmp_path / 'file').write_text('mine')
  with pytest.raises(UserError, match=r"File exists: '.*/file'"):
    metrics.Metrics(tmp_path / 'file', None)
  assert (tmp_path / 'file').read_text() == 'mine'


# ---- Metrics: TensorBoard ---------------------------------------------------


def read_tensorboard(workdir):
  """Returns {tag: [(step, value)]} as TensorBoard itself would show it."""
  from tensorboard.backend.event_processing import event_accumulator

  events = event_accumulator.EventAccumulator(
    str(workdir / 'tensorboard'), size_guidance={'scalars': 0}
  )
  events.Reload()
  return {
    tag: [(event.step, event.value) for event in events.Scalars(tag)]
    for tag in events.Tags()['scalars']
  }


def test_tensorboard_names_groups_and_keeps_nan(tmp_path):
  with metrics.Metrics(tmp_path, None) as log:
    log.write('train', 1, loss=np.float32(0.5), epoch=1, note='text')
    log.write('train', 2, loss=jnp.float32(np.nan), weights=jnp.array([1, 2]))
    log.write(
      'outer', 2, validation_loss={'pixel_linf': 0.25, 'dct': {'l1': 4}}
    )
  found = read_tensorboard(tmp_path)
  (first, (step, loss)) = found.pop('train/loss')
  assert first == (1, 0.5)
  assert step == 2
  assert np.isnan(loss)
  assert found == {
    'train/epoch': [(1, 1)],
    'train/weights/0': [(2, 1)],
    'train/weights/1': [(2, 2)],
    'validation_loss/pixel_linf': [(2, 0.25)],
    'validation_loss/dct/l1': [(2, 4)],
  }


def test_tensorboard_forgets_what_a_resumed_run_writes_again(tmp_path):
  write_steps(tmp_path, None, [0, 1, 2, 3])
  (events,) = (tmp_path / 'tensorboard').iterdir()
  events.write_bytes(events.read_bytes()[:-5])  # A kill, in the last record.
  write_steps(tmp_path, 1, [2])
  write_steps(tmp_path, 2, [3, 4])
  assert [step for step, _ in read_tensorboard(tmp_path)['train/loss']] == [
    *range(5)
  ]
  write_steps(tmp_path, None, [0])
  assert read_tensorboard(tmp_path) == {'train/loss': [(0, 1.0)]}


def test_nothing_imports_tensorflow_even_where_it_is_installed(tmp_path):
  (tmp_path / 'tensorflow.py').write_text('raise SystemExit("TensorFlow!")')
  program = (
    'import sys\n'
    'from mwrobust.runtime.metrics import Metrics\n'
    'assert not any("tensorboard" in name for name in sys.modules)\n'
    'with Metrics(sys.argv[1], None) as log:\n'
    '  log.write("train", 1, loss=0.5)\n'
    'assert "tensorflow" not in sys.modules\n'
  )
  path = os.pathsep.join([str(tmp_path), *sys.path])
  subprocess.run(
    [sys.executable, '-W', 'error', '-c', program, tmp_path / 'run'],
    env={**os.environ, 'PYTHONPATH': path},
    check=True,
  )
  assert read_tensorboard(tmp_path / 'run') == {'train/loss': [(1, 0.5)]}


# ------------------------------------------------------------------- a bucket


def test_an_outer_step_is_in_the_bucket_before_its_checkpoint(bucket):
  workdir = epath.Path(f'{bucket}/another')
  rows = workdir / 'metrics.jsonl'
  with metrics.Metrics(workdir, resume_step=None) as log:
    log.write('train', 1, loss=1.0)
    log.write('train', 2, loss=0.5)  # Not a minute later: waits.
    assert len(rows.read_text().splitlines()) == 1
    log.write('outer', 2, loss=0.5)
    assert len(rows.read_text().splitlines()) == 3


def test_a_run_in_a_bucket_is_written_and_gone_on_with(bucket):
  files.write_json(f'{bucket}/config.json', {'seed': 3})
  files.write_json(f'{bucket}/config.json', {'seed': 4})
  with metrics.Metrics(bucket, resume_step=None) as log:
    for step in (1, 2, 3):
      log.write('train', step, loss=1 / step)
  with metrics.Metrics(bucket, resume_step=2) as log:
    assert log.rows[-1]['step'] == 2
    log.write('train', 3, loss=0.25)
  folder = epath.Path(bucket)
  assert json.loads((folder / 'config.json').read_text()) == {'seed': 4}
  lines = (folder / 'metrics.jsonl').read_text().splitlines()
  assert [json.loads(line)['loss'] for line in lines] == [1, 0.5, 0.25]
  events = list((folder / 'tensorboard').iterdir())
  assert len(events) == 2
  assert all(path.read_bytes() for path in events)
  assert not any('tmp' in path.name for path in folder.iterdir())
  assert not pathlib.Path('gs:').exists()
