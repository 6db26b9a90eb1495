"""The attacks: pure functions that any JAX project can import.

A `Threat` says what the adversary may do; `make_attack` gives the function
that does it, to whatever network you have:

>>> import jax, jax.numpy as jnp
>>> from mwrobust import attacks
>>> weights = jnp.linspace(-1, 1, 8 * 8 * 3 * 10).reshape(-1, 10)
>>> def logits_fn(images):  # linen, NNX, Haiku, Equinox, plain: any function
...   return images.reshape(len(images), -1) @ weights
>>> images = jnp.full((4, 8, 8, 3), 0.5)
>>> labels = jnp.array([0, 1, 2, 3])
>>> threat = attacks.Threat(space='dct', norm='l1', eps=7.84, steps=100)
>>> attack = attacks.make_attack(threat)
>>> adversarial = attack(logits_fn, jax.random.key(0), images, labels)
>>> adversarial.shape
(4, 8, 8, 3)

Call it inside `jax.jit`, with the parameters as an argument of the jitted
function, as one calls `jax.grad`:

>>> @jax.jit
... def perturb(weights, key, images, labels):
...   logits_fn = lambda x: x.reshape(len(x), -1) @ weights
...   return attack(logits_fn, key, images, labels)

`make_switch` holds many threats behind one traced index and compiles one
gradient, however many there are:

>>> threats = attacks.six_threats(0.3, 1.0, 5.0, phase='train')
>>> [threat.name for threat in threats]
['pixel_linf', 'pixel_l2', 'pixel_l1', 'dct_linf', 'dct_l2', 'dct_l1']
>>> switch = attacks.make_switch(threats)
>>> index = jnp.int32(3)
>>> switch(logits_fn, index, jax.random.key(0), images, labels).shape
(4, 8, 8, 3)

What holds for all of them: images are float32 [B, H, W, C] in [0, 1], before
and after; normalisation is the network's business. Gradients do not flow
through the result. `ids` (int32 [B]) seeds each example by its own id, so that
what happens to an image does not depend on the batch it is in. `scale`, which
may be traced, multiplies the radius and the step size, as a curriculum does.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mwrobust import convolutions, losses, norms, spaces

Array = jax.Array
Attack = Callable[..., Array]  # From images to adversarial images.
CLIPS = ('end', 'step', 'strict')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Threat:
  """One loss L_i of the paper: who perturbs what, by how much, how hard.

  Attributes:
    space: where the perturbation lives: a name or a `spaces.Space`.
    norm: what measures it: a name or a `norms.Norm`.
    eps: the radius of the ball.
    steps: gradient steps.
    step_size: the length of a step in the norm; 2.5 eps / steps if None.
    percentile: l1 only: a step moves the top (100 - percentile) % coordinates.
    random_start: start at a random point of the ball, or at its centre.
    clip: to [0, 1], once at the `'end'` (the paper's rule: the clip may lead
      out of the ball), or after each `'step'`, the perturbation then being
      re-expressed (usual pixel PGD; pixels at an edge take no part in a step
      over it). `'strict'` ends in the ball and in [0, 1] at once, by
      alternating projections after each step; for spaces that are orthonormal
      maps.
    loss: what the steps climb: `'ce'` or `'margin'`.
  """

  space: str | spaces.Space = 'pixel'
  norm: str | norms.Norm
  eps: float
  steps: int
  step_size: float | None = None
  percentile: float = 99.0
  random_start: bool = True
  clip: str = 'end'
  loss: str = 'ce'

  def __post_init__(self):
    spaces.get(self.space)
    norms.get(self.norm)
    _require(_is_positive(self.eps), 'eps', self.eps, 'a finite number > 0')
    _require(_is_count(self.steps), 'steps', self.steps, 'an integer >= 1')
    if self.step_size is not None:
      allowed = 'a finite number > 0, or None'
      _require(
        _is_positive(self.step_size), 'step_size', self.step_size, allowed
      )
    holds = _is_real(self.percentile) and 0 <= self.percentile < 100
    _require(holds, 'percentile', self.percentile, 'a number in [0, 100)')
    holds = isinstance(self.random_start, bool)
    _require(holds, 'random_start', self.random_start, 'True or False')
    allowed = "'end', 'step' or 'strict'"
    _require(self.clip in CLIPS, 'clip', self.clip, allowed)
    allowed = ' or '.join(map(repr, losses.LOSSES))
    _require(self.loss in list(losses.LOSSES), 'loss', self.loss, allowed)

  @property
  def name(self) -> str:
    """Such as `'dct_l1'`."""
    return f'{spaces.get(self.space).name}_{norms.get(self.norm).name}'


def six_threats(
  eps_linf: float, eps_l2: float, eps_l1: float, phase: str = 'train'
) -> tuple[Threat, ...]:
  """The paper's six: pixel linf, l2, l1, then dct linf, l2, l1.

  Args:
    eps_linf: the linf radius, the same in both spaces, as the others are.
    eps_l2: the l2 radius.
    eps_l1: the l1 radius.
    phase: `'train'`: 10 steps of PGD, 20 of SLIDE with percentile 95;
      `'eval'`: 40, and 100 with percentile 99.
  """
  phases = {'train': (10, 20, 95.0), 'eval': (40, 100, 99.0)}
  _require(phase in phases, 'phase', phase, "'train' or 'eval'")
  pgd, slide, percentile = phases[phase]
  return tuple(
    Threat(space=space, norm=norm, eps=eps, steps=steps, percentile=percentile)
    for space in ('pixel', 'dct')
    for norm, eps, steps in (
      ('linf', eps_linf, pgd),
      ('l2', eps_l2, pgd),
      ('l1', eps_l1, slide),
    )
  )


def make_attack(threat: Threat, restarts: int = 1) -> Attack:
  """Makes `attack(logits_fn, key, images, labels, ids, scale) -> images`.

  Args:
    threat: what the adversary may do.
    restarts: random starts; per example one that fools wins, then the one that
      ends with the highest loss. The first is the one of `restarts=1`, and
      memory does not grow with their number.
  """
  _require(isinstance(threat, Threat), 'threat', threat, 'a Threat')
  _require(_is_count(restarts), 'restarts', restarts, 'an integer >= 1')
  if restarts > 1 and not threat.random_start:
    raise ValueError(
      f'restarts={restarts} is not allowed: without random_start every start '
      'is the same.'
    )
  climb = _make_climb((threat,))
  loss_fn = losses.LOSSES[threat.loss]

  def attack(logits_fn, key, images, labels, ids=None, scale=1.0):
    images, labels, ids, scale = _check(images, labels, ids, scale)
    start_key = functools.partial(jax.random.fold_in, _threefry(key))
    if restarts == 1:
      found = climb(logits_fn, 0, start_key(0), images, labels, ids, scale)
      return found.images

    final_logits = _constant_closure(
      lambda images: _check_logits(logits_fn(images), labels), images
    )

    def keep_worst(restart, worst):
      worst_images, worst_fooled, worst_loss = worst
      key = start_key(restart)
      found = climb(logits_fn, 0, key, images, labels, ids, scale).images
      logits = final_logits(found)
      loss = loss_fn(logits, labels)
      # With three classes or more, one that stands may have a higher loss.
      fooled = (logits.argmax(axis=1) != labels) | jnp.isnan(loss)
      loss = jnp.where(jnp.isnan(loss), jnp.inf, loss)
      higher = (fooled == worst_fooled) & (loss > worst_loss)
      worse = (fooled & ~worst_fooled) | higher
      return (
        jnp.where(worse[:, None, None, None], found, worst_images),
        fooled | worst_fooled,
        jnp.where(worse, loss, worst_loss),
      )

    nothing = jnp.full_like(images[:, 0, 0, 0], -jnp.inf)
    worst = images, jnp.zeros_like(nothing, bool), nothing
    return lax.fori_loop(0, restarts, keep_worst, worst)[0]

  return attack


class Found(NamedTuple):
  """What an attack has found, and how it lies; per example.

  Attributes:
    images: the adversarial images, in [0, 1].
    unclipped: the same before the last clip.
    stuck: bool [B], whether the last gradient was zero in every pixel. Such an
      attack does not move, whatever its loss.
  """

  images: Array
  unclipped: Array
  stuck: Array


def make_switch(
  threats: Sequence[Threat], *, details: bool = False
) -> Callable[..., Array | Found]:
  """Makes `switch(logits_fn, index, key, images, labels, ids, scale, start)`.

  `switch` with index i does what `make_attack(threats[i])` does. The index is
  an int32 scalar, usually traced. Use one index per batch: vmapped over the
  index, every branch would run for every example. `start` says which of the
  random starts of `make_attack(threats[i], restarts)` to take.

  Args:
    threats: at least one.
    details: return all of `Found`, not the images alone.
  """
  threats = (threats,) if isinstance(threats, Threat) else tuple(threats)
  holds = threats and all(isinstance(threat, Threat) for threat in threats)
  _require(holds, 'threats', threats, 'at least one Threat, and only those')
  climb = _make_climb(threats)

  def switch(
    logits_fn, index, key, images, labels, ids=None, scale=1.0, start=0
  ):
    images, labels, ids, scale = _check(images, labels, ids, scale)
    index = _check_index(index, len(threats))
    key = jax.random.fold_in(_threefry(key), start)
    found = climb(logits_fn, index, key, images, labels, ids, scale)
    return found if details else found.images

  return switch


def step_size(threat: Threat) -> float:
  """How far a step goes: 2.5 eps / steps, if the threat does not say."""
  if threat.step_size is None:
    return 2.5 * threat.eps / threat.steps
  return threat.step_size


def distance(threat: Threat, images: Array, perturbed: Array) -> Array:
  """How far the perturbed images are, [B]: in the threat's space and norm."""
  space, norm = spaces.get(threat.space), norms.get(threat.norm)
  return jax.vmap(
    lambda x, z: norm.length(space.forward(z) - space.forward(x))
  )(images, perturbed)


