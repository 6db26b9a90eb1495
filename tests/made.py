"""Makes outcomes and runs by hand, for reports, and disks that fill up."""

import contextlib
import functools
import json
import operator
import os
import re
import resource
import shutil

import numpy as np

from mwrobust import config as config_lib
from mwrobust.evaluation import Outcomes

SIX = ('pixel_linf', 'pixel_l2', 'pixel_l1', 'dct_linf', 'dct_l2', 'dct_l1')
THREATS = config_lib.make_threats(config_lib.preset('paper', 'mnist'))
ATTACKS = {
  'standard': ('apgd-ce', 'apgd-t', 'shrink', 'fab-t', 'square'),
  'fast': ('shrink', 'fab-t'),
  'paper': ('pgd',),
  'paper-20': ('pgd',),
}
KINDS = {'fab-t': 'Fab', 'square': 'Square'}


def make_outcomes(
  threats=THREATS,
  protocol='standard',
  count=40,
  radii=(1.0,),
  share=0.5,
  by=None,
  seed=0,
  pictures=3,
  channels=1,
  **about,
):
  """Makes the outcomes of an evaluation that never took place.

  Args:
    threats: the threats of the evaluation.
    protocol: the name of the protocol.
    count: the number of images; a tenth is misclassified without an attack.
    radii: multiples of the radii.
    share: the share of images fooled under each threat, or a bit less.
    by: the number of the attack that fools them; the first by default.
    seed: decides which images are fooled.
    pictures: the number of images that are kept.
    channels: the number of channels of the images.
    **about: further settings.
  """
  names = ATTACKS[protocol]
  settings = about | {
    'protocol': protocol,
    'threats': [
      threat.to_dict()
      | {
        'name': threat.name
        if len(radii) == 1
        else f'{threat.name} x{radius:g}',
        'of': threat.name,
        'eps': threat.eps * radius,
        'attacks': {
          name: {
            'attack': KINDS.get(name, 'Ascent'),
            'radii': [6.0, 1.0] if name == 'shrink' else [1.0],
            'steps': 10,
            'tries': 1,
            'evaluations': [10, int(a > 1)],
          }
          for a, name in enumerate(names)
        },
      }
      for radius in radii
      for threat in threats
    ],
    'radii': list(radii),
    'seed': 0,
    'data': {'images': [count, 8, 8, channels], 'sha256': f'of {count}'},
  }
  rng = np.random.default_rng(seed)
  labels = np.arange(count, dtype=np.int32) % 10
  wrong = np.arange(count) < count // 10
  logits = np.eye(10, dtype=np.float32)[(labels + wrong) % 10]
  images = rng.uniform(size=(pictures, 8, 8, channels)).astype(np.float32)
  outcomes = Outcomes.begin(
    json.loads(json.dumps(settings)), labels, logits, images
  )
  shape = outcomes.fell.shape
  shares = np.linspace(share, 0.8 * share, shape[0])[:, None]
  falls = (rng.uniform(size=shape) < shares) & ~wrong
  outcomes.fell[falls] = by or 0
  outcomes.tried[:] = np.where(falls, (by or 0) + 1, len(names))
  outcomes.tried[:, wrong] = 0
  outcomes.predicted[falls] = (np.tile(labels, (shape[0], 1))[falls] + 1) % 10
  outcomes.loss[:] = rng.uniform(size=shape)
  outcomes.distance[:] = outcomes.eps[:, None]
  outcomes.adversarial[:] += 0.1
  outcomes.spent[:] = count * 6, count
  return outcomes


def make_run(workdir, evaluations=(), outer_steps=3, **fields):
  """Writes the workdir of a run that was never trained.

  Args:
    workdir: the folder of the run.
    evaluations: its `Outcomes`; by default of three networks, two protocols
      each, and a curve.
    outer_steps: the number of outer steps in its metrics.
    **fields: fields of the config, `{'method': 'greedy'}`.
  """
  config = config_lib.preset('paper', 'mnist')
  config.train.T, config.train.h = 3, 2
  set_fields(config, fields)
  workdir.mkdir(parents=True)
  (workdir / 'config.json').write_text(config.to_json())
  for i, outcomes in enumerate(evaluations or run_evaluations(config.seed)):
    (workdir / 'eval' / str(i)).mkdir(parents=True)
    outcomes.save(workdir / 'eval' / str(i) / 'outcomes.npz')
  rows = []
  for t in range(1, outer_steps + 1):
    rows.append(
      {
        'kind': 'train',
        'step': 10 * t,
        'chosen': {name: t + i for i, name in enumerate(SIX)},
      }
    )
    rows.append(
      {
        'kind': 'outer',
        'step': 10 * t,
        'outer_step': t,
        'natural_accuracy': 0.5 + t / 10,
        'radius_scale': 1.0,
        'weight': {name: 1 / 6 + i * t / 100 for i, name in enumerate(SIX)},
        'validation_loss': {name: 2 / t + i for i, name in enumerate(SIX)},
        'validation_accuracy': {
          name: (t + i) / 20 for i, name in enumerate(SIX)
        },
        'played': dict.fromkeys(SIX, 1 / 6),
        'probed_loss': {name: 1.0 + i for i, name in enumerate(SIX)},
        'possible_loss': {name: 1.25 + i for i, name in enumerate(SIX)},
        'game': {
          'mixture': 2 / t,
          'worst': 3 / t,
          'mean_mixture': 2 - t / 4,
          'mean_worst': 3 - t / 4,
          'regret': float(t),
        },
        'gradient_evaluations': 12_345 * t,
        'seconds': 60.0 * t,
      }
    )
  lines = [json.dumps(row) + '\n' for row in rows]
  (workdir / 'metrics.jsonl').write_text(''.join(lines))
  return workdir


