"""What multiplicative weights cost beside training against one threat.

  python -m benchmarks.training [--outer_steps=4]

Trains the MNIST CNN on the digits of the quickstart with each policy, outer
step by outer step in turn, and prints seconds per epoch, validation included,
over the first policy's. Then it takes one step apart: the gradients, what the
step adds to them (data, dispatch, optimizer), and the loop around it.
"""

import platform
import time

import jax
import numpy as np
from absl import app, flags, logging

from benchmarks import timing
from mwrobust import attacks, train
from mwrobust import config as config_lib
from mwrobust.attacks import losses
from mwrobust.reporting.document import markdown_table
from mwrobust.training.setup import Job, prepare

_OUTER_STEPS = flags.DEFINE_integer('outer_steps', 4, 'Of each policy.')

POLICIES = {
  'single pixel_linf': ('single', 'pixel_linf'),
  'single dct_linf': ('single', 'dct_linf'),
  'multiplicative weights': ('multiplicative_weights', 'pixel_linf'),
  'round robin': ('round_robin', 'pixel_linf'),
  'greedy': ('greedy', 'pixel_linf'),
}


def make_job(policy: str, threat: str, outer_steps: int) -> Job:
  """The quickstart's schedule with the full MNIST CNN."""
  config = config_lib.preset('paper', 'mnist')
  config.data.name = 'mnist5k'
  config_lib.use_cnn(config)
  config.policy.eta = 0.5
  config.policy.name = policy
  config.policy.threat = threat
  config.train.T = outer_steps
  config.train.ramp = 0.6
  return prepare(config)


def run_outer_step(job: Job, state, t: int):
  """What `train.train` does in outer step t, without logs and checkpoints."""
  first = t * job.steps_per_outer_step
  gradients = 0
  if first == 0 and job.policy.validates_first:
    state = update(job, state, 0)
  for index, batch in train.mini_batches(job, state, t, first):
    state, loss = job.train_step(state, index, batch)
    _, attack = job.pairs[index]
    gradients += attack.steps + 1
  jax.block_until_ready(loss)
  return update(job, state, first + job.steps_per_outer_step), gradients


def update(job: Job, state, step: int):
  """The validation, and the policy's update."""
  found = train.validation_losses(job, state, step, lambda: None)
  return state.replace(policy=job.policy.update(state.policy, found))


def time_policies(outer_steps: int):
  """Prints seconds per epoch by policy."""
  jobs = {
    name: make_job(*policy, outer_steps) for name, policy in POLICIES.items()
  }
  states, seconds, gradients = {}, dict.fromkeys(jobs, 0.0), {}
  for name, job in jobs.items():
    warm = job.init()
    index, batch = next(train.mini_batches(job, warm, 0, 0))
    warm, _ = job.train_step(warm, index, batch)
    update(job, warm, 1)
    states[name], gradients[name] = job.init(), 0
  for t in range(outer_steps):
    for name, job in jobs.items():
      start = time.perf_counter()
      states[name], count = run_outer_step(job, states[name], t)
      seconds[name] += time.perf_counter() - start
      gradients[name] += count
  epochs = outer_steps * job.config.train.r
  base = next(iter(jobs))
  rows = [
    [
      name,
      f'{seconds[name] / epochs:.2f}',
      f'{seconds[name] / seconds[base]:.2f}',
      f'{gradients[name] / gradients[base]:.2f}',
    ]
    for name in jobs
  ]
  header = ['policy', 's an epoch', 'over single', 'gradients over single']
  print(f'\n{markdown_table(header, rows)}')


def take_a_step_apart(repeats: int):
  """Prints the share of a step that is not gradients."""
  job = make_job('single', 'pixel_linf', 1)
  state = job.init()
  batches = [batch for _, batch in train.mini_batches(job, state, 0, 0)]
  images = batches[0].images.astype(np.float32) / 255
  labels = batches[0].labels
  index = np.int32(0)

  @jax.jit
  def gradients(params, images):
    def logits_fn(images, params=params):
      return job.model.apply({'params': params}, images, train=False)

    found = attacks.make_attack(*job.pairs[0])(
      logits_fn, jax.random.key(0), images, labels
    )
    return jax.grad(
      lambda params: losses.cross_entropy(
        logits_fn(found, params), labels
      ).mean()
    )(params)

  carried = [job.init(), job.init()]

  def step_alone():
    for _ in batches:
      carried[0], loss = job.train_step(carried[0], index, batches[0])
    return loss

  def loop():
    for index, batch in train.mini_batches(job, carried[1], 0, 0):
      carried[1], loss = job.train_step(carried[1], index, batch)
    return loss

  def gradients_alone():
    for _ in batches:
      found = gradients(state.params, images)
    return found

  best = timing.interleaved(
    {
      'the gradients alone': gradients_alone,
      'the train step, one batch': step_alone,
      'the loop over mini batches': loop,
    },
    repeats,
  )
  base = best['the gradients alone']
  rows = [
    [name, f'{1e3 * seconds / len(batches):.2f}', f'{seconds / base - 1:+.1%}']
    for name, seconds in best.items()
  ]
  print(f'\n{markdown_table(["a step", "ms", "over gradients"], rows)}')


def main(argv):
  """Prints both tables."""
  del argv
  logging.set_verbosity(logging.WARNING)
  print(
    f'jax {jax.__version__}, Python {platform.python_version()}, '
    f'{jax.default_backend()}; MNIST CNN, batch 100, mnist5k'
  )
  take_a_step_apart(repeats=3)
  time_policies(_OUTER_STEPS.value)


if __name__ == '__main__':
  app.run(main)
