"""What a manifest says about a target that is split between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecesInfo:
    """A graph of one form, cut where sums over ranks are taken; as `GraphInfo`.

    Attributes:
        files: pieces in their order.
        inputs, outputs: of all pieces together, without what passes between them.
    """

    form: str
    files: tuple[str, ...]
    min_onnxruntime: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """One rank's part of a target for several processes.

    Attributes:
        num_heads, num_kv_heads: of the rank.
        first_token, num_tokens: whose logits it gives.
        kv_bytes_per_token: of its cache.
        weight_bytes: that it loads; what ranks have in common counts for each.
    """

    num_heads: int
    num_kv_heads: int
    first_token: int
    num_tokens: int
    kv_bytes_per_token: int
    weight_bytes: int
    graphs: tuple[PiecesInfo, ...]


def ranks_problem(ranks: Sequence[RankInfo], vocab_size: int) -> str | None:
    """What makes no sense; each rank has something, and all tokens belong to one, in order."""
    next_token = 0
    for rank in ranks:
        sizes = (rank.num_heads, rank.num_kv_heads, rank.num_tokens, rank.kv_bytes_per_token)
        if not all(0 < size < 2**31 for size in sizes) or rank.first_token != next_token:
            return "has ranks that make no sense"
        if not all(graph.files for graph in rank.graphs):
            return "has a graph of ranks without pieces"
        next_token += rank.num_tokens
    if ranks and next_token != vocab_size:
        return f"has ranks with {next_token} tokens instead of {vocab_size}"
    return None
