"""Two networks called ResNet-50: the paper's, and the released code's."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from mwrobust.errors import UserError
from mwrobust.models.normalise import normalise

_he_normal = nn.initializers.he_normal()


class _Bottleneck(nn.Module):
  """1x1, 3x3, 1x1 convolutions around a shortcut (He et al. 2015, Figure 5).

  The stride is in the 3x3 convolution, as in today's implementations.
  """

  features: int
  stride: int

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    conv = functools.partial(nn.Conv, use_bias=False, kernel_init=_he_normal)
    norm = functools.partial(
      nn.BatchNorm, use_running_average=not train, momentum=0.9
    )
    y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
    y = nn.relu(norm()(conv(self.features, (3, 3), self.stride)(y)))
    y = norm()(conv(4 * self.features, (1, 1))(y))
    if x.shape != y.shape:
      x = norm()(conv(4 * self.features, (1, 1), self.stride)(x))
    return nn.relu(x + y)


class BottleneckResNet(nn.Module):
  """The paper's ResNet-50, with the usual 3x3 stem for small images."""

  num_classes: int
  mean: tuple[float, ...]
  std: tuple[float, ...]
  stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
  width: int = 64

  @nn.compact
  def __call__(self, images: jax.Array, train: bool) -> jax.Array:
    """Returns the logits."""
    x = normalise(images, self.mean, self.std)
    x = nn.Conv(self.width, (3, 3), use_bias=False, kernel_init=_he_normal)(x)
    x = nn.relu(nn.BatchNorm(not train, momentum=0.9)(x))
    for stage, blocks in enumerate(self.stage_sizes):
      for block in range(blocks):
        stride = 2 if stage > 0 and block == 0 else 1
        x = _Bottleneck(self.width * 2**stage, stride)(x, train)
    x = jnp.mean(x, axis=(1, 2))
    return nn.Dense(self.num_classes, kernel_init=_he_normal)(x)


class ResNetV1(nn.Module):
  """The released code's CIFAR ResNet, of depth 6n + 2.

  As in Keras, on which that code builds: convolutions have biases, the 1x1
  convolutions of shortcuts have no BatchNorm, and BatchNorm has Keras's
  constants.
  """

  num_classes: int
  mean: tuple[float, ...]
  std: tuple[float, ...]
  depth: int = 50
  width: int = 16

  @nn.compact
  def __call__(self, images: jax.Array, train: bool) -> jax.Array:
    """Returns the logits."""
    blocks, rest = divmod(self.depth - 2, 6)
    if blocks < 1 or rest:
      raise UserError(
        f'depth = {self.depth} is not a depth of ResNet-v1: '
        'choose 6n + 2, such as 8, 20, 32, 44 or 50.'
      )
    conv = functools.partial(nn.Conv, kernel_init=_he_normal)
    norm = functools.partial(
      nn.BatchNorm, use_running_average=not train, momentum=0.99, epsilon=1e-3
    )
    x = normalise(images, self.mean, self.std)
    x = nn.relu(norm()(conv(self.width, (3, 3))(x)))
    for stage in range(3):
      features = self.width * 2**stage
      for block in range(blocks):
        stride = 2 if stage > 0 and block == 0 else 1
        y = nn.relu(norm()(conv(features, (3, 3), stride)(x)))
        y = norm()(conv(features, (3, 3))(y))
        if stride == 2:
          x = conv(features, (1, 1), stride)(x)
        x = nn.relu(x + y)
    x = jnp.mean(x, axis=(1, 2))
    return nn.Dense(self.num_classes, kernel_init=_he_normal)(x)
