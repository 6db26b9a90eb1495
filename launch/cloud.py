"""Runs on GPU or TPU machines of a cloud, which SkyPilot finds and deletes.

  python -m launch.cloud --name=... --accelerators=A100:8 --num_nodes=2
  python -m launch.cloud --name=... --accelerators=tpu-v6e-16 --spot

Each machine, or host of a TPU, runs one process, which uses all of its devices.
"""

import dataclasses
import json
import pathlib
import shlex

from launch import commands
from launch.commands import FOLDER, MADE_BY, option, say
from mwrobust.errors import UserError

_PORT = 8476  # The coordinator's port inside the cluster.
# The images that Google recommends for JAX, where SkyPilot takes another one:
# cloud.google.com/tpu/docs/runtimes
_IMAGES = {
  'tpu-v2': 'tpu-ubuntu2204-base',
  'tpu-v3': 'tpu-ubuntu2204-base',
  'tpu-v4': 'tpu-ubuntu2204-base',
  'tpu-v5litepod': 'v2-alpha-tpuv5-lite',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(commands.NamedOptions):
  """Holds the options of `python -m launch.cloud`."""

  accelerators: str = option(
    None, "SkyPilot's name of a machine's devices: A100:8, tpu-v6e-16, ..."
  )
  num_nodes: int = option(1, 'The number of GPU machines.', 1)
  infra: str = option(
    '', 'The cloud or region, such as gcp/us-central1; any by default.'
  )
  spot: bool = option(
    False, 'Use spot machines, which are cheaper but may be preempted.'
  )

  def __post_init__(self):
    super().__post_init__()
    if self.is_tpu and self.num_nodes > 1:
      raise UserError(
        f'num_nodes = {self.num_nodes}, but a TPU is one node, whatever its '
        f'number of hosts: choose a larger one than {self.accelerators}.'
      )
    if '://' not in self.workdir:
      raise UserError(
        f'workdir = {self.workdir!r} would be lost with the machine: give a '
        'bucket that it may write to, --workdir=gs://BUCKET/FOLDER.'
      )

  @property
  def is_tpu(self) -> bool:
    """Whether the devices are TPUs."""
    return self.accelerators.startswith('tpu-')


def task(options: Options) -> str:
  """Returns the task file of SkyPilot. JSON is YAML, and quotes everything."""
  run = '"$HOME/mwrobust/venv/bin/python" -m mwrobust.main'
  if not options.is_tpu:  # JAX gets the process id from the TPU itself.
    run += (
      ' --coordinator_address='
      f'"$(echo "$SKYPILOT_NODE_IPS" | head -n1):{_PORT}"'
      ' --num_processes="$SKYPILOT_NUM_NODES"'
      ' --process_id="$SKYPILOT_NODE_RANK"'
    )
  resources = {
    'accelerators': options.accelerators,
    'use_spot': options.spot,
    'labels': {'made-by': MADE_BY},
  }
  if options.infra:
    resources['infra'] = options.infra
  if image := _IMAGES.get(options.accelerators.rpartition('-')[0]):
    resources['accelerator_args'] = {'runtime_version': image}
  extras = f'{"tpu" if options.is_tpu else "cuda"},tfds,gcs'
  fields = {
    'name': options.name,
    'num_nodes': options.num_nodes,
    'resources': resources,
    'workdir': '.',
    'setup': f'bash launch/install.sh . {extras}',
    'run': f'{run} {shlex.join(options.worker_args)}',
  }
  return json.dumps(fields, indent=2, ensure_ascii=False)


def launch(options: Options) -> int:
  """Runs in the cloud; returns the exit code of the run."""
  path = pathlib.Path(FOLDER, options.name, 'task.yaml')
  command = ['sky', 'launch', f'--cluster={options.name}', '--yes']
  command += ['--retry-until-up', '--down', str(path)]
  if options.dry_run:
    print(f'{task(options)}\n{commands.text_of(command)}')
    return 0
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(task(options))
  for restart in range(options.max_restarts + 1):
    if restart:
      say(f'Restart {restart} of {options.max_restarts}.')
    code = commands.call(command)
    if code == 0:
      break
    say(f'The run broke off with exit code {code}.')
  return code


if __name__ == '__main__':
  commands.run(launch, Options)
