"""The exception for errors that the user can fix."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
  """An error that says what is wrong, which field and value, and what to do.

  The programs print its message without a traceback and exit with code 1.
  """


def check_choice(field: str, value: str, choices: Iterable[str]) -> None:
  """Raises a UserError that suggests the nearest choice if there is no match.

  >>> check_choice('method', 'gredy', ['greedy', 'single'])
  Traceback (most recent call last):
  ...
  mwrobust.errors.UserError: method = 'gredy' is not known. Did you mean
  'greedy'? Choose one of: greedy, single.
  """
  choices = list(choices)
  if value not in choices:
    raise UserError(
      f'{field} = {value!r} is not known.{did_you_mean(value, choices)} '
      f'Choose one of: {", ".join(choices)}.'
    )


def did_you_mean(value: str, choices: Iterable[str]) -> str:
  """Returns a question that suggests the nearest choice, or ''.

  >>> did_you_mean('Sgd', ['adam', 'sgd'])
  " Did you mean 'sgd'?"
  """
  by_lower = {choice.lower(): choice for choice in choices}
  close = difflib.get_close_matches(str(value).lower(), by_lower, n=1)
  return f' Did you mean {by_lower[close[0]]!r}?' if close else ''
