"""Attacks the survivors, attack by attack, in full batches.

An example that was fooled under a threat is not attacked there again; the
others are packed into full batches before each try. An example's randomness
comes from its own id, so the result is the same as if every try of every
attack were run on every example.
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
from mwrobust.evaluation.plan import (
  Pass,
  Row,
  make_rounds,
  make_rows,
  round_costs,
)
from mwrobust.evaluation.protocols import Protocol, evaluations, make_protocol
from mwrobust.runtime import devices, files
from mwrobust.runtime.progress import Progress

Array = jax.Array
FILE = 'outcomes.npz'
RADII = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # For a curve, times eps.
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
  then: float = 0.0,
  on_batch: Callable[[Outcomes], None] = lambda outcomes: None,
) -> Outcomes:
  """Measures how robust a network is.

  Args:
    logits_fn: any JAX function `logits_fn(images) -> logits [B, K]` of float32
      images [B, H, W, C] in [0, 1].
    images: [N, H, W, C]: uint8, or floating point in [0, 1]; NumPy or JAX.
    labels: integers [N].
    threats: what the adversary may do.
    params: if given, `logits_fn(params, images)` is called, and no parameter is
      compiled into the attacks as a constant.
    protocol: `'standard'`, `'fast'`, `'paper'`, `'paper-20'`, or your own
      attacks; see `mwrobust.evaluation.protocols`.
    radii: multiples of each threat's eps. Several of them, such as
      `evaluation.RADII`, make a curve: see `Outcomes.curve`.
    batch_size: the most images that are attacked at once.
    seed: the seed of everything random, together with an image's position.
    folder: where the outcomes are saved every half minute and at the end. A
      later call with the same arguments resumes; one with others is refused.
    pictures: the number of images whose adversarial images are kept.
    about: further entries of `outcomes.settings`.
    progress: whether to show the progress and the time left on stderr.
    then: the gradients of what you evaluate next, as the sum over its images of
      `evaluation.cost`; they are part of the time left.
    on_batch: called regularly with the outcomes so far; may raise to stop the
      evaluation.
  """
  inputs.check_count('batch_size', batch_size, lowest=1)
  seed = inputs.check_seed(seed)
  inputs.check_count('pictures', pictures, lowest=0)
  radii, about = inputs.check_radii(radii), inputs.check_about(about)
  examples = inputs.check_examples(images, labels)
  threats = inputs.check_threats(threats, examples.images)
  network = inputs.check_network(logits_fn, params, examples)
  protocol = make_protocol(protocol, network.classes)
  rows = make_rows(threats, radii, protocol)
  settings = _settings(rows, radii, protocol, seed, examples, about)
  # Before the lock, which makes the folder: a refused network leaves none.
  natural = programs.natural(network, examples, batch_size)
  outcomes = Outcomes.begin(
    settings,
    examples.labels,
    natural.logits,
    np.asarray(inputs.to_float(examples.images[:pictures])),
  )
  path = None if folder is None else epath.Path(folder, FILE)
  with contextlib.ExitStack() as stack:
    if path is not None:
      stack.enter_context(files.locked(folder))
      outcomes = _resume(path, outcomes)
      stack.callback(lambda: outcomes.save(path))
    rounds = make_rounds(rows, protocol)
    compiled = programs.Programs(
      network, protocol, rows, examples, batch_size, seed, natural.seconds
    )
    last_save = time.monotonic()
    steps = _attack_survivors(outcomes, rows, rounds, compiled)
    if progress:
      costs = round_costs(rows, rounds, protocol)
      steps = _shown(outcomes, rounds, costs, then, steps)
      stack.enter_context(contextlib.closing(steps))
    for _ in steps:
      on_batch(outcomes)
      if path and time.monotonic() - last_save > SECONDS_BETWEEN_SAVES:
        outcomes.save(path)
        last_save = time.monotonic()
  return outcomes


# ------------------------------------------------------------- the settings


def _settings(
  rows: Sequence[Row],
  radii: list[float],
  protocol: Protocol,
  seed: int,
  examples: Examples,
  about: dict[str, Any],
) -> dict[str, Any]:
  """Returns everything the outcomes depend on, as JSON loads it."""

  def attack_fields(attack):
    return {
      'attack': type(attack).__name__,
      **dataclasses.asdict(attack),
      'tries': attack.tries,
      'evaluations': evaluations(attack),
    }

  def attacked_clip(row):  # If it is 'end', and that of the threat is not.
    used = row.solved.clip
    return {'attacked_clip': used} if used == 'end' != row.threat.clip else {}

  digest = hashlib.sha256()
  for array in examples:
    digest.update(np.ascontiguousarray(array))
  settings = {
    **about,
    'protocol': protocol.name,
    'threats': [
      {
        **row.threat.to_dict(),
        **attacked_clip(row),
        'of': row.of,
        'attacks': {
          name: attack_fields(attack)
          for name, attack in protocol.stages[row.threat.norm].items()
        },
      }
      for row in rows
    ],
    'radii': radii,
    'seed': seed,
    'data': {
      'images': list(examples.images.shape),
      'dtype': str(examples.images.dtype),
      'sha256': digest.hexdigest(),
    },
  }
  # Attacks may hold NumPy scalars.
  return json.loads(json.dumps(settings, default=lambda scalar: scalar.item()))


# --------------------------------------------------------------------- resume


def _resume(path: epath.Path, fresh: Outcomes) -> Outcomes:
  """Returns the saved outcomes of this evaluation, else the fresh ones."""
  if not path.exists():
    found = fresh
  else:
    try:
      found = Outcomes.load(path)
    except UserError as error:
      raise UserError(f'{error} Move it away to start again.') from error
    differing = list(_differences(found.settings, fresh.settings))
    if differing:
      raise UserError(
        '\n'.join([f'{path} holds another evaluation:', *differing])
        + '\nChoose another folder, or give the same arguments.'
      )
    scale = max(1.0, float(np.abs(found.logits).max()))
    difference = float(np.abs(found.logits - fresh.logits).max())
    if not difference <= 1e-3 * scale:
      raise UserError(
        f'{path} holds another network: the logits of the same images differ '
        f'by up to {difference:.2g}. Choose another folder.'
      )
  tries = int(found.tried.sum())
  if len(set(devices.of_all_processes(tries))) > 1:
    raise UserError(
      f'{path} is not the same for all processes: they need a shared folder.'
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
  return repr(value)[:24]  # So that a line shows both values.


# ------------------------------------------------------------------- the loop


def _attack_survivors(
  outcomes: Outcomes,
  rows: Sequence[Row],
  rounds: Sequence[tuple[Pass, ...]],
  compiled: programs.Programs,
) -> Iterator[tuple[int, float]]:
  """Attacks the survivors round by round, from where it was interrupted.

  Yields:
    The number of complete rounds, and the share of the next one that is done.
  """
  for done, a_round in enumerate(rounds):
    batches, complete = [], 0
    for a_pass in a_round:
      tried = outcomes.tried[a_pass.row]
      # Examples that this pass has already attacked stay in its batches, so
      # that a resumed evaluation has the same batches, bit for bit.
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
  """Records the results of a try for a batch.

  An image that fools the network under one threat counts under every threat
  whose set contains it.
  """
  a_pass, examples = batch
  outcomes.spent[a_pass.row, a_pass.stage] += (
    attacked.gradients.sum(dtype=np.int64),
    attacked.forwards.sum(dtype=np.int64),
  )
  attacked = programs.Attacked(*(field[: len(examples)] for field in attacked))
  # NaN counts as fooled.
  fooled = attacked.predicted != outcomes.labels[examples]
  fooled |= np.isnan(attacked.loss)
  for i in row.within:
    stood = outcomes.fell[i, examples] == STANDING
    better = stood & (fooled | (attacked.loss > outcomes.loss[i, examples]))
    for name in ('predicted', 'loss', 'distance', 'distance_clipped'):
      field = getattr(outcomes, name)
      field[i, examples[better]] = getattr(attacked, name)[better]
    pictured = better & (examples < len(outcomes.images))
    outcomes.adversarial[i, examples[pictured]] = attacked.images[pictured]
    outcomes.fell[i, examples[stood & fooled]] = a_pass.stage
  attacks = outcomes.settings['threats'][a_pass.row]['attacks'].values()
  uses_gradients = [attack['evaluations'][0] > 0 for attack in attacks]
  is_first = not (a_pass.start or any(uses_gradients[: a_pass.stage]))
  for i in row.equal:
    outcomes.tried[i, examples] += 1
    if uses_gradients[a_pass.stage]:
      before = is_first | outcomes.stuck[i, examples]
      outcomes.stuck[i, examples] = before & attacked.stuck


def _shown(
  outcomes: Outcomes,
  rounds: Sequence[tuple[Pass, ...]],
  costs: Sequence[float],
  then: float,
  steps: Iterator[tuple[int, float]],
) -> Iterator[None]:
  """Takes the steps and shows the progress, and the accuracy of each attack.

  The time left assumes that every example survives to the end, so it is an
  upper bound.
  """
  ends = np.cumsum([0.0, *costs])
  total = float(ends[-1])
  after = then / len(outcomes.labels)
  is_curve = len(outcomes.settings['radii']) > 1
  before, note = None, ''
  with Progress(total, log_every=total / 10, after=after) as progress:
    for done, share in steps:
      first, *others = rounds[done]
      if before not in (None, first.stage) and not is_curve:
        accuracies = outcomes.accuracies()
        progress.say(
          f'after {outcomes.attacks[before]}: worst threat '
          f'{accuracies["min"]:.1f} %, union {accuracies["union"]:.1f} %'
        )
      before = first.stage
      threats = outcomes.threats[first.row]
      if others:
        threats = f'{1 + len(others)} threats'
      note = f'{outcomes.attacks[first.stage]} under {threats}'
      at = ends[done] + share * (ends[done + 1] - ends[done])
      progress.update(float(at), note)
      yield
    if note:  # The last rounds are empty if every example is fooled.
      progress.update(total, note)
