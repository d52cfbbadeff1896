"""No field of a recipe is ignored: a change raises, or something else changes.

Fields of a recipe and of its GEMMs are changed in `dot_general`, those of a quantizer
in what it makes of an array, once for all sites and presets that share the quantizer.
"""

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import recipes
from fp4jax.numerics import (
    E4M3,
    F32,
    NEAREST,
    UE5M3,
    UNIFORM,
    FixedSigns,
    Format,
    Fresh,
    Hadamard,
    Held,
    MSEden,
    PerStepSigns,
    Quantizer,
    Scale,
    Site,
    Stochastic,
)
from tests.golden import inputs

# Every function that returns a recipe, at its defaults.
PRESETS = {
    name: function()
    for name, function in vars(recipes).items()
    if inspect.isfunction(function)
    and inspect.signature(function).return_annotation is recipes.Recipe
}
GEMMS = {"fprop": recipes.Fprop, "dgrad": recipes.Dgrad, "wgrad": recipes.Wgrad}
OTHER = Quantizer(UNIFORM, 8)

# Other values of every field, by the value that has it. A field without a row fails.
ALTERNATIVES = {
    "Recipe": {
        **{name: [gemm()] for name, gemm in GEMMS.items()},
        "compute": ["bf16", "f32", "native", "f16"],
        "residuals": ["operands", "packed", "none"],
        "share_dy": [False, True],
        "source": ["original", "fprop", "dgrad"],
    },
    "Fprop": {"x": [None, OTHER], "w": [None, OTHER]},
    "Dgrad": {"dy": [None, OTHER], "w": [None, OTHER]},
    "Wgrad": {"x": [None, OTHER], "dy": [None, OTHER]},
    "Quantizer": {
        "grid": [E4M3, 4],
        "block": [8, 0],
        "scale": [Scale(F32)],
        "tensor_scale": [None, Fresh(64.0), Held(target=128.0)],
        "rounding": [NEAREST, Stochastic(), MSEden()],
        "rotation": [None, Hadamard(8)],
    },
    "Scale": {
        "format": [F32, UE5M3],
        "rule": ["floor", "even"],
        "pad": [False, True],
        "candidates": [None, (6.0, 3.0)],
        "prescale": [None, 0.625],
    },
    "Fresh": {"target": [32.0]},
    "Held": {"every": [7, 0], "target": [96.0]},
    "MSEden": {"group": [64], "headroom": [1.0]},
    "Hadamard": {"size": [32], "signs": [FixedSigns(9), PerStepSigns()]},
    "FixedSigns": {"seed": [5]},
}
X, W, DY = (inputs.crowded(16, shape) for shape in ((32, 128), (128, 64), (32, 64)))
# Squares of all mantissas, some so small that the range of block scales matters, and in
# them columns so small that the size of a block does.
SQUARES = np.arange(0.0, 32, 2).reshape(2, 8)
X *= np.kron((1 + SQUARES % 7 / 7) * 2.0**-SQUARES, np.ones((16, 16)))
X[:, 8::16] *= 2.0**-12
KEY = jax.random.key(9)
STEP = jnp.int32(7)
MATMUL = (((1,), (0,)), ((), ()))
# These programs run once: time spent on compiling them better is lost.
fast_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def walk(value, path=()):
    """Every field of a value and of the values in it: owner, path, field's value."""
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        yield value, (*path, field.name), inner
        if dataclasses.is_dataclass(inner) and not isinstance(inner, Format):
            yield from walk(inner, (*path, field.name))


def replaced(value, path, new):
    """The value with another one at a path."""
    name, *rest = path
    if rest:
        new = replaced(getattr(value, name), rest, new)
    return dataclasses.replace(value, **{name: new})


def substituted(value, old, new):
    """The value with another one wherever an old one is."""
    if value == old:
        return new
    if not dataclasses.is_dataclass(value) or isinstance(value, Format):
        return value
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return type(value)(**{k: substituted(v, old, new) for k, v in fields.items()})


def changed(value, owner, path, new):
    """The value with a field changed; a period held for a layer, at all its sites."""
    if isinstance(owner, Held) and path[-1] == "every":
        return substituted(value, owner, dataclasses.replace(owner, every=new))
    return replaced(value, path, new)


def effects(value, changeable, differs):
    """What a change of every field does: "raises", "changes" or "nothing".

    Other values of a field are tried until one changes something.
    """
    found = []
    for owner, path, current in walk(value):
        kind = type(owner).__name__
        if not changeable(kind, path[-1]):
            continue
        if path[-1] == "pad":  # None means what the quantizer makes of it
            current = value.headroom > 1
        others = (new for new in ALTERNATIVES[kind][path[-1]] if new != current)
        for new in others:
            what = effect(functools.partial(changed, value, owner, path, new), differs)
            found.append(((kind, path[-1]), f"{'.'.join(path)}={new!r}", what))
            if what == "changes":
                break
    return found


