import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mwrobust import attacks
from mwrobust.attacks import convolutions

KEY = jax.random.key(0)
KERNEL = jax.random.normal(KEY, (3, 3, 4, 4)) * 0.2
IMAGES = jax.random.normal(KEY, (2, 8, 8, 4))


def conv(x, kernel=KERNEL, form='NHWC', kernel_form='HWIO', **options):
  options = {'window_strides': (1, 1), 'padding': 'SAME'} | options
  return lax.conv_general_dilated(
    x, kernel, dimension_numbers=(form, kernel_form, form), **options
  )


@jax.custom_jvp
def doubled(x):
  return 2 * conv(x)


doubled.defjvp(
  lambda primals, tangents: (doubled(*primals), 2 * conv(*tangents))
)


@jax.custom_vjp
def halved(x):
  return conv(x) / 2


halved.defvjp(
  lambda x: (halved(x), None),
  lambda _, cotangent: (jax.vjp(conv, IMAGES)[1](cotangent)[0] / 2,),
)


def nchw(x):
  kernel = KERNEL.transpose(3, 2, 0, 1)
  x = conv(x.transpose(0, 3, 1, 2), kernel, 'NCHW', 'OIHW')
  return conv(jax.nn.relu(x), kernel, 'NCHW', 'OIHW')


def scanned(x):
  kernels = jnp.stack([KERNEL, -KERNEL, 2 * KERNEL])
  return lax.scan(lambda x, k: (jnp.tanh(conv(x, k)), None), x, kernels)[0]


def branched(x):
  return lax.cond(x.sum() > 0, lambda x: conv(conv(x)), jnp.sin, x)


def one_dimensional(x):
  x = x.reshape(2, 64, 4)
  return conv(
    x, KERNEL[0], 'NWC', 'WIO', window_strides=(2,), rhs_dilation=(2,)
  )


NETWORKS = {
  'plain': lambda x: conv(jnp.tanh(conv(x))),
  'strided': lambda x: conv(conv(x, padding='VALID'), window_strides=(2, 2)),
  'dilated': lambda x: conv(x, rhs_dilation=(2, 2)),
  'grouped': lambda x: conv(x, KERNEL[:, :, :2], feature_group_count=2),
  'one_dimensional': one_dimensional,
  'nchw': nchw,
  'jit': jax.jit(lambda x: conv(jax.jit(conv)(x))),
  'custom_jvp': lambda x: doubled(doubled(x)),
  'custom_vjp': lambda x: halved(halved(x)),
  'remat': jax.checkpoint(lambda x: conv(jnp.tanh(conv(x)))),
  'remat of a jit': jax.checkpoint(
    lambda x: conv(jax.jit(lambda x: x * IMAGES)(jnp.tanh(conv(x))))
  ),
  'scan': scanned,
  'cond': branched,
  'vmap': jax.vmap(lambda x: conv(x[None])[0]),
  'all': lambda x: branched(jax.checkpoint(scanned)(doubled(x))),
}


def fast(function):
  def evaluate(x):
    traced = jax.make_jaxpr(function)(x)
    return convolutions.eval_jaxpr(traced.jaxpr, traced.consts, x)[0]

  return evaluate


def in_a_loop(function):
  return lambda x: lax.fori_loop(0, 1, lambda _, x: function(x), x)


def gradient_of(network):
  return jax.grad(lambda x: jnp.sum(jnp.sin(network(x))))


def kernel_forms(function):
  text = jax.jit(function).lower(IMAGES).compile().as_text()
  return set(re.findall(r'dim_labels=(\w+->\w+)', text))


