"""The compiled programs of an evaluation: attacks and natural logits."""

import functools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mwrobust import attacks
from mwrobust.attacks import Attack, Threat, convolutions, losses
from mwrobust.evaluation import inputs
from mwrobust.evaluation.inputs import Examples, Network
from mwrobust.evaluation.plan import Pass, Row
from mwrobust.evaluation.protocols import Protocol, evaluations
from mwrobust.runtime import devices

Array = jax.Array

# On a CPU, small batches are as fast per image, waste less when few examples
# survive, and stop earlier.
_CPU_BATCH_SIZE = 10
# A call takes as many batches as it can attack in this time: many small ones,
# so that the time between calls is negligible, but few enough to save, to show
# progress and to stop in between.
_SECONDS_OF_A_CALL = 1.0
_UNUSED = -1  # The index of an empty slot.


class Batch(NamedTuple):
  """Some examples that one device attacks at once."""

  of: Pass  # The pass that the batch belongs to.
  # The numbers of at most `Programs.size` examples, int32.
  examples: np.ndarray


class Attacked(NamedTuple):
  """The results for each example of a batch, [B]; see `Outcomes`.

  `gradients` and `forwards` also count the examples that pad the batch.
  """

  images: Array
  predicted: Array
  loss: Array
  distance: Array
  distance_clipped: Array
  stuck: Array
  gradients: Array
  forwards: Array


class Programs:
  """The compiled attacks.

  Attacks of one kind under all threats are one program with a traced index. The
  next program is compiled while the previous one runs.

  Attributes:
    size: the number of examples in a batch.
  """

  def __init__(
    self,
    network: Network,
    protocol: Protocol,
    rows: Sequence[Row],
    examples: Examples,
    batch_size: int,
    seed: int,
    seconds: float,
  ):
    """Prepares the programs without compiling them.

    All devices together attack at most `batch_size` examples at once; a forward
    pass of one image takes so many `seconds` on one device.
    """
    self._network, self._protocol, self._rows = network, protocol, rows
    self._examples = *examples, np.arange(len(examples.labels), dtype=np.int32)
    self.size, self._slots = batch_shape(batch_size, len(examples.labels))
    self._seconds = seconds
    self._arrays = jax.device_put(network.arrays, devices.replicated())
    # Raw key data, because processes cannot share an array of keys.
    self._keys = [
      jax.random.key_data(jax.random.fold_in(jax.random.key(seed), stage))
      for stage in range(len(protocol.attacks))
    ]
    self._pairs: dict[Any, list[tuple[Threat, Attack]]] = {}
    self._place: dict[tuple[int, Threat], tuple[Any, int]] = {}
    for stage, name in enumerate(protocol.attacks):
      for threat in dict.fromkeys(row.solved for row in rows if row.attacked):
        attack = protocol.stages[threat.norm][name]
        kind = type(attack), getattr(attack, 'rule', '')
        pairs = self._pairs.setdefault(kind, [])
        self._place[stage, threat] = kind, len(pairs)
        pairs.append((threat, attack))
    self._compiled: dict[Any, Future] = {}
    self._pool = ThreadPoolExecutor(1)

  def prepare(self, a_pass: Pass) -> None:
    """Starts to compile the program of a pass in the background."""
    kind, _ = self._placed(a_pass)
    if kind not in self._compiled:
      step = _make_step(self._network, self._pairs[kind])
      lowered = step.lower(*self._arguments([Batch(a_pass, np.zeros(1, int))]))
      self._compiled[kind] = self._pool.submit(lowered.compile)

  def run(
    self, batches: Sequence[Batch], then: Pass | None
  ) -> Iterator[list[tuple[Batch, Attacked]]]:
    """Attacks the batches of one round, several in each call.

    The pass `then` is prepared while the devices are busy.

    Yields:
      The batches of a call with their results.
    """
    left = list(batches)
    while left:
      count = devices.mesh().size * min(self._slots, self._in_time(left[0].of))
      called, left = left[:count], left[count:]
      kind, _ = self._placed(called[0].of)
      self.prepare(called[0].of)
      found = self._compiled[kind].result()(*self._arguments(called))
      if then is not None:
        self.prepare(then)
      found = jax.tree.map(np.asarray, found)
      yield [
        (batch, Attacked(*(field[place] for field in found)))
        for batch, place in zip(called, self._places(len(called)), strict=True)
      ]

  def _placed(self, a_pass: Pass) -> tuple[Any, int]:
    """Returns the program of a pass, and the index of its threat there."""
    return self._place[a_pass.stage, self._rows[a_pass.row].solved]

  def _in_time(self, a_pass: Pass) -> int:
    """Returns the number of batches that a device can attack in a call."""
    name = self._protocol.attacks[a_pass.stage]
    norm = self._rows[a_pass.row].solved.norm
    attack = self._protocol.stages[norm][name]
    gradients, forwards = evaluations(attack)
    cost = self.size * (3 * gradients + forwards) / attack.tries
    return max(1, int(_SECONDS_OF_A_CALL / (cost * self._seconds)))

  def _places(self, count: int) -> np.ndarray:
    """Returns the slots of so many batches, dealt to the devices in turn."""
    turn, device = np.divmod(np.arange(count), devices.mesh().size)
    return device * self._slots + turn

  def _arguments(self, batches: Sequence[Batch]) -> tuple[Any, Any]:
    """Returns a program's arguments: shared, and split over the devices."""
    first = batches[0].of
    shared = (
      self._keys[first.stage],
      np.int32(first.start),
      np.float32(self._rows[first.row].scale),
    )
    shared = self._arrays, *jax.device_put(shared, devices.replicated())
    slots = devices.mesh().size * self._slots
    indices = np.full(slots, _UNUSED, np.int32)
    examples = np.zeros((slots, self.size), np.int32)
    for place, batch in zip(self._places(len(batches)), batches, strict=True):
      _, indices[place] = self._placed(batch.of)
      examples[place] = np.resize(batch.examples, self.size)
    return shared, (
      *devices.split_rows(np.arange(slots), indices),
      *devices.split_rows(examples, *self._examples),
    )


