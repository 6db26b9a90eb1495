"""Tests `python -m mwrobust.evaluate` as its users run it."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from absl import flags
from made import section

from mwrobust import command_line, evaluate, evaluation
from mwrobust.evaluation import Outcomes

ROOT = pathlib.Path(__file__).parent.parent
COUNT = 600
NETWORKS = """
import jax
import numpy as np

weights = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)


def logits_fn(images):
  return images.reshape(len(images), -1) @ weights


def of_params(params, images):
  return images.reshape(len(images), -1) @ params['weights'] + params['shift']


pair = of_params, {'weights': weights, 'shift': np.ones((1, 3), np.float32)}
number = 3
numbers = 3, 4


def one_logit(images):
  return logits_fn(images)[:, :1]


def probabilities(images):
  return jax.nn.softmax(logits_fn(images))


def in_training(images):
  logits = logits_fn(images)
  return logits - logits.mean(axis=0, keepdims=True)


def with_numpy(images):
  return np.tanh(np.array(images)).mean(axis=(1, 2))
"""
WORDS = (
  *('--network=my_nets:logits_fn', '--data=test.npz', '--linf=51/255'),
  *('--spaces=pixel', '--protocol=fast', '--curve_examples=0'),
)
OUTPUT = '--output=my_network'


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Makes the user's folder, with a module and data."""
  folder = tmp_path_factory.mktemp('user')
  (folder / 'my_nets.py').write_text(NETWORKS)
  names = {}
  exec(NETWORKS, names)
  # Every other image shows its class so clearly that no small change hides it.
  rng = np.random.default_rng(1)
  images = rng.uniform(size=(COUNT, 64))
  labels = (images @ names['weights']).argmax(axis=1)
  images[::2] = names['weights'].T[labels[::2]] > 0
  images = images.astype(np.float32).reshape(COUNT, 8, 8, 1)
  labels[0] += 1 if labels[0] < 2 else -1  # One is misclassified.
  np.savez(folder / 'test.npz', images=images, labels=labels)
  np.savez(folder / 'no_images.npz', labels=labels)
  np.savez(folder / 'objects.npz', images=np.array([{}]), labels=labels)
  np.savez(folder / 'too_bright.npz', images=2 * images, labels=labels)
  np.savez(folder / 'one_hot.npz', images=images, labels=np.eye(3)[labels])
  np.savez(folder / 'one_label.npz', images=images, labels=labels[0])
  np.savez(folder / 'column.npz', x_test=images, y_test=labels[:, None])
  np.savez(folder / 'nchw.npz', x=images.transpose(0, 3, 1, 2), y=labels)
  np.savez(folder / 'beyond.npz', images=images, labels=labels + 7)
  np.savez(folder / 'nan.npz', images=images * np.nan, labels=labels)
  np.savez(folder / 'empty.npz', images=images[:0], labels=labels[:0])
  np.save(folder / 'images.npy', images)
  (folder / 'text.npz').write_text('images and labels')
  damaged = bytearray((folder / 'test.npz').read_bytes())
  damaged[1000:2000] = bytes(1000)
  (folder / 'damaged.npz').write_bytes(damaged)
  return folder


def start(folder, *words):
  return subprocess.Popen(
    [sys.executable, '-m', 'mwrobust.evaluate', *words],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=folder,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
  )


@pytest.fixture(scope='module')
def interrupted(folder):
  """Returns an evaluation that was stopped after it showed some progress."""
  process = start(folder, *WORDS, OUTPUT)
  shown = process.stderr.readline()
  process.send_signal(signal.SIGTERM)
  stdout, stderr = process.communicate(timeout=120)
  path = folder / 'my_network' / evaluation.FILE
  return process.returncode, stdout, shown + stderr, Outcomes.load(path)


@pytest.fixture(scope='module')
def evaluated(folder, interrupted):
  """Returns the output of the same command run again, and the outcomes."""
  process = start(folder, *WORDS, OUTPUT)
  stdout, stderr = process.communicate(timeout=120)
  assert process.returncode == 0, stderr
  outcomes = Outcomes.load(folder / 'my_network' / evaluation.FILE)
  return stdout, stderr, outcomes


@pytest.fixture
def run(folder, monkeypatch):
  """Runs the program in this process and returns its final message."""
  before = set(flags.FLAGS)
  evaluate.define_flags()
  monkeypatch.chdir(folder)

  def run(*words):
    flags.FLAGS(['evaluate', *words])
    try:
      command_line.call(evaluate.main, ['evaluate'])
    except SystemExit as left:
      return left.code  # A string: Python prints it and exits with 1.
    return None

  yield run
  sys.modules.pop('my_nets', None)
  for name in set(flags.FLAGS) - before:
    delattr(flags.FLAGS, name)


