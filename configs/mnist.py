"""The paper's MNIST experiment: ResNet-50, six threats, T = 20, r = 3.

  python -m mwrobust.main --config=configs/mnist.py
  python -m mwrobust.main --config=configs/mnist.py:released
  python -m mwrobust.main --config=configs/mnist.py:maini
  python -m mwrobust.main --config=configs/mnist.py:cnn --config.data.dir=DIR
  python -m mwrobust.main --config=configs/mnist.py:balanced,cnn

It needs an accelerator, except with `cnn` or `runlocal`. The paper reports min
57.57 and union 35.87 (mean of its runs, h = 3).
"""

from mwrobust import config as config_lib


def get_config(variants: str = ''):
  """Variants: `released`, `maini`, `balanced`, `cnn`, `runlocal`.

  Join several with commas.

  released: the preset of the authors' code, instead of `paper`.
  maini: three threats in pixels, 0.3, 2 and 10, and the network of Maini et
    al. (2020).
  balanced: six equally hard threats, each with its own radius.
  cnn: a network and a schedule for CPUs, and training attacks that are harder
    to fool; works with each preset.
  runlocal: a run of the whole job in a few minutes on two CPU cores.
  """
  config = config_lib.preset('paper', 'mnist')
  return config_lib.apply_variants(
    config,
    variants,
    {
      'released': _released,
      'maini': _maini,
      'balanced': _balanced,
      'cnn': _cnn,
      'runlocal': _runlocal,
    },
  )


def _released(config):
  config_lib.use_preset(config, 'released', 'mnist')


def _maini(config):
  config_lib.use_preset(config, 'maini', 'mnist')


def _balanced(config):
  config_lib.use_preset(config, 'balanced', 'mnist')
  config.train.batch_size = 32  # On `maini` better than 100 at equal cost.


def _cnn(config):
  config_lib.use_cnn(config)
  config_lib.use_strong_attack(config)
  config.model.options.features = (16, 32)
  config.policy.signal = 'error'  # Bounded, as the paper's theorem asks.
  config.policy.eta = 2.5
  config.policy.memory = 0.5
  config.optimizer.learning_rate = 6e-3
  config.train.r = 1.2
  config.train.ramp = 0.3
  config.train.validation_examples = 150


def _runlocal(config):
  _cnn(config)
  config.data.train_examples = 5000
  config.train.T = 3
  config.train.r = 1
  config.train.validation_examples = 200
  config.train.log_every = 10
  config.eval.examples = 200
  config.eval.batch_size = 200
