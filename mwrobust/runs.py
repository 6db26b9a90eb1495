"""What a finished run has left in its workdir, read back."""

import json
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_collections
from etils import epath

from mwrobust import config as config_lib
from mwrobust import health
from mwrobust.attacks import Ascent, Threat
from mwrobust.errors import UserError
from mwrobust.outcomes import Outcomes


class Run(NamedTuple):
  """A run.

  Attributes:
    workdir: where it is.
    config: what it was made with.
    settings: how its evaluation differs from that, such as `'-restarts=20'`.
    trained: the rows of metrics of its log intervals.
    outer: those of its outer steps.
    evaluations: by the network they are of.
    probes: the attacks of the health checks, for some of these.
    widened: the attacks with other radii, for the same.
  """

  workdir: epath.Path
  config: ml_collections.ConfigDict
  settings: str
  trained: list[dict[str, Any]]
  outer: list[dict[str, Any]]
  evaluations: dict[str, Outcomes]
  probes: dict[str, Outcomes]
  widened: dict[str, Outcomes]

  @property
  def method(self) -> str:
    """The policy, with its threat if that is the only one."""
    policy = self.config.policy
    return f'single {policy.threat}' if policy.name == 'single' else policy.name

  @property
  def output(self) -> str:
    """The network that the algorithm returns: `'h=3 average'`, ..."""
    return network_name(output_kind(self.config), self.config)

  @property
  def validation_loss(self) -> dict[str, float] | None:
    """By threat, at all of eps; None if that of this network is unknown."""
    losses = [
      row['validation_loss']
      for row in self.outer
      if row['outer_step'] == self.outer_step and row['radius_scale'] == 1
    ]
    return losses[-1] if losses and self.method != 'natural' else None

  @property
  def outer_step(self) -> int:
    """How far it was trained when it was evaluated."""
    return _outer_step(next(iter(self.evaluations.values())))


def _outer_step(outcomes: Outcomes) -> int:
  return outcomes.settings['outer_steps'][-1]


def output_kind(config: ml_collections.ConfigDict) -> str:
  """What the algorithm makes of its parameters."""
  return 'ensemble' if config.algorithm == 'ensemble' else 'average'


def window(config: ml_collections.ConfigDict) -> int:
  """How many parameters make the output: the last h, or all T."""
  all_are_kept = config.algorithm == 'ensemble'  # Figure 2, against Figure 3.
  return config.train.T if all_are_kept else config.train.h


def network_name(kind: str, config: ml_collections.ConfigDict) -> str:
  """Of what is made of the last h: `'h=3 average'`; `'h=1'` for the last."""
  h = window(config)
  return 'h=1' if kind == 'last' or h == 1 else f'h={h} {kind}'


def load(workdir: str | os.PathLike, settings: str = '') -> Run:
  """Reads a run that has been evaluated.

  Args:
    workdir: of the run.
    settings: of the evaluation to read: `''` for the run's own, or what its
      files are called, such as `'-restarts=20'`.
  """
  workdir = epath.Path(workdir)
  config = config_lib.load(workdir)
  evaluations, probes, widened = {}, {}, {}
  kinds = {'': evaluations, '_health': probes, '_radii': widened}
  files = sorted((workdir / 'eval').glob('*.npz'))
  for path in sorted(files, key=lambda path: 'strict' in path.name):
    name, theirs, kind = _parse(path)
    if theirs != settings:
      continue
    outcomes = Outcomes.load(path)
    if outcomes.complete:
      kinds[kind][name] = outcomes
  newest = max(map(_outer_step, evaluations.values()), default=0)
  evaluations = {
    name: outcomes
    for name, outcomes in evaluations.items()
    if _outer_step(outcomes) == newest  # Else it is from before more training.
  }
  probes, widened = (
    {
      name: more
      for name, more in found.items()
      if name in evaluations
      # Else it is from other parameters, or from before the ways changed.
      and more.settings
      == health.settings(evaluations[name], attacks(_pairs(evaluations[name])))
    }
    for found, attacks in ((probes, health.probes), (widened, health.wider))
  )
  if not evaluations:
    known = sorted({_parse(path)[1][1:] for path in files} - {''})
    others = f' (it has those with {", ".join(known)})' if known else ''
    raise UserError(
      f'{workdir} has no evaluation{f" with {settings[1:]}" * bool(settings)}'
      f'{others}: type {evaluation_command(workdir, settings)}'
    )
  rows = read_metrics(workdir)
  return Run(
    workdir=workdir,
    config=config,
    settings=settings,
    trained=[row for row in rows if row['kind'] == 'train'],
    outer=[row for row in rows if row['kind'] == 'outer'],
    evaluations=evaluations,
    probes=probes,
    widened=widened,
  )


