"""Tests that numbers do not depend on devices, processes or kills."""

import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from tiny_run import tiny

from launch import local
from mwrobust.errors import UserError
from mwrobust.evaluation import Outcomes
from mwrobust.runtime import devices
from mwrobust.training import checkpoints
from mwrobust.training.setup import check_training, prepare

ROOT = pathlib.Path(__file__).parent.parent
CHANGES = {  # 24 steps, so that the network is sometimes robust.
  'data.train_examples': 160,
  **{
    f'threats.{space}_{norm}.eps': eps
    for space in ('pixel', 'dct')
    for norm, eps in (('linf', 0.02), ('l2', 0.2), ('l1', 1.0))
  },
  'optimizer.learning_rate': 0.02,
  'optimizer.drops': (99,),
  'train.h': 1,
  'eval.others': (),
}

# A worker of a launch. The last process kills itself once, at the point that
# the file `kill` in the workdir's parent names.
WORKER = """
import os, pathlib, sys, threading, time
root, workdir = sys.argv.pop(1), pathlib.Path(sys.argv.pop(1))
sys.path[:0] = [root, root + '/tests']
import conftest
from tiny_run import tiny
from test_multiprocess import CHANGES
from mwrobust import command_line, main
from mwrobust.training import loop

plan = workdir.parent / 'kill'
me = int(next(a for a in sys.argv if '--process_id' in a).split('=')[1])
point = plan.read_text() if plan.exists() else ''
if me == 0 and point != 'full disk':
  point = ''

def die(*args):
  plan.unlink()
  os.kill(os.getpid(), 9)

if point == 'training':
  trained = loop._Log.trained
  loop._Log.trained = lambda self, *args: (
    die() if self.step == 12 else trained(self, *args)
  )
elif point == 'validation':
  validate = loop.validate
  loop.validate = lambda job, state, check_stop: validate(
    job, state, die if state.step > 8 else check_stop
  )
elif point == 'saving':
  def watch():
    folder = workdir / 'checkpoints'
    while not (folder.is_dir() and any('tmp' in n for n in os.listdir(folder))):
      pass
    die()
  threading.Thread(target=watch, daemon=True).start()
elif point == 'full disk' and me == 0:
  def full(*args, **kwargs):
    plan.unlink()
    raise OSError(28, 'No space left on device')
  loop.Metrics.write = full

saved = loop.Checkpoints.save
if (workdir.parent / 'stop after save').exists():
  def save_and_be_stopped(*args):
    saved(*args)
    os.kill(os.getpid(), 15)
    time.sleep(1)
  loop.Checkpoints.save = save_and_be_stopped

main._CONFIG = type('Flag', (), {'value': tiny(**CHANGES)})
main._WORKDIR = type('Flag', (), {'value': str(workdir)})
main.default_config = lambda given: root + '/configs/quickstart.py'
command_line.run(main.main, main.default_config)
"""


def launch(workdir, max_restarts=0):
  """Runs two processes of two devices, as `python -m launch.local` does."""
  worker = [sys.executable, '-c', WORKER, str(ROOT), str(workdir)]
  options = local.Options(num_processes=2, max_restarts=max_restarts)
  return local.launch(options, main=worker)


