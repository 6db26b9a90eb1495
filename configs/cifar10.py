"""The paper's CIFAR-10 experiment: ResNet-50, six threats, T = 40, r = 5.

  python -m mwrobust.main --config=configs/cifar10.py
  python -m mwrobust.main --config=configs/cifar10.py:released
  python -m mwrobust.main --config=configs/cifar10.py:small \
    --config.data.dir=DIR

It needs an accelerator, except with `small` and `runlocal`. The paper reports
min 39.13 and union 36.18 (mean of its runs, h = 3).
"""

from mwrobust import config as config_lib


def get_config(variants: str = ''):
  """Variants, joined by commas: `released`, `small`, `runlocal`.

  released: the preset of the authors' code, instead of `paper`.
  small: a small residual network and strong attacks, trained within an hour on
    two CPU cores; 500 test images.
  runlocal: a quick run of the whole job on two CPU cores: 10 epochs of a small
    CNN and 1,000 test images.
  """
  config = config_lib.preset('paper', 'cifar10')
  return config_lib.apply_variants(
    config,
    variants,
    {'released': _released, 'small': _small, 'runlocal': _runlocal},
  )


def _released(config):
  config_lib.use_preset(config, 'released', 'cifar10')


def _small(config):
  config.model.name = 'preact_resnet18'
  config.model.options.stage_sizes = (1, 1, 1)
  config.model.options.width = 24
  config.model.options.stem_stride = 2
  config_lib.use_strong_attack(config)
  config.data.augment = False  # A few epochs do not overfit.
  config.optimizer.name = 'adam'
  config.optimizer.learning_rate = 3e-3
  config.optimizer.schedule = 'one_cycle'
  config.optimizer.l2 = 0.0
  config.policy.eta = 0.25
  config.train.T = 10
  config.train.budget = 10_000_000  # Takes about an hour.
  config.train.batch_size = 100
  config.train.ramp = 0.3
  config.train.validation_examples = 250
  config.eval.examples = 500
  config.eval.others = ()
  config.eval.curve_examples = 0


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
