"""Checks a network, its data and the threats before any attack.

Every error says what was given, what is allowed and what to do.
"""

import json
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mwrobust import attacks
from mwrobust.attacks import Threat
from mwrobust.errors import UserError

Array = jax.Array
_TRAINING_MODE = (
  'For an evaluation, a network must be deterministic and treat each image by '
  'itself. NNX: call model.eval(). Linen: apply with train=False or '
  'use_running_average=True. Equinox: use eqx.nn.inference_mode(model). Haiku: '
  'pass is_training=False.'
)
# What networks in training mode raise, by name: their libraries may be missing.
_OF_TRAINING_MODE = (
  *('InvalidRngError', 'ModifyScopeVariableError', 'TraceContextError'),  # Flax
  'MissingRNGError',  # Haiku
)
_OF_EQUINOX_DROPOUT = 'Dropout requires a key'  # In a RuntimeError.
_OF_TRACING = (
  jax.errors.ConcretizationTypeError,
  jax.errors.NonConcreteBooleanIndexError,
  jax.errors.TracerArrayConversionError,
  jax.errors.TracerIntegerConversionError,
)
# The relative difference of two logits that bfloat16 rounds differently. Batch
# statistics, dropout and noise change them much more.
_ROUNDING = 0.01
_SUMMARIES = ('natural', 'min', 'union')  # See `Outcomes.accuracies`.
_LOOKED_AT = 8  # The number of images on which spaces are tested.


class Examples(NamedTuple):
  """Images, uint8 or float32 [N, H, W, C], and their labels, int32 [N]."""

  images: np.ndarray
  labels: np.ndarray


def require(holds: bool, message: str) -> None:
  """Raises a UserError with the message if the condition is False."""
  if not holds:
    raise UserError(message)


def check_count(field: str, value: Any, lowest: int) -> None:
  """Refuses a value that is not an integer of at least `lowest`."""
  is_integer = isinstance(value, numbers.Integral)
  require(
    is_integer and value >= lowest,
    f'{field}={value!r} is not allowed: must be an integer >= {lowest}.',
  )


def check_seed(seed: Any) -> int:
  """Returns the seed as an integer, or raises a UserError."""
  check_count('seed', seed, lowest=0)
  require(seed < 2**32, f'seed={seed!r} is not allowed: must be < 2**32.')
  return int(seed)


def check_radii(radii: Any) -> list[float]:
  """Returns the multiples of the radii as floats, or raises a UserError."""
  message = (
    f'radii={radii!r} is not allowed: must be positive numbers in increasing '
    'order, such as (0.5, 1.0, 2.0).'
  )
  try:
    found = [float(radius) for radius in radii]
  except (TypeError, ValueError) as error:
    raise UserError(message) from error
  require(
    bool(found)
    and all(0 < radius < float('inf') for radius in found)
    and found == sorted(set(found)),
    message,
  )
  return found


def check_about(about: Any) -> dict[str, Any]:
  """Returns further settings as JSON loads them, or raises a UserError."""
  try:
    return json.loads(json.dumps(dict(about or {})))
  except (TypeError, ValueError) as error:
    raise UserError(
      f'about cannot be saved as JSON ({error}): must be a dict of strings, '
      'numbers and lists. Convert arrays with array.tolist().'
    ) from error


