import functools
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import tiny

from mwrobust import attacks, config, datasets, evaluate, models, steps
from mwrobust.outcomes import Outcomes

ROOT = pathlib.Path(__file__).parent.parent
PAIRS = tuple(
  (threat, attacks.slide(3, percentile=95))
  for threat in attacks.six_threats(0.05, 0.4, 2.0)
)
N, RESTARTS = 30, 4


@pytest.fixture(scope='module')
def attack():
  """The attack on a random network, and the examples."""
  rng = np.random.default_rng(1)
  images = rng.integers(0, 256, (N, 12, 12, 1), dtype=np.uint8)
  model = models.create(
    'cnn', num_classes=3, mean=(0.5,), std=(0.5,), features=(4, 4), hidden=8
  )
  variables = model.init(jax.random.key(3), jnp.ones((1, 12, 12, 1)), False)
  logits = steps.make_logits_step(model=model)((variables,), images)
  split = datasets.Split(images, np.asarray(logits.argmax(-1), np.int32))
  step = steps.make_attack_step(model=model, pairs=PAIRS, key=jax.random.key(0))
  return functools.partial(step, (variables,)), split, np.asarray(logits)


def begin(attack, restarts=RESTARTS):
  _, split, logits = attack
  return Outcomes.begin(
    settings={},
    pairs=PAIRS,
    restarts=restarts,
    labels=split.labels,
    logits=logits,
    logits_again=logits[:5],
    images=split.images[:2],
  )


PLAN = [evaluate.Way(index) for index in range(6)]


def by_survivors(attack, batch_size, begun=None):
  step, split, _ = attack
  outcomes = begun or begin(attack)
  batches = list(
    evaluate.attack_survivors(outcomes, PLAN, step, split, batch_size)
  )
  return outcomes, batches


@pytest.fixture(scope='module')
def full(attack):
  """The protocol without a shortcut: each start of each threat on everyone."""
  step, split, _ = attack
  ids = np.arange(N, dtype=np.int32)
  batch = steps.Batch(split.images, split.labels, ids)
  return [
    [
      step(jnp.int32(i), jnp.int32(start), jnp.float32(1), batch)
      for start in range(RESTARTS)
    ]
    for i in range(6)
  ]


@pytest.mark.parametrize('batch_size', [6, 30, 64])
def test_survivors_alone_give_what_attacking_everyone_gives(
  attack, full, batch_size
):
  outcomes, _ = by_survivors(attack, batch_size)
  assert outcomes.complete
  some_fell_late = False
  for threat, starts in enumerate(full):
    correct = np.array([start.predicted == outcomes.labels for start in starts])
    for after in range(1, RESTARTS + 1):  # Exact after every number of starts.
      np.testing.assert_array_equal(
        outcomes.correct_after(after)[threat], correct[:after].all(axis=0)
      )
    fell_at = np.where(correct.all(0), RESTARTS - 1, correct.argmin(axis=0))
    np.testing.assert_array_equal(outcomes.starts[threat], fell_at + 1)
    some_fell_late |= ((fell_at > 0) & ~correct.all(0)).any()
    # Told is the start that fooled it, or else the one of the highest loss.
    losses = np.array([start.loss for start in starts])
    told = np.where(
      correct.all(0), losses.max(0), losses[fell_at, np.arange(N)]
    )
    np.testing.assert_allclose(outcomes.loss[threat], told, rtol=1e-4)
  assert some_fell_late
  done, everything = outcomes.gradient_evaluations()
  assert done == 3 * outcomes.starts.sum() < everything


