import contextlib
import doctest
import errno
import io
import json
import os
import pathlib
import resource
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from mwrobust import metrics
from mwrobust.errors import UserError


def strict_loads(text):
  """Parses JSON as a strict reader does: no NaN, no Infinity."""

  def refuse(constant):
    raise AssertionError(f'{constant} is not JSON')

  return json.loads(text, parse_constant=refuse)


def read_rows(workdir):
  text = (workdir / 'metrics.jsonl').read_text()
  return [strict_loads(line) for line in text.splitlines()]


def write_steps(workdir, resume_step, steps):
  with metrics.Metrics(workdir, resume_step) as log:
    for step in steps:
      log.write('train', step, loss=1 / (1 + step))


def steps_of(workdir):
  return [row['step'] for row in read_rows(workdir)]


def fail_with(code):
  def fail(*_):
    raise OSError(code, os.strerror(code))

  return fail


def test_doctests():
  assert doctest.testmod(metrics).failed == 0


@contextlib.contextmanager
def hundred_byte_files():
  """Lets no file grow beyond 100 bytes: a disk that fills up, for real."""
  limit = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)


# ---- write_json -------------------------------------------------------------


def test_write_json_makes_the_folder_and_leaves_only_the_file(tmp_path):
  path = tmp_path / 'runs' / 'first' / 'config.json'
  metrics.write_json(path, {'eps': (0.4, np.float32(0.5)), 'bad': float('nan')})
  metrics.write_json(path, {'eps': jnp.array([0.25, np.inf]), 'é': np.bool_(1)})
  assert strict_loads(path.read_text()) == {'eps': [0.25, None], 'é': True}
  assert os.listdir(path.parent) == ['config.json']


@pytest.mark.parametrize('function', ['fsync', 'replace'])
@pytest.mark.parametrize(
  ('code', 'cure'),
  [(errno.ENOSPC, 'Free some space'), (errno.EACCES, 'choose another workdir')],
)
def test_write_json_that_fails_keeps_the_old_file(
  tmp_path, monkeypatch, function, code, cure
):
  path = tmp_path / 'status.json'
  metrics.write_json(path, 'running')
  monkeypatch.setattr(os, function, fail_with(code))
  with pytest.raises(UserError, match=cure) as caught:
    metrics.write_json(path, 'done')
  assert f'{path}: [Errno {code}]' in str(caught.value)
  assert json.loads(path.read_text()) == 'running'
  assert os.listdir(tmp_path) == ['status.json']


def test_write_json_removes_what_it_wrote_by_half(tmp_path):
  path = tmp_path / 'config.json'
  metrics.write_json(path, 'old')
  with hundred_byte_files(), pytest.raises(UserError, match='File too large'):
    metrics.write_json(path, 'new' * 10_000)
  assert json.loads(path.read_text()) == 'old'
  assert os.listdir(tmp_path) == ['config.json']


def test_write_json_refuses_what_is_not_json_and_writes_nothing(tmp_path):
  with pytest.raises(TypeError, match='not JSON serializable'):
    metrics.write_json(tmp_path / 'config.json', {'model': object()})
  assert os.listdir(tmp_path) == []


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
  with pytest.raises(UserError, match=r'metrics\.jsonl, line 2: not a row'):
    metrics.Metrics(tmp_path, 1)
  assert path.read_bytes() == before


