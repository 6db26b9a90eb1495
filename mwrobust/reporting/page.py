"""One self-contained HTML page out of plain data: text, tables, charts, images.

>>> from mwrobust.reporting import page
>>> chart = page.line_chart({'dct_l2': [(1, 40), (2, 35)]}, 'step', 'error, %')
>>> html = page.page('A run', [('Training', page.paragraph('Fine.') + chart)])
>>> '<h1>A run</h1>' in html
True

The page opens from disk: it has no scripts, and its policy forbids it to load
anything. All functions are pure and return HTML; text is escaped here, once.
Charts have real text at any width, as they are laid out in percent. A series
has one colour on the whole page: `page` gives them out once it knows all names.
"""

import base64
import html
import io
import itertools
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

Number = float | None  # None and NaN: not known.

# On light pages, and on dark ones. All have a contrast of 3 to the background,
# and within each set of six the colour blind can tell them apart.
_THREATS = {
  'pixel_linf': ('#1450a8', '#4a8ff2'),
  'pixel_l2': ('#ad2f0c', '#e0562c'),
  'pixel_l1': ('#1f8f68', '#22b586'),
  'dct_linf': ('#3a8ef0', '#7cc6ff'),
  'dct_l2': ('#9c8a00', '#e8cb45'),
  'dct_l1': ('#d14bad', '#ff95c0'),
  'natural': ('#7d8791', '#9aa3ad'),
  'union': ('#3d444d', '#d5d9de'),
}
_OTHERS = (
  ('#8a68e8', '#8f72ff'),
  ('#5f9a00', '#cada3b'),
  ('#126ebd', '#21ade7'),
  ('#7b390d', '#b5774a'),
  ('#b03a64', '#f07582'),
  ('#3a4270', '#a6e0e4'),
)

_GLYPHS = {'good': '✓', 'bad': '✗', 'note': '*'}  # Colours are not for all.

_SHORT = ' class="short"'  # Does not break at a hyphen.
_DASH = '\N{EN DASH}'