# ------------------------------------------------------------ what it does


def test_sigterm_saves_and_says_how_to_resume(interrupted):
  code, stdout, stderr, outcomes = interrupted
  assert code == 128 + signal.SIGTERM
  assert 'SIGTERM' in stdout
  assert 'same command' in stdout
  assert 'Traceback' not in stderr
  assert not outcomes.complete
  assert outcomes.tried.any()


def test_it_shows_progress_with_the_time_left(interrupted, evaluated):
  _, _, first, _ = interrupted
  _, second, _ = evaluated
  lines = second.splitlines()
  assert '100%' in lines[-1]
  assert any(line.startswith('after shrink:') for line in lines)
  for line in [*first.splitlines(), *lines]:
    assert 'pixel_linf' in line or line.startswith('after')
  assert ' left' in first + second


def test_it_ends_with_the_table_and_a_short_summary(folder, evaluated):
  stdout, _, outcomes = evaluated
  table, _, summary = stdout.strip().rpartition('\n\n')
  assert table.strip() == str(outcomes)
  *summary, html, markdown = summary.splitlines()
  assert 1 <= len(summary) <= 6
  assert max(map(len, stdout.splitlines())) <= 80
  assert [html, markdown] == [
    *('my_network/report.html', 'my_network/report.md')
  ]
  page = (folder / html).read_text()
  assert page.startswith('<!doctype html>')
  assert 'my_nets:logits_fn' in page
  union = f'{outcomes.accuracies()["union"]:.1f}'
  assert union in section((folder / markdown).read_text(), 'Verdict')
  assert union in summary[0]


def test_the_outcomes_are_those_of_the_network(folder, evaluated):
  *_, outcomes = evaluated
  with np.load(folder / 'test.npz') as file:
    images, labels = file['images'], file['labels']
  assert outcomes.complete
  assert outcomes.threats == ('pixel_linf',)
  assert outcomes.eps == 51 / 255
  assert outcomes.settings['protocol'] == 'fast'
  np.testing.assert_array_equal(outcomes.labels, labels)
  np.testing.assert_array_equal(outcomes.natural, np.arange(COUNT) > 0)
  # Under linf, the margins of a linear network are known.
  weights = np.random.default_rng(0).normal(size=(64, 3))
  logits = images.reshape(COUNT, -1) @ weights
  own = np.arange(COUNT), labels
  gaps = (logits[own][:, None] - logits) / np.maximum(
    np.abs(weights.T[labels][:, :, None] - weights).sum(axis=1), 1e-9
  )
  gaps[own] = np.inf
  far = gaps.min(axis=1) > 0.2  # For images without clipping.
  assert (outcomes.correct[0] >= far).all()
  assert 0.4 < outcomes.correct.mean() < 0.9


def test_a_finished_evaluation_is_not_made_again(folder, evaluated, run):
  path = folder / 'my_network' / evaluation.FILE
  before = path.read_bytes()
  began = time.monotonic()
  assert run(*WORDS, OUTPUT) is None
  assert time.monotonic() - began < 10
  assert path.read_bytes() == before


def test_interrupted_or_not_it_ends_with_the_same_bytes(folder, evaluated, run):
  """Also checks that a curve is saved in a subfolder."""
  words = [word for word in WORDS if 'curve' not in word]
  assert run(*words, '--curve_examples=40', '--output=at_once') is None
  at_once, resumed = (
    (folder / name / evaluation.FILE).read_bytes()
    for name in ('at_once', 'my_network')
  )
  assert at_once == resumed
  curve = Outcomes.load(folder / 'at_once' / 'curve' / evaluation.FILE)
  assert curve.settings['radii'] == list(evaluation.RADII)
  assert len(curve.labels) == 40
  assert 'Accuracy over the radius' in (
    (folder / 'at_once' / 'report.md').read_text()
  )


def test_a_network_with_parameters(folder, run, capsys):
  words = [word for word in WORDS if 'network' not in word]
  words += ['--network=my_nets:pair', '--protocol=paper', '--output=pair']
  assert run(*words, '--examples=40', '--l2=1') is None
  outcomes = Outcomes.load(folder / 'pair' / evaluation.FILE)
  assert outcomes.complete
  assert outcomes.threats == ('pixel_linf', 'pixel_l2')
  assert outcomes.settings['network'] == 'my_nets:pair'
  assert len(outcomes.labels) == 40
  assert str(outcomes) in capsys.readouterr().out