# ------------------------------------------------------------------ one climb

_EDGE = 1e-6  # Of [0, 1]: so near, a pixel is at it.
_ROUNDS = 10  # Of alternating projections. On linear models, more gain nothing.


def _make_climb(threats: tuple[Threat, ...]):
  """Makes the loop that every attack is: gradient, geometry, and again.

  The gradient, which is dear, is there once. Around it the loop switches over
  the spaces and over the norms, which are cheap; radius, step size and steps
  are read from arrays. So compile time and step time are flat in the number of
  threats.
  """
  distinct_losses, loss_column = _distinct(threat.loss for threat in threats)
  loss_fns = [losses.LOSSES[name] for name in distinct_losses]
  data_columns = (
    np.array([threat.steps for threat in threats], np.int32),
    np.array([threat.eps for threat in threats], np.float32),
    np.array([step_size(threat) for threat in threats], np.float32),
    np.array([threat.random_start for threat in threats]),
    np.array([_ROUNDS * _alternates(t) for t in threats], np.int32),
  )
  any_alternates = any(map(_alternates, threats))

  def climb(logits_fn, index, key, images, labels, ids, scale) -> Found:
    maps, map_column, balls, ball_column = _geometries(threats, images)
    columns = map_column, ball_column, loss_column, *data_columns
    map_index, ball_index, loss_index, *data = (
      column[index] if isinstance(index, int) else jnp.asarray(column)[index]
      for column in columns
    )
    steps, eps, step_size, random_start, rounds = data
    eps, step_size = eps * scale, step_size * scale

    def in_space(function, *args):  # For each example, in the threat's space.
      branches = [jax.vmap(functools.partial(function, m)) for m in maps]
      return lax.switch(map_index, branches, *args)

    def in_ball(function, *args):  # The same in the ball of the threat's norm.
      branches = [jax.vmap(functools.partial(function, b)) for b in balls]
      return lax.switch(ball_index, branches, *args)

    def total_loss(images):
      logits = _check_logits(logits_fn(images), labels)
      return jnp.sum(lax.switch(loss_index, loss_fns, logits, labels))

    gradient_fn = _constant_closure(jax.grad(total_loss), images)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, ids)

    # ---- the start: z = R(x) + delta, delta a random point of the ball
    centre = in_space(_Map.forward, images)
    noise = jax.vmap(functools.partial(_noise, size=centre.shape[1]))(keys)
    delta = in_ball(lambda ball, noise: ball.random_start(noise, eps), noise)
    delta = jnp.where(random_start, delta, jnp.zeros_like(centre))

    def place(delta):
      if any_alternates:
        delta = into_ball_and_cube(delta)
      return in_space(_Map.place, centre, delta)

    def into_ball_and_cube(delta):
      """The nearest perturbation that is in the ball and whose image is valid.

      Dykstra's alternating projections; what they leave over is shrunk away:
      both sets are convex, and the image itself is in both.
      """

      def project(_, state):
        delta, ball_rest, cube_rest = state
        inside = in_ball(
          lambda ball, delta: ball.project(delta, eps), delta + ball_rest
        )
        ball_rest += delta - inside
        clipped, _ = in_space(_Map.place, centre, inside + cube_rest)
        return clipped, ball_rest, cube_rest + inside - clipped

      zero = jnp.zeros_like(delta)
      delta = lax.fori_loop(0, rounds, project, (delta, zero, zero))[0]
      length = in_ball(lambda ball, delta: ball.length(delta), delta)
      too_long = (rounds > 0) & (length > eps)
      return jnp.where(too_long, eps / length, 1)[:, None] * delta

    # ---- the steps: up the gradient in the space, back into the ball
    def step(_, state):
      delta, images, _ = state
      gradient = gradient_fn(images)
      stuck = jnp.all(gradient == 0, axis=(1, 2, 3))
      gradient = in_space(_Map.pull_back, centre, delta, gradient)
      delta = in_ball(
        lambda ball, *args: ball.step(*args, eps, step_size), delta, gradient
      )
      return *place(delta), stuck

    start = *place(delta), jnp.zeros_like(images[:, 0, 0, 0], bool)
    _, images, stuck = lax.fori_loop(0, steps, step, start)
    images = lax.stop_gradient(images)
    return Found(jnp.clip(images, 0.0, 1.0), images, stuck)

  return climb


