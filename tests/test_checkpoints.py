import errno
import os
import pathlib
import re
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from orbax.checkpoint import v1 as ocp

from mwrobust import models
from mwrobust.errors import UserError
from mwrobust.training import policies, state
from mwrobust.training.checkpoints import Checkpoints, last

POLICY = policies.multiplicative_weights(6, 0.1)


@pytest.fixture(scope='module')
def start():
  model = models.create(
    'cnn', num_classes=3, mean=(0.5,), std=(0.5,), features=(2,), hidden=3
  )
  return state.create(
    jax.random.key(0), model, (8, 8, 1), optax.adam(1e-3), POLICY
  )


@pytest.fixture
def open_in(tmp_path):
  opened = []

  def open_(keep=3):
    opened.append(Checkpoints(tmp_path, keep))
    return opened[-1]

  yield open_
  for checkpoints in opened:
    checkpoints.close()


def after(start, t, step=None):
  """Returns a state after t outer steps, whose arrays all depend on t."""
  moved = jax.tree.map(
    lambda x: x + t if jnp.issubdtype(x.dtype, jnp.floating) else x, start
  )
  return moved.replace(
    outer_step=jnp.int32(t), step=jnp.int32(10 * t if step is None else step)
  )


def assert_same(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for ours, theirs in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    assert ours.dtype == theirs.dtype
    assert (np.asarray(ours) == np.asarray(theirs)).all()


def test_what_is_restored_is_what_was_saved_to_the_bit(start, open_in):
  assert open_in().restore(start, print) is None
  open_in().save(after(start, 1))
  assert_same(open_in().restore(start, print), after(start, 1))


def test_the_last_h_are_kept_oldest_first(start, open_in, tmp_path):
  checkpoints = open_in(keep=3)
  for t in range(1, 6):
    checkpoints.save(after(start, t))
  for found, t in zip(last(tmp_path, 3, start), (3, 4, 5), strict=True):
    assert_same(found, after(start, t))
  with pytest.raises(UserError, match=r'checkpoints .*\[3, 4, 5\].* 4 '):
    last(tmp_path, 4, start)


def test_reading_leaves_a_save_that_is_under_way_alone(
  start, open_in, tmp_path
):
  open_in().save(after(start, 1))
  half = tmp_path / 'checkpoints' / '2.orbax-checkpoint-tmp'
  half.mkdir()
  assert_same(last(tmp_path, 1, start)[0], after(start, 1))
  assert half.is_dir()


def test_no_checkpoints_are_told_and_not_made(start, tmp_path):
  with pytest.raises(UserError, match=f'{tmp_path}/nothing'):
    last(tmp_path / 'nothing', 1, start)
  assert not (tmp_path / 'nothing').exists()


def test_another_network_is_told_by_leaf_and_shapes(start, open_in, tmp_path):
  open_in().save(after(start, 1))
  params = jax.tree.map(lambda x: x, start.params)
  name = sorted(params)[0]
  leaf = sorted(params[name])[0]
  shape = params[name][leaf].shape
  params[name][leaf] = jnp.zeros((7, *shape))
  other = start.replace(params=params)
  expected = re.escape(
    f'params/{name}/{leaf} is {shape} there, {(7, *shape)} here'
  )
  for read in (
    lambda: last(tmp_path, 1, other),
    lambda: open_in().restore(other, print),
  ):
    with pytest.raises(UserError, match=expected):
      read()
  # It is not damaged, and was not put aside.
  assert_same(open_in().restore(start, print), after(start, 1))


def test_all_are_kept_for_the_ensemble(start, open_in, tmp_path):
  checkpoints = open_in(keep=None)
  for t in range(1, 6):
    checkpoints.save(after(start, t))
  assert len(last(tmp_path, 5, start)) == 5


def test_the_furthest_state_is_restored(start, open_in, tmp_path):
  checkpoints = open_in()
  checkpoints.save(after(start, 1))
  checkpoints.save_interrupted(after(start, 1, step=17))
  assert_same(open_in().restore(start, print), after(start, 1, step=17))
  checkpoints.save(after(start, 2))
  assert_same(open_in().restore(start, print), after(start, 2))
  assert os.listdir(tmp_path) == ['checkpoints']  # The other is removed.


def damage(folder: pathlib.Path, how):
  files = [path for path in folder.rglob('*') if path.is_file()]
  largest = max(files, key=lambda path: path.stat().st_size)
  how(largest)


def truncate(path):
  os.truncate(path, path.stat().st_size // 2)


def overwrite(path):
  size = path.stat().st_size
  with open(path, 'r+b') as file:
    file.seek(size // 3)
    file.write(b'\xa5' * (size // 3))


def flip_a_bit(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def test_two_damaged_are_made_again(start, open_in, tmp_path):
  checkpoints = open_in()
  for t in (1, 2, 3):
    checkpoints.save(after(start, t))
  for t in '23':
    damage(tmp_path / 'checkpoints' / t, truncate)
  checkpoints = open_in()
  assert_same(checkpoints.restore(start, print), after(start, 1))
  for t in (2, 3):
    checkpoints.save(after(start, t))
  for found, t in zip(last(tmp_path, 3, start), (1, 2, 3), strict=True):
    assert_same(found, after(start, t))


def test_an_interrupted_state_is_not_written_twice(start, open_in):
  checkpoints = open_in()
  checkpoints.save_interrupted(after(start, 1, step=17))
  checkpoints.save_interrupted(after(start, 1, step=17))
  assert_same(open_in().restore(start, print), after(start, 1, step=17))


@pytest.mark.parametrize(
  'how', [os.remove, truncate, overwrite, flip_a_bit], ids=lambda f: f.__name__
)
def test_a_damaged_newest_is_passed_over_and_made_again(
  how, start, open_in, tmp_path
):
  checkpoints = open_in()
  for t in (1, 2):
    checkpoints.save(after(start, t))
  damage(tmp_path / 'checkpoints' / '2', how)
  told = []
  checkpoints = open_in()
  assert_same(checkpoints.restore(start, told.append), after(start, 1))
  assert 'checkpoints/2 cannot be read' in told[0]
  assert 'checkpoints/2, which was moved to' in told[1]
  (aside,) = (tmp_path / 'put_aside').iterdir()
  assert aside.name.startswith('checkpoints-2-')
  checkpoints.save(after(start, 2))
  assert_same(open_in().restore(start, print), after(start, 2))


@pytest.mark.parametrize(
  'error',
  [
    TimeoutError('slow disk'),
    OSError(errno.EIO, 'Input/output error'),
    ValueError('UNAVAILABLE: try again later'),
  ],
)
def test_what_cannot_be_read_just_now_is_not_put_aside(
  start, open_in, tmp_path, monkeypatch, error
):
  open_in().save(after(start, 1))

  def fail(*args):
    raise error

  with monkeypatch.context() as patch:
    patch.setattr(ocp.training.Checkpointer, 'load', fail)
    with pytest.raises(UserError, match='checkpoints/1 could not be read'):
      open_in().restore(start, print)
  assert not (tmp_path / 'put_aside').exists()
  assert_same(open_in().restore(start, print), after(start, 1))


def test_all_damaged_is_no_fresh_start(start, open_in, tmp_path):
  open_in().save(after(start, 1))
  damage(tmp_path / 'checkpoints' / '1', truncate)
  with pytest.raises(UserError, match=str(tmp_path)):
    open_in().restore(start, lambda text: None)


def test_what_a_killed_save_left_is_cleared_away(start, open_in, tmp_path):
  open_in().save(after(start, 1))
  half = tmp_path / 'checkpoints' / '2.orbax-checkpoint-tmp'
  half.mkdir()
  (half / 'part').write_bytes(b'half')
  checkpoints = open_in()
  assert_same(checkpoints.restore(start, print), after(start, 1))
  checkpoints.save(after(start, 2))
  assert_same(open_in().restore(start, print), after(start, 2))


def test_a_full_disk_is_told_and_the_last_checkpoint_stays(
  start, open_in, monkeypatch, capsys
):
  checkpoints = open_in()
  checkpoints.save(after(start, 1))
  for module, hook in ((threading, 'excepthook'), (sys, 'unraisablehook')):
    monkeypatch.setattr(module, hook, getattr(module, f'__{hook}__'))

  def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(checkpoints._outer, 'save', full)
  with pytest.raises(UserError, match=r'checkpoints.*No space left'):
    checkpoints.save(after(start, 2))
  # Its threads print nothing more.
  sys.unraisablehook(types.SimpleNamespace(exc_value=OSError('and again')))
  assert capsys.readouterr().err == ''
  assert_same(open_in().restore(start, print), after(start, 1))
  # Closing restores the hooks.
  checkpoints.close()
  assert threading.excepthook is threading.__excepthook__
  assert sys.unraisablehook is sys.__unraisablehook__


def test_a_lost_outer_step_is_made_again_before_what_came_after_it(
  start, open_in, tmp_path
):
  checkpoints = open_in()
  for t in (1, 2, 3):
    checkpoints.save(after(start, t))
  checkpoints.save_interrupted(after(start, 3, step=35))
  damage(tmp_path / 'checkpoints' / '3', truncate)
  for _ in range(2):  # Also if it is killed before it trained it again.
    assert_same(open_in().restore(start, print), after(start, 2))
  checkpoints = open_in()
  checkpoints.save_interrupted(after(start, 2, step=25))
  assert_same(checkpoints.restore(start, print), after(start, 2, step=25))


def test_a_window_with_a_gap_is_no_window(start, open_in, tmp_path):
  checkpoints = open_in(keep=None)
  for t in (1, 2, 4):
    checkpoints.save(after(start, t))
  with pytest.raises(UserError, match=r'checkpoints .* 3 .*\[1, 2, 4\]'):
    last(tmp_path, 3, start)
