"""Reads the results of training runs from their workdirs."""

import itertools
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_collections
from etils import epath

from mwrobust import config as config_lib
from mwrobust.errors import UserError
from mwrobust.evaluation import FILE, PROTOCOLS, Outcomes
from mwrobust.reporting.sections import Evaluated

# Config fields that may differ between seeds of one method, and those that may
# differ between methods. A name that ends with a dot means all fields below it.
SEEDS_DIFFER = (*config_lib.FREE_FIELDS, 'seed', 'data.dir')
METHODS_DIFFER = (
  *SEEDS_DIFFER,
  *('method', 'policy.', *config_lib.TUNED_FIELDS),
)


class Group(NamedTuple):
  """Evaluations of the same images and threats."""

  # The outcomes by network and protocol, 'standard' first.
  evaluations: dict[str, dict[str, Outcomes]]
  curves: dict[str, Outcomes]  # The outcomes at several radii, by network.

  @property
  def first(self) -> Outcomes:
    """The first outcomes, for settings that all of them share."""
    return next(iter(next(iter(self.evaluations.values())).values()))

  def evaluated(self, network: str) -> Evaluated:
    """Returns the evaluations of a network."""
    protocols = tuple(self.evaluations[network].values())
    return Evaluated(protocols, self.curves.get(network))


class Run(NamedTuple):
  """A training run."""

  workdir: epath.Path  # The folder of the run.
  config: ml_collections.ConfigDict  # The config of the run.
  trained: list[dict[str, Any]]  # The rows of metrics of its log intervals.
  outer: list[dict[str, Any]]  # The rows of metrics of its outer steps.
  primary: Group  # The evaluations under its own threats, on the most images.
  others: list[Group]  # Further groups of evaluations.

  @property
  def evaluations(self) -> dict[str, dict[str, Outcomes]]:
    """The outcomes by network and protocol."""
    return self.primary.evaluations

  @property
  def curves(self) -> dict[str, Outcomes]:
    """The outcomes at several radii, by network."""
    return self.primary.curves

  @property
  def method(self) -> str:
    """The method, with its threat if it has only one."""
    config = self.config
    is_single = config.method == 'single'
    return f'single {config.policy.threat}' if is_single else config.method

  @property
  def output(self) -> str | None:
    """The output of the algorithm, or None if it is not evaluated."""
    for network, protocols in self.evaluations.items():
      if next(iter(protocols.values())).settings['is_output']:
        return network
    return None

  @property
  def outer_step(self) -> int:
    """The outer step that was evaluated."""
    return self.primary.first.settings['outer_steps'][-1]

  def under(self, threats: 'Threats') -> Group:
    """Returns the evaluations under these threats, on the most images."""
    groups = [self.primary, *self.others]
    return next(g for g in groups if threats_of(g.first) == threats)


def load(
  workdir: str | os.PathLike, split: str = 'test', examples: int = 0
) -> Run:
  """Reads a run that has been evaluated.

  Args:
    workdir: the folder of the run.
    split: the split of the evaluations to read.
    examples: the number of images of the evaluations to read, except curves; 0
      for any number.
  """
  workdir = epath.Path(workdir)
  config = config_lib.load(workdir)
  paths = sorted((workdir / 'eval').glob(f'*/{FILE}'))
  found = [load_outcomes(path) for path in paths]
  found = [
    outcomes
    for outcomes in found
    if outcomes.complete
    and outcomes.settings['split'] == split
    and (
      not examples
      or len(outcomes.labels) == examples
      or len(outcomes.settings['radii']) > 1
    )
  ]
  groups = _groups(found)
  if not groups:
    raise UserError(
      f'{workdir} has no evaluation on {split} images: run '
      f'{evaluation_command(workdir)} --config.eval.split={split}'
    )
  own = own_threats(config)

  def rank(group: Group) -> tuple[bool, int]:
    return threats_of(group.first) == own, len(group.first.labels)

  primary, *others = sorted(groups, key=rank, reverse=True)
  rows = read_metrics(workdir)
  return Run(
    workdir=workdir,
    config=config,
    trained=[row for row in rows if row['kind'] == 'train'],
    outer=[row for row in rows if row['kind'] == 'outer'],
    primary=primary,
    others=others,
  )


def load_outcomes(path: epath.Path) -> Outcomes:
  """Reads an evaluation of a run, and checks its settings."""
  outcomes = Outcomes.load(path)
  for field in ('network', 'is_output', 'outer_steps', 'members', 'split'):
    if field not in outcomes.settings:
      raise UserError(
        f'{path} cannot be read as an evaluation of a run: its settings have '
        f'no {field!r}.'
      )
  return outcomes


