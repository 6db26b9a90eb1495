"""A TPU of Google's cloud, with all of its hosts.

  python -m launch.tpu --name=... --zone=... --accelerator_type=v5litepod-16

Each host runs one process; JAX finds out by itself who is who.
"""

import dataclasses

from launch import commands, vm
from launch.commands import option
from mwrobust.errors import UserError

# cloud.google.com/tpu/docs/runtimes
RUNTIME_VERSIONS = {
  'v2': 'tpu-ubuntu2204-base',
  'v3': 'tpu-ubuntu2204-base',
  'v4': 'tpu-ubuntu2204-base',
  'v5litepod': 'v2-alpha-tpuv5-lite',
  'v5p': 'v2-alpha-tpuv5',
  'v6e': 'v2-alpha-tpuv6e',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(vm.Options):
  """The options of `python -m launch.tpu`."""

  accelerator_type: str = option('', 'v4-8, v5litepod-16, v6e-4, ...')
  runtime_version: str = option('', 'Of the image; by accelerator type.')
  queued: bool = option(False, 'Wait in line until there is one.')


def runtime_version(options: Options) -> str:
  """The image for the accelerator type."""
  kind = options.accelerator_type.partition('-')[0]
  version = options.runtime_version or RUNTIME_VERSIONS.get(kind)
  if not version:
    raise UserError(
      f'accelerator_type = {options.accelerator_type!r} is not known. Either '
      f'one of {", ".join(f"{kind}-N" for kind in RUNTIME_VERSIONS)}, or give '
      'its --runtime_version, see cloud.google.com/tpu/docs/runtimes.'
    )
  return version


def build(options: Options) -> vm.Plan:
  """The commands for a TPU VM, or for a queued resource that holds one."""
  kind = 'queued-resources' if options.queued else 'tpu-vm'
  flag = '--runtime-version' if options.queued else '--version'
  version = '' if options.delete else runtime_version(options)
  return vm.build(
    options,
    machine=f'compute tpus {kind}',
    create=[
      *([f'--node-id={options.name}'] if options.queued else []),
      f'--accelerator-type={options.accelerator_type}',
      f'{flag}={version}',
      *(['--spot'] if options.spot else []),
    ],
    connect='compute tpus tpu-vm',
    workers=['--worker=all'],
    extras='tpu,tfds,gcs',
    force=['--force'] if options.queued else [],
  )


def launch(options: Options) -> int:
  """Runs on the TPU; returns the exit code of the run."""
  return vm.launch(build(options), options)


if __name__ == '__main__':
  commands.run(launch, Options)
