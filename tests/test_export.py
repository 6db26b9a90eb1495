"""Tests that the exported network is the evaluated one, bit for bit."""

import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from made import SIX, copy_run, evaluations_of, ignore, remove_evaluations
from tiny_run import tiny

from mwrobust import data as data_lib
from mwrobust import models, networks
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
  """Returns a run that was moved and exported, and the printed text."""
  run = tmp_path_factory.mktemp('export') / 'run'
  shutil.copytree(tiny_run, run)
  return run, run_export(f'--workdir={run}')


@pytest.fixture(scope='module')
def data():
  return data_lib.load('mnist5k', seed=0)


def card_of(run):
  return json.loads((run / 'export' / 'model.json').read_text())


def assert_same_logits(run, network, data, monkeypatch):
  """Reads the exported files without the run, as the README says."""
  blocks = re.findall(
    r'^```python\n(.*?)^```', (ROOT / 'README.md').read_text(), re.M | re.S
  )
  (block,) = (block for block in blocks if 'RUN/export' in block)
  monkeypatch.chdir(run.parent)
  names = {'images': data.test.images[:30].astype(np.float32) / 255}
  exec(block.replace('RUN/', f'{run.name}/'), names)
  # Up to rounding: they were evaluated on two devices, in other batches.
  expected = evaluations_of(run)[network, 'paper'].logits
  np.testing.assert_allclose(names['logits'], expected, 1e-4, atol=1e-6)


def test_two_files_are_written_and_said(exported):
  run, result = exported
  assert result.returncode == 0, result.stderr
  files = [
    run / 'export' / name for name in ('model.safetensors', 'model.json')
  ]
  assert result.stdout.splitlines() == [str(path) for path in files]
  assert sorted((run / 'export').iterdir()) == sorted(files)
  assert not (run / 'report.md').exists()


def test_the_files_are_all_it_takes(exported, data, monkeypatch):
  run, _ = exported
  assert_same_logits(run, 'h=2 average', data, monkeypatch)


def test_the_file_has_tensors_and_nothing_else(exported):
  """Checks that a file is a JSON header and numbers, without a pickle."""
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
  assert card['classes'] == 10


def test_the_card_has_the_figures_of_every_protocol(tiny_run, tmp_path):
  """Checks that 'standard' is first, whatever the names of the folders."""
  run = copy_run(tiny_run, tmp_path / 'run')

  def alter(outcomes):
    outcomes.settings['protocol'] = 'standard'
    outcomes.fell[:, :20] = 0

  others = copy_run(tiny_run, tmp_path / 'other', alter)
  for folder in (others / 'eval').iterdir():
    folder.rename(run / 'eval' / f'z{folder.name}')
  export(tiny(), str(run), ignore)
  found = card_of(run)['evaluations']
  assert [each['protocol'] for each in found] == ['standard', 'paper']
  for each in found:
    outcomes = evaluations_of(run)['h=2 average', each['protocol']]
    natural = outcomes.logits.argmax(axis=1) == outcomes.labels
    stands = natural & (outcomes.fell == -1)
    threats = outcomes.settings['threats']
    assert each['accuracies'] == {
      threat['name']: pytest.approx(100 * row.mean())
      for threat, row in zip(threats, stands, strict=True)
    } | {
      'min': pytest.approx(100 * stands.mean(axis=1).min()),
      'union': pytest.approx(100 * stands.all(axis=0).mean()),
      'natural': pytest.approx(100 * natural.mean()),
    }
    assert each['union'] == each['accuracies']['union']
    assert each['test_images'] == 30
    assert [(t['name'], t['norm'], t['eps']) for t in each['threats']] == [
      (t['name'], t['norm'], t['eps']) for t in threats
    ]


def test_the_card_identifies_the_data_by_checksum(exported, data):
  run, _ = exported
  card = card_of(run)
  assert card['data_sha256'] == {
    name: {
      'images': hashlib.sha256(split.images[:count].tobytes()).hexdigest(),
      'labels': hashlib.sha256(split.labels[:count].tobytes()).hexdigest(),
    }
    for name, count in (('train', 120), ('validation', 30))
    for split in [getattr(data, name)]
  }
  images, labels = (array[:30] for array in data.test)
  content = images.tobytes() + labels.astype(np.int32).tobytes()
  for each in card['evaluations']:
    assert each['test_sha256'] == hashlib.sha256(content).hexdigest()


def test_the_last_parameters_alone(tiny_run, tmp_path, data, monkeypatch):
  def alter(outcomes):
    outcomes.settings['is_output'] = outcomes.settings['network'] == 'h=1'

  run = copy_run(tiny_run, tmp_path / 'run', alter, **{'train.h': 1})
  remove_evaluations(run, lambda settings: not settings['is_output'])
  export(tiny(**{'train.h': 1}), str(run), ignore)
  assert card_of(run)['network'] == 'h=1'
  assert card_of(run)['outer_steps'] == [3]
  assert_same_logits(run, 'h=1', data, monkeypatch)


# ------------------------------------------------------------- networks to load