def _groups(found: Sequence[Outcomes]) -> list[Group]:
  """Groups the evaluations of the newest outer step by threats and images."""

  def outer_step(outcomes: Outcomes) -> int:
    return outcomes.settings['outer_steps'][-1]

  def order(outcomes: Outcomes) -> tuple[Any, ...]:
    settings = outcomes.settings
    names = list(PROTOCOLS)
    protocol = settings['protocol']
    place = names.index(protocol) if protocol in names else len(names)
    return settings['members'], settings['network'], place

  newest = max(map(outer_step, found), default=0)
  found = [outcomes for outcomes in found if outer_step(outcomes) == newest]
  groups = {}
  for outcomes in sorted(found, key=order):
    if len(outcomes.settings['radii']) > 1:
      continue
    settings = outcomes.settings
    # Evaluations that share all of these, such as two seeds, are kept apart.
    for number in itertools.count():
      key = threats_of(outcomes), settings['data']['sha256'], number
      group = groups.setdefault(key, Group({}, {}))
      protocols = group.evaluations.setdefault(settings['network'], {})
      if settings['protocol'] not in protocols:
        protocols[settings['protocol']] = outcomes
        break
  # A curve may use fewer images, so it joins the largest group that fits.
  for curve in sorted(found, key=lambda outcomes: len(outcomes.labels)):
    network = curve.settings['network']
    fitting = [
      group
      for (threats, _, _), group in groups.items()
      if threats == threats_of(curve) and network in group.evaluations
    ]
    if len(curve.settings['radii']) > 1 and fitting:
      largest = max(fitting, key=lambda group: len(group.first.labels))
      largest.curves[network] = curve
  return list(groups.values())


Threats = tuple[tuple[str, ...], ...]  # Name, space, norm, eps, clip of each.


def own_threats(config: ml_collections.ConfigDict) -> Threats:
  """Returns the threats of a config."""
  return tuple(
    (t['name'], t['space'], t['norm'], f'{t["eps"]:.6g}', t['clip'])
    for t in (threat.to_dict() for threat in config_lib.make_threats(config))
  )


def threats_of(outcomes: Outcomes) -> Threats:
  """Returns the threats of an evaluation, for a curve at their own eps."""
  radii, threats = outcomes.settings['radii'], outcomes.settings['threats']
  return tuple(
    (
      threat['of'],
      threat['space'],
      threat['norm'],
      f'{threat["eps"] / radii[0]:.6g}',
      threat['clip'],
    )
    for threat in threats[: len(threats) // len(radii)]
  )


def evaluation_command(workdir: str | os.PathLike) -> str:
  """Returns the command that makes a missing evaluation."""
  return f'python -m mwrobust.main --mode=eval --workdir={workdir}'


def read_metrics(workdir: epath.Path) -> list[dict[str, Any]]:
  """Reads the complete rows of metrics.jsonl."""
  path = workdir / 'metrics.jsonl'
  if not path.exists():
    return []
  # A last line without a newline is still being written.
  lines = path.read_text().splitlines(keepends=True)
  return [json.loads(line) for line in lines if line.endswith('\n')]


# ------------------------------------------------------------------ merging


def check_same(found: Sequence[Outcomes]) -> None:
  """Raises a UserError if the network, threats or images differ."""
  first, *others = found
  for other in others:
    is_curve = len(other.settings['radii']) > 1  # It may use fewer images.
    differing = _differences(
      *(_about(outcomes) for outcomes in (first, other)),
      may_differ=('data', 'images') * is_curve,
    )
    if differing:
      raise UserError(
        'These evaluations cannot be on one page, because they differ in\n'
        + '\n'.join(differing)
      )


def check_mergeable(runs: Sequence[Run]) -> None:
  """Raises a UserError if a table over these runs would mislead."""
  first_of, seen = {}, {}
  for other in runs:
    # The seeds of one method must share its policy; methods need not.
    first = first_of.setdefault(other.method, other)
    may_differ = SEEDS_DIFFER
    if first is other:
      first, may_differ = runs[0], METHODS_DIFFER
    configs = (config_lib.flatten(run.config) for run in (first, other))
    differing = _differences(*configs, may_differ=may_differ)
    how = [_evaluated_how(run) for run in (first, other)]
    # Skips the attacks of a protocol that only one of them has.
    common = how[0].keys() & how[1].keys()
    differing += _differences(*({f: h[f] for f in common} for h in how))
    if differing:
      raise UserError(
        f'{first.workdir} and {other.workdir} cannot be merged, because they '
        'differ in\n' + '\n'.join(differing)
      )
    key = other.method, other.config.seed
    if key in seen:
      raise UserError(
        f'{seen[key]} and {other.workdir} are both {other.method} with seed '
        f'{other.config.seed}: it would count twice. Remove one.'
      )
    seen[key] = other.workdir


def _differences(
  ours: dict[str, Any], theirs: dict[str, Any], may_differ: Sequence[str] = ()
) -> list[str]:
  return [
    f'  {field}: {ours.get(field)!r} and {theirs.get(field)!r}'
    for field in sorted(ours | theirs)
    if ours.get(field) != theirs.get(field)
    and not field.startswith(tuple(may_differ))
  ]


def _about(outcomes: Outcomes) -> dict[str, Any]:
  return {
    'network': outcomes.settings.get('network'),
    'threats': ', '.join(' '.join(fields) for fields in threats_of(outcomes)),
    'images': len(outcomes.labels),
    'data': outcomes.settings['data']['sha256'][:12],
  }


def _evaluated_how(run: Run) -> dict[str, Any]:
  """Returns the settings that all evaluations of a table must share."""
  protocols = {
    protocol: outcomes.settings['threats']
    for by_protocol in run.evaluations.values()
    for protocol, outcomes in by_protocol.items()
  }
  about = _about(run.primary.first) | {'outer step': run.outer_step}
  del about['network']
  attacks = {
    f'{protocol}.{name}.{threat["norm"]}': attack
    for protocol, threats in protocols.items()
    for threat in threats
    for name, attack in threat['attacks'].items()
  }
  fields = about | {'protocols': ', '.join(protocols)} | attacks
  return {f'evaluation.{name}': value for name, value in fields.items()}
