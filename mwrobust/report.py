"""Results as tables and one self-contained page, with the paper's beside them.

  python -m mwrobust.report RUN                     # writes RUN/report.html
  python -m mwrobust.report RUN1 RUN2 ... --output=DIR

One run has a 95 % interval in each cell; several seeds of a method have their
mean and standard deviation. Everything is computed from `eval/*.npz` and
`metrics.jsonl` in the workdirs.
"""

import functools
import os
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import ml_collections
import numpy as np
from absl import flags
from etils import epath

from mwrobust import command_line, datasets, health, metrics, page, paper, runs
from mwrobust import config as config_lib
from mwrobust.errors import UserError
from mwrobust.metrics import format_duration
from mwrobust.outcomes import Outcomes, wilson
from mwrobust.runs import Run

METHODS = {
  'multiplicative_weights': 'Mult. weights',
  'round_robin': 'Round robin',
  'greedy': 'Greedy',
  'uniform': 'Uniform',
  'natural': 'Natural',
}


class Part(NamedTuple):
  """A piece of a report, for the page and for Markdown; '' where not shown."""

  html: str
  markdown: str


Section = tuple[str, list[Part]]  # With its heading.
Column = tuple[str, str]  # A method, and the network of it that is evaluated.


def text(words: str) -> Part:
  """A paragraph."""
  lines = map(functools.partial(textwrap.fill, width=80), words.splitlines())
  return Part(page.paragraph(words), '\n'.join(lines))


def picture(html: str, heading: str = '') -> Part:
  """What only the page can show."""
  return Part(f'<h3>{heading}</h3>\n' * bool(heading) + html, '')


def table(
  header: Sequence[str],
  rows: Sequence[Sequence[str]],
  caption: str = '',
  marks: Mapping[tuple[int, int], str] | None = None,
) -> Part:
  """A table, as `page.table` takes it."""
  as_text = markdown_table(header, rows)
  return Part(
    page.table(header, rows, caption, marks),
    f'{caption}\n\n{as_text}' if caption else as_text,
  )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """The rows as a Markdown table whose columns line up.

  A second line in a cell goes into brackets.
  """
  cells = [
    [re.sub(r'\n(.*)', r' (\1)', cell) for cell in row]
    for row in (header, *rows)
  ]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

  def line(row: Sequence[str]) -> str:
    (name, width), *others = zip(row, widths, strict=True)
    padded = [name.ljust(width)] + [cell.rjust(w) for cell, w in others]
    return '| ' + ' | '.join(padded) + ' |'

  rule = '|' + '|'.join('-' * (width + 2) for width in widths) + '|'
  return '\n'.join([line(cells[0]), rule, *map(line, cells[1:])])


def write(
  merged: Sequence[Run], folder: str | os.PathLike, say: Callable[[str], None]
) -> None:
  """Writes report.md and report.html of one run, or over several.

  Args:
    merged: the runs; several must be of one preset, data set and network.
    folder: where they are written, `report-restarts=20.md` and so on if that
      is how the runs were evaluated.
    say: told the table and whether the attacks were strong enough.
  """
  runs.check_mergeable(merged)
  first = merged[0]
  if len(merged) == 1:
    title = f'{first.config.data.name}, {method_title(first.method)}'
    sections = run_sections(first)
  else:
    title = f'{first.config.data.name}, {len(merged)} runs'
    sections = merged_sections(merged)
  say('\n' + to_markdown(sections[:2]))
  write_files(
    epath.Path(folder, f'report{first.settings}'), title, sections, say
  )


def write_files(
  stem: epath.Path,
  title: str,
  sections: Sequence[Section],
  say: Callable[[str], None],
) -> None:
  """Writes the sections as Markdown and as a page."""
  html = [
    (heading, ''.join(part.html for part in parts))
    for heading, parts in sections
  ]
  for suffix, content in (
    ('.md', f'# {title}\n\n{to_markdown(sections)}'),
    ('.html', page.page(title, html)),
  ):
    path = stem.with_name(stem.name + suffix)
    metrics.write_bytes(path, content.encode())
    say(str(path))


