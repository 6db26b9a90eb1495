"""The figures of the paper's tables, to compare with ours.

"h = 3" in the main tables is, digit for digit, the ensemble in the tables on
convexity; only those also have the average of the parameters.
"""

from typing import NamedTuple

_PIXEL, _DCT = (
  tuple(f'{space}_{norm}' for norm in ('linf', 'l2', 'l1'))
  for space in ('pixel', 'dct')
)
THREATS = _PIXEL + _DCT


class Figure(NamedTuple):
  """The mean over the paper's runs, and their standard deviation."""

  mean: float
  std: float


def _parse(table: str, columns: list[tuple[str, str]]):
  """Returns the figures of a table by column, then by row."""
  parsed = {column: {} for column in columns}
  for line in table.strip().splitlines():
    row, *numbers = line.split()
    for i, column in enumerate(columns):
      mean, std = map(float, numbers[2 * i : 2 * i + 2])
      parsed[column][row] = Figure(mean, std)
  return parsed


_POLICIES = [
  ('greedy', 'h=1'),
  ('round_robin', 'h=1'),
  ('multiplicative_weights', 'h=1'),
  ('multiplicative_weights', 'h=3 ensemble'),
]
_AND_AVERAGE = [*_POLICIES, ('multiplicative_weights', 'h=3 average')]

# Accuracies in percent, by data and number of random starts, then by policy and
# network.
ACCURACIES = {
  ('cifar10', 1): _parse(
    """
    pixel_linf 36.03  6.69  29.99  1.49  35.70  6.36  39.13  1.74  40.52  1.28
    pixel_l2   69.03  1.58  71.92  0.36  69.51  2.21  71.27  0.22  71.41  0.24
    pixel_l1   45.84  2.85  53.45  0.70  44.22  4.79  46.90  1.46  48.14  0.99
    dct_linf   44.72  8.60  45.63  1.75  39.44  6.76  42.27  2.77  43.95  2.05
    dct_l2     68.99  1.58  72.01  0.28  69.66  2.21  71.24  0.12  71.38  0.20
    dct_l1     37.51  6.78  41.44  0.82  39.62  5.71  42.96  1.12  44.49  0.58
    min        34.62  5.60  29.99  1.49  35.70  6.36  39.13  1.74  40.52  1.28
    union      31.95  4.55  29.70  1.42  33.17  5.95  36.18  1.89  37.76  1.30
    natural    78.56  1.46  81.80  0.38  79.64  0.51  80.66  0.89  80.46  0.81
    """,
    _AND_AVERAGE,
  ),
  ('cifar10', 20): _parse(
    """
    pixel_linf 34.16  6.57  28.28  1.53  34.01  6.38  37.24  1.89
    pixel_l2   64.74  1.73  67.33  0.27  64.97  3.03  66.94  0.28
    pixel_l1   45.26  3.11  53.08  0.72  43.46  4.99  46.25  1.44
    dct_linf   42.64  9.02  43.62  1.74  37.17  6.92  39.93  3.01
    dct_l2     64.66  1.71  67.26  0.38  65.03  2.88  66.98  0.30
    dct_l1     37.07  6.84  41.01  0.81  39.16  5.86  42.52  1.17
    min        32.50  5.31  28.28  1.53  34.01  6.38  37.24  1.89
    union      30.29  4.24  28.07  1.48  31.61  6.07  34.63  2.02
    natural    78.56  1.46  81.80  0.38  79.64  0.51  80.66  0.89
    """,
    _POLICIES,
  ),
  ('mnist', 1): _parse(
    """
    pixel_linf 63.12 19.50  64.40 25.12  67.73 14.00  66.56 13.45  66.61 13.77
    pixel_l2   22.51 17.66  10.23  8.40  71.23  2.68  71.77  4.25  71.89  3.79
    pixel_l1   64.33 30.73  43.14 23.57  73.20 10.54  73.66  9.47  73.38  9.45
    dct_linf   61.53 21.45  59.47 32.83  60.65 10.60  60.32 11.34  59.87 11.32
    dct_l2     25.80 18.82  12.28 12.16  84.58  2.52  84.46  4.18  84.34  4.13
    dct_l1     66.00 31.83  38.23 21.47  72.39  8.43  73.13  7.33  73.08  7.38
    min        22.13 17.17   9.76  8.69  57.64  7.83  57.57  8.46  57.23  8.51
    union      12.32  9.80   3.72  4.96  35.30  4.48  35.87  6.69  35.54  6.69
    natural    77.16 37.64  60.93 32.31  91.00 10.50  91.43  9.61  91.44  9.62
    """,
    _AND_AVERAGE,
  ),
  ('mnist', 20): _parse(
    """
    pixel_linf 53.50 24.05  59.60 24.55  60.88 17.00  60.01 16.61
    pixel_l2    7.50  4.48   6.04  4.27  63.32  8.25  63.47  7.72
    pixel_l1   63.60 30.36  41.98 22.87  72.23 10.54  72.51  9.68
    dct_linf   53.80 24.53  53.24 22.41  55.29 12.16  54.81 13.09
    dct_l2      9.18  5.19   5.90  5.71  79.97  5.92  79.50  6.50
    dct_l1     65.45 31.95  36.81 21.10  71.74  8.49  72.51  7.33
    min         7.31  4.38   5.19  4.72  52.53 11.31  53.29 12.73
    union       3.37  3.10   1.97  3.03  27.65  7.06  28.09  9.38
    natural    77.16 37.64  60.93 32.31  91.00 10.50  91.43  9.61
    """,
    _POLICIES,
  ),
}

# Table "tradeoff": networks trained against one threat.
TRADEOFF = _parse(
  """
    pixel_linf 44.02 1.02  11.80 0.68
    dct_linf   27.30 1.44  51.92 0.43
    natural    80.24 0.40  74.92 0.61
  """,
  [('single pixel_linf', 'h=1'), ('single dct_linf', 'h=1')],
)
ACCURACIES['cifar10', 1] |= TRADEOFF

# Maini, Wong & Kolter, "Adversarial Robustness Against the Union of Multiple
# Perturbation Models" (2020), MNIST, pixel linf 0.3, l2 2, l1 10: their network
# and their attacks, ten restarts on the first 1,000 test images.
MAINI = {
  method: dict(zip(('natural', *_PIXEL, 'union'), figures, strict=True))
  for method, figures in {
    'msd': (98.3, 62.7, 67.9, 65.0, 58.4),
    'max': (98.6, 51.0, 61.9, 52.6, 42.1),
    'avg': (99.1, 65.2, 60.1, 39.2, 34.9),
  }.items()
}

# Training time in hours, by data and policy.
HOURS = {
  'mnist': {
    'single pixel_linf': 2.25,
    'single dct_linf': 2.09,
    'round_robin': 3.36,
    'greedy': 2.67,
    'multiplicative_weights': 2.90,
  },
  'cifar10': {
    'single pixel_linf': 7.66,
    'single dct_linf': 7.06,
    'round_robin': 10.61,
    'greedy': 8.70,
    'multiplicative_weights': 9.51,
  },
}
