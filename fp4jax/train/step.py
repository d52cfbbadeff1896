"""The jitted training and evaluation steps."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from fp4jax.models import moe
from fp4jax.models.moe import Balances
from fp4jax.nnx import Held, set_step
from fp4jax.numerics.checks import is_integer
from fp4jax.recipes import Recipe
from fp4jax.sharding import Compiled, num_shards
from fp4jax.train.accumulate import accumulate, check_rows
from fp4jax.train.losses import Batch, token_losses
from fp4jax.train.optim import Optimizer
from fp4jax.train.partition import check_mesh, spread
from fp4jax.train.state import TrainState

Metrics = dict[str, jax.Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]

# Of products in FP8, on a GPU: XLA tries Triton kernels for minutes, cuBLAS is faster.
FP8_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


def compiler_options(graph: nnx.GraphDef) -> dict[str, bool]:
    """Returns what XLA is told where it compiles a model.

    XLA may skip the rounding of a bfloat16 value inside a fusion, and which it skips
    depends on how layers are scanned and rematerialized: it must not.

    Args:
      graph: the model's, whose recipes may compute in FP8.
    """
    options = {"xla_allow_excess_precision": False}
    values = (getattr(attribute, "value", None) for _, attribute in graph.attributes)
    in_fp8 = any(isinstance(v, Recipe) and v.compute == "fp8" for v in values)
    return options | FP8_OPTIONS if in_fp8 else options


def make_train_step(
    graph: nnx.GraphDef,
    optimizer: Optimizer,
    *,
    microbatches: int = 1,
    mesh: Mesh | None = None,
) -> Compiled[tuple[TrainState, Metrics]]:
    """Returns the jitted `step(state, batch) -> (state, metrics)`; it consumes state.

    With n microbatches, activations are those of b / n rows at a time; the gradient is
    that of the whole batch up to the order of sums, random bits included. Each
    microbatch's own are the amax of a whole tensor, of a recipe that takes one, and the
    auxiliary loss of experts: a mean over the parts, where that of a batch is a product
    of means.

    Args:
      graph: the model's, from `make_state`.
      optimizer: from `make_optimizer`.
      microbatches: equal parts of the batch's rows, processed one after another; their
        tokens must be whole blocks of the recipes.
      mesh: over which the rows of batches and the state are spread.

    Returns:
      A function of a batch with `inputs`, `targets`, `segment_ids`, `positions` and
      `loss_mask`, all [b, t]; where rows are one document each, the ids and positions
      may be left out. Its metrics are scalars: the masked mean `loss`, the
      `grad_norm` before clipping, the `lr` of the step, and `skipped`: 1 where loss or
      gradient were not finite, and so neither parameters nor optimizer nor held amaxes
      nor the biases of routers have changed. Of a model with experts also the
      `aux_loss`, and `load_max`: the most tokens that an expert got, over the mean;
      with a `capacity_factor`, `dropped`: the choices of tokens that had no room.

    Raises:
      ValueError: `microbatches` is no positive integer; when called, rows that are no
        multiple of it times the devices of the mesh, or what `check_mesh` says of it.
    """
    step = step_function(graph, optimizer, microbatches=microbatches, mesh=mesh)
    options = compiler_options(graph)
    compiled = jax.jit(step, donate_argnums=0, compiler_options=options)
    return Compiled(compiled, mesh)


def step_function(
    graph: nnx.GraphDef,
    optimizer: Optimizer,
    *,
    microbatches: int = 1,
    mesh: Mesh | None = None,
) -> Step:
    """Returns what `make_train_step` compiles, for programs of several steps.

    Args:
      graph: as of `make_train_step`.
      optimizer: likewise.
      microbatches: likewise.
      mesh: likewise.

    Raises:
      ValueError: likewise.
    """
    if not is_integer(microbatches) or microbatches < 1:
        raise ValueError(
            "make_train_step: microbatches must be a positive integer, got "
            f"microbatches={microbatches!r}."
        )

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        _check(graph, state, batch, mesh, microbatches)
        loss, grads, held, balances = accumulate(
            graph, state, batch, microbatches=microbatches
        )
        updates, opt_state = optimizer.transform.update(
            grads, state.opt_state, state.params
        )
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        new = dataclasses.replace(
            state,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            held=held,
            rest=_rest(graph, state, balances),
        )
        # A step that went wrong leaves everything as it was but the counts.
        state = jax.tree.map(functools.partial(jnp.where, finite), new, state)
        lr = optimizer.schedule(state.step - state.skipped)  # of the updates so far
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": jnp.asarray(lr, jnp.float32),
            "skipped": (~finite).astype(jnp.int32),
            **_use_of_experts(balances),
        }
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            skipped=state.skipped + metrics["skipped"],
            skipped_in_row=jnp.where(finite, 0, state.skipped_in_row + 1),
        )
        return spread((state, metrics))

    return step


def _check(
    graph: nnx.GraphDef,
    state: TrainState,
    batch: Batch,
    mesh: Mesh | None,
    microbatches: int,
) -> None:
    """Raises where a mesh does not divide a step's rows, its model or its blocks."""
    check_rows(len(batch["inputs"]), microbatches)
    if mesh is None or mesh.size == 1:
        return
    model = state.model(graph)
    shards = microbatches * num_shards("batch", mesh)
    check_mesh(model, mesh, tokens=batch["inputs"].size // shards)


def _rest(graph: nnx.GraphDef, state: TrainState, balances: Balances) -> nnx.State:
    """Returns the rest of the state, in which the biases of routers have moved."""
    if not any(balances):
        return state.rest
    model = state.model(graph)
    model.move_biases(balances)
    _, _, _, rest = nnx.split(model, nnx.Param, Held, ...)
    return rest


def _use_of_experts(balances: Balances) -> Metrics:
    """Returns the metrics of a model with experts."""
    loads = moe.loads(balances)
    if loads is None:
        return {}
    most, mean = jnp.max(loads, -1), jnp.mean(loads.astype(jnp.float32), -1)
    mean = jnp.where(mean > 0, mean, 1)  # 0 of a batch of padding
    found = {"aux_loss": moe.aux_loss(balances), "load_max": jnp.max(most / mean)}
    dropped = [jnp.sum(b.dropped) for b in balances if b and b.dropped is not None]
    return found | ({"dropped": jnp.stack(dropped).sum()} if dropped else {})


def make_eval_step(
    graph: nnx.GraphDef, *, mesh: Mesh | None = None
) -> Compiled[Metrics]:
    """Returns the jitted `step(state, batch) -> {"loss_sum": float32 [], in nats}`.

    The forward pass is that of training, quantized fprop included; held amaxes are
    read and never refreshed.

    Args:
      graph: the model's, from `make_state`.
      mesh: over which the rows of batches and the state are spread.
    """

    def step(state: TrainState, batch: Batch) -> Metrics:
        model = state.model(graph)
        set_step(model, state.step)  # for recipes that draw in the forward pass
        loss_sum, _ = token_losses(model, batch)
        return {"loss_sum": loss_sum}

    return Compiled(jax.jit(step, compiler_options=compiler_options(graph)), mesh)
