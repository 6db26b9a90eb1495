"""The launchers: what they would run, and what they do when things go wrong.

No cloud and no cluster is ever reached: for every test `gcloud`, `sbatch` and
the like are small programs that pretend, see the fixture `fakes`.
"""

import contextlib
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from launch import commands, gpu, local, slurm, tpu, vm
from mwrobust.errors import UserError

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / 'launch' / 'README.md').read_text()
RECIPES = re.findall(
  r'```bash\n(python -m launch\..*?)```\n\n```text\n(.*?)```', README, re.DOTALL
)
NASTY = (
  '--config.name=a b',
  "--it's",
  '--$(touch pwned)`touch pwned`',
  '--"quoted" \\ {braces} %s %(x)s !x *',
  '--two\nlines; touch pwned',
  '--ünïcödé=\U0001f600',
  '',
)

# Pretends to be the program it is called as. Its state is beside it: machines
# and jobs that exist, the failures to come, and all calls.
FAKE = """\
import json, os, pathlib, sys, time
me = pathlib.Path(sys.argv[0])
path = me.parent / 'state.json'
state = json.loads(path.read_text())
words = sys.argv[1:]
flags = dict(w[2:].partition('=')[::2] for w in words if w[:2] == '--')
verbs = 'describe create delete scp ssh'.split()
verb = next((w for w in words if w in verbs), me.name)
name = words[words.index(verb) + 1] if verb in words else flags.get('name')
state['calls'].append([me.name, *words])

def act():
  machines, jobs = state['machines'], state['jobs']
  if verb == 'describe':
    if name not in machines:
      return 1, f"ERROR: NOT_FOUND: Resource 'x/{name}' was not found."
    machine = machines[name]
    now = machine['states'][0]
    machine['states'] = machine['states'][1:] or [now]
    labels = {'labels': dict([machine['label'].split('=')])}
    if 'queued-resources' in words:
      print(json.dumps(
        {'state': {'state': now}, 'tpu': {'nodeSpec': [{'node': labels}]}}))
    else:
      field = 'state' if 'tpus' in words else 'status'
      print(json.dumps(labels | {field: now}))
  elif verb == 'create':
    if name in machines:
      return 1, f'ERROR: {name} already exists'
    up = ['ACTIVE' if 'queued-resources' in words else
          'READY' if 'tpus' in words else 'RUNNING']
    states = state['states'].pop(0) if state['states'] else up
    machines[name] = {'label': flags['labels'], 'states': states}
  elif verb == 'delete':
    del machines[name]
  elif verb == 'sbatch':
    jobs[str(len(jobs) + 7)] = 'made-by=mwrobust-launch'
    print(len(jobs) + 6)
  elif verb == 'squeue':
    print('\\n'.join(f'{job} {by}' for job, by in jobs.items()))
  elif verb == 'scancel':
    del jobs[words[0]]
  return 0, ''

code, error = 0, ''
failure = next((f for f in state['failures'] if f['verb'] == verb), None)
if failure:
  state['failures'].remove(failure)
  if failure.get('works'):
    act()
  if 'becomes' in failure:
    state['machines'][name]['states'] = [failure['becomes']]
  code, error = failure['code'], failure['error']
else:
  code, error = act()
path.write_text(json.dumps(state))
if failure:
  time.sleep(failure.get('sleep', 0))
print(error, file=sys.stderr)
sys.exit(code)
"""


class Fakes:
  """What the pretended cloud and cluster hold."""

  def __init__(self, folder):
    self.folder = folder
    for name in ('gcloud', 'sky', 'sbatch', 'squeue', 'scancel'):
      program = folder / name
      program.write_text(f'#!{sys.executable} -IS\n{FAKE}')
      program.chmod(0o755)
    empty = {'calls': [], 'failures': [], 'jobs': {}, 'machines': {}}
    self.set(**empty, states=[])

  def get(self, field):
    return json.loads((self.folder / 'state.json').read_text())[field]

  def set(self, **fields):
    path = self.folder / 'state.json'
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | fields))

  def fail(self, verb, error, code=1, **more):
    failure = {'verb': verb, 'error': error, 'code': code, **more}
    self.set(failures=[*self.get('failures'), failure])

  def verbs(self):
    """What was called, without the words."""
    known = ('describe', 'create', 'delete', 'scp', 'ssh')
    return [
      next((word for word in call if word in known), call[0])
      for call in self.get('calls')
    ]


