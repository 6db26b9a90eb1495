"""Saves and loads networks as two files, without Orbax or a run's folder.

  from mwrobust import networks

  logits_fn, params, card = networks.load('results/networks/maini-mw')
  evaluation.evaluate(logits_fn, images, labels, threats, params=params)

NAME.safetensors   the parameters
NAME.json          the model card: config, data, measured figures
"""

import functools
import json
import operator
import os
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import safetensors.numpy
from etils import epath
from flax import traverse_util

from mwrobust import models
from mwrobust.errors import UserError
from mwrobust.runtime import files

Variables = Mapping[str, Any]


def load(
  path: str | os.PathLike, model: type[nn.Module] | None = None
) -> tuple[Callable[[Variables, jax.Array], jax.Array], Variables, dict]:
  """Loads an exported network.

  Args:
    path: the path of its files, without their suffixes.
    model: the class of the network, if it is your own linen module. A card
      never decides what is imported, because it may come from anyone.

  Returns:
    `logits_fn(params, images)`, for float32 images [B, H, W, C] in [0, 1]; its
    parameters; and the model card with the threats and figures.
  """
  of_tensors, of_card = paths = _paths(path)
  for each in paths:
    if not each.exists():
      raise UserError(
        f'There is no {each}: give the path of a network without a suffix.'
      )
  try:
    card = json.loads(of_card.read_text())
    name = card['config']['model']['name']
    options = {
      'num_classes': operator.index(card['classes']),
      'mean': tuple(map(float, card['input']['mean'])),
      'std': tuple(map(float, card['input']['std'])),
      **card['config']['model']['options'],
    }
    is_own = ':' in name
  except (ValueError, KeyError, TypeError) as error:
    raise _damaged(of_card, error) from error
  if is_own and model is None:
    raise UserError(
      f'{of_card} is of {name}, which is not part of mwrobust: '
      'import that class and pass it, networks.load(path, model=...).'
    )
  module = models.create(model or name, **options)
  try:
    tensors = safetensors.numpy.load(of_tensors.read_bytes())
  except safetensors.SafetensorError as error:
    raise _damaged(of_tensors, error) from error
  params = traverse_util.unflatten_dict(tensors, sep='/')
  return functools.partial(module.apply, train=False), params, card


def _damaged(path: epath.Path, error: Exception) -> UserError:
  return UserError(
    f'{path} is damaged ({type(error).__name__}: {error}): copy or export the '
    'network again.'
  )


def save(
  path: str | os.PathLike, params: Variables, card: Mapping[str, Any]
) -> tuple[epath.Path, epath.Path]:
  """Writes a network and its model card, and returns their paths."""
  params = jax.tree.map(np.asarray, params)
  tensors = traverse_util.flatten_dict(params, sep='/')
  of_tensors, of_card = paths = _paths(path)
  files.write_bytes(of_tensors, safetensors.numpy.save(tensors))
  files.write_json(of_card, card)
  return paths


def _paths(path: str | os.PathLike) -> tuple[epath.Path, epath.Path]:
  """Returns the paths of the parameters and of the card."""
  path = epath.Path(path)
  return tuple(
    path.with_name(path.name + suffix) for suffix in ('.safetensors', '.json')
  )
