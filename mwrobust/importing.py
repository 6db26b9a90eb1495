"""Imports the user's own objects, given as `module:name`."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from mwrobust.errors import UserError


def import_object(
  text: str, field: str, example: str, kind: str, fits: Callable[[Any], bool]
) -> Any:
  """Imports `module:name`, also from the current folder.

  Args:
    text: the text that the user gave.
    field: its name in error messages, such as `'--network=nets:f'`.
    example: an example of an allowed text.
    kind: what the object must be, such as `'a function'`.
    fits: returns whether an object is of that kind.
  """
  module_name, _, name = text.partition(':')
  if not (module_name and name) or module_name.startswith('.'):
    raise UserError(f'{field} must be module:name, such as {example}.')
  folder = os.getcwd()
  sys.path.insert(0, folder)
  try:
    module = importlib.import_module(module_name)
  except Exception as error:  # A module can raise anything.
    raise UserError(
      f'{field}: the module {module_name} cannot be imported '
      f'({type(error).__name__}: {error}). Run from its folder, or install it.'
    ) from error
  finally:
    sys.path.remove(folder)
  found = getattr(module, name, None)
  if fits(found):
    return found
  wrong = f'{module_name} has no {name}'
  if hasattr(module, name):
    wrong = f'{name} is {found!r}, not {kind}'
  others = [n for n, x in vars(module).items() if n[0] != '_' and fits(x)]
  raise UserError(f'{field}: {wrong}. It has: {", ".join(others) or "none"}.')
