"""Representation spaces: invertible maps R from an image to coefficients.

An adversary of the paper perturbs `R(x)` and shows the network `R^-1` of what
it made. A space is three words, written for ONE image [H, W, C]:

>>> import numpy as np
>>> flip = Space('flip', forward=lambda x: x[::-1], inverse=lambda z: z[::-1])
>>> image = np.linspace(0, 1, 48, dtype='float32').reshape(4, 4, 3)
>>> bool((flip.inverse(flip.forward(image)) == image).all())
True

Wherever a space is asked for, its name (`'pixel'`, `'dct'`) or a `Space` of
your own will do: linear or not, coefficients of any shape. Nothing is
registered.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.scipy.fft
import numpy as np

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Space:
  """An invertible map from one image [H, W, C] to its coefficients."""

  name: str
  forward: Callable[[Array], Array]
  inverse: Callable[[Array], Array]


@functools.cache
def dct_basis(size: int) -> np.ndarray:
  """The orthonormal DCT-II matrix [size, size]: row u is the u-th cosine."""
  # Computed once, also when the caller is being traced; and on the host, as
  # there are accelerators without a good FFT.
  try:
    host = jax.local_devices(backend='cpu')[0]
  except RuntimeError:  # JAX_PLATFORMS names accelerators only.
    host = None
  with jax.ensure_compile_time_eval(), jax.default_device(host):
    transform = functools.partial(jax.scipy.fft.dct, norm='ortho')
    columns = jax.vmap(transform)(jnp.eye(size, dtype=jnp.float32))
    return np.asarray(columns).T


def _separable(image: Array, rows: np.ndarray, columns: np.ndarray) -> Array:
  """`rows @ image @ columns^T`, each channel alone.

  Two small matmuls are several times faster than the FFT at 28 and 32 pixels.
  Full precision: TF32 or bfloat16 would make the inverse no inverse.
  """
  return jnp.einsum(
    'uh,hwc,vw->uvc', rows, image, columns, precision=jax.lax.Precision.HIGHEST
  )


def _dct(image: Array) -> Array:
  height, width, _ = image.shape
  return _separable(image, dct_basis(height), dct_basis(width))


def _inverse_dct(coefficients: Array) -> Array:
  height, width, _ = coefficients.shape
  return _separable(coefficients, dct_basis(height).T, dct_basis(width).T)


def _identity(image: Array) -> Array:
  return image


PIXEL = Space('pixel', _identity, _identity)
DCT = Space('dct', _dct, _inverse_dct)  # 2-D, type II, over the whole image
SPACES = {space.name: space for space in (PIXEL, DCT)}


def get(space: str | Space) -> Space:
  """The space of that name, or the caller's own `Space` as it is."""
  if isinstance(space, Space):
    return space
  if not isinstance(space, str) or space not in SPACES:
    raise ValueError(
      f'space={space!r} is not a space: allowed are {sorted(SPACES)} and any '
      'mwrobust.spaces.Space(name, forward, inverse).'
    )
  return SPACES[space]
