"""Tests the plans and costs of the paper's tables, and makes one."""

import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made import (
  about,
  copy_run,
  evaluations_of,
  ignore,
  make_outcomes,
  make_run,
  remove_evaluations,
  section,
  tables_of,
)
from tiny_run import tiny

from mwrobust import config, evaluation, reporting, reproduce
from mwrobust.errors import UserError
from mwrobust.reporting import paper
from mwrobust.reproduction import planning, tables
from mwrobust.reproduction.chosen import Chosen
from mwrobust.runtime.signals import Stop
from mwrobust.training import loop
from mwrobust.training.setup import prepare
from mwrobust.training.steps import Judged

ROOT = pathlib.Path(__file__).parent.parent
POLICIES = ('greedy', 'round_robin', 'multiplicative_weights')
SINGLE = ('single pixel_linf', 'single dct_linf')
METHODS = (*POLICIES, *SINGLE)
# The gradients of the protocol 'paper' for an image: PGD, SLIDE, and one look
# at what each of them has found, which is a third of a gradient.
ONCE = 4 * 40 + 2 * 100 + 6 / 3
NETWORKS = ('h=1', 'h=2 average', 'h=2 ensemble')


# ------------------------------------------------------------------- the plan


def plan(table, shared, seeds, folder, **more):
  """Returns the plan of a table whose methods have the same seeds."""
  words = [str(seed) for seed in seeds]
  by_method = reproduce.seeds_by_method(table, words, ())
  return tables.plan(table, shared, by_method, folder, **more)


@pytest.mark.parametrize(
  ('table', 'methods', 'protocol', 'data'),
  [
    ('tradeoff', SINGLE, 'paper', 'cifar10'),
    ('cifar10', POLICIES, 'paper', 'cifar10'),
    ('mnist', (*POLICIES, *SINGLE), 'paper', 'mnist'),
    ('restarts', POLICIES, 'paper-20', 'mnist'),
    ('time', (*SINGLE, *POLICIES), 'paper', 'mnist'),
    ('convexity', POLICIES[2:], 'paper', 'mnist'),
  ],
)
def test_a_plan_has_each_method_with_each_seed(
  table, methods, protocol, data, tmp_path
):
  shared = tiny(**{'eval.protocols': ('standard',)})
  before = shared.to_dict()
  planned = plan(tables.TABLES[table], shared, [0, 7], tmp_path)
  assert [(run.method, run.config.seed, run.workdir) for run in planned] == [
    (method, seed, tmp_path / f'{method.replace(" ", "_")}-seed{seed}')
    for method in methods
    for seed in (0, 7)[: 1 if table == 'mnist' and method in SINGLE else 2]
  ]
  assert tables.TABLES[table].config.startswith(f'{data}.py')
  for run in planned:
    name, _, threat = run.method.partition(' ')
    changed = {
      field
      for field, value in config.flatten(run.config).items()
      if value != config.flatten(shared)[field]
    }
    assert changed <= {
      *('seed', 'method', 'policy.threat', 'eval.others'),
      'eval.protocols',
    }
    assert run.config.eval.protocols == ('standard', protocol)
    assert run.config.method == name
    assert run.config.policy.threat == (threat or 'pixel_linf')
  planned[0].config.train.T = 99
  planned[0].config.model.options.hidden = 99
  assert planned[1].config.to_dict()['train'] == before['train']
  assert planned[1].config.to_dict()['model'] == before['model']
  assert shared.to_dict() == before


def test_the_tables_are_those_of_the_paper():
  for name, table in tables.TABLES.items():
    file, _, _ = table.config.partition(':')
    assert (ROOT / 'configs' / file).exists()
    data = file.removesuffix('.py')
    if table.section == 'comparison':
      continue
    if name == 'time':
      assert set(table.methods) == set(paper.HOURS[data])
      continue
    figures = paper.ACCURACIES[data, 20 if name == 'restarts' else 1]
    shown = {(method, 'h=3 average') for method in table.methods}
    for method, others in table.methods.items():
      names = {'last': 'h=1', 'ensemble': 'h=3 ensemble'}
      shown |= {(method, names[kind]) for kind in others}
    columns = {column for column in figures if column[0] in table.methods}
    assert shown & columns
    # Convexity only compares averages.
    assert columns <= shown or name == 'convexity'
    for row in table.rows:
      assert all(row in figures[column] for column in columns)


@pytest.mark.parametrize('words', [[], [''], ['a'], ['0', '-1'], ['1.5']])
def test_bad_seeds_are_refused(words):
  with pytest.raises(UserError, match=f'--seeds={",".join(words)}'):
    reproduce.seeds_by_method(tables.TABLES['mnist'], words, ())


