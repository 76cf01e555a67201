"""From samples to the table. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from peers.measure import Sample, is_disturbed

ByRound = Mapping[tuple[int, int], Sample]  # by batch size and round

MAX_IDLE_SHARE = 0.05  # of one core; a peer above it may have slowed down the others

_HEADER = (
    "at once",
    "peer",
    "tok/s",
    "{ref} is",
    "decode tok/s",
    "{ref} is",
    "first tokens, ms",
    "{ref} is",
    "same tokens",
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast the reference is: median, lowest and highest of the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one peer at one batch size; medians over the rounds.

    Attributes:
        tok_s: new tokens of all sequences a second, prompts included in the time.
        decode_tok_s: the same after the first token of each; None where a run has just one.
        first_ms: until all sequences have their first token.
        total_ratio, decode_ratio, first_ratio: the reference against this peer in the same
            rounds, above 1 where the reference is faster; None without the reference.
        agreement: mean share of a sequence's new tokens before the first that is not the
            truth's.
        idle_share: CPU time while others ran, as a share of one core.
        disturbed: rounds among them in which another process used the CPU.
    """

    peer: str
    batch: int
    rounds: int
    tok_s: float
    decode_tok_s: float | None
    first_ms: float
    total_ratio: Ratio | None
    decode_ratio: Ratio | None
    first_ratio: Ratio | None
    agreement: float | None
    idle_share: float
    disturbed: int


def total_s(sample: Sample) -> float:
    return sample.wall_s


def first_s(sample: Sample) -> float:
    return sample.first_s


def decode_s(sample: Sample) -> float | None:
    """Time after the first tokens; None where nothing is left of it."""
    seconds = sample.wall_s - sample.first_s
    return seconds if seconds > 0 and len(sample.token_ids[0]) > 1 else None


def summarize(samples: Sequence[Sample], reference: str, truth: str | None = None) -> list[Row]:
    """A row for each batch size and peer, in the order of the samples.

    Args:
        truth: the peer whose tokens the others are compared with; the reference by default.
    """
    groups: dict[tuple[int, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.batch, sample.peer), []).append(sample)
    references = {(s.batch, s.round): s for s in samples if s.peer == reference}
    truths = {(s.batch, s.round): s for s in samples if s.peer == (truth or reference)}
    return [_row(group, references, truths) for group in groups.values()]


def _row(group: Sequence[Sample], references: ByRound, truths: ByRound) -> Row:
    pairs, compared = (
        [(found[k], s) for s in group if (k := (s.batch, s.round)) in found]
        for found in (references, truths)
    )
    decode = [seconds for s in group if (seconds := decode_s(s)) is not None]
    sequences, new_tokens = len(group[0].token_ids), len(group[0].token_ids[0])
    return Row(
        peer=group[0].peer,
        batch=group[0].batch,
        rounds=len(group),
        tok_s=sequences * new_tokens / median(s.wall_s for s in group),
        decode_tok_s=sequences * (new_tokens - 1) / median(decode) if decode else None,
        first_ms=1e3 * median(s.first_s for s in group),
        total_ratio=_ratio(pairs, total_s),
        decode_ratio=_ratio(pairs, decode_s),
        first_ratio=_ratio(pairs, first_s),
        agreement=mean(_agreement(r, s) for r, s in compared) if compared else None,
        idle_share=sum(s.idle_cpu_s for s in group) / sum(s.idle_s for s in group),
        disturbed=sum(is_disturbed([s]) for s in group),
    )


def _ratio(
    pairs: Sequence[tuple[Sample, Sample]], cost: Callable[[Sample], float | None]
) -> Ratio | None:
    """Of a cost in seconds, over pairs of the reference's sample and the peer's."""
    costs = [(cost(reference), cost(peer)) for reference, peer in pairs]
    ratios = [p / r for r, p in costs if r is not None and p is not None]
    return Ratio(median(ratios), min(ratios), max(ratios)) if ratios else None


def _agreement(reference: Sample, peer: Sample) -> float:
    return mean(
        common_prefix(a, b) / len(a)
        for a, b in zip(reference.token_ids, peer.token_ids, strict=True)
    )


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many items at the start are the same."""
    same = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        same += 1
    return same


def table(
    rows: Sequence[Row], titles: Mapping[str, str], reference: str, failures: Mapping[str, str]
) -> str:
    """Markdown, aligned for a terminal; at the end a row for each peer that failed."""
    header = [cell.format(ref=reference) for cell in _HEADER]
    cells = [
        [
            str(row.batch),
            titles[row.peer],
            f"{row.tok_s:.1f}",
            _ranged(row.total_ratio),
            "–" if row.decode_tok_s is None else f"{row.decode_tok_s:.1f}",
            _plain(row.decode_ratio),
            f"{row.first_ms:.0f}",
            _plain(row.first_ratio),
            "–" if row.agreement is None else f"{row.agreement:.0%}",
        ]
        for row in sorted(rows, key=lambda row: row.batch)
    ]
    failed = [
        ["–", titles[peer], f"failed: {_one_line(reason)}", *[""] * (len(header) - 3)]
        for peer, reason in failures.items()
    ]
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    rule = ["-" * (w - 1) + ":" if i != 1 else "-" * w for i, w in enumerate(widths)]
    return "\n".join(_line(line, widths) for line in [header, rule, *cells, *failed])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.ljust(width) if i == 1 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "| " + " | ".join(padded) + " |"


def _one_line(reason: str) -> str:
    return " ".join(reason.split()).replace("|", "/")


def _ranged(ratio: Ratio | None) -> str:
    if ratio is None:
        return "–"
    return f"{ratio.median:.2f}x ({ratio.low:.2f}–{ratio.high:.2f})"


def _plain(ratio: Ratio | None) -> str:
    return "–" if ratio is None else f"{ratio.median:.2f}x"


def disturbance_notes(rows: Sequence[Row], titles: Mapping[str, str]) -> list[str]:
    """A sentence for each row that cannot be trusted."""
    return [
        f"not a quiet machine: others used the CPU in {row.disturbed} of the {row.rounds} rounds "
        f"of {titles[row.peer]} with {row.batch} at once"
        for row in rows
        if row.disturbed
    ]


def idle_notes(rows: Sequence[Row], titles: Mapping[str, str]) -> list[str]:
    """A sentence on what every peer used while it waited, and one for each that used too much."""
    shares = {peer: max(r.idle_share for r in rows if r.peer == peer) for peer in peers_of(rows)}
    if not shares:
        return []
    used = ", ".join(f"{titles[peer]} {share:.1%}" for peer, share in shares.items())
    busy = [
        f"not a fair run: {titles[peer]} used {share:.0%} of a core while it waited for its turn"
        for peer, share in shares.items()
        if share > MAX_IDLE_SHARE
    ]
    return [f"CPU use while waiting, at most, of one core: {used}", *busy]


def peers_of(rows: Sequence[Row]) -> list[str]:
    """Peers in the order in which they first appear."""
    return list(dict.fromkeys(row.peer for row in rows))


def as_json(rows: Sequence[Row], samples: Sequence[Sample]) -> dict[str, Any]:
    """Plain data of both, without the tokens."""
    plain = [dataclasses.asdict(sample) for sample in samples]
    for sample in plain:
        del sample["token_ids"]
    return {"rows": [dataclasses.asdict(row) for row in rows], "samples": plain}
