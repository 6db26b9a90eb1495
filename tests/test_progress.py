import doctest
import errno
import io

import pytest

from mwrobust.runtime import progress as progress_lib


def test_doctests():
  assert doctest.testmod(progress_lib).failed == 0


class Terminal(io.StringIO):
  """A terminal that remembers what it was sent."""

  def isatty(self):
    return True

  def screen(self):
    """Returns the lines the user sees; a carriage return overwrites."""
    lines = []
    for line in self.getvalue().split('\n'):
      shown = ''
      for text in line.split('\r'):
        shown = text + shown[len(text) :]
      lines.append(shown.rstrip())
    return lines


class Clock:
  """A clock that the test moves."""

  seconds = 1000.0

  def __call__(self):
    return self.seconds


def make_progress(stream, start=0, total=100, log_every=10):
  clock = Clock()
  progress = progress_lib.Progress(
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
  assert progress_lib.format_duration(seconds) == text


@pytest.mark.parametrize(
  ('rate', 'text'),
  [(0.0314, '0.031'), (9.4, '9.4'), (9.99, '10'), (12345.6, '12346')],
)
def test_slow_and_fast_rates_have_digits_that_matter(rate, text):
  stream = io.StringIO()
  progress, clock = make_progress(stream, total=4, log_every=1)
  for step in (1, 2):
    progress.update(step)
    clock.seconds += 8 / rate
  line = stream.getvalue().splitlines()[-1]
  assert line.startswith(f'training  step 2/4  50%  {text} images/s  ')


def test_100_percent_means_done():
  stream = io.StringIO()
  progress, _ = make_progress(stream, total=100_000)
  progress.update(99_999, 'validating')
  assert stream.getvalue() == 'validating  step  99999/100000  99%\n'


def test_the_bar_fits_any_width(monkeypatch):
  for width in range(1, 200):
    monkeypatch.setenv('COLUMNS', str(width + 1))
    progress, clock = make_progress(stream := Terminal(), total=345)
    for step in (11, 12):
      clock.seconds += 1
      progress.update(step)
    line = stream.getvalue().rpartition('\r')[2]
    assert len(line) == width
    assert ('[' in line) == (width >= 64), width


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


def test_the_time_left_includes_what_follows_the_last_step():
  stream, clock = io.StringIO(), Clock()
  progress = progress_lib.Progress(
    30, batch_size=8, log_every=10, after=25, stream=stream, clock=clock
  )
  for step in range(31):
    progress.update(step)
    clock.seconds += 2
  left = [line.rpartition('  ')[2] for line in stream.getvalue().splitlines()]
  # 2 seconds for each of 20, 10 and 0 steps, and for another 25.
  assert left == ['1:30 left', '1:10 left', '0:50 left']


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