def test_a_killed_run_resumes_where_its_rows_end(tmp_path):
  program = (
    'import itertools, sys\n'
    'from mwrobust.metrics import Metrics\n'
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
    pytest.raises(UserError, match=r'/dev/full: .*No space.*Free some space'),
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
    'from mwrobust.metrics import Metrics\n'
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


# ---- Progress ---------------------------------------------------------------


class Terminal(io.StringIO):
  """A terminal that remembers what it was sent."""

  def isatty(self):
    return True

  def screen(self):
    """What the user sees: carriage returns go back and overwrite."""
    lines = []
    for line in self.getvalue().split('\n'):
      shown = ''
      for text in line.split('\r'):
        shown = text + shown[len(text) :]
      lines.append(shown.rstrip())
    return lines


class Clock:
  """Seconds that pass only when told to."""

  seconds = 1000.0

  def __call__(self):
    return self.seconds


def make_progress(stream, start=0, total=100, log_every=10):
  clock = Clock()
  progress = metrics.Progress(
    total,
    start=start,
    batch_size=8,
    log_every=log_every,
    stream=stream,
    clock=clock,
  )
  return progress, clock


@pytest.mark.parametrize(
  ('seconds', 'text'),
  [
    (0, '0:00'),
    (59.6, '1:00'),
    (3599.4, '59:59'),
    (3600, '1:00:00'),
    (86399.7, '1d 0:00:00'),
    (100 * 86400 + 61, '100d 0:01:01'),
  ],
)
def test_format_duration(seconds, text):
  assert metrics.format_duration(seconds) == text


@pytest.mark.parametrize(
  ('rate', 'text'),
  [(0.0314, '0.031'), (9.4, '9.4'), (9.99, '10'), (12345.6, '12346')],
)
def test_progress_line_shows_slow_and_fast_rates(rate, text):
  line = metrics.progress_line(1, 2, rate, None, None, 'training')
  assert line == f'training  step 1/2  50%  {text} images/s'


def test_progress_line_says_100_percent_only_when_done():
  line = metrics.progress_line(99_999, 100_000, None, None, None, 'validating')
  assert line == 'validating  step  99999/100000  99%'
  line = metrics.progress_line(9, 9, None, 0, 50, 'done')
  assert line == 'done  step 9/9  100%  0:00 left  [###############]'


def test_progress_line_fits_any_width():
  for width in range(1, 200):
    line = metrics.progress_line(12, 345, 67.8, 9012.3, width, 'training')
    assert len(line) <= width
    assert ('[' in line) == (len(line) == width and width > 60)


def test_rate_leaves_out_the_first_step_and_earlier_processes():
  progress, clock = make_progress(io.StringIO(), start=50)
  clock.seconds += 7
  progress.update(50, 'validating')
  assert progress.images_per_second is None
  clock.seconds += 100  # Compiles.
  progress.update(51)
  assert progress.images_per_second is None
  clock.seconds += 2
  progress.update(52)
  assert progress.images_per_second == 8 / 2
  clock.seconds += 6  # Two steps and a validation.
  progress.update(54)
  assert progress.images_per_second == 8 * 3 / 8


def test_log_file_gets_one_plain_line_per_interval():
  stream = io.StringIO()
  progress, clock = make_progress(stream, start=17, total=45)
  with progress:
    for step in range(17, 46):
      progress.update(step)
      clock.seconds += 2
      if step == 30:
        progress.update(step, 'validating')
        progress.say('worst loss: dct_l1')
    progress.update(45, 'done')
  assert stream.getvalue().splitlines() == [
    'training  step 20/45  44%  4 images/s  0:50 left',
    'training  step 30/45  66%  4 images/s  0:30 left',
    'worst loss: dct_l1',
    'training  step 40/45  88%  4 images/s  0:10 left',
    'training  step 45/45  100%  4 images/s  0:00 left',
  ]
  assert stream.getvalue().replace('\n', '').isprintable()


def test_terminal_shows_one_bar_and_what_is_said_above_it(monkeypatch):
  monkeypatch.setenv('COLUMNS', '42')
  stream = Terminal()
  progress, clock = make_progress(stream)
  with progress:
    progress.say('before')
    progress.update(0, 'validating all threats')
    progress.update(0, 'training')
    bar = 'training  step   0/100   0%  [----------]'
    assert stream.screen() == ['before', bar]
    progress.say('one\ntwo')
    clock.seconds += 1
    progress.update(50, 'validating')
    progress.update(50, 'stop')
    progress.say('three')
  assert stream.screen() == [
    'before',
    'one',
    'two',
    'three',
    'stop  step  50/100  50%  [#######-------]',
    '',
  ]


def test_terminal_is_redrawn_five_times_a_second_and_at_changes(monkeypatch):
  monkeypatch.setenv('COLUMNS', '80')
  stream = Terminal()
  progress, clock = make_progress(stream, total=1000)
  for step in range(1000):
    progress.update(step)
    clock.seconds += 1 / 64
  draws = stream.getvalue().count('\r')
  assert draws == 1 + 999 // 13  # 13 / 64 is the first to reach 0.2 seconds.
  progress.update(999, 'validating')
  progress.update(1000, 'validating')
  assert stream.getvalue().count('\r') == draws + 2
  assert stream.getvalue().endswith('#]')


def test_a_terminal_that_goes_away_does_not_stop_the_run():
  class Gone(Terminal):
    def write(self, text):
      raise OSError(errno.EIO, 'Input/output error')

  with make_progress(Gone())[0] as progress:
    progress.update(1)
    progress.say('still here')


# ------------------------------------------------------------------- a bucket


@pytest.fixture
def bucket():
  """`gs://bucket`, in memory."""
  fsspec = pytest.importorskip('fsspec')
  from fsspec.implementations.memory import MemoryFileSystem

  class Bucket(MemoryFileSystem):
    protocol = ('gs', 'gcs')
    store, pseudo_dirs = {}, ['']

    @classmethod
    def _strip_protocol(cls, path):
      return '/' + str(path).removeprefix('gs://').strip('/')

  fsspec.register_implementation('gcs', Bucket, clobber=True)
  return 'gs://bucket/run'


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
  metrics.write_json(f'{bucket}/config.json', {'seed': 3})
  metrics.write_json(f'{bucket}/config.json', {'seed': 4})
  with metrics.Metrics(bucket, resume_step=None) as log:
    for step in (1, 2, 3):
      log.write('train', step, loss=1 / step)
  with metrics.Metrics(bucket, resume_step=2) as log:
    assert log.last_row['step'] == 2
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
