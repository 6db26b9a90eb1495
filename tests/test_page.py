import base64
import html.parser
import io
import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from browser import browse
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mwrobust.reporting import charts, page

THREATS = (
  'pixel_linf', 'pixel_l2', 'pixel_l1', 'dct_linf', 'dct_l2', 'dct_l1',
)  # fmt: skip
POLICIES = (
  'natural', 'single', 'round_robin', 'greedy', 'uniform',
  'multiplicative_weights',
)  # fmt: skip
NASTY = '</p><b class="x">&amp; \'n'
NAN, INF = math.nan, math.inf

# What a line chart must cope with, by name.
HARD_SERIES = {
  'one point': {'a': [(3, 0.5)]},
  'one point at zero': {'a': [(0, 0)]},
  'all values equal': {'a': [(1, 7), (2, 7)], 'b': [(1, 7), (2, 7)]},
  'gaps': {'a': [(1, 1), (2, None), (3, 3), (4, NAN), (5, 5), (6, INF)]},
  'no value': {'a': [(1, None), (2, NAN)]},
  'an empty series': {'a': [], 'b': [(1, 2), (2, 3)]},
  'no series': {},
  'very small values': {'a': [(1, 2e-12), (2, 3e-9)]},
  'very large values': {'a': [(1, 2e12), (2e6, 9e15)]},
  'small next to large': {'a': [(1, 1e-300), (2, 1e299)]},
  'least numbers': {'a': [(5e-324, 5e-324), (0, 0)]},
  'below zero': {'a': [(-20, -0.35), (20, 0.12)]},
  'a small range far away': {'a': [(1, 97.311), (2, 97.318)]},
  'numpy numbers': {'a': [(np.int64(1), np.float32(0.5)), (2, np.nan)]},
  'a long name': {'x' * 60: [(1, 1), (2, 2)], 'two words': [(1, 2)]},
  'many points': {'a': [(i, math.sin(i / 20)) for i in range(300)]},
}


def hard_charts():
  for name, series in HARD_SERIES.items():
    yield charts.line_chart(series, 'outer step', name)
  many = [(str(i), {'dct_l2': i % 3, 'pixel_l2': 1}) for i in range(200)]
  names = [(name, {'pixel_l2': 1.0}) for name in POLICIES]
  for columns in (many, names, [('1', {'dct_l2': 0.0})], [('1', {})], []):
    yield charts.stacked_shares(columns, 'outer step')


def bars():
  return charts.bar_chart(
    {
      'natural': [charts.Bar(100.0, 92.9, 100.0, '')],
      'dct_l2': [
        charts.Bar(60.0, 50, 70, 'paper'),
        charts.Bar(30, 20, 40, 'ours'),
      ],
      'x' * 60: [charts.Bar(0.0, 0.0, 7.1, 'paper')],
    }
  )


def sample():
  """Returns a page with some of everything."""
  rng = np.random.default_rng(0)
  losses = {
    name: [(t, 9 * math.exp(-t / 6) + i + rng.random()) for t in range(1, 21)]
    for i, name in enumerate(THREATS)
  }
  shares = [
    (str(t), dict(zip(THREATS, rng.dirichlet([1] * 6), strict=True)))
    for t in range(1, 21)
  ]
  rows = [
    [name, *(f'{v:.1f}\n[{v - 1:.1f}, {v + 1:.1f}]' for v in row), verdict]
    for name, row, verdict in zip(
      POLICIES, rng.uniform(20, 99, (6, 5)), ('holds', 'fails', 'open') * 2,
      strict=True,
    )
  ]  # fmt: skip
  header = ['policy', 'natural', 'worst', 'mean', 'pixel_linf', 'dct_l1', '']
  settings = [['data', 'mnist'], ['images', '60,000'], ['command', 'run ' * 20]]
  pictures = [
    (f'digit {i}', [
      (page.picture(rng.integers(0, 256, (28, 28, c), np.uint8)), f'{i} → 3')
      for c in (1, 3) * 4
    ])
    for i in range(4)
  ]  # fmt: skip
  values = rng.uniform(0, 100, (6, 6)).tolist()
  values[2][3] = NAN
  return page.page(
    'A sample & more',
    [
      ('Results', page.paragraph('In short.')),
      ('Table', page.table(header, rows, 'In percent.')),
      ('Losses', charts.line_chart(losses, 'outer step', 'loss')),
      ('Shares', charts.stacked_shares(shares, 'outer step')),
      ('Bars', page.callout('bad', 'Look.', 'Why.') + bars()),
      ('Transfer', page.heat_map(THREATS, THREATS, values, caption='In %.')),
      ('Pictures', page.picture_grid(['natural', *THREATS, 'all'], pictures)),
      ('Settings', page.table(['setting', 'value'], settings)),
      ('Hard charts', ''.join(hard_charts())),
    ],
  )