def test_a_seed_counts_once(tmp_path):
  table = tables.TABLES['restarts']
  found = reproduce.seeds_by_method(table, ['2', '0', '2'], ())
  assert found == {policy: [2, 0] for policy in POLICIES}
  with pytest.raises(UserError, match='seed = 4294967296'):
    plan(tables.TABLES['mnist'], tiny(), [2**32], tmp_path)


def test_some_methods_may_have_more_seeds():
  table = tables.TABLES['maini']
  several = ('multiplicative_weights', 'msd')
  found = reproduce.seeds_by_method(table, ['3', '1'], several)
  assert found == {
    method: [3, 1] if method in several else [3] for method in table.methods
  }
  with pytest.raises(UserError, match="--seeds_for = 'mds'"):
    reproduce.seeds_by_method(table, ['0'], ['mds'])


def test_a_comparison_gives_each_method_what_was_chosen_for_it(tmp_path):
  chosen = {
    'ucb': {'policy.exploration': 0.3, 'train.ramp': 0.2},
    'msd': {'optimizer.learning_rate': 0.5, 'train.ramp': 0.1},
  }
  table = tables.restrict(tables.TABLES['maini'], ['ucb', 'msd', 'max'])
  given = ('train.ramp', 'train.budget')
  shared = tiny(**{'train.budget': 60_000, 'eval.protocols': ('standard',)})
  planned = plan(table, shared, [0], tmp_path, chosen=chosen, given=given)
  by_method = {run.method: run.config for run in planned}
  assert by_method['ucb'].policy.exploration == 0.3
  assert by_method['msd'].optimizer.learning_rate == 0.5
  usual = shared.optimizer.learning_rate
  assert by_method['max'].optimizer.learning_rate == usual
  for run in by_method.values():
    assert run.train.ramp == shared.train.ramp  # Given, so not the chosen one.
    assert run.train.budget == 60_000
    assert run.eval.examples == 1000
    assert run.eval.others == ()
    assert run.eval.protocols == ('standard', 'paper')


def test_the_methods_of_the_comparisons():
  rivals = {
    *('multiplicative_weights', 'round_robin', 'uniform', 'greedy', 'e_at'),
    *('ucb', 'max', 'avg', 'msd'),
  }
  for name in ('maini', 'balanced'):
    assert set(tables.TABLES[name].methods) == rivals
  for name in ('released', 'paper'):
    assert list(tables.TABLES[name].methods) == [
      'multiplicative_weights',
      'round_robin',
    ]
  for name in ('maini', 'balanced', 'released', 'paper'):
    assert tables.TABLES[name].fields['train.budget']


def test_a_comparison_is_one_table(tmp_path):
  seeds = {'multiplicative_weights': (0, 1), 'msd': (0,)}
  found = [
    reporting.load(
      make_run(
        tmp_path / f'{method}{seed}',
        **{'method': method, 'seed': seed, 'preset': 'maini'},
        **{'train.ramp': 0.25 if method == 'msd' else 0.5},
      )
    )
    for method, numbers in seeds.items()
    for seed in numbers
  ]
  output = tmp_path / 'table' / 'maini'
  settings = {'optimizer.learning_rate': 1e-3, 'train.ramp': 0.25}
  chosen = Chosen('by a search of ours', {'msd': settings})
  tables.write('maini', tables.TABLES['maini'], found, chosen, output, ignore)
  markdown = (tmp_path / 'table' / 'maini.md').read_text()
  (rows,) = tables_of(section(markdown, 'Accuracy'))
  six = ('pixel_linf', 'pixel_l2', 'pixel_l1', 'dct_linf', 'dct_l2', 'dct_l1')
  names = ('union', 'min', *six)
  assert list(rows) == [
    *(*names, 'natural'),
    *(f'{name}, paper' for name in names),
    *('training, million gradients', 'training, minutes'),
  ]
  assert list(rows['union']) == [
    *('accuracy, %', 'Mult. weights', 'MSD'),
    *('MSD, published', 'MAX, published', 'AVG, published'),
  ]
  assert rows['union']['MSD, published'] == '58.4'
  assert rows['min']['MSD, published'] == '-'
  assert rows['training, minutes']['MSD'] == '3.0'
  for protocol, suffix in (('standard', ''), ('paper', ', paper')):
    first, second, msd = (
      run.evaluations['h=2 average'][protocol].accuracies() for run in found
    )
    for name in names:
      mean = (first[name] + second[name]) / 2
      cells = rows[f'{name}{suffix}']
      assert cells['Mult. weights'].startswith(f'{mean:.1f} (± ')
      assert cells['MSD'].startswith(f'{msd[name]:.1f} (')
  setting = section(markdown, 'Setting')
  assert 'Only the settings of MSD were chosen by a search of ours.' in setting
  assert 'the same 9 epochs, not at equal cost' in ' '.join(setting.split())
  (given,) = tables_of(setting)
  assert given['MSD']['train.ramp'] == '0.25'
  assert given['MSD']['policy.eta'] == '-'
  assert given['Mult. weights']['policy.eta'] == '0.1'


