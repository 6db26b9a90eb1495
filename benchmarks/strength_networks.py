"""Trains the MNIST networks on which the strength of attacks is compared.

```bash
python -m benchmarks.strength_networks --data=DIR --output=networks
python benchmarks/strength_peers.py --network=networks/linf.npz ...
```

| network | trained on | epochs |
|---|---|---|
| natural | natural images | 8 |
| linf | 10-step PGD, linf 0.3 | 8 |
| l2 | 10-step PGD, l2 1.5 | 8 |
| masked | 10-step PGD, one of linf 0.3, l2 2 and l1 10 per batch, by multiplicative weights | 12 |

Networks trained like `masked` misdirect gradient attacks in l2 and l1, so
attacks that agree on the other networks may differ there. Every file holds
`params/Conv_0/kernel` and so on, `mean` and `std`.
"""  # noqa: E501 (a table)

import functools
import gzip
import os
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from flax import traverse_util

from mwrobust import attacks, models
from mwrobust.attacks import losses

MEAN, STD = 0.1307, 0.3081
BATCH_SIZE = 100
RAMP = 0.3  # The share of training in which the radii grow to their size.
HELD_OUT = 1000  # Training images that only update the weights of the threats.
ETA = 0.25  # The rate of the multiplicative weights, per epoch.


class Recipe(NamedTuple):
  """The threats to train a network on, and the number of epochs."""

  threats: tuple[attacks.Threat, ...]
  epochs: int


RECIPES = {
  'natural': Recipe((), 8),
  'linf': Recipe((attacks.Threat(norm='linf', eps=0.3),), 8),
  'l2': Recipe((attacks.Threat(norm='l2', eps=1.5),), 8),
  'masked': Recipe(
    (
      attacks.Threat(norm='linf', eps=0.3),
      attacks.Threat(norm='l2', eps=2.0),
      attacks.Threat(norm='l1', eps=10.0),
    ),
    12,
  ),
}

DATA = flags.DEFINE_string(
  'data', None, 'The folder of the MNIST files, *-ubyte.gz.', required=True
)
OUTPUT = flags.DEFINE_string(
  'output', None, 'The folder for the networks.', required=True
)
NETWORKS = flags.DEFINE_list('networks', list(RECIPES), 'Networks to train.')
SEED = flags.DEFINE_integer('seed', 0, 'The seed of the weights and batches.')
LIMIT = flags.DEFINE_integer(
  'limit', None, 'Train on this many images, for a quick try.'
)


def read(folder, part):
  """Reads the images, uint8 [N, 28, 28, 1], and labels, int32 [N]."""
  with gzip.open(os.path.join(folder, f'{part}-images-idx3-ubyte.gz')) as file:
    images = np.frombuffer(file.read(), np.uint8, offset=16)
  with gzip.open(os.path.join(folder, f'{part}-labels-idx1-ubyte.gz')) as file:
    labels = np.frombuffer(file.read(), np.uint8, offset=8)
  return images.reshape(-1, 28, 28, 1), labels.astype(np.int32)


def as_floats(images):
  """Returns uint8 images as float32 in [0, 1]."""
  return images.astype(jnp.float32) / 255


