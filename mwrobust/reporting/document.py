"""A report in pieces, each for the page and for Markdown."""

import functools
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from etils import epath

from mwrobust.reporting import page
from mwrobust.runtime import files


class Part(NamedTuple):
  """A piece of a report, for the page and for Markdown; '' if not shown."""

  html: str
  markdown: str


Section = tuple[str, list[Part]]  # A heading and its parts.


def text(words: str, kind: str = '') -> Part:
  """Returns a paragraph; for its kind see `page.paragraph`."""
  return Part(page.paragraph(words, kind), _wrapped(words))


def callout(kind: str, words: str, *more: str) -> Part:
  """Returns a box with 'good' or 'bad' news, and paragraphs below it."""
  lines = [f'**{words}**', *more]
  return Part(
    page.callout(kind, words, *more), '\n\n'.join(map(_wrapped, lines))
  )


def picture(html: str, heading: str = '') -> Part:
  """Returns what only the page can show."""
  return Part(f'<h3>{heading}</h3>\n' * bool(heading) + html, '')


def table(
  header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = ''
) -> Part:
  """Returns a table, as `page.table` takes it."""
  as_text = markdown_table(header, rows)
  if caption:
    as_text = f'{_wrapped(caption)}\n\n{as_text}'
  return Part(page.table(header, rows, caption), as_text)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Returns the rows as a Markdown table whose columns line up.

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
  """Writes the sections as STEM.html and STEM.md, and says where."""
  html = [
    (heading, ''.join(part.html for part in parts))
    for heading, parts in sections
  ]
  for suffix, content in (
    ('.html', page.page(title, html)),
    ('.md', f'# {title}\n\n{to_markdown(sections)}'),
  ):
    path = stem.with_name(stem.name + suffix)
    files.write_bytes(path, content.encode())
    say(str(path))


def to_markdown(sections: Sequence[Section]) -> str:
  """Returns the sections without what only the page can show."""
  lines = []
  for heading, parts in sections:
    shown = [part.markdown for part in parts if part.markdown]
    if shown:
      lines += [f'## {heading}', *shown]
  return '\n\n'.join(lines) + '\n'


def summary(paragraphs: Sequence[str]) -> str:
  """Returns the paragraphs in at most six lines; the longest are cut."""
  wrapped = [textwrap.wrap(words, 80) for words in paragraphs]
  while sum(map(len, wrapped)) > 6:
    longest = max(wrapped, key=len)
    del longest[-1]
    longest[-1] = longest[-1][:76].rstrip() + ' ...'
  return '\n'.join(line for block in wrapped for line in block)


def _wrapped(words: str) -> str:
  fill = functools.partial(
    textwrap.fill, width=80, break_long_words=False, break_on_hyphens=False
  )
  return '\n'.join(map(fill, words.splitlines()))