def to_markdown(sections: Sequence[Section]) -> str:
  """The sections under their headings, without what only the page can show."""
  lines = []
  for heading, parts in sections:
    shown = [part.markdown for part in parts if part.markdown]
    if shown:
      lines += [f'## {heading}', *shown]
  return '\n\n'.join(lines) + '\n'


# ------------------------------------------------------------------ the reports


def run_sections(run: Run) -> list[Section]:
  """All there is to say about one run."""
  output = run.evaluations.get(run.output)
  notes = [text(describe(run.config))]
  if run.outer_step < run.config.train.T:
    notes.append(
      text(f'Only trained to outer step {run.outer_step}: not the whole run.')
    )
  if output is None:
    command = runs.evaluation_command(run.workdir, run.settings)
    notes.append(
      text(f'{run.output}, its output, is not evaluated yet: type {command}')
    )
  sections = [
    ('Accuracy', [*notes, *accuracy_parts([run])]),
    ('Were the attacks strong enough?', [health_part([run])]),
    ('Training', training_parts(run)),
    ('Cost', [cost_table([run])]),
  ]
  if output is not None:
    sections[2:2] = [
      (
        'How far the attacks went',
        [
          norm_table(outcomes)
          for network, outcomes in run.evaluations.items()
          if network.removesuffix(', strict') == run.output
        ],
      ),
      ('Who fools what', overlap_parts(output)),
    ]
    if output.restarts > 1:
      sections[1][1].append(restart_chart(output))
    if run.output in run.widened:
      sections[1][1].extend(radius_parts(output, run.widened[run.output]))
    sections += [('What the attacks look like', picture_parts(output))]
  return sections


def merged_sections(merged: Sequence[Run]) -> list[Section]:
  """The table over several runs, and what they cost."""
  return [
    (
      'Accuracy',
      [
        text(describe(merged[0].config, shared=True)),
        seeds_part(merged),
        *accuracy_parts(merged),
      ],
    ),
    ('Were the attacks strong enough?', [health_part(merged)]),
    ('Cost', [cost_table(merged)]),
  ]


def seeds_part(merged: Sequence[Run]) -> Part:
  """Which seeds of which methods these are."""
  seeds = {}
  for run in merged:
    seeds.setdefault(method_title(run.method), []).append(str(run.config.seed))
  which = '; '.join(
    f'{title} with seeds {", ".join(numbers)}'
    for title, numbers in seeds.items()
  )
  return text(f'Runs: {which}.')


def describe(config: ml_collections.ConfigDict, shared: bool = False) -> str:
  """What a run is, in a few lines; or only what the runs of a table share."""
  threats, train = config.threats, config.train
  radii = ', '.join(f'{n} {threats[f"eps_{n}"]:.4g}' for n in threats.norms)
  own = '' if shared else f', policy {config.policy.name}, seed {config.seed}'
  return (
    f'Data {config.data.name}, network {config.model.name}, preset '
    f'{config.preset}{own}.\n'
    f'Threats in {" and ".join(threats.spaces)}, with radii {radii}.\n'
    f'T = {train.T} outer steps of r = {train.r:g} epochs, batches of '
    f'{train.batch_size}, h = {train.h}.'
  )


def method_title(method: str) -> str:
  """Of a column: `'Mult. weights'`."""
  return METHODS.get(method, method.capitalize())


# ------------------------------------------------------------------- accuracies


