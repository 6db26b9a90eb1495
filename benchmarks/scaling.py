"""Measures the cost of more devices and more threats.

  python -m benchmarks.scaling [--repeats=5]

Measures a train step of the MNIST CNN with the same batch on 1 and 2 fake CPU
devices, and step, compile and validation time for 1 to 24 threats. Projects
from public figures, without a measurement, how well the paper's ResNet-50 would
use many accelerators.
"""

import contextlib
import functools
import json
import os
import platform
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from benchmarks import networks, timing
from benchmarks.training import make_job
from mwrobust import attacks
from mwrobust import config as config_lib
from mwrobust import data as data_lib
from mwrobust.attacks import losses, norms
from mwrobust.reporting.document import markdown_table
from mwrobust.training import adversaries, loop, steps
from mwrobust.training.setup import make_batch

_REPEATS = flags.DEFINE_integer('repeats', 5, 'Repeats; the best counts.')
_DEVICES = flags.DEFINE_integer(
  'devices', 0, 'Set by the benchmark for the processes it starts.'
)

BATCH_SIZES = 100, 400
STEPS = 4  # Per answer of a child, so that the pipe's time is negligible.
KS = 1, 2, 6, 12, 24

UTILISATION = 0.4  # The share of the peak FLOP/s; assumed.
LATENCY = 20  # The latency of an all-reduce in us; assumed.
# Peak bfloat16 FLOP/s of a device, and its bytes/s, one way, in an all-reduce
# of n devices.
HOSTS = {
  # 4 links of 400 Gbit/s. Only the whole pod, 16 x 16, has links around its
  # edges; in smaller slices a corner has 2.
  'TPU v5e': (197e12, {8: 100e9, 64: 100e9, 256: 200e9}),
  # NVLink in a host of 8: 900 GB/s for both directions together. Between hosts
  # 400 Gbit/s InfiniBand, either per GPU, with 8 rings at once, or per host.
  'H100, 8 NICs a host': (989e12, {8: 450e9, 64: 400e9, 256: 400e9}),
  'H100, 1 NIC a host': (989e12, {8: 450e9, 64: 50e9, 256: 50e9}),
}


def time_devices(repeats: int):
  """Prints the time of a step of the same batch on 1 and 2 devices."""

  def ask(child: subprocess.Popen, batch_size: int):
    print(json.dumps({'batch_size': batch_size}), file=child.stdin, flush=True)
    return json.loads(child.stdout.readline())

  with contextlib.ExitStack() as stack:
    children = {n: stack.enter_context(start_child(n)) for n in (1, 2)}
    functions = {
      (n, batch_size): functools.partial(ask, child, batch_size)
      for batch_size in BATCH_SIZES
      for n, child in children.items()
    }
    best = timing.interleaved(functions, repeats)
  rows = []
  for size in BATCH_SIZES:
    one, two = (1e3 * best[n, size] / STEPS for n in (1, 2))
    rows.append([str(size), f'{one:.1f}', f'{two:.1f}', f'{two / one:.2f}'])
  print(f"""
## A train step on 1 and 2 devices, measured

The devices are fake: 2 share the {os.cpu_count()} cores that 1 has alone. With
a ratio of 1 the split costs nothing.
""")
  header = ['total batch', '1 device, ms', '2 devices, ms', 'ratio']
  print(markdown_table(header, rows))


def start_child(devices: int) -> subprocess.Popen:
  """Starts this program with the given number of fake devices."""
  argv = [sys.executable, '-m', 'benchmarks.scaling', f'--devices={devices}']
  fake = f'--xla_force_host_platform_device_count={devices}'
  env = os.environ | {'XLA_FLAGS': fake, 'JAX_PLATFORMS': 'cpu'}
  pipe = subprocess.PIPE
  return subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe, text=True)


