"""Makes a model of any linen module, given as `module:Class`."""

import dataclasses
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp

from mwrobust.errors import UserError
from mwrobust.importing import import_module_of
from mwrobust.models.normalise import normalise

# The arguments that say whether a module is being trained, with their values in
# training.
TRAIN_ARGUMENTS = {
  'train': True,
  'training': True,
  'is_training': True,
  'deterministic': False,
  'use_running_average': False,
}


class Normalised(nn.Module):
  """Wraps a module for normalised images as a model for images in [0, 1].

  It has the variables of the module, without an extra level, so trained
  variables can be used with the module itself.
  """

  network: nn.Module
  num_classes: int
  mean: tuple[float, ...]
  std: tuple[float, ...]

  def setup(self) -> None:
    """Shares the module's variables."""
    nn.share_scope(self, self.network)

  def __call__(self, images: jax.Array, train: bool) -> jax.Array:
    """Returns the logits, float32 [B, num_classes]."""
    x = normalise(images, self.mean, self.std)
    call = type(self.network).__call__
    arguments = {
      name: train == in_training
      for name, in_training in TRAIN_ARGUMENTS.items()
      if name in inspect.signature(call).parameters
    }
    logits = self.network(x, **arguments)
    found = getattr(logits, 'shape', type(logits).__name__)
    expected = (len(images), self.num_classes)
    if found != expected:
      raise UserError(
        f'{type(self.network).__name__} returned {found} for {expected[0]} '
        f'images of {expected[1]} classes: it must return the logits, '
        f'{expected}. A field num_classes is set to the number of classes.'
      )
    return logits.astype(jnp.float32)


def load_class(text: str) -> type[nn.Module]:
  """Imports the linen module `module:Class`, also from the current folder."""
  field = f'model.name={text}'
  module, name = import_module_of(text, field, 'my_nets:WideNet')
  found = getattr(module, name, None)
  if isinstance(found, type) and issubclass(found, nn.Module):
    return found
  classes = [
    key
    for key, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, nn.Module)
  ]
  wrong = (
    f'{name} is not a subclass of flax.linen.Module'
    if hasattr(module, name)
    else f'{module.__name__} has no {name}'
  )
  raise UserError(
    f'{field}: {wrong}. Linen modules there: {", ".join(classes) or "none"}.'
  )


def missing_fields(model_class: type[nn.Module], given: set[str]) -> list[str]:
  """Returns the fields without a default that are not given."""
  return [
    field.name
    for field in dataclasses.fields(model_class)
    if field.init
    and field.default is dataclasses.MISSING
    and field.default_factory is dataclasses.MISSING
    and field.name not in given
  ]
