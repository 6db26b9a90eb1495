"""A report in pieces, each for the page and for Markdown."""

import functools
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from etils import epath

from mwrobust import page
from mwrobust.runtime import files


class Part(NamedTuple):
  """A piece of a report, for the page and for Markdown; '' where not shown."""

  html: str
  markdown: str


Section = tuple[str, list[Part]]  # With its heading.


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
    files.write_bytes(path, content.encode())
    say(str(path))


def to_markdown(sections: Sequence[Section]) -> str:
  """The sections under their headings, without what only the page can show."""
  lines = []
  for heading, parts in sections:
    shown = [part.markdown for part in parts if part.markdown]
    if shown:
      lines += [f'## {heading}', *shown]
  return '\n\n'.join(lines) + '\n'
