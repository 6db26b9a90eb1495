"""Checks of arguments, with errors that say what is wrong in one sentence.

Every call of an attack checks shapes and types, traced or not. Values can only
be seen outside `jax.jit`; `check` checks them there.
"""

import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mwrobust.attacks import spaces

Array = jax.Array


def require(holds: bool, message: str) -> None:
  """Raises a ValueError with the message if the condition is False."""
  if not holds:
    raise ValueError(message)


def check_choice(field: str, value, choices: Iterable[str]) -> None:
  """Refuses a value that is not one of the choices."""
  choices = list(choices)
  allowed = ', '.join(map(repr, choices))
  require(
    isinstance(value, str) and value in choices,
    f'{field}={value!r} is not allowed: must be one of {allowed}.',
  )


def check_count(field: str, value, lowest: int = 1) -> None:
  """Refuses a value that is not an integer of at least `lowest`."""
  require(
    isinstance(value, numbers.Integral)
    and not isinstance(value, bool)
    and value >= lowest,
    f'{field}={value!r} is not allowed: must be an integer >= {lowest}.',
  )


def check_radius(field: str, value) -> None:
  """Refuses a value that is not a positive, normal float32."""
  limits = np.finfo(np.float32)
  require(
    is_real(value) and float(limits.tiny) <= value <= float(limits.max),
    f'{field}={value!r} is not allowed: must be a finite number > 0.',
  )


def is_real(value) -> bool:
  """Returns whether the value is a real number and not a bool."""
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_key(key) -> Array:
  """Returns a threefry key, whose numbers vmap does not change."""
  dtype = getattr(key, 'dtype', None)
  if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
    require(
      key.shape == (), f'key has shape {key.shape}: must be one key, shape ().'
    )
  else:
    require(
      dtype == jnp.uint32 and jnp.shape(key) in ((2,), (4,)),
      f'key={key!r} is not allowed: must be a key of jax.random, such as '
      'jax.random.key(0).',
    )
    key = jax.random.wrap_key_data(key)
  if str(jax.random.key_impl(key)) == 'threefry2x32':
    return key
  return jax.random.key(jax.random.bits(key), impl='threefry2x32')


def check_batch(images, labels, ids, scale):
  """Returns the batch as arrays, or raises a ValueError with the reason."""
  images, labels = jnp.asarray(images), jnp.asarray(labels)
  require(
    images.dtype == jnp.float32 and images.ndim == 4,
    f'images are {images.dtype} {list(images.shape)}: must be float32 '
    '[B, H, W, C] in [0, 1].',
  )
  count, height, width, channels = images.shape
  require(count > 0, 'images are empty: there is nothing to attack.')
  require(
    not (height in (1, 3) and channels > 4 and width > 4),
    f'images are {list(images.shape)}, which looks like [B, C, H, W]: must be '
    '[B, H, W, C]. Pass images.transpose(0, 2, 3, 1), and transpose back '
    'inside logits_fn.',
  )
  if is_concrete(images):
    lowest, highest = _range(images)
    require(
      lowest >= 0 and highest <= 1,
      f'images lie in [{lowest:.3g}, {highest:.3g}]: must lie in [0, 1]. '
      'Normalise inside logits_fn, not before it.',
    )
  ids = jnp.arange(len(images)) if ids is None else jnp.asarray(ids)
  for name, values in (('labels', labels), ('ids', ids)):
    require(
      jnp.issubdtype(values.dtype, jnp.integer)
      and values.shape == images.shape[:1],
      f'{name} are {values.dtype} {list(values.shape)}: must be integers [B], '
      f'B={len(images)} as in images.',
    )
  require(
    jnp.shape(scale) == ()
    and not (is_concrete(scale) and not 0 <= float(scale) < math.inf),
    f'scale={scale} is not allowed: must be one finite number >= 0.',
  )
  scale = jnp.asarray(scale, jnp.float32)
  return lax.stop_gradient(images), labels, ids, scale


