"""The MNIST network of Maini, Wong & Kolter (2020)."""

import flax.linen as nn
import jax

from mwrobust.models.normalise import normalise


class MainiCNN(nn.Module):
  """Two 5x5 convolutions with max pooling, and two dense layers."""

  num_classes: int
  mean: tuple[float, ...]
  std: tuple[float, ...]

  @nn.compact
  def __call__(self, images: jax.Array, train: bool) -> jax.Array:
    """Returns the logits; `train` changes nothing here."""
    del train
    x = normalise(images, self.mean, self.std)
    for features in (32, 64):
      x = nn.relu(nn.Conv(features, (5, 5))(x))
      x = nn.max_pool(x, (2, 2), strides=(2, 2))
    x = nn.relu(nn.Dense(1024)(x.reshape(x.shape[0], -1)))
    return nn.Dense(self.num_classes)(x)