@pytest.fixture(autouse=True)
def fakes(tmp_path, monkeypatch):
  """Programs that pretend, in front of all others, and a checkout."""
  folder = tmp_path / 'bin'
  folder.mkdir()
  monkeypatch.setenv('PATH', f'{folder}:{os.environ["PATH"]}')
  monkeypatch.setattr(commands, 'PAUSE', 0.0)
  checkout = tmp_path / 'checkout'
  (checkout / 'configs').mkdir(parents=True)
  (checkout / 'configs' / 'mine.py').write_text('pass\n')
  git = ['git', '-c', 'user.name=x', '-c', 'user.email=x@x']
  monkeypatch.chdir(checkout)
  subprocess.run([*git, 'init', '--quiet'], check=True)
  subprocess.run([*git, 'add', '.'], check=True)
  subprocess.run([*git, 'commit', '--quiet', '--message=x'], check=True)
  return Fakes(folder)


# ---- The recipes


def test_the_readme_has_a_recipe_for_each_launcher():
  modules = {re.match(r'python -m (\S+)', command)[1] for command, _ in RECIPES}
  assert modules == {f'launch.{m}' for m in ('local', 'tpu', 'gpu', 'slurm')}


@pytest.mark.parametrize(('command', 'expected'), RECIPES)
def test_recipe(command, expected, fakes):
  words = shlex.split(command.replace('\\\n', ' '))
  assert '--dry_run' in words
  printed = subprocess.run(
    [sys.executable, *words[1:]],
    capture_output=True, text=True, check=True, cwd=ROOT,
  ).stdout  # fmt: skip
  assert printed.replace(sys.executable, 'python') == expected
  assert fakes.get('calls') == []


@pytest.mark.parametrize(
  ('words', 'message'),
  [
    ('local --config=x', 'go after ` -- `'),
    ('local -- x', "'x' is no flag"),
    ('local --num_processes=0', 'num_processes = 0 is less than 1'),
    ('slurm --name=x --max_restarts=-1', 'less than 0'),
    ('slurm', '--name'),
    ('slurm --name=X_1', "name = 'X_1'"),
    ('tpu --name=x --zone=z', 'gs://BUCKET'),
    ('tpu --name=x --workdir=gs://b --accelerator_type=v4-8', '--zone'),
    (
      'tpu --name=x --zone=z --workdir=gs://b --accelerator_type=v9-8',
      '--runtime_version',
    ),
    ('gpu --name=x --zone=z --workdir=gs://b', '--machine_type'),
    (
      'gpu --name=x --zone=z --workdir=gs://b --machine_type=m --num_nodes=2',
      '--accelerators',
    ),
    ('gpu --name=x --zone=z --workdir=gs://b --accelerators=L4:1', '--zone=z'),
    ('gpu --name=x --delete --accelerators=L4:1', 'sky down x'),
  ],
)
def test_what_the_user_can_mend_is_said_in_a_line(words, message):
  module, *flags = words.split()
  done = subprocess.run(
    [sys.executable, '-m', f'launch.{module}', *flags],
    capture_output=True, text=True, cwd=ROOT,
  )  # fmt: skip
  assert done.returncode == 1
  assert done.stderr.startswith('launch: ')
  assert message in done.stderr
  assert 'Traceback' not in done.stderr


# ---- The commands


def test_every_kind_of_tpu_has_its_image():
  def version(kind, **more):
    return tpu.runtime_version(
      tpu.Options(name='x', workdir='gs://b', accelerator_type=kind, **more)
    )

  assert version('v3-32') == 'tpu-ubuntu2204-base'
  assert version('v5litepod-4') == 'v2-alpha-tpuv5-lite'
  assert version('v5p-8') == 'v2-alpha-tpuv5'
  assert version('v6e-8') == 'v2-alpha-tpuv6e'
  assert version('v9-8', runtime_version='mine') == 'mine'