def test_a_table_of_some_methods_keeps_their_order(tmp_path):
  table = tables.TABLES['mnist']
  some = tables.restrict(table, ['single dct_linf', 'greedy'])
  planned = plan(some, tiny(), [0, 1], tmp_path)
  assert [(run.method, run.config.seed) for run in planned] == [
    *(('greedy', 0), ('greedy', 1)),
    ('single dct_linf', 0),
  ]
  assert tables.restrict(table, []) == table


def test_a_threat_that_is_not_there_is_refused_before_anything_runs(tmp_path):
  pixels = tiny(**{'threats.only': ('pixel_linf', 'pixel_l2')})
  with pytest.raises(UserError, match=r"policy.threat = 'dct_linf'"):
    plan(tables.TABLES['time'], pixels, [0], tmp_path)


def test_a_table_of_averages_needs_more_than_one_step(tmp_path):
  table = tables.TABLES['convexity']
  with pytest.raises(UserError, match=r'train\.h'):
    plan(table, tiny(**{'train.h': 1}), [0], tmp_path)


def test_an_ensemble_of_all_is_in_its_table(tmp_path):
  evaluations = [
    make_outcomes(**about(network) | {'is_output': network != 'h=1'})
    for network in ('h=1', 'h=3 ensemble')
  ]
  fields = {'algorithm': 'ensemble', 'data.name': 'mnist5k'}
  run = reporting.load(make_run(tmp_path / 'run', evaluations, **fields))
  _, parts = tables.accuracy_section(tables.TABLES['mnist'], [run])
  (ours,) = tables_of('\n\n'.join(part.markdown for part in parts))
  assert run.output == 'h=3 ensemble'
  assert list(ours['min']) == ['accuracy, %', 'h=1', 'h=3 ensemble']


def test_a_run_of_another_config_is_refused_before_anything_runs(
  tiny_run, tmp_path
):
  """Refuses before any training, not after days of it."""
  planned = plan(tables.TABLES['mnist'], tiny(), [0], tmp_path)
  copy_run(tiny_run, planned[-1].workdir, **{'train.T': 4})
  with pytest.raises(UserError, match=r'train\.T: 4 there, 3 here'):
    planning.describe(planned)


# ------------------------------------------------------------------- the costs


def logged(workdir, kind):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [row for row in map(json.loads, lines) if row['kind'] == kind]


class NoCheckpoints:
  """Replaces checkpoints, without saving anything."""

  def __init__(self, workdir, keep):
    del workdir, keep

  def restore(self, like, say):
    del like, say

  def save(self, state):
    del state

  def close(self):
    pass


def rehearse(config, workdir, worst=None):
  """Runs the real training loop with steps that compute nothing.

  Args:
    config: the config of the run.
    workdir: the folder of the run.
    worst: the number of the threat with the highest validation loss.
  """
  real = prepare(config)

  def init():
    shapes = jax.eval_shape(real.init)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

  def train_step(state, index, batch):
    del batch
    chosen = state.chosen.at[index].add(1)
    return state.replace(step=state.step + 1, chosen=chosen), jnp.float32(1)

  def judge(variables, *rest):
    (labels,) = (each.labels for each in rest if hasattr(each, 'labels'))
    loss = 50.0 if len(rest) > 1 and rest[0] == worst else 1.0
    return Judged(np.full(len(labels), loss), np.ones(len(labels), bool))

  job = real._replace(
    init=init,
    train_step=train_step,
    validation_step=judge,
    probe_step=judge,
    natural_step=judge,
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop, 'Checkpoints', NoCheckpoints)
    loop.train(job, workdir, Stop(), ignore)
  return logged(workdir, 'outer')[-1]


# l1 takes more steps than the others.
STEPS = {
  'attack.steps': 3,
  'threats.pixel_l1.attack': {'steps': 7},
  'threats.dct_l1.attack': {'steps': 7},
}
REHEARSED = (
  *('single pixel_linf', 'single dct_l1', 'round_robin', 'greedy', 'natural'),
  *('max', 'avg', 'msd'),
)


def rehearsal(method, **changes):
  name, _, threat = method.partition(' ')
  fields = {'method': name, 'policy.threat': threat or 'pixel_linf'}
  return tiny(**STEPS | fields | changes)


