"""The charts of a page: lines, stacked shares, bars with intervals.

They have real text at any width, as they are laid out in percent.
"""

import html
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mwrobust.reporting.page import Number, breakable, colour, is_known


def line_chart(
  series: Mapping[str, Sequence[tuple[float, Number]]],
  x_label: str,
  y_label: str,
  x_names: Mapping[float, str] | None = None,
) -> str:
  """Returns a line per series, dashed if its name starts with `dct_`.

  Args:
    series: points (x, y) by name, in the order of x. A line has a gap where y
      is None, NaN, infinite or beyond 1e300.
    x_label: the label of the x axis.
    y_label: the label of the y axis, which includes 0.
    x_names: the text of each tick of the x axis, if given.
  """
  runs = {
    name: [
      [(float(x), float(y)) for x, y in run]
      for known, run in itertools.groupby(line, lambda p: all(map(is_known, p)))
      if known
    ]
    for name, line in series.items()
  }
  points = [p for line in runs.values() for run in line for p in run]
  left, right = _span([x for x, _ in points])
  whole = all(x == int(x) for x, _ in points)
  x_ticks = x_names or {x: _label(x) for x in _ticks(left, right, 6, whole)}
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
    marks += f'<g class="series {_kind(name)}" style="{colour(name)}">\n'
    marks += '<svg viewBox="0 0 100 100" preserveAspectRatio="none">'
    marks += f'<title>{title}</title>\n'
    for run in line:
      path = ' '.join('{:.2f},{:.2f}'.format(*place(x, y)) for x, y in run)
      marks += f'<polyline points="{path}"/>\n'
    marks += '</svg>\n'
    for x, y in itertools.chain(*line):
      across, down = place(x, y)
      at = x_names[x] if x_names else _label(x, 4)
      where = html.escape(f'{x_label} {at}')
      marks += (
        f'<circle cx="{across:.2f}%" cy="{down:.2f}%" r="{radius}">'
        f'<title>{title}\n{where}: {_label(y, 4)}</title></circle>\n'
      )
    marks += '</g>\n'
  if not points:
    marks = '<text class="nothing" x="50%" y="50%">no values</text>\n'
  return _chart(
    marks,
    [(place(x, 0)[0], text) for x, text in x_ticks.items()],
    [(place(0, y)[1], _label(y)) for y in y_ticks],
    x_label,
    y_label,
    dict.fromkeys(series, _LINE_KEY),
  )


def stacked_shares(
  columns: Sequence[tuple[str, Mapping[str, Number]]], x_label: str
) -> str:
  """Returns a bar per column, split into shares; those of `dct_` are hatched.

  A column is a name and its shares, or counts: only their proportions matter. A
  column without any stays empty.
  """
  slot = 100 / max(1, len(columns))
  # Many bars overlap a little, which hides the seams between them.
  width = (0.84 if len(columns) <= 60 else 1.1) * slot
  names = dict.fromkeys(name for _, shares in columns for name in shares)
  marks = ''
  for i, (column, shares) in enumerate(columns):
    known = {k: v for k, v in shares.items() if is_known(v) and v > 0}
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
      marks += f'<g style="{colour(name)}"><title>{title}</title>'
      marks += f'<rect {box}/>{hatch}</g>\n'
  # On a phone there is room for about 36 characters below the bars.
  longest = max((len(column) for column, _ in columns), default=0)
  every = math.ceil(len(columns) * (longest + 2) / 36) or 1
  x_ticks = [((i + 0.5) * slot, name) for i, (name, _) in enumerate(columns)]
  y_ticks = [(100 - y, f'{y}%') for y in range(0, 101, 25)]
  keys = {name: _BAR_KEY[bool(_kind(name))] for name in names}
  return _chart(marks, x_ticks[::every], y_ticks, x_label, 'share', keys)


class Bar(NamedTuple):
  """Holds a value in percent, its interval, and its label."""

  value: float
  low: float
  high: float
  kind: str


def bar_chart(groups: Mapping[str, Sequence[Bar]]) -> str:
  """Returns bars from left to right, each with its interval, in named groups.

  The last bar of a group has its full colour; those before it are paler.
  """
  shades = (1.0, 0.45, 0.25)
  longest = max(groups.values(), key=len)
  opacity = {bar.kind: shades[min(i, 2)] for i, bar in enumerate(longest[::-1])}
  rows = ''
  for name, bars in groups.items():
    for i, bar in enumerate(bars):
      first = '' if i else ' first'
      if not i:
        rows += f'<span class="name">{breakable(name)}</span>\n'
      title = f'{name}, {bar.kind}: {bar.value:.1f}%, {bar.low:.1f} to '
      title = html.escape(f'{title}{bar.high:.1f}%')
      hatch = f'<rect class="hatch" width="{bar.value:.2f}%" height="100%"/>'
      at = f'x1="{bar.low:.2f}%" x2="{bar.high:.2f}%" y1="50%" y2="50%"'
      rows += (
        f'<svg class="bar{first}" style="{colour(name)};grid-column:2">'
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
  """Returns the marks with a legend, axes and a grid; places are in percent."""
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
    f'<li class="{_kind(name)}" style="{colour(name)}"><svg '
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
  """Returns the range of the values, widened if they hardly differ."""
  low, high = min(values, default=0), max(values, default=0)
  size = max(abs(low), abs(high))
  if high - low > max(1e-9 * size, 1e-300):
    return low, high
  return (low - size / 2, high + size / 2) if size > 1e-300 else (0, 1)


def _ticks(
  low: float, high: float, about: int, whole: bool = False
) -> list[float]:
  """Returns multiples of 1, 2 or 5 times a power of ten around the range."""
  rough = (high - low) / about
  power = 10.0 ** math.floor(math.log10(rough))
  step = next(m * power for m in (1, 2, 5, 10) if m * power > 0.999 * rough)
  step = max(step, 1) if whole else step
  first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
  return [i * step for i in range(first, last + 1)]


def _label(number: float, digits: int = 6) -> str:
  """Returns a number with a true minus sign, 1e-07 as 1e-7."""
  text = re.sub(r'e\+?(-?)0*', r'e\1', f'{number:,.{digits}g}')
  return text.replace('-', '\N{MINUS SIGN}')


def _kind(name: str) -> str:
  """Returns the class of a series: those of the DCT are dashed or hatched."""
  return 'dct' if name.startswith('dct_') else ''
