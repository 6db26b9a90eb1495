"""Who still stands: the networks of a run, under every threat.

An example that a threat has fooled is not attacked by it again: each further
start takes the survivors only, packed into full batches. As an example's
randomness comes from its own id, the outcome is the same as if all had been
attacked every time; a test says so.
"""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from etils import epath

from mwrobust import averaging, checkpoints, datasets, health, runs
from mwrobust import config as config_lib
from mwrobust import job as job_lib
from mwrobust.errors import UserError
from mwrobust.job import (
  Job,
  check_training,
  make_batch,
  prepare,
  refuse_another_run,
  training_batch,
)
from mwrobust.outcomes import Outcomes
from mwrobust.runtime import devices
from mwrobust.runtime.progress import Progress
from mwrobust.runtime.signals import stop_signals
from mwrobust.state import TrainState
from mwrobust.steps import Batch, make_attack_step, make_logits_step

PICTURES = 6  # Examples whose images are kept.
FREE_FIELDS = (*job_lib.FREE_FIELDS, 'eval.batch_size')
SECONDS_BETWEEN_SAVES = 30


def evaluate_run(
  config: ml_collections.ConfigDict,
  workdir: str,
  say: Callable[[str], None] = print,
) -> dict[str, Outcomes]:
  """Evaluates the run in a workdir as far as it has been trained.

  Args:
    config: that of the run; the fields of `eval` may differ.
    workdir: of the run. Nothing in it changes but the evaluations.
    say: told what a reader at the terminal should know.

  Returns:
    The outcomes by the network they are of: `'h=1'`, `'h=3 average'`, ...
  """
  config_lib.validate(config)
  refuse_another_run(epath.Path(workdir), config, FREE_FIELDS)
  with stop_signals() as stop:
    return evaluate(prepare(config), epath.Path(workdir), stop.check, say)


def evaluate(
  job: Job,
  workdir: epath.Path,
  check_stop: Callable[[], None],
  say: Callable[[str], None],
) -> dict[str, Outcomes]:
  """Attacks each network of the run with each threat."""
  config = job.config
  paper = config_lib.make_pairs(config, 'eval')
  readings = {'': paper}
  if config.eval.strict:
    readings[', strict'] = tuple(
      (dataclasses.replace(threat, clip='strict'), attack)
      for threat, attack in paper
    )
  evaluated = [
    network
    for network in networks(job, workdir, check_stop, say)
    if network.is_output or network.kind in config.eval.others
  ]
  logits_step = make_logits_step(model=job.model)
  suffix = changed_settings(config, workdir)
  evaluations = {}
  for reading, pairs in readings.items():
    probed = config.eval.health_examples and not reading
    attack_step = make_attack_step(
      model=job.model,
      pairs=health.probes(pairs) if probed else pairs,
      key=job.evaluation_key,
    )
    for network in evaluated:
      name = network.name + reading
      path = workdir / 'eval' / f'{name.replace(" ", "_")}{suffix}.npz'
      logits = functools.partial(logits_step, network.members)
      attack = functools.partial(attack_step, network.members)
      outcomes = _begin(job, network, pairs, logits)
      plan = [Way(index) for index in range(len(pairs))]
      outcomes = _fill(outcomes, plan, attack, job, name, path, check_stop, say)
      evaluations[name] = outcomes
      if network.is_output and probed:
        for word, (more, plan) in {
          'health': _begin_probes(outcomes, pairs, config),
          'radii': _begin_curve(outcomes, pairs, config),
        }.items():
          to = path.with_stem(f'{path.stem}_{word}')
          more_name = f'{name}, {word}'
          _fill(more, plan, attack, job, more_name, to, check_stop, say)
  return evaluations


def changed_settings(
  config: ml_collections.ConfigDict, workdir: epath.Path
) -> str:
  """Such as `'-restarts=20'`: how this evaluation differs from the run's own.

  It is part of the names of its files, so that no evaluation overwrites
  another.
  """
  fields = 'examples', 'restarts', 'pgd_steps', 'slide_steps', 'percentile'
  own = config_lib.load(workdir).eval
  return ''.join(
    f'-{field}={config.eval[field]}'
    for field in fields
    if config.eval[field] != own[field]
  )


# ---------------------------------------------------------------- the networks


class Network(NamedTuple):
  """One thing to evaluate.

  Attributes:
    kind: `'last'`, `'average'`, `'recalibrated'` or `'ensemble'`.
    name: such as `'h=3 average'`.
    members: the variables of one network, or of those of an ensemble.
    outer_steps: those its parameters come from.
    is_output: whether it is what the algorithm returns.
  """

  kind: str
  name: str
  members: tuple[Any, ...]
  outer_steps: tuple[int, ...]
  is_output: bool


