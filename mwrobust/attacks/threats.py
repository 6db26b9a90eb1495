"""Threats: what the adversary may do."""

import dataclasses
from typing import Any

from mwrobust.attacks import norms, spaces
from mwrobust.attacks.checks import check_choice, check_radius, require

CLIPS = ('inside', 'strict', 'end')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Threat:
  """A set of adversarial images; an attack says how to search it.

  The image x may become any `clip(R^-1(z), 0, 1)` with `||z - R(x)|| <= eps`.

  Attributes:
    space: the map R: a name (see `mwrobust.attacks.spaces`) or a `Space`.
    norm: the norm of the perturbation: `'linf'`, `'l2'` or `'l1'`.
    eps: the radius of the ball.
    clip: `'inside'`: attacks climb the loss of the clipped image, the one the
      network is judged on. In pixels every iterate is in the ball and in
      [0, 1]. `'strict'`: R^-1(z) itself must be in [0, 1]; for orthonormal
      spaces. `'end'`: `pgd` and `slide` climb the loss of unclipped images and
      clip the last one, as the code of the paper's authors does; outside
      [0, 1] a network can misdirect them. The set is the same as for
      `'inside'`, and all other attacks treat it as such.
    name: the name in tables and files; by default such as `'dct_l1'`.
  """

  space: str | spaces.Space = 'pixel'
  norm: str
  eps: float
  clip: str = 'inside'
  name: str = ''

  def __post_init__(self):
    space = spaces.get(self.space)
    check_choice('norm', self.norm, norms.NORMS)
    check_radius('eps', self.eps)
    object.__setattr__(self, 'eps', float(self.eps))  # Or a NumPy scalar.
    check_choice('clip', self.clip, CLIPS)
    require(
      self.clip != 'strict' or space.orthonormal,
      f"clip='strict' needs an orthonormal space, and {space.name!r} is not "
      "one: use clip='inside', or set Space(..., orthonormal=True) if it is.",
    )
    require(
      isinstance(self.name, str),
      f'name={self.name!r} is not allowed: must be a string.',
    )
    if not self.name:
      object.__setattr__(self, 'name', f'{space.name}_{self.norm}')

  def to_dict(self) -> dict[str, Any]:
    """Returns the fields as JSON can hold them, the space by its name."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    return fields | {'space': spaces.get(self.space).name}


def six_threats(
  linf: float, l2: float, l1: float, clip: str = 'inside'
) -> tuple[Threat, ...]:
  """Returns the paper's six: pixel linf, l2, l1, then dct linf, l2, l1.

  Args:
    linf: the linf radius in both spaces.
    l2: the l2 radius in both spaces.
    l1: the l1 radius in both spaces.
    clip: see `Threat`.
  """
  return tuple(
    Threat(space=space, norm=norm, eps=eps, clip=clip)
    for space in ('pixel', 'dct')
    for norm, eps in (('linf', linf), ('l2', l2), ('l1', l1))
  )