def answer_requests():
  """Runs in the child: takes a few steps and answers each line of JSON."""
  job = make_job('single pixel_linf')
  state = job.init()
  for line in sys.stdin:
    rows = np.arange(json.loads(line)['batch_size'])
    batch = make_batch(job.data.train, rows)
    for _ in range(STEPS):
      state, loss = job.train_step(state, np.int32(0), batch)
    print(json.dumps({'loss': float(loss)}), flush=True)


def cost_of_step(network: str) -> tuple[int, float, int]:
  """Returns parameters, FLOPs of an image's gradient, all-reduces of a step."""
  logits_fn, variables, images, labels, _ = networks.load(network)

  def loss(images, variables):
    return losses.cross_entropy(logits_fn(variables, images), labels).sum()

  gradient = jax.jit(jax.grad(loss)).lower(images, variables).compile()
  flops = gradient.cost_analysis()['flops'] / len(images)
  parameters = sum(leaf.size for leaf in jax.tree.leaves(variables['params']))
  # For each BatchNorm, one forward (mean and variance together) and one back.
  statistics = len(jax.tree.leaves(variables.get('batch_stats', {})))
  return parameters, flops, 1 + statistics


def project():
  """Prints FLOPs per byte, and the projection for many accelerators."""
  rows = []
  for network, data in (('cnn', 'mnist'), ('resnet50', 'cifar10')):
    config = config_lib.preset('paper', data)
    paper, attack_steps = config.train, config.attack.steps
    parameters, flops, all_reduces = cost_of_step(network)
    size, flops = 4 * parameters, flops * (attack_steps + 1)
    total = flops * paper.batch_size
    numbers = (
      paper.batch_size,
      parameters,
      size / 1e6,
      total / 1e9,
      total / size,
    )
    rows.append([network, *(f'{number:,.0f}' for number in numbers)])
  print(f"""
## The gradient's all-reduce, by bytes

MB: 4 bytes x parameters. FLOPs of a step: XLA's count for one input gradient
x ({attack_steps} attack steps + 1).
""")
  header = ['network', 'batch', 'parameters', 'MB', 'GFLOP', 'FLOPs per byte']
  print(markdown_table(header, rows))

  def efficiency(images: float, peak: float, n: int, link: float) -> str:
    if images < 1:
      return '-'
    compute = images * flops / (peak * UTILISATION)
    both = compute + 2 * (n - 1) / n * size / link
    with_latency = both + 1e-6 * LATENCY * all_reduces
    return f'{compute / both:.1%}\n{compute / with_latency:.1%}'

  rows = []
  for host, (peak, links) in HOSTS.items():
    speeds = ', '.join(f'{link / 1e9:.0f}' for link in links.values())
    for word in ('weak', 'strong'):
      cells = [f'{host}, {word}', f'{peak / 1e12:.0f}', speeds]
      for n, link in links.items():
        images = paper.batch_size / (n if word == 'strong' else 1)
        cells.append(efficiency(images, peak, n, link))
      rows.append(cells)
  print(f"""
## The paper's ResNet-50 on n accelerators: a PROJECTION, not a measurement

efficiency = compute / (compute + all-reduce)
compute    = FLOPs of a device / (peak FLOP/s x {UTILISATION}, assumed)
all-reduce = 2 (n - 1) / n x bytes / link speed, none of it hidden

In brackets: with a latency of {LATENCY} us (assumed) for each of
{all_reduces} all-reduces: the gradient's and BatchNorm's. Weak: the paper's
batch of {paper.batch_size} on each device. Strong: the same batch in total, too
small for 256.
""")
  header = ['efficiency', 'TFLOP/s', 'link, GB/s', 'n = 8', 'n = 64', 'n = 256']
  print(markdown_table(header, rows))


def many_pairs() -> list[tuple[attacks.Threat, attacks.Attack]]:
  """Returns eight spaces with three norms each, all with the same attack."""
  radii = config_lib.EPS['paper', 'mnist']['pixel']
  return [
    (attacks.Threat(space=space, norm=norm, eps=eps), attacks.pgd(10))
    for space in ('pixel', 'dct', *map(rotation, range(6)))
    for norm, eps in zip(norms.NORMS, radii, strict=True)
  ]


