"""The first layer of every model."""

import jax
import jax.numpy as jnp

from mwrobust.errors import UserError


def normalise(
  images: jax.Array, mean: tuple[float, ...], std: tuple[float, ...]
) -> jax.Array:
  """Maps images in [0, 1] to zero mean and unit variance per channel."""
  channels = images.shape[-1]
  if not channels == len(mean) == len(std):
    # Broadcasting would turn a grey image into three channels, silently.
    raise UserError(
      f'The images have {channels} channels, but mean = {mean} and '
      f'std = {std}: give one number per channel.'
    )
  mean = jnp.array(mean, jnp.float32, ndmin=images.ndim)
  std = jnp.array(std, jnp.float32, ndmin=images.ndim)
  return ((images - mean) / std).astype(images.dtype)
