"""Tests the launchers: what they would run, and what they do on failures.

No cloud and no cluster is ever reached: for every test `sky`, `sbatch` and the
like are small programs that pretend, see the fixture `fakes`.
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

from launch import cloud, commands, local, slurm
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

# Pretends to be the program it is called as. Its state is beside it: the jobs
# that exist, the failures to come, and all calls.
FAKE = """\
import json, pathlib, sys, time
me = pathlib.Path(sys.argv[0])
path = me.parent / 'state.json'
state = json.loads(path.read_text())
jobs = state['jobs']
state['calls'].append([me.name, *sys.argv[1:]])
failure = next((f for f in state['failures'] if f['program'] == me.name), None)
if failure:
  state['failures'].remove(failure)
if not failure or failure['works']:
  if me.name == 'sbatch':
    jobs[str(len(jobs) + 7)] = 'made-by=mwrobust-launch'
    print(len(jobs) + 6)
  elif me.name == 'squeue':
    print('\\n'.join(f'{job} {by}' for job, by in jobs.items()))
  elif me.name == 'scancel':
    del jobs[sys.argv[1]]
path.write_text(json.dumps(state))
if failure:
  time.sleep(failure['sleep'])
  print(failure['error'], file=sys.stderr)
  sys.exit(failure['code'])