# One process that trains on 1, 2 and 4 of its devices, and on 4 resumes the run
# of 2 processes.
CHILD = """
import os, pathlib, sys
root, folder = sys.argv[1:]
sys.path[:0] = [root, root + '/tests']
import conftest
os.environ['XLA_FLAGS'] = os.environ['XLA_FLAGS'].replace('count=2', 'count=4')
import jax
from tiny_run import tiny
from test_multiprocess import CHANGES
from mwrobust.training import loop
from mwrobust.runtime import devices

assert jax.device_count() == 4
auto = (jax.sharding.AxisType.Auto,)
for name, count in (('1', 1), ('2', 2), ('4', 4), ('begun', 4)):
  mesh = jax.make_mesh(
    (count,), ('data',), axis_types=auto, devices=jax.devices()[:count]
  )
  devices.mesh = lambda mesh=mesh: mesh
  loop.train_and_evaluate(tiny(**CHANGES), f'{folder}/{name}')
"""


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """Returns workdirs of the same run on different devices and processes."""
  folder = tmp_path_factory.mktemp('runs')
  assert launch(folder / 'processes') == 0
  # Killed in the second outer step of three; one process will resume.
  (folder / 'kill').write_text('training')
  assert launch(folder / 'begun') == 128 + signal.SIGKILL
  assert os.listdir(folder / 'begun' / 'checkpoints') == ['1']
  result = subprocess.run(
    [sys.executable, '-c', CHILD, str(ROOT), str(folder)],
    capture_output=True,
    text=True,
    check=False,
    timeout=600,
  )
  assert result.returncode == 0, result.stderr
  assert 'Resuming from step 8 of 24' in result.stdout
  return folder


def state_of(workdir):
  like = prepare(tiny(**CHANGES)).init()
  (state,) = checkpoints.last(pathlib.Path(workdir), 1, like)
  assert int(state.step) == 24
  return state


def chosen(workdir):
  """Returns how often each threat was chosen up to the step of each row."""
  total, until = collections.Counter(), {}
  path = pathlib.Path(workdir, 'metrics.jsonl')
  for line in path.read_text().splitlines():
    row = json.loads(line)
    if row['kind'] == 'train':
      total.update(row['chosen'])
      until[row['step']] = dict(total)
  return until


def assert_same_run(found, expected):
  # An interrupted run has one more row, of the steps before.
  ours, theirs = chosen(found), chosen(expected)
  assert {step: ours.get(step) for step in theirs} == theirs
  for ours, theirs in zip(
    jax.tree.leaves(state_of(found)),
    jax.tree.leaves(state_of(expected)),
    strict=True,
  ):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def evaluation_of(workdir):
  (path,) = (workdir / 'eval').glob('*/outcomes.npz')
  return path


@pytest.mark.parametrize('name', ['2', '4', 'processes', 'begun'])
def test_numbers_do_not_depend_on_devices_and_processes(runs, name):
  """Checks that resuming on other devices changes nothing either."""
  assert_same_run(runs / name, runs / '1')
  ours, theirs = (
    Outcomes.load(evaluation_of(runs / workdir)) for workdir in (name, '1')
  )
  np.testing.assert_array_equal(ours.correct, theirs.correct)
  np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-3, atol=1e-3)
  assert 0.1 < theirs.correct.mean() < 0.9


def test_one_process_writes(runs):
  events = os.listdir(runs / 'processes' / 'tensorboard')
  assert len(events) == 1
  assert evaluation_of(runs / 'processes').exists()


def test_killed_workers_cost_the_steps_since_the_checkpoint(
  runs, tmp_path, capfd
):
  """Kills in training, while saving and in validation, in turn."""
  workdir = tmp_path / 'run'
  for point in ('training', 'saving', 'validation'):
    (tmp_path / 'kill').write_text(point)
    assert launch(workdir) == 128 + signal.SIGKILL
    assert not (tmp_path / 'kill').exists()
    told = ''.join(capfd.readouterr())
    assert 'launch: process 1 was killed by SIGKILL' in told
  (tmp_path / 'kill').write_text('validation')
  assert launch(workdir, max_restarts=1) == 0
  assert 'Restart 1 of 1' in ''.join(capfd.readouterr())
  assert_same_run(workdir, runs / 'processes')


