"""Square: random search with windows, without gradients.

Andriushchenko et al., "Square Attack" (2020). In every query each example draws
a window of its coefficients, perturbs it, and keeps the result if the margin
falls. Windows are drawn for each example, so that its result does not depend on
the batch, and they reach every row and column. For l1 every other query moves
the mass of one coefficient to another, which finds far more than windows alone.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mwrobust.attacks import losses, norms
from mwrobust.attacks.checks import check_count
from mwrobust.attacks.problem import Best, Problem, Tried, better, judge

Array = jax.Array

# The share of the coefficients that the first window covers.
_SHARE = 0.8
# The share is halved after each of these queries.
_HALVES = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
# The number of windows along a side at the start, for l2 and l1.
_TILES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Square:
  """The Square attack; made by `square`.

  Attributes:
    queries: the number of forward passes of a try.
    restarts: the number of random starts.
  """

  queries: int
  restarts: int = 1
  targets = 0  # It aims at no class.

  def __post_init__(self):
    check_count('queries', self.queries)
    check_count('restarts', self.restarts)

  @property
  def tries(self) -> int:
    """The number of runs: one from each start."""
    return self.restarts

  @property
  def stops_early(self) -> bool:
    """Whether it skips examples that are already fooled; always True."""
    return True

  def prepare(self, problem: Problem, eps: float, norm: norms.Norm):
    """Makes `attempt(number, tried) -> tried`."""
    return _prepare(self, problem, eps, norm)


def square(queries: int = 5000, *, restarts: int = 1) -> Square:
  """Returns the Square attack; see `Square` for the arguments."""
  return Square(queries=queries, restarts=restarts)


class _Search(NamedTuple):
  """The state of a search: the number of queries and the best result so far."""

  query: Array
  best: Best


def _prepare(attack: Square, problem: Problem, eps: float, norm: norms.Norm):
  radius = problem.scale * eps
  grid = _Grid.of(problem.geometry.map.shape)
  windows = _Linf(grid) if norm is norms.LINF else _Mass(grid, norm)
  sides = jnp.asarray(_sides(attack.queries, grid, windows.smallest))
  logits_fn = problem.constant(problem.logits)
  ball = problem.geometry.ball

  def ask(delta: Array) -> Best:
    logits = logits_fn(problem.final_images(delta))
    margin = losses.margin(logits, problem.labels)
    return judge(delta, margin, logits, problem.labels)

  def attempt(number, tried):
    keys = problem.keys(number)

    def draw(query, count):
      return jax.vmap(
        lambda key: jax.random.uniform(jax.random.fold_in(key, query), (count,))
      )(keys)

    def start(random, domain):
      delta = grid.flatten(windows.start(random, radius))
      return ball.project(delta, domain, radius)

    def propose(query, random, delta, domain):
      now, low, high = map(grid.unflatten, (delta, domain.low, domain.high))
      side = sides[query]
      new = windows.propose(query, random, now, side, radius, low, high)
      return ball.settle(grid.flatten(new), domain, radius)

    first = jax.vmap(start)(draw(0, windows.start_draws), problem.domain)
    found = ask(first)

    def advance(search: _Search) -> _Search:
      random = draw(search.query, windows.draws)
      new = jax.vmap(propose, in_axes=(None, 0, 0, 0))(
        search.query, random, search.best.delta, problem.domain
      )
      asked = ask(new)
      lower = better(search.best, asked, ~search.best.fooled)
      return _Search(search.query + 1, lower)

    def goes_on(search: _Search) -> Array:
      fooled = search.best.fooled | tried.best.fooled
      return (search.query < attack.queries) & ~jnp.all(fooled)

    search = lax.while_loop(goes_on, advance, _Search(jnp.int32(1), found))
    best = better(tried.best, search.best, ~tried.best.fooled)
    return Tried(best, tried.stuck, tried.spent.plus(forwards=search.query))

  return attempt


def _sides(queries: int, grid: '_Grid', smallest: int) -> np.ndarray:
  """Returns the height and width of the window of each query."""
  past = np.arange(queries)[:, None] > np.array(_HALVES)
  area = _SHARE * 0.5 ** past.sum(axis=1) * grid.height * grid.width
  side = np.maximum(np.round(np.sqrt(area)), smallest)
  if smallest > 1:
    side += side % 2 == 0  # An odd window has a centre.
  limits = np.array([grid.height, grid.width])
  return np.minimum(side[:, None], limits).astype(np.int32)


class _Grid(NamedTuple):
  """The coefficients as [height, width, channels], padded if necessary."""

  height: int
  width: int
  channels: int
  size: int

  @classmethod
  def of(cls, shape: tuple[int, ...]) -> '_Grid':
    size = math.prod(shape)
    if len(shape) == 3:
      return cls(*shape, size)
    side = math.ceil(math.sqrt(size))
    return cls(math.ceil(size / side), side, 1, size)

  def unflatten(self, vector: Array) -> Array:
    padding = math.prod(self[:3]) - self.size
    return jnp.pad(vector, (0, padding)).reshape(self[:3])

  def flatten(self, values: Array) -> Array:
    return values.ravel()[: self.size]

  def window(self, corner: Array, side: Array) -> tuple[Array, Array]:
    """Returns the offset of each row and column from the window's corner.

    Args:
      corner: two uniform numbers in [0, 1).
      side: the window's height and width.
    """
    limits = jnp.array([self.height, self.width])
    start = jnp.floor(corner * (limits - side + 1)).astype(jnp.int32)
    rows = jnp.arange(self.height) - start[0]
    columns = jnp.arange(self.width) - start[1]
    return rows[:, None, None], columns[None, :, None]

  def at(self, row: Array, column: Array) -> Array:
    """Returns a mask of the coefficient in this row and column."""
    rows = jnp.arange(self.height) == row
    columns = jnp.arange(self.width) == column
    return (rows[:, None] & columns[None, :])[..., None]


def _draw(mass: Array, random: Array) -> Array:
  """Draws an index with a probability proportional to its mass."""
  until = jnp.cumsum(mass)
  return jnp.minimum(jnp.sum(until < random * until[-1]), len(mass) - 1)


def _inside(rows: Array, columns: Array, side: Array) -> Array:
  in_rows = (rows >= 0) & (rows < side[0])
  return in_rows & (columns >= 0) & (columns < side[1])


def _signs(random: Array) -> Array:
  return jnp.where(random < 0.5, -1.0, 1.0)


class _Linf:
  """Proposes windows filled with +eps or -eps, for linf."""

  smallest = 1  # The smallest side of a window.

  def __init__(self, grid: _Grid):
    self.grid = grid
    self.start_draws = grid.width * grid.channels
    self.draws = 2 + grid.channels

  def start(self, random: Array, eps: Array) -> Array:
    """Returns vertical stripes."""
    stripes = _signs(random).reshape(1, self.grid.width, self.grid.channels)
    return eps * jnp.broadcast_to(stripes, self.grid[:3])

  def propose(
    self,
    query: Array,
    random: Array,
    delta: Array,
    side: Array,
    eps: Array,
    low: Array,
    high: Array,
  ) -> Array:
    """Fills a window with one sign for each channel.

    If that would change nothing, it uses the opposite signs.
    """
    del query
    corner, signs = random[:2], _signs(random[2:]).reshape(1, 1, -1)
    inside = _inside(*self.grid.window(corner, side), side)
    change = jnp.clip(eps * signs, low, high) - delta
    changes = jnp.any(inside & (jnp.abs(change) > 1e-6 * eps))
    return jnp.where(inside, jnp.where(changes, 1, -1) * eps * signs, delta)


class _Mass:
  """Proposes to move mass from one window to another, for l2 and l1."""

  smallest = 3  # Smaller windows have hardly any mass to move.

  def __init__(self, grid: _Grid, norm: norms.Norm):
    self.grid = grid
    self.power = 2.0 if norm is norms.L2 else 1.0
    self.tile = max(1, min(grid.height, grid.width) // _TILES)
    rows, columns = (
      math.ceil(side / self.tile) for side in (grid.height, grid.width)
    )
    self.start_draws = rows * columns * grid.channels
    self.draws = 6 + grid.channels

  def mass(self, delta: Array) -> Array:
    return norms.total(jnp.abs(delta.ravel()) ** self.power)

  def of_mass(self, delta: Array, mass: Array) -> Array:
    """Returns delta, scaled to the given mass."""
    ratio = mass / jnp.maximum(self.mass(delta), 1e-30)
    return delta * ratio ** (1 / self.power)

  def bump(
    self, rows: Array, columns: Array, side: Array, axis: Array, rim: Array
  ):
    """Returns two hills of opposite signs, minus the height of the rim.

    One is below the other or beside it.
    """
    down, by_row = self.hills(rows, side[0], axis)
    right, by_column = self.hills(columns, side[1], ~axis)
    return down * right * (jnp.minimum(by_row, by_column) - rim)

  def hills(self, place: Array, side: Array, double: Array):
    """Returns the signs and heights along one side: one hill, or two.

    A power is expensive, so it is taken along the sides and not in the plane.
    """
    second = double & (place >= side / 2)
    middle = jnp.where(second, 0.75, jnp.where(double, 0.25, 0.5))
    away = jnp.abs(place - jnp.floor(middle * side))
    height = 1 / (0.608 + away) if self.power == 2 else (1 + away) ** -3.6
    return jnp.where(second, -1, 1), height

  def start(self, random: Array, eps: Array) -> Array:
    """Returns a grid of bumps, far outside the ball.

    Their projection onto it is sparse with l1.
    """
    tile = self.tile
    rows = jnp.arange(self.grid.height)[:, None, None]
    columns = jnp.arange(self.grid.width)[None, :, None]
    side = jnp.array([tile, tile])
    bumps = self.bump(rows % tile, columns % tile, side, jnp.bool_(True), 0.0)
    high = math.ceil(self.grid.height / tile)
    signs = _signs(random).reshape(high, -1, self.grid.channels)
    signs = jnp.repeat(jnp.repeat(signs, tile, 0), tile, 1)
    signs = signs[: self.grid.height, : self.grid.width]
    return self.of_mass(bumps * signs, (_TILES * eps) ** self.power)

  def propose(
    self,
    query: Array,
    random: Array,
    delta: Array,
    side: Array,
    eps: Array,
    low: Array,
    high: Array,
  ) -> Array:
    """Moves mass: from window to window, or from one coefficient to another.

    Mass that the bounds cut off is redistributed as well.
    """
    unused = jnp.maximum(eps**self.power - self.mass(delta), 0)
    if self.power == 2:
      return self.move_window(random, delta, side, unused)
    return lax.cond(
      query % 2 == 0,
      lambda: self.move_window(random, delta, side, unused),
      lambda: self.move_spike(random, delta, unused, low, high),
    )

  def move_spike(
    self,
    random: Array,
    delta: Array,
    unused: Array,
    low: Array,
    high: Array,
  ) -> Array:
    """Moves one coefficient's mass to another: to one channel, or to all.

    Coefficients with more mass are chosen more often. The sign at the target is
    drawn in proportion to the room in each direction.
    """
    channels = self.grid.channels
    mass = jnp.sum(jnp.abs(delta), axis=2)
    row = _draw(jnp.sum(mass, axis=1), random[0])
    column = _draw(jax.nn.one_hot(row, self.grid.height) @ mass, random[1])
    source = self.grid.at(row, column)
    target = self.grid.at(
      jnp.floor(random[2] * self.grid.height),
      jnp.floor(random[3] * self.grid.width),
    )
    chosen = jnp.floor(random[5] * (channels + 1))  # The last means all.
    chosen = (jnp.arange(channels) == chosen) | (chosen == channels)
    freed = self.mass(jnp.where(source | target, delta, 0))
    share = (freed + unused) / jnp.sum(chosen)
    share = jnp.where(target & chosen.reshape(1, 1, -1), share, 0)
    up, down = (jnp.minimum(share, room) for room in (high, -low))
    up, down = norms.total(up.ravel()), norms.total(down.ravel())
    sign = jnp.where(random[4] * (up + down) < up, 1.0, -1.0)
    return jnp.where(source | target, sign * share, delta)

  def move_window(
    self, random: Array, delta: Array, side: Array, unused: Array
  ) -> Array:
    """Moves the mass of one window to another, on top of a new bump.

    Under l2 every other bump falls to 0 at the rim of its window, as the
    original's do: such a peak crosses the steps of a network that rounds its
    input. The others, which are flatter, climb faster on smooth networks.
    """
    corners, axis, signs = random[1:5], random[5] < 0.5, _signs(random[6:])
    peaked = (random[0] < 0.5) & (self.power == 2)
    here, there = (self.grid.window(corners[i : i + 2], side) for i in (0, 2))
    in_here, in_there = (_inside(*w, side) for w in (here, there))
    old = jnp.where(in_here, delta, 0)
    freed = self.mass(jnp.where(in_here | in_there, delta, 0))
    rim = jnp.where(peaked, 1 / (1.608 + jnp.max(side) // 2), 0)
    bump = self.bump(*here, side, axis, rim) * signs.reshape(1, 1, -1)
    bump = jnp.where(in_here, bump, 0)
    new = self.of_mass(old, 1.0) + self.of_mass(bump, 1.0)
    new = self.of_mass(new, freed + unused)
    return jnp.where(in_here, new, jnp.where(in_there, 0, delta))