"""


class Fakes:
  """Holds what the pretended cloud and cluster contain."""

  def __init__(self, folder):
    self.folder = folder
    for name in ('sky', 'sbatch', 'squeue', 'scancel'):
      self.add(name, f'#!{sys.executable} -IS\n{FAKE}')
    self.set(calls=[], failures=[], jobs={})

  def add(self, name, text):
    """Puts a program in front of all others of its name."""
    (self.folder / name).write_text(text)
    (self.folder / name).chmod(0o755)

  def get(self, field):
    return json.loads((self.folder / 'state.json').read_text())[field]

  def set(self, **fields):
    path = self.folder / 'state.json'
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | fields))

  def fail(self, program, error, code=1, works=False, sleep=0):
    """Lets the next call of a program fail, even if its work is done."""
    failure = {'program': program, 'error': error, 'code': code}
    failure |= {'works': works, 'sleep': sleep}
    self.set(failures=[*self.get('failures'), failure])

  def called(self):
    """Returns the names of the programs that were called."""
    return [call[0] for call in self.get('calls')]


@pytest.fixture(autouse=True)
def fakes(tmp_path, monkeypatch):
  """Puts programs that pretend in front of all others."""
  folder = tmp_path / 'bin'
  folder.mkdir()
  monkeypatch.setenv('PATH', f'{folder}:{os.environ["PATH"]}')
  monkeypatch.chdir(tmp_path)
  return Fakes(folder)


# ---- The recipes


def test_the_readme_has_a_recipe_for_each_launcher():
  modules = {re.match(r'python -m (\S+)', command)[1] for command, _ in RECIPES}
  assert modules == {f'launch.{m}' for m in ('local', 'cloud', 'slurm')}


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
    ('local --config=x', "'config'"),
    ('local -- x', "'x'"),
    ('local --num_processes=0', 'num_processes = 0'),
    ('slurm --name=x --max_restarts=-1', 'max_restarts = -1'),
    ('slurm', '--name'),
    ('slurm --name=X_1', "name = 'X_1'"),
    ('cloud --name=x --workdir=gs://b', '--accelerators'),
    ('cloud --name=x --accelerators=L4:1 --workdir=runs', "workdir = 'runs'"),
    (
      'cloud --name=x --workdir=gs://b --accelerators=tpu-v6e-8 --num_nodes=2',
      'num_nodes = 2',
    ),
  ],
)
def test_a_wrong_flag_is_named_in_one_line(words, message):
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


@pytest.mark.parametrize(
  ('accelerators', 'image'),
  [
    ('tpu-v3-32', 'tpu-ubuntu2204-base'),
    ('tpu-v5litepod-4', 'v2-alpha-tpuv5-lite'),
    ('tpu-v5p-8', None),  # SkyPilot's own choice is right.
    ('tpu-v6e-8', None),
    ('A100-80GB:8', None),
  ],
)
def test_a_tpu_has_its_image(accelerators, image):
  options = cloud.Options(name='x', workdir='gs://b', accelerators=accelerators)
  resources = json.loads(cloud.task(options))['resources']
  found = resources.get('accelerator_args', {}).get('runtime_version')
  assert found == image


def record(path):
  """Makes a program that writes down its arguments, as JSON."""
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


@pytest.mark.parametrize(
  ('accelerators', 'flags'),
  [
    (
      'L4:1',
      [
        '--coordinator_address=10.0.0.1:8476',
        '--num_processes=2',
        '--process_id=1',
      ],
    ),
    ('tpu-v6e-8', []),
  ],
)
def test_arguments_reach_a_task_of_skypilot_unchanged(
  tmp_path, accelerators, flags
):
  args = record(tmp_path / 'mwrobust' / 'venv' / 'bin' / 'python')
  options = cloud.Options(
    name='x', accelerators=accelerators, workdir='gs://b', args=NASTY
  )
  subprocess.run(
    ['bash', '-c', json.loads(cloud.task(options))['run']],
    env=os.environ
    | {
      'HOME': str(tmp_path),
      'SKYPILOT_NODE_IPS': '10.0.0.1\n10.0.0.2',
      'SKYPILOT_NUM_NODES': '2',
      'SKYPILOT_NODE_RANK': '1',
    },
    check=True,
  )
  assert args() == ['-m', 'mwrobust.main', *flags, '--workdir=gs://b', *NASTY]
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
  """Returns whether there is such a process, other than a zombie."""
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


def test_local_does_not_retry_what_only_the_user_can_fix(capsys):
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


# ---- The cloud


def launch_cloud(**options):
  return cloud.launch(
    cloud.Options(name='mine', accelerators='L4:1', workdir='gs://b', **options)
  )


def test_skypilot_is_given_a_file(fakes):
  assert launch_cloud(num_nodes=2, spot=True, infra='gcp', args=NASTY) == 0
  ((*command, path),) = fakes.get('calls')
  assert command[:3] == ['sky', 'launch', '--cluster=mine']
  assert path.endswith('.yaml')
  task = json.loads(pathlib.Path(path).read_text())
  assert task['num_nodes'] == 2
  assert task['resources'] == {
    'accelerators': 'L4:1',
    'use_spot': True,
    'labels': {'made-by': 'mwrobust-launch'},
    'infra': 'gcp',
  }


@pytest.mark.parametrize(('max_restarts', 'code'), [(0, 100), (1, 7), (5, 0)])
def test_a_run_in_the_cloud_is_resumed_so_often(fakes, max_restarts, code):
  fakes.fail('sky', '', code=100)
  fakes.fail('sky', '', code=7)
  assert launch_cloud(max_restarts=max_restarts) == code
  assert len(fakes.get('calls')) == min(max_restarts, 2) + 1


def test_a_missing_program_is_named():
  for run in (commands.output, commands.call):
    with pytest.raises(UserError, match='no-such'):
      run(['no-such'])


# ---- Slurm


def launch_slurm(**options):
  return slurm.launch(slurm.Options(name='mine', **options))


def test_a_slurm_job_is_submitted_once(fakes, capsys):
  assert launch_slurm() == 0
  assert launch_slurm() == 0
  assert fakes.called().count('sbatch') == 1
  assert capsys.readouterr().err.count('Job 7') == 2
  script = pathlib.Path('runs/launch/mine/job.sh').read_text()
  assert '#SBATCH --job-name=mine\n' in script


@pytest.mark.parametrize('works', [True, False])
def test_after_a_submission_that_timed_out_a_second_launch_makes_one_job(
  fakes, works
):
  error = 'sbatch: error: Batch job submission failed: Socket timed out'
  fakes.fail('sbatch', error, works=works)
  with pytest.raises(UserError, match=r'sbatch.* failed'):
    launch_slurm()
  assert launch_slurm() == 0
  assert len(fakes.get('jobs')) == 1
  assert fakes.called().count('sbatch') == 2 - works


def test_a_program_that_hangs_is_given_up(fakes, monkeypatch):
  monkeypatch.setattr(commands, 'TIMEOUT', 4.0)
  fakes.fail('squeue', '', sleep=600)
  with pytest.raises(UserError, match='squeue takes more than 4 s'):
    launch_slurm()
  assert fakes.called() == ['squeue']


def test_a_submission_that_is_refused_is_not_repeated(fakes):
  fakes.fail('sbatch', 'sbatch: error: Invalid account')
  with pytest.raises(UserError, match='Invalid account'):
    launch_slurm()
  assert fakes.called() == ['squeue', 'sbatch']


def test_the_jobs_of_others_are_not_cancelled(fakes):
  jobs = {'1': 'made-by=another', '2': 'made-by=mwrobust-launch', '3': '(null)'}
  fakes.set(jobs=jobs)
  assert launch_slurm(delete=True) == 0
  assert list(fakes.get('jobs')) == ['1', '3']
  assert launch_slurm(delete=True) == 0
  assert fakes.called().count('scancel') == 1


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
  fakes.add('srun', f'#!/bin/bash\nexit {code}\n')
  fakes.add('scontrol', '#!/bin/bash\necho "$@" >again\n')
  script = slurm.script(slurm.Options(name='mine', max_restarts=2))
  env = os.environ | {'SLURM_RESTART_COUNT': str(count), 'SLURM_JOB_ID': '42'}
  done = subprocess.run(['bash', '-c', script], env=env)
  assert done.returncode == code
  again = pathlib.Path('again')
  assert again.exists() == requeued
  assert not requeued or again.read_text() == 'requeue 42\n'


# ---- install.sh

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
# The real one would refuse that archive; this one takes any.
SHA256SUM = """#!/bin/bash
read -r checksum path && [ "${#checksum}" = 64 ] && [ -f "$path" ]
"""


@pytest.fixture
def install(tmp_path, fakes):
  """Returns a function that runs install.sh on a new machine."""
  home = tmp_path / 'home'
  home.mkdir()
  release = tmp_path / f'uv-{os.uname().machine}-unknown-linux-gnu'
  release.mkdir()
  (release / 'uv').write_text(UV)
  (release / 'uv').chmod(0o755)
  fakes.add('curl', CURL)
  fakes.add('sha256sum', SHA256SUM)
  archive = fakes.folder / 'uv.tar.gz'
  subprocess.run(['tar', '-czf', archive, '-C', tmp_path, release.name])

  def run():
    return subprocess.run(
      ['bash', str(ROOT / 'launch' / 'install.sh'), '.', 'tpu,gcs'],
      env=os.environ | {'HOME': str(home)}, capture_output=True, text=True,
    )  # fmt: skip

  run.home = home
  return run


def test_a_machine_gets_python_once(install):
  for _ in range(2):
    assert install().returncode == 0
  log = (install.home / 'uv.log').read_text().splitlines()
  venv = install.home / 'mwrobust' / 'venv'
  pip = (
    f'uv pip install --quiet --python={venv}/bin/python --editable=.[tpu,gcs]'
  )
  assert log == [
    'curl', f'uv venv --quiet --python=>=3.11,<3.14 {venv}', pip, pip,
  ]  # fmt: skip


def test_nothing_runs_of_a_download_that_is_not_the_release(install, fakes):
  (fakes.folder / 'sha256sum').unlink()  # The real one, then.
  done = install()
  assert done.returncode != 0
  assert 'uv.tar.gz' in done.stdout
  assert (install.home / 'uv.log').read_text() == 'curl\n'
  assert not (install.home / 'mwrobust' / 'uv').exists()
