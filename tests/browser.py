"""Shows how a real browser sees a page: headless Chromium, by Playwright."""

import os
import pathlib
import shutil
from typing import Any, NamedTuple

import pytest

# Nothing leaves the machine.
FLAGS = ('--host-resolver-rules=MAP * ~NOTFOUND',)
MEASURE = """({
  scroll_width: Math.max(
    document.documentElement.scrollWidth, document.body.scrollWidth),
  background: getComputedStyle(document.body).backgroundColor,
})"""


class Visit(NamedTuple):
  """What a visit to a page has shown.

  Attributes:
    title: the title of the document.
    dom: its HTML, after loading.
    console: errors and warnings, those of the browser among them.
    requests: the URLs the page asked for, its own first; no `data:` URLs.
    scroll_width: in CSS pixels; more than the viewport's if it overflows.
    background: the colour of the body, as in `rgb(255, 255, 255)`.
    value: the value of the script.
  """

  title: str
  dom: str
  console: list[str]
  requests: list[str]
  scroll_width: int
  background: str
  value: Any


def browse(
  path: str | os.PathLike,
  width: int = 1200,
  dark: bool = False,
  script: str = 'null',
) -> Visit:
  """Opens a file in Chromium; skips the test if there is none.

  Args:
    path: the HTML file.
    width: of the viewport, in CSS pixels; below 600, that of a phone.
    dark: whether the user prefers dark pages.
    script: a JavaScript expression whose value is wanted.

  Returns:
    What there was to see.
  """
  playwright = pytest.importorskip('playwright.sync_api')
  names = 'chromium', 'chromium-browser', 'google-chrome'
  binary = next(filter(None, map(shutil.which, names)), None)
  console, requests = [], []

  def listen(message):
    if message.type in ('error', 'warning'):
      console.append(message.text)

  with playwright.sync_playwright() as api:
    # Without a Chromium of the system, the one of `playwright install`.
    if not os.path.exists(binary or api.chromium.executable_path):
      pytest.skip(f'No browser: none of {", ".join(names)} is installed.')
    with api.chromium.launch(executable_path=binary, args=FLAGS) as chromium:
      page = chromium.new_page(
        viewport={'width': width, 'height': 800},
        is_mobile=width < 600,
        color_scheme='dark' if dark else 'light',
      )
      page.on('console', listen)
      page.on('pageerror', lambda error: console.append(str(error)))
      page.on('request', lambda request: requests.append(request.url))
      page.goto(pathlib.Path(path).resolve().as_uri())
      return Visit(
        title=page.title(),
        dom=page.content(),
        console=console,
        requests=requests,
        value=page.evaluate(script),
        **page.evaluate(MEASURE),
      )
