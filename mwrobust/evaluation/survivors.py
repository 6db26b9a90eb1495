"""Attacks what still stands, attack by attack, in full batches.

An example that has fallen under a threat is not attacked there again; what is
left is packed into full batches before each try. An example's randomness comes
from its own id, so the result is the same as if every example met every try of
every attack.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from mwrobust.attacks import Attack, Threat
from mwrobust.errors import UserError
from mwrobust.evaluation import inputs, programs
from mwrobust.evaluation.inputs import Examples
from mwrobust.evaluation.outcomes import STANDING, Outcomes
from mwrobust.evaluation.plan import Pass, Row, make_rounds, make_rows
from mwrobust.evaluation.protocols import Protocol, evaluations, make_protocol
from mwrobust.runtime import devices, files
from mwrobust.runtime.progress import Progress

Array = jax.Array
FILE = 'outcomes.npz'
RADII = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # Of a curve, times eps.
SECONDS_BETWEEN_SAVES = 30


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
  rows = make_rows(threats, _check_radii(radii))
  settings = _settings(rows, radii, protocol, seed, examples, about)
  with contextlib.ExitStack() as stack:
    if folder is not None:
      stack.enter_context(files.locked(folder))
    natural = programs.natural(network, examples, batch_size)
    outcomes = Outcomes.begin(
      settings,
      examples.labels,
      natural.logits,
      np.asarray(inputs.to_float(examples.images[:pictures])),
    )
    path = None if folder is None else epath.Path(folder, FILE)
    if path is not None:
      outcomes = _resume(path, outcomes)
      stack.callback(lambda: outcomes.save(path))
    rounds = make_rounds(rows, protocol)
    compiled = programs.Programs(
      network, protocol, rows, examples, batch_size, seed, natural.seconds
    )
    last_save = time.monotonic()
    shown = stack.enter_context(_Shown(outcomes, rounds, protocol, progress))
    for done, share in _attack_survivors(outcomes, rows, rounds, compiled):
      shown.update(done, share)
      on_batch(outcomes)
      if path and time.monotonic() - last_save > SECONDS_BETWEEN_SAVES:
        outcomes.save(path)
        last_save = time.monotonic()
  return outcomes


# ------------------------------------------------------------- the settings


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


# ------------------------------------------------------------------- the loop


def _attack_survivors(
  outcomes: Outcomes,
  rows: Sequence[Row],
  rounds: Sequence[tuple[Pass, ...]],
  compiled: programs.Programs,
) -> Iterator[tuple[int, float]]:
  """Attacks what stands, round by round, from where it was interrupted.

  Args:
    outcomes: filled in, call by call.
    rows: of the outcomes.
    rounds: in order.
    compiled: the attacks.

  Yields:
    How many rounds are complete, and what share of the next one is.
  """
  for done, a_round in enumerate(rounds):
    batches, complete = [], 0
    for a_pass in a_round:
      tried = outcomes.tried[a_pass.row]
      # Those that this pass has attacked already are part of its batches, so
      # that an evaluation that resumes has the same batches to the bit.
      chosen = np.flatnonzero(
        (outcomes.correct[a_pass.row] & (tried == a_pass.number))
        | (tried == a_pass.number + 1)
      )
      for examples in programs.in_batches(chosen, compiled.size):
        if (tried[examples] == a_pass.number).any():
          batches.append(programs.Batch(a_pass, examples))
        else:
          complete += 1
    stage = a_round[0].stage
    following = (p for p, *_ in rounds[done:] if p.stage == stage + 1)
    total = complete + len(batches)
    for called in compiled.run(batches, next(following, None)):
      for batch, attacked in called:
        _record(outcomes, rows[batch.of.row], batch, attacked)
      complete += len(called)
      yield done, complete / total


def _record(
  outcomes: Outcomes,
  row: Row,
  batch: programs.Batch,
  attacked: programs.Attacked,
) -> None:
  """Writes down what a try did to some examples.

  An image that fools the network under one threat does so under every threat
  whose set contains it.
  """
  a_pass, examples = batch
  outcomes.spent[a_pass.row, a_pass.stage] += (
    attacked.gradients.sum(dtype=np.int64),
    attacked.forwards.sum(dtype=np.int64),
  )
  attacked = programs.Attacked(*(field[: len(examples)] for field in attacked))
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


class _Shown(contextlib.AbstractContextManager):
  """Shows how far an evaluation is, and what stands after each attack.

  The time left counts as if everything that is correct without an attack had to
  be attacked to the end, so it is an upper bound.
  """

  def __init__(
    self,
    outcomes: Outcomes,
    rounds: Sequence[tuple[Pass, ...]],
    protocol: Protocol,
    progress: bool,
  ):
    self._outcomes, self._rounds = outcomes, rounds
    norms = [threat['norm'] for threat in outcomes.settings['threats']]

    def cost(a_pass: Pass) -> float:
      name = protocol.attacks[a_pass.stage]
      attack = protocol.stages[norms[a_pass.row]][name]
      gradients, forwards = evaluations(attack)
      return (3 * gradients + forwards) / attack.tries

    costs = [sum(map(cost, a_round)) for a_round in rounds]
    self._offsets = np.cumsum([0, *costs])
    self._stage = None
    total = float(self._offsets[-1])
    self._progress = progress and Progress(total, log_every=total / 10)

  def update(self, done: int, share: float) -> None:
    """Says that so many rounds are done, and a share of the next."""
    if not self._progress:
      return
    at, following = self._offsets[done : done + 2]
    first, *others = self._rounds[done]
    stage = first.stage
    is_curve = len(self._outcomes.settings['radii']) > 1
    if self._stage is not None and stage != self._stage and not is_curve:
      accuracies = self._outcomes.accuracies()
      self._progress.say(
        f'after {self._outcomes.attacks[self._stage]}: worst threat '
        f'{accuracies["min"]:.1f} %, union {accuracies["union"]:.1f} %'
      )
    self._stage = stage
    name = self._outcomes.attacks[stage]
    threats = self._outcomes.threats[first.row]
    if others:
      threats = f'{1 + len(others)} threats'
    self._progress.update(
      float(at + share * (following - at)), f'{name} under {threats}'
    )

  def __exit__(self, *_) -> None:
    if self._progress:
      self._progress.close()
