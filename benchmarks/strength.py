"""How strong the attacks are: ours beside the peers', attack by attack.

  python -m benchmarks.strength_networks --data=DIR --output=NETWORKS
  python benchmarks/strength_peers.py ... --output=PEERS/linf.json
  python -m benchmarks.strength --data=DIR --networks=NETWORKS --peers=PEERS

Attacks every network NETWORKS/NAME.npz that is in `RADII` with AutoAttack's
order, each attack on what the ones before left, and prints the accuracy after
each, with the peers' from PEERS/NAME.json beside it where that exists. The
first test images of MNIST. All CPU cores are used, each for a part of a batch.
"""

import json
import os
import pathlib
import platform
import time

if 'XLA_FLAGS' not in os.environ:  # Before jax looks at it.
  cores = len(os.sched_getaffinity(0))
  os.environ['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={cores}'

import jax
import numpy as np
from absl import app, flags

from benchmarks import networks
from mwrobust import attacks, evaluation
from mwrobust import data as data_lib
from mwrobust.reporting.document import markdown_table

# linf, l2 and l1. Of first_edition also dct linf, in which it has nothing.
RADII = {
  'natural': (0.05, 1.0, 5.0),
  'linf': (0.3, 2.0, 10.0),
  'l2': (0.15, 1.5, 10.0),
  'masked': (0.3, 2.0, 10.0),
  'first_edition': (0.4, 1.0, 5.0),
}

_DATA = flags.DEFINE_string(
  'data', None, 'The folder of the MNIST files, *-ubyte.gz.', required=True
)
_NETWORKS = flags.DEFINE_string(
  'networks', None, 'The folder of the networks.', required=True
)
_PEERS = flags.DEFINE_string('peers', None, "The folder of the peers' figures.")
_ONLY = flags.DEFINE_list('only', list(RADII), 'Which networks to attack.')
_SPACES = flags.DEFINE_list('spaces', ['pixel'], 'In which spaces.')
_NORMS = flags.DEFINE_list('norms', ['linf', 'l2', 'l1'], 'Under which norms.')
_EXAMPLES = flags.DEFINE_integer('examples', 200, 'How many test images.')
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 100, 'Images per batch.')
_OUTPUT = flags.DEFINE_string('output', None, 'A JSON file for the figures.')


def attack_network(logits_fn, variables, data, threat, batch_size):
  """Returns the accuracy and the seconds of each attack, with compilation."""
  seconds, last = {}, time.perf_counter()

  def on_batch(outcomes):
    nonlocal last
    now = time.perf_counter()
    stage = int(np.flatnonzero(outcomes.spent.sum(axis=(0, 2)))[-1])
    seconds[stage] = seconds.get(stage, 0.0) + now - last
    last = now

  outcomes = evaluation.evaluate(
    logits_fn,
    *data,
    threat,
    params=variables,
    batch_size=batch_size,
    progress=False,
    on_batch=on_batch,
  )
  return [
    {
      'attack': name,
      'accuracy': outcomes.accuracies_after(stage)[threat.name],
      'seconds': seconds.get(stage, 0.0),
    }
    for stage, name in enumerate(outcomes.attacks)
  ]


def peers_rows(name: str, threat: attacks.Threat) -> list[dict]:
  """Returns the peers' figures for the same threat, or nothing."""
  path = pathlib.Path(_PEERS.value or '', f'{name}.json')
  if not _PEERS.value or threat.space != 'pixel' or not path.exists():
    return []
  found = json.loads(path.read_text())['norms'].get(threat.norm)
  same = found and np.isclose(found['eps'], threat.eps)
  return found['attacks'] if same else []


def main(argv):
  """Attacks the networks and prints the table."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments: {argv[1:]}')
  images, labels = data_lib.load('mnist', directory=_DATA.value, seed=0).test
  count = _EXAMPLES.value
  data = images[:count], labels[:count]
  print(
    f'jax {jax.__version__}, Python {platform.python_version()}, '
    f'{jax.device_count()} {jax.default_backend()} devices; the first {count} '
    'test images of MNIST\n'
  )
  rows, figures = [], {}
  for name in _ONLY.value:
    logits_fn, variables = networks.load_trained(
      pathlib.Path(_NETWORKS.value, f'{name}.npz')
    )
    eps = dict(zip(('linf', 'l2', 'l1'), RADII[name], strict=True))
    for space in _SPACES.value:
      for norm in _NORMS.value:
        threat = attacks.Threat(space=space, norm=norm, eps=eps[norm])
        ours = attack_network(
          logits_fn, variables, data, threat, _BATCH_SIZE.value
        )
        theirs = peers_rows(name, threat)
        figures.setdefault(name, {})[threat.name] = {
          'eps': threat.eps, 'ours': ours, 'peers': theirs,
        }  # fmt: skip
        for who, found in (('ours', ours), ('peers', theirs)):
          if found:
            row = [f'{a["accuracy"]:.1f} ({a["seconds"]:.0f} s)' for a in found]
            rows.append([name, f'{threat.name} {threat.eps:g}', who, *row])
            print(*rows[-1], sep=' | ', flush=True)
        if _OUTPUT.value:
          pathlib.Path(_OUTPUT.value).write_text(json.dumps(figures, indent=1))
  header = ['network', 'threat', '', 'APGD-CE', 'APGD-T', 'FAB-T', 'Square']
  print(f'\n{markdown_table(header, rows)}')


if __name__ == '__main__':
  app.run(main)
