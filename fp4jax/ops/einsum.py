"""Any two-operand einsum as one `dot_general` and one transpose."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fp4jax.ops.dims import DimensionNumbers
from fp4jax.ops.dot_general import dot_general
from fp4jax.recipes import Recipe

Labels = tuple[str, ...]


def einsum(
    spec: str,
    lhs: jax.Array,
    rhs: jax.Array,
    *more: jax.Array,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
    weight: Literal["lhs", "rhs"] = "rhs",
    held: jax.Array | None = None,
    step: jax.Array | int | None = None,
    microbatch: jax.Array | int | None = None,
) -> jax.Array:
    """Computes a two-operand `jnp.einsum` whose product is `fp4jax.dot_general`.

    y = transpose(dot_general(lhs', rhs')),  lhs' and rhs' without repeated labels and
    without labels that neither the other operand nor the result has

    Labels of both operands are batch dimensions where the result has them, and are
    contracted, in the order of `lhs`, where it has not. A repeated label of one operand
    takes its diagonal; a label of one operand only that the result lacks is summed
    before anything is quantized. A dimension of size 1 is broadcast against that of the
    same label in the other operand, as are those of an ellipsis.

    Args:
      spec: such as "bsd,df->bsf", "...d,df" or "b...k, kn -> n...b".
      lhs: array with one dimension for each label; x unless `weight` is "lhs".
      rhs: likewise; w unless `weight` is "lhs".
      *more: none. A product of several is one of two after the other.
      precision: as for `lax.dot_general`.
      preferred_element_type: the dtype of the result.
      out_sharding: of the result: a partition spec or a `NamedSharding`.
      recipe: as for `fp4jax.dot_general`; None quantizes nothing.
      key: as for `fp4jax.dot_general`.
      weight: as for `fp4jax.dot_general`.
      held: as for `fp4jax.dot_general`.
      step: as for `fp4jax.dot_general`.
      microbatch: as for `fp4jax.dot_general`; the parts divide the first label of
        `lhs`, or where that is w of `rhs`, that only it and the result have.

    Returns:
      What `jnp.einsum` returns: one dimension for each label of the result.

    Raises:
      ValueError: a spec that is not of two operands, or more than two; one that has a
        result label that no operand has, or does not fit the shapes; and as
        `fp4jax.dot_general`.
      TypeError: as `fp4jax.dot_general`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fp4jax import recipes
      >>> x, w = jnp.ones((2, 3, 32)), jnp.ones((4, 32, 8))
      >>> einsum("bsd,hdf->bhsf", x, w, recipe=recipes.mxfp8()).shape
      (2, 4, 3, 8)
    """
    if more:
        raise ValueError(
            f"einsum: operands must be two, got {2 + len(more)} (spec={spec!r}). Give "
            "the result of two to another einsum, and each its recipe."
        )
    dot = functools.partial(
        dot_general,
        precision=precision,
        preferred_element_type=preferred_element_type,
        recipe=recipe,
        key=key,
        weight=weight,
        held=held,
        step=step,
        microbatch=microbatch,
    )
    return einsum_with(dot, spec, lhs, rhs, out_sharding=out_sharding)


def einsum_with(
    dot_general: Callable[..., jax.Array],
    spec: str,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """Computes an einsum by any function with the arguments of `lax.dot_general`."""
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    terms, out = parse(spec, lhs.ndim, rhs.ndim)
    lhs, lhs_labels = _diagonal(lhs, terms[0])
    rhs, rhs_labels = _diagonal(rhs, terms[1])
    _check_sizes(spec, _sizes(lhs, lhs_labels), _sizes(rhs, rhs_labels))
    (lhs, lhs_labels), (rhs, rhs_labels) = (
        _squeeze(lhs, lhs_labels, _sizes(rhs, rhs_labels)),
        _squeeze(rhs, rhs_labels, _sizes(lhs, lhs_labels)),
    )
    lhs, lhs_labels = _sum(lhs, lhs_labels, {*rhs_labels, *out})
    rhs, rhs_labels = _sum(rhs, rhs_labels, {*lhs_labels, *out})
    plan = _Plan.of(lhs_labels, rhs_labels, out)
    if out_sharding is not None:
        out_sharding = plan.before_transpose(out_sharding)
    y = dot_general(lhs, rhs, plan.dimension_numbers, out_sharding=out_sharding)
    return y.transpose(plan.permutation)


def parse(spec: str, lhs_ndim: int, rhs_ndim: int) -> tuple[list[Labels], Labels]:
    """Returns the labels of both operands and of the result.

    A dimension of an ellipsis is labelled by its distance from the right: "...0".
    """
    if not isinstance(spec, str):
        raise TypeError(f"einsum: spec must be a string, got spec={spec!r}.")
    inputs, arrow, result = spec.replace(" ", "").partition("->")
    terms = [_split(spec, term) for term in inputs.split(",")]
    if len(terms) != 2:
        raise ValueError(
            f"einsum: spec must have two operands, got {len(terms)} in spec={spec!r}."
        )
    lhs, rhs = terms
    lhs_extra = _ellipsis(spec, lhs, lhs_ndim, name="lhs")
    rhs_extra = _ellipsis(spec, rhs, rhs_ndim, name="rhs")
    named = [label for label in (*lhs, *rhs) if label != "..."]
    if arrow:
        out = _split(spec, result)
        _check_result(spec, out, named)
    else:
        out = ["...", *sorted(label for label in named if named.count(label) == 1)]
    out = _expand(out, max(lhs_extra, rhs_extra))
    return [_expand(lhs, lhs_extra), _expand(rhs, rhs_extra)], out


def _check_result(spec: str, out: list[str], named: list[str]) -> None:
    if unknown := sorted({*out} - {*named, "..."}):
        raise ValueError(
            "einsum: every label of the result must be one of an operand, got "
            f"{unknown[0]!r} (spec={spec!r})."
        )
    if len(set(out)) < len(out):
        raise ValueError(
            f"einsum: no label of the result must repeat, got spec={spec!r}."
        )


def _split(spec: str, term: str) -> list[str]:
    """Splits "b...k" into "b", "..." and "k"."""
    parts = re.findall(r"\.\.\.|[a-zA-Z]", term)
    if "".join(parts) != term or parts.count("...") > 1:
        raise ValueError(
            "einsum: spec must be made of letters, commas, '->' and at most one '...' "
            f"in each term, got spec={spec!r}."
        )
    return parts


def _ellipsis(spec: str, term: list[str], ndim: int, *, name: str) -> int:
    """Returns how many dimensions the ellipsis of an operand stands for."""
    extra = ndim - len(term) + term.count("...")
    if extra < 0 or (extra > 0 and "..." not in term):
        raise ValueError(
            f"einsum: {name} must have one dimension for each label of "
            f"{''.join(term)!r}, got ndim={ndim} (spec={spec!r})."
        )
    return extra


def _expand(term: list[str], ellipsis: int) -> Labels:
    """Replaces the ellipsis of a term by that many labels."""
    if "..." not in term:
        return tuple(term)
    i = term.index("...")
    middle = (f"...{d}" for d in reversed(range(ellipsis)))
    return (*term[:i], *middle, *term[i + 1 :])


def _diagonal(x: jax.Array, labels: Labels) -> tuple[jax.Array, Labels]:
    """Takes the diagonal of axes that share a label."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            i = labels.index(label)
            j = labels.index(label, i + 1)
            if x.shape[i] != x.shape[j]:
                raise ValueError(
                    f"einsum: dimensions of the repeated label {label!r} must be "
                    f"equal, got {x.shape[i]} and {x.shape[j]}."
                )
            x = jnp.diagonal(x, axis1=i, axis2=j)  # the last axis of its result
            labels = (*labels[:i], *labels[i + 1 : j], *labels[j + 1 :], label)
    return x, labels


