"""The random order of examples, and their augmentation."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from mwrobust.errors import UserError


def batch_indices(
  seed: int, step: int, examples: int, batch_size: int
) -> np.ndarray:
  """Returns the examples of a training step, int32 [batch_size].

  Each epoch has its own permutation, cut into whole batches; the examples left
  over at its end are not used in that epoch.
  """
  if not 1 <= batch_size <= examples:
    raise UserError(
      f'train.batch_size = {batch_size} does not fit {examples} training '
      f'examples: choose one from 1 to {examples}.'
    )
  epoch, batch = divmod(step, examples // batch_size)
  order = permutation(examples, seed, stream=2 + epoch)
  return order[batch * batch_size : (batch + 1) * batch_size]


def padded_batches(
  examples: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields every example once, in batches of one shape.

  Yields:
    Indices, int32 [batch_size], and a mask, bool [batch_size], which is False
    where the last batch is padded with a repeated example.
  """
  for start in range(0, examples, batch_size):
    indices = np.arange(start, start + batch_size, dtype=np.int32)
    yield np.minimum(indices, examples - 1), indices < examples


def augment(key: jax.Array, images: jax.Array, ids: jax.Array) -> jax.Array:
  """Shifts each image by up to 4 pixels at random and mirrors half of them.

  An image's randomness comes only from the key and its own id, so it does not
  depend on the batch or the device.

  Args:
    key: A key for this step.
    images: Float [B, H, W, C]; pixels shifted in from outside are 0.
    ids: Integers [B], such as the indices of the examples.

  Returns:
    Images of the same shape.
  """

  def augment_one(image, example_id):
    crop_key, flip_key = jax.random.split(jax.random.fold_in(key, example_id))
    padded = jnp.pad(image, ((4, 4), (4, 4), (0, 0)))
    top, left = jax.random.randint(crop_key, (2,), 0, 9)
    crop = jax.lax.dynamic_slice(padded, (top, left, 0), image.shape)
    return jnp.where(jax.random.bernoulli(flip_key), crop[:, ::-1], crop)

  return jax.vmap(augment_one)(images, ids)


@functools.lru_cache(maxsize=1)
def permutation(count: int, seed: int, stream: int) -> np.ndarray:
  """Returns a read-only permutation, int32 [count], that never changes.

  Stream 0 shuffles data that is ordered by class, stream 1 chooses the
  validation examples, and streams from 2 on are the epochs.
  """
  # NumPy guarantees that Philox always gives the same integers, but not that
  # `Generator.permutation` makes the same order of them: a run resumed after an
  # upgrade would repeat some examples and miss others.
  generator = np.random.Philox(key=np.array([seed, stream], np.uint64))
  order = np.argsort(generator.random_raw(count), kind='stable')
  order = order.astype(np.int32)
  order.flags.writeable = False  # All callers share it.
  return order
