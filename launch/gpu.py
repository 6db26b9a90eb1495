"""One GPU machine of Google's cloud, or many of any cloud through SkyPilot.

  python -m launch.gpu --name=... --zone=... --machine_type=g2-standard-8
  python -m launch.gpu --name=... --accelerators=A100:8 --num_nodes=2

Each machine runs one process, which uses all of its GPUs.
"""

import dataclasses
import json
import pathlib
import shlex

from launch import commands, vm
from launch.commands import FOLDER, MADE_BY, option
from mwrobust.errors import UserError

_EXTRAS = 'cuda,tfds,gcs'
_PORT = 8476  # Of the coordinator, inside the cluster.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(vm.Options):
  """The options of `python -m launch.gpu`."""

  machine_type: str = option('', 'One that has GPUs: g2-standard-8, ...')
  image_family: str = option(
    'ubuntu-accelerator-2404-amd64-with-nvidia-580',
    'Of ubuntu-os-accelerator-images, which hold the driver.',
  )
  accelerators: str = option('', "SkyPilot's name of a machine's GPUs: A100:8.")
  num_nodes: int = option(1, 'How many machines; more need SkyPilot.', 1)

  def __post_init__(self):
    super().__post_init__()
    one, many = bool(self.machine_type), bool(self.accelerators)
    if not self.delete and (one == many or (one and self.num_nodes > 1)):
      raise UserError(
        'Give either --machine_type, for one machine of Google, or '
        '--accelerators and --num_nodes, for SkyPilot.'
      )
    if many and self.zone:
      raise UserError(
        f'--zone={self.zone} is for --machine_type. SkyPilot looks for '
        '--accelerators everywhere: leave it out.'
      )


def build(options: Options) -> vm.Plan:
  """The commands for one machine."""
  spot = ['--provisioning-model=SPOT', '--instance-termination-action=DELETE']
  return vm.build(
    options,
    machine='compute instances',
    create=[
      f'--machine-type={options.machine_type}',
      f'--image-family={options.image_family}',
      '--image-project=ubuntu-os-accelerator-images',
      '--boot-disk-size=100GB',
      '--maintenance-policy=TERMINATE',  # GPUs cannot be moved.
      '--scopes=storage-rw',  # The default may only read buckets.
      *(spot if options.spot else []),
    ],
    connect='compute',
    workers=[],
    extras=_EXTRAS,
    force=[],
  )


def task(options: Options) -> str:
  """The task file of SkyPilot. JSON is YAML, and quotes all there is."""
  run = (
    '"$HOME/mwrobust/venv/bin/python" -m mwrobust.main'
    f' --coordinator_address="$(echo "$SKYPILOT_NODE_IPS" | head -n1):{_PORT}"'
    ' --num_processes="$SKYPILOT_NUM_NODES"'
    f' --process_id="$SKYPILOT_NODE_RANK" {shlex.join(options.worker_args)}'
  )
  fields = {
    'name': options.name,
    'num_nodes': options.num_nodes,
    'resources': {
      'accelerators': options.accelerators,
      'use_spot': options.spot,
      'labels': {'made-by': MADE_BY},
    },
    'workdir': '.',
    'setup': f'bash launch/worker.sh install . {_EXTRAS}',
    'run': run,
  }
  return json.dumps(fields, indent=2, ensure_ascii=False)


def launch(options: Options) -> int:
  """Runs on the GPUs; returns the exit code of the run."""
  if not options.accelerators:
    return vm.launch(build(options), options)
  if options.delete:
    raise UserError(f'SkyPilot keeps its own books: sky down {options.name}')
  path = pathlib.Path(FOLDER, options.name, 'task.yaml')
  command = ['sky', 'launch', f'--cluster={options.name}', '--yes']
  command += ['--retry-until-up', '--down', str(path)]
  if options.dry_run:
    print(f'{task(options)}\n{commands.text_of(command)}')
    return 0
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(task(options))
  return commands.keep_running(
    lambda: commands.call(command), options.max_restarts
  )


if __name__ == '__main__':
  commands.run(launch, Options)