def networks(
  job: Job,
  workdir: epath.Path,
  check_stop: Callable[[], None],
  say: Callable[[str], None],
) -> Iterator[Network]:
  """The last parameters; the average and the ensemble of the last h."""
  config = job.config
  all_are_kept = config.algorithm == 'ensemble'
  h = runs.window(config)
  states = checkpoints.last(workdir, h, job.init())
  members = tuple(state.variables for state in states)
  outer_steps = tuple(int(state.outer_step) for state in states)
  yield Network('last', 'h=1', members[-1:], outer_steps[-1:], h == 1)

  def network(kind: str, members: tuple[Any, ...], is_output: bool) -> Network:
    name = runs.network_name(kind, config)
    return Network(kind, name, members, outer_steps, is_output)

  if h > 1 and not all_are_kept:
    average = averaging.average(members)
    yield network('average', (average,), is_output=True)
    if 'recalibrated' in config.eval.others:
      say('Recalibrating BatchNorm on an epoch of training batches.')
      state = recalibrate(job, states[-1].replace(**average), check_stop)
      yield network('recalibrated', (state.variables,), is_output=False)
  if h > 1:
    yield network('ensemble', members, is_output=all_are_kept)


def recalibrate(
  job: Job, state: TrainState, check_stop: Callable[[], None]
) -> TrainState:
  """Gathers the BatchNorm statistics anew, over an epoch, as training does.

  The mini batches are attacked as if training went on with the last weights;
  the parameters stay as they are.
  """
  check_training(job)
  steps = int(state.step) + np.arange(job.steps_per_epoch)
  indices = np.asarray(job.choose(state.policy, jnp.asarray(steps)))
  for step, index in zip(steps, indices, strict=True):
    check_stop()
    copy = jax.tree.map(jnp.copy, state)  # The train step takes it for itself.
    trained, _ = job.train_step(copy, index, training_batch(job, step))
    state = state.replace(step=trained.step, batch_stats=trained.batch_stats)
  return state


# ---------------------------------------------------------------- the outcomes


class Way(NamedTuple):
  """How one threat of an evaluation attacks.

  Attributes:
    index: its number in the attack step.
    first_start: the number of its first random start.
    scale: of its radius.
  """

  index: int
  first_start: int = 0
  scale: float = 1.0


def _begin(
  job: Job,
  network: Network,
  pairs: Sequence[health.Pair],
  logits: Callable[[np.ndarray], jax.Array],
) -> Outcomes:
  """Who stands before the first attack: everyone, rightly classified or not."""
  images, labels = job.data.test
  batch_size = devices.round_up(job.config.eval.batch_size)

  def logits_of(rows: np.ndarray) -> np.ndarray:
    return np.asarray(logits(make_batch(job.data.test, rows).images))

  batches = list(datasets.padded_batches(len(labels), batch_size))
  first, first_mask = batches[0]
  again = logits_of(first[::-1])[::-1][first_mask]
  settings = {
    'data': job.data.name,
    'seed': job.config.seed,
    'outer_steps': network.outer_steps,
    'members': len(network.members),
    'attacks': health.describe(pairs),
  }
  return Outcomes.begin(
    settings=json.loads(json.dumps(settings)),
    pairs=pairs,
    restarts=job.config.eval.restarts,
    labels=labels,
    logits=np.concatenate([logits_of(rows)[mask] for rows, mask in batches]),
    logits_again=again,
    images=images[:PICTURES],
  )


def _begin_probes(
  outcomes: Outcomes,
  pairs: Sequence[health.Pair],
  config: ml_collections.ConfigDict,
) -> tuple[Outcomes, list[Way]]:
  """The survivors among the first examples, and how to attack those again."""
  count = min(config.eval.health_examples, len(outcomes.labels))
  attacks = health.probes(pairs)
  correct = np.tile(outcomes.correct[:, :count], (len(health.WAYS), 1))
  k = len(pairs)
  starts = [outcomes.restarts] * k + [0] * (len(attacks) - k)
  plan = [Way(index, start) for index, start in enumerate(starts)]
  return _begin_more(outcomes, attacks, correct), plan


def _begin_curve(
  outcomes: Outcomes,
  pairs: Sequence[health.Pair],
  config: ml_collections.ConfigDict,
) -> tuple[Outcomes, list[Way]]:
  """The first examples, and how to attack those with other radii."""
  count = min(
    *(config.eval.health_examples, health.CURVE_EXAMPLES),
    len(outcomes.labels),
  )
  attacks = health.wider(pairs)
  natural = np.tile(outcomes.natural[:count], (len(attacks), 1))
  k = len(pairs)
  plan = [
    Way(index, scale=scale) for scale in health.RADII for index in range(k)
  ]
  return _begin_more(outcomes, attacks, natural), plan