def _parse(path: epath.Path) -> tuple[str, str, str]:
  """The network, settings and kind in `h=3_average-restarts=20_health.npz`."""
  name, settings, kind = re.fullmatch(
    r'(.*?)(-.*?)?(_health|_radii)?', path.stem
  ).groups('')
  return name.replace('_', ' '), settings, kind


def _pairs(outcomes: Outcomes) -> list[health.Pair]:
  return [
    (Threat(**pair['threat']), Ascent(**pair['attack']))
    for pair in outcomes.settings['attacks']
  ]


def evaluation_command(workdir: str | os.PathLike, settings: str) -> str:
  """What to type for an evaluation that is missing."""
  changed = re.split(r'-(?=[a-z_]+=)', settings)[1:]
  fields = [f'--config.eval.{field}' for field in changed]
  program = f'python -m mwrobust.main --mode=eval --workdir={workdir}'
  return ' '.join([program, *fields])


def read_metrics(workdir: epath.Path) -> list[dict[str, Any]]:
  """The rows of metrics.jsonl, as far as they are written."""
  path = workdir / 'metrics.jsonl'
  if not path.exists():
    return []
  # A last line without its end is being written at this moment.
  lines = path.read_text().splitlines(keepends=True)
  return [json.loads(line) for line in lines if line.endswith('\n')]


_MAY_DIFFER = ('seed', 'data.dir', 'train.log_every', 'eval.')


def check_mergeable(runs: Sequence[Run]) -> None:
  """Raises a UserError if a table over these runs would mislead."""
  first_of = {}
  for other in runs:
    # The seeds of one method share its policy to the letter; methods do not.
    first = first_of.setdefault(other.method, other)
    may_differ = _MAY_DIFFER
    if first is other:
      first, may_differ = runs[0], (*_MAY_DIFFER, 'policy.')
    ours, theirs = map(config_lib.flatten, (first.config, other.config))
    differing = [
      f'  {field}: {ours.get(field)!r} and {theirs.get(field)!r}'
      for field in sorted(ours | theirs)
      if ours.get(field) != theirs.get(field)
      and not field.startswith(may_differ)
    ]
    differing += [
      f'  the evaluation, {what}: {here} and {there}'
      for what, here, there in zip(
        ('images', 'starts', 'outer step', 'steps', 'percentiles'),
        _protocol(first),
        _protocol(other),
        strict=True,
      )
      if here != there
    ]
    if differing:
      raise UserError(
        f'{first.workdir} and {other.workdir} cannot be merged, they differ '
        'in\n' + '\n'.join(differing)
      )
  seen = {}
  for run in runs:
    key = run.method, run.config.seed
    if key in seen:
      raise UserError(
        f'{seen[key]} and {run.workdir} are both {run.method} with seed '
        f'{run.config.seed}: it would count twice. Leave one out.'
      )
    seen[key] = run.workdir


def _protocol(run: Run) -> tuple[Any, ...]:
  outcomes = next(iter(run.evaluations.values()))
  percentiles = [
    pair['attack']['percentile'] for pair in outcomes.settings['attacks']
  ]
  steps = outcomes.steps.tolist()
  images = len(outcomes.labels)
  return images, outcomes.restarts, run.outer_step, steps, percentiles
