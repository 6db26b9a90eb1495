"""Runs other libraries' AutoAttack on a network, for comparison with ours.

```bash
python benchmarks/strength_peers.py --network=network.npz --images=images.npz \
  --norms=linf,l2,l1 --eps=0.3,2,10 --autoattack=/path/to/auto-attack \
  --output=peers.json
```

It needs torch and torchattacks, but neither jax nor mwrobust, so that it can
run in its own environment. torchattacks has no l1. For that norm, and for the
norms in `--autoattack_for`, clone https://github.com/fra31/auto-attack and name
the folder in `--autoattack`.

Both libraries run the settings of AutoAttack's `standard` version: APGD-CE,
APGD-T, FAB-T and Square, each on the images that survived the ones before. An
adversarial image counts only if it is in the ball and misclassified after a
clip to [0, 1], whatever the library reports. The output is rewritten after
every attack.
"""

import hashlib
import json
import os
import pathlib
import sys
import time

import numpy as np
import torch
import torchattacks
from absl import app, flags

NETWORK = flags.DEFINE_string(
  'network',
  None,
  'A CNN of benchmarks/strength_networks.py: arrays params/Conv_0/kernel and '
  'so on, mean and std.',
  required=True,
)
IMAGES = flags.DEFINE_string(
  'images',
  None,
  'An npz file with images, float32 [N, H, W, C] in [0, 1], and labels.',
  required=True,
)
NORMS = flags.DEFINE_list('norms', ['linf', 'l2', 'l1'], 'The norms to attack.')
EPS = flags.DEFINE_list('eps', ['0.3', '2', '10'], 'The radius of each norm.')
AUTOATTACK = flags.DEFINE_string(
  'autoattack', None, 'A clone of fra31/auto-attack.'
)
AUTOATTACK_FOR = flags.DEFINE_list(
  'autoattack_for', ['l1'], 'The norms to attack with the original AutoAttack.'
)
MEAN = flags.DEFINE_float('mean', None, 'If the network file has no mean.')
STD = flags.DEFINE_float('std', None, 'If the network file has no std.')
BATCH_SIZE = flags.DEFINE_integer('batch_size', 250, 'Images per batch.')
SEED = flags.DEFINE_integer('seed', 0, 'The seed of every attack.')
THREADS = flags.DEFINE_integer('threads', 1, 'The number of CPU threads.')
OUTPUT = flags.DEFINE_string('output', None, 'A JSON file.', required=True)

NAMES = {'linf': 'Linf', 'l2': 'L2', 'l1': 'L1'}
# Allows for rounding errors of the libraries' projections, relative to eps.
TOLERANCE = 1e-4


class Normalise(torch.nn.Module):
  """Computes (x - mean) / std."""

  def __init__(self, mean, std):
    super().__init__()
    self.register_buffer('mean', per_channel(mean))
    self.register_buffer('std', per_channel(std))

  def forward(self, x):
    """Normalises [B, C, H, W]."""
    return (x - self.mean) / self.std


def per_channel(values) -> torch.Tensor:
  """Returns a number or an array [C] as [1, C or 1, 1, 1]."""
  return torch.tensor(np.asarray(values, np.float32).reshape(1, -1, 1, 1))


def load_network(path, mean=None, std=None) -> torch.nn.Module:
  """Loads a CNN with the weights of a Flax one, for images in NCHW."""
  arrays = dict(np.load(path))
  mean = arrays.get('mean', mean)
  std = arrays.get('std', std)
  if mean is None or std is None:
    raise app.UsageError(f'{path} has no mean and std: pass --mean and --std')

  def parameter(array):
    return torch.nn.Parameter(
      torch.tensor(np.ascontiguousarray(array, np.float32)), requires_grad=False
    )

  layers = [Normalise(mean, std)]
  for name in ('Conv_0', 'Conv_1'):
    kernel = arrays[f'params/{name}/kernel'].transpose(3, 2, 0, 1)
    features, channels, *size = kernel.shape
    conv = torch.nn.Conv2d(channels, features, size, stride=2, padding=1)
    conv.weight = parameter(kernel)
    conv.bias = parameter(arrays[f'params/{name}/bias'])
    layers += [conv, torch.nn.ReLU()]
  layers.append(torch.nn.Flatten())
  for name in ('Dense_0', 'Dense_1'):
    kernel = arrays[f'params/{name}/kernel']
    if name == 'Dense_0':
      # Flax flattens NHWC, torch NCHW: reorder the rows of the matrix.
      side = round((len(kernel) / features) ** 0.5)
      kernel = kernel.reshape(side, side, features, -1).transpose(2, 0, 1, 3)
      kernel = kernel.reshape(side * side * features, -1)
    dense = torch.nn.Linear(*kernel.shape)
    dense.weight = parameter(kernel.T)
    dense.bias = parameter(arrays[f'params/{name}/bias'])
    layers += [dense, torch.nn.ReLU()]
  return torch.nn.Sequential(*layers[:-1]).eval()


def torchattacks_attacks(network, norm, eps, classes, seed):
  """Returns torchattacks' versions of AutoAttack's attacks, by name."""
  # Its own AutoAttack class takes 10 steps instead of the original's 100, and
  # rescales Square's schedule, unlike the original.
  settings = {'norm': NAMES[norm], 'eps': eps, 'seed': seed}
  return {
    'APGD-CE': torchattacks.APGD(network, steps=100, loss='ce', **settings),
    'APGD-T': torchattacks.APGDT(
      network, steps=100, n_classes=classes, **settings
    ),
    'FAB-T': torchattacks.FAB(
      network, steps=100, n_classes=classes, multi_targeted=True, **settings
    ),
    'Square': torchattacks.Square(
      network, n_queries=5000, resc_schedule=False, **settings
    ),
  }