def test_every_core_is_used():
  """Checks that no import starts the devices, before a program does."""
  child = (
    'import jax; from mwrobust import evaluate, main; '
    'from mwrobust.runtime import devices; devices.use_all_cores(); '
    'print(jax.device_count())'
  )
  found = subprocess.run(
    [sys.executable, '-c', child],
    capture_output=True,
    text=True,
    cwd=ROOT,
    env=os.environ | {'XLA_FLAGS': ''},
    check=True,
  )
  cores = len(os.sched_getaffinity(0))
  assert int(found.stdout) == min(cores, 16)


# ------------------------------------------------------- what it does not do


def test_another_evaluation_is_not_mixed_with_it(folder, evaluated, run):
  path = folder / 'my_network' / evaluation.FILE
  before = path.read_bytes()
  message = run(*WORDS, OUTPUT, '--linf=0.1')
  assert 'threats.pixel_linf.eps: 0.2 there, 0.1 here' in message
  message = run(*WORDS, OUTPUT, '--seed=3')
  assert 'seed: 0 there, 3 here' in message
  assert path.read_bytes() == before


@pytest.mark.parametrize(
  'word',
  [
    '--network=my_nets',
    '--network=my_nets:',
    '--network=.my_nets:logits_fn',
    '--network=nowhere:logits_fn',
    '--network=my_nets:nothing',
    '--network=my_nets:number',
    '--network=my_nets:numbers',
    '--data=nowhere.npz',
    '--data=my_nets.py',
    '--data=text.npz',
    '--data=images.npy',
    '--data=no_images.npz',
    '--data=objects.npz',
    '--data=damaged.npz',
    '--data=.',
    '--examples=601',
    '--linf=-1',
    '--linf=0',
    '--spaces=pixel,fourier',
  ],
)
def test_a_bad_flag_is_named_in_one_line(word, folder, run):
  name, _, value = word.partition('=')
  message = run(*WORDS, '--output=refused', word)
  assert name in message
  assert value.rpartition(',')[2] in message
  assert '\n' not in message
  assert not (folder / 'refused').exists()


@pytest.mark.parametrize(
  ('word', 'field', 'value'),
  [
    ('--data=too_bright.npz', 'images', '[0, 2]'),
    ('--data=nchw.npz', 'images', '[600, 1, 8, 8]'),
    ('--data=nan.npz', 'images', 'NaN'),
    ('--data=empty.npz', 'images', 'empty'),
    ('--data=one_hot.npz', 'labels', '[600, 3]'),
    ('--data=column.npz', 'labels', '[:, 0]'),
    ('--data=one_label.npz', 'labels', '600'),
    ('--data=beyond.npz', 'labels', 'must lie in [0, 3)'),
    ('--network=my_nets:one_logit', 'logits_fn', '[2, 1]'),
    ('--network=my_nets:probabilities', 'logits_fn', 'softmax'),
    ('--network=my_nets:in_training', 'logits_fn', 'model.eval()'),
    ('--network=my_nets:with_numpy', 'logits_fn', 'use jax.numpy'),
    ('--spaces=pixel,pixel', '--spaces', 'pixel twice'),
    ('--spaces=', '--spaces', 'is empty'),
  ],
)
def test_bad_input_is_described_in_one_line(word, field, value, folder, run):
  message = run(*WORDS, '--output=refused', word)
  assert field in message
  assert value in message
  assert '\n' not in message
  assert not (folder / 'refused').exists()


@pytest.mark.parametrize(
  'word',
  [
    *('--examples=-1', '--batch_size=0', '--seed=-1', '--protocol=gauss'),
    *('--linf=', '--linf=abc', '--linf=8/0', '--linf=8/', '--linf=nan'),
    *('--linf=1e999', '--linf=0x10', '--l2=1/2/3', '--l1=inf'),
  ],
)
def test_what_is_no_number_or_out_of_bounds_is_refused(word, run):
  with pytest.raises(flags.IllegalFlagValueError, match=word):
    run(*WORDS, OUTPUT, word)


def test_an_output_that_cannot_be_written_is_named(run):
  message = run(*WORDS, '--output=test.npz/refused')
  assert 'test.npz/refused' in message
  assert 'another folder' in message


def test_the_help_shows_the_command_line_by_line():
  assert ':logits_fn \\\n' in evaluate.__doc__


def test_an_error_is_one_line_on_stderr(folder):
  process = start(folder, *WORDS, OUTPUT, '--linf=abc')
  stdout, stderr = process.communicate(timeout=120)
  assert process.returncode == 1
  assert stdout == ''
  assert len(stderr.splitlines()) == 1
  assert '--linf=abc' in stderr
