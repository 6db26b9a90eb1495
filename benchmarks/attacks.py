"""Compares the speed of the attacks with bare gradients.

  python -m benchmarks.attacks [--networks=cnn,resnet_v1_50]

Prints two tables, measured in one run, for the MNIST CNN at batch 100 and the
6n+2 ResNet-50 at batch 32: the paper's six training attacks, each alone and in
a switch; and APGD, FAB and Square for the same threats. The ratio is the time
of an attack over that of its forward passes and input gradients, each jitted at
the top level of a program: it is 1 if everything else is free. Then it prints
the time to compile.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from absl import app, flags

from benchmarks import timing
from benchmarks.networks import Loaded, load
from mwrobust import attacks
from mwrobust.attacks import losses, spaces
from mwrobust.reporting.document import markdown_table

_NETWORKS = flags.DEFINE_list(
  'networks', ['cnn', 'resnet_v1_50'], 'The networks to time.'
)
_REPEATS = flags.DEFINE_integer('repeats', 10, 'Repeats; the best counts.')

STRONGER = {
  'apgd': attacks.apgd(20),
  'fab': attacks.fab(20, targets=1),
  'square': attacks.square(100),
}
TINY = 1e-3  # This share of eps fools nothing, so no attack stops early.

Pair = tuple[attacks.Threat, attacks.Attack]
Functions = dict[str, Callable[[], object]]


def time_network(network: str, repeats: int):
  """Prints the tables of one network."""
  loaded = load(network)
  functions = units(loaded) | alone(loaded) | switched(loaded)
  best = timing.interleaved(functions | stronger(loaded), repeats)
  print(f'\n## {network}, batch {len(loaded.images)}')
  for name in ('forward pass', 'input gradient'):
    print(f'one {name}, top level: {1e3 * best[name]:.2f} ms')
  print_training(loaded, best)
  print_stronger(loaded, best)


def units(loaded: Loaded) -> Functions:
  """Returns the parts of attacks: a forward pass and an input gradient."""

  def loss(images, variables):
    logits = loaded.logits_fn(variables, images)
    return losses.cross_entropy(logits, loaded.labels).sum()

  forward, gradient = jax.jit(loaded.logits_fn), jax.jit(jax.grad(loss))
  return {
    'forward pass': lambda: forward(loaded.variables, loaded.images),
    'input gradient': lambda: gradient(loaded.images, loaded.variables),
  }


def limit(attack: attacks.Attack, best: dict[str, float]) -> float:
  """Returns the time of an attack's forward passes and gradients."""
  forward, gradient = best['forward pass'], best['input gradient']
  if isinstance(attack, attacks.Square):
    return attack.queries * forward
  if isinstance(attack, attacks.Fab):
    return attack.tries * attack.steps * (gradient + forward)
  return attack.steps * gradient


def alone(loaded: Loaded) -> Functions:
  """Returns the training attacks, one by one."""
  return {
    threat.name: make_run(loaded, threat, attack)
    for threat, attack in loaded.pairs
  }


def stronger(loaded: Loaded) -> Functions:
  """Returns the other attacks, in balls so small that none stops early."""
  return {
    f'{name} {threat.name}': make_run(
      loaded, dataclasses.replace(threat, eps=TINY * threat.eps), attack
    )
    for name, attack in STRONGER.items()
    for threat, _ in loaded.pairs
  }


def make_run(loaded: Loaded, threat: attacks.Threat, attack: attacks.Attack):
  """Returns a jitted attack on the batch."""
  logits_fn, variables, images, labels, _ = loaded

  @jax.jit
  def run(variables, images):
    bound = functools.partial(logits_fn, variables)
    return attacks.make_attack(threat, attack)(
      bound, jax.random.key(3), images, labels
    )

  return functools.partial(run, variables, images)


