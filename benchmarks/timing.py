"""Times functions side by side on a busy machine."""

import platform
import time
from collections.abc import Callable

import jax


def setting() -> str:
  """Returns the versions and devices of a measurement."""
  return (
    f'jax {jax.__version__}, Python {platform.python_version()}, '
    f'{jax.device_count()} {jax.default_backend()} devices'
  )


def interleaved(
  functions: dict[str, Callable[[], object]], repeats: int
) -> dict[str, float]:
  """Returns the best time of each function in seconds, measured in turn.

  Measured in turn, a disturbance affects all of them, and the best of many
  repeats is one without it. Each is called once before, to compile.
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