def check_examples(images: Any, labels: Any) -> Examples:
  """Returns the examples as NumPy arrays, or raises a UserError."""
  try:
    images, labels = np.asarray(images), np.asarray(labels)
  except ValueError as error:  # Such as lists of several lengths.
    raise UserError(f'images or labels are not arrays: {error}') from error
  require(
    images.ndim == 4,
    f'images have shape {list(images.shape)}: must be [N, H, W, C]'
    + ('; add a channel axis, images[..., None].' if images.ndim == 3 else '.'),
  )
  count, height, width, channels = images.shape
  require(count > 0, 'images are empty: there is nothing to evaluate.')
  require(
    not (height in (1, 3) and channels > 4 and width > 4),
    f'images have shape {list(images.shape)}, which looks like [N, C, H, W]: '
    'must be [N, H, W, C]. Pass images.transpose(0, 2, 3, 1) and a logits_fn '
    'that transposes back: lambda x: model(x.transpose(0, 3, 1, 2)).',
  )
  if images.dtype != np.uint8:
    require(
      bool(jnp.issubdtype(images.dtype, jnp.floating)),
      f'images are {images.dtype}: must be uint8 in 0..255 or floating point '
      'in [0, 1].',
    )
    images = images.astype(np.float32)
    bad = np.isnan(images).any(axis=(1, 2, 3))
    require(
      not bad.any(),
      f'images contain NaN: {bad.sum()} of {count} do, first image '
      f'{int(bad.argmax())}. They must be finite, in [0, 1].',
    )
    low, high = float(images.min()), float(images.max())
    require(
      low >= 0 and high <= 1,
      f'images lie in [{low:.3g}, {high:.3g}]: must lie in [0, 1]. '
      + (
        'Divide them by 255, or pass uint8.'
        if low >= 0 and 1 < high <= 255
        else 'Normalise inside logits_fn, not before it.'
      ),
    )
  if labels.ndim != 1:
    cure = ''
    if labels.ndim == 2:
      cure = ' One-hot labels: pass labels.argmax(-1).'
      if labels.shape[1] == 1:
        cure = ' Pass labels[:, 0].'
    raise UserError(
      f'labels have shape {list(labels.shape)}: must be [N], one class each.'
      + cure
    )
  require(
    np.issubdtype(labels.dtype, np.integer),
    f'labels are {labels.dtype}: must be integers.',
  )
  require(
    len(labels) == count,
    f'labels has {len(labels)} entries for {count} images: must be one each.',
  )
  low, high = int(labels.min()), int(labels.max())
  require(
    low >= 0 and high < 2**31,  # Larger ones would wrap around.
    f'labels lie in [{low}, {high}]: must be classes, the first of which is 0.',
  )
  return Examples(images, labels.astype(np.int32))


def check_threats(
  threats: Threat | Iterable[Threat], images: np.ndarray
) -> tuple[Threat, ...]:
  """Returns the threats as a tuple, or raises a UserError."""
  if isinstance(threats, Threat):
    threats = [threats]
  require(
    isinstance(threats, Iterable),
    f'threats={threats!r} is not allowed: must be one attacks.Threat or '
    'several.',
  )
  threats = tuple(threats)
  require(bool(threats), 'threats is empty: name at least one.')
  for threat in threats:
    require(
      isinstance(threat, Threat),
      f'threats contains {threat!r}: must be an attacks.Threat.',
    )
  names = [threat.name for threat in threats]
  for name in names:
    require(
      name not in _SUMMARIES,
      f'A threat has the name {name!r}, which is that of a row of every table: '
      "give it another, Threat(..., name='...').",
    )
    require(
      names.count(name) == 1,
      f'threats has {name!r} twice: remove one, or give them different '
      "names, Threat(..., name='...').",
    )
  first = to_float(images[:_LOOKED_AT])
  try:
    attacks.check(first, np.zeros(len(first), np.int32), threats=threats)
  except ValueError as error:
    raise UserError(str(error)) from error
  return threats


class Network(NamedTuple):
  """A network as a function of arrays."""

  # `apply(arrays, images) -> logits`.
  apply: Callable[[Sequence[Array], Array], Array]
  # The arrays of the parameters; () if there are none.
  arrays: tuple[Array, ...]
  classes: int  # The number of logits.