def switched(loaded: Loaded) -> Functions:
  """Returns the training attacks, as one function with an index."""
  logits_fn, variables, images, labels, pairs = loaded

  @jax.jit
  def run(variables, index, images):
    bound = functools.partial(logits_fn, variables)
    return attacks.make_switch(pairs)(
      bound, index, jax.random.key(3), images, labels
    )

  return {
    f'switch {threat.name}': functools.partial(
      run, variables, jnp.int32(index), images
    )
    for index, (threat, _) in enumerate(pairs)
  }


def print_training(loaded: Loaded, best: dict[str, float]):
  """Prints the table of the training attacks."""
  rows = []
  for threat, attack in loaded.pairs:
    row = [threat.name, str(attack.steps)]
    for name in (threat.name, f'switch {threat.name}'):
      row += [
        f'{1e3 * best[name]:.1f}',
        f'{best[name] / limit(attack, best):.2f}',
      ]
    rows.append(row)
  header = ['training', 'steps', 'ms', 'ratio', 'switch ms', 'switch ratio']
  print(f'\n{markdown_table(header, rows)}')


def print_stronger(loaded: Loaded, best: dict[str, float]):
  """Prints the table of the other attacks."""
  header = ['']
  for name, attack in STRONGER.items():
    square = isinstance(attack, attacks.Square)
    steps = f'{attack.queries} queries' if square else f'{attack.steps} steps'
    header += [f'{name}, {steps}, ms', 'ratio']
  rows = []
  for threat, _ in loaded.pairs:
    row = [threat.name]
    for name, attack in STRONGER.items():
      seconds = best[f'{name} {threat.name}']
      row += [f'{1e3 * seconds:.1f}', f'{seconds / limit(attack, best):.2f}']
    rows.append(row)
  print(f'\n{markdown_table(header, rows)}')


def time_compile(network: str, repeats: int):
  """Prints the time of a first call: one attack, and switches over k."""
  loaded = load(network)
  pairs = loaded.pairs
  many = [
    (dataclasses.replace(t, space=_shifted(i) if i else t.space, name=''), a)
    for i in range(4)
    for t, a in pairs
  ]
  sets = {
    'one attack, pixel_linf': pairs[:1],
    'one attack, dct_l1': pairs[-1:],
    'switch, k = 6': pairs,
    'switch, k = 24': many,
    'switch, k = 6, apgd': [(t, STRONGER['apgd']) for t, _ in pairs],
  }
  best = dict.fromkeys(sets, float('inf'))
  for _ in range(repeats):
    for name, chosen in sets.items():
      best[name] = min(best[name], compile_switch(loaded, chosen))
  one = best['one attack, pixel_linf']
  print(f'\nfirst call of {network}: trace and compile')
  rows = [[name, f'{t:.2f}', f'{t / one:.2f}'] for name, t in best.items()]
  print(markdown_table(['', 's', 'ratio'], rows))


def compile_switch(loaded: Loaded, pairs: Sequence[Pair]) -> float:
  """Returns the seconds to trace and compile a switch without caches."""
  logits_fn, variables, images, labels, _ = loaded
  bound = functools.partial(logits_fn, variables)
  jax.clear_caches()
  start = time.perf_counter()
  jax.jit(
    lambda index, images: attacks.make_switch(pairs)(
      bound, index, jax.random.key(0), images, labels
    )
  ).lower(jnp.int32(0), images).compile()
  return time.perf_counter() - start


def _shifted(shift: int) -> attacks.Space:
  """Returns a different space for each shift, so that no code is shared."""
  dct = spaces.get('dct')
  return attacks.Space(
    f'shift{shift}',
    lambda x: jnp.roll(dct.forward(x), shift, 0),
    lambda z: dct.inverse(jnp.roll(z, -shift, 0)),
  )


def main(argv):
  """Prints all tables."""
  del argv
  print(timing.setting())
  for network in _NETWORKS.value:
    time_network(network, _REPEATS.value)
    time_compile(network, 2)


if __name__ == '__main__':
  app.run(main)
