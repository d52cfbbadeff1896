"""What each matrix product of a model really does, as a table and as JSON."""

import dataclasses
import functools
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import rich.console
import rich.table
from flax import linen, nnx
from jax import lax

from fp4jax.linen import DotGeneral as LinenDotGeneral
from fp4jax.nnx import layers
from fp4jax.nnx.inject import Layer
from fp4jax.numerics import Fresh, Held, MSEden, Quantizer, Site, Stochastic
from fp4jax.ops.dims import DimensionNumbers, Dims
from fp4jax.ops.dot_general import fp4_dot
from fp4jax.ops.einsum import einsum_with
from fp4jax.recipes import Recipe, to_json

_GEMMS = {
    "fprop": (Site.FPROP_X, Site.FPROP_W),
    "dgrad": (Site.DGRAD_DY, Site.DGRAD_W),
    "wgrad": (Site.WGRAD_X, Site.WGRAD_DY),
}
_BACKWARD = getattr(fp4_dot.bwd, "__name__", "")  # by which programs show our products
_LINEN_LAYERS = (linen.Dense, linen.DenseGeneral, linen.Einsum)

# Batch, tokens m, input features k, output features n; None where it is not known.
Sizes = tuple[int | None, int | None, int, int]


@dataclasses.dataclass(frozen=True)
class Matmul:
    """One matrix product of a model, y = x w.

    Attributes:
      path: of the layer, such as "blocks/0/attention/query"; of a product that no
        layer owns, where it stands in the source.
      sizes: (batch, m, k, n): tokens m, input features k, output features n; the first
        two are None where no inputs were given.
      recipe: what is quantized; None is nothing.
      stack: leading axes of layers that are stacked under one path.
      reachable: whether a policy could give it a recipe.
    """

    path: str
    sizes: Sizes
    recipe: Recipe | None
    stack: tuple[int, ...] = ()
    reachable: bool = True

    @property
    def quantizations(self) -> int:
        """Quantized operands that one forward and backward pass computes."""
        return 0 if self.recipe is None else _quantizations(self.recipe)

    def operands(self, gemm: str) -> tuple[str, str]:
        """Returns one line for each operand of "fprop", "dgrad" or "wgrad"."""
        first, second = _GEMMS[gemm]
        return self._operand(gemm, first), self._operand(gemm, second)

    def _operand(self, gemm: str, site: Site) -> str:
        name = ("x", "w", "dy")[site.operand]
        if self.recipe is None:
            return f"{name}: as it is"
        quantizer = self.recipe.sites[site]
        if quantizer is None:
            return f"{name}: {'F32' if self.recipe.compute == 'f32' else 'BF16'}"
        if self.recipe.share_dy and site == Site.WGRAD_DY:
            return "dy: that of dgrad"
        if self.recipe.source == "fprop" and site in (Site.DGRAD_W, Site.WGRAD_X):
            name = f"Q({name})"
        parts = [f"{name}:", *_describe(quantizer)]
        size, padded = self.contraction(gemm)
        if padded != size:
            parts.append(f"zeros {size} to {padded}")
        return " ".join(parts)

    def contraction(self, gemm: str) -> tuple[int | None, int | None]:
        """Returns the size of the contraction axis of a GEMM, and its padded size."""
        _, m, k, n = self.sizes
        size = {"fprop": k, "dgrad": n, "wgrad": m}[gemm]
        if size is None or self.recipe is None:
            return size, size
        padded = size
        for site in _GEMMS[gemm]:
            quantizer = self.recipe.sites[site]
            if quantizer is not None:
                padded = max(padded, size + -size % quantizer.multiple)
        return size, padded


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A table of the matrix products of a model; prints, and shows in a notebook.

    Attributes:
      matmuls: in the order of the model.
    """

    matmuls: tuple[Matmul, ...]

    @property
    def quantizations(self) -> int:
        """Quantized operands that one traced forward and backward pass computes.

        Layers stacked for a scan count once, as in the program.
        """
        return sum(matmul.quantizations for matmul in self.matmuls)

    def to_json(self) -> list[dict[str, Any]]:
        """Returns what `json.dumps` takes: one dict for each product."""
        return [_matmul_json(matmul) for matmul in self.matmuls]

    def _table(self) -> rich.table.Table:
        table = rich.table.Table(
            caption=f"{self.quantizations} quantizations, forward and backward",
            show_lines=True,
        )
        for column in ("layer", "m x k x n", "compute", *_GEMMS):
            table.add_column(column, overflow="fold")
        for matmul in self.matmuls:
            stack = "".join(f"{n} x " for n in matmul.stack)
            batch, *sizes = matmul.sizes
            known = [str(size or "m") for size in sizes]
            known = (
                known if batch in (1, None) else [f"{batch} of {known[0]}", *known[1:]]
            )
            table.add_row(
                matmul.path or "(the model)",
                stack
                + " x ".join(known if batch in (1, None) else [str(batch), *known]),
                _compute(matmul),
                *(
                    "\n".join(matmul.operands(gemm)) if matmul.recipe else ""
                    for gemm in _GEMMS
                ),
            )
        return table

    def __str__(self) -> str:
        return self._render().export_text()

    def _repr_html_(self) -> str:
        return self._render().export_html(
            inline_styles=True, code_format="<pre>{code}</pre>"
        )

    def _render(self) -> rich.console.Console:
        console = rich.console.Console(
            file=io.StringIO(), record=True, width=160, force_jupyter=False
        )
        console.print(self._table())
        return console


def explain(
    model: nnx.Module | linen.Module, *inputs: Any, **kwargs: Any
) -> Explanation:
    """Lists the matrix products of a model, and what each does in its three GEMMs.

    Given inputs, the model is traced, not run, and the table holds every product of
    the program: those of layers by path, and those that no recipe reaches, such as an
    output head tied to the embedding and the products of attention, by their place in
    the source. Without inputs it holds the linear layers of an NNX model.

    Args:
      model: an NNX module, or a Linen module, quantized or not.
      *inputs: of the model's call: arrays or their shapes, as `jax.eval_shape` takes.
      **kwargs: likewise.

    Returns:
      The table: `print` it, let a notebook show it, or take `.to_json()`.

    Raises:
      TypeError: a model of neither kind.
      ValueError: a Linen module without inputs.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import fp4jax.nnx
      >>> from fp4jax import recipes
      >>> model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
      >>> fp4jax.nnx.quantize_model(model, recipes.ufp4(), rngs=nnx.Rngs(1))
      >>> (matmul,) = fp4jax.explain(model, jnp.ones((8, 64))).matmuls
      >>> matmul.sizes, matmul.operands("dgrad")[0]
      ((1, 8, 64, 32), 'dy: UNIFORM 1x16 F32 SR RHT16')
    """
    if isinstance(model, nnx.Module):
        found = _nnx_matmuls(model, inputs, kwargs)
    elif isinstance(model, linen.Module):
        if not inputs and not kwargs:
            raise ValueError(
                "explain: inputs must be given for a Linen module, whose layers exist "
                "only when it is called. Shapes, as jax.ShapeDtypeStruct, are enough."
            )
        found = _linen_matmuls(model, inputs, kwargs)
    else:
        raise TypeError(
            f"explain: model must be a Flax NNX or Linen module, got {model!r}."
        )
    return Explanation(tuple(found))


def _nnx_matmuls(model: nnx.Module, inputs, kwargs) -> list[Matmul]:
    if not inputs and not kwargs:
        return [_of_kernel(layer) for layer in layers(model)]
    model = nnx.clone(model)
    found: list[Matmul] = []
    for layer in layers(model):
        recipe = None if layer.gemm is None else layer.gemm.recipe
        make = functools.partial(Matmul, path=layer.path, recipe=recipe)
        make = functools.partial(make, stack=layer.stack)
        product = getattr(layer.module, layer.attribute) or lax.dot_general
        recorder = nnx.static(_Recorder(product, make, found))
        setattr(layer.module, layer.attribute, recorder)
    graph, state = nnx.split(model)

    def call(state, *inputs, **kwargs):
        return nnx.merge(graph, state, copy=True)(*inputs, **kwargs)

    return _with_others(found, jax.make_jaxpr(call)(state, *inputs, **kwargs))


def _of_kernel(layer: Layer) -> Matmul:
    """Returns the product of an NNX layer whose inputs are not known."""
    module, recipe = layer.module, None if layer.gemm is None else layer.gemm.recipe
    n = math.prod(layer.shape)
    match module:
        case nnx.Linear():
            k = module.in_features
        case nnx.LinearGeneral():
            k = math.prod(module.in_features)
            n //= math.prod(module.batch_axis.values())
        case _:
            spec = module.einsum_str.replace(" ", "").split("->")[0].split(",")
            sizes = zip(spec[1], layer.shape, strict=False)
            k = math.prod(size for label, size in sizes if label in spec[0])
    return Matmul(layer.path, (None, None, k, n // k), recipe, layer.stack)


class _Recorder:
    """The product of an NNX layer, that notes the sizes of what it multiplies."""

    def __init__(self, product: Any, make: Callable[..., Matmul], found: list[Matmul]):
        self.product, self.make, self.found = product, make, found

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Notes the sizes and multiplies."""
        if isinstance(args[0], str):
            spec, *arrays = args
            einsum = functools.partial(einsum_with, self._note_and_multiply, spec)
            jax.eval_shape(einsum, *arrays)
        else:
            self._note(*args[:3])
        return self.product(*args, **kwargs)

    def _note(self, lhs, rhs, dimension_numbers) -> None:
        self.found.append(self.make(sizes=_sizes(lhs, rhs, dimension_numbers)))

    def _note_and_multiply(self, lhs, rhs, dimension_numbers, **_) -> jax.Array:
        self._note(lhs, rhs, dimension_numbers)
        return lax.dot_general(lhs, rhs, dimension_numbers)


