"""Imports the user's own modules, given as `module:name`."""

import importlib
import os
import sys
from types import ModuleType

from mwrobust.errors import UserError


def import_module_of(
  text: str, field: str, example: str
) -> tuple[ModuleType, str]:
  """Imports the module of `module:name`, also from the current folder.

  Args:
    text: the text that the user gave.
    field: its name in error messages, such as `'--network=nets:f'`.
    example: an example of an allowed text.

  Returns:
    The module and the name.
  """
  module_name, _, name = text.partition(':')
  if not (module_name and name) or module_name.startswith('.'):
    raise UserError(f'{field} must be module:name, such as {example}.')
  folder = os.getcwd()
  sys.path.insert(0, folder)
  try:
    return importlib.import_module(module_name), name
  except Exception as error:  # A module can raise anything.
    raise UserError(
      f'{field}: the module {module_name} cannot be imported '
      f'({type(error).__name__}: {error}). Run from its folder, or install it.'
    ) from error
  finally:
    sys.path.remove(folder)
