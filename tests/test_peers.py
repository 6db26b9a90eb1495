"""Our attacks are no weaker than those of Foolbox and AutoAttack."""

import json
import pathlib

import foolbox
import jax
import numpy as np
import pytest

from benchmarks import sequence
from mwrobust import attacks

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

  # Without a random start: among starts both vary by more than a point.
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
  """Two tiny networks; `tiny_masked` masks its gradients under l2.

  The peers' figures are those of benchmarks/strength_peers.py on the same 100
  digits: torchattacks, for l1 the original AutoAttack.
  """
  (images, labels), _ = digits
  data = [images[:100], labels[:100], np.arange(100, dtype=np.int32)]
  theirs = TINY[name]['norms'][norm]
  threat = attacks.Threat(norm=norm, eps=theirs['eps'])
  logits_fn, variables = sequence.load_network(DATA / f'{name}.npz')
  stands = np.array(logits_fn(variables, data[0]).argmax(axis=1) == data[1])
  assert 100 * stands.mean() == TINY[name]['natural']
  for attack_name, attack in sequence.standard(norm).items():
    if 100 * stands.mean() > min(theirs['accuracy'].values()):
      step = sequence.make_step(logits_fn, threat, attack)
      sequence.attack_survivors(
        step, attack.tries, variables, data, stands, batch_size=50
      )
    # Two images are within the luck of random starts.
    assert 100 * stands.mean() <= theirs['accuracy'][attack_name] + 2
  assert 100 * stands.mean() <= theirs['accuracy']['Square']