@pytest.fixture(scope='module')
def rehearsed(tmp_path_factory):
  """Returns by method the config, the last row of metrics and the workdir."""
  found = {}
  for method in REHEARSED:
    workdir = tmp_path_factory.mktemp('rehearsed')
    config = rehearsal(method)
    found[method] = config, rehearse(config, workdir), workdir
  return found


@pytest.mark.parametrize('method', [m for m in REHEARSED if m != 'greedy'])
def test_the_cost_of_training_is_what_training_counts(rehearsed, method):
  config, last, _ = rehearsed[method]
  training, _ = planning.gradient_evaluations(config)
  # Also for round robin: 18 mini batches are three for each of six threats.
  assert training == last['gradient_evaluations']


def test_methods_of_one_budget_cost_the_same(tmp_path):
  """Checks the budget up to a mini batch per outer step."""
  budget = 100_000
  for method in REHEARSED:
    config = rehearsal(method, **{'train.budget': budget})
    training, _ = planning.gradient_evaluations(config)
    # The longest is that of avg: all attacks, and six images to train on.
    assert budget - 3 * 20 * (4 * 3 + 2 * 7 + 6) < training <= budget
  config = rehearsal('single dct_l1', **{'train.budget': budget})
  last = rehearse(config, tmp_path / 'run')
  training, _ = planning.gradient_evaluations(config)
  assert last['gradient_evaluations'] == training


@pytest.mark.parametrize(
  'method',
  [
    *('multiplicative_weights', 'greedy', 'round_robin', 'uniform', 'e_at'),
    *('ucb', 'single pixel_linf', 'single pixel_l1'),
  ],
)
@pytest.mark.parametrize('worst', [0, 1])
def test_a_budget_is_spent_whatever_is_chosen(method, worst, tmp_path):
  """Checks the budget if all choices are cheap, or 20 times as expensive."""
  budget = 15_000
  fields = {
    'threats.only': ('pixel_linf', 'pixel_l1'),
    'attack.steps': 1,
    'threats.pixel_l1.attack': {'steps': 40},
    'validation_attack': {'steps': 1},
    'train.budget': budget,
  }
  config = rehearsal(method, **fields)
  last = rehearse(config, tmp_path / 'run', worst)
  dearest = 20 * (1 if method == 'single pixel_linf' else 40) + 20
  assert budget - dearest < last['gradient_evaluations'] <= budget
  if method in ('multiplicative_weights', 'greedy'):  # They favour the worst.
    rows = logged(tmp_path / 'run', 'train')
    chosen = [
      sum(row['chosen'][name] for row in rows)
      for name in ('pixel_linf', 'pixel_l1')
    ]
    assert chosen[worst] > chosen[1 - worst]


def test_rate_radii_and_outer_steps_of_a_budget(tmp_path):
  """Computes by hand: mini batches take 20 x 2 and 20 x 4 gradients in turn."""
  fields = {
    'threats.only': ('pixel_linf', 'pixel_l1'),
    'attack.steps': 1,
    'threats.pixel_l1.attack': {'steps': 3},
    # Two validations of 30 images take 30 x 4 each, and 480 are left.
    'train.budget': 480 + 2 * 30 * 4,
    'train.T': 2,
    'train.ramp': 0.75,
    'train.log_every': 1,
    'optimizer.schedule': 'cosine',
    'optimizer.learning_rate': 0.1,
  }
  config = rehearsal('round_robin', **fields)
  last = rehearse(config, tmp_path / 'run')
  # Of 480, these are spent before each of eight mini batches.
  spent = np.array([0, 40, 120, 160, 240, 280, 360, 400])
  rows = logged(tmp_path / 'run', 'train')
  np.testing.assert_allclose(
    [row['learning_rate'] for row in rows],
    0.05 * (1 + np.cos(np.pi * spent / 480)),
    rtol=1e-5,
  )
  outer = logged(tmp_path / 'run', 'outer')
  assert [row['step'] for row in outer] == [4, 8]
  scales = [row['radius_scale'] for row in outer]
  assert scales == pytest.approx([0.5 / 0.75, 1])
  assert last['gradient_evaluations'] == 720
  job = prepare(config)
  of_first = job.radius_scale(job.schedule.progress(np.array([1, 0])))
  assert float(of_first) == pytest.approx(40 / 480 / 0.75)


def test_a_budget_that_is_too_small_is_refused():
  """Refuses before anything runs."""
  config = rehearsal('round_robin', **{'train.budget': 100})
  with pytest.raises(UserError, match=r'train\.budget = 100'):
    planning.gradient_evaluations(config)