def test_survivors_are_packed_into_full_batches(attack):
  shapes = []
  step, split, _ = attack

  def recording(index, start, scale, batch):
    shapes.append(batch.images.shape)
    return step(index, start, scale, batch)

  outcomes = begin(attack)
  for _ in evaluate.attack_survivors(outcomes, PLAN, recording, split, 6):
    pass
  assert set(shapes) == {(6, 12, 12, 1)}
  passes = [
    (outcomes.starts[threat] > start).sum()
    for threat in range(6)
    for start in range(RESTARTS)
  ]
  assert len(shapes) == sum(-(-int(attacked) // 6) for attacked in passes)


def test_a_saved_half_is_gone_on_with(attack, tmp_path):
  expected, _ = by_survivors(attack, 6)
  step, split, _ = attack
  outcomes = begin(attack)
  for number, _ in enumerate(
    evaluate.attack_survivors(outcomes, PLAN, step, split, 6)
  ):
    if number == 23:
      break
  outcomes.save(tmp_path / 'half.npz')
  resumed, batches = by_survivors(
    attack, 6, Outcomes.load(tmp_path / 'half.npz')
  )
  assert batches
  for field, value in vars(expected).items():
    np.testing.assert_array_equal(getattr(resumed, field), value)


# ---------------------------------------------------------------- a whole run


@pytest.fixture
def run(tiny_run, tmp_path):
  shutil.copytree(tiny_run, tmp_path / 'run')
  return tmp_path / 'run'


def run_main(*flags):
  return subprocess.run(
    [sys.executable, '-m', 'mwrobust.main', *flags],
    capture_output=True,
    text=True,
    cwd=ROOT,
    check=False,
  )


def test_the_config_is_that_of_the_run(run):
  before = (run / 'status.json').read_bytes()
  result = run_main(
    *('--mode=eval', '--workdir', str(run)),
    *('--config.eval.restarts=3', '--config.eval.examples=12'),
  )
  assert result.returncode == 0, result.stderr
  name = 'h=2_average-examples=12-restarts=3'
  outcomes = Outcomes.load(run / 'eval' / f'{name}.npz')
  assert outcomes.restarts == 3
  assert outcomes.correct.shape == (6, 12)
  done, full = outcomes.gradient_evaluations()
  assert f'Gradient evaluations: {done:,} of the {full:,}' in result.stdout
  assert (run / 'report-examples=12-restarts=3.html').exists()
  assert (run / 'status.json').read_bytes() == before
  # One start of three is what the run had.
  one = Outcomes.load(run / 'eval' / 'h=2_average.npz')
  np.testing.assert_array_equal(outcomes.correct_after(1), one.correct[:, :12])


def test_the_strict_reading_stays_in_the_ball(run):
  evaluations = evaluate.evaluate_run(
    tiny(**{'eval.strict': True}), str(run), lambda text: None
  )
  assert list(evaluations) == [
    *('h=1', 'h=2 average', 'h=2 ensemble'),
    *('h=1, strict', 'h=2 average, strict', 'h=2 ensemble, strict'),
  ]
  strict, paper = evaluations['h=1, strict'], evaluations['h=1']
  eps = strict.eps[:, None]
  assert (strict.norm_clipped <= eps * (1 + 1e-4)).all()
  assert (paper.norm_clipped > 2 * eps)[3].any()  # dct_linf


def test_another_state_of_training_is_evaluated_anew(run):
  config_ = tiny()
  told = []
  evaluate.evaluate_run(config_, str(run), told.append)
  assert all('Already evaluated' in text for text in told)
  # As if training had gone on since.
  path = run / 'eval' / 'h=1.npz'
  outcomes = Outcomes.load(path)
  outcomes.settings['outer_steps'] = [1]
  outcomes.save(path)
  told.clear()
  evaluate.evaluate_run(config_, str(run), told.append)
  assert 'other parameters or settings' in told[0]


@pytest.mark.parametrize(
  ('make', 'flags', 'message'),
  [
    (lambda run: None, ['--workdir=nowhere'], 'nowhere holds no run'),
    (lambda run: None, [], 'Name the --workdir of a run'),
    (
      lambda run: shutil.rmtree(run / 'checkpoints'),
      ['--workdir={run}'],
      'run has no checkpoints: train there first',
    ),
    (
      lambda run: shutil.rmtree(run / 'checkpoints' / '2'),
      ['--workdir={run}'],
      'has the outer steps [3], but 2 are needed',
    ),
    (
      lambda run: None,
      ['--workdir={run}', '--config.eval.examples=1001'],
      'eval.examples = 1001 is more than the 1000 there are',
    ),
    (
      lambda run: _rename_hidden(run),
      ['--workdir={run}'],
      'params/Dense_0/bias is (8,) there, (9,) here',
    ),
    (
      lambda run: (run / 'config.json').write_text('{'),
      ['--workdir={run}'],
      'config.json is no config',
    ),
  ],
)
def test_what_cannot_be_evaluated_is_told_in_a_line(run, make, flags, message):
  make(run)
  result = run_main('--mode=eval', *(flag.format(run=run) for flag in flags))
  assert result.returncode == 1
  assert message in result.stderr
  assert 'Traceback' not in result.stderr


def _rename_hidden(run):
  fields = json.loads((run / 'config.json').read_text())
  fields['model']['options']['hidden'] = 9
  (run / 'config.json').write_text(json.dumps(fields))


def test_a_config_survives_its_json(run):
  assert config.load(run).to_dict() == tiny().to_dict()
