"""Evaluates the networks of a training run with `mwrobust.evaluation`.

Each evaluation is a folder in WORKDIR/eval with one file, whose settings say
what was evaluated; the names of the folders mean nothing.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
from etils import epath

from mwrobust import config as config_lib
from mwrobust import evaluation
from mwrobust.evaluation import Outcomes
from mwrobust.runtime.signals import stop_signals
from mwrobust.training import averaging, checkpoints
from mwrobust.training.setup import (
  Job,
  check_training,
  prepare,
  refuse_another_run,
  training_batch,
)
from mwrobust.training.state import TrainState

Evaluations = dict[str, dict[str, Outcomes]]  # By network, then by protocol.


def evaluate_run(
  config: ml_collections.ConfigDict,
  workdir: str,
  say: Callable[[str], None] = print,
) -> Evaluations:
  """Evaluates the run in a workdir, as far as it has been trained.

  Args:
    config: the config of the run. The fields of `eval` and `threats` may
      differ, to evaluate a network under threats it was not trained with.
    workdir: the folder of the run. Only the evaluations in it change.
    say: prints messages for the user.

  Returns:
    The outcomes by network (`'h=1'`, `'h=3 average'`, ...) and protocol.
  """
  # Allows a `single` run to be evaluated without the threat of its training.
  checked = config.copy_and_resolve_references()
  checked.method = 'natural'
  config_lib.validate(checked)
  workdir = epath.Path(workdir)
  refuse_another_run(workdir, config, also_free=('threats.',))
  trained = config_lib.load(workdir)
  trained.eval, trained.data = config.eval, config.data
  with stop_signals() as stop:
    return evaluate(prepare(trained), config, workdir, stop.check, say)


def evaluate(
  job: Job,
  config: ml_collections.ConfigDict,
  workdir: epath.Path,
  check_stop: Callable[[], None],
  say: Callable[[str], None],
) -> Evaluations:
  """Attacks each network of the run with each protocol.

  The threats are those of `config`, which need not be those of training.
  `check_stop` is called between batches and may raise to stop.
  """
  threats = config_lib.make_threats(config)
  split = job.config.eval.split

  def attack(network: Network, planned: Planned, then: float) -> Outcomes:
    _, protocol, radii, examples = planned
    images, labels = (array[:examples] for array in job.evaluated)
    about = {
      'network': network.name,
      'is_output': network.is_output,
      'outer_steps': network.outer_steps,
      'members': len(network.members),
      'dataset': job.data.name,
      'split': split,
    }
    # One folder for each evaluation, so that none overwrites another.
    settings = about, protocol, radii, len(labels), job.config.seed
    settings = json.dumps([settings, [t.to_dict() for t in threats]])
    digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
    name = network.name.replace(' ', '_').replace('=', '')
    what = 'the radii' if len(radii) > 1 else f'protocol {protocol}'
    say(f'Evaluating {network.name}, {what}, {len(labels):,} {split} images.')
    return evaluation.evaluate(
      functools.partial(ensemble_logits, job.model),
      images,
      labels,
      threats,
      params=network.members,
      protocol=protocol,
      radii=radii,
      batch_size=job.config.eval.batch_size,
      seed=job.config.seed,
      folder=workdir / 'eval' / f'{name}_{protocol}_{digest}',
      about=about,
      pictures=0 if len(radii) > 1 else 8,  # Curves show none.
      then=then,
      on_batch=lambda outcomes: check_stop(),
    )

  costs = {
    planned: _cost(config, planned, job.data.num_classes)
    for planned in plan(config, len(job.evaluated.labels))
  }
  found = {}
  for network in networks(job, workdir, check_stop, say):
    for planned in list(costs):
      if planned.kind == network.kind:
        costs.pop(planned)
        then = sum(costs.values()) / len(network.members)
        outcomes = attack(network, planned, then)
        if len(planned.radii) == 1:
          found.setdefault(network.name, {})[planned.protocol] = outcomes
  return found


# -------------------------------------------------------------------- the plan


class Planned(NamedTuple):
  """An evaluation of one of the networks of a run."""

  kind: str  # The kind of network; see `Network`.
  protocol: str
  radii: tuple[float, ...]  # Several for a curve.
  examples: int


def plan(config: ml_collections.ConfigDict, most: int) -> list[Planned]:
  """Lists the evaluations of a run that has `most` images to evaluate."""
  if config_lib.window(config) == 1:
    kinds, output = ('last',), 'last'
  elif config.algorithm == 'ensemble':
    kinds, output = ('last', 'ensemble'), 'ensemble'
  else:
    kinds = 'last', 'average', 'recalibrated', 'ensemble'
    output = 'average'
  planned = [
    Planned(kind, protocol, (1.0,), most)
    for kind in kinds
    if kind in (output, *config.eval.others)
    for protocol in config.eval.protocols
  ]
  if config.eval.curve_examples:
    count = min(config.eval.curve_examples, most)
    planned.append(Planned(output, 'fast', evaluation.RADII, count))
  return planned


def gradients(
  config: ml_collections.ConfigDict, most: int, classes: int
) -> float:
  """Returns the most gradients that the evaluations of a run take.

  Three forward passes count as a gradient; an ensemble takes one for each of
  its members.
  """
  return sum(_cost(config, each, classes) for each in plan(config, most))


def _cost(
  config: ml_collections.ConfigDict, planned: Planned, classes: int
) -> float:
  members = config_lib.window(config) if planned.kind == 'ensemble' else 1
  threats = config_lib.make_threats(config)
  of_one = evaluation.cost(threats, planned.protocol, classes, planned.radii)
  return members * planned.examples * of_one


# ---------------------------------------------------------------- the networks


class Network(NamedTuple):
  """A network or ensemble to evaluate."""

  kind: str  # `'last'`, `'average'`, `'recalibrated'` or `'ensemble'`.
  name: str  # Its name, such as `'h=3 average'`.
  # The variables of the network, or of each member of the ensemble.
  members: tuple[Any, ...]
  outer_steps: tuple[int, ...]  # The outer steps its parameters come from.
  is_output: bool  # Whether it is the output of the algorithm.


def networks(
  job: Job,
  workdir: epath.Path,
  check_stop: Callable[[], None],
  say: Callable[[str], None],
) -> Iterator[Network]:
  """Yields the last network, and the average and ensemble of the last h."""
  config = job.config
  all_are_kept = config.algorithm == 'ensemble'
  h = config_lib.window(config)
  states = checkpoints.last(workdir, h, job.init())
  members = tuple(state.variables for state in states)
  outer_steps = tuple(int(state.outer_step) for state in states)
  yield Network('last', 'h=1', members[-1:], outer_steps[-1:], h == 1)

  def network(kind: str, members: tuple[Any, ...], is_output: bool) -> Network:
    name = config_lib.network_name(kind, config)
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


def ensemble_logits(model: Any, members: tuple[Any, ...], images: jax.Array):
  """Returns the logits of one network, or of the ensemble of several.

  BatchNorm uses its running statistics.
  """
  member_fns = [
    functools.partial(model.apply, variables, train=False)
    for variables in members
  ]
  if len(member_fns) == 1:
    return member_fns[0](images)
  return averaging.ensemble(member_fns)(images)


def recalibrate(
  job: Job, state: TrainState, check_stop: Callable[[], None]
) -> TrainState:
  """Recomputes the BatchNorm statistics over an epoch of training batches.

  The mini batches are attacked as if training continued with the last weights;
  the parameters stay as they are.
  """
  check_training(job)
  for step in range(
    int(state.step), int(state.step) + job.schedule.steps_per_epoch
  ):
    check_stop()
    index = job.choose(state.policy, step)
    copy = jax.tree.map(jnp.copy, state)  # The train step donates its state.
    trained, _ = job.train_step(copy, index, training_batch(job, step))
    state = state.replace(step=trained.step, batch_stats=trained.batch_stats)
  return state
