"""Representation spaces: invertible maps R from an image to coefficients.

An adversary perturbs `R(x)` and shows the network `R^-1` of the result. A space
is written for ONE image [H, W, C]:

>>> import numpy as np
>>> flip = Space(
...   'flip',
...   forward=lambda image: image[::-1],
...   inverse=lambda coefficients: coefficients[::-1],
...   orthonormal=True,
... )
>>> image = np.linspace(0, 1, 48, dtype='float32').reshape(4, 4, 3)
>>> bool((flip.inverse(flip.forward(image)) == image).all())
True

Every function that takes a space accepts a name or your own `Space`: linear or
not, with coefficients of any shape. Nothing is registered. The names are

  pixel      the image itself
  dct        the 2-D DCT of the whole image, as in the paper
  block_dct  the 2-D DCT of blocks of 8x8 pixels, as in JPEG; the last blocks
             are smaller if a side is not a multiple of 8
  haar       the Haar wavelet pyramid, down to an odd side; H and W must be even
  colour     opponent colours: brightness, red-green and yellow-blue
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
  """An invertible map from one image [H, W, C] to its coefficients.

  Attributes:
    name: its name in tables, files and error messages.
    forward: maps an image to its coefficients.
    inverse: maps coefficients to the image.
    orthonormal: whether the map is linear and preserves Euclidean lengths, as
      the clip `'strict'` needs.
  """

  name: str
  forward: Callable[[Array], Array]
  inverse: Callable[[Array], Array]
  orthonormal: bool = False


def _separable(image: Array, rows: np.ndarray, columns: np.ndarray) -> Array:
  """Computes `rows @ image @ columns^T` for each channel.

  Two small matmuls are several times faster than the FFT at 28 and 32 pixels.
  In TF32 or bfloat16 the inverse would be inaccurate, so full precision is
  used.
  """
  return jnp.einsum(
    'uh,hwc,vw->uvc', rows, image, columns, precision=jax.lax.Precision.HIGHEST
  )


def _from_basis(name: str, basis: Callable[[int], np.ndarray]) -> Space:
  """Makes a space that applies an orthonormal matrix to rows and columns."""

  def forward(image: Array) -> Array:
    height, width, _ = image.shape
    return _separable(image, basis(height), basis(width))

  def inverse(coefficients: Array) -> Array:
    height, width, _ = coefficients.shape
    return _separable(coefficients, basis(height).T, basis(width).T)

  return Space(name, forward, inverse, orthonormal=True)


@functools.cache
def dct_basis(size: int) -> np.ndarray:
  """Returns the orthonormal DCT-II matrix; row u is the u-th cosine."""
  # Computed once, even if the caller is being traced; and on the host, because
  # some accelerators have no good FFT.
  try:
    host = jax.local_devices(backend='cpu')[0]
  except RuntimeError:  # JAX_PLATFORMS names accelerators only.
    host = None
  with jax.ensure_compile_time_eval(), jax.default_device(host):
    transform = functools.partial(jax.scipy.fft.dct, norm='ortho')
    columns = jax.jit(jax.vmap(transform))(np.eye(size, dtype=np.float32))
    return np.asarray(columns).T


@functools.cache
def block_dct_basis(size: int, block: int = 8) -> np.ndarray:
  """Returns the matrix of the DCT of blocks; the last may be shorter."""
  basis = np.zeros((size, size), np.float32)
  for start in range(0, size, block):
    end = min(start + block, size)
    basis[start:end, start:end] = dct_basis(end - start)
  return basis


def _haar_levels(image: Array) -> list[tuple[int, int]]:
  height, width, _ = image.shape
  if height % 2 or width % 2:
    raise ValueError(
      f"space='haar' cannot take an image of {height}x{width} pixels: it "
      'needs an even height and width. Pad the images, also inside logits_fn.'
    )
  levels = []
  while height % 2 == 0 and width % 2 == 0:
    levels.append((height, width))
    height, width = height // 2, width // 2
  return levels


def _haar(image: Array) -> Array:
  """Takes sums and differences of pairs, then recurses on the sums."""
  coefficients = jnp.asarray(image)
  for height, width in _haar_levels(image):
    part = coefficients[:height, :width]
    for axis in (0, 1):
      even, odd = (
        jax.lax.slice_in_dim(part, i, None, 2, axis=axis) for i in (0, 1)
      )
      part = jnp.concatenate([even + odd, even - odd], axis) * np.float32(
        0.5**0.5
      )
    coefficients = coefficients.at[:height, :width].set(part)
  return coefficients


def _inverse_haar(coefficients: Array) -> Array:
  image = jnp.asarray(coefficients)
  for height, width in reversed(_haar_levels(coefficients)):
    part = image[:height, :width]
    for axis in (1, 0):
      total, difference = jnp.split(part, 2, axis)
      pairs = jnp.stack([total + difference, total - difference], axis + 1)
      part = pairs.reshape(part.shape) * np.float32(0.5**0.5)
    image = image.at[:height, :width].set(part)
  return image


_OPPONENTS = np.array([[1, 1, 1], [1, -1, 0], [1, 1, -2]], np.float32)
_OPPONENTS /= np.linalg.norm(_OPPONENTS, axis=1, keepdims=True)


def _mix_channels(image: Array, matrix: np.ndarray) -> Array:
  if image.shape[-1] != 3:
    raise ValueError(
      f"space='colour' cannot take an image of {image.shape[-1]} channels: it "
      'needs three: red, green and blue.'
    )
  return jnp.einsum(
    'hwc,dc->hwd', image, matrix, precision=jax.lax.Precision.HIGHEST
  )


def _identity(image: Array) -> Array:
  return image


PIXEL = Space('pixel', _identity, _identity, orthonormal=True)
DCT = _from_basis('dct', dct_basis)
BLOCK_DCT = _from_basis('block_dct', block_dct_basis)
HAAR = Space('haar', _haar, _inverse_haar, orthonormal=True)
COLOUR = Space(
  'colour',
  lambda image: _mix_channels(image, _OPPONENTS),
  lambda coefficients: _mix_channels(coefficients, _OPPONENTS.T),
  orthonormal=True,
)
SPACES = {space.name: space for space in (PIXEL, DCT, BLOCK_DCT, HAAR, COLOUR)}


def get(space: str | Space) -> Space:
  """Returns the space of that name; a `Space` is returned as it is."""
  if isinstance(space, Space):
    return space
  if not isinstance(space, str) or space not in SPACES:
    raise ValueError(
      f'space={space!r} is not a space: allowed are {sorted(SPACES)} and any '
      'mwrobust.attacks.Space(name, forward, inverse).'
    )
  return SPACES[space]
