"""What the adversary may do."""

import dataclasses
from typing import Any

from mwrobust.attacks import norms, spaces
from mwrobust.attacks.checks import check_choice, check_radius, require

CLIPS = ('inside', 'strict', 'end')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Threat:
  """One set of adversarial images; how they are searched for is the attack's.

  The image x may become any `clip(R^-1(z), 0, 1)` with `||z - R(x)|| <= eps`.

  Attributes:
    space: the map R: a name (see `mwrobust.attacks.spaces`) or a `Space`.
    norm: what measures the perturbation: `'linf'`, `'l2'` or `'l1'`.
    eps: the radius of the ball.
    clip: `'inside'`: attacks climb the loss of the clipped image, which is what
      the network is judged on. In pixels every iterate is in the ball and in
      [0, 1]. `'strict'`: R^-1(z) itself must be in [0, 1]; for orthonormal
      spaces. `'end'`: as the code of the paper's authors does it, `pgd` and
      `slide` climb the loss of images outside of [0, 1], where a network can
      misdirect them, and clip the last one. The set is that of `'inside'`, and
      all other attacks treat it so.
    name: what tables and files call it; such as `'dct_l1'` if not given.
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
    check_choice('clip', self.clip, CLIPS)
    require(
      self.clip != 'strict' or space.orthonormal,
      f"clip='strict' needs an orthonormal space, and {space.name!r} is not "
      "one: use clip='inside', or say Space(..., orthonormal=True) if it is.",
    )
    require(
      isinstance(self.name, str),
      f'name={self.name!r} is not allowed: must be a string.',
    )
    if not self.name:
      object.__setattr__(self, 'name', f'{space.name}_{self.norm}')

  def to_dict(self) -> dict[str, Any]:
    """Returns what JSON can hold: the space is given by its name."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    return fields | {'space': spaces.get(self.space).name}


def six_threats(
  linf: float, l2: float, l1: float, clip: str = 'inside'
) -> tuple[Threat, ...]:
  """Returns the paper's six: pixel linf, l2, l1, then dct linf, l2, l1.

  Args:
    linf: the linf radius, the same in both spaces, as the others are.
    l2: the l2 radius.
    l1: the l1 radius.
    clip: see `Threat`.
  """
  return tuple(
    Threat(space=space, norm=norm, eps=eps, clip=clip)
    for space in ('pixel', 'dct')
    for norm, eps in (('linf', linf), ('l2', l2), ('l1', l1))
  )
