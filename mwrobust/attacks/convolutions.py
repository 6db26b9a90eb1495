"""Makes convolutions inside loops and switches fast on CPU, for any model.

XLA's CPU backend has one fast convolution, for images NHWC and kernels HWIO. At
the top level of a program a compiler pass brings every convolution into that
form; inside the body of a `while` or a branch of a `conditional` it does not.
There, the gradient with respect to the input (kernel `01oi`) runs 2 times
slower on jax 0.10 and 20 times slower on 0.12, and an NCHW model (Equinox,
ports from PyTorch) 30 times slower even forward. An attack is such a loop
around such a gradient.

So `eval_jaxpr` does what the pass would do: it evaluates a traced function with
each convolution in the fast form, its operands transposed behind an
`optimization_barrier` that keeps XLA from folding the transposes back. The
results are bit-identical to those of the plain function at the top level.

`tests/test_convolutions.py` compiles a plain loop and looks for the slow form.
When that test fails, XLA no longer needs this module: delete it.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.core
from jax import lax
from jax.extend import core

Array = jax.Array

# Primitives that call a jaxpr once, which is evaluated in place. (The gradient
# has already been taken, so their derivative rules are no longer needed.)
_CALLS = {
  'jit': 'jaxpr',
  'closed_call': 'call_jaxpr',
  'custom_jvp_call': 'call_jaxpr',
  'custom_vjp_call': 'call_jaxpr',
  'remat2': 'jaxpr',
}
# Parameters of a convolution that mean the same in every form.
_KNOWN = {
  'window_strides',
  'padding',
  'lhs_dilation',
  'rhs_dilation',
  'feature_group_count',
  'batch_group_count',
  'precision',
  'preferred_element_type',
}
# Primitives that are kept, with the jaxprs in these parameters rewritten.
_BODIES = {
  'scan': ('jaxpr',),
  'while': ('cond_jaxpr', 'body_jaxpr'),
  'cond': ('branches',),
}


def fast(function: Callable) -> Callable:
  """Makes a function of arrays fast on CPU, also inside a loop."""

  def call(*args):
    traced, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    results = eval_jaxpr(traced.jaxpr, traced.consts, *jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), results)

  return call


def eval_jaxpr(
  jaxpr: core.Jaxpr, consts: Sequence[Array], *args: Array
) -> list[Array]:
  """Works as `jax.core.eval_jaxpr`, with convolutions that are fast on CPU.

  Args:
    jaxpr: `jax.make_jaxpr(function)(*args).jaxpr`.
    consts: the values that the function closes over, `.consts` of the same.
    *args: the arguments.

  Returns:
    The flat list of results. Nothing is rewritten on other platforms, or if
    this version of JAX has unknown forms of convolutions or jaxprs.
  """
  if jax.default_backend() == 'cpu':
    try:
      results = _evaluate(jaxpr, consts, *args)
      found = [jax.typeof(result).str_short() for result in results]
      expected = [atom.aval.str_short() for atom in jaxpr.outvars]
      if found != expected:
        raise ValueError(f'{found} instead of {expected}')
      return results
    except Exception as error:  # A newer JAX may have changed its internals.
      warnings.warn(
        'Convolutions inside loops stay slow with this version of JAX: '
        f'{type(error).__name__}: {error}',
        stacklevel=2,
      )
  return jax.core.eval_jaxpr(jaxpr, consts, *args)


def _evaluate(
  jaxpr: core.Jaxpr, consts: Sequence[Array], *args: Array
) -> list[Array]:
  if not _is_slow(jaxpr):
    return jax.core.eval_jaxpr(jaxpr, consts, *args)
  values = dict(zip(jaxpr.constvars, consts, strict=True))
  values.update(zip(jaxpr.invars, args, strict=True))

  def read(atom: core.Var | core.Literal) -> Array:
    return atom.val if isinstance(atom, core.Literal) else values[atom]

  for eqn in jaxpr.eqns:
    with eqn.ctx.manager:
      results = _eval_eqn(eqn, [read(atom) for atom in eqn.invars])
    values.update(zip(eqn.outvars, results, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _eval_eqn(eqn: core.JaxprEqn, operands: list[Array]) -> list[Array]:
  name, params = eqn.primitive.name, eqn.params
  if name == 'conv_general_dilated':
    return [_convolution(*operands, **params)]
  if name in _CALLS:
    if params.get('differentiated'):  # Makes a remat compute twice.
      operands = lax.optimization_barrier(operands)
    jaxpr, consts = _open(params[_CALLS[name]])
    return _evaluate(jaxpr, consts, *operands)
  if name in _BODIES:
    bodies = {key: _map_jaxprs(_rewrite, params[key]) for key in _BODIES[name]}
    params = params | bodies
  params = eqn.primitive.get_bind_params(params)
  results = eqn.primitive.bind(*operands, **params)
  return results if eqn.primitive.multiple_results else [results]


def _convolution(
  images: Array,
  kernel: Array,
  *,
  dimension_numbers: lax.ConvDimensionNumbers,
  **params,
) -> Array:
  """Convolves as NHWC, HWIO -> NHWC (or its 1-D or 3-D counterpart)."""
  given = {name for name, value in params.items() if not _is_empty(value)}
  if unknown := given - _KNOWN:
    raise ValueError(f'convolutions have {", ".join(sorted(unknown))}')
  batch, feature, *space = dimension_numbers.lhs_spec
  images = _transpose(images, (batch, *space, feature))
  output, input_, *space = dimension_numbers.rhs_spec
  kernel = _transpose(kernel, (*space, input_, output))
  results = lax.conv_general_dilated_p.bind(
    images, kernel, dimension_numbers=_fast_form(images.ndim), **params
  )
  batch, feature, *space = dimension_numbers.out_spec
  return _transpose(results, _inverse((batch, *space, feature)))


def _is_empty(value: object) -> bool:
  """Returns whether a parameter is unset, such as a sharding without axes."""
  if isinstance(value, jax.sharding.NamedSharding):
    return not any(value.spec)
  return value is None


def _fast_form(ndim: int) -> lax.ConvDimensionNumbers:
  space = range(ndim - 2)
  images = (0, ndim - 1, *(1 + axis for axis in space))
  kernel = (ndim - 1, ndim - 2, *space)
  return lax.ConvDimensionNumbers(images, kernel, images)


def _transpose(x: Array, axes: tuple[int, ...]) -> Array:
  if axes == tuple(range(x.ndim)):
    return x
  # The barriers keep XLA from folding the transpose into the convolution on
  # either side of it, which would bring the slow form back.
  barrier = lax.optimization_barrier
  return barrier(lax.transpose(barrier(x), axes))


def _inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
  return tuple(sorted(range(len(axes)), key=axes.__getitem__))


def _is_slow(jaxpr: core.Jaxpr) -> bool:
  """Returns whether a convolution has to be rewritten, here or further in."""

  def eqn_is_slow(eqn: core.JaxprEqn) -> bool:
    name = eqn.primitive.name
    if name == 'conv_general_dilated':
      numbers = eqn.params['dimension_numbers']
      return numbers != _fast_form(len(numbers.lhs_spec))
    is_slow = any(map(_is_slow, _inner_jaxprs(eqn)))
    if is_slow and name not in {*_CALLS, *_BODIES}:
      warnings.warn(f'Convolutions inside {name} stay slow.', stacklevel=2)
      return False
    return is_slow

  # A list, because each unknown primitive has to be seen for its warning.
  found = [eqn_is_slow(eqn) for eqn in jaxpr.eqns]
  return any(found)


def _inner_jaxprs(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
  for param in eqn.params.values():
    for each in param if isinstance(param, tuple) else (param,):
      if isinstance(each, core.ClosedJaxpr | core.Jaxpr):
        yield _open(each)[0]


def _rewrite(body: core.ClosedJaxpr) -> core.ClosedJaxpr:
  jaxpr, consts = _open(body)
  if not _is_slow(jaxpr):
    return body
  function = functools.partial(_evaluate, jaxpr, consts)
  return jax.make_jaxpr(function)(*body.in_avals)


def _map_jaxprs(function, param):
  """Applies the function to a parameter's jaxpr or tuple of jaxprs."""
  if isinstance(param, tuple):
    return tuple(map(function, param))
  return function(param)


def _open(body: core.ClosedJaxpr | core.Jaxpr) -> tuple[core.Jaxpr, Sequence]:
  # Before jax 0.12 the body of a remat is open: it has no consts.
  if isinstance(body, core.ClosedJaxpr):
    return body.jaxpr, body.consts
  return body, ()
