"""Results as tables and one self-contained page, with the paper's beside them.

  python -m mwrobust.report RUN                     # writes RUN/report.html
  python -m mwrobust.report RUN1 RUN2 ... --output=DIR

Everything is computed from `eval/*.npz` and `metrics.jsonl` in the workdirs.
"""

import os
from collections.abc import Callable, Sequence

import ml_collections
import numpy as np
from absl import flags
from etils import epath

from mwrobust import command_line, health, page, runs
from mwrobust.accuracies import accuracy_parts, method_title
from mwrobust.document import (
  Part,
  Section,
  markdown_table,
  picture,
  table,
  text,
  to_markdown,
  write_files,
)
from mwrobust.errors import UserError
from mwrobust.outcomes import Outcomes
from mwrobust.runs import Run
from mwrobust.runtime.progress import format_duration


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
    ('Were the attacks strong enough?', health_parts([run])),
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
    ('Were the attacks strong enough?', health_parts(merged)),
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


def _run_title(run: Run) -> str:
  return f'{method_title(run.method)}, seed {run.config.seed}'


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


# ----------------------------------------------------------------- other parts


def health_parts(merged: Sequence[Run]) -> list[Part]:
  """What the checks found, and what is left of the union after all of them."""
  return [_checks_part(merged), *_unions_parts(merged)]


def _checks_part(merged: Sequence[Run]) -> Part:
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


def _unions_parts(merged: Sequence[Run]) -> list[Part]:
  """By run, what each further attack leaves of the union; if any was tried."""
  rows, header = [], []
  for run in merged:
    if run.output in run.probes:
      outcomes, probed = run.evaluations[run.output], run.probes[run.output]
      unions = health.unions(outcomes, probed)
      header = list(unions)
      rows.append(
        [
          _run_title(run),
          f'{len(probed.labels):,}',
          *(f'{union:.1f}' for union in unions.values()),
        ]
      )
  if not rows:
    return []
  return [
    table(
      ['union, %', 'images', *header],
      rows,
      'The first test images: how many stand up to every threat as they were '
      'evaluated, with each of these attacks besides, and with all of them.',
    )
  ]


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
      f'The radius grows, on the first {len(widened.labels)} test images.',
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
        _run_title(run),
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
