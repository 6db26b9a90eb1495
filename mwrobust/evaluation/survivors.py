"""Attacks what still stands, attack by attack, in full batches.

An example that has fallen under a threat is not attacked there again; what is
left is packed into full batches before each try. An example's randomness comes
from its own id, so the result is the same as if every example met every try of
every attack.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from mwrobust import attacks
from mwrobust.attacks import Attack, Threat, losses, spaces
from mwrobust.errors import UserError
from mwrobust.evaluation import inputs
from mwrobust.evaluation.inputs import Examples, Network
from mwrobust.evaluation.outcomes import STANDING, Outcomes
from mwrobust.evaluation.protocols import Protocol, evaluations, make_protocol
from mwrobust.runtime import devices, files
from mwrobust.runtime.progress import Progress

Array = jax.Array
FILE = 'outcomes.npz'
RADII = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # Of a curve, times eps.
SECONDS_BETWEEN_SAVES = 30
# On a CPU, small batches are as fast per image, waste less when few examples
# still stand, and stop earlier.
_CPU_BATCH_SIZE = 20


def evaluate(
  logits_fn: Callable[..., Array],
  images: Any,
  labels: Any,
  threats: Threat | Iterable[Threat],
  params: Any = None,
  protocol: str | Iterable[Attack] | Mapping[str, Attack] = 'standard',
  *,
  radii: Sequence[float] = (1.0,),
  batch_size: int = 250,
  seed: int = 0,
  folder: str | os.PathLike | None = None,
  pictures: int = 8,
  about: Mapping[str, Any] | None = None,
  progress: bool = True,
  on_batch: Callable[[Outcomes], None] = lambda outcomes: None,
) -> Outcomes:
  """Measures how robust a network is.

  Args:
    logits_fn: `logits_fn(images) -> logits [B, K]`, any JAX function; it gets
      float32 images [B, H, W, C] in [0, 1].
    images: [N, H, W, C]: uint8, or floating point in [0, 1]; NumPy or JAX.
    labels: integers [N].
    threats: what the adversary may do.
    params: if given, `logits_fn(params, images)` is called, and no parameter is
      compiled into the attacks as a constant.
    protocol: `'standard'`, `'fast'`, `'paper'`, `'paper-20'`, or attacks of
      your own; see `mwrobust.evaluation.protocols`.
    radii: multiples of each threat's eps. Several of them, such as
      `evaluation.RADII`, make a curve: see `Outcomes.curve`.
    batch_size: at most how many images are attacked at once.
    seed: everything random depends on it and on the image's place.
    folder: the outcomes are saved there every half minute and at the end. A
      later call with the same arguments resumes; one with others is refused.
    pictures: of how many images the adversarial images are kept.
    about: what else to write into `outcomes.settings`.
    progress: show on stderr how far it is and how long it will take.
    on_batch: called after each batch with the outcomes so far; may raise to
      stop the evaluation.
  """
  inputs.check_count('batch_size', batch_size, lowest=1)
  inputs.check_count('seed', seed, lowest=0)
  examples = inputs.check_examples(images, labels)
  threats = inputs.check_threats(threats, examples.images)
  network = inputs.check_network(logits_fn, params, examples)
  protocol = make_protocol(protocol, network.classes)
  rows = _rows(threats, _check_radii(radii))
  settings = _settings(rows, radii, protocol, seed, examples, about)
  with contextlib.ExitStack() as stack:
    if folder is not None:
      stack.enter_context(files.locked(folder))
    logits = _natural_logits(network, examples, batch_size)
    outcomes = Outcomes.begin(
      settings,
      examples.labels,
      logits,
      np.asarray(inputs.to_float(examples.images[:pictures])),
    )
    path = None if folder is None else epath.Path(folder, FILE)
    if path is not None:
      outcomes = _resume(path, outcomes)
      stack.callback(lambda: outcomes.save(path))
    passes = _passes(rows, protocol)
    attack = _Programs(network, protocol, rows, examples, batch_size, seed)
    last_save = time.monotonic()
    shown = stack.enter_context(_Shown(outcomes, passes, protocol, progress))
    for done, batches in _attack_survivors(outcomes, rows, passes, attack):
      shown.update(done, batches)
      on_batch(outcomes)
      if path and time.monotonic() - last_save > SECONDS_BETWEEN_SAVES:
        outcomes.save(path)
        last_save = time.monotonic()
  return outcomes


# ------------------------------------------------------------------- the plan


class Row(NamedTuple):
  """A row of the outcomes: a threat at a multiple of its radius.

  Attributes:
    threat: with its radius multiplied.
    of: the name of the threat at its own radius.
    solved: the threat at its own radius, in the space it is attacked in.
    scale: what its radius was multiplied by.
    attacked: whether this is the first row with this set of images.
    within: the rows whose sets contain this one, itself among them.
    equal: those of them that have the same set.
  """

  threat: Threat
  of: str
  solved: Threat
  scale: float
  attacked: bool
  within: tuple[int, ...]
  equal: tuple[int, ...]


class Pass(NamedTuple):
  """One try of one attack on all that stands under one threat.

  Attributes:
    row: of the outcomes.
    stage: the number of the attack in the protocol.
    start: the number of the try, from 0.
    number: how many passes of this row come before it.
  """

  row: int
  stage: int
  start: int
  number: int


def _rows(threats: Sequence[Threat], radii: Sequence[float]) -> list[Row]:
  scaled = [
    dataclasses.replace(
      threat,
      eps=radius * threat.eps,
      name=threat.name if len(radii) == 1 else f'{threat.name} x{radius:g}',
    )
    for radius in radii
    for threat in threats
  ]
  rows = []
  for i, threat in enumerate(scaled):
    contains = [_contains(other, threat) for other in scaled]
    equal = [
      j for j, other in enumerate(scaled) if contains[j] and
      _contains(threat, other)
    ]  # fmt: skip
    original = threats[i % len(threats)]
    rows.append(
      Row(
        threat=threat,
        of=original.name,
        solved=_simplest(original),
        scale=radii[i // len(threats)],
        attacked=equal[0] == i,
        within=tuple(np.flatnonzero(contains).tolist()),
        equal=tuple(equal),
      )
    )
  return rows


def _simplest(threat: Threat) -> Threat:
  """Returns the same set in pixels, where attacks are cheaper, if it is there.

  An orthonormal map keeps Euclidean lengths, so its l2 balls are those of
  pixels. In pixels the clip stays in the ball, so every `clip` is the same set.
  """
  if threat.norm == 'l2' and spaces.get(threat.space).orthonormal:
    return dataclasses.replace(threat, space='pixel', clip='inside')
  return threat


def _contains(outer: Threat, inner: Threat) -> bool:
  """Tells whether every image of one threat is an image of the other."""
  outer, inner = _simplest(outer), _simplest(inner)
  return (
    spaces.get(outer.space) is spaces.get(inner.space)
    and outer.norm == inner.norm
    and outer.eps >= inner.eps
    and (outer.clip != 'strict' or inner.clip == 'strict')
  )


def _passes(rows: Sequence[Row], protocol: Protocol) -> list[Pass]:
  """Lists all passes: radius by radius, attack by attack, try by try."""
  passes, count = [], [0] * len(rows)
  for scale in dict.fromkeys(row.scale for row in rows):
    chosen = [i for i, r in enumerate(rows) if r.attacked and r.scale == scale]
    for stage, name in enumerate(protocol.attacks):
      tries = {
        i: protocol.stages[rows[i].solved.norm][name].tries for i in chosen
      }
      for start in range(max(tries.values(), default=0)):
        for i in chosen:
          if start < tries[i]:
            passes.append(Pass(i, stage, start, count[i]))
            count[i] += 1
  return passes


def _settings(
  rows: Sequence[Row],
  radii: Sequence[float],
  protocol: Protocol,
  seed: int,
  examples: Examples,
  about: Mapping[str, Any] | None,
) -> dict[str, Any]:
  """Returns what the outcomes depend on, as JSON gives it back."""

  def attack_fields(attack):
    return {
      'attack': type(attack).__name__,
      **dataclasses.asdict(attack),
      'tries': attack.tries,
      'evaluations': evaluations(attack),
    }

  digest = hashlib.sha256()
  for array in examples:
    digest.update(np.ascontiguousarray(array))
  settings = {
    **(about or {}),
    'protocol': protocol.name,
    'threats': [
      {
        **row.threat.to_dict(),
        'of': row.of,
        'attacks': {
          name: attack_fields(attack)
          for name, attack in protocol.stages[row.threat.norm].items()
        },
      }
      for row in rows
    ],
    'radii': list(radii),
    'seed': seed,
    'data': {
      'images': list(examples.images.shape),
      'sha256': digest.hexdigest(),
    },
  }
  return json.loads(json.dumps(settings))


def _check_radii(radii: Sequence[float]) -> Sequence[float]:
  inputs.require(
    len(radii) > 0
    and all(0 < radius < float('inf') for radius in radii)
    and list(radii) == sorted(set(radii)),
    f'radii={radii!r} is not allowed: must be positive and increasing.',
  )
  return radii


# --------------------------------------------------------------------- resume


def _resume(path: epath.Path, fresh: Outcomes) -> Outcomes:
  """Returns what was saved of this evaluation, else the fresh outcomes."""
  if not path.exists():
    found = fresh
  else:
    try:
      found = Outcomes.load(path)
    except UserError as error:
      raise UserError(f'{error} Move it away to evaluate anew.') from error
    differing = list(_differences(found.settings, fresh.settings))
    if differing:
      raise UserError(
        '\n'.join([f'{path} is of another evaluation:', *differing])
        + '\nChoose another folder, or give the same arguments.'
      )
    scale = max(1.0, float(np.abs(found.logits).max()))
    difference = float(np.abs(found.logits - fresh.logits).max())
    if not difference <= 1e-3 * scale:
      raise UserError(
        f'{path} is of another network: the logits of the same images differ '
        f'by up to {difference:.2g}. Choose another folder.'
      )
  tries = int(found.tried.sum())
  if len(set(devices.of_all_processes(tries))) > 1:
    raise UserError(
      f'{path} is not the same for all processes: they need one folder that '
      'all of them see.'
    )
  return found


def _differences(there: Any, here: Any, field: str = '') -> Iterator[str]:
  """Yields a line for each setting that differs."""
  if isinstance(there, dict) and isinstance(here, dict):
    for name in dict.fromkeys([*there, *here]):
      prefix = f'{field}.{name}' if field else name
      yield from _differences(there.get(name), here.get(name), prefix)
  elif (
    isinstance(there, list) and isinstance(here, list)
    and len(there) == len(here)
  ):  # fmt: skip
    for i, (a, b) in enumerate(zip(there, here, strict=True)):
      name = a.get('name', i) if isinstance(a, dict) else i
      yield from _differences(a, b, f'{field}.{name}')
  elif there != here:
    yield f'  {field}: {_short(there)} there, {_short(here)} here'


def _short(value: Any) -> str:
  if isinstance(value, list) and value and isinstance(value[0], dict):
    return ', '.join(str(item.get('name', item)) for item in value)
  return repr(value)[:80]


# ------------------------------------------------------------------- programs


class Attacked(NamedTuple):
  """What became of a batch, for each example, [B]; see `Outcomes`."""

  images: Array
  predicted: Array
  loss: Array
  distance: Array
  distance_clipped: Array
  stuck: Array
  gradients: Array
  forwards: Array


class _Programs:
  """The compiled attacks: `programs(a_pass, rows) -> Attacked`.

  Attacks of one kind under all threats are one program, chosen from by a traced
  index. The next program is compiled while the one before it runs.
  """

  def __init__(
    self,
    network: Network,
    protocol: Protocol,
    rows: Sequence[Row],
    examples: Examples,
    batch_size: int,
    seed: int,
  ):
    self._rows, self._protocol = rows, protocol
    self._examples = *examples, np.arange(len(examples.labels), dtype=np.int32)
    self.batch_size = actual_batch_size(batch_size, len(examples.labels))
    self._network = network
    self._arrays = jax.device_put(network.arrays, devices.replicated())
    # As numbers: several processes cannot share an array of keys.
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
        pairs.append((protocol.attacked_as(threat), attack))
    self._compiled: dict[Any, Future] = {}
    self._pool = ThreadPoolExecutor(1)

  def prepare(self, a_pass: Pass) -> None:
    """Begins to compile what a pass needs, in the background."""
    kind, _ = self._place[a_pass.stage, self._rows[a_pass.row].solved]
    if kind in self._compiled:
      return
    batch = devices.split_rows(
      np.zeros(self.batch_size, np.int32), *self._examples
    )
    step = _make_step(self._network, self._pairs[kind])
    lowered = step.lower(self._shared(a_pass), batch)
    self._compiled[kind] = self._pool.submit(lowered.compile)

  def _shared(self, a_pass: Pass):
    row = self._rows[a_pass.row]
    _, index = self._place[a_pass.stage, row.solved]
    numbers = jnp.int32(index), jnp.int32(a_pass.start), jnp.float32(row.scale)
    shared = (self._keys[a_pass.stage], *numbers)
    return self._arrays, *jax.device_put(shared, devices.replicated())

  def __call__(self, a_pass: Pass, examples: np.ndarray) -> Attacked:
    """Attacks these examples, `batch_size` of them."""
    self.prepare(a_pass)
    kind, _ = self._place[a_pass.stage, self._rows[a_pass.row].solved]
    batch = devices.split_rows(examples, *self._examples)
    found = self._compiled[kind].result()(self._shared(a_pass), batch)
    return jax.tree.map(np.asarray, found)


def _make_step(network: Network, pairs: Sequence[tuple[Threat, Attack]]):
  """Makes `step(shared, batch) -> Attacked`, each device with its part."""
  switch = attacks.make_switch(pairs, details=True)
  distances = [functools.partial(attacks.distance, t) for t, _ in pairs]

  def step(shared, batch):
    arrays, key_data, index, start, scale = shared
    key = jax.random.wrap_key_data(key_data)
    images, labels, ids = batch
    images = inputs.to_float(images)
    logits_fn = functools.partial(network.apply, arrays)
    found = switch(logits_fn, index, key, images, labels, ids, scale, start)
    # What counts is the network's answer to the image that is returned.
    logits = logits_fn(found.images).astype(jnp.float32)
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

  return jax.jit(devices.by_example(step), out_shardings=devices.replicated())


def _natural_logits(
  network: Network, examples: Examples, batch_size: int
) -> np.ndarray:
  """Returns the logits of all images, after a look at whether they are sane."""

  def make_step():  # A new function each time, so that it is traced anew.
    return jax.jit(
      devices.by_example(
        lambda arrays, images: network.apply(arrays, inputs.to_float(images))
      ),
      out_shardings=devices.replicated(),
    )

  count = len(examples.labels)
  size = devices.round_up(min(batch_size, count))
  arrays = jax.device_put(network.arrays, devices.replicated())

  def logits_of(step, rows):
    (images,) = devices.split_rows(rows, examples.images)
    return np.asarray(step(arrays, images)).astype(np.float32)

  step = make_step()
  logits = np.concatenate(
    [logits_of(step, rows)[: len(own)] for own, rows in _batches(count, size)]
  )
  own, rows = next(_batches(count, size))
  again = logits_of(make_step(), rows[::-1])[::-1][: len(own)]
  inputs.check_logits(logits, again)
  return logits


# ------------------------------------------------------------------- the loop


def _attack_survivors(
  outcomes: Outcomes,
  rows: Sequence[Row],
  passes: Sequence[Pass],
  attack: _Programs,
) -> Iterator[tuple[int, float]]:
  """Attacks what stands, pass by pass, from where it was interrupted.

  Args:
    outcomes: filled in, batch by batch.
    rows: of the outcomes.
    passes: in order.
    attack: attacks a batch.

  Yields:
    How many passes are complete, and what share of the next one is.
  """
  for done, a_pass in enumerate(passes):
    tried = outcomes.tried[a_pass.row]
    # Those that this pass has attacked already are part of its batches, so
    # that an evaluation that resumes has the same batches to the bit.
    chosen = np.flatnonzero(
      (outcomes.correct[a_pass.row] & (tried == a_pass.number))
      | (tried == a_pass.number + 1)
    )
    if (tried[chosen] == a_pass.number).any():
      attack.prepare(a_pass)
      following = [p for p in passes[done:] if p.stage == a_pass.stage + 1]
      for p in following[:1]:
        attack.prepare(p)
    batches = list(_batches(len(chosen), attack.batch_size))
    for number, (own, places) in enumerate(batches, start=1):
      if (tried[chosen[own]] == a_pass.number + 1).all():
        continue
      attacked = attack(a_pass, chosen[places])
      _record(outcomes, rows[a_pass.row], a_pass, chosen[own], attacked)
      yield done, number / len(batches)


def _record(
  outcomes: Outcomes,
  row: Row,
  a_pass: Pass,
  examples: np.ndarray,
  attacked: Attacked,
) -> None:
  """Writes down what a try did to some examples.

  An image that fools the network under one threat does so under every threat
  whose set contains it.
  """
  outcomes.spent[a_pass.row, a_pass.stage] += (
    attacked.gradients.sum(dtype=np.int64),
    attacked.forwards.sum(dtype=np.int64),
  )
  attacked = Attacked(*(field[: len(examples)] for field in attacked))
  # A network that answers NaN is fooled.
  fooled = attacked.predicted != outcomes.labels[examples]
  fooled |= np.isnan(attacked.loss)
  for i in row.within:
    stood = outcomes.fell[i, examples] == STANDING
    better = stood & (fooled | (attacked.loss > outcomes.loss[i, examples]))
    for name in (
      *('predicted', 'loss', 'distance', 'distance_clipped', 'stuck'),
    ):
      field = getattr(outcomes, name)
      field[i, examples[better]] = getattr(attacked, name)[better]
    pictured = better & (examples < len(outcomes.images))
    outcomes.adversarial[i, examples[pictured]] = attacked.images[pictured]
    outcomes.fell[i, examples[stood & fooled]] = a_pass.stage
  for i in row.equal:
    outcomes.tried[i, examples] += 1


def _batches(count: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields the places of each batch, and the same filled up to `size`."""
  for start in range(0, count, size):
    places = np.arange(start, min(start + size, count), dtype=np.int32)
    yield places, np.resize(places, size)