def test_the_cost_of_greedy_has_a_validation_more(rehearsed):
  config, last, _ = rehearsed['greedy']
  training, _ = planning.gradient_evaluations(config)
  validation = 4 * 30 * (4 * 3 + 2 * 7)
  # All losses are equal here, and the first threat takes 3 steps.
  assert last['gradient_evaluations'] == validation + 18 * 20 * (3 + 1)
  mean = (4 * 3 + 2 * 7) / 6
  assert training == round(validation + 18 * 20 * (mean + 1))


def test_weights_of_round_robin_are_the_shares_it_trains(rehearsed):
  _, last, workdir = rehearsed['round_robin']
  rows = logged(workdir, 'train')
  for name, weight in last['weight'].items():
    assert sum(row['chosen'][name] for row in rows) == 3
    assert weight == pytest.approx(1 / 6)


def test_training_without_attacks_costs_no_attacks():
  natural = tiny(method='natural')
  training, _ = planning.gradient_evaluations(natural)
  assert training == 18 * 20 + 3 * 30 * 12


def test_an_outer_step_may_be_a_part_of_an_epoch():
  half = tiny(**{'train.r': 0.5})
  schedule = prepare(half).schedule
  assert (schedule.steps_per_epoch, schedule.total) == (6, 9)
  training, _ = planning.gradient_evaluations(half)
  assert training == 9 * 20 * (2 + 1) + 3 * 30 * 12
  least = tiny(**{'train.r': 0.01})  # At least one mini batch.
  assert prepare(least).schedule.total == 3


def test_the_cost_of_the_tiny_run(tiny_run):
  training, cost = planning.gradient_evaluations(tiny())
  # All threats take two steps there, so the choices do not matter.
  assert training == logged(tiny_run, 'outer')[-1]['gradient_evaluations']
  full = {
    network: outcomes.evaluations()[1]
    for (network, _), outcomes in evaluations_of(tiny_run).items()
  }
  assert set(full) == set(NETWORKS)
  for done, in_full in (
    outcomes.evaluations() for outcomes in evaluations_of(tiny_run).values()
  ):
    assert (done <= in_full).all()
  # A gradient of an ensemble of two is one of each; three forward passes count
  # as a gradient.
  gradients, forwards = full['h=1'] + full['h=2 average'] + 2 * full['h=1']
  assert cost == round(gradients + forwards / 3)


def test_the_cost_of_the_paper():
  theirs = config.preset('paper', 'mnist')
  theirs.eval.protocols = ('paper-20',)
  training, cost = planning.gradient_evaluations(theirs)
  steps = 4 * 10 + 2 * 20
  assert training == (
    60 * 54_000 * steps / 6  # The attacks, half of them the longer ones.
    + 60 * 54_000
    + 20 * 6_000 * steps
  )
  # 40 steps of PGD or 100 of SLIDE, and one look at what they have found.
  once = 4 * (40 + 1 / 3) + 2 * (100 + 1 / 3)
  # Two climbs, then FAB towards 4 classes; of l1 five, and all classes.
  # The two sets of l2 are the same, so only one of them is attacked.
  fast = 3 * (2 * (100 + 1 / 3) + 4 * (40 + 42 / 3))
  fast += 2 * (5 * (50 + 1 / 3) + 9 * (20 + 22 / 3))
  # The last, the average and an ensemble of three; and seven radii.
  assert cost == round(5 * 20 * 10_000 * once + 7 * 250 * fast)
  theirs.train.h = 1
  theirs.eval.curve_examples = 0
  theirs.eval.protocols = ('paper', 'fast')
  _, cost = planning.gradient_evaluations(theirs)
  assert cost == round(10_000 * (once + fast))


def test_the_cost_of_an_ensemble_of_all():
  """Counts an ensemble of T networks besides the last one."""
  ensemble = tiny(algorithm='ensemble', **{'train.T': 5})
  _, cost = planning.gradient_evaluations(ensemble)
  assert cost == (1 + 5) * 30 * ONCE


def rows_of_plan(planned):
  """Returns the status and the gradients left, by run."""
  text, left = planning.describe(planned)
  (table,) = tables_of(text)
  costs = {run.workdir.name: planning.cost(run) for run in planned}
  assert list(table) == list(costs)
  for name, (status, *counts) in costs.items():
    shown = [f'{count / 1e6:,.1f}' for count in counts]
    assert [*table[name].values()] == [name, status, *shown]
  assert left == sum(cost.left for cost in costs.values())
  return {name: (cost.status, cost.left) for name, cost in costs.items()}