class Document(html.parser.HTMLParser):
  """Parses a document; every tag must be closed, and in order."""

  VOID = ('meta', 'img', 'wbr', 'br')

  def __init__(self, text):
    super().__init__()
    self.open, self.tags, self.attributes, self.text = [], [], [], ''
    self.feed(text)
    self.close()
    assert not self.open

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += attrs
    if tag not in self.VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.handle_starttag(tag, attrs)
    self.handle_endtag(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text += data


def svgs(text):
  """Returns the outermost <svg> elements, parsed as XML."""
  depth, start, found = 0, 0, []
  for match in re.finditer(r'<svg\b|</svg>', text):
    if match[0] == '<svg':
      start = match.start() if not depth else start
      depth += 1
    else:
      depth -= 1
      if not depth:
        found.append(ET.fromstring(text[start : match.end()]))
  assert depth == 0
  return found


def plot(text):
  """Returns the only <svg> with role="img"."""
  (found,) = [svg for svg in svgs(text) if svg.get('role') == 'img']
  return found


def texts(svg, kind):
  return [text.text for text in svg.iterfind(f'text[@class="{kind}"]')]


def ends(svg):
  """Returns the points of each line of a chart, in percent."""
  lines = svg.iterfind('.//polyline')
  split = [line.get('points').split() for line in lines]
  return [[tuple(map(float, p.split(','))) for p in line] for line in split]


# ------------------------------------------------------------------- the page


def test_the_document_is_whole():
  text = sample()
  document = Document(text)
  assert text.startswith('<!doctype html>\n<html lang="en">')
  assert ('charset', 'utf-8') in document.attributes
  policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
  assert ('content', policy) in document.attributes
  assert document.tags.count('h2') == 9
  assert document.tags.count('img') == 32
  assert len(svgs(text)) > 30
  targets = [value for key, value in document.attributes if key == 'href']
  ids = [value for key, value in document.attributes if key == 'id']
  assert targets == [f'#{i}' for i in ids if i.startswith('section')]
  assert len(set(ids)) == len(ids)


def test_the_document_loads_nothing():
  text = sample()
  document = Document(text)
  assert not {'script', 'link', 'iframe', 'object'} & set(document.tags)
  assert 'http:' not in text
  assert 'https:' not in text
  assert '@import' not in text
  assert set(re.findall(r'url\((.*?)\)', text)) == {'#hatch'}
  for key, value in document.attributes:
    assert not key.startswith('on')
    assert key != 'src' or value.startswith('data:image/png;base64,')


def test_few_sections_need_no_links():
  assert 'nav' not in Document(page.page('a', [('b', ''), ('c', '')])).tags
  assert 'nav' in Document(page.page('a', [('b', '')] * 3)).tags


def test_all_text_is_escaped_once():
  image = page.picture(np.zeros((2, 2, 1), np.uint8))
  contents = [
    page.paragraph(NASTY),
    page.table([NASTY], [[f'{NASTY}\n{NASTY}']], NASTY),
    charts.line_chart({NASTY: [(1, 1)]}, NASTY, NASTY),
    charts.stacked_shares([(NASTY, {NASTY: 1})], NASTY),
    page.heat_map([NASTY], [NASTY], [[1]], NASTY),
    page.picture_grid([NASTY], [(NASTY, [(image, NASTY)])]),
    charts.bar_chart(
      {NASTY: [charts.Bar(1, 0, 2, NASTY), charts.Bar(1, 0, 2, 'b')]}
    ),
    page.callout('good', NASTY, NASTY),
  ]
  document = Document(page.page(NASTY, [(NASTY, c) for c in contents]))
  assert 'b' not in document.tags
  attributes = ''.join(str(value) for _, value in document.attributes)
  # Title twice, eight headings twice, and the arguments above. A chart says its
  # labels and names on axes, in the legend, in titles and in its description.
  shown = (
    2 + 16 + 1 + 4 + (1 + 3 + 2) + (1 + 2 + 3) + 3 + 3 + (1 + 2 + 1 + 1) + 2
  )
  assert document.text.count(NASTY) == shown
  assert attributes.count(NASTY) == 1 + 3 + 2 + 1
  assert '&amp;lt;' not in document.text + attributes


# ----------------------------------------------------------------- the tables


def test_what_follows_a_line_break_is_small():
  text = page.table(['', 'a'], [['x', '93.1\n[92.0, 94.1]']])
  assert '93.1<small>[92.0, 94.1]</small>' in text


def test_a_heat_map_tints_by_value():
  values = [[0, 50, 100], [NAN, None, INF]]
  text = page.heat_map(['a', 'b'], ['x', 'y', 'z'], values)
  tints = re.findall(r'--a:([\d.]+)">([\d.]+)<', text)
  assert tints == [('0.04', '0'), ('0.37', '50'), ('0.70', '100')]
  assert text.count('<td>\N{EN DASH}</td>') == 3
  assert '--a:0.04' in page.heat_map(['a'], ['x'], [[5]])
  Document(page.heat_map([], [], []))


@pytest.mark.parametrize('channels', [1, 3])
def test_a_picture_keeps_its_pixels(channels):
  rng = np.random.default_rng(0)
  array = rng.integers(0, 256, (28, 32, channels), np.uint8)
  (data,) = re.findall(r'base64,([^"]*)"', page.picture(array))
  image = Image.open(io.BytesIO(base64.b64decode(data)))
  got = np.asarray(image).reshape(array.shape)
  np.testing.assert_array_equal(got, array)
  assert 'alt="" width="96" height="84"' in page.picture(array)


# ----------------------------------------------------------------- the charts


def test_a_line_is_where_it_should_be():
  svg = plot(charts.line_chart({'a': [(0, 0), (5, 40), (10, 100)]}, 'x', 'y'))
  assert ends(svg) == [[(0, 100), (50, 60), (100, 0)]]
  assert texts(svg, 'x') == ['0', '2', '4', '6', '8', '10']
  assert texts(svg, 'y') == ['0', '20', '40', '60', '80', '100']
  titles = [title.text for title in svg.iterfind('.//circle/title')]
  assert titles == ['a\nx 0: 0', 'a\nx 5: 40', 'a\nx 10: 100']
  assert svg.get('aria-label') == 'y by x: a'


def test_unknown_values_are_gaps():
  svg = plot(charts.line_chart(HARD_SERIES['gaps'], 'x', 'y'))
  assert [len(line) for line in ends(svg)] == [1, 1, 1]
  assert len(list(svg.iter('circle'))) == 3


def test_the_y_axis_shows_zero():
  svg = plot(charts.line_chart({'a': [(1, 97.311), (2, 97.318)]}, 'x', 'y'))
  assert texts(svg, 'y') == ['0', '20', '40', '60', '80', '100']


def test_whole_steps_have_whole_ticks():
  svg = plot(charts.line_chart({'a': [(1, 1), (3, 1)]}, 'outer step', 'y'))
  assert texts(svg, 'x') == ['1', '2', '3']


def test_a_chart_without_values_says_so():
  assert 'no values' in charts.line_chart(HARD_SERIES['no value'], 'x', 'y')


number = st.one_of(st.none(), st.floats(), st.integers(-5, 200))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(st.tuples(number, number), max_size=5), max_size=3))
def test_any_numbers_make_a_chart(lines):
  series = {str(i): line for i, line in enumerate(lines)}
  text = charts.line_chart(series, 'x', 'y')
  Document(text)
  svg = plot(text)
  places = np.array([p for line in ends(svg) for p in line])
  assert ((places >= 0) & (places <= 100)).all()
  for labels in (texts(svg, 'x'), texts(svg, 'y')):
    assert 1 <= len(labels) <= 12
    assert len(set(labels)) == len(labels)


