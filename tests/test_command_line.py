import os
import pathlib
import re
import subprocess
import sys

import pytest

from mwrobust import command_line
from mwrobust import config as config_lib
from mwrobust.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]


def start(module, *words, cwd=ROOT):
  return subprocess.run(
    [sys.executable, '-m', f'mwrobust.{module}', *words],
    capture_output=True,
    text=True,
    cwd=cwd,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    check=False,
  )


def test_help_shows_the_config_its_variants_and_fields():
  text = start('main', '--help').stdout
  assert '--config:' in text
  assert '--workdir' in text
  for path in (ROOT / 'configs').glob('*.py'):
    assert f'configs/{path.name}' in text
  for variant in ('released', 'maini', 'cnn', 'runlocal'):
    assert f'`{variant}`' in text
  for field in re.findall(r'--config\.([\w.]+)=', text):
    config_lib.check_field(field)
  assert '--config.threats.only=' in text
  assert max(map(len, text.splitlines())) <= 80


def test_numbers_may_be_fractions():
  parse = command_line.NumberParser().parse
  assert parse('8/255') == parse(' 8 / 255') == 8 / 255
  assert parse('0.3') == parse(0.3) == 0.3
  assert parse('1e-2') == 0.01


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('pixel_linf,dct_l1', ('pixel_linf', 'dct_l1')),
    ('pixel_linf, dct_l1', ('pixel_linf', 'dct_l1')),
    ("('pixel_linf', 'dct_l1')", ('pixel_linf', 'dct_l1')),
    ('(pixel_linf,dct_l1)', ('pixel_linf', 'dct_l1')),
    ('paper-20', ('paper-20',)),
    ('2', (2,)),
    ('3.0,2,1', (3.0, 2, 1)),
    ('[30, 45]', (30, 45)),
    ('', ()),
    ('()', ()),
  ],
)
def test_tuples_may_be_written_with_commas(text, expected):
  assert command_line.TupleParser().parse(text) == expected


def test_the_flags_of_a_config_are_fractions_and_tuples(tmp_path):
  # Refused only when the whole config is checked, so all of it was read.
  result = start(
    'main',
    f'--workdir={tmp_path}/run',
    '--config=configs/mnist.py:cnn',  # From the package.
    '--config.threats.only=pixel_linf,dct_l1',
    '--config.eval.protocols=standard,paper',
    '--config.model.options.features=8,16',
    *('--config.train.r', '1/2'),
    '--config.threats.dct_l1.eps=0/255',
    cwd=tmp_path,
  )
  assert result.returncode == 1
  assert 'threats.dct_l1.eps = 0.0' in result.stderr
  assert len(result.stderr.splitlines()) == 1


def test_the_config_may_follow_its_fields_and_attacks_be_changed(tmp_path):
  result = start(
    'main',
    f'--workdir={tmp_path}/run',
    *('--config.train.r', '1/2'),
    '--config.threats.pixel_l2.attack.step_size=1/4',
    '--config.validation_attack.radii=1',
    '--config.validation_attack.random_start=false',
    *('--config', 'configs/mnist.py:cnn'),
    '--config.threats.dct_l1.eps=0/255',
  )
  assert result.returncode == 1
  # The first wrong field, so all others were read.
  assert 'threats.dct_l1.eps = 0.0' in result.stderr
  assert len(result.stderr.splitlines()) == 1


def test_reproduce_without_a_table_lists_them():
  result = start('reproduce')
  assert result.returncode == 0
  tables = re.findall(r'--table=(\w+)', result.stdout)
  assert {'mnist', 'cifar10', 'restarts', 'time'} <= {*tables}
  assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
  ('field', 'named'),
  [
    ('T', ["'train.T'"]),
    ('trian.T', ["'train.T'"]),
    ('batch_size', ["'train.batch_size'", "'eval.batch_size'"]),
    ('eps', ["'threats.NAME.eps'"]),
    ('threats.dct_l1.epz', ["'threats.dct_l1.eps'"]),
    ('threats.dct_l1.attack.step', ["'threats.dct_l1.attack.steps'"]),
    ('validation_attack.radi', ["'validation_attack.radii'"]),
    ('train', ['config.train']),
    ('epochs', ['train.T', 'train.r']),
  ],
)
def test_a_misspelt_field_gets_a_suggestion(field, named):
  with pytest.raises(UserError) as caught:
    config_lib.check_field(field)
  assert all(word in str(caught.value) for word in [f'config.{field}', *named])


@pytest.mark.parametrize(
  ('flags', 'named'),
  [
    (['--config.train.t=3'], ['train.t', "'train.T'"]),
    (['--config.threats.dct_ll.eps=3'], ["'dct_ll'", "'dct_l2'"]),
    (
      ['--config.threats.wide.space=pixel'],
      ["'wide'", 'dct_l1', 'pixel_linf', 'config file'],
    ),
    (
      ['--config.threats.dct_l2.attack.step_size=1/0'],
      ["threats.dct_l2.attack.step_size = '1/0'"],
    ),
    (['--config.validation_attack.steps=x'], ["validation_attack.steps = 'x'"]),
    (
      ['--config', 'configs/mnist.py:cnn', '--config.model.options.hiden=8'],
      ['hiden', "'hidden'"],
    ),
    (['--config.train.T=x'], ['--config.train.T=x']),
    (['--config.train.T=2.5'], ['--config.train.T=2.5', 'integer']),
    (['--config=configs/minst.py'], ['minst.py', "'configs/mnist.py'"]),
    (['--config=configs/mnist.py:relased'], ["'relased'", "'released'"]),
    (['--config.train.h=99'], ['train.h = 99', 'train.T']),
    (['--config.threats.dct_l2.eps=1/0'], ['--config.threats.dct_l2.eps=1/0']),
    (['--confg=x'], ["'confg'", 'config']),
    (['--mode=eval'], ['config.json']),
    (['more'], ['more']),
  ],
)
def test_a_bad_flag_is_named_without_a_traceback(flags, named, tmp_path):
  result = start('main', f'--workdir={tmp_path}/w', *flags)
  assert result.returncode != 0
  said = result.stdout + result.stderr
  assert all(word in said for word in named), said
  assert 'Traceback' not in said
  assert not (tmp_path / 'w').exists()


def test_the_oldest_compiled_programs_are_deleted_beyond_the_limit(tmp_path):
  for age, name in enumerate(('newest', 'older', 'oldest')):
    path = tmp_path / f'{name}-cache'
    path.write_bytes(b'x' * 100)
    os.utime(path, (1e9 - age, 1e9 - age))
  command_line.limit_cache(tmp_path, 250)
  assert {path.name for path in tmp_path.iterdir()} == {
    'newest-cache',
    'older-cache',
  }
  command_line.limit_cache(tmp_path / 'missing', 250)


@pytest.mark.parametrize(
  ('field', 'said'),
  [
    ('data', 'data.name'),
    ('model.width', "'model.options.width'"),
    ('train.epochs', 'train.r'),
  ],
)
def test_a_group_is_no_field(field, said):
  with pytest.raises(UserError, match=re.escape(f'config.{field}')) as caught:
    config_lib.check_field(field)
  assert said in str(caught.value)


def test_what_a_flag_must_be_is_said():
  for parser, word in (
    (command_line.NumberParser(), 'number'),
    (command_line.IntegerParser(), 'integer'),
    (command_line.BooleanParser(), 'true'),
  ):
    with pytest.raises(ValueError, match=word):
      parser.parse('abc')
