"""PreAct ResNet-18, the usual network of multi-norm robustness on CIFAR-10."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from mwrobust.models.normalise import normalise

_he_normal = nn.initializers.he_normal()


class PreActResNet(nn.Module):
  """Residual blocks with BatchNorm and ReLU before each convolution.

  He et al. 2016, "Identity mappings in deep residual networks". The 3x3
  convolutions pad one pixel on every side, as the usual PyTorch code does; with
  stride 2, 'SAME' would pad even sizes only at the end. A stem with stride 2
  suits CPUs: it takes a quarter of the work, with the same parameters.
  """

  num_classes: int
  mean: tuple[float, ...]
  std: tuple[float, ...]
  stage_sizes: tuple[int, ...] = (2, 2, 2, 2)
  width: int = 64
  stem_stride: int = 1

  @nn.compact
  def __call__(self, images: jax.Array, train: bool) -> jax.Array:
    """Returns the logits."""
    conv = functools.partial(nn.Conv, use_bias=False, kernel_init=_he_normal)
    conv3x3 = functools.partial(conv, kernel_size=(3, 3), padding=1)
    norm = functools.partial(
      nn.BatchNorm, use_running_average=not train, momentum=0.9
    )
    x = normalise(images, self.mean, self.std)
    x = conv3x3(self.width, strides=self.stem_stride)(x)
    for stage, blocks in enumerate(self.stage_sizes):
      features = self.width * 2**stage
      for block in range(blocks):
        stride = 2 if stage > 0 and block == 0 else 1
        y = nn.relu(norm()(x))
        if stride == 2:
          x = conv(features, (1, 1), stride)(y)
        y = conv3x3(features, strides=stride)(y)
        x = x + conv3x3(features)(nn.relu(norm()(y)))
    x = nn.relu(norm()(x))
    x = jnp.mean(x, axis=(1, 2))
    return nn.Dense(self.num_classes, kernel_init=_he_normal)(x)