def record(path):
  """A program that writes down its arguments, as JSON."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(
    f'#!{sys.executable} -IS\nimport json, sys\n'
    f"json.dump(sys.argv[1:], open({str(path) + '.json'!r}, 'w'))\n"
  )
  path.chmod(0o755)
  return lambda: json.loads(pathlib.Path(f'{path}.json').read_text())


def test_arguments_reach_a_local_worker_unchanged():
  options = local.Options(num_processes=3, args=NASTY, workdir='gs://b/x y')
  workers = local.build(options, port=1234)
  assert [worker[-8:] for worker in workers] == [
    ['--workdir=gs://b/x y', *NASTY]
  ] * 3
  assert [worker[5] for worker in workers] == [
    f'--process_id={i}' for i in range(3)
  ]


def test_arguments_reach_a_machine_unchanged(tmp_path):
  args = record(tmp_path / 'remote' / 'bash')
  options = tpu.Options(
    name='x', zone='z', accelerator_type='v4-8', workdir='gs://b', args=NASTY
  )
  command = tpu.build(options).run
  (words,) = [w for w in command if w.startswith('--command=')]
  subprocess.run(  # As sshd does.
    ['/bin/sh', '-c', words.removeprefix('--command=')],
    env={'PATH': str(tmp_path / 'remote')}, check=True,
  )  # fmt: skip
  expected = ['worker.sh', 'job', 'tpu,tfds,gcs', '--workdir=gs://b', *NASTY]
  assert args() == expected
  assert not pathlib.Path('pwned').exists()


def test_arguments_reach_a_task_of_skypilot_unchanged(tmp_path):
  args = record(tmp_path / 'mwrobust' / 'venv' / 'bin' / 'python')
  options = gpu.Options(
    name='x', accelerators='L4:1', num_nodes=2, workdir='gs://b', args=NASTY
  )
  subprocess.run(
    ['bash', '-c', json.loads(gpu.task(options))['run']],
    env=os.environ
    | {
      'HOME': str(tmp_path),
      'SKYPILOT_NODE_IPS': '10.0.0.1\n10.0.0.2',
      'SKYPILOT_NUM_NODES': '2',
      'SKYPILOT_NODE_RANK': '1',
    },
    check=True,
  )
  assert args() == [
    '-m', 'mwrobust.main', '--coordinator_address=10.0.0.1:8476',
    '--num_processes=2', '--process_id=1', '--workdir=gs://b', *NASTY,
  ]  # fmt: skip
  assert not pathlib.Path('pwned').exists()


def test_arguments_reach_a_slurm_task_unchanged(fakes):
  args = record(fakes.folder / 'srun')
  script = slurm.script(
    slurm.Options(name='x', args=NASTY), python='a b/python'
  )
  subprocess.run(['bash', '-c', script], check=True)
  assert args() == [
    '--kill-on-bad-exit=1', 'a b/python', '-m', 'mwrobust.main', *NASTY
  ]  # fmt: skip
  assert not pathlib.Path('pwned').exists()


# ---- This machine

PRELUDE = """
import os, pathlib, signal, subprocess, sys, time
flags = dict(word.lstrip('-').partition('=')[::2] for word in sys.argv[1:])
me = int(flags['process_id'])
def wait(path):
  while not pathlib.Path(path).exists():
    time.sleep(0.01)
"""


def worker(code):
  return [sys.executable, '-c', PRELUDE + code]


def launch_local(code, **options):
  return local.launch(local.Options(**options), worker(code))


def test_local_prefixes_whole_lines(capsys):
  code = launch_local(
    """
for i in range(200):
  sys.stdout.write('abc'); sys.stdout.flush(); sys.stdout.write(f'def {i}\\n')