def _linen_matmuls(model: linen.Module, inputs, kwargs) -> list[Matmul]:
    found: list[Matmul] = []

    def intercept(method, args, kwargs, context):
        module, before = context.module, len(found)
        if context.method_name != "__call__":
            return method(*args, **kwargs)
        if isinstance(module, LinenDotGeneral):
            path = "/".join(module.path[:-1])
            found.append(Matmul(path, _sizes(*args[:3]), module.recipe))
            return method(*args, **kwargs)
        y = method(*args, **kwargs)
        if isinstance(module, _LINEN_LAYERS) and len(found) == before:
            kernel = module.variables["params"]["kernel"]
            # x has m k elements, the kernel k n, y m n.
            k = math.isqrt(args[0].size * kernel.size // y.size)
            sizes = (1, args[0].size // k, k, kernel.size // k)
            found.append(Matmul("/".join(module.path), sizes, None))
        return y

    def call(*inputs, **kwargs):
        return model.init_with_output(jax.random.key(0), *inputs, **kwargs)[0]

    with linen.intercept_methods(intercept):
        jaxpr = jax.make_jaxpr(call)(*inputs, **kwargs)
    return _with_others(found, jaxpr)


def _with_others(found: list[Matmul], jaxpr: Any) -> list[Matmul]:
    """Adds the products of a program that are not of a layer."""
    others = [
        Matmul(f"({place})", sizes, None, reachable=False)
        for place, sizes in _products(jaxpr.jaxpr)
    ]
    for matmul in found:
        same = [o for o in others if o.sizes == matmul.sizes]
        if matmul.recipe is None and same:
            others.remove(same[0])
    return found + others


def _products(jaxpr: Any) -> Iterator[tuple[str, Sizes]]:
    """Yields place and sizes of every `lax.dot_general` that is not fp4jax's."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            lhs, rhs = (v.aval for v in eqn.invars)
            sizes = _sizes(lhs, rhs, eqn.params["dimension_numbers"])
            yield str(eqn.source_info.name_stack) or _source(eqn), sizes
        if getattr(eqn.params.get("bwd"), "__name__", None) == _BACKWARD:
            continue
        for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(sub):
                yield from _products(getattr(sub, "jaxpr", sub))


def _source(eqn: Any) -> str:
    """Returns the function, outside the libraries, that a product was written in."""
    traceback = eqn.source_info.traceback
    for frame in [] if traceback is None else traceback.frames:
        if not any(name in frame.file_name for name in ("/jax/", "/flax/", __file__)):
            return f"{frame.function_name}, {Path(frame.file_name).name}"
    return "no layer"


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def _sizes(lhs: Any, rhs: Any, dimension_numbers: DimensionNumbers) -> Sizes:
    dims = Dims.of(dimension_numbers)
    batch = math.prod(lhs.shape[d] for d in dims.lhs_batch)
    k = math.prod(lhs.shape[d] for d in dims.lhs_contracting)
    m, n = (math.prod(x.shape) // (batch * k) for x in (lhs, rhs))
    return batch, m, k, n


def _quantizations(recipe: Recipe) -> int:
    """Counts the quantizations of a traced forward and backward pass of a layer."""
    count = sum(quantizer is not None for quantizer in recipe.sites.values())
    count -= recipe.share_dy
    if (
        recipe.source == "fprop"
    ):  # the backward pass rounds w, and unless packed x, anew
        count += 1 + (recipe.residuals == "operands")
    if recipe.residuals == "packed" and recipe.source == "fprop":
        count += 1  # what is packed is quantized beside what is multiplied
    return count


def _compute(matmul: Matmul) -> str:
    if matmul.recipe is None:
        return "no recipe reaches it" if not matmul.reachable else "as it is"
    residual = ", packed x" if matmul.recipe.residuals == "packed" else ""
    return matmul.recipe.compute + residual


def _describe(quantizer: Quantizer) -> Iterator[str]:
    """Yields the words that say how an operand is quantized."""
    scale, size = quantizer.scale, quantizer.block_size
    yield quantizer.grid.name
    yield f"{size}x{size}" if quantizer.is_square else f"1x{size}"
    name = scale.format.name
    options = [scale.rule, *(f"{c:g}" for c in scale.candidates or ())]
    options += [f"prescale {scale.prescale}"] if scale.prescale else []
    options += ["pad 17/16"] if quantizer.pads else []
    options = [option for option in options if option]
    yield name + (f"({', '.join(options)})" if options else "")
    match quantizer.tensor_scale:
        case Held(every=every, target=target):
            yield f"held({every}, {target:g})"
        case Fresh(target=target):
            yield f"fresh({target:g})"
    match quantizer.rounding:
        case Stochastic():
            yield "SR"
        case MSEden(group=group):
            yield f"MS-EDEN({group})"
        case _:
            yield "RTNE"
    if quantizer.rotation is not None:
        yield f"RHT{quantizer.rotation.size}"
        if quantizer.rotation.draws:
            yield "(signs per step)"


def _matmul_json(matmul: Matmul) -> dict[str, Any]:
    batch, m, k, n = matmul.sizes
    gemms = {}
    for gemm, sites in _GEMMS.items():
        size, padded = matmul.contraction(gemm)
        names = (("x", "w", "dy")[site.operand] for site in sites)
        quantizers = (matmul.recipe and matmul.recipe.sites[site] for site in sites)
        operands = {name: to_json(q) for name, q in zip(names, quantizers, strict=True)}
        gemms[gemm] = {"contraction": size, "padded": padded, "operands": operands}
    options = ("compute", "residuals", "share_dy", "source")
    recipe = matmul.recipe
    return {
        "path": matmul.path,
        "stack": list(matmul.stack),
        "sizes": {"batch": batch, "m": m, "k": k, "n": n},
        "reachable": matmul.reachable,
        "quantizations": matmul.quantizations,
        "recipe": recipe and {name: getattr(recipe, name) for name in options},
        "gemms": gemms,
    }
