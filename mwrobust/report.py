"""Reports on evaluations and training runs, as a page and as Markdown.

  python -m mwrobust.report RUN                          # RUN/report.html
  python -m mwrobust.report RUN1 RUN2 ... --output=DIR   # a table over runs
  python -m mwrobust.report FOLDER                       # of mwrobust.evaluate

All evaluations in the named folders and one level below, of the same network
and threats, make one page: the first is the main one, and one with several
radii is the curve.
"""

from absl import flags
from etils import epath

from mwrobust import command_line, reporting
from mwrobust.errors import UserError
from mwrobust.evaluation import FILE, Outcomes


def define_flags() -> None:
  """Defines the flags of this program; programs that import it have others."""
  flags.DEFINE_string(
    'output',
    None,
    'Folder for the report; by default the first one named, or runs/report '
    'for several runs.',
  )
  flags.DEFINE_enum(
    'split',
    'test',
    ['test', 'validation'],
    'Which evaluations of runs to show.',
  )


def main(argv: list[str]) -> None:
  """Reports on the named runs or evaluations."""
  if not argv:
    raise UserError(
      'Name the workdir of a run, or the folder of an evaluation.'
    )
  output = flags.FLAGS.output
  folders = [epath.Path(folder) for folder in argv]
  if not any((folder / FILE).exists() for folder in folders):
    split = flags.FLAGS.split
    merged = [reporting.load(workdir, split) for workdir in argv]
    default = argv[0] if len(argv) == 1 else 'runs/report'
    reporting.write_runs(merged, output or default)
    return
  found = [
    Outcomes.load(path)
    for folder in folders
    for path in (folder / FILE, *sorted(folder.glob(f'*/{FILE}')))
  ]
  curves = [each for each in found if len(each.settings['radii']) > 1]
  protocols = [each for each in found if len(each.settings['radii']) == 1]
  if not protocols or len(curves) > 1:
    raise UserError(
      f'{", ".join(argv)}: name at least one evaluation with a single radius, '
      'and at most one curve.'
    )
  reporting.write(protocols, output or argv[0], *curves)


if __name__ == '__main__':
  define_flags()
  command_line.run(main)
