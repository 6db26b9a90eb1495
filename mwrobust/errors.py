"""The one exception that means: the user can fix this."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
  """What was wrong, which field and value, and what to do next.

  `mwrobust.main` prints the message without a traceback and exits with 1.
  """


def check_choice(field: str, value: str, choices: Iterable[str]) -> None:
  """Raises a UserError with a near miss if the value is not a choice.

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
  """Returns the question that suggests the nearest choice, '' if none is near.

  >>> did_you_mean('Sgd', ['adam', 'sgd'])
  " Did you mean 'sgd'?"
  """
  by_lower = {choice.lower(): choice for choice in choices}
  close = difflib.get_close_matches(str(value).lower(), by_lower, n=1)
  return f' Did you mean {by_lower[close[0]]!r}?' if close else ''