def _distinct(values) -> tuple[list, np.ndarray]:
  """The distinct values, and for each value its place among them."""
  values = list(values)
  distinct = list(dict.fromkeys(values))
  return distinct, np.array([distinct.index(v) for v in values], np.int32)


def _alternates(threat: Threat) -> bool:
  """Whether a clip may lead out of the ball; in pixels it never does."""
  return (
    threat.clip == 'strict' and spaces.get(threat.space) is not spaces.PIXEL
  )


def _noise(key: Array, size: int) -> Array:
  """What random starts are made of: see `norms.Norm.random_start`."""
  above = np.nextafter(np.float32(-1), np.float32(0))
  return jax.random.uniform(key, (size + 2,), jnp.float32, minval=above)


def _threefry(key: Array) -> Array:
  """The key, in the one generator whose streams do not change under vmap."""
  if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    key = jax.random.wrap_key_data(key)
  if str(jax.random.key_impl(key)) == 'threefry2x32':
    return key
  return jax.random.key(jax.random.bits(key), impl='threefry2x32')


# The branches of a switch agree in their shapes, but coefficients may have any
# shape. Between the branches they are vectors, padded to the longest.


@dataclasses.dataclass(frozen=True)
class _Map:
  """A space and its clip rule, between one image and a vector."""

  space: spaces.Space
  clip: str
  shape: tuple[int, ...]
  length: int

  def forward(self, image):
    coefficients = self.space.forward(image).ravel()
    return _pad(coefficients, self.length)

  def inverse(self, vector):
    size = math.prod(self.shape)
    return self.space.inverse(vector[:size].reshape(self.shape))

  def pull_back(self, centre, delta, gradient):
    """The chain rule through R^-1, at R(x) + delta.

    Only the direction matters, so the gradient is rescaled first and nothing
    under- or overflows on the way.
    """
    image, pull_back = jax.vjp(self.inverse, centre + delta)
    if self.clip != 'end' and self.space is spaces.PIXEL:
      # Else a sparse step would push the same few pixels over the edge again
      # and again, only to have them clipped.
      at_edge = jnp.where(gradient < 0, image <= _EDGE, image >= 1 - _EDGE)
      gradient = jnp.where(at_edge, 0, gradient)
    return pull_back(norms.rescale(gradient))[0]

  def place(self, centre, delta):
    """The perturbed image; and the perturbation, which a clip changes."""
    image = self.inverse(centre + delta)
    if self.clip != 'end':
      image = jnp.clip(image, 0.0, 1.0)
      delta = self.forward(image) - centre
    return delta, image


