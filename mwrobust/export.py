"""Writes the network of a run as two files; `mwrobust.networks` loads them.

  python -m mwrobust.main --mode=export --workdir=RUN

RUN/export/model.safetensors   the parameters, the average of the last h
RUN/export/model.json          the model card: config, data, measured figures
"""

import hashlib
from collections.abc import Callable

import ml_collections
import numpy as np
from etils import epath

from mwrobust import config as config_lib
from mwrobust import networks
from mwrobust.errors import UserError
from mwrobust.evaluation import Outcomes
from mwrobust.reporting import runs
from mwrobust.training import evaluation
from mwrobust.training.setup import prepare, refuse_another_run


def export(
  config: ml_collections.ConfigDict,
  workdir: str,
  say: Callable[[str], None] = print,
) -> None:
  """Writes the network that the run's algorithm returns, and its model card."""
  config_lib.validate(config)
  refuse_another_run(epath.Path(workdir), config)
  if config.algorithm == 'ensemble':
    raise UserError(
      "algorithm = 'ensemble' returns many networks, and an export holds one: "
      "train with algorithm = 'scalable'."
    )
  run = runs.load(workdir)
  job = prepare(config)
  network = next(
    network
    for network in evaluation.networks(job, run.workdir, lambda: None, say)
    if network.is_output
  )
  (variables,) = network.members
  evaluations = run.evaluations.get(network.name, {})
  steps = list(network.outer_steps)
  if not evaluations or any(
    outcomes.settings['outer_steps'] != steps
    for outcomes in evaluations.values()
  ):
    raise UserError(
      f'{network.name} of the outer steps {steps} is not evaluated yet: run '
      f'python -m mwrobust.main --mode=eval --workdir={workdir}'
    )
  card = {
    'network': network.name,
    'outer_steps': network.outer_steps,
    'preset': config.preset,
    'config': config_lib.to_share(run.config),
    'input': {
      'shape': job.evaluated.images.shape[1:],
      'range': [0, 1],
      'mean': job.data.mean,
      'std': job.data.std,
    },
    'classes': job.data.num_classes,
    'evaluations': [_figures(o) for o in evaluations.values()],
    'data_sha256': {
      name: {
        part: hashlib.sha256(np.ascontiguousarray(array)).hexdigest()
        for part, array in getattr(job.data, name)._asdict().items()
      }
      for name in ('train', 'validation')  # The evaluations have their own.
    },
  }
  for path in networks.save(run.workdir / 'export' / 'model', variables, card):
    say(str(path))


def _figures(outcomes: Outcomes) -> dict:
  """Returns the figures of an evaluation and its settings."""
  fields = ('name', 'space', 'norm', 'eps', 'clip')
  accuracies = outcomes.accuracies()
  return {
    'protocol': outcomes.settings['protocol'],
    'union': accuracies['union'],
    'accuracies': accuracies,
    'test_images': len(outcomes.labels),
    'test_sha256': outcomes.settings['data']['sha256'],
    'threats': [
      {field: threat[field] for field in fields}
      for threat in outcomes.settings['threats']
    ],
  }
