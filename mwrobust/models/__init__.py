"""Makes image classifiers by name, or from your own linen modules.

Every model is a Flax module `model.apply(variables, images, train) -> logits`.
Images are float32 [B, H, W, C] in [0, 1], as attacks need them, so models
normalise them by `mean` and `std`; logits are float32 [B, num_classes]. With
`train`, BatchNorm uses batch statistics, whose running means are the collection
`batch_stats`, and dropout is on.

>>> import jax, jax.numpy as jnp
>>> model = create('cnn', num_classes=10, mean=(0.13,), std=(0.31,))
>>> images = jnp.zeros((2, 28, 28, 1))
>>> init = jax.jit(model.init, static_argnames='train')
>>> variables = init(jax.random.key(0), images, train=False)
>>> model.apply(variables, images, train=False).shape
(2, 10)

In training, pass a key for dropout and keep the new statistics. Models without
dropout or BatchNorm accept both arguments:

>>> logits, updated = model.apply(
...   variables,
...   images,
...   train=True,
...   rngs={'dropout': jax.random.key(1)},
...   mutable=['batch_stats'],
... )
>>> updated.get('batch_stats', {})
{}

Your own module is named `module:Class`. It gets normalised images, its field
`num_classes` is set if it has one, and its call takes `train` if it has dropout
or BatchNorm:

  class WideNet(nn.Module):  # In my_nets.py: 'my_nets:WideNet'.
    num_classes: int
    width: int = 64  # Set it by --config.model.options.width=128.

    @nn.compact
    def __call__(self, x, train):
      x = nn.relu(nn.Dense(self.width)(x.reshape(len(x), -1)))
      x = nn.Dropout(0.5, deterministic=not train)(x)
      return nn.Dense(self.num_classes)(x)
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax
import flax.linen as nn

from mwrobust.errors import UserError, check_choice, did_you_mean
from mwrobust.models import own
from mwrobust.models.cnn import CNN
from mwrobust.models.maini import MainiCNN
from mwrobust.models.preact_resnet import PreActResNet
from mwrobust.models.resnet import BottleneckResNet, ResNetV1

MODELS = {
  'cnn': CNN,
  'maini': MainiCNN,
  'resnet50': BottleneckResNet,
  'resnet_v1_50': ResNetV1,
  'preact_resnet18': PreActResNet,
}


def create(
  name: str | type[nn.Module],
  *,
  num_classes: int,
  mean: Sequence[float],
  std: Sequence[float],
  **options: Any,
) -> nn.Module:
  """Makes the model called `name`.

  Args:
    name: one of `MODELS`, or your own linen module: its class, or
      `module:Class`, which may be in the current folder.
    num_classes: the number of logits.
    mean: the mean of the training pixels per channel.
    std: the standard deviation of the training pixels per channel.
    **options: the model's own fields, such as `width`; see its class.

  Returns:
    A Flax module, hashable, without parameters yet.

  Raises:
    UserError: for a name or an option that does not exist.
  """
  # Flax modules are hashable only if their fields are: no lists, no arrays.
  common = {
    'num_classes': num_classes,
    'mean': tuple(map(float, mean)),
    'std': tuple(map(float, std)),
  }
  options = {option: _hashable(value) for option, value in options.items()}
  if isinstance(name, str) and ':' not in name:
    check_choice('model.name', name, [*MODELS, 'module:Class'])
    _check_options(MODELS[name], name, options, common)
    return MODELS[name](**common, **options)

  network_class = own.load_class(name) if isinstance(name, str) else name
  fields = {field.name for field in dataclasses.fields(network_class)}
  wanted = {'num_classes': num_classes} if 'num_classes' in fields else {}
  _check_options(network_class, name, options, wanted)
  model = own.Normalised(network_class(**wanted, **options), **common)
  try:
    hash(model)
  except TypeError as error:
    raise UserError(
      f'model.name={name} with {options} is not hashable ({error}): its fields '
      'must be numbers, text, or tuples of these.'
    ) from error
  return model


def _check_options(
  model_class: type[nn.Module],
  name: str,
  options: dict[str, Any],
  given: dict[str, Any],
) -> None:
  """Raises a UserError if an option does not exist, or one is missing."""
  reserved = {*given, 'parent', 'name'}
  fields = {
    field.name: field
    for field in dataclasses.fields(model_class)
    if field.init and field.name not in reserved
  }
  for option in options:
    if not fields:
      raise UserError(
        f'model.options has {option!r}, but {name} has no options: remove it.'
      )
    if option not in fields:
      raise UserError(
        f'There is no model.options.{option}.{did_you_mean(option, fields)} '
        f'The options of {name} are {", ".join(fields)}.'
      )
  missing = [
    name
    for name, field in fields.items()
    if field.default is field.default_factory is dataclasses.MISSING
    and name not in options
  ]
  if missing:
    raise UserError(
      f'model.name={name} needs {", ".join(missing)}: set '
      f'model.options.{missing[0]}.'
    )


def _hashable(value: Any) -> Any:
  if isinstance(value, list | tuple):
    return tuple(map(_hashable, value))
  if hasattr(value, 'items'):  # A dict, or a ConfigDict.
    return flax.core.FrozenDict({k: _hashable(v) for k, v in value.items()})
  return value