def actual_batch_size(most: int, count: int) -> int:
  """Returns how many examples a batch has, over all devices."""
  if jax.default_backend() == 'cpu':
    most = min(most, _CPU_BATCH_SIZE * jax.device_count())
  batches = -(-count // most)  # All of one size, so that little is filled up.
  return devices.round_up(-(-count // batches))


class _Shown(contextlib.AbstractContextManager):
  """Shows how far an evaluation is, and what stands after each attack.

  The time left counts as if everything that is correct without an attack had to
  be attacked to the end, so it is an upper bound.
  """

  def __init__(
    self,
    outcomes: Outcomes,
    passes: Sequence[Pass],
    protocol: Protocol,
    progress: bool,
  ):
    self._outcomes, self._passes = outcomes, passes
    norms = [threat['norm'] for threat in outcomes.settings['threats']]
    costs = []
    for a_pass in passes:
      name = protocol.attacks[a_pass.stage]
      attack = protocol.stages[norms[a_pass.row]][name]
      gradients, forwards = evaluations(attack)
      costs.append((3 * gradients + forwards) / attack.tries)
    self._offsets = np.cumsum([0, *costs])
    self._stage = None
    total = float(self._offsets[-1])
    self._progress = progress and Progress(total, log_every=total / 10)

  def update(self, done: int, share: float) -> None:
    """Says that so many passes are done, and a share of the next."""
    if not self._progress:
      return
    at, following = self._offsets[done : done + 2]
    stage = self._passes[done].stage
    is_curve = len(self._outcomes.settings['radii']) > 1
    if self._stage is not None and stage != self._stage and not is_curve:
      accuracies = self._outcomes.accuracies()
      self._progress.say(
        f'after {self._outcomes.attacks[self._stage]}: worst threat '
        f'{accuracies["min"]:.1f} %, union {accuracies["union"]:.1f} %'
      )
    self._stage = stage
    name = self._outcomes.attacks[stage]
    threat = self._outcomes.threats[self._passes[done].row]
    self._progress.update(
      float(at + share * (following - at)), f'{name} under {threat}'
    )

  def __exit__(self, *_) -> None:
    if self._progress:
      self._progress.close()
