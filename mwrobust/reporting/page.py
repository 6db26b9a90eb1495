"""Makes one self-contained HTML page: text, tables, pictures.

>>> from mwrobust.reporting import charts, page
>>> lines = {'dct_l2': [(1, 40), (2, 35)]}
>>> chart = charts.line_chart(lines, 'step', 'error, %')
>>> html = page.page('A run', [('Training', page.paragraph('Fine.') + chart)])
>>> '<h1>A run</h1>' in html
True

The page opens from disk: it has no scripts, and its policy forbids it to load
anything. All functions are pure and return HTML; each escapes the text that it
is given. A series has one colour on the whole page: `page` assigns the colours
once it knows all names.
"""

import base64
import html
import io
import itertools
import math
import re
from collections.abc import Sequence
from importlib import resources

import numpy as np
from PIL import Image

Number = float | None  # None and NaN are unknown.

# For light and for dark pages. Each has a contrast of 3 to the background, and
# the colour-blind can distinguish the six of a set.
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

_GLYPHS = {'good': '✓', 'bad': '✗'}  # Not everyone sees colours.

_WIDEST = 112  # The most pixels of a picture; larger ones are shrunk.
_SHORT = ' class="short"'  # Keeps short headings on one line.

_CSS = resources.files(__package__).joinpath('page.css').read_text('utf-8')


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
  """Returns the whole document, to be written as UTF-8.

  A section is a heading (text) and what is below it (HTML).
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

  Its kind may be 'lead' for large print, or 'shown' for small print.
  """
  start = f'<p class="{kind}">' if kind else '<p>'
  return f'{start}{html.escape(text)}</p>\n'


def callout(kind: str, text: str, *more: str) -> str:
  """Returns a box with 'good' or 'bad' news, and more paragraphs."""
  below = ''.join(map(paragraph, more))
  return (
    f'<div class="callout {kind}">{_GLYPHS[kind]}\N{NO-BREAK SPACE}'
    f'{html.escape(text)}\n{below}</div>\n'
  )


# ------------------------------------------------------------------- Tables


def table(
  header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = ''
) -> str:
  r"""Returns a table of names (the first column) and numbers (the others).

  What follows a '\n' in a cell is a line in small print.
  """

  def cell(j, text):
    first, *others = map(breakable, text.split('\n'))
    first += ''.join(f'<small>{other}</small>' for other in others)
    long = ' class="long"' * (max(map(len, text.split('\n'))) > 28)
    start, end = ('td', 'td') if j else ('th scope="row"', 'th')
    return f'<{start}{long}>{first}</{end}>'

  body = [[cell(j, text) for j, text in enumerate(row)] for row in rows]
  return _table('data', header, body, caption)


def heat_map(
  row_names: Sequence[str],
  column_names: Sequence[str],
  values: Sequence[Sequence[Number]],
  caption: str = '',
) -> str:
  """Returns a table whose larger values have a stronger tint."""
  known = [v for row in values for v in row if is_known(v)]
  low, high = min(known, default=0), max(known, default=0)

  def cell(value):
    if not is_known(value):
      return '<td>\N{EN DASH}</td>'
    # Up to 0.7, where text still has a contrast of 4.5 to the tint.
    tint = 0.04 + 0.66 * ((value - low) / (high - low) if high > low else 0)
    return f'<td style="--a:{tint:.2f}">{value:.0f}</td>'

  body = [
    [f'<th scope="row">{breakable(name)}</th>', *map(cell, row)]
    for name, row in zip(row_names, values, strict=True)
  ]
  return _table('heat', ['', *column_names], body, caption)


def picture(array: np.ndarray) -> str:
  """Returns an image, uint8 [H, W, C] with 1 or 3 channels, pixels sharp."""
  image = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
  image = image.reduce(math.ceil(image.width / _WIDEST))
  file = io.BytesIO()
  image.save(file, 'png')
  data = base64.b64encode(file.getvalue()).decode()
  zoom = max(1, 96 // image.width)  # An integer: all pixels get the same size.
  return (
    f'<img class="picture" alt="" width="{zoom * image.width}" '
    f'height="{zoom * image.height}" src="data:image/png;base64,{data}">'
  )


def picture_grid(
  column_names: Sequence[str],
  rows: Sequence[tuple[str, Sequence[tuple[str, str]]]],
) -> str:
  """Returns pictures in rows and columns.

  A row is a name and its cells, each a picture (HTML) and a caption (text).
  """
  body = [
    [
      f'<th scope="row">{breakable(name)}</th>',
      *(f'<td>{image}{breakable(caption)}</td>' for image, caption in cells),
    ]
    for name, cells in rows
  ]
  return _table('pictures', ['', *column_names], body, '')


def _table(
  kind: str, header: Sequence[str], body: list[list[str]], caption: str
) -> str:
  head = ''.join(
    f'<th scope="col"{_SHORT * (len(name) < 9)}>{breakable(name)}</th>'
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


# --------------------------------------------------------- Colours and text


def colour(name: str) -> str:
  """Returns the style that sets the colour of a series to its CSS variable."""
  slug = re.sub(r'\W', lambda match: f'-{ord(match[0]):x}-', name)
  return f'--c:var(--series-{slug})'


def _colours_of(body: str) -> str:
  """Returns CSS with a colour for every series in the body.

  A threat has the same colour on every page. Other names get theirs in the
  order in which they appear.
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


def is_known(value: Number) -> bool:
  """Returns whether the value is a number that can be drawn; NaN is not."""
  return value is not None and abs(float(value)) < 1e300


def breakable(text: str) -> str:
  """Returns escaped text that may break after an underscore."""
  return html.escape(text).replace('_', '_<wbr>')