def batch_shape(most: int, count: int) -> tuple[int, int]:
  """Returns the number of examples in a batch, and of batches per device.

  All devices together may attack at most `most` of `count` examples at once.
  """
  of_a_device = -(-min(most, count) // devices.mesh().size)
  if jax.default_backend() != 'cpu':
    return of_a_device, 1
  slots = -(-of_a_device // _CPU_BATCH_SIZE)
  return -(-of_a_device // slots), slots


def _make_step(network: Network, pairs: Sequence[tuple[Threat, Attack]]):
  """Makes `step(shared, split) -> Attacked`, run by each device on its batches.

  The first axis of the results is that of the batches.
  """
  switch = attacks.make_switch(pairs, details=True)
  distances = [functools.partial(attacks.distance, t) for t, _ in pairs]

  # Jitted, so that it is traced once for the shapes and the loop.
  @functools.partial(jax.jit, inline=True)
  def attack(shared, batch) -> Attacked:
    arrays, key_data, start, scale = shared
    index, images, labels, ids = batch
    key = jax.random.wrap_key_data(key_data)
    images = inputs.to_float(images)
    logits_fn = functools.partial(network.apply, arrays)
    found = switch(logits_fn, index, key, images, labels, ids, scale, start)
    # The network is judged on the image that is returned.
    logits = convolutions.fast(logits_fn)(found.images).astype(jnp.float32)
    return Attacked(
      images=found.images,
      predicted=logits.argmax(axis=1),
      loss=losses.cross_entropy(logits, labels),
      distance=found.distance,
      distance_clipped=jax.lax.switch(index, distances, images, found.images),
      stuck=found.stuck,
      gradients=found.gradients,
      forwards=found.forwards,
    )

  def step(shared, split):
    indices, *_ = split

    def attack_next(number, results):
      batch = jax.tree.map(lambda array: array[number], split)
      return jax.tree.map(
        lambda all_of_them, one: all_of_them.at[number].set(one),
        results,
        attack(shared, batch),
      )

    first = jax.tree.map(lambda array: array[0], split)
    shapes = jax.eval_shape(attack, shared, first)
    nothing = jax.tree.map(
      lambda one: jnp.zeros((len(indices), *one.shape), one.dtype), shapes
    )
    used = jnp.sum(indices != _UNUSED)
    return jax.lax.fori_loop(0, used, attack_next, nothing)

  return jax.jit(devices.by_example(step), out_shardings=devices.replicated())


class Natural(NamedTuple):
  """The network's logits without an attack."""

  logits: np.ndarray  # The logits of all images, [N, K].
  seconds: float  # The time of one image on one device.


def natural(network: Network, examples: Examples, batch_size: int) -> Natural:
  """Returns the logits of all images, after checking that they are sane."""

  def make_step():  # A new function each time, so that it is traced again.
    return jax.jit(
      devices.by_example(
        lambda arrays, images: network.apply(arrays, inputs.to_float(images))
      ),
      out_shardings=devices.replicated(),
    )

  count = len(examples.labels)
  size = devices.round_up(min(batch_size, count))
  arrays = jax.device_put(network.arrays, devices.replicated())

  def logits_of(step, rows, images=examples.images):
    (images,) = devices.split_rows(rows, images)
    return np.asarray(step(arrays, images)).astype(np.float32)

  step = make_step()
  logits = np.concatenate(
    [
      logits_of(step, np.resize(places, size))[: len(places)]
      for places in in_batches(np.arange(count), size)
    ]
  )
  first = np.resize(np.arange(count), size)
  # Again in other batches: each device gets every other image, in reverse
  # order, and copies of a negative, which change the statistics of its batch.
  kept = first.reshape(devices.mesh().size, -1)[:, ::-2]
  images = np.concatenate([examples.images[:size], examples.images[:1]])
  images[-1] = (255 if images.dtype == np.uint8 else 1) - images[-1]
  copies = max(1, size // len(kept) - kept.shape[1])
  rows = np.pad(kept, [(0, 0), (0, copies)], constant_values=len(images) - 1)
  again = logits_of(make_step(), rows.ravel(), images)
  again = again.reshape(*rows.shape, -1)[:, : kept.shape[1]]
  inputs.check_logits(logits, logits[kept], again)
  start = time.perf_counter()
  logits_of(step, first)
  microseconds = 1e6 * (time.perf_counter() - start)
  # All processes have to make the same calls.
  seconds = max(devices.of_all_processes(int(min(microseconds, 1e9)))) / 1e6
  return Natural(logits, seconds * devices.mesh().size / size)


def in_batches(places: np.ndarray, size: int) -> Iterator[np.ndarray]:
  """Yields the places in groups of at most `size`."""
  for start in range(0, len(places), size):
    yield places[start : start + size]
