"""Runs the README's Python blocks, and checks the names in its commands."""

import importlib
import pathlib
import re
import shlex

import equinox as eqx
import flax.linen as nn
import jax
import numpy as np
import pytest

from mwrobust import config as config_lib

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / 'README.md').read_text()
BLOCKS = re.findall(r'^```python\n(.*?)^```', README, re.M | re.S)
COMMANDS = [
  shlex.split(command, comments=True)
  for block in re.findall(r'^```bash\n(.*?)^```', README, re.M | re.S)
  for command in re.findall(r'python -m .*', block.replace('\\\n', ' '), re.M)
]
# The standard protocol, which both evaluations use, is tested elsewhere.
SHORT = 'protocol=[attacks.pgd(3)], progress=False'


class Linear(nn.Module):
  """Replaces the reader's network."""

  @nn.compact
  def __call__(self, images, train=False):
    return nn.Dense(4)(images.reshape(len(images), -1))


@pytest.fixture
def names():
  """Returns the names that the blocks assume."""
  images = np.random.default_rng(0).random((6, 8, 8, 3), np.float32)
  model, net = Linear(), eqx.nn.Linear(192, 4, key=jax.random.key(1))
  params = model.init(jax.random.key(0), images)
  return {
    'images': images,
    'labels': np.asarray(model.apply(params, images).argmax(axis=1), np.int32),
    'model': model,
    'params': params,
    'net': lambda image: net(image.reshape(-1)),
  }


def block_with(text):
  (block,) = (block for block in BLOCKS if text in block)
  return block


def test_how_robust_is_your_network(names, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  block = block_with('reporting.write')
  exec(block.replace('params=params', f'params=params, {SHORT}'), names)
  assert 'union' in capsys.readouterr().out
  assert (tmp_path / 'my_network' / 'report.html').exists()
  equinox = block_with('jax.vmap(net)')
  exec(equinox.replace('[pixels, dct]', f'[pixels, dct], {SHORT}'), names)
  assert names['outcomes'].threats == ('pixel_linf', 'dct_linf')


def test_attacks_as_functions(names):
  exec(block_with('make_switch'), names)
  key, batch = jax.random.key(0), (names['images'], names['labels'])
  found = names['perturb'](names['params'], key, *batch)
  assert found.shape == names['images'].shape


def test_networks_are_loaded_as_printed():
  exported = ROOT / 'results' / 'networks' / 'balanced_multiplicative_weights'
  names = {'images': np.zeros((2, 28, 28, 1), np.float32)}
  block = block_with('networks.load').replace('RUN/export/model', str(exported))
  exec(block, names)
  assert names['logits'].shape == (2, names['card']['classes'])


@pytest.mark.parametrize('command', COMMANDS, ids=' '.join)
def test_commands_name_what_is_there(command):
  _, _, module, *words = command
  path = ROOT.joinpath(*module.split('.')).with_suffix('.py')
  shared = path.parent / {'launch': 'commands.py'}.get(
    path.parent.name, 'command_line.py'
  )
  source = path.read_text() + shared.read_text()
  for word in words:
    if not (flag := re.match(r'--([\w.]+)=?(.*)', word)):
      continue
    name, value = flag.groups()
    if value == '...':
      continue
    if name == 'config':
      file, _, variants = value.partition(':')
      config_name = file.removesuffix('.py').replace('/', '.')
      importlib.import_module(config_name).get_config(variants)
    elif name.startswith('config.'):
      config_lib.check_field(name.removeprefix('config.'))
    else:
      assert re.search(rf"'{name}'|\b{name}:", source), word


def test_it_is_short():
  assert len(README.splitlines()) <= 250