def rotation(seed: int) -> attacks.Space:
  """Returns the space `basis @ image @ basis^T` of a random rotation."""
  noise = np.random.default_rng(seed).normal(size=(28, 28))
  basis = np.linalg.qr(noise).Q.astype(np.float32)
  turn = functools.partial(jnp.einsum, 'uh,vw,hwc->uvc')
  return attacks.Space(
    f'rotation{seed}',
    functools.partial(turn, basis, basis),
    functools.partial(turn, basis.T, basis.T),
  )


def time_threats(repeats: int):
  """Prints step, compile and validation time by the number of threats."""
  job = make_job('single pixel_linf')
  batch = make_batch(job.data.train, np.arange(100))
  validation = data_lib.Split(*(a[:100] for a in job.data.validation))
  job.config.eval.batch_size = 100
  job.config.train.check_examples = 0
  carried = [job.init()]  # The train step donates it.
  jobs, compiled, spaces = {}, {}, {}
  for k in KS:
    pairs = many_pairs()[:k]
    spaces[k] = len({threat.space for threat, _ in pairs})
    shared = {'model': job.model, 'key': jax.random.key(0)}
    adversary = adversaries.make_adversary('one', pairs)
    jobs[k] = job._replace(
      data=job.data._replace(validation=validation),
      names=tuple(threat.name for threat, _ in pairs),
      adversary=adversary,
      train_step=steps.make_train_step(
        adversary=adversary,
        policy=job.policy,
        progress=job.schedule.progress,
        learning_rate=job.learning_rate,
        radius_scale=job.radius_scale,
        **shared,
      ),
      validation_step=steps.make_validation_step(pairs=pairs, **shared),
    )

  def compile_step(k: int):
    jax.clear_caches()
    lowered = jobs[k].train_step.lower(carried[0], np.int32(0), batch)
    compiled[k] = lowered.compile()

  def step(k: int, index: int):
    carried[0], loss = compiled[k](carried[0], np.int32(index), batch)
    return loss

  def validate(k: int):
    return loop.validate(jobs[k], carried[0], lambda: None).validation

  by_k = {k: functools.partial(compile_step, k) for k in KS}
  compiling = timing.interleaved(by_k, min(2, repeats))
  each = {(k, i): functools.partial(step, k, i) for k in KS for i in range(k)}
  stepping = timing.interleaved(each, repeats)
  by_k = {k: functools.partial(validate, k) for k in KS}
  validating = timing.interleaved(by_k, repeats)
  rows = []
  for k in KS:
    mean = np.mean([stepping[k, i] for i in range(k)])
    times = stepping[k, 0], mean, compiling[k], validating[k] / k
    in_ms = [f'{1e3 * seconds:,.0f}' for seconds in times]
    rows.append([str(k), str(spaces[k]), *in_ms])
  print("""
## A step, its compilation and a validation with k threats, measured, in ms

All threats have 10 steps. Pixel linf is the first of every k; the mean is over
all k, of which those after the third change the basis. Compile time is that of
the train step with tracing and without caches. A validation has 100 images.
""")
  header = ['k', 'spaces', 'step, pixel linf', 'step, mean', 'compile']
  print(markdown_table([*header, 'validation per threat'], rows))


def main(argv):
  """Prints all tables, or answers the parent process."""
  del argv
  logging.set_verbosity(logging.WARNING)
  jax.config.update('jax_enable_compilation_cache', False)
  if _DEVICES.value:
    return answer_requests()
  print(
    f'jax {jax.__version__}, Python {platform.python_version()}, '
    f'{jax.default_backend()}; measured: MNIST CNN, batch 100, mnist5k'
  )
  time_devices(_REPEATS.value)
  project()
  time_threats(_REPEATS.value)


if __name__ == '__main__':
  app.run(main)
