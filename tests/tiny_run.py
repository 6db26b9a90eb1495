"""A tiny run of all six threats."""

import functools

from mwrobust import config as config_lib

TINY = {
  'data.train_examples': 120,
  'train.batch_size': 20,
  'train.T': 3,
  'train.h': 2,
  'train.r': 1,
  'train.log_every': 4,
  'train.validation_examples': 30,
  'train.check_examples': 0,
  'attack.steps': 2,
  'eval.examples': 30,
  'eval.batch_size': 20,
  'eval.protocols': ('paper',),
  'eval.curve_examples': 0,
}


def tiny(**changes):
  """Returns a tiny version of the quickstart."""
  config = config_lib.preset('paper', 'mnist')
  for fields in config_lib.threat_table(config).values():
    fields.attack = {}
  config.data.name = 'mnist5k'
  config.model.name = 'cnn'
  config.model.options.features = (2, 4)
  config.model.options.hidden = 8
  config.optimizer.name = 'adam'
  config.train.ramp = 0.5
  for field, value in (TINY | changes).items():
    *groups, name = field.split('.')
    functools.reduce(lambda fields, group: fields[group], groups, config)[
      name
    ] = value
  return config
