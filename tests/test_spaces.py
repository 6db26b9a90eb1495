import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft

from mwrobust import spaces

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
  np.testing.assert_allclose(space.inverse(space.forward(x)), x, atol=1e-5)
  np.testing.assert_allclose(space.forward(space.inverse(z)), z, atol=1e-5)
  # Orthonormal: <R x, z> = <x, R^-1 z>.
  np.testing.assert_allclose(
    np.vdot(space.forward(x), z), np.vdot(x, space.inverse(z)), rtol=1e-5
  )


def test_a_basis_made_while_tracing_is_the_same():
  expected = spaces.dct_basis(7)
  spaces.dct_basis.cache_clear()
  jax.jit(spaces.DCT.forward)(jnp.zeros((7, 7, 1)))
  assert (spaces.dct_basis(7) == expected).all()


def test_a_basis_where_jax_has_no_cpu(monkeypatch):
  """As with JAX_PLATFORMS=cuda."""
  expected = spaces.dct_basis(7)
  spaces.dct_basis.cache_clear()

  def no_cpu(backend):
    raise RuntimeError(f'Unknown backend {backend}')

  monkeypatch.setattr(jax, 'local_devices', no_cpu)
  assert (spaces.dct_basis(7) == expected).all()


def test_unknown_space():
  with pytest.raises(ValueError, match=r"space='wavelet'.*\['dct', 'pixel'\]"):
    spaces.get('wavelet')
