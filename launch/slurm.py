"""Submits a job to a Slurm cluster, one task per GPU.

  python -m launch.slurm --name=... --nodes=2 --gpus_per_node=4

sbatch takes partition, account and time limit from SBATCH_PARTITION,
SBATCH_ACCOUNT and SBATCH_TIMELIMIT.
"""

import dataclasses
import pathlib
import sys

from launch import commands
from launch.commands import FOLDER, MADE_BY, option, say

_SCRIPT = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --comment=made-by={made_by}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={gpus}
#SBATCH --gpus-per-node={gpus}
#SBATCH --output={folder}/job-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@120

{srun}
code=$?
# Ended by a signal, as when the time limit is near: the same job resumes later.
if [ "$code" -gt 128 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(commands.NamedOptions):
  """Holds the options of `python -m launch.slurm`."""

  delete: bool = option(False, 'Cancel the job of this name.')
  nodes: int = option(1, 'The number of nodes.', 1)
  gpus_per_node: int = option(
    1, 'The number of GPUs, and so of tasks, per node.', 1
  )


def script(options: Options, python: str = sys.executable) -> str:
  """Returns the batch script.

  JAX reads from Slurm's variables which task it is. It wants each task to see
  all GPUs of its node, hence no --gpus-per-task (jax-ml/jax#28194).
  """
  srun = ['srun', '--kill-on-bad-exit=1', python, '-m', 'mwrobust.main']
  return _SCRIPT.format(
    name=options.name,
    made_by=MADE_BY,
    nodes=options.nodes,
    gpus=options.gpus_per_node,
    folder=f'{FOLDER}/{options.name}',
    srun=commands.text_of([*srun, *options.worker_args]),
    restarts=options.max_restarts,
  )


def build(options: Options) -> list[list[str]]:
  """Returns the commands that look for the job, and submit it."""
  name = options.name
  return [
    ['squeue', '--me', '--noheader', f'--name={name}', '--format=%A %k'],
    ['sbatch', '--parsable', f'{FOLDER}/{name}/job.sh'],
  ]


def launch(options: Options) -> int:
  """Submits the job, unless there is one of this name."""
  squeue, sbatch = build(options)
  if options.dry_run:
    if not options.delete:
      print(script(options))
    steps = [squeue, ['scancel', 'JOB']] if options.delete else [squeue, sbatch]
    print('\n'.join(map(commands.text_of, steps)))
    return 0

  lines = [line.split() for line in commands.output(squeue).splitlines()]
  # Only jobs that the launcher made.
  found = [line[0] for line in lines if line[1:] == [f'made-by={MADE_BY}']]
  if options.delete:
    for job in found:
      commands.output(['scancel', job])
    say(f'Cancelled: {", ".join(found) or "there was none"}.')
    return 0
  if not found:
    path = pathlib.Path(sbatch[-1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script(options))
    found = commands.output(sbatch).split()
  say(f'Job {", ".join(found)}, log in {FOLDER}/{options.name}.')
  return 0


if __name__ == '__main__':
  commands.run(launch, Options)
