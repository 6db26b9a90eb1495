"""Layers that take a bounded perturbation away, learnt with the network.

An adversary with an linf radius adds about as much to every coordinate, so
small coordinates are mostly its own. What is done about it in pixels, by a
threshold, can be done in every space that the adversary may use.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mwrobust import spaces


class Curve(nn.Module):
  """One piecewise linear curve per channel, for all of its pixels.

  It begins as the identity on [0, 1]. Flat near 0 and near 1, and steep between
  them, it takes a perturbation of each pixel away.
  """

  knots: int = 4

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [B, H, W, C] to the same shape."""
    shape = self.knots, x.shape[-1]

    def equally_spaced(key, shape):
      del key
      places = jnp.arange(self.knots) / self.knots
      return jnp.broadcast_to(places[:, None], shape)

    def identity(key, shape):
      del key
      return jnp.zeros(shape).at[0].set(1.0)

    places = self.param('places', equally_spaced, shape)
    slopes = self.param('slopes', identity, shape)
    places, slopes = (
      p.reshape(-1, 1, 1, 1, shape[1]) for p in (places, slopes)
    )
    # A sum, not a matmul: XLA makes one loop of it.
    return sum(slopes[i] * nn.relu(x - places[i]) for i in range(self.knots))


class Shrink(nn.Module):
  """A soft threshold and a gain for each DCT coefficient of the image."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [B, H, W, C] to the same shape."""
    z = jax.vmap(spaces.DCT.forward)(x)
    shape = z.shape[1:]
    threshold = self.param('threshold', nn.initializers.constant(0.1), shape)
    gain = self.param('gain', nn.initializers.ones, shape)
    threshold, gain = threshold[None], gain[None]
    z = gain * (nn.relu(z - threshold) - nn.relu(-z - threshold))
    return jax.vmap(spaces.DCT.inverse)(z)
