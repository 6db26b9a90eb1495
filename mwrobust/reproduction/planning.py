"""The runs of a table: their plan, their cost, and making missing ones."""

import functools
import json
import math
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
from absl import flags
from etils import epath

from mwrobust import config as config_lib
from mwrobust import data as data_lib
from mwrobust import models
from mwrobust.errors import UserError
from mwrobust.reporting import document, runs
from mwrobust.runtime import files
from mwrobust.runtime.progress import format_duration
from mwrobust.training import evaluation, loop, setup

flags.disclaim_key_flags()  # `--help` shows them as those of the program.

WAIT = 20.0  # Seconds between two checks of runs that other processes make.


def define_flags(workdir: str) -> None:
  """Defines the flags of every program that makes a table."""
  flags.DEFINE_string('workdir', workdir, 'Folder for the runs and the tables.')
  flags.DEFINE_string(
    'output',
    None,
    'Where to write the table, as OUTPUT.md, .html and .json; by default '
    'beside its runs.',
  )
  flags.DEFINE_bool(
    'dry_run', False, 'Only list the runs, with their cost and the time left.'
  )


class PlannedRun(NamedTuple):
  """A run that a table needs."""

  method: str  # The method, with its threat if it has one: `'single dct_l1'`.
  config: ml_collections.ConfigDict  # The config of the run.
  workdir: epath.Path  # The folder of the run.


def make_config(
  shared: ml_collections.ConfigDict, method: str, **fields
) -> ml_collections.ConfigDict:
  """Returns a checked copy of a config with a method and other fields."""
  config = shared.copy_and_resolve_references()
  config.method, _, threat = method.partition(' ')
  config.policy.threat = threat or config.policy.threat
  config.update_from_flattened_dict(fields)
  config_lib.validate(config)
  return config


# ------------------------------------------------------------------- the costs


def gradient_evaluations(
  config: ml_collections.ConfigDict,
) -> tuple[int, int]:
  """Estimates the gradients of training and of evaluation.

  The evaluation is an upper bound, as if every example survived every attack.
  """
  outline = _outline(config)
  schedule = setup.make_schedule(
    config,
    config.data.train_examples or outline.train,
    config.train.validation_examples or outline.validation,
  )
  evaluated = evaluation.gradients(
    config, _evaluated_examples(config), outline.num_classes
  )
  return round(schedule.gradients), round(evaluated)


def _outline(config: ml_collections.ConfigDict) -> data_lib.Outline:
  return data_lib.outline(config.data.name, config.data.dir)


def _evaluated_examples(config: ml_collections.ConfigDict) -> int:
  return config.eval.examples or getattr(_outline(config), config.eval.split)


def seconds_per_gradient(config: ml_collections.ConfigDict) -> float:
  """Measures the time of a gradient of the network at its batch size."""
  outline = _outline(config)
  shape = outline.shape
  channels = shape[-1]
  model = models.create(
    config.model.name,
    num_classes=outline.num_classes,
    mean=(0.5,) * channels,
    std=(0.5,) * channels,
    **config.model.options,
  )
  images = jnp.full((config.train.batch_size, *shape), 0.5)
  shapes = jax.eval_shape(
    functools.partial(model.init, train=False), jax.random.key(0), images[:1]
  )
  variables = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

  @jax.jit
  @functools.partial(jax.grad, argnums=1)
  def probe(variables, images):
    logits = model.apply(variables, images, train=False)
    return jax.nn.log_softmax(logits)[:, 0].sum()

  probe(variables, images).block_until_ready()  # Compiles.
  times = []
  while not times or (len(times) < 5 and sum(times) < 1):
    start = time.perf_counter()
    probe(variables, images).block_until_ready()
    times.append(time.perf_counter() - start)
  return min(times) / len(images)


# -------------------------------------------------------------------- the plan


def status(run: PlannedRun) -> tuple[str, float]:
  """Returns the status of a run, and the gradients of its training so far.

  The status is `'new'`, `'begun'`, `'diverged'` or `'done'`.
  """
  if not (run.workdir / 'config.json').exists():
    return 'new', 0
  last = (runs.read_metrics(run.workdir) or [{'gradient_evaluations': 0}])[-1]
  whole = last.get('outer_step') == run.config.train.T
  trained = math.inf if whole else last['gradient_evaluations']
  if _has_diverged(run):
    return 'diverged', trained
  try:
    loaded = load(run)
  except UserError:
    return 'begun', trained
  output = 'ensemble' if run.config.algorithm == 'ensemble' else 'average'
  is_done = (
    loaded.outer_step == run.config.train.T
    and all(
      set(run.config.eval.protocols) == set(loaded.evaluations.get(network, ()))
      for network in (
        config_lib.network_name(kind, run.config)
        for kind in (output, *run.config.eval.others)
      )
    )
    and runs.threats_of(loaded.primary.first) == runs.own_threats(run.config)
    and (loaded.output in loaded.curves or not run.config.eval.curve_examples)
  )
  return 'done' if is_done else 'begun', trained


