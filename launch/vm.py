"""The life of a cloud machine: made once, found again, deleted if it is ours.

The run goes on there without the launcher, see `worker.sh`: launching it again
makes what is missing and follows the run that is under way.
"""

import dataclasses
import json
import pathlib
import shlex
import time
from typing import NamedTuple

from launch import commands
from launch.commands import FOLDER, MADE_BY, option, say
from mwrobust.errors import UserError

USER_ERROR = 78  # Of `worker.sh`, where no restart can help.

_UP = ('ACTIVE', 'READY', 'RUNNING')
# Nothing is lost with a machine in these states: the results are in a bucket.
_DEAD = ('FAILED', 'PREEMPTED', 'STOPPED', 'SUSPENDED', 'TERMINATED')
_SENT = ('mwrobust', 'configs', 'launch', 'pyproject.toml')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(commands.NamedOptions):
  """The options of a machine in Google's cloud."""

  zone: str = option('', 'Where the machine is made: us-central1-a, ...')
  spot: bool = option(False, 'Cheaper, and may be taken away at any time.')

  def __post_init__(self):
    super().__post_init__()
    if not self.delete and '://' not in self.workdir:
      raise UserError(
        f'workdir = {self.workdir!r} would be lost with the machine: give a '
        'bucket that it may write to, --workdir=gs://BUCKET/FOLDER.'
      )


class Plan(NamedTuple):
  """The commands of a machine's life, in their order."""

  pack: list[str]
  describe: list[str]
  create: list[str]
  upload: list[str]
  run: list[str]
  delete: list[str]


def build(
  options: Options,
  *,
  machine: str,
  create: list[str],
  connect: str,
  workers: list[str],
  extras: str,
  force: list[str],
) -> Plan:
  """What all machines share.

  Args:
    options: The options.
    machine: The words of gcloud for its kind: `compute instances`.
    create: The flags that make it.
    connect: The words of gcloud for the kind that `ssh` and `scp` know.
    workers: The flags that choose all hosts, where there are many.
    extras: Of mwrobust, to be installed.
    force: The flags that delete all that belongs to it.

  Returns:
    The plan.
  """

  def gcloud(words: str, *more: str) -> list[str]:
    zone = [f'--zone={options.zone}', '--quiet']
    return ['gcloud', *words.split(), *more, *zone]

  if not options.zone:
    raise UserError('--zone is missing.')
  name = options.name
  archive = f'{FOLDER}/{name}/mwrobust.tar.gz'
  job = ['bash', 'worker.sh', 'job', extras, *options.worker_args]
  return Plan(
    pack=['git', 'archive', f'--output={archive}', 'HEAD'],
    describe=gcloud(f'{machine} describe', name, '--format=json'),
    create=gcloud(
      f'{machine} create', name, *create, f'--labels=made-by={MADE_BY}'
    ),
    upload=gcloud(
      f'{connect} scp', archive, 'launch/worker.sh', f'{name}:', *workers
    ),
    run=gcloud(
      f'{connect} ssh',
      name,
      *workers,
      '--ssh-flag=-oServerAliveInterval=30',  # Else it waits for the dead.
      f'--command={shlex.join(job)}',
    ),
    delete=gcloud(f'{machine} delete', name, *force),
  )


def launch(plan: Plan, options: Options) -> int:
  """Makes the machine if need be, and runs there until the run has ended."""
  steps = [plan.describe, plan.delete] if options.delete else plan[:-1]
  if options.dry_run:
    print('\n'.join(map(commands.text_of, steps)))
    return 0
  if options.delete:
    _delete(plan, options.name)
    return 0
  _check_committed()
  pathlib.Path(FOLDER, options.name).mkdir(parents=True, exist_ok=True)
  commands.output(plan.pack)
  try:
    code = commands.keep_running(
      lambda: _attempt(plan, options.name), options.max_restarts, USER_ERROR
    )
  except KeyboardInterrupt:
    say('Left alone. The same command takes it up again.')
    code = 130
  say(f'{options.name} costs money until you delete it: add --delete.')
  return code


def _attempt(plan: Plan, name: str) -> int:
  """The exit code of the run, or of what kept it from starting."""
  if not _make(plan, name):
    return 1
  uploaded = commands.attempt(plan.upload)
  if uploaded.returncode:
    say(uploaded.stderr.strip())
    return uploaded.returncode
  return commands.call(plan.run)


def _make(plan: Plan, name: str) -> bool:
  """Makes the machine if need be; False if it was lost before it was up."""
  made, seen = False, ''
  while (state := _state(plan, name)) not in _UP:
    if state != seen:
      say(f'{name} is {state or "not there"}.')
      seen = state
    if state is None or state in _DEAD:
      if made:
        return False
      if state:
        _delete(plan, name)
      result = commands.attempt(
        plan.create, settled=lambda: _state(plan, name) is not None
      )
      commands.check(result, 'Try another zone, or --queued of launch.tpu.')
      made = True
    else:
      time.sleep(commands.PAUSE)
  return True


def _delete(plan: Plan, name: str) -> None:
  if _state(plan, name) is None:
    say(f'There is no {name}; nothing to delete.')
    return
  commands.output(plan.delete, settled=lambda: _state(plan, name) is None)
  say(f'Deleted {name}.')


def _state(plan: Plan, name: str) -> str | None:
  """The state of the machine, None if there is none; refuses that of others."""
  result = commands.attempt(plan.describe)
  if (
    result.returncode and 'not found' in result.stderr and name in result.stderr
  ):
    return None
  machine = json.loads(commands.check(result))
  state = machine.get('status') or machine['state']
  if isinstance(state, dict):  # A queued resource holds what it asks for.
    state, machine = state['state'], machine['tpu']['nodeSpec'][0]['node']
  if machine.get('labels', {}).get('made-by') != MADE_BY:
    raise UserError(
      f'{name} was not made by this launcher (it has no label '
      f'made-by={MADE_BY}) and is left alone: choose another --name.'
    )
  return state


def _check_committed() -> None:
  """The machine gets the last commit, so nothing may differ from it."""
  status = commands.output(['git', 'status', '--porcelain', '--', *_SENT])
  if status:
    raise UserError(
      f'The last commit is what runs there. Commit first:\n{status.rstrip()}'
    )
