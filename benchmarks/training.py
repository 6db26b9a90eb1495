"""Compares the cost of multiplicative weights and single-threat training.

  python -m benchmarks.training [--outer_steps=4] [--attack=strong]

Trains the MNIST CNN on the digits of the quickstart with each method, in turn
by outer step, and prints seconds per epoch with validation, relative to the
first method, and images per second. It splits the time of a step: the
gradients, what the step adds (data, dispatch, optimizer), and the loop around
it. It also measures a step of the methods that attack with all k threats at
once, for several k.
"""

import functools
import time
from collections.abc import Callable

import jax
import numpy as np
from absl import app, flags, logging

from benchmarks import timing
from mwrobust import attacks
from mwrobust import config as config_lib
from mwrobust.attacks import losses
from mwrobust.reporting.document import markdown_table
from mwrobust.training import loop, setup
from mwrobust.training.setup import Job, prepare

_OUTER_STEPS = flags.DEFINE_integer('outer_steps', 4, 'Outer steps.')
_ATTACK = flags.DEFINE_enum(
  'attack',
  'paper',
  ['paper', 'strong'],
  "Train with the paper's attacks, or with some that are harder to fool.",
)

METHODS = (
  *('single pixel_linf', 'single dct_linf', 'multiplicative_weights'),
  *('round_robin', 'greedy', 'natural'),
)
ALL_AT_ONCE = ('max', 'avg', 'msd')
KS = 1, 2, 3, 6
REPEATS = 3  # Measurements of steps; the best counts.


def make_job(
  method: str, outer_steps: int = 1, k: int = 6, attack: str = 'paper'
) -> Job:
  """Makes a job with the quickstart's schedule and the full MNIST CNN.

  Args:
    method: its name; after a space, the threat of `single`.
    outer_steps: T.
    k: the number of threats, the first of the paper's six.
    attack: the training attack, `'paper'` or `'strong'`.
  """
  config = config_lib.preset('paper', 'mnist')
  config.data.name = 'mnist5k'
  config_lib.use_cnn(config)
  if attack == 'strong':
    config_lib.use_strong_attack(config)
  config.threats.only = tuple(config_lib.threat_table(config))[:k]
  config.method, _, threat = method.partition(' ')
  config.policy.threat = threat or config.policy.threat
  config.policy.eta = 0.5
  config.train.T = outer_steps
  config.train.h = 1
  config.train.ramp = 0.6
  config_lib.validate(config)
  return prepare(config)


# ------------------------------------------------------------------ the methods


def run_outer_step(job: Job, state, t: int):
  """Runs outer step t as `loop.train` does, without logs and checkpoints.

  Returns:
    The state, and the number of gradient evaluations.
  """
  gradients = job.validation_gradients
  if t == 0 and job.policy.validates_first:
    state = update(job, state)
    gradients += job.validation_gradients
  first = np.array(state.chosen, np.int64)
  state, loss, chosen = run_steps(
    job, state, lambda chosen: job.schedule.has_room(chosen, t)
  )
  jax.block_until_ready(loss)
  gradients += float((chosen - first) @ job.batch_gradients)
  return update(job, state), gradients


def run_steps(job: Job, state, has_room: Callable[[np.ndarray], bool]):
  """Trains while there is room; the host stays one step ahead."""
  chosen, loss = np.array(state.chosen, np.int64), np.float32(0)
  while has_room(chosen):
    step = chosen.sum()
    index = job.choose(state.policy, step)
    batch = setup.training_batch(job, step)
    before = loss
    state, loss = job.train_step(state, index, batch)
    jax.block_until_ready(before)
    chosen[int(index)] += 1
  return state, loss, chosen


def update(job: Job, state):
  """Runs a validation and updates the policy."""
  measured = loop.validate(job, state, lambda: None)
  policy = job.policy.update(state.policy, measured.validation)
  return state.replace(policy=policy)


