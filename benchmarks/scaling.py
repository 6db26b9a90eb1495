"""What more devices and more threats cost.

  python -m benchmarks.scaling [--repeats=3]

Measures a train step of the MNIST CNN with the same batch on 1 and 2 fake CPU
devices, and step, compile and validation time against 1 to 24 threats. Projects
from public figures, without measuring it, how well the paper's ResNet-50 would
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

from benchmarks import timing
from benchmarks.training import make_job
from mwrobust import attacks, datasets, losses, models, norms, spaces, train
from mwrobust import config as config_lib
from mwrobust import steps as steps_lib
from mwrobust.job import make_batch
from mwrobust.report import markdown_table

_REPEATS = flags.DEFINE_integer('repeats', 3, 'Repeats; the best counts.')
_DEVICES = flags.DEFINE_integer(
  'devices', 0, 'Set by the benchmark for the processes it starts.'
)

BATCH_SIZES = 100, 400
STEPS = 4  # To one answer of a child, so that the pipe's time does not count.
KS = 1, 2, 6, 12, 24

UTILISATION = 0.4  # Of the peak FLOP/s; assumed.
LATENCY = 20e-6  # Of an all-reduce, in seconds; assumed.
# Peak bfloat16 FLOP/s of a device, and the bytes/s, one way, at which it takes
# part in an all-reduce of n devices.
HOSTS = {
  # 4 links of 400 Gbit/s. Only the whole pod, 16 x 16, has links around its
  # edges; in smaller slices a corner has 2.
  'TPU v5e': (197e12, {8: 100e9, 64: 100e9, 256: 200e9}),
  # NVLink in a host of 8: 900 GB/s both ways together. Between hosts 400 Gbit/s
  # InfiniBand, for each GPU: 8 rings at once; or one for all.
  'H100, 8 NICs a host': (989e12, {8: 450e9, 64: 400e9, 256: 400e9}),
  'H100, 1 NIC a host': (989e12, {8: 450e9, 64: 50e9, 256: 50e9}),
}


# ------------------------------------------------------------ 1 and 2 devices


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
  rows = [
    [
      str(batch_size),
      *(f'{1e3 * best[n, batch_size] / STEPS:.1f}' for n in (1, 2)),
      f'{best[2, batch_size] / best[1, batch_size]:.2f}',
    ]
    for batch_size in BATCH_SIZES
  ]
  print(f"""
## A train step on 1 and 2 devices, measured

The devices are fake: 2 share the {os.cpu_count()} cores that 1 has to itself. \
Ratio 1: the split costs nothing.
""")
  header = ['batch in all', '1 device, ms', '2 devices, ms', 'ratio']
  print(markdown_table(header, rows))


def start_child(devices: int) -> subprocess.Popen:
  """Starts this program with so many fake devices."""
  argv = [sys.executable, '-m', 'benchmarks.scaling', f'--devices={devices}']
  fake = f'--xla_force_host_platform_device_count={devices}'
  env = os.environ | {'XLA_FLAGS': fake, 'JAX_PLATFORMS': 'cpu'}
  pipe = subprocess.PIPE
  return subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe, text=True)


def answer_requests():
  """In the child: a few steps for each line of JSON, then one in return."""
  job = make_job('single', 'pixel_linf', 1)
  state = job.init()
  for line in sys.stdin:
    rows = np.arange(json.loads(line)['batch_size'])
    batch = make_batch(job.data.train, rows)
    for _ in range(STEPS):
      state, loss = job.train_step(state, np.int32(0), batch)
    print(json.dumps({'loss': float(loss)}), flush=True)


# ---------------------------------------------------------- many accelerators


def cost_of_step(config) -> tuple[int, float, int]:
  """Parameters, FLOPs and all-reduces of a step; compiles, runs nothing."""
  shape = datasets.SHAPES[config.data.name]
  middle = (0.5,) * shape[-1]
  model = models.create(
    config.model.name, num_classes=10, mean=middle, std=middle
  )
  batch_size = config.train.batch_size
  images = jax.ShapeDtypeStruct((batch_size, *shape), jnp.float32)
  labels = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
  init = functools.partial(model.init, train=False)
  variables = jax.eval_shape(init, jax.random.key(0), images)

  def loss(images, variables, labels):
    logits = model.apply(variables, images, train=False)
    return losses.cross_entropy(logits, labels).sum()

  gradient = jax.jit(jax.grad(loss)).lower(images, variables, labels).compile()
  flops = gradient.cost_analysis()['flops'] * (config.train.pgd_steps + 1)
  parameters = sum(leaf.size for leaf in jax.tree.leaves(variables['params']))
  # Of each BatchNorm, one forward (mean and variance together) and one back.
  statistics = len(jax.tree.leaves(variables.get('batch_stats', {})))
  return parameters, flops, 1 + statistics


def project():
  """Prints bytes against FLOPs, and what follows for many accelerators."""
  cnn = config_lib.preset('paper', 'mnist')
  config_lib.use_cnn(cnn)
  resnet = config_lib.preset('paper', 'cifar10')
  rows = []
  for config in (cnn, resnet):
    batch_size = config.train.batch_size
    parameters, flops, all_reduces = cost_of_step(config)
    numbers = (
      parameters,
      4e-6 * parameters,
      1e-9 * flops,
      flops / parameters / 4,
    )
    rows.append(
      [config.model.name, str(batch_size), *map('{:,.0f}'.format, numbers)]
    )
  print(f"""
## The gradient's all-reduce, by bytes