sys.stdout.write('\\r 10 %\\r 20 %\\n\\xff no newline'); sys.stdout.flush()
sys.stderr.write('!')
""",
    num_processes=3,
  )
  assert code == 0
  lines = capsys.readouterr().out.splitlines()
  bar = ['', ' 10 %', ' 20 %', 'ÿ no newline!']
  for i in range(3):
    mine = [line[4:] for line in lines if line.startswith(f'[{i}]')]
    assert mine == [*(f'abcdef {i}' for i in range(200)), *bar]
  assert len(lines) == 3 * 204


def test_local_tells_each_who_it_is(capsys):
  code = launch_local(
    "print(flags['coordinator_address'], flags['num_processes'], me)"
  )
  assert code == 0
  lines = sorted(capsys.readouterr().out.splitlines())
  (address,) = {line.split()[1] for line in lines}
  assert re.fullmatch(r'127\.0\.0\.1:\d+', address)
  assert lines == [f'[{i}] {address} 2 {i}' for i in range(2)]


DIES = """
if me == 1:
  wait('ready')
  os.kill(os.getpid(), signal.SIGKILL)
child = subprocess.Popen(['sleep', '600'])
pathlib.Path('child').write_text(str(child.pid))
pathlib.Path('ready').touch()
time.sleep(600)
"""


def is_running(pid):
  """Whether there is such a process, other than a zombie."""
  with contextlib.suppress(FileNotFoundError):
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
    return stat.rpartition(')')[2].split()[0] != 'Z'
  return False


def test_local_ends_all_if_one_is_killed(capsys):
  start = time.monotonic()
  assert launch_local(DIES) == 128 + signal.SIGKILL
  assert time.monotonic() - start < 30
  printed = capsys.readouterr().err
  assert 'launch: process 1 was killed by SIGKILL, ending the others' in printed
  child = pathlib.Path('child').read_text()
  deadline = time.monotonic() + 10
  while is_running(child) and time.monotonic() < deadline:
    time.sleep(0.01)
  assert not is_running(child)


def test_local_kills_those_that_do_not_end(capsys, monkeypatch):
  monkeypatch.setattr(local, 'GRACE', 0.5)
  code = launch_local("""
if me == 0:
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  pathlib.Path('ready').touch()
  time.sleep(600)
wait('ready')
sys.exit(3)
""")
  assert code == 3
  printed = capsys.readouterr().err
  assert 'process 1 ended with exit code 3, ending the others' in printed
  assert 'killing them' in printed


ONCE = """
first = not pathlib.Path('again').exists()
print('port', flags['coordinator_address'].partition(':')[2])
if first and me == 1:
  wait('ready')
  pathlib.Path('again').touch()
  os.kill(os.getpid(), signal.SIGKILL)
if first:
  pathlib.Path('ready').touch()
  time.sleep(600)
print('done')
"""


def test_local_starts_all_again(capsys, monkeypatch):
  ports = iter([1111, 2222])
  monkeypatch.setattr(local, '_free_port', lambda: next(ports))
  assert launch_local(ONCE, max_restarts=2) == 0
  printed = capsys.readouterr()
  assert 'launch: Restart 1 of 2' in printed.err
  assert 'Restart 2' not in printed.err
  for i in range(2):
    mine = [line for line in printed.out.splitlines() if line[1] == str(i)]
    assert mine == [f'[{i}] port 1111', f'[{i}] port 2222', f'[{i}] done']


def test_local_restarts_at_most_so_often(capsys):
  assert launch_local('sys.exit(5)', num_processes=1, max_restarts=2) == 5
  printed = capsys.readouterr().err
  assert printed.count('process 0 ended with exit code 5.') == 3
  assert printed.count('Restart') == 2


def test_local_does_not_try_again_what_the_user_has_to_mend(capsys):
  code = launch_local("sys.exit('mwrobust: train.T = -1')", max_restarts=5)
  assert code == 1
  printed = capsys.readouterr()
  assert '] mwrobust: train.T = -1' in printed.out
  assert 'Restart' not in printed.err


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_local_lets_the_workers_save_and_waits(number):
  code = """
def save(number, frame):
  time.sleep(me)  # The second needs longer, and has that time.
  print('saved')
  sys.exit(128 + number)