def time_methods(outer_steps: int):
  """Prints seconds per epoch by method."""
  jobs = {
    method: make_job(method, outer_steps, attack=_ATTACK.value)
    for method in METHODS
  }
  states, seconds, gradients = {}, dict.fromkeys(jobs, 0.0), {}
  for method, job in jobs.items():
    warm, _, _ = run_steps(job, job.init(), lambda chosen: not chosen.any())
    update(job, warm)
    states[method], gradients[method] = job.init(), 0.0
  for t in range(outer_steps):
    for method, job in jobs.items():
      start = time.perf_counter()
      states[method], count = run_outer_step(job, states[method], t)
      seconds[method] += time.perf_counter() - start
      gradients[method] += count
  schedule, batch_size = job.schedule, job.config.train.batch_size
  epochs = schedule.total / schedule.steps_per_epoch
  base = next(iter(jobs))
  rows = [
    [
      method,
      f'{seconds[method] / epochs:.2f}',
      f'{seconds[method] / seconds[base]:.2f}',
      f'{gradients[method] / gradients[base]:.2f}',
      f'{schedule.total * batch_size / seconds[method]:,.0f}',
      f'{gradients[method] / seconds[method]:,.0f}',
    ]
    for method in jobs
  ]
  header = [
    *('method', 's per epoch', 'over the first', 'gradients over its'),
    *('images/s', 'gradients/s'),
  ]
  print(f'\n{markdown_table(header, rows)}')


# -------------------------------------------------------------------- one step


def take_a_step_apart(repeats: int):
  """Prints the time that a step takes beyond its gradients."""
  job = make_job('single pixel_linf')
  state, count = job.init(), job.schedule.steps_per_epoch
  batch = setup.training_batch(job, 0)
  images, labels = batch.images.astype(np.float32) / 255, batch.labels
  index = np.int32(0)
  attack = attacks.make_attack(*config_lib.make_pairs(job.config)[0])

  @jax.jit
  def gradients(params, images):
    def logits_fn(images, params=params):
      return job.model.apply({'params': params}, images, train=False)

    found = attack(logits_fn, jax.random.key(0), images, labels)
    return jax.grad(
      lambda params: losses.cross_entropy(
        logits_fn(found, params), labels
      ).mean()
    )(params)

  carried = [job.init(), job.init()]

  def gradients_alone():
    for _ in range(count):
      found = gradients(state.params, images)
    return found

  def step_alone():
    for _ in range(count):
      carried[0], loss = job.train_step(carried[0], index, batch)
    return loss

  def whole_loop():
    first = int(carried[1].step)
    carried[1], loss, _ = run_steps(
      job, carried[1], lambda chosen: chosen.sum() < first + count
    )
    return loss

  best = timing.interleaved(
    {
      'the gradients alone': gradients_alone,
      'the train step, one batch': step_alone,
      'the loop over mini batches': whole_loop,
    },
    repeats,
  )
  base = best['the gradients alone']
  rows = [
    [
      name,
      f'{1e3 * seconds / count:.2f}',
      f'{seconds / base - 1:+.1%}',
      f'{count * len(labels) / seconds:,.0f}',
    ]
    for name, seconds in best.items()
  ]
  header = ['a step, single pixel_linf', 'ms', 'over gradients', 'images/s']
  print(f'\n{markdown_table(header, rows)}')


def time_all_at_once(repeats: int):
  """Prints the step time of methods that attack with all k threats, by k."""
  jobs = {
    (method, k): make_job(method, k=k, attack=_ATTACK.value)
    for k in KS
    for method in ('single pixel_linf', *ALL_AT_ONCE)
    if k == 1 or method in ALL_AT_ONCE
  }
  states = {key: job.init() for key, job in jobs.items()}
  batch = setup.training_batch(next(iter(jobs.values())), 0)

  def step(key):
    states[key], loss = jobs[key].train_step(states[key], np.int32(0), batch)
    return loss

  functions = {key: functools.partial(step, key) for key in jobs}
  best = timing.interleaved(functions, repeats)
  one = 'single pixel_linf', 1

  def cells(key):
    adversary = jobs[key].adversary
    ones = jobs[one].adversary
    gradients = adversary.gradients[0] + adversary.copies
    return [
      f'{1e3 * best[key]:.0f}',
      f'{best[key] / best[one]:.2f}',
      f'{gradients / (ones.gradients[0] + ones.copies):.2f}',
    ]

  rows = [[method, str(k), *cells((method, k))] for method, k in jobs]
  rows.sort(key=lambda row: (one[0], *ALL_AT_ONCE).index(row[0]))
  header = ['method', 'k', 'ms per step', 'over the first']
  header.append('gradients over its')
  print(f'\n{markdown_table(header, rows)}')


def main(argv):
  """Prints all tables."""
  del argv
  logging.set_verbosity(logging.WARNING)
  print(f'{timing.setting()}; MNIST CNN, batch 100, mnist5k')
  take_a_step_apart(REPEATS)
  time_all_at_once(REPEATS)
  time_methods(_OUTER_STEPS.value)


if __name__ == '__main__':
  app.run(main)
