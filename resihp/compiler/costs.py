"""What F, B and W of a stage cost, as alpha * N + beta * sum(l^2) (Eq. 1 of the paper) each.

N is the number of tokens of a micro-batch and l the lengths of its documents. F, B and W have
coefficients of their own: W has no attention term, and the attention of B costs more than twice
that of F, so one ratio between them is wrong as soon as lengths vary.

A stage on a TP group is as fast as its slowest member (Eq. 4). The two all-reduces of each layer
in F and in B go over the links of the node and do not get slower with a device's compute.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from resihp.compiler.cluster import Cluster, Device
from resihp.compiler.facts import FP32_BYTES
from resihp.compiler.models import Model, head_flops_per_token, layer_flops
from resihp.ir.model import LayerRange, Op, Precision

__all__ = ["CostModel", "FittedCost", "Lengths", "OpCost", "Precision", "StageCost"]

ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2}


class Lengths(NamedTuple):
    """What the time of a micro-batch depends on."""

    tokens: int
    pairs: int
    """Sum of the squared lengths of its documents."""

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Lengths:
        """Of a packed micro-batch."""
        known = list(lengths)
        return cls(sum(known), sum(length * length for length in known))


class OpCost(NamedTuple):
    """Seconds of one operation: `fixed + per_token * N + per_pair * sum(l^2)`.

    `comm_*` is the share that does not depend on the speed of a device.
    """

    per_token_s: float
    per_pair_s: float = 0.0
    comm_fixed_s: float = 0.0
    comm_per_token_s: float = 0.0

    def seconds(self, lengths: Lengths, speed: float = 1.0) -> float:
        """On a group whose slowest member has `speed` (0, 1]."""
        compute = self.per_token_s * lengths.tokens + self.per_pair_s * lengths.pairs
        return compute / speed + self.comm_fixed_s + self.comm_per_token_s * lengths.tokens

    def __add__(self, other: object) -> OpCost:
        """Of both, one after the other."""
        if not isinstance(other, OpCost):
            return NotImplemented
        return OpCost(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def times(self, count: float) -> OpCost:
        """Of `count` of them."""
        return OpCost(*(part * count for part in self))


class StageCost(NamedTuple):
    """F, B and W of a stage at one TP degree."""

    forward: OpCost
    backward_input: OpCost
    backward_weight: OpCost

    @property
    def recomputed(self) -> StageCost:
        """Where B computes the forward again first."""
        return self._replace(backward_input=self.forward + self.backward_input)

    def of(self, op: Op) -> OpCost:
        """The cost of a compute operation."""
        match op:
            case Op.F:
                return self.forward
            case Op.B:
                return self.backward_input
            case Op.W:
                return self.backward_weight
            case _:
                assert op is Op.BW, f"{op.mnemonic} is no compute"
                return self.backward_input + self.backward_weight


_NOTHING = OpCost(0.0)


class FittedCost(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients that come from measurements, and how well they explain them."""

    tp: int
    part: Literal["layer", "head"]
    op: Literal["F", "B", "W"]
    is_scaled: bool
    """The samples cannot tell tokens from pairs: the price from FLOPs times one factor."""
    per_token_s: float
    per_pair_s: float
    num_samples: int
    rms_error_s: float
    """Root of the mean squared residual; of one layer, or of the head."""
    mean_relative_error: float
    """Mean of |residual| / measured."""
    explained: float
    """R^2."""


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of one decoder layer, of the head and of what crosses stages, in seconds.

    `of_description` derives it from FLOPs, `resihp.compiler.measured` fits it to measurements.
    """

    layer: dict[int, tuple[OpCost, OpCost, OpCost]]
    """F, B, W of one layer by TP degree."""
    head: dict[int, tuple[OpCost, OpCost, OpCost]]
    """The head and the loss, by TP degree."""
    boundary_bytes_per_token: int
    """Of an activation, or its gradient, between stages."""
    layer_parameter_bytes: int
    """Gradients of one layer that replicas sum, in fp32, at TP 1."""
    table_parameter_bytes: int
    fits: tuple[FittedCost, ...] = ()
    """Of the coefficients that come from measurements; the others come from FLOPs."""

    def stage(self, layers: LayerRange, num_layers: int, tp: int) -> StageCost:
        """Costs of the stage that holds `layers` of `num_layers` at TP degree `tp`."""
        count = layers.last - layers.first + 1
        last = layers.last == num_layers - 1
        head = self.head[tp] if last else (_NOTHING,) * 3
        return StageCost(
            *(layer.times(count) + extra for layer, extra in zip(self.layer[tp], head, strict=True))
        )

    def reduce_bytes(self, layers: LayerRange, num_layers: int, tp: int) -> float:
        """Bytes of gradients on one member of a group, which replicas sum."""
        count = layers.last - layers.first + 1
        tables = (layers.first == 0) + (layers.last == num_layers - 1)
        return (count * self.layer_parameter_bytes + tables * self.table_parameter_bytes) / tp

    @property
    def degrees(self) -> tuple[int, ...]:
        """TP degrees whose costs are known."""
        return tuple(sorted(self.layer))

    @classmethod
    def of_description(
        cls,
        model: Model,
        cluster: Cluster,
        *,
        precision: Precision = "bf16",
        max_tp: int = 8,
    ) -> CostModel:
        """From the FLOPs of `model` and the peaks, efficiencies and links of `cluster`."""
        degrees = [1 << power for power in range(max_tp.bit_length())]
        element_bytes = ELEMENT_BYTES[precision]
        return cls(
            layer={tp: _layer(model, cluster, tp, precision) for tp in degrees},
            head={tp: _head(model, cluster.device, tp, precision) for tp in degrees},
            boundary_bytes_per_token=model.shape.hidden * element_bytes,
            layer_parameter_bytes=model.layer_parameters * FP32_BYTES,
            table_parameter_bytes=model.table_parameters * FP32_BYTES,
        )


def _peak(device: Device, precision: Precision) -> float:
    return 1e12 * (device.bf16_tflops if precision == "bf16" else device.fp32_tflops)


def _layer(
    model: Model, cluster: Cluster, tp: int, precision: Precision
) -> tuple[OpCost, OpCost, OpCost]:
    flops, device = layer_flops(model), cluster.device
    peak = _peak(device, precision) * tp
    linear = flops.linear_per_token / (peak * device.linear_efficiency)
    attention = flops.attention_per_pair / (peak * device.attention_efficiency)
    backward = flops.attention_backward_per_pair / (peak * device.attention_backward_efficiency)
    fixed, per_token = _all_reduces(model, cluster, tp, precision)
    return (
        OpCost(linear, attention, fixed, per_token),
        OpCost(linear, backward, fixed, per_token),
        OpCost(linear),
    )


def _all_reduces(
    model: Model, cluster: Cluster, tp: int, precision: Precision
) -> tuple[float, float]:
    """(seconds, seconds per token) of the two ring all-reduces of a layer."""
    link = cluster.intra_node if tp <= cluster.cluster.gpus_per_node else cluster.inter_node
    steps = 2 * (tp - 1)
    num_bytes = model.shape.hidden * ELEMENT_BYTES[precision]
    return (
        2 * steps * link.latency_us * 1e-6,
        2 * steps / tp * num_bytes / (link.gb_per_s * 1e9),
    )


def _head(
    model: Model, device: Device, tp: int, precision: Precision
) -> tuple[OpCost, OpCost, OpCost]:
    linear = head_flops_per_token(model) / (
        _peak(device, precision) * tp * device.linear_efficiency
    )
    return (OpCost(linear), OpCost(linear), OpCost(linear))