def test_shares_fill_their_bar():
  columns = [
    ('1', {'pixel_l2': 0.25, 'dct_l2': 0.75}),
    ('2', {}),
    ('3', {'pixel_l2': 0.0, 'dct_l2': 0.0}),
    ('4', {'dct_l2': 30, 'pixel_l2': 10, 'pixel_l1': NAN}),
  ]
  svg = plot(charts.stacked_shares(columns, 'step'))
  bars = [
    (bar.get('y'), bar.get('height'))
    for bar in svg.iter('rect')
    if not bar.get('class')
  ]
  assert bars == [('75.00%', '25.00%'), ('0.00%', '75.00%')] * 2
  titles = [title.text for title in svg.iter('title')]
  assert titles[0] == 'pixel_l2\nstep 1: 25%'
  assert texts(svg, 'x') == ['1', '2', '3', '4']


def test_ticks_can_have_names():
  points = {'a': [(-1, 50), (0, 40), (1, 30)]}
  names = {-1: '1/2 eps', 0: 'eps', 1: '2 eps'}
  svg = plot(charts.line_chart(points, 'radius', 'y', names))
  assert texts(svg, 'x') == list(names.values())
  assert ends(svg)[0][1][0] == 50
  titles = [title.text for title in svg.iterfind('.//circle/title')]
  assert titles[1] == 'a\nradius eps: 40'