def accuracy_parts(
  merged: Sequence[Run],
  columns: Sequence[Column] = (),
  rows: Sequence[str] = (),
) -> list[Part]:
  """The table in the paper's layout, and the same beside the paper's own.

  Args:
    merged: the runs.
    columns: the methods and networks to show; all there are by default.
    rows: of the table; all there are by default.
  """
  groups = group(merged)
  if columns:
    groups = {column: groups[column] for column in columns if column in groups}
  outcomes = next(iter(groups.values()))[0]
  starts = outcomes.restarts
  rows = rows or (*outcomes.threats, 'min', 'union', 'natural')
  names = column_names(groups)
  steps = sorted({int(n) for n in outcomes.steps})
  count = len(outcomes.labels)
  _, _, whole = datasets.SIZES[merged[0].config.data.name]
  parts = [
    text(
      f'On {"all" if count == whole else "the first"} {count:,} test images, '
      f'{"one start" if starts == 1 else f"{starts} starts"}, '
      f'{" and ".join(map(str, steps))} steps. '
      + 'Min is the lowest of the rows above it; union counts the images that '
      'stand up to every one of the attacks. '
      * ('union' in rows)
      + 'As in the paper, all images are attacked, also those that are wrong '
      'before. Beside each its 95 % interval, or ± the standard deviation over '
      'the seeds.'
    ),
    table(
      ['accuracy, %', *names.values()],
      [
        [row, *(accuracy_cell(seeds, row) for seeds in groups.values())]
        for row in rows
      ],
    ),
  ]
  figures = paper.ACCURACIES.get((paper_data(merged[0].config), starts), {})
  figures = {column: figures[column] for column in groups if column in figures}
  # Over other threats, the worst and the union are something else.
  six = outcomes.threats == paper.THREATS
  if figures:
    header, cells = ['beside the paper'], [[row] for row in rows]
    for column, theirs in figures.items():
      header += [f'{names[column]}\npaper', 'verdict']
      for row, line in zip(rows, cells, strict=True):
        comparable = six or row not in ('min', 'union')
        figure = theirs.get(row) if comparable else None
        line += beside_the_paper(groups[column], figure, row)
    differences = comparability(evaluated_config(merged[0]))
    parts += [
      table(header, cells),
      text(
        f'{differences} Alike means: within one standard deviation of the '
        "paper's own runs."
      ),
    ]
  return parts


def beside_the_paper(
  seeds: Sequence[Outcomes], theirs: paper.Figure | None, row: str
) -> tuple[str, str]:
  """Our mean over the seeds and the paper's, and whether they are alike.

  They are if ours is within the spread of the paper's own runs.
  """
  ours = statistics.mean(outcomes.accuracies()[row] for outcomes in seeds)
  if theirs is None:
    return f'{ours:.2f}', '-'
  difference = ours - theirs.mean
  word = 'higher' if difference > 0 else 'lower'
  if abs(difference) <= theirs.std:
    word = 'alike'
  return (
    f'{ours:.2f}\n{theirs.mean:.2f} ± {theirs.std:.2f}',
    f'{word}\n{difference:+.1f}',
  )


def column_names(
  groups: Iterable[Column],
) -> dict[Column, str]:
  """Of the columns: the network, with the method if there are several."""
  several = len({method for method, _ in groups}) > 1
  return {
    (method, network): f'{method_title(method)} ' * several + network
    for method, network in groups
  }


def group(merged: Sequence[Run]) -> dict[Column, list[Outcomes]]:
  """The evaluations of all seeds, by method and network."""
  groups = {}
  for run in merged:
    for network, outcomes in run.evaluations.items():
      groups.setdefault((run.method, network), []).append(outcomes)
  return groups


def accuracy_cell(seeds: Sequence[Outcomes], row: str) -> str:
  """The mean over the seeds and their spread, or one with its interval."""
  values = [outcomes.accuracies()[row] for outcomes in seeds]
  if len(values) == 1:
    low, high = wilson(values[0], len(seeds[0].labels))
    return f'{values[0]:.2f}\n{low:.1f} to {high:.1f}'
  return f'{statistics.mean(values):.2f}\n± {statistics.stdev(values):.2f}'


