"""Our attacks are no weaker than Foolbox's, with the same numbers.

Foolbox clips to [0, 1] at every step, so ours do here, too. (The paper's rule,
`clip='end'`, is another threat: part of the radius is spent on what the clip
takes away.)
"""

import foolbox
import jax
import numpy as np
import pytest

from mwrobust import attacks

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

  peer = FOOLBOX[norm](steps=STEPS, rel_stepsize=2.5 / STEPS)
  model = foolbox.JAXModel(jax.jit(trained), bounds=(0, 1))
  criterion = foolbox.criteria.Misclassification(jax.numpy.asarray(labels))
  theirs = accuracy(
    peer.run(model, jax.numpy.asarray(images), criterion, epsilon=eps)
  )
  threat = attacks.Threat(norm=norm, eps=eps, steps=STEPS, clip='step')
  attack = jax.jit(attacks.make_attack(threat), static_argnums=0)
  ours = accuracy(attack(trained, jax.random.key(0), images, labels))
  natural = accuracy(images)
  assert natural > 0.9
  assert theirs < natural - 0.1  # The comparison means something.
  assert ours <= theirs + 0.01
