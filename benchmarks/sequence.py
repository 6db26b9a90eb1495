"""AutoAttack's order of our attacks, each on what the ones before left."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from mwrobust import attacks, models
from mwrobust.runtime import devices

ATTACKS = ('APGD-CE', 'APGD-T', 'FAB-T', 'Square')


def standard(norm: str) -> dict[str, attacks.Attack]:
  """Returns AutoAttack's order, with its numbers; l1 has twice the starts."""
  return dict(
    zip(
      ATTACKS,
      (
        attacks.apgd(100, restarts=10 if norm == 'l1' else 1),
        attacks.apgd(100, loss='dlr', targets=5 if norm == 'l1' else 9),
        attacks.fab(100, targets=9),
        attacks.square(5000),
      ),
      strict=True,
    )
  )


def load_network(path):
  """Returns `logits_fn(variables, images)` and the variables of a file."""
  with np.load(path, allow_pickle=False) as arrays:
    arrays = dict(arrays)
  mean, std = (
    tuple(arrays.pop(name).ravel().tolist()) for name in ('mean', 'std')
  )
  variables = traverse_util.unflatten_dict(arrays, sep='/')
  params = variables['params']
  model = models.create(
    'cnn',
    num_classes=len(params['Dense_1']['bias']),
    mean=mean,
    std=std,
    features=tuple(len(params[f'Conv_{i}']['bias']) for i in (0, 1)),
    hidden=len(params['Dense_0']['bias']),
  )
  return functools.partial(model.apply, train=False), variables


def make_step(logits_fn, threat, attack):
  """Makes `step((variables, number), batch) -> fooled`, on every device."""
  attack = attacks.make_attack(threat, attack)

  def step(shared, batch):
    variables, number = shared
    images, labels, ids = batch
    bound = functools.partial(logits_fn, variables)
    key = jax.random.key(0)
    found = attack(bound, key, images, labels, ids, start=number)
    logits = bound(found)
    # One that answers NaN is fooled.
    is_nan = jnp.isnan(logits).any(axis=1)
    return (logits.argmax(axis=1) != labels) | is_nan

  return jax.jit(devices.by_example(step))


def attack_survivors(step, tries, variables, data, stands, batch_size):
  """Attacks what stands, try by try, packed into full batches."""
  for number in range(tries):
    rows = np.flatnonzero(stands)
    for start in range(0, len(rows), batch_size):
      chosen = rows[start : start + batch_size]
      padded = np.resize(chosen, batch_size)
      fooled = step((variables, jnp.int32(number)), [x[padded] for x in data])
      stands[chosen] &= ~np.asarray(fooled)[: len(chosen)]
