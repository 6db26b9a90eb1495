"""A small convolutional network that is fast to attack on a CPU."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mwrobust.models.normalise import normalise


class Conv(nn.Module):
  """`nn.Conv(features, (4, 4), strides=2)`, as patches and one matmul.

  With stride 2 a 4x4 patch is four rows of two pairs of pixels, so the patches
  are a reshape and eight slices, without a transpose. On a CPU, for which this
  network is meant, an input gradient is then hardly slower than its matmuls,
  also in loops and switches, where XLA's convolution was measured to be 2 (jax
  0.10) to 9 (jax 0.12) times slower. Accelerators were not measured and may
  prefer a convolution; one implementation keeps the results of all backends
  comparable.

  Parameters have the names (including `Conv_0`) and shapes of `nn.Conv`.
  """

  features: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [B, H, W, C] to [B, ceil(H/2), ceil(W/2), features]."""
    batch, height, width, channels = x.shape
    kernel = self.param(
      'kernel', nn.initializers.he_normal(), (4, 4, channels, self.features)
    )
    bias = self.param('bias', nn.initializers.zeros, (self.features,))

    # 'SAME' pads one pixel on each side, and one more at the end of odd sides.
    x = jnp.pad(x, ((0, 0), (1, 1 + height % 2), (1, 1 + width % 2), (0, 0)))
    rows, columns = x.shape[1] // 2, x.shape[2] // 2
    pairs = x.reshape(batch, rows, 2, columns, 2 * channels)
    # The kernel's order: down the four rows of a patch, two pairs in each.
    patches = jnp.concatenate(
      [
        pairs[:, down : down + rows - 1, row, right : right + columns - 1]
        for down in (0, 1)
        for row in (0, 1)
        for right in (0, 1)
      ],
      axis=-1,
    )
    y = patches @ kernel.reshape(16 * channels, self.features)
    return y + bias.reshape(1, 1, 1, self.features)


class CNN(nn.Module):
  """Strided 4x4 convolutions, two by default, and two dense layers."""

  num_classes: int
  mean: tuple[float, ...]
  std: tuple[float, ...]
  features: tuple[int, ...] = (32, 64)
  hidden: int = 200

  @nn.compact
  def __call__(self, images: jax.Array, train: bool) -> jax.Array:
    """Returns the logits; `train` changes nothing here."""
    del train
    x = normalise(images, self.mean, self.std)
    for features in self.features:
      x = nn.relu(Conv(features)(x))
    x = x.reshape(x.shape[0], -1)
    x = nn.relu(
      nn.Dense(self.hidden, kernel_init=nn.initializers.he_normal())(x)
    )
    return nn.Dense(self.num_classes, kernel_init=nn.initializers.he_normal())(
      x
    )
