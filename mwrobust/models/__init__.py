"""Image classifiers by name.

Every model is a Flax module `model.apply(variables, images, train) -> logits`:
images float32 [B, H, W, C] in [0, 1], as attacks need them, so the
normalisation by `mean` and `std` happens inside; logits float32
[B, num_classes]. `train` selects BatchNorm's batch statistics, whose running
means are the collection `batch_stats`.

>>> import jax, jax.numpy as jnp
>>> model = create('cnn', num_classes=10, mean=(0.13,), std=(0.31,))
>>> images = jnp.zeros((2, 28, 28, 1))
>>> init = jax.jit(model.init, static_argnames='train')
>>> variables = init(jax.random.key(0), images, train=False)
>>> model.apply(variables, images, train=False).shape
(2, 10)
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn

from mwrobust.errors import check_choice
from mwrobust.models.cnn import CNN
from mwrobust.models.preact_resnet import PreActResNet
from mwrobust.models.resnet import BottleneckResNet, ResNetV1

MODELS = {
  'cnn': CNN,
  'resnet50': BottleneckResNet,
  'resnet_v1_50': ResNetV1,
  'preact_resnet18': PreActResNet,
}


def create(
  name: str,
  *,
  num_classes: int,
  mean: Sequence[float],
  std: Sequence[float],
  **options: Any,
) -> nn.Module:
  """Makes the model called `name`.

  Args:
    name: one of `MODELS`.
    num_classes: how many logits.
    mean: of the training pixels, per channel.
    std: of the training pixels, per channel.
    **options: the model's own fields, such as `width`; see its class.

  Returns:
    A Flax module, hashable, without parameters yet.

  Raises:
    UserError: for a name or an option that does not exist.
  """
  check_choice('model.name', name, MODELS)
  common = {'num_classes', 'mean', 'std', 'parent', 'name'}
  fields = [field.name for field in dataclasses.fields(MODELS[name])]
  allowed = [field for field in fields if field not in common]
  for option in options:
    check_choice(f'The option of model {name!r}', option, allowed)
  # Flax modules are hashable only if their fields are: no lists, no arrays.
  return MODELS[name](
    num_classes=num_classes,
    mean=tuple(map(float, mean)),
    std=tuple(map(float, std)),
    **{
      option: tuple(value) if isinstance(value, list) else value
      for option, value in options.items()
    },
  )