def test_sigterm_saves_and_ends_all(runs, tmp_path, capfd):
  workdir = tmp_path / 'run'

  def stop_when_training():
    metrics = workdir / 'metrics.jsonl'
    while not (metrics.exists() and metrics.read_text()):
      time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

  threading.Thread(target=stop_when_training, daemon=True).start()
  assert launch(workdir) == 128 + signal.SIGTERM
  told = ''.join(capfd.readouterr())
  assert 'Interrupted by SIGTERM. Run the same command again' in told
  assert os.listdir(workdir / 'interrupted')
  assert launch(workdir) == 0
  assert 'Resuming from step' in ''.join(capfd.readouterr())
  assert_same_run(workdir, runs / 'processes')


def test_a_sigterm_during_a_save_is_not_lost(tmp_path, capfd):
  (tmp_path / 'stop after save').touch()
  assert launch(tmp_path / 'run') == 128 + signal.SIGTERM
  assert 'Interrupted by SIGTERM' in ''.join(capfd.readouterr())
  assert os.listdir(tmp_path / 'run' / 'checkpoints') == ['1']


def test_an_error_of_one_process_ends_all(tmp_path, capfd):
  (tmp_path / 'kill').write_text('full disk')
  assert launch(tmp_path / 'run') == 1
  assert 'No space left on device' in ''.join(capfd.readouterr())


@pytest.mark.slow
def test_ten_random_kills(runs, tmp_path, capfd):
  workdir = tmp_path / 'run'
  dice = random.Random(0)
  kills, done = [], threading.Event()

  def kill_at_random():
    while len(kills) < 10 and not done.wait(dice.uniform(1, 8)):
      workers = subprocess.run(
        ['pgrep', '-f', f'{workdir} --coordinator_address'],
        capture_output=True,
        text=True,
        check=False,
      ).stdout.split()
      if workers:
        os.kill(int(dice.choice(workers)), signal.SIGKILL)
        kills.append(None)

  killer = threading.Thread(target=kill_at_random)
  killer.start()
  try:
    code = launch(workdir, max_restarts=10)
  finally:
    done.set()
    killer.join()
  told = ''.join(capfd.readouterr())
  assert code == 0, told
  assert len(kills) > 4  # Ten, unless it finished earlier.
  assert 'launch: Restart' in told
  assert_same_run(workdir, runs / 'processes')


# ------------------------------------------------------------------- the flags


@pytest.fixture
def joined(monkeypatch):
  calls = []
  monkeypatch.setattr(
    jax.distributed, 'initialize', lambda *args: calls.append(args)
  )
  for name in (*devices.VARIABLES, 'SLURM_STEP_NUM_TASKS'):
    monkeypatch.delenv(name, raising=False)
  return calls


def test_alone_unless_told_otherwise(joined, monkeypatch):
  devices.initialize()
  devices.initialize('off', 'host:1', 2, 0)
  assert joined == []
  devices.initialize('auto', 'host:1', 2, 1)
  devices.initialize('on')
  monkeypatch.setenv('SLURM_STEP_NUM_TASKS', '4')
  devices.initialize()
  for name, value in zip(devices.VARIABLES, ('host:2', '3', '0'), strict=True):
    monkeypatch.setenv(name, value)
  devices.initialize()
  nothing = (None, None, None)
  assert joined == [('host:1', 2, 1), nothing, nothing, ('host:2', 3, 0)]


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    (('host:1', 2, None), r"--process_id.*'host:1', 2, None"),
    ((None, None, 0), r'--process_id.*None, None, 0'),
    (('host:1', 2, 2), 'must be from 0 to 1'),
  ],
)
def test_flags_that_do_not_fit_together(given, message, joined):
  with pytest.raises(UserError, match=message):
    devices.initialize('auto', *given)
  assert joined == []


def test_variables_must_be_numbers(joined, monkeypatch):
  monkeypatch.setenv('JAX_NUM_PROCESSES', 'two')
  with pytest.raises(UserError, match='JAX_NUM_PROCESSES=two'):
    devices.initialize()


def test_a_batch_that_cannot_be_shared():
  job = prepare(tiny(**{'train.batch_size': 21}))
  with pytest.raises(UserError, match=r'batch_size = 21 .*20 or 22'):
    check_training(job)
