"""The networks that are timed, with random weights and a random batch."""

import jax

from mwrobust import attacks, models

# Network: (image shape, batch size, the paper's eps for linf, l2, l1).
SETTINGS = {
  'cnn': ((28, 28, 1), 100, (0.4, 1.0, 5.0)),
  'resnet_v1_50': ((32, 32, 3), 32, (0.06, 0.1, 7.84)),
  'resnet50': ((32, 32, 3), 32, (0.06, 0.1, 7.84)),
}


def load(network: str):
  """A network with random weights, and a random batch for it."""
  shape, batch_size, eps = SETTINGS[network]
  channels = shape[-1]
  model = models.create(
    network, num_classes=10, mean=(0.5,) * channels, std=(0.5,) * channels
  )
  images = jax.random.uniform(jax.random.key(0), (batch_size, *shape))
  labels = jax.random.randint(jax.random.key(1), (batch_size,), 0, 10)
  variables = model.init(jax.random.key(2), images[:1], train=False)

  def logits_fn(variables, images):
    return model.apply(variables, images, train=False)

  return logits_fn, variables, images, labels, attacks.six_threats(*eps)
