"""Tests the programs of a wheel, outside the checkout."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile

import pytest

import mwrobust

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  """Builds the wheel from a copy, because building leaves files behind."""
  source = tmp_path_factory.mktemp('source')
  for name in ('mwrobust', 'configs'):
    ignore = shutil.ignore_patterns('__pycache__')
    shutil.copytree(ROOT / name, source / name, ignore=ignore)
  for name in ('pyproject.toml', 'README.md', 'LICENSE'):
    shutil.copy(ROOT / name, source)
  subprocess.run(
    [
      *(sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-deps'),
      *('--no-index', '--no-build-isolation', f'--wheel-dir={source}', '.'),
    ],
    cwd=source,
    check=True,
  )
  (path,) = source.glob('*.whl')
  return path


@pytest.fixture(scope='module')
def start(wheel, tmp_path_factory):
  """Starts a program of the unpacked wheel in an empty folder."""
  folder = tmp_path_factory.mktemp('installed')
  with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder)
  elsewhere = tmp_path_factory.mktemp('elsewhere')

  def start(module, *words):
    return subprocess.Popen(
      [sys.executable, '-m', f'mwrobust.{module}', *words],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      cwd=elsewhere,
      env=os.environ | {'PYTHONPATH': str(folder)},
    )

  return start


def test_it_holds_the_package_the_configs_and_the_license(wheel):
  with zipfile.ZipFile(wheel) as archive:
    found = {name for name in archive.namelist() if name.endswith('.py')}
    licenses = [name for name in archive.namelist() if name.endswith('LICENSE')]
  package = {str(p.relative_to(ROOT)) for p in ROOT.glob('mwrobust/**/*.py')}
  configs = {f'mwrobust/configs/{p.name}' for p in ROOT.glob('configs/*.py')}
  assert found == package | configs
  assert len(licenses) == 1
  assert wheel.name.split('-')[:2] == ['mwrobust', mwrobust.__version__]


def test_there_is_one_version():
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  assert 'version' in project['dynamic']
  citation = (ROOT / 'CITATION.cff').read_text()
  assert f'\nversion: {mwrobust.__version__}\n' in citation


def test_the_default_job_starts_without_a_checkout(start):
  process = start(
    *('main', '--config=configs/quickstart.py:runlocal', '--workdir=run'),
    *('--config.train.log_every=1', '--config.threats.only=pixel_linf'),
  )
  line = 'begun'
  while line and not re.search(r'step +\d+/', line):
    line = process.stderr.readline()
  process.send_signal(signal.SIGTERM)
  _, stderr = process.communicate(timeout=120)
  assert process.returncode == 128 + signal.SIGTERM, stderr


@pytest.mark.parametrize(
  ('words', 'expected'),
  [
    (('main', '--help'), '--config'),
    (('reproduce',), '--table=mnist'),
    (('reproduce', '--table=maini', '--dry_run'), 'msd-seed0'),
  ],
)
def test_the_programs_find_their_configs(words, expected, start):
  process = start(*words)
  stdout, stderr = process.communicate(timeout=120)
  assert expected in stdout
  assert stderr == ''