signal.signal(signal.SIGTERM, save)
print('ready')
time.sleep(600)
"""
  program = (
    'import sys; from launch import local; '
    f'sys.exit(local.launch(local.Options(max_restarts=3), {worker(code)!r}))'
  )
  with subprocess.Popen(
    [sys.executable, '-c', program], stdout=subprocess.PIPE,
    stderr=subprocess.PIPE, text=True, cwd=ROOT,
  ) as process:  # fmt: skip
    lines = [process.stdout.readline().strip() for _ in range(2)]
    assert sorted(lines) == ['[0] ready', '[1] ready']
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
  assert out.splitlines() == ['[0] saved', '[1] saved']
  assert process.returncode == 128 + number
  assert 'Restart' not in err


# ---- Machines


def launch_tpu(**options):
  defaults = {
    'name': 'mine', 'zone': 'z', 'workdir': 'gs://b', 'accelerator_type': 'v4-8'
  }  # fmt: skip
  return tpu.launch(tpu.Options(**defaults | options))


FRESH = ['describe', 'create', 'describe', 'scp', 'ssh']
OURS = {'label': 'made-by=mwrobust-launch', 'states': ['READY']}


def test_a_launch_makes_a_machine_and_the_next_one_finds_it(fakes):
  assert launch_tpu() == 0
  assert fakes.verbs() == FRESH
  assert pathlib.Path('runs/launch/mine/mwrobust.tar.gz').stat().st_size
  assert launch_tpu() == 0
  assert fakes.verbs() == [*FRESH, 'describe', 'scp', 'ssh']


def test_a_gpu_machine_lives_likewise(fakes):
  options = gpu.Options(
    name='mine', zone='z', workdir='gs://b', machine_type='g2-standard-8'
  )
  assert gpu.launch(options) == 0
  assert fakes.verbs() == FRESH


def test_a_queued_request_is_waited_for(fakes, capsys):
  states = ['WAITING_FOR_RESOURCES'] * 2 + ['PROVISIONING', 'ACTIVE']
  fakes.set(states=[states])
  assert launch_tpu(queued=True) == 0
  assert fakes.verbs() == [*FRESH[:2], *['describe'] * 4, 'scp', 'ssh']
  said = capsys.readouterr().err
  assert said.count('mine is WAITING_FOR_RESOURCES') == 1
  assert 'mine costs money until you delete it' in said


def test_no_quota_is_not_tried_again(fakes):
  fakes.fail('create', "UNAVAILABLE: Quota 'GPUS' exceeded. Limit: 0.0")
  with pytest.raises(UserError, match="Quota 'GPUS' exceeded"):
    launch_tpu(max_restarts=3)
  assert fakes.verbs() == ['describe', 'create']


@pytest.mark.parametrize(
  'error',
  [
    'Connection reset by peer',
    'There is no more capacity in the zone "z"',
    'code: ZONE_RESOURCE_POOL_EXHAUSTED',
    'HttpError 503: The service is currently unavailable.',
    'DEADLINE_EXCEEDED',
  ],
)
def test_what_passes_is_tried_again(fakes, error):
  fakes.fail('create', error)
  fakes.fail('create', error)
  assert launch_tpu() == 0
  assert fakes.verbs().count('create') == 3


def test_retries_end(fakes):
  for _ in range(commands.RETRIES + 1):
    fakes.fail('create', 'no more capacity')
  with pytest.raises(UserError, match='no more capacity'):
    launch_tpu()
  assert fakes.verbs().count('create') == commands.RETRIES + 1


def test_a_creation_that_timed_out_but_worked_is_not_done_twice(fakes):
  fakes.fail('create', 'timed out', works=True)
  assert launch_tpu() == 0
  assert fakes.verbs().count('create') == 1


def test_a_program_that_hangs_is_given_up(fakes, monkeypatch):
  monkeypatch.setattr(commands, 'TIMEOUT', 4.0)
  fakes.fail('describe', '', sleep=600)
  assert launch_tpu() == 0
  assert fakes.verbs() == ['describe', *FRESH]


def test_a_machine_that_does_not_listen_yet_is_tried_again(fakes):
  fakes.fail('scp', 'port 22: Connection refused', code=255)
  assert launch_tpu() == 0
  assert fakes.verbs() == [*FRESH[:-1], 'scp', 'ssh']


def test_a_preempted_machine_is_made_again(fakes, capsys):
  fakes.fail('ssh', '', code=255, becomes='PREEMPTED')
  assert launch_tpu(spot=True, max_restarts=1) == 0
  again = ['describe', 'describe', 'delete', 'create', 'describe', 'scp', 'ssh']
  assert fakes.verbs() == [*FRESH, *again]
  said = capsys.readouterr().err
  assert 'broke off with exit code 255' in said
  assert 'mine is PREEMPTED' in said


def test_without_restarts_the_same_command_goes_on(fakes):
  fakes.fail('ssh', '', code=255, becomes='PREEMPTED')
  assert launch_tpu(spot=True) == 255
  assert launch_tpu(spot=True) == 0


def test_a_lost_connection_is_taken_up_again(fakes):
  fakes.fail('ssh', '', code=255)
  assert launch_tpu(max_restarts=1) == 0
  assert fakes.verbs() == [*FRESH, 'describe', 'scp', 'ssh']


def test_a_machine_lost_before_it_was_up_costs_a_restart(fakes):
  fakes.set(states=[['CREATING', 'PREEMPTED'], ['READY']])
  assert launch_tpu(max_restarts=1) == 0
  assert fakes.verbs().count('create') == 2
  fakes.set(machines={}, states=[['FAILED']] * 9)
  assert launch_tpu(max_restarts=2) == 1
  assert fakes.verbs().count('create') == 5


def test_what_the_user_has_to_mend_is_not_tried_again_there(fakes):
  fakes.fail('ssh', '', code=vm.USER_ERROR)
  assert launch_tpu(max_restarts=3) == vm.USER_ERROR
  assert fakes.verbs() == FRESH


@pytest.mark.parametrize('label', ['made-by=another', 'x=mwrobust-launch'])
@pytest.mark.parametrize('delete', [False, True])
@pytest.mark.parametrize('queued', [False, True])
def test_the_machines_of_others_are_left_alone(fakes, label, delete, queued):
  fakes.set(machines={'mine': {'label': label, 'states': ['STOPPED']}})
  with pytest.raises(UserError, match='left alone'):
    launch_tpu(delete=delete, queued=queued, max_restarts=3)
  assert fakes.verbs() == ['describe']


def test_deletion_takes_the_machine_of_that_name_only(fakes, capsys):
  fakes.set(machines={'mine': OURS, 'mine-2': OURS})
  assert launch_tpu(delete=True, workdir='', accelerator_type='') == 0
  assert list(fakes.get('machines')) == ['mine-2']
  assert launch_tpu(delete=True) == 0
  assert 'no mine; nothing to delete' in capsys.readouterr().err
  assert fakes.verbs().count('delete') == 1


def test_a_failure_to_ask_is_no_absence(fakes):
  fakes.fail('describe', 'ERROR: mine: PERMISSION_DENIED')
  with pytest.raises(UserError, match='PERMISSION_DENIED'):
    launch_tpu()
  assert fakes.verbs() == ['describe']


@pytest.mark.parametrize('path', ['configs/mine.py', 'configs/new.py'])
def test_what_is_not_committed_is_not_launched(fakes, path):
  pathlib.Path(path).write_text('changed\n')
  with pytest.raises(UserError, match=path):
    launch_tpu()
  assert fakes.get('calls') == []


def test_a_missing_program_is_said():
  with pytest.raises(UserError, match='no-such is not on the PATH'):
    commands.output(['no-such'])
  with pytest.raises(UserError, match='no-such is not on the PATH'):
    commands.call(['no-such'])


def test_skypilot_is_given_a_file(fakes):
  options = gpu.Options(
    name='mine', accelerators='A100:8', num_nodes=2, spot=True, max_restarts=1,
    workdir='gs://b', args=NASTY,
  )  # fmt: skip
  fakes.fail('sky', '', code=100)
  assert gpu.launch(options) == 0
  ((*_, path), _) = fakes.get('calls')
  task = json.loads(pathlib.Path(path).read_text())
  assert path.endswith('.yaml')
  assert task['num_nodes'] == 2
  assert task['resources']['accelerators'] == 'A100:8'
  assert task['resources']['use_spot']


# ---- Slurm


def launch_slurm(**options):
  return slurm.launch(slurm.Options(name='mine', **options))


def test_a_slurm_job_is_submitted_once(fakes, capsys):
  assert launch_slurm() == 0
  assert launch_slurm() == 0
  assert fakes.verbs().count('sbatch') == 1
  assert capsys.readouterr().err.count('Job 7') == 2
  script = pathlib.Path('runs/launch/mine/job.sh').read_text()
  assert '#SBATCH --job-name=mine\n' in script


@pytest.mark.parametrize('works', [True, False])
def test_a_submission_that_timed_out_is_looked_for(fakes, works):
  error = 'sbatch: error: Batch job submission failed: Socket timed out'
  fakes.fail('sbatch', error, works=works)
  assert launch_slurm() == 0
  assert len(fakes.get('jobs')) == 1
  assert fakes.verbs().count('sbatch') == 2 - works


def test_a_submission_that_is_refused_is_not_repeated(fakes):
  fakes.fail('sbatch', 'sbatch: error: Invalid account')
  with pytest.raises(UserError, match='Invalid account'):
    launch_slurm()
  assert fakes.verbs() == ['squeue', 'sbatch']


def test_the_jobs_of_others_are_not_cancelled(fakes):
  jobs = {'1': 'made-by=another', '2': 'made-by=mwrobust-launch', '3': '(null)'}
  fakes.set(jobs=jobs)
  assert launch_slurm(delete=True) == 0
  assert list(fakes.get('jobs')) == ['1', '3']
  assert launch_slurm(delete=True) == 0
  assert fakes.verbs().count('scancel') == 1


@pytest.mark.parametrize(
  ('code', 'count', 'requeued'),
  [
    (0, 0, False),
    (1, 0, False),
    (143, 0, True),
    (137, 1, True),
    (143, 2, False),
  ],
)
def test_a_slurm_job_that_was_ended_queues_again(fakes, code, count, requeued):
  for name, body in (
    ('srun', f'exit {code}'),
    ('scontrol', 'echo "$@" >again'),
  ):
    (fakes.folder / name).write_text(f'#!/bin/bash\n{body}\n')
    (fakes.folder / name).chmod(0o755)
  script = slurm.script(slurm.Options(name='mine', max_restarts=2))
  env = os.environ | {'SLURM_RESTART_COUNT': str(count), 'SLURM_JOB_ID': '42'}
  done = subprocess.run(['bash', '-c', script], env=env)
  assert done.returncode == code
  again = pathlib.Path('again')
  assert again.exists() == requeued
  assert not requeued or again.read_text() == 'requeue 42\n'


# ---- worker.sh

MAIN = """
import json, os, pathlib, sys, time
print(json.dumps(sys.argv[1:]))
if '--wait' in sys.argv:
  while not pathlib.Path.home().joinpath('go').exists():
    time.sleep(0.01)