def original_attacks(network, norm, eps, seed):
  """Returns the attacks of the original AutoAttack, by name."""
  from autoattack import AutoAttack

  # `standard` sets everything: for l1 APGD-CE has 5 restarts, APGD-T 5 targets,
  # and both start from larger radii.
  attacks = AutoAttack(
    network,
    norm=NAMES[norm],
    eps=eps,
    seed=seed,
    version='standard',
    device='cpu',
    verbose=False,
  )
  attacks.apgd.loss = 'ce'
  attacks.fab.targeted = True
  return {
    'APGD-CE': attacks.apgd.perturb,
    'APGD-T': attacks.apgd_targeted.perturb,
    'FAB-T': attacks.fab.perturb,
    'Square': attacks.square.perturb,
  }


def distance(difference, norm):
  """Returns the norm of each example, [B]."""
  order = {'linf': float('inf'), 'l2': 2, 'l1': 1}[norm]
  # In float64, because a float32 sum of 784 squares is not exact to 1e-4.
  return torch.linalg.vector_norm(difference.flatten(1).double(), order, dim=1)


@torch.no_grad()
def judge(network, images, labels, adversarial, norm, eps):
  """Returns which images are broken, and which only outside the threat."""
  # Comparisons with NaN are False, so a NaN breaks nothing.
  clipped = adversarial.clamp(0, 1)
  inside = distance(clipped - images, norm) <= eps * (1 + TOLERANCE)
  wrong = network(clipped).argmax(1) != labels
  outside = (network(adversarial).argmax(1) != labels) & ~(inside & wrong)
  return inside & wrong, outside


def run_attack(attack, network, images, labels, norm, eps, batch_size):
  """Attacks the images in batches and returns the results of `judge`."""
  broken, outside = [], []
  for start in range(0, len(images), batch_size):
    rows = slice(start, start + batch_size)
    adversarial = attack(images[rows].clone(), labels[rows].clone())
    verdict = judge(
      network, images[rows], labels[rows], adversarial.detach(), norm, eps
    )
    broken.append(verdict[0].numpy())
    outside.append(verdict[1].numpy())
  return np.concatenate(broken), np.concatenate(outside)


def digest(folder) -> str:
  """Returns a digest of the original, which has no version number."""
  files = sorted(pathlib.Path(folder, 'autoattack').glob('*.py'))
  content = b''.join(file.read_bytes() for file in files)
  return hashlib.sha256(content).hexdigest()[:12]


def main(argv):
  """Runs the attacks and writes the result."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments: {argv[1:]}')
  radii = dict(zip(NORMS.value, map(float, EPS.value), strict=True))
  original = {'l1', *AUTOATTACK_FOR.value} & set(radii)
  versions = {
    'torch': torch.__version__,
    'torchattacks': torchattacks.__version__,
    'numpy': np.__version__,
  }
  if original:
    if not AUTOATTACK.value:
      raise app.UsageError(f'{sorted(original)} need --autoattack')
    sys.path.insert(0, AUTOATTACK.value)
    versions['autoattack'] = f'sha256 {digest(AUTOATTACK.value)}'
  output = pathlib.Path(OUTPUT.value)
  output.parent.mkdir(parents=True, exist_ok=True)
  torch.set_num_threads(THREADS.value)

  network = load_network(NETWORK.value, MEAN.value, STD.value)
  data = np.load(IMAGES.value)
  images = torch.tensor(data['images'].transpose(0, 3, 1, 2).copy())
  labels = torch.tensor(data['labels'].astype(np.int64))
  with torch.no_grad():
    logits = network(images)
  natural = (logits.argmax(1) == labels).numpy()
  result = {
    'network': os.path.basename(NETWORK.value),
    'images': len(images),
    'natural': round(100 * float(natural.mean()), 4),
    'seed': SEED.value,
    'batch_size': BATCH_SIZE.value,
    'threads': THREADS.value,
    'versions': versions,
    'norms': {},
  }

  for norm, eps in radii.items():
    if norm in original:
      attacks = original_attacks(network, norm, eps, SEED.value)
    else:
      attacks = torchattacks_attacks(
        network, norm, eps, logits.shape[1], SEED.value
      )
    standing = natural.copy()
    fooled_by = [None if correct else 'natural' for correct in natural]
    entry = {
      'eps': eps,
      'library': 'autoattack' if norm in original else 'torchattacks',
      'attacks': [],
      'fooled_by': fooled_by,
    }
    result['norms'][norm] = entry
    for name, attack in attacks.items():
      rows = np.flatnonzero(standing)
      outside = np.zeros(0, bool)
      start, cpu_start = time.perf_counter(), time.process_time()
      if len(rows):
        broken, outside = run_attack(
          attack, network, images[rows], labels[rows], norm, eps,
          BATCH_SIZE.value,
        )  # fmt: skip
        standing[rows[broken]] = False
        for row in rows[broken]:
          fooled_by[row] = name
      entry['attacks'].append(
        {
          'attack': name,
          'accuracy': round(100 * float(standing.mean()), 4),
          'seconds': round(time.perf_counter() - start, 2),
          # The fairer time if other processes share the cores.
          'cpu_seconds': round(time.process_time() - cpu_start, 2),
          'attacked': len(rows),
          # Misclassified but outside the ball or the box: not counted.
          'outside': int(outside.sum()),
        }
      )
      output.write_text(json.dumps(result, indent=1))
      print(norm, eps, entry['library'], entry['attacks'][-1], flush=True)


if __name__ == '__main__':
  app.run(main)
