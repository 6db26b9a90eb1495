"""Tests that the figures are those of the paper's LaTeX."""

import pathlib
import re

import pytest

from mwrobust import attacks
from mwrobust.reporting import paper

TEX = pathlib.Path(__file__).parents[2] / 'shared' / 'paper.tex'
THREATS = [threat.name for threat in attacks.six_threats(1, 1, 1)]
ROWS = [*THREATS, 'min', 'union', 'natural']
MW = 'multiplicative_weights'
# The paper's names of rows and columns, without $, {, } and ~.
NAMES = {
  r'Pixel (\ell_\infty)': 'pixel_linf',
  r'Pixel (\ell_2)': 'pixel_l2',
  r'Pixel (\ell_1)': 'pixel_l1',
  r'DCT (\ell_\infty)': 'dct_linf',
  r'DCT (\ell_2)': 'dct_l2',
  r'DCT (\ell_1)': 'dct_l1',
  'Min. Accuracy': 'min',
  'Min. Acc.': 'min',
  'Union Attack': 'union',
  'Nat. Acc.': 'natural',
  'Greedy': ('greedy', 'h=1'),
  'Round Robin': ('round_robin', 'h=1'),
  'Mult. Weights (h=1)': (MW, 'h=1'),
  'Mult. Weights (h=3)': (MW, 'h=3 ensemble'),  # See the test below.
  'Mult. Weights (h=3) (ensemble)': (MW, 'h=3 ensemble'),
  'Mult. Weights (h=3) (wt. avg.)': (MW, 'h=3 average'),
  r'Test w/pixel \ell_\infty': 'pixel_linf',
  r'Test w/DCT \ell_\infty': 'dct_linf',
  r'Train w/pixel \ell_\infty': ('single pixel_linf', 'h=1'),
  r'Train w/DCT \ell_\infty': ('single dct_linf', 'h=1'),
}
FIGURE = re.compile(r'(\d+(?:\.\d+)?)\s*\\pm\s*(\d+(?:\.\d+)?)')


def cells_of(label):
  """Returns the rows of the table with this label, first the header."""
  if not TEX.exists():
    pytest.skip(f"The paper's source is not at {TEX}.")
  text = TEX.read_text()
  assert text.count(rf'\label{{{label}}}') == 1
  before, _, _ = text.partition(rf'\label{{{label}}}')
  body = before.rpartition(r'\begin{tabular}')[2]
  body = body.partition('\n')[2].partition(r'\end{tabular}')[0]
  body = body.replace(r'\hline', '').replace('~', ' ').replace('$', '')
  rows = [row.split('&') for row in body.split(r'\\') if row.strip()]
  return [[' '.join(cell.split()) for cell in row] for row in rows]


def accuracies_of(label):
  """Returns the figures by column, then by row."""
  header, *rows = cells_of(label)
  columns = {NAMES[name]: {} for name in header[1:]}
  for name, *cells in rows:
    for column, cell in zip(columns.values(), cells, strict=True):
      ((mean, std),) = FIGURE.findall(cell)
      column[NAMES[name]] = float(mean), float(std)
  assert all(list(column) == ROWS for column in columns.values())
  return columns


def tradeoff():
  header, *rows = cells_of('table:tradeoff')
  names = [NAMES[name] for name in header[1:]]
  figures = {}
  for name, *cells in rows:
    found = [tuple(map(float, FIGURE.search(cell).groups())) for cell in cells]
    figures[NAMES[name]] = dict(zip(names, found, strict=True))
  return figures


@pytest.mark.parametrize('data', ['cifar10', 'mnist'])
def test_the_main_tables(data):
  expected = accuracies_of(f'table:acc-{data}')
  expected |= accuracies_of(f'table:convexity-{data}')
  if data == 'cifar10':
    expected |= tradeoff()
  assert paper.ACCURACIES[data, 1] == expected


@pytest.mark.parametrize('data', ['cifar10', 'mnist'])
def test_the_tables_with_restarts(data):
  expected = accuracies_of(f'table:acc-{data}-20-restarts')
  assert paper.ACCURACIES[data, 20] == expected


@pytest.mark.parametrize('data', ['cifar10', 'mnist'])
def test_the_main_tables_show_the_ensemble(data):
  main = accuracies_of(f'table:acc-{data}')
  convexity = accuracies_of(f'table:convexity-{data}')
  column = MW, 'h=3 ensemble'
  assert main[column] == convexity[column]
  assert main[column] != convexity[MW, 'h=3 average']


def test_the_tradeoff():
  assert tradeoff() == paper.TRADEOFF


def test_the_hours():
  header, *rows = cells_of('tab:train-time')
  methods = {
    r'Pixel (\ell_\infty)': 'single pixel_linf',
    r'DCT (\ell_\infty)': 'single dct_linf',
    'Round Robin': 'round_robin',
    'Greedy': 'greedy',
    'Mult. Weights': MW,
  }
  expected = {
    name.lower().replace('-', ''): {
      methods[method]: float(cell)
      for method, cell in zip(header[1:], cells, strict=True)
    }
    for name, *cells in rows
  }
  assert expected == paper.HOURS


# ---------------------------------------------------- without other files

COLUMNS = [
  pytest.param(figures, id=f'{data}-{starts}-{method}-{network}')
  for (data, starts), columns in paper.ACCURACIES.items()
  for (method, network), figures in columns.items()
  if not method.startswith('single')
]


@pytest.mark.parametrize('figures', COLUMNS)
def test_a_column_is_whole_and_in_order(figures):
  assert list(figures) == ROWS
  assert all(0 < f.mean < 100 and 0 < f.std < 50 for f in figures.values())
  # Up to rounding, the mean of the lowest is at most the lowest mean.
  lowest = min(figures[name].mean for name in THREATS)
  assert figures['union'].mean <= figures['min'].mean <= lowest + 0.01


@pytest.mark.parametrize('data', ['cifar10', 'mnist'])
def test_more_starts_fool_no_fewer(data):
  one, twenty = paper.ACCURACIES[data, 1], paper.ACCURACIES[data, 20]
  assert set(twenty) == {
    *[('greedy', 'h=1'), ('round_robin', 'h=1')],
    *[(MW, 'h=1'), (MW, 'h=3 ensemble')],
  }
  for column, figures in twenty.items():
    assert figures['natural'] == one[column]['natural']
    for row in ROWS:
      assert figures[row].mean <= one[column][row].mean


def test_who_trains_against_one_threat_is_open_to_the_other():
  for ours, other in (('pixel_linf', 'dct_linf'), ('dct_linf', 'pixel_linf')):
    figures = paper.TRADEOFF[f'single {ours}', 'h=1']
    assert set(figures) == {'pixel_linf', 'dct_linf', 'natural'}
    assert figures[other].mean < figures[ours].mean < figures['natural'].mean
    against_both = paper.ACCURACIES['cifar10', 1][MW, 'h=3 ensemble']
    assert figures[other].mean < against_both[other].mean


def test_the_hours_give_the_ratios_that_are_quoted():
  over_one = {
    data: round(hours[MW] / hours['single pixel_linf'], 2)
    for data, hours in paper.HOURS.items()
  }
  assert over_one == {'mnist': 1.29, 'cifar10': 1.24}  # As in the README.
  for hours in paper.HOURS.values():
    assert set(hours) == {
      *('single pixel_linf', 'single dct_linf'),
      *('round_robin', 'greedy', MW),
    }