def _has_diverged(run: PlannedRun) -> bool:
  path = run.workdir / 'status.json'
  return path.exists() and (
    json.loads(path.read_text())['status'] == 'diverged'
  )


def load(run: PlannedRun) -> runs.Run:
  """Reads a run with the protocols of its plan.

  The same run may also serve tables with other protocols and images.
  """
  if _has_diverged(run):
    raise UserError(
      f'{run.workdir} has diverged: choose other settings in another folder, '
      f'or exclude {run.method} with --methods.'
    )
  wanted = run.config.eval
  count = _evaluated_examples(run.config)
  loaded = runs.load(run.workdir, wanted.split, count)
  evaluations = {}  # Keeps the order, in which 'standard' is first.
  for network, by_protocol in loaded.evaluations.items():
    for protocol, outcomes in by_protocol.items():
      if protocol in wanted.protocols:
        evaluations.setdefault(network, {})[protocol] = outcomes
  return loaded._replace(
    primary=loaded.primary._replace(evaluations=evaluations)
  )


class Cost(NamedTuple):
  """The cost of a run in gradient evaluations."""

  status: str  # See `status`.
  training: int  # The whole training.
  evaluation: int  # An upper bound; see `gradient_evaluations`.
  left: int  # What has not been done yet.


def cost(run: PlannedRun) -> Cost:
  """Returns the cost of a run, and how much of it is left."""
  training, evaluation = gradient_evaluations(run.config)
  word, trained = status(run)
  left = 0
  if word not in ('done', 'diverged'):
    left = round(max(0, training - trained) + evaluation)
  return Cost(word, training, evaluation, left)


def describe(planned: Sequence[PlannedRun]) -> tuple[str, int]:
  """Describes the runs with their cost.

  Raises a UserError, before any run begins, if a workdir holds another run.

  Returns:
    The description, and the gradient evaluations that are left.
  """
  for run in planned:
    setup.refuse_another_run(run.workdir, run.config)
  costs = [cost(run) for run in planned]
  folder = next(
    parent
    for parent in planned[0].workdir.parents
    if all(parent in run.workdir.parents for run in planned)
  )
  rows = [
    [
      str(run.workdir.relative_to(folder)),
      word,
      *(f'{count / 1e6:,.1f}' for count in counts),
    ]
    for run, (word, *counts) in zip(planned, costs, strict=True)
  ]
  table = document.markdown_table(
    ['run', 'status', 'train', 'eval', 'left'], rows
  )
  note = textwrap.fill(
    'In millions of gradient evaluations: one image once forward and back. The '
    'evaluation takes less if images are fooled early.',
    width=80,
  )
  left = sum(each.left for each in costs)
  return f'The runs in {folder}:\n\n{table}\n\n{note}', left


def announce(planned: Sequence[PlannedRun], say: Callable[[str], None]) -> None:
  """Prints the plan, then its estimated time, which takes longer to measure."""
  text, left = describe(planned)
  say(text)
  seconds = seconds_per_gradient(planned[0].config)
  time_left = (
    f'{1 / seconds:,.0f} gradient evaluations per second, measured on one '
    f'device ({jax.devices()[0].device_kind}): about '
    f'{format_duration(left * seconds)} left in total if no image is fooled '
    'early, besides compilation.'
  )
  say(textwrap.fill(time_left, width=80))


# -------------------------------------------------------------------- the runs


def make_missing(
  planned: Sequence[PlannedRun], say: Callable[[str], None]
) -> None:
  """Trains and evaluates missing runs, and resumes unfinished ones.

  Several processes may do this at once: each skips the runs that others are
  making and waits for them at the end. A run that diverges is not repeated.
  """
  left, waiting = list(planned), False
  while left:
    in_use = []
    for run in left:
      if status(run)[0] in ('done', 'diverged'):
        continue
      if not waiting:
        number = planned.index(run) + 1
        say(f'\n---- run {number} of {len(planned)}: {run.workdir}')
      try:
        loop.train_and_evaluate(run.config, str(run.workdir), say)
      except files.InUse as error:
        if not waiting:
          say(str(error))
        in_use.append(run)
      except loop.Diverged as error:
        say(str(error))
    waiting = in_use == left
    if waiting:
      time.sleep(WAIT)
    left = in_use
