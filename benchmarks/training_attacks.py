"""Compares a run's training attacks with a strong attack.

  python -m benchmarks.training_attacks RUN1 RUN2 ...

For each threat of a run, on its first validation images: the mean cross entropy
that the training attack reaches on the last parameters, and that of 100 steps
of APGD. A network that is trained against a few weak steps learns to misdirect
them; then the first loss falls short of the second.
"""

import functools

import jax
import jax.numpy as jnp
from absl import app, flags
from etils import epath

from benchmarks import timing
from mwrobust import attacks
from mwrobust import config as config_lib
from mwrobust.attacks import losses
from mwrobust.reporting.document import markdown_table
from mwrobust.training import checkpoints, setup

_EXAMPLES = flags.DEFINE_integer('examples', 200, 'The number of images.')
_DATA = flags.DEFINE_string('data', None, 'Folder of the data, if it moved.')

REFERENCE = attacks.apgd(100, result='highest')


def rows_of(workdir: str) -> list[list[str]]:
  """Returns a row for each threat of a run."""
  config = config_lib.load(workdir)
  config.data.dir = _DATA.value or config.data.dir
  job = setup.prepare(config)
  state = checkpoints.last(epath.Path(workdir), 1, job.init())[-1]
  count = _EXAMPLES.value
  images = jnp.asarray(job.data.validation.images[:count], jnp.float32) / 255
  labels = jnp.asarray(job.data.validation.labels[:count])

  def logits_fn(variables, images):
    return job.model.apply(variables, images, train=False)

  def reached(threat, attack):
    @jax.jit
    def loss(variables):
      bound = functools.partial(logits_fn, variables)
      found = attacks.make_attack(threat, attack)(
        bound, jax.random.key(0), images, labels
      )
      return losses.cross_entropy(bound(found), labels).mean()

    return float(loss(state.variables))

  rows = []
  for threat, attack in config_lib.make_pairs(config):
    ours, possible = reached(threat, attack), reached(threat, REFERENCE)
    rows.append(
      [
        f'{config.preset}, {config.method}',
        f'{threat.name} {threat.eps:g}',
        f'{attack.rule}, {attack.steps} steps',
        f'{ours:.3f}',
        f'{possible:.3f}',
        f'{100 * (1 - ours / possible):.1f} %',
      ]
    )
    print(*rows[-1], sep=' | ', flush=True)
  return rows


def main(argv):
  """Prints the table."""
  if len(argv) < 2:
    raise app.UsageError('name the folders of one or more runs')
  print(f'{timing.setting()}; the first {_EXAMPLES.value} validation images')
  rows = [row for workdir in argv[1:] for row in rows_of(workdir)]
  header = ['run', 'threat', 'attack', 'loss', 'APGD-100', 'shortfall']
  print(f'\n{markdown_table(header, rows)}')


if __name__ == '__main__':
  app.run(main)