Bytes: 4 x parameters. FLOPs of a step: XLA's count for one input gradient, \
x ({resnet.train.pgd_steps} attack steps + 1).
""")
  header = ['network', 'batch', 'parameters', 'MB', 'GFLOP', 'FLOPs a byte']
  print(markdown_table(header, rows))

  def efficiency(share: float, peak: float, n: int, link: float) -> str:
    if share * batch_size < 1:
      return '-'
    compute = share * flops / (peak * UTILISATION)
    both = compute + 2 * (n - 1) / n * 4 * parameters / link
    with_latency = compute / (both + all_reduces * LATENCY)
    return f'{compute / both:.1%}\n{with_latency:.1%}'

  rows = [
    [
      f'{word}, {host}',
      *(
        efficiency(1 / n if word == 'strong' else 1, peak, n, link)
        for n, link in links.items()
      ),
    ]
    for word in ('weak', 'strong')
    for host, (peak, links) in HOSTS.items()
  ]
  print(f"""
## The paper's ResNet-50 on n accelerators: a PROJECTION, not a measurement

efficiency = compute / (compute + all-reduce)
compute    = FLOPs of a device / (peak FLOP/s x {UTILISATION}, assumed)
all-reduce = 2 (n - 1) / n x bytes / link speed, none of it hidden

In brackets, with {all_reduces} all-reduces of {1e6 * LATENCY:.0f} us (assumed) \
on top: the gradient's and BatchNorm's.
Weak: {batch_size} images, the paper's batch, on each device. Strong: \
{batch_size} in all, which 256 cannot share.
""")
  print(markdown_table(['efficiency', 'n = 8', 'n = 64', 'n = 256'], rows))


# --------------------------------------------------------------- many threats


def many_threats() -> list[attacks.Threat]:
  """Eight spaces with three norms each, all with the same number of steps."""
  bases = {
    f'dct{size}': np.kron(np.eye(28 // size), spaces.dct_basis(size))
    for size in (2, 4, 7, 14)
  }
  for seed in (0, 1):
    noise = np.random.default_rng(seed).normal(size=(28, 28))
    bases[f'rotation{seed}'] = np.linalg.qr(noise).Q
  return [
    attacks.Threat(space=space, norm=norm, eps=eps, steps=10)
    for space in ('pixel', 'dct', *map(orthonormal, bases, bases.values()))
    for norm, eps in zip(
      norms.NORMS, config_lib.EPS['paper']['mnist'], strict=True
    )
  ]


def orthonormal(name: str, basis: np.ndarray) -> spaces.Space:
  """The space of `basis @ image @ basis^T`."""

  def turn(basis, image):
    return jnp.einsum('uh,hwc,vw->uvc', basis, image, basis)

  basis = basis.astype(np.float32)
  return spaces.Space(
    name, functools.partial(turn, basis), functools.partial(turn, basis.T)
  )


def time_threats(repeats: int):
  """Prints step, compile and validation time by the number of threats."""
  job = make_job('single', 'pixel_linf', 1)
  images, labels = job.data.validation
  validation = datasets.Split(images[:100], labels[:100])
  job = job._replace(data=job.data._replace(validation=validation))
  job.config.eval.batch_size = 100
  batch = make_batch(job.data.train, np.arange(job.config.train.batch_size))
  carried = [job.init()]  # The train step donates it.
  shared = {'model': job.model, 'key': jax.random.key(0)}
  jobs = {}
  for k in KS:
    threats = many_threats()[:k]
    step = steps_lib.make_validation_step(threats=threats, **shared)
    jobs[k] = job._replace(threats=threats, validation_step=step)

  def compile_step(k: int):
    jax.clear_caches()
    step = steps_lib.make_train_step(
      threats=jobs[k].threats,
      radius_scale=job.radius_scale,
      augment=False,
      attacked=True,
      **shared,
    )
    compiled = step.lower(carried[0], np.int32(0), batch).compile()
    jobs[k] = jobs[k]._replace(train_step=compiled)

  def step(k: int, index: int):
    carried[0], loss = jobs[k].train_step(carried[0], np.int32(index), batch)
    return loss

  def validate(k: int):
    return train.validation_losses(jobs[k], carried[0], 1, lambda: None)

  by_k = {k: functools.partial(compile_step, k) for k in KS}
  compiling = timing.interleaved(by_k, 2)
  each = {(k, i): functools.partial(step, k, i) for k in KS for i in range(k)}
  stepping = timing.interleaved(each, repeats)
  by_k = {k: functools.partial(validate, k) for k in KS}
  validating = timing.interleaved(by_k, repeats)
  rows = []
  for k in KS:
    mean = np.mean([stepping[k, i] for i in range(k)])
    numbers = stepping[k, 0], mean, compiling[k], validating[k] / k
    rows.append([str(k), *(f'{1e3 * seconds:,.0f}' for seconds in numbers)])
  print("""
## k threats, measured: ms

All have 10 steps. Pixel linf is the first of every k; the mean is over all k, \
of which those after the
third change the basis. Compiled is the train step, traced and without caches. \
Validated are 100 images.
""")
  header = ['k', 'step, pixel linf', 'step, mean', 'compile']
  print(markdown_table([*header, 'validation, a threat'], rows))


def main(argv):
  """Prints all tables, or answers to the process that does."""
  del argv
  logging.set_verbosity(logging.WARNING)
  jax.config.update('jax_enable_compilation_cache', False)
  if _DEVICES.value:
    return answer_requests()
  print(
    f'jax {jax.__version__}, Python {platform.python_version()}, '
    f'{jax.default_backend()}; measured on the MNIST CNN, batch 100, mnist5k'
  )
  time_devices(_REPEATS.value)
  project()
  time_threats(_REPEATS.value)


if __name__ == '__main__':
  app.run(main)