@dataclasses.dataclass(frozen=True)
class _Ball:
  """A norm, on the first `size` entries of a vector of length `padded`."""

  norm: norms.Norm
  percentile: float
  euclidean: bool
  size: int
  padded: int

  def random_start(self, noise, eps):
    delta = self.norm.random_start(noise[: self.size + 2], eps)
    return _pad(delta, self.padded)

  def step(self, delta, gradient, eps, step_size):
    delta, gradient = delta[: self.size], gradient[: self.size]
    step = step_size * self.norm.ascend(gradient, self.percentile)
    if self.euclidean:
      # The steepest step of the ball alone runs into the cube. As far along
      # the gradient itself, projected, climbs wherever both leave room.
      step = norms.L2.length(step) * norms.L2.ascend(gradient, 0.0)
    return _pad(self.norm.project(delta + step, eps), self.padded)

  def project(self, delta, eps):
    return _pad(self.norm.project(delta[: self.size], eps), self.padded)

  def length(self, delta):
    return self.norm.length(delta[: self.size])


def _geometries(threats: tuple[Threat, ...], images: Array):
  """The distinct maps and balls, and which of them each threat has."""
  image = jax.ShapeDtypeStruct(images.shape[1:], images.dtype)
  the_spaces = [spaces.get(threat.space) for threat in threats]
  shapes = [_coefficient_shape(space, image) for space in the_spaces]
  sizes = [math.prod(shape) for shape in shapes]
  maps, map_column = _distinct(
    _Map(space, threat.clip, shape, max(sizes))
    for threat, space, shape in zip(threats, the_spaces, shapes, strict=True)
  )
  balls, ball_column = _distinct(
    _Ball(
      norms.get(threat.norm),
      threat.percentile,
      _alternates(threat),
      size,
      max(sizes),
    )
    for threat, size in zip(threats, sizes, strict=True)
  )
  return maps, map_column, balls, ball_column


