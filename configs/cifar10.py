"""The paper's CIFAR-10 experiment: ResNet-50, six threats, T = 40, r = 5.

  python -m mwrobust.main --config=configs/cifar10.py
  python -m mwrobust.main --config=configs/cifar10.py:released
  python -m mwrobust.main --config=configs/cifar10.py:runlocal \
    --config.data.dir=DIR

Made for an accelerator, except with `runlocal`. The numbers to stand beside
(paper, mean of its runs, h = 3): min 39.13, union 36.18.
"""

from mwrobust import config as config_lib


def get_config(variants: str = ''):
  """Variants, joined by commas: `released`, `runlocal`.

  released: the preset of the authors' code, instead of `paper`.
  runlocal: a look at the whole job on two CPU cores: 10 epochs of a small CNN
    and 1,000 test images.
  """
  config = config_lib.preset('paper', 'cifar10')
  return config_lib.apply_variants(
    config, variants, {'released': _released, 'runlocal': _runlocal}
  )


def _released(config):
  config_lib.use_preset(config, 'released', 'cifar10')


def _runlocal(config):
  config_lib.use_cnn(config)
  config_lib.use_strong_attack(config)
  config.model.options.features = (16, 32)
  config.data.augment = False
  config.policy.eta = 1.0
  config.train.T = 5
  config.train.r = 2
  config.train.batch_size = 100
  config.train.ramp = 0.5
  config.train.validation_examples = 500
  config.eval.examples = 1000
  config.eval.others = ()
  config.eval.curve_examples = 100
