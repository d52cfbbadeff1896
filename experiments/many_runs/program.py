"""The compiled program of some steps, on batches that are cut out on the device."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from experiments.many_runs import text
from experiments.many_runs.run import Run
from experiments.many_runs.text import Text
from fp4jax import policies, recipes, train
from fp4jax.models import Transformer
from fp4jax.train import Optimizer, TrainState
from fp4jax.train.step import Metrics


class Functions(NamedTuple):
    """What a run computes, not yet compiled.

    Attributes:
      start: `f(seed, noise) -> state`, the state before step 0.
      advance: `f(state, text, rows, rates) -> (state, metrics)`: n steps on the rows
        [n, b] of a text, at learning rates [n]; metrics are [n].
      forwards: graphs to evaluate, "bf16" and, if the policy quantizes it, "own".
      options: of the compiler.
    """

    start: Callable[[jax.Array, jax.Array], TrainState]
    advance: Callable[
        [TrainState, Text, jax.Array, jax.Array], tuple[TrainState, Metrics]
    ]
    forwards: Mapping[str, nnx.GraphDef]
    options: Mapping[str, bool]


class Program(NamedTuple):
    """What runs share that differ in nothing but their numbers.

    Attributes:
      start, advance: as of `Functions`; `advance` consumes the state.
      evaluate: of each forward pass, as `train.make_eval_step`.
      trace_seconds, compile_seconds: what it took.
    """

    start: Callable
    advance: Callable
    evaluate: Mapping[str, Callable]
    trace_seconds: float
    compile_seconds: float


def functions(run: Run, vocab_size: int) -> Functions:
    """Returns what a run computes.

    AdamW's update is proportional to the learning rate, weight decay included, so that
    rates are arguments, and runs of any rate and length share a program.
    """
    shape, policy = run.shape(vocab_size), run.whole_policy(vocab_size)
    constant = dataclasses.replace(run.optim, lr=1.0, schedule="constant", warmup=0.0)
    unit = train.make_optimizer(constant, steps=1)

    def at_rate(rate: Any) -> Optimizer:
        transform = optax.chain(unit.transform, optax.scale(rate))
        return Optimizer(transform, lambda step: rate)

    def make(seed: Any, noise: Any) -> Transformer:
        rngs = nnx.Rngs(params=jax.random.key(seed), quant=jax.random.key(noise))
        return Transformer(shape, policy, rngs=rngs)

    model = nnx.eval_shape(lambda: make(0, 0))
    graph = nnx.graphdef(model)
    model.set_policy(policies.bf16(shape))
    forwards = {"bf16": nnx.graphdef(model)}
    if any(policy.recipe(path).fprop != recipes.Fprop() for path in shape.layer_paths):
        forwards["own"] = graph

    def start(seed: jax.Array, noise: jax.Array) -> TrainState:
        return train.make_state(make(seed, noise), at_rate(1.0).transform)[1]

    def advance(
        state: TrainState, whole: Text, rows: jax.Array, rates: jax.Array
    ) -> tuple[TrainState, Metrics]:
        def one(state, x):
            step = train.step_function(graph, at_rate(x[1]))
            return step(state, text.batch(whole, x[0]))

        return lax.scan(one, state, (rows, rates))

    return Functions(start, advance, forwards, train.compiler_options(graph))


def compiled(run: Run, whole: Text, vocab_size: int, *, kernels: Any) -> Program:
    """Traces and compiles.

    Args:
      run: any of those that share it.
      whole: the text, or shapes in place of its arrays.
      vocab_size: of the text.
      kernels: a choice for `fp4jax.kernels.choice.KERNELS`, in whose context to trace.
    """
    began = time.perf_counter()
    start, advance, forwards, options = functions(run, vocab_size)
    shaped = jax.ShapeDtypeStruct
    whole = jax.tree.map(lambda x: shaped(x.shape, x.dtype), whole)
    seeds = 2 * [shaped((), jnp.uint32)]
    state = jax.eval_shape(start, *seeds)
    batch = jax.eval_shape(text.batch, whole, shaped((run.rows,), jnp.int32))
    rows = shaped((run.at_once, run.rows), jnp.int32)
    rates = shaped((run.at_once,), jnp.float32)
    jit = functools.partial(jax.jit, compiler_options=options)
    with kernels:
        lowered = [
            jit(start).lower(*seeds),
            jit(advance, donate_argnums=0).lower(state, whole, rows, rates),
            *(
                train.make_eval_step(graph).lower(state, batch)
                for graph in forwards.values()
            ),
        ]
    traced = time.perf_counter()
    start, advance, *evaluate = (each.compile() for each in lowered)
    return Program(
        start=start,
        advance=advance,
        evaluate=dict(zip(forwards, evaluate, strict=True)),
        trace_seconds=traced - began,
        compile_seconds=time.perf_counter() - traced,
    )