def check_network(
  logits_fn: Callable[..., Array], params: Any, examples: Examples
) -> Network:
  """Returns the network, or raises a UserError that says what is wrong."""
  require(
    callable(logits_fn),
    f'logits_fn is a {type(logits_fn).__name__}: must be a function that '
    'returns the logits [B, K] of images [B, H, W, C].',
  )
  # Leaves that are not arrays, such as an activation function in an Equinox
  # module, are constants of the network.
  leaves, tree = jax.tree.flatten(params)
  is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
  arrays = tuple(x for x, keep in zip(leaves, is_array, strict=True) if keep)

  def apply(arrays, images):
    if params is None:
      return logits_fn(images)
    remaining = iter(arrays)
    merged = [
      next(remaining) if keep else leaf
      for leaf, keep in zip(leaves, is_array, strict=True)
    ]
    return logits_fn(jax.tree.unflatten(tree, merged), images)

  shape = (2, *examples.images.shape[1:])
  images = jax.ShapeDtypeStruct(shape, jnp.float32)
  try:
    logits = jax.eval_shape(apply, arrays, images)
  except Exception as error:
    name = type(error).__name__
    if name in _OF_TRAINING_MODE or _OF_EQUINOX_DROPOUT in str(error):
      hint = _TRAINING_MODE
    elif isinstance(error, _OF_TRACING):
      hint = 'jax.jit must be able to trace it: use jax.numpy, not NumPy.'
    else:
      hint = 'Call it once yourself on such an array to find out more.'
    raise UserError(
      f'logits_fn failed on float32 images {list(shape)} ({name}: '
      f'{_first_line(error)}). {hint}'
    ) from error
  found = (
    f'{logits.dtype} {list(logits.shape)}'
    if isinstance(logits, jax.ShapeDtypeStruct)
    else f'a {type(logits).__name__}'
  )
  require(
    isinstance(logits, jax.ShapeDtypeStruct)
    and len(logits.shape) == 2
    and logits.shape[0] == 2
    and logits.shape[1] >= 2
    and bool(jnp.issubdtype(logits.dtype, jnp.floating)),
    f'logits_fn returned {found} for images {list(shape)}: must be floating '
    'point [B, K] with K >= 2 classes.',
  )
  classes = logits.shape[1]
  lowest, highest = int(examples.labels.min()), int(examples.labels.max())
  require(
    lowest >= 0 and highest < classes,
    f'labels lie in [{lowest}, {highest}]: must lie in [0, {classes}), as '
    f'logits_fn returns {classes} logits.',
  )
  return Network(apply, arrays, classes)


def check_logits(
  logits: np.ndarray, first: np.ndarray, again: np.ndarray
) -> None:
  """Refuses a network whose logits cannot be attacked.

  `logits` are those of all images, [N, K]; `first` those of some of them, and
  `again` the same from a second trace, in batches with other images.
  """
  bad = ~np.isfinite(logits).all(axis=1)
  require(
    not bad.any(),
    f'logits_fn returned NaN or infinity for {bad.sum()} of {len(logits)} '
    f'images, first for image {int(bad.argmax())}: they must be finite.',
  )
  require(
    not ((logits >= 0).all() and np.allclose(logits.sum(axis=1), 1, atol=0.02)),
    'logits_fn returned probabilities: they are positive and sum to 1. Return '
    'the logits before the softmax; otherwise the attacks climb a softmax of a '
    'softmax, whose gradients vanish.',
  )
  difference = float(np.abs(again - first).max())
  require(
    difference <= _ROUNDING * max(1.0, float(np.abs(first).max())),
    'logits_fn returned different logits for the same images in another batch: '
    f'they differ by up to {difference:.2g}. {_TRAINING_MODE}',
  )


def to_float(images: np.ndarray | Array) -> np.ndarray | Array:
  """Returns uint8 images as float32 in [0, 1]; others as they are."""
  if images.dtype == np.uint8:
    return images.astype(np.float32) / np.float32(255)
  return images


def _first_line(error: Exception) -> str:
  lines = str(error).strip().splitlines() or ['']
  return lines[0][:300].rstrip('.')
