"""The first layer of every model."""

import jax
import jax.numpy as jnp

from mwrobust.errors import UserError


def normalise(
  images: jax.Array, mean: tuple[float, ...], std: tuple[float, ...]
) -> jax.Array:
  """Maps images in [0, 1] to zero mean and unit variance per channel.

  Outside of [0, 1] there are no images, but attacks that clip at the end pass
  through there. A network that is free to answer there may learn to lead them
  astray, and then stands only until it meets one that clips at every step. So
  here the answer is that of the clipped image, and the gradient as if nothing
  was clipped, which still leads back.
  """
  channels = images.shape[-1]
  if not channels == len(mean) == len(std):
    # Broadcasting would turn a grey image into three channels, silently.
    raise UserError(
      f'The images have {channels} channels, but mean = {mean} and '
      f'std = {std}: give one number per channel.'
    )
  mean = jnp.array(mean, jnp.float32, ndmin=images.ndim)
  std = jnp.array(std, jnp.float32, ndmin=images.ndim)
  images += jax.lax.stop_gradient(jnp.clip(images, 0.0, 1.0) - images)
  return (images - mean) / std