def test_what_is_left_is_what_is_not_done(tiny_run, tmp_path):
  table = tables.TABLES['convexity']
  planned = plan(table, tiny(), range(4), tmp_path)
  workdirs = [run.workdir for run in planned]
  for seed, workdir in enumerate(workdirs[1:], start=1):
    copy_run(tiny_run, workdir, seed=seed)
  # 0 is new, 1 is done. 2 was killed in training, 3 before its evaluation.
  shutil.rmtree(workdirs[2] / 'eval')
  lines = (workdirs[2] / 'metrics.jsonl').read_text().splitlines()
  (workdirs[2] / 'metrics.jsonl').write_text(f'{lines[0]}\n')
  done = json.loads(lines[0])['gradient_evaluations']
  shutil.rmtree(workdirs[3] / 'eval')
  training, cost = planning.gradient_evaluations(planned[0].config)
  name = 'multiplicative_weights-seed'
  assert rows_of_plan(planned) == {
    f'{name}0': ('new', training + cost),
    f'{name}1': ('done', 0),
    f'{name}2': ('begun', round(training + cost - done)),
    f'{name}3': ('begun', cost),
  }


def status_of(planned):
  ((status, _),) = rows_of_plan([planned]).values()
  return status


def test_a_run_is_done_when_all_that_the_table_shows_is_there(
  tiny_run, tmp_path
):
  table = tables.TABLES['convexity']

  def planned(table=table, **changes):
    (run,) = plan(table, tiny(**changes), [0], tmp_path)
    return run

  workdir = planned().workdir
  copy_run(tiny_run, workdir)
  assert status_of(planned()) == 'done'
  # Other protocols, test images and threats need other evaluations.
  more = table._replace(protocol='paper-20')
  assert status_of(planned(more)) == 'begun'
  fewer = planned(**{'eval.examples': 20})
  assert status_of(fewer) == 'begun'
  with_curve = planned(**{'eval.curve_examples': 5})
  assert status_of(with_curve) == 'begun'
  (workdir / 'eval' / 'any').mkdir()
  threats = config.make_threats(planned().config)
  curve = make_outcomes(
    threats, protocol='fast', count=5, radii=(1.0, 4.0), **about()
  )
  curve.save(workdir / 'eval' / 'any' / evaluation.FILE)
  assert status_of(with_curve) == 'done'
  remove_evaluations(workdir, lambda s: s['network'] == 'h=2 ensemble')
  assert status_of(planned()) == 'begun'


def test_a_run_may_have_evaluations_of_more_images(tiny_run, tmp_path):
  """Ignores evaluations on all test images, which the table does not use."""
  table = tables.TABLES['convexity']
  (planned,) = plan(table, tiny(), [0], tmp_path)
  copy_run(tiny_run, planned.workdir)
  more = make_outcomes(
    config.make_threats(planned.config), 'paper', count=50, **about()
  )
  (planned.workdir / 'eval' / 'more').mkdir()
  more.save(planned.workdir / 'eval' / 'more' / evaluation.FILE)
  assert len(reporting.load(planned.workdir).primary.first.labels) == 50
  assert status_of(planned) == 'done'
  assert len(planning.load(planned).primary.first.labels) == 30


@pytest.mark.parametrize(
  ('field', 'value'),
  [('eps', 2.0), ('clip', 'strict'), ('norm', 'linf'), ('space', 'haar')],
)
def test_an_evaluation_under_other_threats_does_not_count(
  field, value, tiny_run, tmp_path
):
  """Evaluates again if a threat of the same name differs."""

  def alter(outcomes):
    outcomes.settings['threats'][1][field] = value

  table = tables.TABLES['convexity']
  (planned,) = plan(table, tiny(), [0], tmp_path)
  copy_run(tiny_run, planned.workdir, alter)
  assert status_of(planned) == 'begun'


def test_an_evaluation_that_was_interrupted_needs_no_training(
  tiny_run, tmp_path
):
  table = tables.TABLES['convexity']
  planned = plan(table, tiny(), [0], tmp_path)
  copy_run(tiny_run, planned[0].workdir)
  remove_evaluations(planned[0].workdir, lambda s: s['network'] != 'h=1')
  _, cost = planning.gradient_evaluations(planned[0].config)
  ((status, count),) = rows_of_plan(planned).values()
  assert status == 'begun'
  assert count <= cost


# --------------------------------------------------------------------- the time


def timed_runs(table, folder, seconds, **fields):
  """Makes the runs of a table with these times by method and seed."""
  found = []
  for run in plan(table, tiny(), [0, 1], folder):
    make_run(
      run.workdir,
      **fields,
      **{
        'seed': run.config.seed,
        'method': run.config.method,
        'policy.threat': run.config.policy.threat,
      },
    )
    path = run.workdir / 'metrics.jsonl'
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
      row['seconds'] = seconds[run.method][run.config.seed] * row['step'] / 30
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    found.append(reporting.load(run.workdir))
  return found