def train(recipe, data, seed):
  """Trains a network; returns its logits function and its parameters."""
  images, labels = map(jnp.asarray, data)
  count = len(images) - HELD_OUT
  steps_per_epoch = count // BATCH_SIZE
  total = recipe.epochs * steps_per_epoch
  model = models.create(
    'cnn', num_classes=10, mean=(MEAN,), std=(STD,), features=(16, 32),
    hidden=200,
  )  # fmt: skip
  init_key, train_key, validation_key = jax.random.split(
    jax.random.key(seed), 3
  )
  variables = model.init(init_key, as_floats(images[:1]), train=False)
  optimiser = optax.adam(optax.cosine_onecycle_schedule(total, 2e-3))
  logits_fn = functools.partial(model.apply, train=False)
  k = len(recipe.threats)
  if k:
    switch = attacks.make_switch(recipe.threats, attacks.pgd(steps=10))

  def attacked_loss(variables, index, key, images, labels, scale):
    if k:
      images = switch(
        functools.partial(logits_fn, variables),
        *(index, key, images, labels),
        scale=scale,
      )
    return lambda variables: losses.cross_entropy(
      logits_fn(variables, images), labels
    ).mean()

  # The images are arguments, because constants would be part of the program.
  @functools.partial(jax.jit, donate_argnums=0)
  def epoch(carry, images, labels, rows, indices):
    def step(carry, batch):
      variables, state, number = carry
      rows, index = batch
      loss = attacked_loss(
        variables,
        index,
        jax.random.fold_in(train_key, number),
        as_floats(images[rows]),
        labels[rows],
        scale=jnp.minimum(1.0, (number + 1) / (RAMP * total)),
      )
      value, gradient = jax.value_and_grad(loss)(variables)
      updates, state = optimiser.update(gradient, state)
      variables = optax.apply_updates(variables, updates)
      return (variables, state, number + 1), value

    return jax.lax.scan(step, carry, (rows, indices))

  @jax.jit
  def validate(variables, index, images, labels):
    loss = attacked_loss(
      variables, index, validation_key, as_floats(images), labels, scale=1.0
    )
    return loss(variables)

  rng = np.random.default_rng(seed)
  carry = variables, optimiser.init(variables), jnp.int32(0)
  log_weights = np.zeros(max(k, 1))
  start = time.perf_counter()
  for number in range(recipe.epochs):
    p = np.exp(log_weights - log_weights.max())
    p /= p.sum()
    rows = rng.permutation(count)[: steps_per_epoch * BATCH_SIZE]
    indices = rng.choice(len(p), steps_per_epoch, p=p).astype(np.int32)
    carry, values = epoch(
      carry, images, labels, rows.reshape(-1, BATCH_SIZE), indices
    )
    print(
      f'epoch {number + 1} of {recipe.epochs}: loss {values.mean():.3f}, '
      f'p {np.round(p, 2)}, {time.perf_counter() - start:.0f} s',
      flush=True,
    )
    if k > 1:
      held_out = images[count:], labels[count:]
      log_weights += ETA * np.array(
        [validate(carry[0], jnp.int32(i), *held_out) for i in range(k)]
      )
  return logits_fn, carry[0]


def accuracies(logits_fn, variables, recipe, data):
  """Returns the accuracy in %, natural and under PGD-10 for each threat."""
  images, labels = as_floats(jnp.asarray(data[0])), jnp.asarray(data[1])

  @jax.jit
  def accuracy(variables, images):
    hits = jnp.argmax(logits_fn(variables, images), axis=-1) == labels
    return 100 * hits.mean()

  result = {'natural': accuracy(variables, images)}
  for threat in recipe.threats:
    attack = attacks.make_attack(threat, attacks.pgd(steps=10))

    @jax.jit
    def adversarial(variables, images, attack=attack):
      bound = functools.partial(logits_fn, variables)
      return attack(bound, jax.random.key(0), images, labels)

    result[threat.name] = accuracy(variables, adversarial(variables, images))
  return {name: round(float(value), 1) for name, value in result.items()}


def main(argv):
  """Trains the networks and writes them to files."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments: {argv[1:]}')
  unknown = set(NETWORKS.value) - set(RECIPES)
  if unknown:
    raise app.UsageError(f'--networks has {unknown}: one of {list(RECIPES)}')
  training = read(DATA.value, 'train')
  if LIMIT.value:
    kept = LIMIT.value + HELD_OUT
    training = tuple(array[:kept] for array in training)
  test = tuple(array[:1000] for array in read(DATA.value, 't10k'))
  os.makedirs(OUTPUT.value, exist_ok=True)
  for name in NETWORKS.value:
    print(name, flush=True)
    recipe = RECIPES[name]
    logits_fn, variables = train(recipe, training, SEED.value)
    print(accuracies(logits_fn, variables, recipe, test), flush=True)
    arrays = traverse_util.flatten_dict(variables, sep='/')
    np.savez(
      os.path.join(OUTPUT.value, f'{name}.npz'),
      mean=np.float32([MEAN]),
      std=np.float32([STD]),
      **{key: np.asarray(value) for key, value in arrays.items()},
    )


if __name__ == '__main__':
  app.run(main)
