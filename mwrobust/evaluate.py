r"""How robust is your network? Evaluates any JAX function and writes a page.

  python -m mwrobust.evaluate --network=my_package.nets:logits_fn \
    --data=test.npz --linf=8/255 --l2=0.5 --l1=12 --spaces=pixel,dct \
    --output=my_network

`logits_fn` takes float32 images [B, H, W, C] in [0, 1] and returns the logits
[B, K]; a pair `(logits_fn, params)` is called as `logits_fn(params, images)`.
test.npz holds the arrays `images` and `labels`, or `x_test` and `y_test`, or
`x` and `y`. Run the same command again to resume an interrupted evaluation.
"""

import functools
import os
from typing import Any

import numpy as np
from absl import flags

from mwrobust import attacks, command_line, evaluation, reporting
from mwrobust.attacks import spaces
from mwrobust.errors import UserError, check_choice
from mwrobust.importing import import_object
from mwrobust.runtime import devices
from mwrobust.runtime.archives import read_npz
from mwrobust.runtime.signals import stop_signals

_ARRAYS = (('images', 'labels'), ('x_test', 'y_test'), ('x', 'y'))


def define_flags() -> None:
  """Defines the flags of this program; programs that import it have others."""
  flags.DEFINE_string('network', None, 'Your function, module:name.')
  flags.DEFINE_string('data', None, 'An .npz file with images and labels.')
  for norm in ('linf', 'l2', 'l1'):
    flags.DEFINE(
      command_line.NumberParser(),
      norm,
      None,
      f'The {norm} radius, such as 0.3 or 8/255; none by default.',
    )
  flags.DEFINE_list(
    'spaces', ['pixel'], f'Spaces to attack in: {", ".join(spaces.SPACES)}.'
  )
  flags.DEFINE_enum(
    'protocol',
    'standard',
    list(evaluation.PROTOCOLS),
    'How hard the attacks try; see mwrobust/evaluation/protocols.py.',
  )
  for name, default, lowest, text in (
    ('examples', 0, 0, 'Use only the first N images; 0 for all.'),
    (
      'curve_examples',
      100,
      0,
      'Images for the accuracy at growing radii; 0 to skip it.',
    ),
    ('batch_size', 250, 1, 'The most images to attack at once.'),
    ('seed', 0, 0, 'The seed of everything random.'),
  ):
    flags.DEFINE_integer(name, default, text, lower_bound=lowest)
  flags.DEFINE_string('output', None, 'Folder for the outcomes and the page.')


def main(argv: list[str]) -> None:
  """Evaluates the network, writes the page and prints the table."""
  command_line.no_arguments(argv)
  given = flags.FLAGS
  if not (given.network and given.data and given.output):
    raise UserError(
      'Give --network=module:function, --data=FILE.npz and --output=FOLDER.'
    )
  devices.use_all_cores()
  threats = make_threats(
    {norm: given[norm].value for norm in ('linf', 'l2', 'l1')}, given.spaces
  )
  images, labels = load_examples(given.data, given.examples)
  logits_fn, params = load_network(given.network)
  with stop_signals() as stop:
    run = functools.partial(
      evaluation.evaluate,
      logits_fn,
      threats=threats,
      params=params,
      batch_size=given.batch_size,
      seed=given.seed,
      on_batch=lambda outcomes: stop.check(),
      about={'network': given.network},
    )
    count = min(given.curve_examples, len(labels))
    classes = max(2, len(np.unique(labels)))
    outcomes = run(
      images,
      labels,
      protocol=given.protocol,
      folder=given.output,
      then=count * evaluation.cost(threats, 'fast', classes, evaluation.RADII),
    )
    curve = None
    if count:
      print('Accuracy at growing radii:', flush=True)
      curve = run(
        images[:count],
        labels[:count],
        protocol='fast',
        radii=evaluation.RADII,
        folder=os.path.join(given.output, 'curve'),
        pictures=0,
      )
  print(f'\n{outcomes}\n')
  reporting.write(outcomes, given.output, curve)


def make_threats(
  radii: dict[str, float | None], names: list[str]
) -> list[attacks.Threat]:
  """Returns a threat for each space and each norm that has a radius."""
  radii = {norm: eps for norm, eps in radii.items() if eps is not None}
  if not radii:
    raise UserError('Give at least one radius: --linf=8/255, --l2, --l1.')
  if not names:
    raise UserError(
      f'--spaces is empty: name some of {", ".join(spaces.SPACES)}.'
    )
  for name in names:
    check_choice('--spaces', name, spaces.SPACES)
    if names.count(name) > 1:
      raise UserError(
        f'--spaces={",".join(names)} has {name} twice: remove one.'
      )
  return [
    _make_threat(name, norm, eps)
    for name in names
    for norm, eps in radii.items()
  ]


def _make_threat(space: str, norm: str, eps: float) -> attacks.Threat:
  try:
    return attacks.Threat(space=space, norm=norm, eps=eps)
  except ValueError as error:
    raise UserError(f'--{norm}={eps}: {error}') from error


def load_examples(path: str, count: int) -> tuple[np.ndarray, np.ndarray]:
  """Reads the images and labels of an .npz file."""
  arrays = read_npz(path, _ARRAYS, f'--data={path}')
  images, labels = map(np.atleast_1d, arrays)
  if count > len(labels):
    raise UserError(
      f'--examples={count} is more than the {len(labels)} images in {path}.'
    )
  return (images[:count], labels[:count]) if count else (images, labels)


def load_network(text: str) -> tuple[Any, Any]:
  """Returns the function `module:name` and its parameters, or None for them.

  The module may be in the current folder.
  """

  def is_pair(found: Any) -> bool:
    return isinstance(found, tuple) and len(found) == 2 and callable(found[0])

  network = import_object(
    text,
    f'--network={text}',
    'my_package.nets:logits_fn',
    'a function of images, or a pair of a function and its parameters',
    lambda found: callable(found) or is_pair(found),
  )
  return network if is_pair(network) else (network, None)


if __name__ == '__main__':
  define_flags()
  command_line.run(main)