_CSS = """
:root {
  color-scheme: light dark;
  --back: #fff; --ink: #1f2328; --muted: #5a636d; --rule: #dfe3e8;
  --faint: #eceff2; --good: #0b6e4f; --bad: #ad2f0c; --heat: 124 77 210;
  --shade: #0002;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #14171a; --ink: #e4e7ea; --muted: #9aa3ad; --rule: #353b42;
    --faint: #262b30; --good: #4cc49c; --bad: #ff8a66; --heat: 140 100 235;
    --shade: #fff3;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2rem 1rem 4rem; max-width: 60rem;
  background: var(--back); color: var(--ink); overflow-wrap: anywhere;
  font: 1rem/1.55 system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif;
  -webkit-text-size-adjust: 100%; text-size-adjust: 100%;
}
h1, h2 { line-height: 1.25; font-weight: 650; text-wrap: balance; }
h1 { margin: 0 0 .5rem; font-size: 1.75rem; }
h2 { margin: 3rem 0 .75rem; font-size: 1.25rem; }
h3 { margin: 1.5rem 0 .5rem; font-size: 1rem; font-weight: 600; }
p { margin: 0 0 1rem; max-width: 42rem; }
nav { display: flex; flex-wrap: wrap; gap: 0 1.25rem; font-size: .875rem; }
nav a { padding: .25rem 0; color: var(--muted); text-underline-offset: .2em; }
nav a:hover { color: var(--ink); }
figure { margin: 1.25rem 0 2rem; font-size: .875rem; line-height: 1.4; }
figcaption { margin-bottom: .5rem; color: var(--muted); max-width: 42rem; }

.scroll { /* A shade at the right as long as there is more to see there. */
  overflow-x: auto;
  background: linear-gradient(var(--back), var(--back)) local,
    linear-gradient(to left, var(--shade), transparent);
  background-position: right; background-repeat: no-repeat;
  background-size: 1rem 100%;
}
table { font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .4rem .75rem; text-align: right; vertical-align: baseline; }
th { font-weight: 500; }
thead th { vertical-align: bottom; color: var(--muted); }
.short { white-space: nowrap; }
tr > :first-child {
  position: sticky; left: 0; padding-left: 0; text-align: left;
  background: var(--back);
}
small { display: block; color: var(--muted); font-size: .75rem; }
small { font-style: normal; font-weight: 400; }
.data { border-spacing: 0; min-width: min(100%, 30rem); }
.data td { white-space: nowrap; }
.data td.long { white-space: normal; min-width: 14rem; text-align: left; }
.data th, .data td { border-bottom: 1px solid var(--rule); }
.data thead th { border-color: var(--muted); }
.data tr > :last-child { padding-right: 0; }
.good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
.note { font-style: italic; }
.heat, .pictures { border-spacing: 2px; }
.heat td, .heat thead th { padding: .5rem .1rem; text-align: center; }
.heat td { min-width: clamp(2.5rem, 8vw, 4.5rem); border-radius: 3px; }
.heat td { background: rgb(var(--heat) / var(--a, 0)); }
.heat tbody > * > *, .pictures tbody th { vertical-align: middle; }
.pictures td, .pictures thead th { padding: .2rem; text-align: center; }
.pictures td { color: var(--muted); font-size: .75rem; vertical-align: top; }
.picture { display: block; margin: 0 auto .2rem; image-rendering: pixelated; }

.legend { display: flex; flex-wrap: wrap; gap: .15rem 1.1rem; }
.legend { margin: 0 0 .75rem; padding: 0; list-style: none; }
.legend li { display: flex; align-items: baseline; gap: .4rem; }
.legend svg { flex: none; width: 26px; height: 12px; margin-bottom: -1px; }
.axis { margin: 0; color: var(--muted); }
svg + .axis { margin-top: 1.75rem; text-align: center; }
.legend, .axis, .plot { max-width: none; font-size: .8125rem; }
.plot { padding: .75rem var(--right) 0 var(--left); }
.plot svg { display: block; width: 100%; height: 100%; overflow: visible; }
.plot > svg { height: clamp(13rem, 40vw, 20rem); }
.plot text { fill: var(--muted); font-variant-numeric: tabular-nums; }
.plot line { stroke: var(--faint); shape-rendering: crispEdges; }
.plot line.base { stroke: var(--muted); }
.x, .nothing { text-anchor: middle; }
@media (max-width: 30rem) { .x { font-size: .6875rem; } }
.y { text-anchor: end; }
polyline { fill: none; stroke: var(--c); stroke-width: 1.75; }
polyline { stroke-linejoin: round; vector-effect: non-scaling-stroke; }
.dct polyline { stroke-dasharray: 5 3; }
circle { fill: var(--c); stroke: transparent; stroke-width: 10; }
rect { fill: var(--c); }
rect.hatch { fill: url(#hatch); }
#hatch path { stroke: var(--back); stroke-width: 2.5; stroke-opacity: .6; }
.bars {
  display: grid; grid-template-columns: max-content minmax(0, 1fr) max-content;
  gap: 3px .75rem; align-items: center; font-variant-numeric: tabular-nums;
}
.bars > .name, .bars > .first { margin-top: .6rem; }
.bars > .name { grid-column: 1; max-width: 9rem; }
.bars > .number { text-align: right; }
.bars svg { width: 100%; height: 14px; overflow: visible; }
.bars .back { fill: var(--faint); }
rect.mark { fill-opacity: var(--o, 1); }
.bars line { stroke: var(--back); stroke-width: 5; }
.bars line + line { stroke: var(--ink); stroke-width: 2; }
.callout { padding: .6rem .9rem; border-left: 4px solid; border-radius: 3px; }
.callout { background: var(--faint); max-width: 42rem; margin: 0 0 1rem; }
.callout.good { border-color: var(--good); }
.callout.bad { border-color: var(--bad); }
.callout > p { margin: .25rem 0 0; font-weight: 400; color: var(--ink); }
.lead { font-size: 1.25rem; line-height: 1.4; text-wrap: pretty; }
.shown { color: var(--muted); font-size: .875rem; }
.defs { position: absolute; width: 0; height: 0; }
.plot:has(.series:hover) .series:not(:hover) { opacity: .25; }
@media print { figure, tr { break-inside: avoid; } }
"""


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
  """The whole document.

  Args:
    title: Of the page.
    sections: Pairs of a heading (text) and what is below it (HTML).

  Returns:
    The page, to be written as UTF-8.
  """
  links, body = '', ''
  for i, (heading, content) in enumerate(sections, 1):
    heading = html.escape(heading)
    links += f'<a href="#section-{i}">{heading}</a>\n'
    body += f'<section id="section-{i}">\n<h2>{heading}</h2>\n{content}'
    body += '</section>\n'
  nav = f'<nav aria-label="Sections">\n{links}</nav>\n'
  title = html.escape(title)
  return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_CSS}{_colours_of(body)}</style>
