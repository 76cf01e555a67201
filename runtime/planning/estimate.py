"""Memory and speed of a model on equal devices in one tensor-parallel group.

A decode step takes the longer of reading weights and KV from memory and of the products, plus two
sums over all ranks a layer (a roofline; Williams et al., 2009). Peaks are never reached: the
factors below are assumptions, not measurements, and are printed with every estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.runtime.planning.devices import GIB, Device
from headrace.runtime.planning.shapes import Matrix, ModelShape, Share

BANDWIDTH_SHARE = 0.75  # of the datasheet's, over a whole step
COMPUTE_SHARE = 0.5
LINK_SHARE = 0.6
ALL_REDUCE_US = 15.0  # each, besides its bytes
MEMORY_SHARE = 0.94  # what fragmentation leaves
RESERVED_GIB = 1.0  # a rank: driver context, kernels, library workspaces
STEP_TOKENS = 512  # of one step, prompts included, whose activations need room
ASSUMPTIONS = (
    f"{BANDWIDTH_SHARE:.0%} of memory bandwidth, {COMPUTE_SHARE:.0%} of FP16 peak, "
    f"{LINK_SHARE:.0%} of the link, {ALL_REDUCE_US:g} us an all-reduce; "
    f"{RESERVED_GIB:g} GiB a device reserved, {1 - MEMORY_SHARE:.0%} lost to fragmentation, "
    f"steps of {STEP_TOKENS} tokens; no drafts"
)
_BLOCK = 32  # elements that share an FP16 scale


@dataclass(frozen=True, slots=True)
class Precision:
    """How matrices and KV are stored; products run in FP16, norms and biases are FP32."""

    name: str
    weight_bits: int
    kv_bits: int


PRECISIONS = (
    Precision("fp16", 16, 16),
    Precision("int8", 8, 8),
    Precision("int4", 4, 4),
)


@dataclass(frozen=True, slots=True)
class Fit:
    """One precision on one group of devices.

    Attributes:
        weight_bytes: of each rank.
        kv_bytes_per_token: of the rank with the most, over all its layers.
        kv_scale_bytes: of the same rank: a scale a layer, head and channel.
        activation_bytes: of the largest rank, for one step.
        free_bytes: for KV, of the rank with the least; negative where weights do not fit.
    """

    precision: Precision
    weight_bytes: tuple[int, ...]
    kv_bytes_per_token: int
    kv_scale_bytes: int
    activation_bytes: int
    free_bytes: int

    @property
    def fits(self) -> bool:
        return self.kv_tokens > 0

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that there is room for, over all sequences."""
        return max(self.free_bytes, 0) // self.kv_bytes_per_token


def matrix_bytes(matrix: Matrix, bits: int) -> int:
    """FP16, or blocks of 32 along the columns with an FP16 scale each, as MatMulNBits has them."""
    if bits == 16:
        return 2 * matrix.elements
    return matrix.rows * (-(-matrix.columns // _BLOCK)) * (_BLOCK * bits // 8 + 2)


def weight_bytes(share: Share, bits: int) -> int:
    """Of one rank; norms and biases in FP32."""
    return sum(matrix_bytes(m, bits) for m in share.matrices()) + 4 * share.vector_elements()


def fit(shape: ModelShape, device: Device, count: int, precision: Precision) -> Fit:
    """What a group of `count` devices holds."""
    shares = [Share(shape, rank, count) for rank in range(count)]
    weights = tuple(weight_bytes(share, precision.weight_bits) for share in shares)
    largest = shares[0]  # the first ranks have one more of what does not divide
    scales = 0
    if precision.kv_bits < 16:
        scales = 4 * 2 * shape.num_layers * largest.kv_heads * shape.head_dim
    activations = _activation_bytes(largest)
    room = int(MEMORY_SHARE * device.memory_gib * GIB - RESERVED_GIB * GIB)
    free = room - max(weights) - scales - activations
    per_token = largest.kv_bytes_per_token(precision.kv_bits)
    return Fit(precision, weights, per_token, scales, activations, free)


def _activation_bytes(share: Share) -> int:
    """Of one layer, which the next one's replace, and float32 logits of as many sequences."""
    shape = share.shape
    attention, _, mlp, *_, head = share.products()
    width = 4 * shape.hidden + attention.rows + mlp.rows
    return STEP_TOKENS * (2 * width + 4 * head.rows)


def step_ms(
    shape: ModelShape, device: Device, found: Fit, *, batch: int, context_tokens: int
) -> float:
    """A decode step of `batch` sequences that hold `context_tokens` each."""
    count = len(found.weight_bytes)
    share = Share(shape, 0, count)
    products = list(share.products())
    num_bytes = sum(matrix_bytes(m, found.precision.weight_bits) for m in products)
    num_bytes += found.kv_bytes_per_token * context_tokens * batch
    flops = 2.0 * batch * sum(m.elements for m in products)
    flops += 4.0 * batch * shape.num_layers * share.heads * shape.head_dim * context_tokens
    read_s = num_bytes / (BANDWIDTH_SHARE * device.bandwidth_gb_s * 1e9)
    compute_s = flops / (COMPUTE_SHARE * device.fp16_tflops * 1e12)
    sums_s = 0.0
    if count > 1:
        moved = 2 * (count - 1) / count * batch * shape.hidden * 2
        one = ALL_REDUCE_US * 1e-6 + moved / (LINK_SHARE * device.link_gb_s / 2 * 1e9)
        sums_s = 2 * shape.num_layers * one
    return 1e3 * (max(read_s, compute_s) + sums_s)
