"""Tests the search: equal effort per method, on validation images only."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from made import about as about_network
from made import make_outcomes, make_run, tables_of
from tiny_run import tiny

from mwrobust import config as config_lib
from mwrobust import search
from mwrobust.errors import UserError
from mwrobust.evaluation import Outcomes
from mwrobust.reproduction import planning, tables
from mwrobust.reproduction.chosen import FIRST, OWN

ROOT = pathlib.Path(__file__).parent.parent


def test_every_method_gets_as_many_candidates():
  found = {method: search.settings_of(method) for method in tables.RIVALS}
  assert {len(settings) for settings in found.values()} == {4}
  for method, candidates in found.items():
    first, *others = candidates.values()
    assert first.keys() == FIRST.keys() | OWN.get(method, {}).keys()
    for other in others:
      assert other.keys() == first.keys()
      assert sum(other[field] != first[field] for field in first) == 1
    assert len({json.dumps(settings) for settings in others}) == 3
  small, large = (search.settings_of('uniform', size) for size in (32, 100))
  rate = 'optimizer.learning_rate'
  assert small['first'][rate] == pytest.approx(0.32 * large['first'][rate])


def test_a_plan_is_80_columns_wide(tmp_path):
  candidates = search.plan_methods(shared(), tables.RIVALS, tmp_path)
  text, _ = planning.describe([candidate.run for candidate in candidates])
  lines = text.splitlines()[1:]  # The first is the folder's path.
  assert max(map(len, lines)) <= 80


def shared(**changes):
  fields = {'train.budget': 100_000, 'train.h': 2, 'eval.examples': 40}
  config = tiny(**fields | changes)
  return search.on_validation_images(config, 'standard', ['eval.examples'])


def test_candidates_are_judged_on_validation_images(tmp_path):
  config = shared()
  assert config.eval.split == 'validation'
  assert config.eval.protocols == ('standard',)
  candidates = search.plan_methods(config, ['ucb', 'greedy'], tmp_path)
  assert len({c.run.workdir for c in candidates}) == 8
  for settings, run, _ in candidates:
    assert run.workdir.parent == tmp_path / run.method
    fields = config_lib.flatten(run.config)
    assert {name: fields[name] for name in settings} == settings
    assert run.config.method == run.method
    assert run.config.train.budget == 100_000
  with pytest.raises(UserError, match=r'train\.budget'):
    search.on_validation_images(tiny(), 'fast', [])


def made_candidate(candidate, share):
  """Writes the run of a candidate without training it."""
  config = candidate.run.config
  about = about_network() | {'split': config.eval.split}
  outcomes = make_outcomes(
    config_lib.make_threats(config), share=share, **about
  )
  make_run(candidate.run.workdir, [outcomes])
  (candidate.run.workdir / 'config.json').write_text(config.to_json())


def test_the_highest_union_is_chosen(tmp_path):
  methods = ['multiplicative_weights', 'uniform']
  candidates = search.plan_methods(shared(), methods, tmp_path)
  for i, candidate in enumerate(candidates):
    made_candidate(candidate, share=0.1 if i in (3, 5) else 0.7)
  path = candidates[0].run.workdir / 'status.json'
  path.write_text('{"status": "diverged"}')
  judged = list(map(search.judge, candidates))
  assert judged[0].accuracies == {}
  assert all('union' in c.accuracies for c in judged[1:])
  best = search.best_settings(judged)
  assert best == {
    'multiplicative_weights': candidates[3].settings,
    'uniform': candidates[5].settings,
  }
  table, text = search.method_parts(judged)
  assert table.markdown.count(' *') == 2
  assert table.markdown.count('diverged') == 9
  assert repr(best['uniform']) in text.markdown.replace('\n', ' ')
  figures = search.as_json(judged)
  assert [each['settings'] for each in figures] == [
    c.settings for c in candidates
  ]


def test_radii_are_those_of_one_threat_alone(tmp_path):
  config = shared()
  radii = search.parse_radii(['dct_linf=0.05,1/10', 'pixel_l1=3,5'])
  assert radii == {'dct_linf': [0.05, 0.1], 'pixel_l1': [3.0, 5.0]}
  candidates = search.plan_radii(config, radii, tmp_path)
  for candidate in candidates:
    (threat,) = config_lib.make_threats(candidate.run.config)
    assert candidate.run.method == f'single {threat.name}'
    assert candidate.settings == {f'threats.{threat.name}.eps': threat.eps}
  for candidate, share in zip(candidates, (0.1, 0.9, 0.8, 0.9), strict=True):
    made_candidate(candidate, share)
  judged = list(map(search.judge, candidates))
  high, low = (c.accuracies['dct_linf'] for c in judged[:2])
  shown, found = (
    tables_of(part.markdown)[0] for part in search.radius_parts(judged, 60)
  )
  assert set(shown) == {'dct_linf', 'pixel_l1'}
  at = 0.05 + 0.05 * (high - 60) / (high - low)
  assert found['dct_linf']['eps with 60 %'] == f'{at:.3g}'
  assert found['pixel_l1']['eps with 60 %'] == 'outside these radii'
  with pytest.raises(UserError, match="--radii = 'dct_linff'"):
    search.plan_radii(config, {'dct_linff': [1.0]}, tmp_path)
  with pytest.raises(UserError, match='--radii=dct_l1'):
    search.parse_radii(['dct_l1=a'])


def test_a_search_from_the_shell(tmp_path):
  """Searches one radius of one threat; the second call trains nothing."""
  path = tmp_path / 'little.py'
  path.write_text(
    f"""