def _begin_more(
  outcomes: Outcomes, attacks: Sequence[health.Pair], correct: np.ndarray
) -> Outcomes:
  """Further attacks on the first examples, those that stand so far."""
  count = correct.shape[1]
  return Outcomes.begin(
    settings=health.settings(outcomes, attacks),
    pairs=attacks,
    restarts=1,
    labels=outcomes.labels[:count],
    logits=outcomes.logits[:count],
    logits_again=outcomes.logits_again[:count],
    images=outcomes.images[:0],
    correct=correct,
  )


def _fill(
  outcomes: Outcomes,
  plan: Sequence[Way],
  attack: Callable[..., Any],
  job: Job,
  name: str,
  path: epath.Path,
  check_stop: Callable[[], None],
  say: Callable[[str], None],
) -> Outcomes:
  """Attacks all that stands, from where an earlier call was interrupted.

  Args:
    outcomes: as they are before the first attack.
    plan: see `attack_survivors`.
    attack: see `attack_survivors`.
    job: the run.
    name: of the network.
    path: where the outcomes are saved, every half minute and at the end.
    check_stop: may raise to end it, between batches.
    say: told how it goes.
  """
  saved = _load(path, outcomes, say)
  starts = 0 if saved is None else int(saved.starts.sum())
  if len(set(devices.of_all_processes(starts))) > 1:
    raise UserError(
      f'{path} is not the same for all processes: they need one workdir that '
      'all of them see.'
    )
  if saved is not None and saved.complete:
    say(f'Already evaluated: {path}')
    return saved
  outcomes = saved or outcomes
  batch_size = devices.round_up(job.config.eval.batch_size)
  passes = outcomes.restarts * len(plan)
  batches = math.ceil(len(outcomes.labels) / batch_size)
  say(
    f'Evaluating {name} on {len(outcomes.labels)} test images'
    + (', from where it was interrupted.' if saved else '.')
  )
  last_save = time.monotonic()
  try:
    with Progress(
      passes * batches,
      start=0,
      batch_size=batch_size,
      log_every=max(1, passes * batches // 4),
    ) as progress:
      for pass_, batch in attack_survivors(
        outcomes, plan, attack, job.data.test, batch_size
      ):
        progress.update(pass_ * batches + batch, f'evaluating {name}')
        check_stop()
        if time.monotonic() - last_save > SECONDS_BETWEEN_SAVES:
          outcomes.save(path)
          last_save = time.monotonic()
      progress.update(passes * batches, f'evaluating {name}')
  finally:
    outcomes.save(path)
  done, full = outcomes.gradient_evaluations()
  say(
    f'Gradient evaluations: {done:,} of the {full:,} of attacking every image '
    f'every time ({done / full:.0%}).'
  )
  return outcomes


def _load(
  path: epath.Path, like: Outcomes, say: Callable[[str], None]
) -> Outcomes | None:
  """What was saved of the same evaluation, whole or in part."""
  if not path.exists():
    return None
  try:
    saved = Outcomes.load(path)
  except UserError as error:
    say(f'{error} Evaluating again.')
    return None
  same = saved.settings == like.settings and saved.correct.shape == (
    like.correct.shape
  )
  if not same:
    say(f'{path} is of other parameters or settings. Evaluating again.')
  return saved if same else None


def attack_survivors(
  outcomes: Outcomes,
  plan: Sequence[Way],
  attack: Callable[[jax.Array, jax.Array, jax.Array, Batch], Any],
  split: datasets.Split,
  batch_size: int,
) -> Iterator[tuple[int, int]]:
  """Attacks what stands, start by start, threat by threat.

  Args:
    outcomes: filled in, batch by batch.
    plan: how each of its threats attacks.
    attack: `attack(index, start, scale, batch)`, of `steps.make_attack_step`.
    split: the examples.
    batch_size: of every batch; the last of a pass is filled up.

  Yields:
    The pass, counted from 0, and how many of its batches are done.
  """
  for start in range(outcomes.restarts):
    for threat, way in enumerate(plan):
      survivors = outcomes.survivors(threat, start)
      batches = datasets.padded_batches(len(survivors), batch_size)
      for done, (places, mask) in enumerate(batches, start=1):
        rows = survivors[places]
        attacked = attack(
          jnp.int32(way.index),
          jnp.int32(way.first_start + start),
          jnp.float32(way.scale),
          make_batch(split, rows),
        )
        attacked = jax.tree.map(lambda x, m=mask: np.asarray(x)[m], attacked)
        outcomes.record(threat, rows[mask], attacked)
        yield start * len(plan) + threat, done
