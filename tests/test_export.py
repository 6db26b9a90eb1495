"""What is exported is what was evaluated, to the bit."""

import hashlib
import json
import pathlib
import shutil
import subprocess
import sys

import flax.traverse_util
import jax
import numpy as np
import pytest
import safetensors.numpy
from test_report import copy_run, counts_of, ignore
from tiny_run import tiny

from mwrobust import datasets, models
from mwrobust.errors import UserError
from mwrobust.export import export

ROOT = pathlib.Path(__file__).parent.parent


def run_export(*words):
  return subprocess.run(
    [sys.executable, '-m', 'mwrobust.main', '--mode=export', *words],
    capture_output=True,
    text=True,
    cwd=ROOT,
    check=False,
  )


@pytest.fixture(scope='module')
def exported(tiny_run, tmp_path_factory):
  """A run that was exported, after it had moved; and what was said."""
  run = tmp_path_factory.mktemp('export') / 'run'
  shutil.copytree(tiny_run, run)
  return run, run_export(f'--workdir={run}')


@pytest.fixture(scope='module')
def data():
  return datasets.load('mnist5k', seed=0)


def card_of(run):
  return json.loads((run / 'export' / 'model.json').read_text())


def assert_same_logits(run, network, data):
  """Of the exported files, read without the run, and of the evaluation."""
  card = card_of(run)
  variables = flax.traverse_util.unflatten_dict(
    safetensors.numpy.load_file(run / 'export' / 'model.safetensors'), sep='/'
  )
  model = models.create(
    card['config']['model']['name'],
    num_classes=10,
    mean=card['input']['mean'],
    std=card['input']['std'],
    **card['config']['model']['options'],
  )

  @jax.jit
  def logits_of(images):
    return model.apply(variables, images.astype(np.float32) / 255, train=False)

  with np.load(run / 'eval' / f'{network.replace(" ", "_")}.npz') as arrays:
    expected = arrays['logits']
  # Up to rounding: they were evaluated on two devices.
  for first in (0, 10):
    rows = slice(first, first + 20)
    np.testing.assert_allclose(
      logits_of(data.test.images[rows]), expected[rows], 1e-4, atol=1e-6
    )


def test_two_files_are_written_and_told(exported):
  run, result = exported
  assert result.returncode == 0, result.stderr
  files = [
    run / 'export' / name for name in ('model.safetensors', 'model.json')
  ]
  assert result.stdout.splitlines() == [str(path) for path in files]
  assert sorted((run / 'export').iterdir()) == sorted(files)
  assert not (run / 'report.md').exists()


def test_the_files_are_all_it_takes(exported, data):
  run, _ = exported
  assert_same_logits(run, 'h=2 average', data)


def test_the_file_has_tensors_and_nothing_else(exported):
  """A header of JSON, then the numbers: there is no room for a pickle."""
  run, _ = exported
  content = (run / 'export' / 'model.safetensors').read_bytes()
  length = int.from_bytes(content[:8], 'little')
  header = json.loads(content[8 : 8 + length])
  header.pop('__metadata__', None)
  end = 0
  for tensor in sorted(header.values(), key=lambda t: t['data_offsets']):
    start, stop = tensor['data_offsets']
    assert tensor['dtype'] == 'F32'
    assert start == end
    assert stop - start == 4 * np.prod(tensor['shape'], dtype=int)
    end = stop
  assert len(content) == 8 + length + end
  assert all(name.startswith('params/') for name in header)


def test_the_card_says_what_it_is(exported, tiny_run):
  run, _ = exported
  card = card_of(run)
  assert card['network'] == 'h=2 average'
  assert card['outer_steps'] == [2, 3]
  assert card['preset'] == 'paper'
  assert card['config'] == json.loads((tiny_run / 'config.json').read_text())
  assert card['input']['shape'] == [28, 28, 1]
  assert card['input']['range'] == [0, 1]


def test_the_card_has_the_figures_of_the_evaluation(exported):
  run, _ = exported
  card = card_of(run)
  counts, images = counts_of(run / 'eval' / 'h=2_average.npz')
  assert (card['test_images'], card['starts']) == (images, 1) == (30, 1)
  assert card['accuracies'] == {
    row: pytest.approx(100 * count / images) for row, count in counts.items()
  }


def test_the_card_tells_the_data_by_checksum(exported, data):
  run, _ = exported
  used = {'train': 120, 'validation': 30, 'test': 30}
  assert card_of(run)['data_sha256'] == {
    name: {
      'images': hashlib.sha256(split.images[:count].tobytes()).hexdigest(),
      'labels': hashlib.sha256(split.labels[:count].tobytes()).hexdigest(),
    }
    for name, count in used.items()
    for split in [getattr(data, name)]
  }


def test_the_last_parameters_alone(tiny_run, tmp_path, data):
  run = copy_run(tiny_run, tmp_path / 'run', **{'train.h': 1})
  for path in (run / 'eval').glob('h=2*.npz'):
    path.unlink()
  export(tiny(**{'train.h': 1}), str(run), ignore)
  assert card_of(run)['network'] == 'h=1'
  assert card_of(run)['outer_steps'] == [3]
  assert_same_logits(run, 'h=1', data)


# ------------------------------------------------------ what cannot be exported


def assert_refused(config, run, message):
  with pytest.raises(UserError, match=message):
    export(config, str(run), ignore)
  assert not (run / 'export').exists()


def test_a_run_that_was_not_evaluated(tiny_run, tmp_path):
  run = copy_run(tiny_run, tmp_path / 'run')
  shutil.rmtree(run / 'eval')
  result = run_export(f'--workdir={run}')
  assert result.returncode == 1
  assert 'has no evaluation' in result.stderr
  assert f'--mode=eval --workdir={run}' in result.stderr
  assert 'Traceback' not in result.stderr
  assert not (run / 'export').exists()


def test_a_run_whose_evaluation_was_interrupted(tiny_run, tmp_path):
  run = copy_run(tiny_run, tmp_path / 'run')
  (run / 'eval' / 'h=2_average.npz').unlink()  # That of h=1 is there.
  assert_refused(tiny(), run, 'evaluat')


def test_a_run_that_was_trained_on_since(tiny_run, tmp_path):
  """The figures would be those of other parameters."""

  def alter(outcomes):
    steps = outcomes.settings['outer_steps']
    outcomes.settings['outer_steps'] = [t - 1 for t in steps]

  run = copy_run(tiny_run, tmp_path / 'run', alter)
  assert_refused(tiny(), run, 'evaluat')


def test_an_ensemble(tiny_run, tmp_path):
  run = copy_run(tiny_run, tmp_path / 'run', algorithm='ensemble')
  assert_refused(tiny(algorithm='ensemble'), run, 'returns many networks')


def test_another_config(tiny_run, tmp_path):
  run = copy_run(tiny_run, tmp_path / 'run')
  assert_refused(tiny(**{'train.T': 4}), run, r'train\.T: 3 there, 4 here')
  assert_refused(tiny(), tmp_path / 'nowhere', 'holds no run')


def test_other_settings_are_not_mixed_with_those_of_the_figures(
  tiny_run, tmp_path
):
  """Or the card has the images of one evaluation, the figures of another."""
  run = copy_run(tiny_run, tmp_path / 'run')
  try:
    export(tiny(**{'eval.examples': 12}), str(run), ignore)
  except UserError:
    return  # There is no such evaluation.
  card = card_of(run)
  assert card['config']['eval']['examples'] == card['test_images']