def effect(make, differs):
    try:
        return "changes" if differs(make()) else "nothing"
    except (ValueError, TypeError, NotImplementedError) as error:
        message = r"^\w+: .*\b(must|needs?)\b"
        assert re.search(message, str(error), re.DOTALL), error
        return "raises"


def are_equal(a, b):
    a, b = (jax.tree.leaves(tree) for tree in (a, b))
    return len(a) == len(b) and all(map(np.array_equal, a, b))


# --- Quantizers --------------------------------------------------------------------

QUANTIZERS = {
    f"{name}-{site.name.lower()}": quantizer
    for name, recipe in PRESETS.items()
    for site, quantizer in recipe.sites.items()
    if quantizer is not None
}
# One of those that differ in nothing but the seed of their signs.
_NAMES = {re.sub(r"seed=\d+", "", repr(q)): name for name, q in QUANTIZERS.items()}
QUANTIZERS = {name: QUANTIZERS[name] for name in sorted(_NAMES.values())}


@functools.cache
def quantized(quantizer):
    """What a GEMM gets; under a held scale, from the amax of another array."""
    held = isinstance(quantizer.tensor_scale, Held)

    @fast_jit
    def run(x, key):
        amax = 2 * jnp.max(jnp.abs(x)) if held else None
        q = fp4jax.quantize(x, quantizer, key=key, amax=amax, site=Site.DGRAD_DY)
        return fp4jax.operand(q, jnp.float32), q.tensor_scale

    return jax.device_get(run(X, KEY))


@functools.cache
def effects_in_quantizer(name):
    quantizer = QUANTIZERS[name]
    differs = lambda other: not are_equal(quantized(quantizer), quantized(other))
    return effects(quantizer, lambda *field: field != ("Held", "every"), differs)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_no_field_of_a_quantizer_is_ignored(name):
    found = effects_in_quantizer(name)
    assert found
    assert [change for _, change, what in found if what == "nothing"] == []


# --- Recipes -----------------------------------------------------------------------


def dot(recipe):
    """The recipe's product, of x, w and what it holds."""

    def f(x, w, held=None):
        step = None if held is None else STEP
        return fp4jax.dot_general(
            x, w, MATMUL, recipe=recipe, key=KEY, held=held, step=step
        )

    return f


def operands(recipe):
    amaxes = jnp.stack([jnp.max(jnp.abs(a)) for a in (X, W, DY)])
    return (X, W, 2 * amaxes) if recipe.holds else (X, W)


@functools.cache
def program(recipe, gemms):
    """The lowered products of some GEMMs, and the state of the next step."""

    @fast_jit
    def run(args, dy):
        y, vjp = jax.vjp(dot(recipe), *args)
        out = dict(
            zip(("fprop", "dgrad", "wgrad", "held"), (y, *vjp(dy)), strict=False)
        )
        return {name: out[name] for name in (*gemms, "held") if name in out}

    return run.lower(operands(recipe), DY)


@functools.cache
def outcome(recipe, gemms):
    return jax.device_get(program(recipe, gemms).compile()(operands(recipe), DY))


@functools.cache
def residuals(recipe):
    """Shapes and dtypes of what the forward pass saves."""
    saved = jax.eval_shape(
        lambda *args: jax.vjp(dot(recipe), *args)[1], *operands(recipe)
    )
    return [(a.shape, str(a.dtype)) for a in jax.tree.leaves(saved)]


def reduced(recipe, gemm):
    """The recipe with one GEMM, where it does not depend on the others."""
    if recipe.share_dy or recipe.source != "original":
        return recipe
    others = {name: kind() for name, kind in GEMMS.items() if name != gemm}
    return dataclasses.replace(recipe, **others, residuals="operands")


def differ(a, b):
    """Whether recipes differ: in results, where a GEMM does, or in their programs."""
    gemms = tuple(name for name in GEMMS if getattr(a, name) != getattr(b, name))
    if len(gemms) == 1:
        a, b = (reduced(recipe, *gemms) for recipe in (a, b))
    if gemms:
        return not are_equal(outcome(a, gemms), outcome(b, gemms))
    texts = (program(recipe, tuple(GEMMS)).as_text() for recipe in (a, b))
    return residuals(a) != residuals(b) or len(set(texts)) == 2


@functools.cache
def effects_in_recipe(name):
    recipe = PRESETS[name]
    kinds = ("Recipe", *(kind.__name__ for kind in GEMMS.values()))
    changeable = lambda kind, name: kind in kinds or (kind, name) == ("Held", "every")
    return effects(recipe, changeable, functools.partial(differ, recipe))


@pytest.mark.parametrize("name", PRESETS)
def test_no_field_of_a_recipe_is_ignored(name):
    found = effects_in_recipe(name)
    assert found
    assert [change for _, change, what in found if what == "nothing"] == []


def test_every_field_changes_something_in_some_recipe():
    found = [effects_in_quantizer(name) for name in QUANTIZERS]
    found += [effects_in_recipe(name) for name in PRESETS]
    working = {field for one in found for field, _, what in one if what == "changes"}
    fields = {(kind, name) for kind, row in ALTERNATIVES.items() for name in row}
    assert fields - working == set()