@pytest.mark.parametrize('name', NETWORKS)
def test_bit_identical_to_the_plain_gradient(name):
  plain = gradient_of(NETWORKS[name])
  expected = np.asarray(jax.jit(plain)(IMAGES))
  found = np.asarray(jax.jit(fast(plain))(IMAGES))
  assert np.abs(expected).max() > 0
  if name in ('scan', 'cond', 'all'):
    # The plain one has the rounding of the slow kernel inside a loop.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  else:
    assert (found == expected).all()
  looped = jax.jit(in_a_loop(fast(plain)))(IMAGES)
  np.testing.assert_allclose(looped, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('network', NETWORKS.values(), ids=NETWORKS.keys())
def test_only_fast_forms_are_left(network):
  forms = kernel_forms(in_a_loop(fast(gradient_of(network))))
  assert forms <= {'b01f_01io->b01f', 'b0f_0io->b0f'}


def test_a_while_loop_inside_the_model():
  def network(x):
    kernel = KERNEL.transpose(3, 2, 0, 1)
    x = x.transpose(0, 3, 1, 2)
    return lax.while_loop(
      lambda x: jnp.sum(x * x) > 1,
      lambda x: conv(x, kernel, 'NCHW', 'OIHW') / 4,
      x,
    ).transpose(0, 2, 3, 1)

  expected = jax.jit(network)(IMAGES)
  np.testing.assert_allclose(
    jax.jit(fast(network))(IMAGES), expected, rtol=1e-5, atol=1e-6
  )
  assert kernel_forms(fast(network)) == {'b01f_01io->b01f'}


def plain_model(x):
  return conv(jnp.tanh(conv(x))).mean((1, 2))


def nchw_model(x):
  return nchw(x).mean((2, 3))


ATTACKS = {
  'pgd': attacks.pgd(3),
  'apgd': attacks.apgd(3),
  'apgd, targeted': attacks.apgd(3, loss='dlr', targets=2),
  'fab': attacks.fab(3, targets=2),
  'square': attacks.square(3),
}


@pytest.mark.parametrize('model', [plain_model, nchw_model])
@pytest.mark.parametrize('attack', ATTACKS.values(), ids=ATTACKS.keys())
def test_only_fast_forms_are_left_of_an_attack(attack, model):
  threat = attacks.Threat(norm='linf', eps=0.1)
  run = attacks.make_attack(threat, attack)
  labels = jnp.arange(len(IMAGES))
  forms = kernel_forms(lambda images: run(model, KEY, images, labels))
  assert forms == {'b01f_01io->b01f'}


def test_only_fast_forms_are_left_of_a_switch():
  threats = attacks.six_threats(0.1, 0.5, 2.0)
  pairs = [(t, a) for a in ATTACKS.values() for t in threats[:2]]
  switch = attacks.make_switch(pairs)
  labels = jnp.arange(len(IMAGES))

  def run(images):
    index = images.sum().astype(jnp.int32) % len(pairs)  # Traced.
    return switch(nchw_model, index, KEY, images, labels)

  assert kernel_forms(run) == {'b01f_01io->b01f'}


def test_xla_still_needs_this_module():
  # If this fails, XLA itself makes convolutions inside loops fast: delete
  # mwrobust/attacks/convolutions.py and evaluate gradients directly.
  plain = gradient_of(NETWORKS['plain'])
  assert 'b01f_01oi->b01f' not in kernel_forms(plain)
  assert 'b01f_01oi->b01f' in kernel_forms(in_a_loop(plain))
  # Also without a gradient if the model is NCHW.
  forward = NETWORKS['nchw']
  looped = in_a_loop(lambda x: forward(x).transpose(0, 2, 3, 1))
  assert kernel_forms(looped) == {'bf01_oi01->bf01'}


def test_nothing_is_done_on_other_platforms(monkeypatch):
  def equations(function):
    return str(jax.make_jaxpr(function)(IMAGES))

  plain = gradient_of(NETWORKS['plain'])
  assert 'optimization_barrier' in equations(fast(plain))
  monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
  assert equations(fast(plain)) == equations(plain)


def test_unknown_primitives_are_left_as_they_are_with_a_warning():
  mesh = jax.make_mesh((2,), ('data',), (jax.sharding.AxisType.Auto,))
  shard = functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=jax.P('data'),
    out_specs=jax.P('data'),
  )
  plain = gradient_of(lambda x: conv(shard(conv)(conv(x))))
  expected = jax.jit(plain)(IMAGES)
  with pytest.warns(UserWarning, match='shard_map'):
    found = jax.jit(fast(plain))(IMAGES)
  assert (found == expected).all()


def _attack_gradient(x):
  """Returns the gradient of an NCHW network as attacks evaluate it."""
  traced = jax.make_jaxpr(jax.grad(lambda x: nchw(x).sum()))(x)
  return convolutions.eval_jaxpr(traced.jaxpr, traced.consts, x)[0]


def _drop_a_result(eqn, operands):
  return _eval_eqn(eqn, operands)[:-1]


def _change_a_shape(eqn, operands):
  return [result[..., :-1] for result in _eval_eqn(eqn, operands)]


_eval_eqn = convolutions._eval_eqn


@pytest.mark.parametrize(
  ('name', 'other'),
  [
    ('_KNOWN', {'padding'}),  # As if JAX had a new parameter.
    ('_fast_form', lambda ndim: None),
    ('_eval_eqn', _drop_a_result),
    ('_eval_eqn', _change_a_shape),
  ],
)
def test_an_unknown_form_is_evaluated_plainly(name, other, monkeypatch):
  expected = jax.grad(lambda x: nchw(x).sum())(IMAGES)
  monkeypatch.setattr(convolutions, name, other)
  with pytest.warns(UserWarning, match='version of JAX') as caught:
    found = _attack_gradient(IMAGES)
  assert len(caught) == 1
  np.testing.assert_array_equal(found, expected)