def test_hours_are_compared_with_those_of_one_threat(tmp_path):
  table = tables.TABLES['time']
  seconds = {
    'single pixel_linf': (3600, 7200),
    'single dct_linf': (3000, 4200),
    'greedy': (5400, 5400),
    'round_robin': (9000, 7200),
    'multiplicative_weights': (7200, 6300),
  }
  titles = {
    'single pixel_linf': 'Single pixel_linf',
    'single dct_linf': 'Single dct_linf',
    'greedy': 'Greedy',
    'round_robin': 'Round robin',
    'multiplicative_weights': 'Mult. weights',
  }
  first = statistics.mean(seconds['single pixel_linf'])
  theirs = paper.HOURS['mnist']

  def rows_of(name, **fields):
    found = timed_runs(table, tmp_path / name, seconds, **fields)
    heading, (part, *others) = tables.time_section(table, found)
    assert heading == 'Training time'
    (rows,) = tables_of(part.markdown)
    assert list(rows) == [titles[method] for method in table.methods]
    for method, title in titles.items():
      ours = statistics.mean(seconds[method])
      cells = list(rows[title].values())[1:]
      assert cells[:2] == [f'{ours / 3600:.3f}', f'{ours / first:.2f}']
      yield method, cells[2:], others

  for method, cells, (note,) in rows_of('paper'):
    assert cells == [
      f'{theirs[method]:.2f}',
      f'{theirs[method] / theirs["single pixel_linf"]:.2f}',
    ]
    assert 'train.T 3 (paper: 20)' in note.markdown
  # Other data are not comparable.
  for _, cells, (note,) in rows_of('other', **{'data.name': 'mnist5k'}):
    assert cells == []
    assert 'data mnist5k (paper: mnist)' in note.markdown


# ------------------------------------------------------------ the command line


def run_reproduce(*words, cwd=ROOT):
  return subprocess.run(
    [sys.executable, '-m', 'mwrobust.reproduce', *map(str, words)],
    capture_output=True,
    text=True,
    cwd=cwd,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    check=False,
  )


@pytest.mark.parametrize(
  ('words', 'message'),
  [
    (['--table=mnist', '--seeds=0,x'], '--seeds=0,x'),
    (['--table=mnist', '--methods=gredy'], "--methods = 'gredy'"),
    (['--table=mani'], "Did you mean 'maini'?"),
  ],
)
def test_what_cannot_be_made_is_refused(words, message):
  result = run_reproduce(*words)
  assert result.returncode == 1
  assert message in result.stdout + result.stderr
  assert 'Traceback' not in result.stderr


@pytest.fixture(scope='module')
def little(tmp_path_factory):
  """Writes a config file of the tiny run."""
  path = tmp_path_factory.mktemp('config') / 'little.py'
  path.write_text(
    f"""
import sys
sys.path.insert(0, {str(ROOT / 'tests')!r})
from tiny_run import tiny
get_config = tiny
"""
  )
  return path


@pytest.fixture(scope='module')
def made(little, tiny_run, tmp_path_factory):
  """Makes the table on MNIST, of which one run was already finished."""
  folder = tmp_path_factory.mktemp('made')
  shutil.copytree(tiny_run, folder / 'little' / 'multiplicative_weights-seed0')
  words = f'--config={little}', f'--workdir={folder}'
  return folder / 'little', words, run_reproduce('--table=mnist', *words)


def test_a_dry_run_lists_and_writes_nothing(little, tmp_path):
  result = run_reproduce(
    *('--table=restarts', '--seeds=0,1', '--dry_run'),
    *(f'--config={little}', '--config.train.T=4'),
    cwd=tmp_path,
  )
  assert result.returncode == 0, result.stderr
  assert list(tmp_path.iterdir()) == []
  (table,) = tables_of(result.stdout)
  assert list(table) == [
    f'{policy}-seed{seed}' for policy in POLICIES for seed in (0, 1)
  ]
  assert 'runs/reproduce/little:' in result.stdout
  assert max(map(len, result.stdout.splitlines())) <= 80
  steps = 6 * 2  # Of all threats.
  training = 4 * 120 * (2 + 1) + 4 * 30 * steps
  for name, cells in table.items():
    assert cells['status'] == 'new'
    # The average, the last, and here only an ensemble of two.
    networks = 4 if 'multiplicative' in name else 2
    # With one start, then with 20.
    cost = (1 + 20) * 30 * networks * ONCE
    more = 30 * steps if 'greedy' in name else 0
    assert cells['train'] == f'{(training + more) / 1e6:,.1f}'
    assert cells['eval'] == f'{cost / 1e6:,.1f}'
  assert re.search(r'\d:\d\d\sleft\sin\stotal', result.stdout)