def test_bars_are_as_long_as_their_values():
  text = bars()
  Document(text)
  found = [svg for svg in svgs(text) if svg.get('class')]
  lengths = [svg.find('rect[@class="mark"]').get('width') for svg in found]
  assert lengths == ['100.00%', '60.00%', '30.00%', '0.00%']
  line = found[2].find('line')
  assert (line.get('x1'), line.get('x2')) == ('20.00%', '40.00%')
  shades = [svg.find('rect[@class="mark"]').get('style') for svg in found]
  assert shades[2] == '--o:1.0'  # The last of a group has the full colour.
  assert shades[1] != shades[2]
  assert [svg.find('title').text for svg in found][1:3] == [
    'dct_l2, paper: 60.0%, 50.0 to 70.0%',
    'dct_l2, ours: 30.0%, 20.0 to 40.0%',
  ]
  assert re.findall(r'</svg>(.*?)</li>', text) == ['paper', 'ours']
  assert text.count('class="hatch"') == 2


def test_the_dct_is_dashed_and_hatched():
  def kinds(text):
    items = re.findall(r'<li class="(.*?)".*?</svg>(.*?)</li>', text)
    return {name: kind for kind, name in items}

  series = {name: [(1, 1)] for name in THREATS}
  kind = {name: 'dct' if 'dct' in name else '' for name in THREATS}
  assert kinds(charts.line_chart(series, 'x', 'y')) == kind
  bars = charts.stacked_shares([('1', dict.fromkeys(THREATS, 1))], 'x')
  assert kinds(bars) == kind
  assert bars.count('<rect class="hatch"') == 6  # Three bars, three keys.


# ---------------------------------------------------------------- the colours


def colours(*contents):
  """Returns the colours by variable, on light pages and on dark ones."""
  text = page.page('', [('', content) for content in contents])
  pairs = re.findall(r'--series-([\w-]+): (#\w{6});', text)
  assert len(pairs) % 2 == 0
  half = len(pairs) // 2
  light, dark = dict(pairs[:half]), dict(pairs[half:])
  assert len(light) == len(dark) == half
  used = re.findall(r'--c:var\(--series-([\w-]+)\)', text)
  assert set(used) == set(light) == set(dark)
  return light, dark


def chart_of(*names):
  return charts.line_chart({name: [(1, 1)] for name in names}, 'x', 'y')


def test_threats_have_the_same_colours_on_all_pages():
  bars = charts.stacked_shares([('1', {'dct_l1': 1})], 'x')
  first = colours(chart_of(*THREATS))
  second = colours(chart_of('other'), bars, chart_of(*reversed(THREATS)))
  for a, b in zip(first, second, strict=True):
    assert a == {name: b[name] for name in THREATS}
    assert len(set(b.values())) == 7


def test_other_names_have_one_colour_on_a_page():
  names = (*POLICIES[:4], '+1', '-1')
  for by_name in colours(chart_of(*names), chart_of(*reversed(names))):
    assert len(by_name) == len(set(by_name.values())) == 6