if '--kill' in sys.argv:
  os.kill(os.getppid(), 9)
if '--mend' in sys.argv:
  sys.exit('mwrobust: mend this')
sys.exit('--fail' in sys.argv and 5)
"""
UV = f"""#!/bin/bash
echo "uv $*" >>"$HOME/uv.log"
if [ "$1" = venv ]; then
  mkdir -p "${{@: -1}}/bin"
  printf '#!/bin/bash\\nexec {sys.executable} "$@"\\n' >"${{@: -1}}/bin/python"
  chmod +x "${{@: -1}}/bin/python"
fi
"""
# Downloads an archive to the file after --output.
CURL = """#!/bin/bash
echo curl >>"$HOME/uv.log"
while [ "$1" != --output ]; do shift; done
cp "$(dirname "$0")/uv.tar.gz" "$2"
"""
# Would refuse that archive; takes any that is checked at all.
SHA256SUM = """#!/bin/bash
read -r checksum path && [ "${#checksum}" = 64 ] && [ -f "$path" ]
"""


@pytest.fixture
def machine(tmp_path, fakes):
  """Starts `worker.sh job` on a machine that got a small mwrobust."""
  home = tmp_path / 'home'
  package = tmp_path / 'source' / 'mwrobust'
  package.mkdir(parents=True)
  home.mkdir()
  (package / '__init__.py').touch()
  (package / 'main.py').write_text(MAIN)
  subprocess.run(
    ['tar', '-czf', home / 'mwrobust.tar.gz', '-C', package.parent, 'mwrobust'],
    check=True,
  )
  release = tmp_path / f'uv-{os.uname().machine}-unknown-linux-gnu'
  release.mkdir()
  for path, text in (
    (release / 'uv', UV),
    (fakes.folder / 'curl', CURL),
    (fakes.folder / 'sha256sum', SHA256SUM),
  ):
    path.write_text(text)
    path.chmod(0o755)
  subprocess.run(
    [
      *('tar', '-czf', fakes.folder / 'uv.tar.gz', '-C', tmp_path),
      release.name,
    ],
    check=True,
  )

  def start(*args):
    return subprocess.Popen(
      ['bash', str(ROOT / 'launch' / 'worker.sh'), 'job', 'tpu,gcs', *args],
      env=os.environ | {'HOME': str(home)}, stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip

  start.home = home
  yield start
  (home / 'go').touch()


def test_worker_installs_once_and_runs(machine):
  for _ in range(2):
    process = machine(*NASTY)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(out) == list(NASTY)
  log = (machine.home / 'uv.log').read_text().splitlines()
  home = machine.home / 'mwrobust'
  install = (
    f'uv pip install --quiet --python={home}/venv/bin/python '
    f'--editable={home}/source[tpu,gcs]'
  )
  assert log == [
    'curl', f'uv venv --quiet --python=>=3.11,<3.14 {home}/venv', install,
    install,
  ]  # fmt: skip


@pytest.mark.parametrize(
  ('flag', 'code'), [('--fail', 5), ('--mend', vm.USER_ERROR), ('--kill', 137)]
)
def test_worker_says_how_the_run_ended(machine, flag, code):
  process = machine(flag)
  process.communicate(timeout=60)
  assert process.returncode == code


def test_worker_runs_nothing_of_a_download_that_is_not_the_release(
  machine, fakes
):
  (fakes.folder / 'sha256sum').unlink()  # The real one, then.
  process = machine()
  out, _ = process.communicate(timeout=60)
  assert process.returncode not in (0, vm.USER_ERROR)
  assert 'uv.tar.gz: FAILED' in out
  assert (machine.home / 'uv.log').read_text() == 'curl\n'
  assert not (machine.home / 'mwrobust' / 'uv').exists()


def test_worker_says_that_it_could_not_start(machine):
  (machine.home / 'mwrobust.tar.gz').write_text('no archive')
  process = machine()
  out, _ = process.communicate(timeout=60)
  assert process.returncode not in (0, vm.USER_ERROR)
  assert 'tar' in out


def test_worker_runs_without_the_connection_and_once(machine):
  first = machine('--wait')
  first.stdout.readline()  # It runs.
  first.kill()  # The connection, not the run.
  first.wait()
  first.stdout.close()
  other = machine('--wait', '--more')
  out, _ = other.communicate(timeout=60)
  assert other.returncode == vm.USER_ERROR
  assert 'another run is under way' in out
  again = machine('--wait')
  assert 'under way; its log' in again.stdout.readline()
  assert json.loads(again.stdout.readline()) == ['--wait']
  (machine.home / 'go').touch()
  again.communicate(timeout=60)
  assert again.returncode == 0
  assert (machine.home / 'uv.log').read_text().count('venv --quiet') == 1
