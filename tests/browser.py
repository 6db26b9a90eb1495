"""A page as a real browser sees it: headless Chromium, over its own pipe.

The DevTools protocol is JSON with a NUL after each message. Chromium reads it
from file descriptor 3 and writes to 4, which `sh` makes of stdin and stdout.
"""

import base64
import contextlib
import itertools
import json
import os
import pathlib
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from typing import Any, NamedTuple

import pytest

FLAGS = (
  '--headless',
  '--remote-debugging-pipe',
  '--no-sandbox',  # It does not start as root otherwise.
  '--disable-gpu',
  '--disable-dev-shm-usage',
  '--disable-quic',
  '--disable-background-networking',
  '--disable-component-update',
  '--disable-default-apps',
  '--disable-extensions',
  '--disable-sync',
  '--no-first-run',
  '--no-default-browser-check',
  '--host-resolver-rules=MAP * ~NOTFOUND',  # Nothing is to leave the machine.
)
MEASURE = """({
  title: document.title,
  dom: document.documentElement.outerHTML,
  scroll_width: Math.max(
    document.documentElement.scrollWidth, document.body.scrollWidth),
  background: getComputedStyle(document.body).backgroundColor,
})"""


class Visit(NamedTuple):
  """What a visit to a page has shown.

  Attributes:
    title: Of the document.
    dom: Its HTML, after loading.
    console: Errors and warnings, those of the browser among them.
    requests: The URLs that were asked for, the page's own first.
    scroll_width: In CSS pixels; more than the viewport's if it overflows.
    background: Of the body, as in `rgb(255, 255, 255)`.
    value: Of the script.
    screenshot: The whole page as a PNG, if it was wanted.
  """

  title: str
  dom: str
  console: list[str]
  requests: list[str]
  scroll_width: int
  background: str
  value: Any = None
  screenshot: bytes = b''


class _Browser:
  """The two ends of the pipe."""

  def __init__(self, process, seconds):
    self._in, self._out = process.stdin, process.stdout
    self._deadline = time.monotonic() + seconds
    self._ids = itertools.count(1)
    self._buffer = b''
    self.events = []
    self.session = None

  def receive(self):
    """The next message."""
    while b'\0' not in self._buffer:
      left = self._deadline - time.monotonic()
      with selectors.DefaultSelector() as selector:
        selector.register(self._out, selectors.EVENT_READ)
        if left <= 0 or not selector.select(left):
          raise TimeoutError('The browser takes too long.')
      part = os.read(self._out.fileno(), 1 << 16)
      if not part:
        raise ConnectionError('The browser is gone.')
      self._buffer += part
    message, _, self._buffer = self._buffer.partition(b'\0')
    return json.loads(message)

  def call(self, method, **params):
    """The result of a command; events that come before it are kept."""
    message = {'id': next(self._ids), 'method': method, 'params': params}
    if self.session:
      message['sessionId'] = self.session
    self._in.write(json.dumps(message).encode() + b'\0')
    self._in.flush()
    while (answer := self.receive()).get('id') != message['id']:
      self.events.append(answer)
    if 'error' in answer:
      raise RuntimeError(f'{method}: {answer["error"]["message"]}')
    return answer['result']

  def wait_for(self, method):
    while not any(event.get('method') == method for event in self.events):
      self.events.append(self.receive())

  def evaluate(self, script):
    answer = self.call(
      'Runtime.evaluate', expression=script, returnByValue=True
    )
    if 'exceptionDetails' in answer:
      raise RuntimeError(f'{script}: {answer["exceptionDetails"]}')
    return answer['result'].get('value')


@contextlib.contextmanager
def _chromium(seconds):
  """A browser with an empty profile, gone at the end whatever happens."""
  names = 'chromium', 'chromium-browser', 'google-chrome'
  binary = next(filter(None, map(shutil.which, names)), None)
  if not binary:
    pytest.skip(f'No browser: none of {", ".join(names)} is installed.')
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
    launch = 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null'
    process = subprocess.Popen(
      ['sh', '-c', launch, binary, *FLAGS, f'--user-data-dir={profile}'],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      start_new_session=True,
    )
    try:
      yield _Browser(process, seconds)
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # It, and all that it started.
      with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
      process.stdout.close()
      process.wait()


def _complaint(event):
  """The text of an event that is an error or a warning, else None."""
  params = event.get('params', {})
  match event.get('method'):
    case 'Runtime.exceptionThrown':
      return params['exceptionDetails']['text']
    case 'Runtime.consoleAPICalled' if params['type'] in ('error', 'warning'):
      return ' '.join(str(a.get('value', a)) for a in params['args'])
    case 'Log.entryAdded' if params['entry']['level'] in ('error', 'warning'):
      return params['entry']['text']
  return None


def browse(
  path: str | os.PathLike,
  width: int = 1200,
  dark: bool = False,
  script: str = 'null',
  screenshot: bool = False,
  seconds: float = 60,
) -> Visit:
  """Opens a file in Chromium; skips the test if there is none.

  Args:
    path: Of the HTML file.
    width: Of the viewport, in CSS pixels; below 600, that of a phone.
    dark: Whether the user prefers dark pages.
    script: A JavaScript expression whose value is wanted.
    screenshot: Whether a picture of the page is wanted.
    seconds: How long it may take in all.

  Returns:
    What there was to see.
  """
  url = pathlib.Path(path).resolve().as_uri()
  with _chromium(seconds) as browser:
    target = browser.call('Target.createTarget', url='about:blank')
    browser.session = browser.call(
      'Target.attachToTarget', targetId=target['targetId'], flatten=True
    )['sessionId']
    for domain in ('Page', 'Runtime', 'Log', 'Network'):
      browser.call(f'{domain}.enable')
    browser.call(
      'Emulation.setDeviceMetricsOverride',
      width=width, height=800, deviceScaleFactor=1, mobile=width < 600,
    )  # fmt: skip
    scheme = {'name': 'prefers-color-scheme', 'value': ('light', 'dark')[dark]}
    browser.call('Emulation.setEmulatedMedia', features=[scheme])
    browser.events.clear()
    browser.call('Page.navigate', url=url)
    browser.wait_for('Page.loadEventFired')
    value = browser.evaluate(script)
    measured = browser.evaluate(MEASURE)
    data = ''
    if screenshot:
      data = browser.call('Page.captureScreenshot', captureBeyondViewport=True)
      data = data['data']
    events = list(browser.events)
  return Visit(
    **measured,
    console=[c for c in map(_complaint, events) if c is not None],
    requests=[
      event['params']['request']['url']
      for event in events
      if event.get('method') == 'Network.requestWillBeSent'
    ],
    value=value,
    screenshot=base64.b64decode(data),
  )
