"""The first layers of models."""

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
  return (images - mean) / std


def answer_as_clipped(images: jax.Array) -> jax.Array:
  """Leaves a network nothing to hide outside of [0, 1].

  There are no images out there, but attacks that clip at the end pass through.
  A network that is free to answer there may learn to lead them astray, and then
  stands only until it meets one that clips at every step. With this it answers
  as for the clipped image, with a gradient as if nothing was clipped, which
  still leads back. The ResNet-50s are without it, as they were published.
  """
  return images + jax.lax.stop_gradient(jnp.clip(images, 0.0, 1.0) - images)
