"""Side-by-side timing on a machine with other load."""

import time
from collections.abc import Callable

import jax


def interleaved(
  functions: dict[str, Callable[[], object]], repeats: int
) -> dict[str, float]:
  """Returns the best time of each function in seconds, measured in turn.

  In turn, a disturbance of the machine affects all of them; the best of many
  repeats is one that it did not affect. Each is called once before, to compile.
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
