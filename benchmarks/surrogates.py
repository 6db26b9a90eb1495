"""Attacks the network of a run through copies that hide less.

  python -m benchmarks.surrogates RUN

For networks with `denoise`: below its threshold a coefficient has no gradient,
so an attack might not see what it could do beyond it. Here the attacks climb
the loss of a copy with lower thresholds, or with none, and what they find is
shown to the network itself. A copy that finds more than the network's own
gradients do would mean that those are masked.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from etils import epath

from mwrobust import command_line, evaluate, report, steps
from mwrobust import config as config_lib
from mwrobust.errors import UserError
from mwrobust.job import make_batch, prepare

EXAMPLES = 500
SCALES = (1.0, 0.5, 0.0)  # Of the thresholds; 1 is the network itself.


def accuracies(workdir: str) -> dict[str, list[float]]:
  """In percent by threat: through each copy, and against all of them."""
  config = config_lib.load(workdir)
  if not config.model.options.get('denoise'):
    raise UserError(f'{workdir} has a network without denoise: nothing to see.')
  config.data.dir = flags.FLAGS.data_dir or config.data.dir
  job = prepare(config)
  networks = evaluate.networks(job, epath.Path(workdir), lambda: None, print)
  (variables,) = next(n.members for n in networks if n.is_output)
  threats = config_lib.make_threats(config, 'eval')
  attack_step = steps.make_attack_step(
    model=job.model, threats=threats, key=job.evaluation_key
  )
  predict = jax.jit(
    lambda images: job.model.apply(variables, images, train=False).argmax(-1)
  )
  size = config.eval.batch_size
  stands = np.ones((len(SCALES), len(threats), EXAMPLES), bool)
  for first in range(0, EXAMPLES, size):
    rows = np.arange(first, min(first + size, EXAMPLES))
    batch = make_batch(job.data.test, rows)
    for s, scale in enumerate(SCALES):
      attack = functools.partial(attack_step, (_copy(variables, scale),))
      for k in range(len(threats)):
        attacked = attack(jnp.int32(k), jnp.int32(0), jnp.float32(1), batch)
        stands[s, k, rows] = predict(attacked.images) == batch.labels
  every = [*stands, stands.all(axis=0)]
  table = {
    threat.name: [100 * way[k].mean() for way in every]
    for k, threat in enumerate(threats)
  }
  return table | {'union': [100 * way.all(axis=0).mean() for way in every]}


def _copy(variables, scale: float):
  params = dict(variables['params'])
  shrink = params['Shrink_0']
  params['Shrink_0'] = shrink | {'threshold': scale * shrink['threshold']}
  return variables | {'params': params}


def main(argv: list[str]) -> None:
  """Prints the table."""
  (workdir,) = argv
  header = ['accuracy, %', 'itself', *(f'thresholds x {s}' for s in SCALES[1:])]
  rows = [
    [name, *(f'{value:.1f}' for value in values)]
    for name, values in accuracies(workdir).items()
  ]
  print(f'{workdir}, its output, the first {EXAMPLES} test images, one start:')
  print(report.markdown_table([*header, 'all of them'], rows))


if __name__ == '__main__':
  flags.DEFINE_string('data_dir', '', "Where the run's data are now.")
  command_line.run(main)
