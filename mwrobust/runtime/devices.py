"""Devices and processes; the only file that uses meshes and jax.distributed.

Work is data parallel over a 1-D mesh of all devices of all processes: the state
is replicated and the batch is split. Each example has its own randomness, so
results do not depend on the number of devices.
"""

import contextlib
import functools
import importlib.util
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mwrobust.errors import UserError

_MOST_CPU_DEVICES = 16
# For processes that are started by hand; flags take precedence.
VARIABLES = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')


def initialize(
  distributed: str = 'auto',
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
) -> None:
  """Joins the other processes of the job, if there are any.

  Args:
    distributed: `'off'`: alone. `'on'`: with others; JAX gets missing arguments
      from the cluster. `'auto'`: on if any argument is given, on TPU hosts, and
      in SLURM jobs of several tasks.
    coordinator_address: the address of process 0, `host:port`.
    num_processes: the number of processes of the job.
    process_id: the number of this process, from 0.
  """
  given = (coordinator_address, num_processes, process_id)
  if all(value is None for value in given) and VARIABLES[1] in os.environ:
    address, count, number = map(os.environ.get, VARIABLES)
    given = address, _whole(count, VARIABLES[1]), _whole(number, VARIABLES[2])
  explicit = any(value is not None for value in given)
  wanted = distributed == 'on'
  if distributed == 'auto':
    wanted = explicit or _on_tpu_host() or among_slurm_tasks()
  if not wanted:
    return
  if explicit and None in given:
    raise UserError(
      '--coordinator_address, --num_processes and --process_id must be given '
      f'together, not {given}.'
    )
  if explicit and not 0 <= given[2] < given[1]:
    raise UserError(
      f'--process_id={given[2]} must be from 0 to {given[1] - 1}, one less '
      f'than --num_processes={given[1]}.'
    )
  jax.distributed.initialize(*given)


def use_all_cores(batch_size: int = 0) -> None:
  """Makes each core of a CPU a device, so that all cores share a batch.

  Call it before JAX is used. It does nothing if the number of devices has been
  set, or in one of several processes. The number divides the batch size.
  """
  chosen = (
    'xla_force_host_platform_device_count' in os.environ.get('XLA_FLAGS', '')
    or jax.config.jax_num_cpu_devices > 0
    or is_distributed()
  )
  if not chosen:
    cores = min(len(os.sched_getaffinity(0)), _MOST_CPU_DEVICES)
    count = next(n for n in range(cores, 0, -1) if batch_size % n == 0)
    jax.config.update('jax_num_cpu_devices', count)


def _whole(text: str | None, name: str) -> int | None:
  if text is not None and not text.isdecimal():
    raise UserError(f'{name}={text} must be an integer.')
  return None if text is None else int(text)


def _on_tpu_host() -> bool:
  chips = ('/dev/accel0', '/dev/vfio/0')
  return importlib.util.find_spec('libtpu') is not None and any(
    pathlib.Path(chip).exists() for chip in chips
  )


def among_slurm_tasks() -> bool:
  """Returns whether SLURM has started several tasks."""
  return int(os.environ.get('SLURM_STEP_NUM_TASKS', '1')) > 1


def is_distributed() -> bool:
  """Returns whether there are other processes.

  It starts no backend, so that a report can be made while a device is in use.
  """
  return jax.distributed.is_initialized() and jax.process_count() > 1


def stop_is_agreed(check: int) -> bool:
  """Returns whether a process got a SIGTERM and all are to stop here.

  All processes make the same calls, which `check` numbers.
  """
  return multihost_utils.reached_preemption_sync_point(check)


@contextlib.contextmanager
def others_do_not_ask_to_stop() -> Iterator[None]:
  """Keeps Orbax from asking JAX for sync points with its own count.

  JAX agrees on the count after the last one that was asked for. Orbax's counts
  are far behind those of `stop_is_agreed`, so a SIGTERM would be lost.
  """
  ask = multihost_utils.reached_preemption_sync_point
  multihost_utils.reached_preemption_sync_point = lambda step_id: False
  try:
    yield
  finally:
    multihost_utils.reached_preemption_sync_point = ask


def is_first_process() -> bool:
  """Returns whether this process is the one that writes and prints."""
  return not is_distributed() or jax.process_index() == 0


def of_all_processes(value: int) -> list[int]:
  """Returns the value of each process, in order."""
  if not is_distributed():
    return [value]
  found = multihost_utils.process_allgather(np.int32(value))
  return np.asarray(found).ravel().tolist()


@functools.cache
def mesh() -> jax.sharding.Mesh:
  """Returns the mesh of all devices of all processes, along `data`."""
  auto = (jax.sharding.AxisType.Auto,)
  return jax.make_mesh((jax.device_count(),), ('data',), axis_types=auto)


def replicated() -> NamedSharding:
  """Returns the sharding of arrays that are the same on every device."""
  return NamedSharding(mesh(), P())


def split_rows(rows: np.ndarray, *arrays: np.ndarray) -> tuple[jax.Array, ...]:
  """Returns the rows of each array, split over the devices.

  The result has the axes of `rows`, split along the first, then those of a row.
  A process touches only the rows of its own devices.
  """
  sharding = NamedSharding(mesh(), P('data'))

  def take(array: np.ndarray) -> jax.Array:
    shape = (*rows.shape, *array.shape[1:])
    return jax.make_array_from_callback(
      shape, sharding, lambda index: array[rows[index[0]]]
    )

  return tuple(map(take, arrays))


def by_example(
  function: Callable[[Any, Any], Any],
) -> Callable:
  """Makes `function(shared, batch)` run on each device with a part of a batch.

  For functions that treat each example by itself, such as attacks: no device
  waits for another inside their loops.
  """
  return jax.shard_map(
    function,
    mesh=mesh(),
    in_specs=(P(), P('data')),
    out_specs=P('data'),
    # Otherwise a network with its own loop would have to declare which of its
    # values differ between devices.
    check_vma=False,
  )


def round_up(batch_size: int) -> int:
  """Rounds up to a multiple of the number of devices."""
  return -(-batch_size // mesh().size) * mesh().size


def wait_for_all(what: str) -> None:
  """Waits until all processes have reached this point."""
  if is_distributed():
    multihost_utils.sync_global_devices(what)