def _coefficient_shape(
  space: spaces.Space, image: jax.ShapeDtypeStruct
) -> tuple[int, ...]:
  coefficients = jax.eval_shape(space.forward, image)
  back = jax.eval_shape(space.inverse, coefficients)
  for name, found, holds in (
    ('forward', coefficients, getattr(coefficients, 'dtype', None)),
    ('inverse', back, getattr(back, 'shape', None) == image.shape),
  ):
    if not holds or found.dtype != jnp.float32:
      raise ValueError(
        f'{name} of space {space.name!r} returns {found} for an image '
        f'{image}: must be one float32 array, for inverse of that shape.'
      )
  return coefficients.shape


def _pad(vector: Array, length: int) -> Array:
  return jnp.pad(vector, (0, length - len(vector)))


def _constant_closure(function, images):
  """The function, traced once, with what it closes over held constant.

  An attack inside a loss is then no part of that loss's derivative. Evaluated
  with convolutions that are fast inside loops.
  """
  traced = jax.make_jaxpr(function)(images)
  consts = lax.stop_gradient(traced.consts)

  def call(images):
    (result,) = convolutions.eval_jaxpr(traced.jaxpr, consts, images)
    return result

  return call


# --------------------------------------------------------------------- checks


def _require(holds: bool, field: str, value, allowed: str):
  if not holds:
    raise ValueError(f'{field}={value!r} is not allowed: must be {allowed}.')