import sys
sys.path.insert(0, {str(ROOT / 'tests')!r})
from tiny_run import tiny
get_config = tiny
"""
  )
  words = (
    *(f'--config={path}', f'--workdir={tmp_path}', '--radii=pixel_l2=0.5'),
    *('--config.train.budget=3000', '--protocol=paper'),
    *('--config.eval.examples=30', '--config.train.T=2'),
  )

  def run(*more):
    return subprocess.run(
      [sys.executable, '-m', 'mwrobust.search', *words, *more],
      capture_output=True,
      text=True,
      cwd=tmp_path,
      env=os.environ | {'PYTHONPATH': str(ROOT)},
      check=False,
    )

  result = run()
  assert result.returncode == 0, result.stderr
  folder = tmp_path / 'little'
  workdir = folder / 'radii' / 'pixel_l2=0.5'
  (path,) = workdir.glob('eval/*/outcomes.npz')
  outcomes = Outcomes.load(path)
  assert outcomes.settings['split'] == 'validation'
  assert len(outcomes.labels) == 30
  (figures,) = json.loads((folder / 'radii.json').read_text())
  assert figures['accuracies'] == outcomes.accuracies()
  assert 'first 30 validation images' in (folder / 'radii.md').read_text()
  last = json.loads((workdir / 'metrics.jsonl').read_text().splitlines()[-1])
  assert last['gradient_evaluations'] <= 3000
  again = run()
  assert again.returncode == 0, again.stderr
  assert '---- run' not in again.stdout
  assert '| done |' in again.stdout.replace('   ', ' ').replace('  ', ' ')


# ------------------------------------------------------------ several processes


def plan_of_two(tmp_path):
  return [
    planning.PlannedRun(method, tiny(method=method), tmp_path / method)
    for method in ('greedy', 'uniform')
  ]


def test_the_standard_protocol_comes_first(tmp_path):
  protocols = ('paper', 'standard')
  config = tiny(**{'eval.examples': 40, 'eval.protocols': protocols})
  run = planning.PlannedRun(config.method, config, tmp_path / 'run')
  make_run(run.workdir)
  for by_protocol in planning.load(run).evaluations.values():
    assert list(by_protocol) == ['standard', 'paper']
  assert planning.status(run)[0] == 'done'
  config.eval.protocols = ('paper',)
  for by_protocol in planning.load(run).evaluations.values():
    assert list(by_protocol) == ['paper']


def test_a_run_in_use_is_left_to_the_other_process(tmp_path, monkeypatch):
  planned = plan_of_two(tmp_path)
  tried = []

  def train(config, workdir, say):
    tried.append(config.method)
    if tried == ['greedy']:
      raise planning.files.InUse('in use')
    make_run(pathlib.Path(workdir))

  monkeypatch.setattr(planning.loop, 'train_and_evaluate', train)
  monkeypatch.setattr(planning, 'WAIT', 0.0)
  planning.make_missing(planned, lambda text: None)
  assert tried == ['greedy', 'uniform', 'greedy']


def test_a_run_that_diverged_is_not_tried_again(tmp_path, monkeypatch):
  planned = plan_of_two(tmp_path)
  tried = []

  def train(config, workdir, say):
    tried.append(config.method)
    run = make_run(pathlib.Path(workdir))
    (run / 'status.json').write_text('{"status": "diverged"}')
    raise planning.loop.Diverged('not finite')

  monkeypatch.setattr(planning.loop, 'train_and_evaluate', train)
  for _ in range(2):
    planning.make_missing(planned, lambda text: None)
  assert tried == ['greedy', 'uniform']
  assert planning.status(planned[0])[0] == 'diverged'
  with pytest.raises(UserError, match='diverged'):
    planning.load(planned[0])
