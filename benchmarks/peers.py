"""Times other attack libraries and ours on the same network."""

import functools

import foolbox
import jax
import numpy as np

from benchmarks import timing
from benchmarks.networks import load
from mwrobust import attacks
from mwrobust.reporting.document import markdown_table

FOOLBOX = {
  'linf': foolbox.attacks.LinfPGD,
  'l2': foolbox.attacks.L2PGD,
  'l1': foolbox.attacks.L1PGD,
}


def time_peers(network: str, repeats: int):
  """Prints the time per step of every library for the pixel threats."""
  logits_fn, variables, images, labels, pairs = load(network)
  pairs = [pair for pair in pairs if pair[0].space == 'pixel']

  @functools.partial(jax.jit, static_argnums=1)
  def run(variables, pair, images):
    bound = functools.partial(logits_fn, variables)
    key = jax.random.key(0)
    return attacks.make_attack(*pair)(bound, key, images, labels)

  libraries = {
    'mwrobust': {
      pair[0].norm: functools.partial(run, variables, pair, images)
      for pair in pairs
    },
    'Foolbox, JAX': foolbox_attacks(
      # Without jit, Foolbox would dispatch the network op by op.
      foolbox.JAXModel(
        jax.jit(functools.partial(logits_fn, variables)), bounds=(0, 1)
      ),
      *(pairs, images, labels),
    ),
  }
  torch_networks = {'cnn': torch_cnn, 'resnet_v1_50': torch_resnet}
  try:
    import torch
  except ImportError:
    print('torch is not installed: skipping its libraries')
    torch_networks = {}
  if network in torch_networks:
    model = torch_networks[network](variables)
    inputs = torch.tensor(np.asarray(images).transpose(0, 3, 1, 2).copy())
    targets = torch.tensor(np.asarray(labels), dtype=torch.long)
    libraries['Foolbox, torch'] = foolbox_attacks(
      foolbox.PyTorchModel(model, bounds=(0, 1)), pairs, inputs, targets
    )
    libraries['torchattacks'] = torchattacks(model, pairs, inputs, targets)

  best = timing.interleaved(
    {
      (library, norm): function
      for library, functions in libraries.items()
      for norm, function in functions.items()
    },
    repeats,
  )
  rows = []
  for library in libraries:
    row = [library]
    for threat, attack in pairs:
      seconds = best.get((library, threat.norm))
      ours = best['mwrobust', threat.norm]
      row.append(f'{1e3 * seconds / attack.steps:.2f}' if seconds else '-')
      row.append(f'{seconds / ours:.2f}' if seconds else '-')
    rows.append(row)
  header = [f'{network}, batch {len(images)}']
  for threat, _ in pairs:
    header += [f'{threat.norm}, ms per step', 'over ours']
  print(f'\n{markdown_table(header, rows)}')


def foolbox_attacks(model, pairs, inputs, targets):
  """Returns Foolbox's attacks without its checks before and after."""
  criterion = foolbox.criteria.Misclassification(targets)

  def make(threat, steps):
    attack = FOOLBOX[threat.norm](
      steps=steps, rel_stepsize=2.5 / steps, random_start=True
    )

    def run():
      found = attack.run(model, inputs, criterion, epsilon=threat.eps)
      return found if isinstance(found, jax.Array) else None

    return run

  return {threat.norm: make(threat, ours.steps) for threat, ours in pairs}


def torchattacks(model, pairs, inputs, targets):
  """Returns the attacks of torchattacks, which has no l1."""
  try:
    import torchattacks
  except ImportError:
    print('torchattacks is not installed: skipping it')
    return {}
  kinds = {'linf': torchattacks.PGD, 'l2': torchattacks.PGDL2}

  def make(threat, steps):
    attack = kinds[threat.norm](
      model,
      eps=threat.eps,
      alpha=2.5 * threat.eps / steps,
      steps=steps,
      random_start=True,
    )

    def run():
      attack(inputs, targets)

    return run

  return {t.norm: make(t, a.steps) for t, a in pairs if t.norm in kinds}


def torch_cnn(variables):
  """Returns `models.create('cnn')` in torch with the same weights."""
  import torch

  params = jax.tree.map(np.asarray, variables['params'])

  def with_weights(layer, kernel, bias):
    layer.weight.data = torch.tensor(kernel.copy())
    layer.bias.data = torch.tensor(bias.copy())
    return layer

  class ToNHWC(torch.nn.Module):
    """Transposes to NHWC, which Flax flattens."""

    def forward(self, x):
      return x.permute(0, 2, 3, 1)

  layers = [_normalise()]
  for name in ('Conv_0', 'Conv_1'):
    kernel = params[name]['kernel'].transpose(3, 2, 0, 1)
    conv = torch.nn.Conv2d(kernel.shape[1], len(kernel), 4, 2, 1)
    layers += [
      with_weights(conv, kernel, params[name]['bias']),
      torch.nn.ReLU(),
    ]
  layers += [ToNHWC(), torch.nn.Flatten()]
  for name in ('Dense_0', 'Dense_1'):
    kernel = params[name]['kernel'].T
    dense = torch.nn.Linear(kernel.shape[1], len(kernel))
    layers += [
      with_weights(dense, kernel, params[name]['bias']),
      torch.nn.ReLU(),
    ]
  return torch.nn.Sequential(*layers[:-1]).eval().requires_grad_(False)


def torch_resnet(variables):
  """Returns `models.create('resnet_v1_50')` in torch with other weights."""
  del variables
  import torch
  from torch import nn

  class Block(nn.Module):
    def __init__(self, before, features):
      super().__init__()
      stride = 1 if before == features else 2
      self.layers = nn.Sequential(
        nn.Conv2d(before, features, 3, stride, 1),
        nn.BatchNorm2d(features),
        nn.ReLU(),
        nn.Conv2d(features, features, 3, 1, 1),
        nn.BatchNorm2d(features),
      )
      self.shortcut = (
        nn.Identity() if stride == 1 else nn.Conv2d(before, features, 1, stride)
      )

    def forward(self, x):
      return torch.relu(self.layers(x) + self.shortcut(x))

  layers = [
    *(_normalise(), nn.Conv2d(3, 16, 3, 1, 1)),
    *(nn.BatchNorm2d(16), nn.ReLU()),
  ]
  before = 16
  for features in (16, 32, 64):
    for _ in range(8):
      layers.append(Block(before, features))
      before = features
  layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
  return nn.Sequential(*layers).eval().requires_grad_(False)


def _normalise():
  import torch

  class Normalise(torch.nn.Module):
    def forward(self, x):
      return (x - 0.5) / 0.5

  return Normalise()
