"""Makes one model of the last h outer steps: their mean or their ensemble.

The Theorem's output is the ensemble of the outputs. The mean of the parameters
(Figure ALG:multi-robust-scalable) is as good if the losses are nearly convex,
and costs one network instead of h:

>>> import jax.numpy as jnp
>>> from mwrobust.training import averaging
>>> average = averaging.average([{'w': jnp.ones(2)}, {'w': 3 * jnp.ones(2)}])
>>> average['w'].tolist()
[2.0, 2.0]

An ensemble is a `logits_fn`, so attacks treat it as one model:

>>> logits_fn = averaging.ensemble([lambda x: x, lambda x: -x])
>>> jnp.exp(logits_fn(jnp.array([[4.0, 0.0]]))).tolist()
[[0.5, 0.5]]
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

LogitsFn = Callable[[jax.Array], jax.Array]


def average(trees: Iterable[Any]) -> Any:
  """Returns the mean of pytrees of arrays, such as parameters, oldest first.

  Leaves keep their dtype. Leaves that are not floating point (counters, keys)
  are taken from the last tree.

  BatchNorm statistics are averaged like the rest, as in the authors' code. They
  differ from the statistics of the averaged network; an `ensemble` avoids this.
  """

  def mean(*leaves):
    if not jnp.issubdtype(leaves[-1].dtype, jnp.inexact):
      return leaves[-1]
    return jnp.mean(jnp.stack(leaves), axis=0)

  return jax.jit(functools.partial(jax.tree.map, mean))(*trees)


def ensemble(logits_fns: Iterable[LogitsFn]) -> LogitsFn:
  """Returns the model whose probabilities are the mean over its members.

  Its logits are the log of the mean softmax, and are finite however confident
  the members are.
  """
  members = tuple(logits_fns)

  def logits_fn(images):
    log_p = jnp.stack(
      [jax.nn.log_softmax(member(images)) for member in members]
    )
    return jax.nn.logsumexp(log_p, axis=0) - math.log(len(members))

  return logits_fn