def luminance(rgb):
  rgb = np.array([*rgb]) / 255
  linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
  return linear @ [0.2126, 0.7152, 0.0722]


def contrast(a, b):
  """Returns the WCAG contrast of two colours, (red, green, blue) up to 255."""
  low, high = sorted([luminance(a), luminance(b)])
  return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_from_the_page():
  light, dark = colours(chart_of(*THREATS, *POLICIES))
  assert len(light) == 12
  for by_name, back in ((light, 'ffffff'), (dark, '14171a')):
    for colour in by_name.values():
      assert contrast(bytes.fromhex(colour[1:]), bytes.fromhex(back)) >= 3


# ------------------------------------------------------------- in the browser

# Labels that leave the page, and neighbours on an axis that touch.
MISPLACED = """
const page = document.body.getBoundingClientRect();
[...document.querySelectorAll('.plot > svg')].flatMap(svg => {
  const of = kind => [...svg.querySelectorAll(kind)].map(
    text => [text.textContent, text.getBoundingClientRect()]);
  const x = of('.x'), y = of('.y');
  const outside = [...x, ...y].filter(
    ([_, box]) => box.left < page.left || box.right > page.right);
  const wide = x.slice(1).filter(([_, box], i) => box.left < x[i][1].right + 2);
  const high = y.slice(1).filter(([_, box], i) => box.bottom > y[i][1].top);
  return [...outside, ...wide, ...high].map(([text, _]) => text);
})"""
HEAT = """[...document.querySelectorAll('.heat td')].map(cell => {
  const style = getComputedStyle(cell);
  return [style.color, style.backgroundColor];
})"""


@pytest.fixture(scope='module')
def path(tmp_path_factory):
  path = tmp_path_factory.mktemp('page') / 'a sample.html'
  path.write_text(sample(), encoding='utf-8')
  return path


@pytest.mark.parametrize('width', [360, 1200])
def test_a_browser_shows_the_page(path, width):
  visit = browse(path, width, script=MISPLACED)
  document = Document(visit.dom)
  assert visit.title == 'A sample & more'
  assert document.tags.count('h2') == 9
  assert document.tags.count('svg') == Document(sample()).tags.count('svg')
  assert visit.console == []
  assert visit.requests == [path.as_uri()]
  assert visit.scroll_width <= width
  assert visit.background == 'rgb(255, 255, 255)'
  assert visit.value == []


@pytest.mark.parametrize('dark', [False, True])
def test_text_can_be_read_on_every_tint(path, dark):
  visit = browse(path, 360, dark, script=HEAT)

  def rgba(colour):
    red, green, blue, *alpha = map(float, re.findall(r'[\d.]+', colour))
    return np.array([red, green, blue]), alpha[0] if alpha else 1

  page_back, _ = rgba(visit.background)
  assert (luminance(page_back) < 0.02) == dark  # As the colours above want it.
  assert visit.console == []
  assert visit.scroll_width <= 360
  assert len(visit.value) == 36
  for ink, back in visit.value:
    (ink, _), (tint, alpha) = rgba(ink), rgba(back)
    assert contrast(ink, alpha * tint + (1 - alpha) * page_back) >= 4.5


def test_the_browser_reports_bad_pages(tmp_path):
  path = tmp_path / 'bad.html'
  path.write_text(
    '<meta name=viewport content="width=device-width"><title>Bad</title>'
    '<body style="background: #123"><div style="width: 999px">wide</div>'
    '<img src="http://an.example/a.png"><script>console.warn("beware")</script>'
  )
  visit = browse(path, 360, script='1 + 1')
  assert visit.title == 'Bad'
  assert 'beware' in visit.console
  assert 'http://an.example/a.png' in visit.requests
  assert visit.scroll_width >= 999
  assert visit.background == 'rgb(17, 34, 51)'
  assert visit.value == 2


def test_the_page_lets_nothing_in(tmp_path):
  path = tmp_path / 'page.html'
  evil = '<img src="http://an.example/a.png"><script>console.log(1)</script>'
  path.write_text(page.page('Closed', [('Section', evil)]), encoding='utf-8')
  visit = browse(path)
  assert len(visit.console) == 2
  assert all('Content Security Policy' in text for text in visit.console)