</head>
<body>
<svg class="defs" aria-hidden="true"><pattern id="hatch" width="6" height="6" \
patternUnits="userSpaceOnUse" patternTransform="rotate(45)">\
<path d="M3 0V6"/></pattern></svg>
<header>
<h1>{title}</h1>
{nav if len(sections) > 2 else ''}</header>
<main>
{body}</main>
</body>
</html>
"""


def paragraph(text: str, kind: str = '') -> str:
  """Returns a paragraph of plain text.

  Args:
    text: Of the paragraph.
    kind: '', or 'lead' for large print, 'shown' for small.
  """
  start = f'<p class="{kind}">' if kind else '<p>'
  return f'{start}{html.escape(text)}</p>\n'


def callout(kind: str, text: str, *more: str) -> str:
  """Returns a box that is seen at a glance: 'good' or 'bad' news, and more."""
  below = ''.join(map(paragraph, more))
  return (
    f'<div class="callout {kind}">{_GLYPHS[kind]}\N{NO-BREAK SPACE}'
    f'{html.escape(text)}\n{below}</div>\n'
  )


# ------------------------------------------------------------------- Tables


def table(
  header: Sequence[str],
  rows: Sequence[Sequence[object]],
  caption: str = '',
  marks: Mapping[tuple[int, int], str] | None = None,
) -> str:
  r"""A table of names (the first column) and numbers (the others).

  Args:
    header: The names of the columns.
    rows: Their cells: text, or numbers, which get four digits and commas; None
      and NaN become a dash. What follows a '\n' is a line in small print.
    caption: Text that stands above the table.
    marks: 'good', 'bad' or 'note' by (row, column), both counted from 0.

  Returns:
    HTML.
  """
  marks = marks or {}

  def cell(i, j, value):
    text = _number(value)
    first, *others = map(_breakable, text.split('\n'))
    kind = marks.get((i, j), '')
    first = f'{_GLYPHS[kind]}\N{NO-BREAK SPACE}{first}' if kind else first
    kind += ' long' if max(map(len, text.split('\n'))) > 28 else ''
    first += ''.join(f'<small>{other}</small>' for other in others)
    start, end = ('td', 'td') if j else ('th scope="row"', 'th')
    return f'<{start} class="{kind.strip()}">{first}</{end}>'

  body = [[cell(i, j, v) for j, v in enumerate(r)] for i, r in enumerate(rows)]
  return _table('data', header, body, caption)


def heat_map(
  row_names: Sequence[str],
  column_names: Sequence[str],
  values: Sequence[Sequence[Number]],
  fmt: str = '{:.0f}',
  caption: str = '',
) -> str:
  """A table whose cells have the more tint, the larger their value."""
  known = [v for row in values for v in row if _known(v)]
  low, high = min(known, default=0), max(known, default=0)

  def cell(value):
    if not _known(value):
      return f'<td>{_DASH}</td>'
    # Up to 0.7, where text still has a contrast of 4.5 to the tint.
    tint = 0.04 + 0.66 * ((value - low) / (high - low) if high > low else 0)
    return f'<td style="--a:{tint:.2f}">{html.escape(fmt.format(value))}</td>'

  body = [
    [f'<th scope="row">{_breakable(name)}</th>', *map(cell, row)]
    for name, row in zip(row_names, values, strict=True)
  ]
  return _table('heat', ['', *column_names], body, caption)


def picture(array: np.ndarray, alt: str = '') -> str:
  """An image, uint8 [H, W, C] with 1 or 3 channels, its pixels left sharp."""
  if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (1, 3):
    raise ValueError(
      f'{array.dtype} {list(array.shape)} is not a picture, which is uint8 '
      '[H, W, C] with 1 or 3 channels.'
    )
  height, width, channels = array.shape
  file = io.BytesIO()
  Image.fromarray(array[..., 0] if channels == 1 else array).save(file, 'png')
  data = base64.b64encode(file.getvalue()).decode()
  zoom = max(1, 96 // width)  # Whole, so that all pixels have the same size.
  return (
    f'<img class="picture" alt="{html.escape(alt)}" width="{zoom * width}" '
    f'height="{zoom * height}" src="data:image/png;base64,{data}">'
  )


def picture_grid(
  column_names: Sequence[str],
  rows: Sequence[tuple[str, Sequence[tuple[str, str]]]],
) -> str:
  """Pictures in rows and columns.

  Args:
    column_names: Of the columns of pictures.
    rows: A name and its cells, each a picture (HTML) and a caption (text).

  Returns:
    HTML.
  """
  body = [
    [
      f'<th scope="row">{_breakable(name)}</th>',
      *(f'<td>{image}{_breakable(caption)}</td>' for image, caption in cells),
    ]
    for name, cells in rows
  ]
  return _table('pictures', ['', *column_names], body, '')


def _table(
  kind: str, header: Sequence[str], body: list[list[str]], caption: str
) -> str:
  head = ''.join(
    f'<th scope="col"{_SHORT * (len(name) < 9)}>{_breakable(name)}</th>'
    for name in header
  )
  rows = '\n'.join(f'<tr>{"".join(row)}</tr>' for row in body)
  caption = html.escape(caption)
  label = caption or 'Table'
  return f"""<figure>
{f'<figcaption>{caption}</figcaption>' if caption else ''}
<div class="scroll" role="region" tabindex="0" aria-label="{label}">
<table class="{kind}">
<thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
</figure>
"""


# ------------------------------------------------------------------- Charts


def line_chart(
  series: Mapping[str, Sequence[tuple[float, Number]]],
  x_label: str,
  y_label: str,
  x_names: Mapping[float, str] | None = None,
) -> str:
  """A line per series, dashed where the name starts with `dct_`.

  Args:
    series: Points (x, y) by name, in the order of x. A line has a gap where y
      is None, NaN, infinite or beyond 1e300.
    x_label: What x is.
    y_label: What y is. Its axis shows 0.
    x_names: If given, the text of each tick of the x axis.

  Returns:
    HTML.
  """
  runs = {
    name: [
      [(float(x), float(y)) for x, y in run]
      for known, run in itertools.groupby(line, lambda p: all(map(_known, p)))
      if known
    ]
    for name, line in series.items()
  }
  points = [p for line in runs.values() for run in line for p in run]
  left, right = _span([x for x, _ in points])
  whole = all(x == int(x) for x, _ in points)
  x_ticks = x_names or dict(_labels(_ticks(left, right, 6, whole)))
  x_ticks = {x: text for x, text in x_ticks.items() if left <= x <= right}
  y_ticks = _ticks(*_span([y for _, y in points] + [0]), 5)
  bottom, top = y_ticks[0], y_ticks[-1]

  def place(x, y):
    return 100 * (x - left) / (right - left), 100 * (top - y) / (top - bottom)

  crowded = max(map(len, series.values()), default=0) > 50
  radius = 1.5 if crowded else 2.75
  marks = ''
  for name, line in runs.items():
    title = html.escape(name)
    marks += f'<g class="series {_kind(name)}" style="{_colour(name)}">\n'
    marks += '<svg viewBox="0 0 100 100" preserveAspectRatio="none">'
    marks += f'<title>{title}</title>\n'
    for run in line:
      path = ' '.join('{:.2f},{:.2f}'.format(*place(x, y)) for x, y in run)
      marks += f'<polyline points="{path}"/>\n'
    marks += '</svg>\n'
    for x, y in itertools.chain(*line):
      across, down = place(x, y)
      at = x_names[x] if x_names else _number(x)
      where = html.escape(f'{x_label} {at}')
      marks += (
        f'<circle cx="{across:.2f}%" cy="{down:.2f}%" r="{radius}">'
        f'<title>{title}\n{where}: {_number(y)}</title></circle>\n'
      )
    marks += '</g>\n'
  if not points:
    marks = '<text class="nothing" x="50%" y="50%">no values</text>\n'
  return _chart(
    marks,
    [(place(x, 0)[0], text) for x, text in x_ticks.items()],
    [(place(0, y)[1], text) for y, text in _labels(y_ticks)],
    x_label,
    y_label,
    dict.fromkeys(series, _LINE_KEY),
  )


def stacked_shares(
  columns: Sequence[tuple[str, Mapping[str, Number]]], x_label: str
) -> str:
  """A bar per column, split by the shares; hatched where they are of `dct_`.

  Args:
    columns: A name and the shares, or counts: only their proportions matter. A
      column without any stays empty.
    x_label: What the columns are.

  Returns:
    HTML.
  """
  slot = 100 / max(1, len(columns))
  # Many bars overlap a little, or there would be seams between them.
  width = (0.84 if len(columns) <= 60 else 1.1) * slot
  names = dict.fromkeys(name for _, shares in columns for name in shares)
  marks = ''
  for i, (column, shares) in enumerate(columns):
    known = {k: v for k, v in shares.items() if _known(v) and v > 0}
    total, top = sum(known.values()), 100.0
    for name in filter(known.get, names):
      height = 100 * known[name] / total
      top -= height
      box = (
        f'x="{i * slot + (slot - width) / 2:.2f}%" width="{width:.2f}%" '
        f'y="{top:.2f}%" height="{height:.2f}%"'
      )
      title = html.escape(f'{name}\n{x_label} {column}: {height:.3g}%')
      hatch = f'<rect class="hatch" {box}/>' if _kind(name) else ''
      marks += f'<g style="{_colour(name)}"><title>{title}</title>'
      marks += f'<rect {box}/>{hatch}</g>\n'
  # On a phone there is room for about 36 characters below the bars.
  longest = max((len(column) for column, _ in columns), default=0)
  every = math.ceil(len(columns) * (longest + 2) / 36) or 1
  x_ticks = [((i + 0.5) * slot, name) for i, (name, _) in enumerate(columns)]
  y_ticks = [(100 - y, f'{y}%') for y in range(0, 101, 25)]
  keys = {name: _BAR_KEY[bool(_kind(name))] for name in names}
  return _chart(marks, x_ticks[::every], y_ticks, x_label, 'share', keys)


class Bar(NamedTuple):
  """A value in percent, the bounds of its interval, and what it is of."""

  value: float
  low: float
  high: float
  kind: str


def bar_chart(groups: Mapping[str, Sequence[Bar]]) -> str:
  """Bars from left to right, each with its interval, in groups by name.

  The last bar of a group has its full colour, those before it are paler.
  """
  shades = (1.0, 0.45, 0.25)
  longest = max(groups.values(), key=len)
  opacity = {bar.kind: shades[min(i, 2)] for i, bar in enumerate(longest[::-1])}
  rows = ''
  for name, bars in groups.items():
    for i, bar in enumerate(bars):
      first = '' if i else ' first'
      if not i:
        rows += f'<span class="name">{_breakable(name)}</span>\n'
      title = f'{name}, {bar.kind}: {bar.value:.1f}%, {bar.low:.1f} to '
      title = html.escape(f'{title}{bar.high:.1f}%')
      hatch = f'<rect class="hatch" width="{bar.value:.2f}%" height="100%"/>'
      at = f'x1="{bar.low:.2f}%" x2="{bar.high:.2f}%" y1="50%" y2="50%"'
      rows += (
        f'<svg class="bar{first}" style="{_colour(name)};grid-column:2">'
        f'<title>{title}</title><rect class="back" width="100%" height="100%"/>'
        f'<rect class="mark" style="--o:{opacity.get(bar.kind, 1)}" '
        f'width="{bar.value:.2f}%" height="100%"/>'
        f'{hatch * bool(_kind(name))}'
        f'<line {at}/><line {at}/></svg>\n'
        f'<span class="number{first}">{bar.value:.1f}%</span>\n'
      )
  legend = ''
  if len(longest) > 1:
    items = ''.join(
      f'<li><svg aria-hidden="true"><rect class="mark" style="--c:var(--muted);'
      f'--o:{opacity[bar.kind]}" width="26" height="12"/></svg>'
      f'{html.escape(bar.kind)}</li>\n'
      for bar in longest
    )
    legend = f'<ul class="legend">\n{items}</ul>\n'
  return f'<figure>\n{legend}<div class="bars">\n{rows}</div>\n</figure>\n'


_LINE_KEY = '<polyline points="0,6 26,6"/><circle cx="13" cy="6" r="2.75"/>'
_BAR_KEY = (
  '<rect width="26" height="12"/>',
  '<rect width="26" height="12"/><rect class="hatch" width="26" height="12"/>',
)


def _chart(
  marks: str,
  x_ticks: Sequence[tuple[float, str]],
  y_ticks: Sequence[tuple[float, str]],
  x_label: str,
  y_label: str,
  keys: Mapping[str, str],
) -> str:
  """Legend, axes and grid around the marks; places are in percent."""
  grid = ''.join(
    f'<line x2="100%" y1="{y:.2f}%" y2="{y:.2f}%"/>\n'
    f'<text class="y" x="0" dx="-8" y="{y:.2f}%" dy=".35em">{text}</text>\n'
    for y, text in y_ticks
  ) + ''.join(
    f'<text class="x" x="{x:.2f}%" y="100%" dy="1.6em">{html.escape(text)}'
    '</text>\n'
    for x, text in x_ticks
  )
  legend = ''.join(
    f'<li class="{_kind(name)}" style="{_colour(name)}"><svg '
    f'aria-hidden="true">{key}</svg>{html.escape(name)}</li>\n'
    for name, key in keys.items()
  )
  left = max(len(text) for _, text in y_ticks) + 1.5
  right = max((len(text) for _, text in x_ticks), default=0) / 2
  about = html.escape(f'{y_label} by {x_label}: {", ".join(keys)}')
  return f"""<figure>
