"""Measures the cost of an evaluation.

  python -m benchmarks.evaluation

Trains the MNIST CNN as the quickstart does, on its digits, without attacks
(`natural`) and with multiplicative weights over six threats (`robust`), and
evaluates both on its test images under these threats with each protocol.

  evaluations   the evaluations made, relative to attacking every image with
                every try of every attack under every threat; a gradient counts
                as three forward passes
  bound         the lowest possible value of this: the images that survive to
                the end must be attacked by every try
  time          the time of the evaluation without compilation
  wall          this time relative to that of the same gradients and forward
                passes alone
  first         the time with compilation
"""

import functools
import os
import tempfile
import time

if 'XLA_FLAGS' not in os.environ:  # Before jax reads it.
  cores = len(os.sched_getaffinity(0))
  os.environ['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={cores}'

import jax
import numpy as np
from absl import app, flags
from jax.experimental.compilation_cache import compilation_cache

from benchmarks import networks, timing
from configs import quickstart
from mwrobust import config as config_lib
from mwrobust import evaluation
from mwrobust.attacks import losses
from mwrobust.evaluation import programs
from mwrobust.reporting.document import markdown_table
from mwrobust.runtime import devices
from mwrobust.training import evaluation as run_evaluation

BATCH_SIZE = 250
PASSES = 10  # Gradients or forward passes in one timed call.
METHODS = {'natural': 'natural', 'robust': 'multiplicative_weights'}

_PROTOCOLS = flags.DEFINE_list(
  'protocols', ['paper', 'paper-20', 'fast', 'standard'], 'The protocols.'
)
_NETWORKS = flags.DEFINE_list('networks', list(METHODS), 'The networks.')


def train(network: str):
  """Returns `logits_fn(params, images)`, its params and the run's job."""
  config = quickstart.get_config()
  config.method = METHODS[network]
  config.model.options.features = (16, 32)
  config.model.options.hidden = 200
  config.train.check_examples = 0
  job, members = networks.train(config)
  logits_fn = functools.partial(run_evaluation.ensemble_logits, job.model)
  return logits_fn, members, job


def seconds_alone(logits_fn, params, images, labels) -> tuple[float, float]:
  """Returns the seconds of one image's gradient and of its forward pass.

  Batches and devices are those of an evaluation.
  """
  size, _ = programs.batch_shape(BATCH_SIZE, len(labels))
  size = size * jax.device_count()
  batch = images[:size].astype(np.float32) / 255, labels[:size]

  def gradients(params, batch):
    images, labels = batch

    def loss(images):
      logits = logits_fn(params, images)
      return losses.cross_entropy(logits, labels).sum()

    for _ in range(PASSES):  # Each depends on the one before it.
      images = images + 1e-6 * jax.grad(loss)(images)
    return images

  def forwards(params, batch):
    images, _ = batch
    for _ in range(PASSES):
      total = logits_fn(params, images).sum(axis=1)
      images = images + 1e-6 * total[:, None, None, None]
    return images

  best = timing.interleaved(
    {
      function.__name__: functools.partial(
        jax.jit(devices.by_example(function)), params, batch
      )
      for function in (gradients, forwards)
    },
    repeats=20,
  )
  return tuple(best[name] / PASSES / size for name in ('gradients', 'forwards'))


def bound(outcomes: evaluation.Outcomes) -> float:
  """Returns the lowest possible share of all evaluations."""
  costs = np.array(
    [
      sum(np.array([3, 1]) @ a['evaluations'] for a in t['attacks'].values())
      for t in outcomes.settings['threats']
    ]
  )
  attacked = outcomes.spent.sum(axis=(1, 2)) > 0  # Equal sets count once.
  needed = outcomes.correct.mean(axis=1) * attacked * costs
  return needed.sum() / costs.sum()


def main(argv):
  """Evaluates with each protocol and prints the table."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments: {argv[1:]}')
  rows = []
  for network in _NETWORKS.value:
    logits_fn, params, job = train(network)
    images, labels = job.data.test
    threats = config_lib.make_threats(job.config)
    gradient, forward = seconds_alone(logits_fn, params, images, labels)
    print(
      f'{network}: per image on all devices, a gradient takes '
      f'{1e6 * gradient:.0f} us, a forward pass {1e6 * forward:.0f} us',
      flush=True,
    )
    for protocol in _PROTOCOLS.value:
      times = []
      with tempfile.TemporaryDirectory() as cache:
        jax.config.update('jax_compilation_cache_dir', cache)
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
        for _ in range(2):  # The second uses the cache of the first.
          start = time.perf_counter()
          outcomes = evaluation.evaluate(
            logits_fn,
            images,
            labels,
            threats,
            params=params,
            protocol=protocol,
            batch_size=BATCH_SIZE,
            progress=False,
          )
          times.append(time.perf_counter() - start)
        jax.config.update('jax_compilation_cache_dir', None)
        compilation_cache.reset_cache()  # Else it keeps to this folder.
      done, full = (np.array([3, 1]) @ n for n in outcomes.evaluations())
      alone = outcomes.evaluations()[0] @ np.array([gradient, forward])
      accuracies = outcomes.accuracies()
      rows.append(
        [
          network,
          protocol,
          *(f'{accuracies[name]:.1f}' for name in ('natural', 'min', 'union')),
          f'{done / full:.2f}',
          f'{bound(outcomes):.2f}',
          f'{times[1]:.0f} s',
          f'{times[1] / alone:.2f}',
          f'{times[0]:.0f} s',
        ]
      )
      print(*rows[-1], sep=' | ', flush=True)
  header = [
    *('network', 'protocol', 'natural', 'min', 'union', 'evaluations'),
    *('bound', 'time', 'wall', 'first'),
  ]
  radii = ', '.join(f'{t.name} {t.eps:g}' for t in threats)
  print(f'\n{timing.setting()}; {len(labels)} images; {radii}\n')
  print(markdown_table(header, rows))


if __name__ == '__main__':
  app.run(main)
