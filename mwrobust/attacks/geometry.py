"""The geometry of a threat: where the iterates of an attack may be.

An iterate is the vector `delta = z - R(x)`. Everything here is written for one
example; the attacks vmap it.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mwrobust.attacks import norms
from mwrobust.attacks.spaces import PIXEL, Space

Array = jax.Array

_EDGE = 1e-6  # A pixel this close to 0 or 1 counts as at the edge.
_ROUNDS = 10  # Dykstra's rounds. More rounds gain nothing on linear models.


class Domain(NamedTuple):
  """The bounds of the perturbations of one image.

  Attributes:
    centre: the image's coefficients R(x), a vector.
    low: the lowest delta of each coordinate; -inf without bounds.
    high: the highest delta of each coordinate; inf without bounds.
  """

  centre: Array
  low: Array
  high: Array


@dataclasses.dataclass(frozen=True)
class Map:
  """A space and its clip rule, between an image and a vector of coefficients.

  Attributes:
    space: the map R.
    clip: see `Threat`.
    shape: the shape of the coefficients.
  """

  space: Space
  clip: str
  shape: tuple[int, ...]

  def enter(self, image: Array) -> Domain:
    """Returns the domain around an image."""
    centre = self.space.forward(image).ravel()
    if self.space is PIXEL and self.clip != 'end':
      return Domain(centre, -centre, 1 - centre)
    unbounded = jnp.full_like(centre, jnp.inf)
    return Domain(centre, -unbounded, unbounded)

  def place(self, domain: Domain, delta: Array) -> tuple[Array, Array]:
    """Returns R^-1(R(x) + delta), and the image shown to the network."""
    placed = self._inverse(domain.centre + delta)
    return placed, placed if self.clip == 'end' else jnp.clip(placed, 0, 1)

  def pull_back(
    self, domain: Domain, delta: Array, placed: Array, gradient: Array
  ) -> Array:
    """Turns a gradient with respect to the image into one for delta.

    Pixels that are clipped are left out, as are those at an edge that would
    move over it. In the pixel space the bounds of the domain do this instead.
    """
    if self.clip == 'inside' and self.space is not PIXEL:
      too_low = placed <= jnp.where(gradient < 0, _EDGE, -_EDGE)
      too_high = placed >= jnp.where(gradient > 0, 1 - _EDGE, 1 + _EDGE)
      gradient = jnp.where(too_low | too_high, 0, gradient)
    _, pull_back = jax.vjp(self._inverse, domain.centre + delta)
    return pull_back(gradient)[0]

  def _inverse(self, vector: Array) -> Array:
    return self.space.inverse(vector.reshape(self.shape))


@dataclasses.dataclass(frozen=True)
class Ball:
  """The ball of a norm, within the bounds of the domain."""

  norm: norms.Norm

  def random_start(self, noise: Array, eps: Array) -> Array:
    """Returns a uniform point of the ball before it is settled or projected."""
    return self.norm.random_start(noise, eps)

  def ascend(
    self, delta: Array, gradient: Array, domain: Domain, keep: Array
  ) -> Array:
    """Returns the step of length one that climbs; see `norms.Norm`."""
    room = jnp.where(gradient > 0, domain.high - delta, delta - domain.low)
    return self.norm.ascend(gradient, room > _EDGE, keep)

  def project(self, delta: Array, domain: Domain, eps: Array) -> Array:
    """Returns the nearest point of the ball and the bounds."""
    return self.norm.project(delta, domain.low, domain.high, eps)

  def project_for_momentum(
    self, delta: Array, domain: Domain, eps: Array
  ) -> Array:
    """Projects a step before momentum is added; skipped for l1, without it."""
    if self.norm is norms.L1:
      return delta
    return self.project(delta, domain, eps)

  @staticmethod
  def settle(delta: Array, domain: Domain, eps: Array) -> Array:
    """Clips a point of the ball to the bounds, which keeps it in the ball."""
    del eps
    return jnp.clip(delta, domain.low, domain.high)


@dataclasses.dataclass(frozen=True)
class StrictBall(Ball):
  """The ball and the images in [0, 1], in an orthonormal space."""

  map: Map

  def ascend(
    self, delta: Array, gradient: Array, domain: Domain, keep: Array
  ) -> Array:
    """Returns a step along the gradient, as long as the ball's steepest step.

    The steepest step itself runs into the box. The gradient, projected, climbs
    wherever both ball and box leave room.
    """
    steepest = super().ascend(delta, gradient, domain, keep)
    return norms.L2.length(steepest) * norms.L2.ascend(gradient, True, keep)

  def project(self, delta: Array, domain: Domain, eps: Array) -> Array:
    """Projects onto ball and box with Dykstra's algorithm.

    If the point is still outside the ball after a few rounds, it is shrunk
    towards the image, which keeps it in the box: both sets are convex and
    contain the image.
    """

    def alternate(_, state):
      delta, ball_rest, box_rest = state
      in_ball = super(StrictBall, self).project(delta + ball_rest, domain, eps)
      ball_rest += delta - in_ball
      _, image = self.map.place(domain, in_ball + box_rest)
      in_box = self.map.enter(image).centre - domain.centre
      return in_box, ball_rest, box_rest + in_ball - in_box

    state = delta, jnp.zeros_like(delta), jnp.zeros_like(delta)
    delta, _, _ = lax.fori_loop(0, _ROUNDS, alternate, state)
    length = self.norm.length(delta)
    return jnp.where(length > eps, eps / length, 1) * delta

  def settle(self, delta: Array, domain: Domain, eps: Array) -> Array:
    """Projects, because a clip to [0, 1] may leave the ball."""
    return self.project(delta, domain, eps)


class Geometry(NamedTuple):
  """The geometry of a threat.

  Attributes:
    map: the map between images and vectors.
    ball: the ball that contains the vectors.
  """

  map: Map
  ball: Ball


def make_geometry(
  space: Space, norm: str, clip: str, shape: tuple[int, ...]
) -> Geometry:
  """Makes the geometry of a threat for coefficients of this shape."""
  the_map = Map(space, clip, shape)
  if clip == 'strict' and space is not PIXEL:
    return Geometry(the_map, StrictBall(norms.NORMS[norm], the_map))
  return Geometry(the_map, Ball(norms.NORMS[norm]))


class Choice:
  """Behaves like one of many maps or balls, selected by a traced index.

  Under vmap the index stays a scalar, so only the selected one is computed.
  """

  def __init__(self, options: list, index: Array):
    self._options, self._index = options, index

  def __getattr__(self, name: str):
    methods = [getattr(option, name) for option in self._options]
    if len(set(methods)) == 1:
      return methods[0]
    return functools.partial(lax.switch, self._index, methods)
