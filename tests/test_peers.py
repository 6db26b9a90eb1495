"""Tests that our attacks are no weaker than Foolbox and AutoAttack."""

import contextlib
import json
import pathlib

import foolbox
import jax
import numpy as np
import pytest

from benchmarks import networks
from mwrobust import attacks, evaluation

DATA = pathlib.Path(__file__).parent / 'data'
TINY = json.loads((DATA / 'tiny_peers.json').read_text())

STEPS = 40
FOOLBOX = {
  'linf': foolbox.attacks.LinfPGD,
  'l2': foolbox.attacks.L2PGD,
  'l1': foolbox.attacks.L1PGD,
}


@pytest.mark.parametrize(
  ('norm', 'eps'), [('linf', 0.08), ('l2', 1.2), ('l1', 8.0)]
)
def test_accuracy_is_within_a_point_of_foolboxs_or_below(
  norm, eps, trained, digits
):
  (images, labels), _ = digits

  def accuracy(found):
    return np.mean(trained(found).argmax(-1) == labels)

  # Without a random start, because starts vary by more than a point.
  peer = FOOLBOX[norm](
    steps=STEPS, rel_stepsize=2.5 / STEPS, random_start=False
  )
  model = foolbox.JAXModel(jax.jit(trained), bounds=(0, 1))
  criterion = foolbox.criteria.Misclassification(jax.numpy.asarray(labels))
  theirs = accuracy(
    peer.run(model, jax.numpy.asarray(images), criterion, epsilon=eps)
  )
  threat = attacks.Threat(norm=norm, eps=eps)
  attack = attacks.make_attack(threat, attacks.pgd(STEPS, random_start=False))
  attack = jax.jit(attack, static_argnums=0)
  ours = accuracy(attack(trained, jax.random.key(0), images, labels))
  natural = accuracy(images)
  assert natural > 0.9
  assert theirs < natural - 0.1  # The comparison means something.
  assert ours <= theirs + 0.01


@pytest.mark.parametrize(
  ('name', 'norm'),
  [('tiny_natural', 'linf'), ('tiny_masked', 'l2'), ('tiny_masked', 'l1')],
)
def test_autoattacks_order_leaves_no_more_than_the_original(name, norm, digits):
  """Compares on two tiny networks; `tiny_masked` masks its l2 gradients.

  The peers' figures are from benchmarks/strength_peers.py on the same 100
  digits: torchattacks, and the original AutoAttack for l1.
  """
  (images, labels), _ = digits
  theirs = TINY[name]['norms'][norm]
  threat = attacks.Threat(norm=norm, eps=theirs['eps'])
  logits_fn, variables = networks.load_trained(DATA / f'{name}.npz')

  def stop_below(outcomes):
    if outcomes.accuracies()['min'] <= min(theirs['accuracy'].values()):
      raise StopIteration  # Later attacks can only lower it.

  found = []
  with contextlib.suppress(StopIteration):
    evaluation.evaluate(
      logits_fn,
      images[:100],
      labels[:100],
      threat,
      params=variables,
      progress=False,
      on_batch=lambda outcomes: (found.append(outcomes), stop_below(outcomes)),
    )
  outcomes = found[-1]
  assert 100 * outcomes.natural.mean() == TINY[name]['natural']
  for attack in theirs['accuracy']:
    stage = outcomes.attacks.index(attack.lower())
    # One image of 100 is within the variation of random starts.
    accuracy = outcomes.accuracies_after(stage)['min']
    assert accuracy <= theirs['accuracy'][attack] + 1
  assert outcomes.accuracies()['min'] <= theirs['accuracy']['Square']