<ul class="legend">
{legend}</ul>
<p class="axis">{html.escape(y_label)}</p>
<div class="plot" style="--left:{left}ch;--right:{right}ch">
<svg role="img" aria-label="{about}">
{grid}<line class="base" x2="100%" y1="100%" y2="100%"/>
{marks}</svg>
<p class="axis">{html.escape(x_label)}</p>
</div>
</figure>
"""


def _span(values: Sequence[float]) -> tuple[float, float]:
  """The range of the values, widened where they are all (nearly) the same."""
  low, high = min(values, default=0), max(values, default=0)
  size = max(abs(low), abs(high))
  if high - low > max(1e-9 * size, 1e-300):
    return low, high
  return (low - size / 2, high + size / 2) if size > 1e-300 else (0, 1)


def _ticks(
  low: float, high: float, about: int, whole: bool = False
) -> list[float]:
  """Multiples of 1, 2 or 5 times a power of ten that enclose the range."""
  rough = (high - low) / about
  power = 10.0 ** math.floor(math.log10(rough))
  step = next(m * power for m in (1, 2, 5, 10) if m * power > 0.999 * rough)
  step = max(step, 1) if whole else step
  first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
  return [i * step for i in range(first, last + 1)]


def _labels(ticks: Sequence[float]) -> list[tuple[float, str]]:
  """Ticks with their text: no more digits than tell them apart."""
  step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) or 1
  digits = -math.floor(math.log10(step) + 1e-6)

  def label(tick):
    if digits <= 4 and max(map(abs, ticks)) < 1e6:
      return f'{tick:,.{max(digits, 0)}f}'
    more = math.floor(math.log10(abs(tick)) + 1e-6) + digits if tick else 0
    return f'{tick:.{max(more, 0)}e}' if tick else '0'

  return [(tick, _tidy(label(tick))) for tick in ticks]


# --------------------------------------------------------- Colours and text


def _kind(name: str) -> str:
  """The class of a series: those of the DCT are dashed, or hatched."""
  return 'dct' if name.startswith('dct_') else ''


def _colour(name: str) -> str:
  """The style that sets the colour; no two names have the same variable."""
  slug = re.sub(r'\W', lambda match: f'-{ord(match[0]):x}-', name)
  return f'--c:var(--series-{slug})'


def _colours_of(body: str) -> str:
  """CSS with a colour for every series in the body.

  Threats have the same on every page; other names, in the order of appearance.
  """
  names = dict.fromkeys(re.findall(r'--c:var\(--series-([\w-]*)\)', body))
  others = itertools.cycle(_OTHERS)
  chosen = {name: _THREATS.get(name) or next(others) for name in names}
  light, dark = (
    ' '.join(f'--series-{name}: {pair[mode]};' for name, pair in chosen.items())
    for mode in (0, 1)
  )
  return (
    f':root {{ {light} }}\n'
    f'@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n'
  )


def _known(value: Number) -> bool:
  return value is not None and abs(float(value)) < 1e300  # NaN is not, either.


def _number(value: object) -> str:
  """A value as text that reads well."""
  if value is None or value != value:
    return _DASH
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    return str(value)
  if isinstance(value, numbers.Integral):
    return _tidy(f'{value:,}')
  plain = 1e3 <= abs(float(value)) < 1e9
  return _tidy(f'{value:,.0f}' if plain else f'{value:.4g}')


def _tidy(number: str) -> str:
  """1.0e-07 as 1e-7, with a true minus sign."""
  number = re.sub(r'(\.0+)?e\+?(-?)0*', r'e\2', number)
  return number.replace('-', '\N{MINUS SIGN}')


def _breakable(text: str) -> str:
  """Escaped text that may break after an underscore, so columns stay narrow."""
  return html.escape(text).replace('_', '_<wbr>')