def test_only_what_is_missing_is_trained(made, tiny_run):
  results, _, result = made
  assert result.returncode == 0, result.stderr
  finished = results / 'multiplicative_weights-seed0'
  assert 'is already trained' not in result.stdout
  assert (finished / 'metrics.jsonl').read_bytes() == (
    tiny_run / 'metrics.jsonl'
  ).read_bytes()
  for method in METHODS:
    workdir = results / f'{method.replace(" ", "_")}-seed0'
    status = json.loads((workdir / 'status.json').read_text())
    assert status == {'status': 'done'}
    assert (f'{workdir}\n' in result.stdout) == (workdir != finished)


def test_a_made_table_is_written_thrice(made):
  results, _, result = made
  assert {path.name for path in results.glob('mnist.*')} == {
    *('mnist.json', 'mnist.md', 'mnist.html')
  }
  markdown = (results / 'mnist.md').read_text()
  (ours,) = tables_of(section(markdown, 'Accuracy'))
  figures = json.loads((results / 'mnist.json').read_text())['runs']
  assert [(run['method'], run['seed']) for run in figures] == [
    (method, 0) for method in METHODS
  ]
  titles = (
    *('Greedy', 'Round robin', 'Mult. weights'),
    *('Single pixel_linf', 'Single dct_linf'),
  )
  for run, title in zip(figures, titles, strict=True):
    workdir = results / f'{run["method"].replace(" ", "_")}-seed0'
    assert run['preset'] == 'paper'
    assert run['config'] == json.loads((workdir / 'config.json').read_text())
    final = logged(workdir, 'outer')[-1]
    assert run['training'] == {
      field: final[field] for field in ('gradient_evaluations', 'seconds')
    }
    last, output, ensemble = NETWORKS
    shown = {output}
    if run['method'] in POLICIES:
      shown |= {last}
    if run['method'] == 'multiplicative_weights':
      shown |= {ensemble}
    assert set(run['accuracies']) == shown
    for network, by_protocol in run['accuracies'].items():
      (accuracies,) = by_protocol.values()
      outcomes = evaluations_of(workdir)[network, 'paper']
      natural = outcomes.logits.argmax(axis=1) == outcomes.labels
      correct = natural & (outcomes.fell == -1)
      assert accuracies['union'] == pytest.approx(100 * correct.all(0).mean())
      assert accuracies['min'] == pytest.approx(100 * correct.mean(1).min())
      assert accuracies['images'] == 30
      for row, cells in ours.items():
        value = cells[f'{title} {network}'].partition(' ')[0]
        assert value == f'{accuracies[row]:.1f}'
  for words in ('preset paper', 'data mnist5k (paper: mnist)', '## Cost'):
    assert words in markdown
    assert words in result.stdout
  assert str(results / 'mnist.html') in result.stdout
  page = (results / 'mnist.html').read_text()
  assert page.startswith('<!doctype html>')


def test_the_cost_of_a_made_table_was_known_before(made):
  results, _, _ = made
  for policy in POLICIES:
    shared = tiny(method=policy)
    training, _ = planning.gradient_evaluations(shared)
    last = logged(results / f'{policy}-seed0', 'outer')[-1]
    assert training == last['gradient_evaluations']


def test_restarts_only_evaluate_again(made):
  results, words, _ = made
  before = {
    path: path.read_bytes()
    for path in results.rglob('*')
    if path.name == 'metrics.jsonl' or path.suffix in ('.npz', '.md')
  }
  output = results / 'elsewhere' / 'appendix'
  methods = '--methods=greedy', f'--output={output}'
  result = run_reproduce('--table=restarts', *words, *methods)
  assert result.returncode == 0, result.stderr
  assert 'outer step' not in result.stderr
  for path, content in before.items():
    assert path.read_bytes() == content, path
  markdown = (results / 'elsewhere' / 'appendix.md').read_text()
  assert 'Protocol paper-20.' in markdown
  figures = json.loads((results / 'elsewhere' / 'appendix.json').read_text())
  assert [run['method'] for run in figures['runs']] == ['greedy']
  for run in figures['runs']:
    found = evaluations_of(results / f'{run["method"]}-seed0')
    for network, by_protocol in run['accuracies'].items():
      one, many = (found[network, name] for name in ('paper', 'paper-20'))
      assert set(by_protocol) == {'paper', 'paper-20'}
      after_one = many.correct | (many.natural & (many.tried > 1))
      np.testing.assert_array_equal(after_one, one.correct)
      union = 100 * many.union.mean()
      assert by_protocol['paper-20']['union'] == pytest.approx(union)
  # Further evaluations of a run do not change the first table.
  result = run_reproduce('--table=mnist', *words)
  assert result.returncode == 0, result.stderr
  path = results / 'mnist.md'
  assert path.read_bytes() == before[path]
