"""What an evaluation costs: against attacking everything, and its gradients.

  python -m benchmarks.evaluation

Evaluates the CNN of the benchmarks, with random weights, on a random batch
under six threats with each protocol, at radii at which about a third of the
images stay correct. `evaluations` is what was done over what attacking every
image with every try of every attack would take, a gradient counted as three
forward passes; `wall` is the time over that of the same gradients and forward
passes alone, once everything is compiled; `first` is the time with compilation.
"""

import functools
import os
import platform
import tempfile
import time

if 'XLA_FLAGS' not in os.environ:  # Before jax looks at it.
  cores = len(os.sched_getaffinity(0))
  os.environ['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={cores}'

import jax
import numpy as np
from absl import app, flags

from benchmarks import networks, timing
from mwrobust import attacks, evaluation
from mwrobust.attacks import losses
from mwrobust.evaluation import survivors
from mwrobust.reporting.document import markdown_table
from mwrobust.runtime import devices

BATCH_SIZE = 250
PASSES = 5  # Gradients or forward passes in one timed call.

_PROTOCOLS = flags.DEFINE_list(
  'protocols', ['paper', 'paper-20', 'fast', 'standard'], 'Which protocols.'
)
_RADII = flags.DEFINE_list(
  'radii', ['0.005', '0.05', '0.25'], 'linf, l2 and l1.'
)


def seconds_alone(logits_fn, variables, images, labels) -> tuple[float, float]:
  """Returns the seconds of one image's gradient and of its forward pass.

  In batches and on devices as in an evaluation.
  """
  size = survivors.actual_batch_size(BATCH_SIZE, len(labels))
  batch = images[:size], labels[:size]

  def gradients(variables, batch):
    images, labels = batch

    def loss(images):
      logits = logits_fn(variables, images)
      return losses.cross_entropy(logits, labels).sum()

    for _ in range(PASSES):  # Each needs the one before it.
      images = images + 1e-6 * jax.grad(loss)(images)
    return images

  def forwards(variables, batch):
    images, _ = batch
    for _ in range(PASSES):
      total = logits_fn(variables, images).sum(axis=1)
      images = images + 1e-6 * total[:, None, None, None]
    return images

  best = timing.interleaved(
    {
      function.__name__: functools.partial(
        jax.jit(devices.by_example(function)), variables, batch
      )
      for function in (gradients, forwards)
    },
    repeats=20,
  )
  return tuple(best[name] / PASSES / size for name in ('gradients', 'forwards'))


def main(argv):
  """Evaluates with each protocol and prints the table."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments: {argv[1:]}')
  logits_fn, variables, images, labels, _ = networks.load('cnn')
  gradient, forward = seconds_alone(logits_fn, variables, images, labels)
  radii = [float(radius) for radius in _RADII.value]
  print(
    f'jax {jax.__version__}, Python {platform.python_version()}, '
    f'{jax.device_count()} {jax.default_backend()} devices; {len(labels)} '
    f'images, linf {radii[0]:g}, l2 {radii[1]:g}, l1 {radii[2]:g} in pixels '
    f'and dct; a gradient takes {1e6 * gradient:.0f} us an image, a forward '
    f'pass {1e6 * forward:.0f}\n'
  )
  rows = []
  for protocol in _PROTOCOLS.value:
    times = []
    with tempfile.TemporaryDirectory() as cache:
      jax.config.update('jax_compilation_cache_dir', cache)
      jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
      for _ in range(2):  # The second finds what the first compiled.
        start = time.perf_counter()
        outcomes = evaluation.evaluate(
          logits_fn,
          images,
          labels,
          attacks.six_threats(*radii),
          params=variables,
          protocol=protocol,
          batch_size=BATCH_SIZE,
          progress=False,
        )
        times.append(time.perf_counter() - start)
    done, full = (np.array([3, 1]) @ n for n in outcomes.evaluations())
    alone = outcomes.evaluations()[0] @ np.array([gradient, forward])
    accuracies = outcomes.accuracies()
    rows.append(
      [
        protocol,
        f'{accuracies["min"]:.1f}',
        f'{accuracies["union"]:.1f}',
        f'{done / full:.2f}',
        f'{times[1]:.0f} s',
        f'{times[1] / alone:.2f}',
        f'{times[0]:.0f} s',
      ]
    )
    print(*rows[-1], sep=' | ', flush=True)
  header = ['protocol', 'min', 'union', 'evaluations', 'time', 'wall', 'first']
  print(f'\n{markdown_table(header, rows)}')


if __name__ == '__main__':
  app.run(main)
