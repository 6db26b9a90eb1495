"""The one exception that means: the user can mend this."""

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
  mwrobust.errors.UserError: method = 'gredy' does not exist. Did you mean
  'greedy'? Choose one of: greedy, single.
  """
  choices = list(choices)
  if value in choices:
    return
  by_lower = {choice.lower(): choice for choice in choices}
  close = difflib.get_close_matches(str(value).lower(), by_lower, n=1)
  hint = f' Did you mean {by_lower[close[0]]!r}?' if close else ''
  raise UserError(
    f'{field} = {value!r} does not exist.{hint} '
    f'Choose one of: {", ".join(choices)}.'
  )
