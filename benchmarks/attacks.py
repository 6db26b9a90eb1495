"""The attacks against the bare gradient, and against the peers.

  python -m benchmarks.attacks [--peers] [--networks=cnn,resnet_v1_50]

Prints, for the MNIST CNN at batch 100 and the 6n+2 ResNet-50 at batch 32, one
table measured in one run: the time of one jitted input gradient at the top
level of a program, of each of the six attacks (the paper's training steps) and
of the switch at each index; the ratio attack / (steps x gradient), which is 1
if all but the gradients is free; and the time to compile. With --peers also
Foolbox on JAX and, where torch is installed, Foolbox on torch and torchattacks,
on the same network with the same steps.
"""

import functools
import platform
import time

import jax
import jax.numpy as jnp
from absl import app, flags

from benchmarks import timing
from benchmarks.networks import load
from mwrobust import attacks, losses, spaces
from mwrobust.document import markdown_table

_PEERS = flags.DEFINE_bool('peers', False, 'Also time the peers.')
_NETWORKS = flags.DEFINE_list(
  'networks', ['cnn', 'resnet_v1_50'], 'Which networks to time.'
)
_REPEATS = flags.DEFINE_integer('repeats', 10, 'Repeats; the best counts.')


def time_network(network: str, repeats: int):
  """Prints the table of one network."""
  logits_fn, variables, images, labels, threats = load(network)
  key = jax.random.key(3)

  @jax.jit
  def gradient(variables, images):
    def loss(images):
      logits = logits_fn(variables, images)
      return losses.cross_entropy(logits, labels).sum()

    return jax.grad(loss)(images)

  @jax.jit
  def switch(variables, index, images):
    bound = functools.partial(logits_fn, variables)
    return attacks.make_switch(threats)(bound, index, key, images, labels)

  @functools.partial(jax.jit, static_argnums=1)
  def attack(variables, threat, images):
    bound = functools.partial(logits_fn, variables)
    return attacks.make_attack(threat)(bound, key, images, labels)

  functions = {'gradient': lambda: gradient(variables, images)}
  for index, threat in enumerate(threats):
    functions[threat.name] = functools.partial(
      attack, variables, threat, images
    )
    functions[f'switch {threat.name}'] = functools.partial(
      switch, variables, jnp.int32(index), images
    )
  best = timing.interleaved(functions, repeats)

  rows = []
  for threat in threats:
    limit = threat.steps * best['gradient']
    alone, switched = best[threat.name], best[f'switch {threat.name}']
    rows.append(
      [
        threat.name,
        str(threat.steps),
        f'{1e3 * alone:.1f}',
        f'{alone / limit:.2f}',
        f'{1e3 * switched:.1f}',
        f'{switched / limit:.2f}',
      ]
    )
  print(f'\n## {network}, batch {len(images)}')
  print(f'one input gradient, top level: {1e3 * best["gradient"]:.2f} ms\n')
  print(
    markdown_table(
      ['attack', 'steps', 'ms', 'ratio', 'switch ms', 'switch ratio'], rows
    )
  )


def time_compile(network: str, repeats: int):
  """Prints what a first call costs: one attack, and switches over k threats."""
  logits_fn, variables, images, labels, threats = load(network)
  many = tuple(
    attacks.Threat(space=_shifted(i) if i else t.space, norm=t.norm,
                   eps=t.eps, steps=t.steps)
    for i in range(4)
    for t in threats
  )  # fmt: skip

  def compile_switch(chosen):
    bound = functools.partial(logits_fn, variables)
    jax.clear_caches()
    start = time.perf_counter()
    jax.jit(
      lambda index, images: attacks.make_switch(chosen)(
        bound, index, jax.random.key(0), images, labels
      )
    ).lower(jnp.int32(0), images).compile()
    return time.perf_counter() - start

  sets = {
    'one attack, pixel_linf': threats[:1],
    'one attack, dct_l1': threats[-1:],
    'switch, k = 6': threats,
    'switch, k = 24': many,
  }
  best = dict.fromkeys(sets, float('inf'))
  for _ in range(repeats):
    for name, chosen in sets.items():
      best[name] = min(best[name], compile_switch(chosen))
  one = best['one attack, pixel_linf']
  print(f'\nfirst call of {network}: trace and compile')
  rows = [[name, f'{t:.2f}', f'{t / one:.2f}'] for name, t in best.items()]
  print(markdown_table(['', 's', 'ratio'], rows))


def _shifted(shift: int) -> spaces.Space:
  """A space of its own for each shift: 24 geometries that share no code."""
  return spaces.Space(
    f'shift{shift}',
    lambda x: jnp.roll(spaces.DCT.forward(x), shift, 0),
    lambda z: spaces.DCT.inverse(jnp.roll(z, -shift, 0)),
  )


def main(argv):
  """Prints all tables."""
  del argv
  print(
    f'jax {jax.__version__}, Python {platform.python_version()}, '
    f'{jax.default_backend()}'
  )
  for network in _NETWORKS.value:
    time_network(network, _REPEATS.value)
    time_compile(network, 2)
    if _PEERS.value:
      from benchmarks import peers  # Needs foolbox, of the test extra.

      peers.time_peers(network, _REPEATS.value)


if __name__ == '__main__':
  app.run(main)
