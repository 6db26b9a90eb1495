"""Compares the strength of our attacks with that of the peers.

  python -m benchmarks.strength_networks --data=DIR --output=NETWORKS
  python benchmarks/strength_peers.py ... --output=PEERS/linf.json
  python -m benchmarks.strength --data=DIR --networks=NETWORKS --peers=PEERS

Attacks every network NETWORKS/NAME.npz of `RADII` with AutoAttack's attacks in
order, each on the images that survived the ones before, on the first test
images of MNIST. Prints the accuracy after each and, if PEERS/NAME.json exists,
the peers' accuracy and how many times faster ours is. It uses all CPU cores,
each for a part of a batch; give the peers as many with `--threads`.

Every attack runs twice: first to compile, then, with the programs in a cache,
to measure the seconds. `--autoattack_starts` gives APGD-CE as many starts as
AutoAttack has and leaves out `shrink`, for a comparison at equal work.
"""

import json
import os
import pathlib
import tempfile
import time

if 'XLA_FLAGS' not in os.environ:  # Before jax reads it.
  cores = len(os.sched_getaffinity(0))
  os.environ['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={cores}'

import jax
import numpy as np
from absl import app, flags

from benchmarks import networks, timing
from mwrobust import attacks, evaluation
from mwrobust import data as data_lib
from mwrobust.evaluation.protocols import PROTOCOLS
from mwrobust.reporting.document import markdown_table

# Radii of linf, l2 and l1. Attack first_edition also with --spaces=dct
# --norms=linf, where it is not robust at all.
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
_SPACES = flags.DEFINE_list('spaces', ['pixel'], 'The spaces to attack in.')
_NORMS = flags.DEFINE_list('norms', ['linf', 'l2', 'l1'], 'The norms.')
_EXAMPLES = flags.DEFINE_integer('examples', 200, 'The number of test images.')
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 100, 'Images per batch.')
_AUTOATTACK_STARTS = flags.DEFINE_bool(
  'autoattack_starts', False, 'The attacks and starts of AutoAttack alone.'
)
_OUTPUT = flags.DEFINE_string('output', None, 'A JSON file for the figures.')


def protocol(norm: str):
  """Returns the attacks for a norm, in order."""
  stages = PROTOCOLS['standard'](norm, 9)
  if _AUTOATTACK_STARTS.value:
    del stages['shrink']  # AutoAttack has nothing like it.
    stages['apgd-ce'] = attacks.apgd(100, restarts=5 if norm == 'l1' else 1)
  return stages


def attack_network(logits_fn, variables, data, threat, batch_size):
  """Returns the accuracy after each attack, and its seconds."""
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
    protocol=protocol(threat.norm),
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


def cells(ours: list[dict], theirs: list[dict]) -> list[list[str]]:
  """Returns the cells of ours, of the peers and of the speedup."""
  names = [attack['attack'] for attack in ours]

  def times(found):
    each = [attack['seconds'] for attack in found]
    return [*each, sum(each)]

  def row(found):
    accuracies = [f'{attack["accuracy"]:.1f}' for attack in found]
    return [
      f'{accuracy} ({seconds:.1f} s)'
      for accuracy, seconds in zip(
        [*accuracies, accuracies[-1]], times(found), strict=True
      )
    ]

  if not theirs:
    return [['ours', *row(ours)]]
  # The peers lack `shrink`.
  lacking = [i for i, name in enumerate(names) if name == 'shrink']
  mine, others, peers = times(ours), times(theirs), row(theirs)
  for i in lacking:
    others.insert(i, 0.0)
    peers.insert(i, '-')
  ratios = [
    f'{b / a:.2f}' if a and b else '-'
    for a, b in zip(mine, others, strict=True)
  ]
  return [
    ['ours', *row(ours)],
    ['peers', *peers],
    ['times faster', *ratios],
  ]


def peers_rows(name: str, threat: attacks.Threat) -> list[dict]:
  """Returns the peers' figures for the same threat, or []."""
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
  print(f'{timing.setting()}; the first {count} test images of MNIST\n')
  # Keeps compiled programs from the first run to the second.
  jax.config.update('jax_compilation_cache_dir', tempfile.mkdtemp())
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  rows, figures = [], {}
  for name in _ONLY.value:
    logits_fn, variables = networks.load_trained(
      pathlib.Path(_NETWORKS.value, f'{name}.npz')
    )
    eps = dict(zip(('linf', 'l2', 'l1'), RADII[name], strict=True))
    for space in _SPACES.value:
      for norm in _NORMS.value:
        threat = attacks.Threat(space=space, norm=norm, eps=eps[norm])
        start = time.perf_counter()
        args = logits_fn, variables, data, threat, _BATCH_SIZE.value
        attack_network(*args)
        compiling = time.perf_counter() - start
        ours = attack_network(*args)
        compiling -= sum(attack['seconds'] for attack in ours)
        theirs = peers_rows(name, threat)
        figures.setdefault(name, {})[threat.name] = {
          'eps': threat.eps, 'ours': ours, 'peers': theirs,
          'compiling': compiling,
        }  # fmt: skip
        for row in cells(ours, theirs):
          rows.append([name, f'{threat.name} {threat.eps:g}', *row])
          print(*rows[-1], sep=' | ', flush=True)
        print(f'compiling took {compiling:.1f} s', flush=True)
        if _OUTPUT.value:
          pathlib.Path(_OUTPUT.value).write_text(json.dumps(figures, indent=1))
  header = ['network', 'threat', '', *protocol('linf'), 'all']
  print(f'\n{markdown_table(header, rows)}')


if __name__ == '__main__':
  app.run(main)
