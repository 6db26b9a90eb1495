r"""Chooses the settings of each method, or the radii, on validation images.

  python -m mwrobust.search --config=configs/mnist.py:maini,cnn \
    --config.train.budget=5000000 --methods=multiplicative_weights,round_robin

Every method gets four candidates: its first settings, another learning rate,
another ramp, and another value of its own parameter, or a third learning rate
if it has none (`mwrobust/reproduction/chosen.py`). Each is trained with the
same budget, and the highest union wins.

  python -m mwrobust.search --config=configs/mnist.py:balanced,cnn \
    --config.train.budget=5000000 --protocol=standard --target=80 \
    --radii=pixel_linf=0.3,0.4 --radii=dct_linf=0.05,0.1

With `--radii`, a network is trained against each threat alone, and the table
gives the radius at which the accuracy is the target.

Runs go to `runs/search/<config>/<method>/<change>`. After a kill, the same
command resumes. Start it twice, and the processes divide the runs.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_collections
from absl import flags
from etils import epath

from mwrobust import command_line, evaluation
from mwrobust import config as config_lib
from mwrobust.errors import UserError, check_choice
from mwrobust.reporting import document
from mwrobust.reporting.accuracies import method_title
from mwrobust.reproduction import planning, tables
from mwrobust.reproduction.chosen import CHANGES, FIRST, OWN, WITHOUT_OWN
from mwrobust.reproduction.planning import PlannedRun, make_config

_RATE = 'optimizer.learning_rate'


class Candidate(NamedTuple):
  """Settings to try."""

  settings: dict[str, float]  # The fields of the config.
  run: PlannedRun  # The run with these settings.
  # The accuracies of its output in %, None until they are known; empty if the
  # training diverged.
  accuracies: dict[str, float] | None = None


def judge(candidate: Candidate) -> Candidate:
  """Returns the candidate with its accuracies."""
  if planning.status(candidate.run)[0] == 'diverged':
    return candidate._replace(accuracies={})
  loaded = planning.load(candidate.run)
  (outcomes,) = loaded.evaluations[loaded.output].values()
  return candidate._replace(accuracies=outcomes.accuracies())


def settings_of(
  method: str, batch_size: int = 100
) -> dict[str, dict[str, float]]:
  """Returns the candidates of a method; every method has as many.

  They are named after what changes. Learning rates are proportional to the
  batch size.
  """
  own = OWN.get(method, {})
  first = FIRST | {field: values[0] for field, values in own.items()}
  another = {field: values[1] for field, values in own.items()}
  found = {}
  for change in ({}, *CHANGES, another or WITHOUT_OWN):
    settings = first | change
    settings[_RATE] *= batch_size / 100
    words = [
      f'{field.rpartition(".")[2]}={settings[field]:g}' for field in change
    ]
    found[','.join(words) or 'first'] = settings
  return found


def on_validation_images(
  config: ml_collections.ConfigDict, protocol: str, given: Sequence[str]
) -> ml_collections.ConfigDict:
  """Returns the config with evaluations on validation images.

  The fields that are `given` on the command line keep their values.
  """
  if not config.train.budget:
    raise UserError(
      'train.budget = 0: give every candidate the same --config.train.budget.'
    )
  config = config.copy_and_resolve_references()
  config.eval.split = 'validation'
  config.eval.protocols = (protocol,)
  config.eval.others = ()
  config.eval.curve_examples = 0
  if 'eval.examples' not in given:
    config.eval.examples = 500
  return config


def plan_methods(
  config: ml_collections.ConfigDict,
  methods: Sequence[str],
  folder: epath.Path,
) -> list[Candidate]:
  """Plans the candidates of each method."""
  found = []
  for method in methods:
    candidates = settings_of(method, config.train.batch_size)
    for name, settings in candidates.items():
      ours = make_config(config, method, **settings)
      run = PlannedRun(method, ours, folder / method / name)
      found.append(Candidate(settings, run))
  return found


def plan_radii(
  config: ml_collections.ConfigDict,
  radii: dict[str, list[float]],
  folder: epath.Path,
) -> list[Candidate]:
  """Plans a training against each threat alone, for each of its radii."""
  found = []
  for threat, values in radii.items():
    check_choice('--radii', threat, config_lib.threat_table(config))
    for eps in values:
      settings = {f'threats.{threat}.eps': eps}
      method = f'single {threat}'
      only = {'threats.only': (threat,)}
      ours = make_config(config, method, **settings, **only)
      workdir = folder / 'radii' / f'{threat}={eps:g}'
      found.append(Candidate(settings, PlannedRun(method, ours, workdir)))
  return found


def parse_radii(words: Sequence[str]) -> dict[str, list[float]]:
  """Reads `['dct_l1=2,5/2', ...]` as the radii of each threat.

  >>> parse_radii(['dct_l1=2,5/2'])
  {'dct_l1': [2.0, 2.5]}
  """
  found = {}
  for word in words:
    threat, _, values = word.partition('=')
    if not values:
      raise UserError(
        f'--radii={word} is not allowed: must be a threat with its radii, such '
        'as dct_l1=2,2.5.'
      )
    try:
      parse = command_line.NumberParser().parse
      found[threat] = [parse(value) for value in values.split(',')]
    except ValueError as error:
      raise UserError(f'--radii={word} is not allowed: {error}') from error
  return found


# ------------------------------------------------------------------ the tables


def best_settings(
  candidates: Sequence[Candidate],
) -> dict[str, dict[str, float]]:
  """Returns the settings with the highest union, by method."""

  def rank(candidate: Candidate) -> tuple[float, ...]:
    rows = ('union', 'min', 'natural')
    return tuple(candidate.accuracies.get(row, -1) for row in rows)

  best = {}
  for candidate in sorted(candidates, key=rank, reverse=True):
    best.setdefault(candidate.run.method, candidate.settings)
  return best


def method_parts(candidates: Sequence[Candidate]) -> list[document.Part]:
  """Returns a table of all candidates, and the best of each method."""
  best = best_settings(candidates)
  threats = list(config_lib.threat_table(candidates[0].run.config))
  columns = ['union', 'min', *threats, 'natural']
  rows = [
    [
      method_title(run.method) + ' *' * (settings == best[run.method]),
      ', '.join(f'{field} {value:g}' for field, value in settings.items()),
      *(f'{figures[c]:.1f}' if figures else 'diverged' for c in columns),
    ]
    for settings, run, figures in candidates
  ]
  lines = '\n'.join(f'{m!r}: {settings!r},' for m, settings in best.items())
  return [
    document.table(['method', 'settings', *columns], rows, '* is chosen.'),
    document.text(f'For `CHOSEN` in mwrobust/reproduction/chosen.py:\n{lines}'),
  ]


def radius_parts(
  candidates: Sequence[Candidate], target: float
) -> list[document.Part]:
  """Returns a table of all radii, and of those that reach the target."""
  rows, curves = [], {}
  for settings, run, figures in candidates:
    (eps,) = settings.values()
    threat = run.config.policy.threat
    # A diverged training counts as an accuracy of 0.
    robust, natural = (figures.get(row, 0.0) for row in (threat, 'natural'))
    rows.append([threat, f'{eps:g}', f'{robust:.1f}', f'{natural:.1f}'])
    curves.setdefault(threat, []).append((eps, robust))
  crossings = {threat: crossing(c, target) for threat, c in curves.items()}
  return [
    document.table(['trained against', 'eps', 'robust, %', 'natural, %'], rows),
    document.table(
      ['threat', f'eps with {target:g} %'],
      [
        [threat, 'outside these radii' if eps is None else f'{eps:.3g}']
        for threat, eps in crossings.items()
      ],
      'Interpolated linearly between two radii.',
    ),
  ]


def crossing(
  curve: Sequence[tuple[float, float]], target: float
) -> float | None:
  """Returns where a falling curve crosses the target, or None.

  >>> crossing([(1.0, 90.0), (2.0, 70.0)], 80)
  1.5
  """
  curve = sorted(curve)
  for (low, above), (high, below) in itertools.pairwise(curve):
    if above >= target > below:
      return low + (above - target) / (above - below) * (high - low)
  return None


def as_json(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
  """Returns the figures of all candidates for the JSON file."""
  return [
    {
      'method': run.method,
      'settings': settings,
      'config': config_lib.to_share(run.config),
      'accuracies': figures,
    }
    for settings, run, figures in candidates
  ]


# ------------------------------------------------------------------------ main


def define_flags() -> None:
  """Defines the flags of this program; programs that import it have others."""
  command_line.define_config('The config that all candidates share.')
  flags.DEFINE_list('methods', list(tables.RIVALS), 'The methods to tune.')
  flags.DEFINE_multi_string(
    'radii',
    [],
    'Instead of methods, radii of a threat to train against alone: '
    'dct_linf=0.05,0.1. Can be repeated.',
  )
  flags.DEFINE_float('target', 80.0, 'The accuracy in % to find radii for.')
  flags.DEFINE_enum(
    'protocol',
    'fast',
    list(evaluation.PROTOCOLS),
    'The protocol of the evaluations.',
  )
  planning.define_flags('runs/search')


def main(argv: list[str]) -> None:
  """Plans the runs, makes the missing ones and writes the table."""
  command_line.no_arguments(argv)
  flag = flags.FLAGS
  config = on_validation_images(
    flag.config, flag.protocol, command_line.given_fields()
  )
  folder = epath.Path(flag.workdir) / command_line.config_name()
  if flag.radii:
    candidates = plan_radii(config, parse_radii(flag.radii), folder)
    name, title = 'radii', 'Training against one threat alone'
  else:
    for method in flag.methods:
      check_choice('--methods', method, tables.RIVALS)
    candidates = plan_methods(config, flag.methods, folder)
    name, title = 'methods', 'The candidates of each method'
  say = functools.partial(print, flush=True)
  planned = [candidate.run for candidate in candidates]
  planning.announce(planned, say)
  if flag.dry_run:
    return
  planning.make_missing(planned, say)
  candidates = list(map(judge, candidates))
  if flag.radii:
    parts = radius_parts(candidates, flag.target)
  else:
    parts = method_parts(candidates)
  judged = (
    f'Judged by the protocol {flag.protocol} on the first '
    f'{config.eval.examples:,} validation images.'
  )
  setting = [
    document.text(config_lib.describe(config, shared=True)),
    document.text(judged),
  ]
  sections = [('Setting', setting), ('Accuracy', parts)]
  output = epath.Path(flag.output or folder / name)
  tables.write_all(output, title, sections, as_json(candidates), say)


def default_config(given: dict[str, str]) -> str:
  """Returns the config file of the main comparison."""
  del given
  return str(command_line.CONFIGS / tables.TABLES['balanced'].config)


if __name__ == '__main__':
  define_flags()
  command_line.run(main, default_config)