def _sizes(x: jax.Array, labels: Labels) -> dict[str, int]:
    return dict(zip(labels, x.shape, strict=True))


def _check_sizes(spec: str, lhs: dict[str, int], rhs: dict[str, int]) -> None:
    for label in lhs.keys() & rhs.keys():
        if lhs[label] != rhs[label] and 1 not in (lhs[label], rhs[label]):
            raise ValueError(
                f"einsum: sizes of label {label!r} must be equal, or one of them 1, "
                f"got {lhs[label]} in lhs and {rhs[label]} in rhs (spec={spec!r})."
            )


def _squeeze(
    x: jax.Array, labels: Labels, other: dict[str, int]
) -> tuple[jax.Array, Labels]:
    """Drops dimensions of size 1 whose label is longer in the other operand."""
    kept = [i for i, n in enumerate(labels) if x.shape[i] != 1 or other.get(n, 1) == 1]
    shape = tuple(x.shape[i] for i in kept)
    return x.reshape(shape), tuple(labels[i] for i in kept)


def _sum(x: jax.Array, labels: Labels, kept: set[str]) -> tuple[jax.Array, Labels]:
    """Sums over the labels that are not kept."""
    axes = tuple(i for i, n in enumerate(labels) if n not in kept)
    return jnp.sum(x, axes, dtype=x.dtype), tuple(n for n in labels if n in kept)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The dimension numbers of a product, and the axes of the result in its output."""

    dimension_numbers: DimensionNumbers
    permutation: tuple[int, ...]

    @classmethod
    def of(cls, lhs: Labels, rhs: Labels, out: Labels) -> "_Plan":
        """Plans from labels, each of which occurs in two of the three terms."""
        shared = [n for n in lhs if n in rhs]
        batch = [n for n in shared if n in out]
        contracting = [n for n in shared if n not in out]
        axes = lambda names: (
            tuple(map(lhs.index, names)),
            tuple(map(rhs.index, names)),
        )
        free = [n for n in (*lhs, *rhs) if n not in shared]
        result = [*batch, *free]
        return cls((axes(contracting), axes(batch)), tuple(map(result.index, out)))

    def before_transpose(self, sharding: Any) -> Any:
        """Returns the sharding of the product, from that of its transpose."""
        named = isinstance(sharding, NamedSharding)
        spec = tuple(sharding.spec if named else sharding)
        spec += (None,) * (len(self.permutation) - len(spec))
        inverse = sorted(range(len(spec)), key=self.permutation.__getitem__)
        spec = PartitionSpec(*(spec[i] for i in inverse))
        return NamedSharding(sharding.mesh, spec) if named else spec
