"""Makes a model of any linen module, given as `module:Class`."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp

from mwrobust.errors import UserError
from mwrobust.importing import import_object
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
  return import_object(
    text,
    f'model.name={text}',
    'my_nets:WideNet',
    'a subclass of flax.linen.Module',
    lambda found: isinstance(found, type) and issubclass(found, nn.Module),
  )