def paper_data(config: ml_collections.ConfigDict) -> str:
  """The paper's data set that stands nearest to the run's."""
  return 'cifar10' if config.data.name == 'cifar10' else 'mnist'


def comparability(config: ml_collections.ConfigDict) -> str:
  """What the paper's figures were made with that a run was not.

  Args:
    config: see `evaluated_config`.
  """
  theirs = config_lib.flatten(config_lib.preset('paper', paper_data(config)))
  ours = config_lib.flatten(config)
  skipped = ('seed', 'preset', 'policy.name', 'policy.threat', 'data.dir')
  skipped += ('eval.restarts', 'eval.batch_size', 'eval.health_examples')
  skipped += ('eval.strict', 'eval.others', 'train.log_every')
  differing = [
    f'{field} {ours.get(field)} (paper: {theirs.get(field)})'
    for field in sorted(ours | theirs)
    if ours.get(field) != theirs.get(field) and not field.startswith(skipped)
  ]
  if not differing:
    return 'Network, data and numbers are those of the paper.'
  return (
    f"NOT the paper's setting: {'; '.join(differing)}. The comparison says "
    'where this run stands, not which method is better.'
  )


def evaluated_config(run: Run) -> ml_collections.ConfigDict:
  """The run's config, with the fields its evaluation was really made with."""
  config = run.config.copy_and_resolve_references()
  outcomes = next(iter(run.evaluations.values()))
  images = len(outcomes.labels)
  everything = images == datasets.SIZES[config.data.name][2]
  config.eval.examples = 0 if everything else images
  for threat in outcomes.settings['threats']:
    if threat['norm'] == 'l1':
      config.eval.slide_steps = threat['steps']
    else:
      config.eval.pgd_steps = threat['steps']
    config.eval.percentile = threat['percentile']
  return config


# ----------------------------------------------------------------- other parts


def health_part(merged: Sequence[Run]) -> Part:
  """One run: what failed, and of its output what passed. Several: what failed.

  Of several runs, what they return is looked at; the seeds of a method share a
  line.
  """
  found = {}  # By what it is of: the checks, and the seeds they are of.
  for run in merged:
    for network, outcomes in run.evaluations.items():
      is_output = network == run.output
      for check in health.checks(
        outcomes,
        run.validation_loss,
        run.probes.get(network),
        run.widened.get(network),
      ):
        if len(merged) == 1 and (is_output or not check.passed):
          found.setdefault((network, check.name), []).append((run, check))
        elif is_output and not check.passed:
          key = method_title(run.method), check.name
          found.setdefault(key, []).append((run, check))
  rows, marks = [], {}
  for (name, check_name), checks in found.items():
    _, first = checks[0]
    seeds = ', '.join(str(run.config.seed) for run, _ in checks)
    of = f' (seed {seeds}; of the first:)' * (len(merged) > 1)
    marks[len(rows), 1] = 'good' if first.passed else 'bad'
    word = 'ok' if first.passed else 'LOOK'
    rows.append([f'{name}: {check_name}{of}', word, first.finding])
  outputs = ', '.join(dict.fromkeys(run.output for run in merged))
  note = (
    f'What is not listed has passed. {", ".join(health.WAYS).capitalize()} '
    f'and wide radii are tried on {outputs} only'
  )
  without = [
    str(run.workdir)
    for run in merged
    if not (run.output in run.probes and run.output in run.widened)
  ]
  if without:
    note += f', and were not all tried in {", ".join(without)}'
  lines = [f'- {word}  {name}: {finding}' for name, word, finding in rows]
  return Part(
    page.table(['check', '', 'finding'], rows, f'{note}.', marks),
    '\n'.join([*lines, '', f'{note}.']),
  )


