"""Side-by-side timing on a machine that does other things as well."""

import time
from collections.abc import Callable

import jax


def interleaved(
  functions: dict[str, Callable[[], object]], repeats: int
) -> dict[str, float]:
  """Best time of each function in seconds, the repeats taken in turn.

  Taken in turn, a disturbance of the machine falls on all of them; the best of
  many is the one it did not fall on. Each is called once before, to compile.
  """
  for function in functions.values():
    jax.block_until_ready(function())
  best = dict.fromkeys(functions, float('inf'))
  for _ in range(repeats):
    for name, function in functions.items():
      start = time.perf_counter()
      jax.block_until_ready(function())
      best[name] = min(best[name], time.perf_counter() - start)
  return best