def test_a_network_is_loaded_and_attacked_without_orbax(exported, tmp_path):
  run, _ = exported
  (tmp_path / 'attack.py').write_text(
    f"""
import sys
sys.modules['orbax.checkpoint'] = None
import numpy as np
from mwrobust import attacks, evaluation, networks
logits_fn, params, card = networks.load({str(run / 'export' / 'model')!r})
images = np.random.default_rng(0).uniform(size=(4, 28, 28, 1))
outcomes = evaluation.evaluate(
  logits_fn,
  images.astype(np.float32),
  np.arange(4),
  [attacks.Threat(**threat) for threat in card['evaluations'][0]['threats']],
  params=params,
  protocol=[attacks.pgd(2)],
)
print(sorted(outcomes.accuracies()))
"""
  )
  result = subprocess.run(
    [sys.executable, 'attack.py'],
    capture_output=True,
    text=True,
    cwd=tmp_path,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    check=False,
  )
  assert result.returncode == 0, result.stderr
  for name in (*SIX, 'min', 'union', 'natural'):
    assert repr(name) in result.stdout


def test_a_network_of_ones_own_comes_back_to_the_bit(tmp_path, monkeypatch):
  (tmp_path / 'nets_to_load.py').write_text(
    """
import flax.linen as nn

class Net(nn.Module):
  num_classes: int
  widths: tuple[int, ...]

  @nn.compact
  def __call__(self, x, train):
    x = x.reshape(len(x), -1)
    for width in self.widths:
      x = nn.relu(nn.BatchNorm(not train)(nn.Dense(width)(x)))
    return nn.Dense(self.num_classes)(x)
"""
  )
  monkeypatch.chdir(tmp_path)
  options = {'widths': [3, 4]}
  spec = {'mean': [0.5], 'std': [0.25]}
  name = 'nets_to_load:Net'
  model = models.create(name, num_classes=5, **spec, **options)
  images = jax.random.uniform(jax.random.key(0), (2, 6, 6, 1))
  variables = model.init(jax.random.key(1), images, train=False)
  card = {
    'config': {'model': {'name': name, 'options': options}},
    'input': spec,
    'classes': 5,
  }
  for path in networks.save('some/net.v2', variables, card):
    assert path.exists()
  with pytest.raises(UserError, match=r'net\.v2\.json is of nets_to_load:Net'):
    networks.load('some/net.v2')  # A card never decides what is imported.
  import nets_to_load

  logits_fn, params, loaded = networks.load('some/net.v2', nets_to_load.Net)
  assert loaded == card
  jax.tree.map(np.testing.assert_array_equal, params, variables)
  np.testing.assert_array_equal(
    logits_fn(params, images), model.apply(variables, images, train=False)
  )
  with pytest.raises(UserError, match=r'no net\.safetensors'):
    networks.load('net')
  for name, contents in {
    'net.v2.safetensors': [b'', b'no tensors'],
    'net.v2.json': [b'', b'{"config"', b'\xff', b'[]', b'{"config": {}}'],
  }.items():
    for content in contents:
      (tmp_path / 'some' / name).write_bytes(content)
      with pytest.raises(UserError, match=re.escape(f'some/{name}')):
        networks.load('some/net.v2', nets_to_load.Net)


# ------------------------------------------------------ what cannot be exported


def assert_refused(config, run, message):
  with pytest.raises(UserError, match=re.escape(message)):
    export(config, str(run), ignore)
  assert not (run / 'export').exists()


def test_a_run_that_was_not_evaluated(tiny_run, tmp_path):
  run = copy_run(tiny_run, tmp_path / 'run')
  shutil.rmtree(run / 'eval')
  result = run_export(f'--workdir={run}')
  assert result.returncode == 1
  assert f'--mode=eval --workdir={run}' in result.stderr
  assert 'Traceback' not in result.stderr
  assert not (run / 'export').exists()


def test_a_run_whose_evaluation_was_interrupted(tiny_run, tmp_path):
  """Refuses if the output is not evaluated, or only in part."""
  run = copy_run(tiny_run, tmp_path / 'run')
  remove_evaluations(run, lambda settings: settings['is_output'])
  assert_refused(tiny(), run, f'--mode=eval --workdir={run}')

  def alter(outcomes):
    if outcomes.settings['is_output']:
      # The last image has not been attacked yet.
      outcomes.logits[-1] = np.eye(10)[outcomes.labels[-1]]
      outcomes.fell[:, -1] = -1
      outcomes.tried[:, -1] = 0

  run = copy_run(tiny_run, tmp_path / 'begun', alter)
  assert_refused(tiny(), run, f'--mode=eval --workdir={run}')


def test_a_run_that_was_trained_on_since(tiny_run, tmp_path):
  """Refuses if the figures belong to other parameters."""

  def alter(outcomes):
    steps = outcomes.settings['outer_steps']
    outcomes.settings['outer_steps'] = [t - 1 for t in steps]

  run = copy_run(tiny_run, tmp_path / 'run', alter)
  assert_refused(tiny(), run, f'--mode=eval --workdir={run}')


def test_an_ensemble(tiny_run, tmp_path):
  run = copy_run(tiny_run, tmp_path / 'run', algorithm='ensemble')
  assert_refused(tiny(algorithm='ensemble'), run, "algorithm = 'ensemble'")


def test_another_config(tiny_run, tmp_path):
  run = copy_run(tiny_run, tmp_path / 'run')
  assert_refused(tiny(**{'train.T': 4}), run, 'train.T: 3 there, 4 here')
  assert_refused(tiny(), tmp_path / 'nowhere', 'config.json')


def test_the_card_has_the_config_of_the_run(tiny_run, tmp_path):
  """Exports the config of the run, not other fields of `eval`."""
  run = copy_run(tiny_run, tmp_path / 'run')
  export(tiny(**{'eval.examples': 12}), str(run), ignore)
  card = card_of(run)
  assert card['config']['eval']['examples'] == 30
  assert [each['test_images'] for each in card['evaluations']] == [30]