def norm_table(outcomes: Outcomes) -> Part:
  """How the perturbations lie in their balls, before and after the clip."""
  before = outcomes.norm / outcomes.eps[:, None]
  after = outcomes.norm_clipped / outcomes.eps[:, None]
  rows = [
    [name, f'{eps:.4g}', *(f'{x:.3f}' for x in (b.max(), a.mean(), a.max()))]
    for name, eps, b, a in zip(
      outcomes.threats, outcomes.eps, before, after, strict=True
    )
  ]
  return table(
    ['threat', 'eps', 'largest norm', 'mean, clipped', 'largest, clipped'],
    rows,
    "Norms over eps, in the threat's own space. The paper clips the image to "
    '[0, 1] after the inverse DCT, which may lead out of the ball: its threat '
    'is "perturb in the ball, then clip". --config.eval.strict=True adds '
    'attacks whose images are in both.',
  )


def overlap_parts(outcomes: Outcomes) -> list[Part]:
  """Who fools what: shares in common, and what a threat fools alone."""
  overlap = outcomes.overlap()
  fooled = np.diag(overlap)
  shares = [
    [100 * both / count if count else None for both in row]
    for row, count in zip(overlap, fooled, strict=True)
  ]
  caption = (
    "Of the images that the row's threat fools, the percentage that the "
    "column's fools too; of those that are classified correctly without an "
    'attack.'
  )
  names = outcomes.threats
  alone = outcomes.unique_kills()
  numbers = [
    [name, str(count), str(only)]
    for name, count, only in zip(names, fooled, alone, strict=True)
  ]
  as_text = [
    [name, *('-' if share is None else f'{share:.0f}' for share in row)]
    for name, row in zip(names, shares, strict=True)
  ]
  heat_map = page.heat_map(names, names, shares, caption=caption)
  return [
    table(['threat', 'images fooled', 'by it alone'], numbers),
    Part(heat_map, f'{caption}\n\n{markdown_table(["", *names], as_text)}'),
  ]


def training_parts(run: Run) -> list[Part]:
  """Weights and losses over the outer steps, and which threat was trained."""
  if not run.outer:
    return [text('There are no metrics.')]
  names = list(run.outer[0]['weight'])

  def series(field: str):
    return {
      name: [(row['outer_step'], row[field][name]) for row in run.outer]
      for name in names
    }

  last = run.outer[-1]
  parts = [
    table(
      ['threat', 'last weight', 'last validation loss'],
      [
        [
          name,
          f'{last["weight"][name]:.3f}',
          f'{last["validation_loss"][name]:.3f}',
        ]
        for name in names
      ],
    ),
    picture(
      page.line_chart(series('weight'), 'outer step', 'share'), 'Weights'
    ),
    picture(
      page.line_chart(series('validation_loss'), 'outer step', 'loss'),
      'Validation losses',
    ),
  ]
  chosen = [
    (str(row['outer_step']), dict.fromkeys(names, 0)) for row in run.outer
  ]
  for row in run.trained:
    t = next(
      (i for i, o in enumerate(run.outer) if row['step'] <= o['step']), None
    )
    if t is not None:
      for name, count in row['chosen'].items():
        chosen[t][1][name] += count
  if any(sum(counts.values()) for _, counts in chosen):
    shares = page.stacked_shares(chosen, 'outer step')
    parts.append(picture(shares, 'Which threat was trained when'))
  return parts


def restart_chart(outcomes: Outcomes) -> Part:
  """What each further start has gained."""
  stood = [outcomes.correct_after(s) for s in range(1, outcomes.restarts + 1)]
  series = {
    name: [(s, 100 * c[i].mean()) for s, c in enumerate(stood, start=1)]
    for i, name in enumerate(outcomes.threats)
  }
  series['union'] = [
    (s, 100 * c.all(axis=0).mean()) for s, c in enumerate(stood, start=1)
  ]
  chart = page.line_chart(series, 'starts', 'accuracy, %')
  return picture(chart, 'Accuracy after so many starts')


