"""How long a step takes on accelerators that are not there, from what bounds it.

compute = GEMMs / (0.75 peak) + attention / (0.3 peak) + bytes / (0.65 bandwidth)

The fractions are those that an H200 reached in GEMMs of 8192^3, in causal attention by
cuDNN and in an elementwise copy. Bytes are those of quantizers, of what lies between
the linear layers, of the logits and of the optimizer. Collectives overlap with all of
it or with nothing: a step lies between.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

from jax.sharding import Mesh, NamedSharding

from experiments.collectives import Collective
from experiments.devices import Device
from experiments.presets import ExperimentConfig
from fp4jax import models, sharding
from fp4jax.models import Transformer
from fp4jax.models.config import PARTS
from fp4jax.nnx import layers
from fp4jax.numerics import Fresh, Quantizer

# Parts of the peak that are reached.
GEMMS, ATTENTION, MEMORY, LINKS = 0.75, 0.3, 0.65, 0.8

_AMAX = 0.5  # copies that take as long as an operand is read for a tensor scale
_BETWEEN = 6  # times that activations are read or written, forward and backward
_LOGITS = 5  # likewise, in float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds of a step on each device, by what they are spent on."""

    gemms: float
    attention: float
    quantizers: float
    between: float
    optimizer: float
    communication: float

    @property
    def compute(self) -> float:
        """Of a step whose collectives are hidden."""
        return sum(vars(self).values()) - self.communication

    @property
    def bounds(self) -> tuple[float, float]:
        """Of a step whose collectives all overlap with compute, and none of them."""
        hidden = max(self.compute, self.communication)
        return hidden, self.compute + self.communication


def estimate(
    model: Transformer,
    config: ExperimentConfig,
    *,
    mesh: Mesh,
    device: Device,
    state_bytes: int,
    collectives: Iterable[Collective],
) -> Estimate:
    """Returns how long a step takes.

    Args:
      model: with shapes in place of arrays, under its policy.
      config: of the experiment.
      mesh: of the devices.
      device: what they are.
      state_bytes: of parameters and optimizer on each.
      collectives: of the compiled step.
    """
    shape, length = config.model, config.data.sequence_length
    tokens = config.data.batch_size * length
    total = tokens * models.flops_per_token(shape, sequence_length=length)
    attentions = sum("attention" in PARTS[kind] for kind in shape.kinds)
    pairs = 6 * attentions * length * shape.num_heads * shape.head_dim
    attention = tokens * pairs
    # What is not saved is computed once more.
    again = {"none": (0.0, 0.0), "dots": (0.0, 1 / 3), "full": (1 / 3, 1 / 3)}
    of_gemms, of_attention = again[shape.remat]
    work = _work(model, mesh, device, tokens=tokens)
    # Devices along an axis that does not divide a layer all compute it.
    of_layers = 6 * work.products
    elsewhere = total - attention - 6 * work.products_of_all
    bandwidth = MEMORY * device.bandwidth
    rows = tokens // sharding.num_shards("batch", mesh)
    logits = rows * shape.vocab_size / sharding.num_shards("vocab", mesh)
    return Estimate(
        gemms=(of_layers + elsewhere / mesh.size)
        * (1 + of_gemms)
        / (GEMMS * device.flops),
        attention=attention * (1 + of_attention) / mesh.size / device.flops / ATTENTION,
        quantizers=4 * work.quantized / bandwidth,
        between=(2 * _BETWEEN * work.outputs + 4 * _LOGITS * logits) / bandwidth,
        optimizer=2 * state_bytes / bandwidth,
        communication=sum(_seconds(each, mesh, device) for each in collectives),
    )


class _Work(NamedTuple):
    """What a device does in the linear layers in one forward pass.

    Attributes:
      products: of two numbers.
      products_of_all: by all devices, each counted once.
      quantized: elements, in copies that take as long; backward pass included.
      outputs: elements.
    """

    products: float
    products_of_all: float
    quantized: float
    outputs: float


def _work(model: Transformer, mesh: Mesh, device: Device, *, tokens: int) -> _Work:
    """Returns the work of a device, with as many tokens to each expert."""
    rows = tokens / sharding.num_shards("batch", mesh)
    products = products_of_all = quantized = outputs = 0.0
    for layer in layers(model):
        kernel = layer.module.kernel
        axes, shape = kernel.get_metadata().get("axes"), kernel.get_value().shape
        stack = len(shape) - len(layer.shape)
        axes = (None,) * len(layer.shape) if axes is None else axes
        stored, met = (
            NamedSharding(mesh, each).shard_shape(layer.shape)
            for each in (sharding.spec(*axes), sharding.used(*axes))
        )
        repeats = math.prod(shape[:stack])
        moe = model.config.moe if len(layer.shape) == 3 else None
        chosen = 1 if moe is None else moe.top_k
        # Along tensor each device has other experts.
        through = rows * chosen * (1 if moe is None else met[0] / layer.shape[0])
        products += repeats * through * met[-2] * met[-1]
        products_of_all += repeats * tokens * chosen * math.prod(layer.shape[-2:])
        sizes = (through * met[-2], math.prod(stored), through * met[-1])  # x, w, dy
        outputs += repeats * sizes[2]
        if layer.gemm is None:
            continue
        for site, quantizer in layer.gemm.recipe.sites.items():
            if quantizer is not None:
                copies = _copies(quantizer, device)
                quantized += copies * repeats * sizes[site.operand]
    return _Work(products, products_of_all, quantized, outputs)


def _copies(quantizer: Quantizer, device: Device) -> float:
    """Returns how many copies of an operand take as long as its quantization."""
    copies = device.quantize if quantizer.rotation is None else device.rotate
    # A held amax is read off the operand in few steps.
    return copies + _AMAX if isinstance(quantizer.tensor_scale, Fresh) else copies


def _seconds(collective: Collective, mesh: Mesh, device: Device) -> float:
    """Returns how long a collective takes, by rings, in all of its turns.

    Sums other than along tensor are of gradients. Where parameters are spread, a device
    keeps its part of them: an accelerator's compiler makes that a reduce-scatter.
    """
    group = collective.devices
    along_tensor = group == tuple(range(mesh.shape[sharding.TENSOR]))
    is_kept_whole = along_tensor or sharding.num_shards("embed", mesh) == 1
    nodes = {number // device.node for number in group}
    speed = LINKS * (device.link if len(nodes) == 1 else device.network)
    # In units of a result: of a sum that is spread, that is one part of what is summed.
    sums = 2 if is_kept_whole else 1
    passes = {"all-reduce": sums, "reduce-scatter": len(group) or 1}
    share = passes.get(collective.kind, 1) * (1 - 1 / len(group) if group else 1)
    return share * collective.bytes * collective.times / speed