def check_index(field: str, index, count: int = 2**31):
  """Returns the index; a traced one cannot be refused, so it is clipped."""
  require(
    jnp.shape(index) == ()
    and jnp.issubdtype(jnp.result_type(index), jnp.integer),
    f'{field}={index!r} is not allowed: must be an integer scalar.',
  )
  if not is_concrete(index):
    return jnp.clip(index, 0, count - 1)
  index = int(index)
  require(
    0 <= index < count,
    f'{field}={index!r} is not allowed: must be in [0, {count}).',
  )
  return index


def check_logits(logits: Array, labels: Array) -> Array:
  """Returns the logits in float32, also those in half precision."""
  shape = getattr(logits, 'shape', ())
  require(
    len(shape) == 2
    and shape[0] == len(labels)
    and shape[1] >= 2
    and jnp.issubdtype(logits.dtype, jnp.floating),
    f'logits_fn returned {getattr(logits, "dtype", type(logits).__name__)} '
    f'{list(shape)}: must be floating point [B, K], B={len(labels)} as in '
    'images and K >= 2.',
  )
  if is_concrete(labels) and labels.size:
    lowest, highest = _range(labels)
    require(
      lowest >= 0 and highest < shape[1],
      f'labels lie in [{lowest}, {highest}]: must lie in [0, {shape[1]}), as '
      f'logits_fn returned {shape[1]} logits.',
    )
  return logits.astype(jnp.float32)


def check_space(space, image: jax.ShapeDtypeStruct) -> tuple[int, ...]:
  """Returns the shape of the space's coefficients for such an image."""
  coefficients = jax.eval_shape(space.forward, image)
  back = jax.eval_shape(space.inverse, coefficients)
  for name, found, holds in (
    ('forward', coefficients, getattr(coefficients, 'dtype', None)),
    ('inverse', back, getattr(back, 'shape', None) == image.shape),
  ):
    require(
      holds and found.dtype == jnp.float32,
      f'{name} of space {space.name!r} returns {found} for an image {image}: '
      'must be one float32 array; inverse must return the shape of the image.',
    )
  return coefficients.shape


def check(
  images,
  labels,
  logits_fn: Callable[[Array], Array] | None = None,
  threats: Any = (),
) -> None:
  """Checks the values that an attack inside `jax.jit` cannot see.

  Call it once, outside jit, with a batch of the data. It raises a ValueError
  that says what is wrong and what is allowed.

  Args:
    images: must be float32 [B, H, W, C] in [0, 1].
    labels: must be integers [B], below the number of logits if `logits_fn` is
      given.
    logits_fn: the network; it is called on the images.
    threats: a `Threat`, or several, whose spaces must be invertible on these
      images.
  """
  images, labels, _, _ = check_batch(images, labels, None, 1.0)
  if logits_fn is not None:
    check_logits(logits_fn(images), labels)
  for threat in [threats] if hasattr(threats, 'space') else threats:
    require(
      hasattr(threat, 'space'),
      f'threats contains {threat!r}: must be an attacks.Threat.',
    )
    space = spaces.get(threat.space)
    check_space(space, jax.ShapeDtypeStruct(images.shape[1:], images.dtype))
    coefficients = jax.vmap(space.forward)(images)
    back = jax.vmap(space.inverse)(coefficients)
    worst = float(jnp.max(jnp.abs(back - images), initial=0.0))
    require(
      worst <= 1e-3,  # False for NaN.
      f'The inverse of space {space.name!r} does not invert forward: '
      f'inverse(forward(x)) differs from x by {worst:.2g}.',
    )
    if space.orthonormal:
      before, after = (
        jnp.sqrt(jnp.sum(x.reshape(len(images), -1) ** 2, axis=1))
        for x in (images, coefficients)
      )
      worst = float(jnp.max(jnp.abs(after - before), initial=0.0))
      require(
        worst <= 1e-3 * (1 + float(jnp.max(before, initial=0.0))),
        f'Space {space.name!r} says orthonormal=True, but changes the length '
        f'of an image by {worst:.2g}.',
      )


def is_concrete(value) -> bool:
  """Returns whether the value is known, that is, not traced."""
  return not isinstance(value, jax.core.Tracer)


def _range(array: Array) -> tuple[np.generic, np.generic]:
  array = np.asarray(array)  # So that nothing is staged inside a jit.
  return array.min(), array.max()