def _is_real(value) -> bool:
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_count(value) -> bool:
  return _is_real(value) and isinstance(value, numbers.Integral) and value >= 1


def _is_positive(value) -> bool:
  limits = np.finfo(np.float32)
  return _is_real(value) and float(limits.tiny) <= value <= float(limits.max)


def _check(images, labels, ids, scale):
  """The batch as arrays, or a ValueError that names what is wrong."""
  images, labels = jnp.asarray(images), jnp.asarray(labels)
  if images.dtype != jnp.float32 or images.ndim != 4:
    raise ValueError(
      f'images are {images.dtype} {list(images.shape)}: must be float32 '
      '[B, H, W, C] in [0, 1].'
    )
  if _is_concrete(images) and images.size:
    lowest, highest = _range(images)
    if not (lowest >= 0 and highest <= 1):
      raise ValueError(
        f'images lie in [{lowest:.3g}, {highest:.3g}]: must lie in [0, 1]. '
        'Normalise inside logits_fn, not before it.'
      )
  ids = jnp.arange(len(images)) if ids is None else jnp.asarray(ids)
  for name, values in (('labels', labels), ('ids', ids)):
    if (
      not jnp.issubdtype(values.dtype, jnp.integer)
      or values.shape != images.shape[:1]
    ):
      raise ValueError(
        f'{name} are {values.dtype} {list(values.shape)}: must be integers '
        f'[B], B={len(images)} as in images.'
      )
  if jnp.shape(scale) != () or (
    _is_concrete(scale) and not 0 <= float(scale) < math.inf
  ):
    raise ValueError(
      f'scale={scale} is not allowed: must be one finite number >= 0.'
    )
  scale = jnp.asarray(scale, jnp.float32)
  return lax.stop_gradient(images), labels, ids, scale


def _check_index(index, count: int):
  if jnp.shape(index) != () or not jnp.issubdtype(
    jnp.result_type(index), jnp.integer
  ):
    raise ValueError(f'index={index!r} is not allowed: must be an int scalar.')
  if not _is_concrete(index):
    return jnp.clip(index, 0, count - 1)  # Traced: it cannot be refused.
  index = int(index)
  _require(0 <= index < count, 'index', index, f'in [0, {count})')
  return index


def _check_logits(logits: Array, labels: Array) -> Array:
  """The logits in float32: the loss of a bfloat16 network climbs in float32."""
  shape = getattr(logits, 'shape', ())
  if (
    len(shape) != 2
    or shape[0] != len(labels)
    or shape[1] < 2
    or not jnp.issubdtype(logits.dtype, jnp.floating)
  ):
    raise ValueError(
      f'logits_fn returned {getattr(logits, "dtype", type(logits).__name__)} '
      f'{list(shape)}: must be floating point [B, K], B={len(labels)} as in '
      'images and K >= 2.'
    )
  if _is_concrete(labels) and labels.size:
    lowest, highest = _range(labels)
    if not (lowest >= 0 and highest < shape[1]):
      raise ValueError(
        f'labels lie in [{lowest}, {highest}]: must lie in [0, {shape[1]}), '
        'as logits_fn returned so many logits.'
      )
  return logits.astype(jnp.float32)


def _range(array: Array) -> tuple[np.generic, np.generic]:
  array = np.asarray(array)  # So that nothing is staged inside of a jit.
  return array.min(), array.max()


def _is_concrete(value) -> bool:
  return not isinstance(value, jax.core.Tracer)
