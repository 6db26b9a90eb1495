import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft

from mwrobust.attacks import spaces

SHAPES = [
  (size, size, channels) for size in (8, 28, 32, 9, 31) for channels in (1, 3)
] + [(5, 12, 2)]


def image_of(shape, seed=0):
  return np.random.default_rng(seed).uniform(size=shape).astype(np.float32)


@pytest.mark.parametrize('shape', SHAPES)
def test_dct_equals_scipy(shape):
  image = image_of(shape)
  expected = scipy.fft.dctn(image.astype(np.float64), axes=(0, 1), norm='ortho')
  np.testing.assert_allclose(spaces.DCT.forward(image), expected, atol=1e-5)


@pytest.mark.parametrize('shape', SHAPES)
def test_dct_equals_the_fft_form(shape):
  image = jnp.asarray(image_of(shape))
  rows = jax.scipy.fft.dct(image, axis=0, norm='ortho')
  expected = jax.scipy.fft.dct(rows, axis=1, norm='ortho')
  np.testing.assert_allclose(spaces.DCT.forward(image), expected, atol=1e-5)


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('space', spaces.SPACES.values(), ids=lambda s: s.name)
def test_inverse_and_adjoint(space, shape):
  x, z = image_of(shape, 0), image_of(shape, 1)
  height, width, channels = shape
  refused = (space is spaces.HAAR and (height % 2 or width % 2)) or (
    space is spaces.COLOUR and channels != 3
  )
  if refused:
    with pytest.raises(ValueError, match=f"space='{space.name}'"):
      space.forward(x)
    return
  assert space.orthonormal
  np.testing.assert_allclose(space.inverse(space.forward(x)), x, atol=1e-5)
  np.testing.assert_allclose(space.forward(space.inverse(z)), z, atol=1e-5)
  # Orthonormal: <R x, z> = <x, R^-1 z>.
  np.testing.assert_allclose(
    np.vdot(space.forward(x), z), np.vdot(x, space.inverse(z)), rtol=1e-5
  )


def test_block_dct_is_the_dct_of_each_block():
  image = image_of((28, 16, 1)).astype(np.float64)
  found = np.asarray(spaces.BLOCK_DCT.forward(jnp.float32(image)))
  for rows in (slice(0, 8), slice(16, 24), slice(24, 28)):  # The last is short.
    for columns in (slice(0, 8), slice(8, 16)):
      expected = scipy.fft.dctn(image[rows, columns], axes=(0, 1), norm='ortho')
      np.testing.assert_allclose(found[rows, columns], expected, atol=1e-5)


def test_haar_by_hand():
  image = np.array([[1.0, 3.0], [5.0, 9.0]], np.float32)[..., None]
  found = np.asarray(spaces.HAAR.forward(image))[..., 0]
  # Half of the sum; of the columns' difference; of the rows'; of both.
  np.testing.assert_allclose(found, [[9.0, -3.0], [-5.0, 1.0]], rtol=1e-5)
  # A constant 8x8 image only has the first coefficient after three levels.
  constant = np.asarray(spaces.HAAR.forward(np.ones((8, 8, 1), np.float32)))
  assert constant[0, 0, 0] == pytest.approx(8.0)
  assert np.abs(constant).sum() == pytest.approx(8.0, rel=1e-5)
  # 12 pixels are halved twice.
  constant = np.asarray(spaces.HAAR.forward(np.ones((12, 12, 1), np.float32)))
  np.testing.assert_allclose(constant[:3, :3], 4.0, rtol=1e-6)


def test_grey_has_no_colour():
  grey = np.repeat(image_of((4, 4, 1)), 3, axis=2)
  found = np.asarray(spaces.COLOUR.forward(grey))
  np.testing.assert_allclose(found[..., 0], 3**0.5 * grey[..., 0], rtol=1e-6)
  np.testing.assert_allclose(found[..., 1:], 0, atol=1e-6)


def test_a_basis_made_while_tracing_is_the_same():
  expected = spaces.dct_basis(7)
  spaces.dct_basis.cache_clear()
  jax.jit(spaces.DCT.forward)(jnp.zeros((7, 7, 1)))
  assert (spaces.dct_basis(7) == expected).all()


def test_a_basis_where_jax_has_no_cpu(monkeypatch):
  """Runs as with JAX_PLATFORMS=cuda."""
  expected = spaces.dct_basis(7)
  spaces.dct_basis.cache_clear()

  def no_cpu(backend):
    raise RuntimeError(f'Unknown backend {backend}')

  monkeypatch.setattr(jax, 'local_devices', no_cpu)
  assert (spaces.dct_basis(7) == expected).all()


def test_unknown_space():
  with pytest.raises(ValueError, match=r"space='wavelet'.*'haar', 'pixel'\]"):
    spaces.get('wavelet')