def set_fields(config, fields):
  """Sets `{'threats.dct_l1.eps': 2.0}` in a config, or in its JSON."""
  for field, value in fields.items():
    *groups, name = field.split('.')
    functools.reduce(operator.getitem, groups, config)[name] = value


def about(network='h=2 average', step=3):
  """Returns the settings that identify the network of an evaluation."""
  h = int(network[2])
  return {
    'network': network,
    'is_output': network == 'h=2 average',
    'outer_steps': list(range(step - h + 1, step + 1)),
    'members': h if network.endswith('ensemble') else 1,
    'dataset': 'mnist',
    'split': 'test',
  }


def run_evaluations(seed=0, **more):
  """Makes the evaluations of a run: three networks, two protocols, a curve."""
  found = [
    make_outcomes(
      protocol=protocol,
      share=share + 0.05 * seed,
      seed=seed + 10 * i,
      **about(network) | more,
    )
    for i, network in enumerate(('h=1', 'h=2 average', 'h=2 ensemble'))
    for protocol, share in (('paper', 0.2), ('standard', 0.4))
  ]
  curve = make_outcomes(
    protocol='fast',
    count=20,
    radii=(0.25, 1.0, 4.0),
    share=0.9,
    seed=seed,
    **about() | more,
  )
  return [*found, curve]


def copy_run(source, target, alter=None, **fields):
  """Copies a run, as if it had been made with another config.

  Args:
    source: the workdir of the run.
    target: the workdir of the copy.
    alter: changes each of its `Outcomes`.
    **fields: fields of the config, `{'method': 'greedy'}`.
  """
  shutil.copytree(source, target)
  config = json.loads((target / 'config.json').read_text())
  set_fields(config, fields)
  (target / 'config.json').write_text(json.dumps(config))
  if alter:
    for path in (target / 'eval').glob('*/outcomes.npz'):
      outcomes = Outcomes.load(path)
      alter(outcomes)
      outcomes.save(path)
  return target


def evaluations_of(workdir):
  """Returns the outcomes of a run by network and protocol, without curves."""
  found = {}
  for path in (workdir / 'eval').glob('*/outcomes.npz'):
    outcomes = Outcomes.load(path)
    settings = outcomes.settings
    if len(settings['radii']) == 1:
      found[settings['network'], settings['protocol']] = outcomes
  return found


def remove_evaluations(workdir, of):
  """Removes the evaluations of a run whose settings `of(settings)` accepts."""
  for path in (workdir / 'eval').glob('*/outcomes.npz'):
    if of(Outcomes.load(path).settings):
      shutil.rmtree(path.parent)


# --------------------------------------------------------------------- output


def ignore(text):
  """Prints nothing."""
  del text


def section(markdown, heading):
  """Returns the text below a heading."""
  _, found, after = f'\n{markdown}'.partition(f'\n## {heading}\n')
  assert found, heading
  return after.partition('\n## ')[0]


def tables_of(text):
  """Returns each Markdown table: a dict by row, then by column."""
  found = []
  for block in re.findall(r'(?:^\|.*\|\n?)+', text, re.MULTILINE):
    lines = [
      [cell.strip() for cell in line.strip('|').split('|')]
      for line in block.strip().splitlines()
    ]
    assert len({len(line) for line in block.strip().splitlines()}) == 1
    header, rule, *rows = lines
    assert set(''.join(rule)) == {'-'}
    found.append({row[0]: dict(zip(header, row, strict=True)) for row in rows})
  return found


# ------------------------------------------------------------------ disks


def strict_loads(text):
  """Parses JSON as a strict reader does: no NaN, no Infinity."""

  def refuse(constant):
    raise AssertionError(f'{constant} is not JSON')

  return json.loads(text, parse_constant=refuse)


def fail_with(code):
  """Makes a function that fails like a disk."""

  def fail(*_):
    raise OSError(code, os.strerror(code))

  return fail


@contextlib.contextmanager
def hundred_byte_files():
  """Limits files to 100 bytes, so that the disk really fills up."""
  limit = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