def radius_parts(outcomes: Outcomes, widened: Outcomes) -> list[Part]:
  """The accuracy as the radius grows: in the end it should be 0."""
  curve = health.curve(outcomes, widened)
  header = [f'{scale:g} eps' for scale, _ in next(iter(curve.values()))]
  rows = [
    [name, *(f'{accuracy:.1f}' for _, accuracy in line)]
    for name, line in curve.items()
  ]
  series = {
    name: [(np.log2(scale), y) for scale, y in line if scale]
    for name, line in curve.items()
  }
  chart = page.line_chart(series, 'log2 of radius / eps', 'accuracy, %')
  return [
    table(
      ['accuracy, % at', *header],
      rows,
      f'The radius grows, on the first {len(widened.labels)} test images, with '
      'a clip at every step.',
    ),
    picture(chart, 'Accuracy over the radius'),
  ]


def cost_table(merged: Sequence[Run]) -> Part:
  """Of training, by run."""
  rows = []
  for run in merged:
    last = run.outer[-1] if run.outer else {}
    evaluated = (run.evaluations, run.probes, run.widened)
    spent = (
      outcomes.gradient_evaluations()[0]
      for found in evaluated
      for outcomes in found.values()
    )
    rows.append(
      [
        f'{method_title(run.method)}, seed {run.config.seed}',
        f'{last.get("gradient_evaluations", 0):,}',
        format_duration(last.get('seconds', 0)),
        f'{sum(spent):,}',
      ]
    )
  return table(
    ['run', 'training, gradients', 'training, time', 'evaluation, gradients'],
    rows,
    'A gradient is one image once forward and back. Training includes its '
    'validations and, in time, what was compiled.',
  )


def picture_parts(outcomes: Outcomes) -> list[Part]:
  """Figure 1: images, what the threats made of them, and the difference."""
  rows = []
  for i, image in enumerate(outcomes.images):
    clean = image.astype(np.float32) / 255
    label = int(outcomes.labels[i])
    seen = int(outcomes.logits[i].argmax())
    attacked = [(page.picture(image), f'{label}, seen as {seen}')]
    difference = [('', '')]
    for k, adversarial in enumerate(outcomes.adversarial[:, i]):
      delta = adversarial - clean
      attacked.append(
        (
          page.picture(_to_bytes(adversarial)),
          f'seen as {outcomes.predicted[k, i]}',
        )
      )
      difference.append(
        (
          page.picture(
            _to_bytes(0.5 + delta / max(1e-6, 2 * np.abs(delta).max()))
          ),
          f'l∞ {np.abs(delta).max():.3f}',
        )
      )
    rows += [(f'image {i}', attacked), ('difference', difference)]
  return [
    picture(
      page.paragraph(
        'Each test image, and what each threat made of it. Below, the '
        'difference, magnified until its largest entry is black or white (grey '
        'is none), and its l∞ distance in pixels: an image that is near in the '
        'DCT may be far in pixels.'
      )
    ),
    picture(page.picture_grid(['image', *outcomes.threats], rows)),
  ]


def _to_bytes(image: np.ndarray) -> np.ndarray:
  return np.round(255 * np.clip(image, 0, 1)).astype(np.uint8)


# ------------------------------------------------------------------------ main


def define_flags() -> None:
  """Those of this program; programs that import it have others."""
  flags.DEFINE_string(
    'output',
    None,
    'Folder of the report; the workdir for one run, runs/report for several.',
  )
  flags.DEFINE_string(
    'settings',
    '',
    'Which evaluation to show, as its files are called: restarts=20. The one '
    'the run was made with by default.',
  )


def main(argv: list[str]) -> None:
  """Reports on the runs that are named."""
  if not argv:
    raise UserError('Name the workdir of a run, or of several.')
  settings = flags.FLAGS.settings and f'-{flags.FLAGS.settings}'
  merged = [runs.load(workdir, settings) for workdir in argv]
  default = merged[0].workdir if len(merged) == 1 else 'runs/report'
  write(merged, flags.FLAGS.output or default, print)


if __name__ == '__main__':
  define_flags()
  command_line.run(main)
