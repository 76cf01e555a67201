"""From a result to the whole table: a line for each peer, and headrace against the best of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from peers.report import decode_s, summarize
from peers.results import Result
from peers.specs import PEERS, REFERENCE, REFERENCE_DRAFTS, TRUTH

MAX_KL_MORE_NATS = 0.005  # than a peer's, for speeds to be compared at equal fidelity


@dataclass(frozen=True, slots=True)
class Metric:
    """A column.

    Attributes:
        values: by peer and round, each in the unit of the title.
        goal: what the ratio to the best peer has to be, above 1 where headrace is better.
    """

    title: str
    values: Mapping[str, Mapping[int, float]]
    less_is_better: bool = False
    goal: float | None = None
    digits: int = 0

    def median_of(self, peer: str) -> float | None:
        return median(self.values[peer].values()) if self.values.get(peer) else None

    def ratio(self, ours: str, peer: str) -> float | None:
        """How many times as good `ours` is: the median over the rounds that both have."""
        mine, theirs = self.values.get(ours, {}), self.values.get(peer, {})
        pairs = [(mine[n], theirs[n]) for n in mine if n in theirs]
        if not pairs:
            return None
        return median(b / a if self.less_is_better else a / b for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Verdict:
    """headrace against the best peer in one metric; `kl_more_nats` is None where not known."""

    metric: str
    peer: str
    ratio: float
    goal: float | None
    kl_more_nats: float | None

    @property
    def outcome(self) -> str:
        if self.goal is None:
            return "ahead" if self.ratio >= 1 else "behind"
        if self.ratio < self.goal:
            return "not reached" + (", behind" if self.ratio < 1 else "")
        worse = self.kl_more_nats is not None and self.kl_more_nats > MAX_KL_MORE_NATS
        return "not reached: fidelity is lower" if worse else "reached"


def metrics(result: Result) -> list[Metric]:
    """All columns for which there are figures."""
    found = []
    goals = {1: 1.2, 4: 1.5, 16: 1.5}
    for batch in sorted({s.batch for s in result.decode}):
        samples = [s for s in result.decode if s.batch == batch]
        speed, first = _Values(), _Values()
        for s in samples:
            first.add(s.peer, s.round, 1e3 * s.first_s)
            if (seconds := decode_s(s)) is not None:
                speed.add(s.peer, s.round, batch * (len(s.token_ids[0]) - 1) / seconds)
        found.append(Metric(f"decode x{batch}, tok/s", speed.by_peer, goal=goals.get(batch)))
        found.append(Metric(f"first token x{batch}, ms", first.by_peer, less_is_better=True))
    for tokens in sorted({s.prompt_tokens for s in result.prefill}):
        speed = _Values()
        for s in result.prefill:
            if s.prompt_tokens == tokens:
                speed.add(s.peer, s.round, tokens / min(s.first_s, s.wall_s))
        found.append(Metric(f"prefill {tokens}, tok/s", speed.by_peer, goal=1.2))
    load, latency, memory, start = _Values(), _Values(), _Values(), _Values()
    for sample in result.loads:
        load.add(sample.peer, sample.round, sample.tokens / sample.wall_s)
        latency.add(sample.peer, sample.round, mean(sample.latencies_s))
    for begun in result.starts:
        start.add(begun.peer, begun.round, begun.first_token_s)
        if begun.peak_bytes is not None:
            memory.add(begun.peer, begun.round, begun.peak_bytes / 1e6)
    found.append(Metric("load, tok/s", load.by_peer, goal=2.0))
    found.append(Metric("latency, s", latency.by_peer, less_is_better=True, digits=1))
    found.append(Metric("memory, MB", memory.by_peer, less_is_better=True, goal=1.0))
    found.append(Metric("start, s", start.by_peer, less_is_better=True, digits=1))
    return [metric for metric in found if metric.values]


class _Values:
    def __init__(self) -> None:
        self.by_peer: dict[str, dict[int, float]] = {}

    def add(self, peer: str, number: int, value: float) -> None:
        self.by_peer.setdefault(peer, {})[number] = value


def verdicts(result: Result, *, drafts: bool) -> list[Verdict]:
    """For each metric the peer that does best in it, without headrace itself."""
    ours = REFERENCE_DRAFTS if drafts else REFERENCE
    found = []
    for metric in metrics(result):
        rivals = [
            (ratio, peer)
            for peer in metric.values
            if PEERS[peer].drafts == drafts and peer != ours
            if (ratio := metric.ratio(ours, peer)) is not None
        ]
        if rivals:
            ratio, peer = min(rivals)
            own, theirs = (result.divergence.get(name) for name in (REFERENCE, peer))
            more = None if own is None or theirs is None else own - theirs
            found.append(Verdict(metric.title, peer, ratio, metric.goal, more))
    return found


def overview(result: Result) -> str:
    """Markdown: everybody's medians, then headrace against the best."""
    columns = metrics(result)
    same = _agreement(result)
    header = ["peer", *(metric.title for metric in columns), "mean KL, nats", "same tokens"]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for name, peer in PEERS.items():
        if not any(name in metric.values for metric in columns):
            continue
        cells = [_cell(metric.median_of(name), metric.digits) for metric in columns]
        kl = result.divergence.get(name)
        share = "–" if name not in same else f"{same[name]:.0%}"
        lines.append([peer.title, *cells, _cell(kl, 4), share])
    parts = ["\n".join(_line(cells) for cells in lines)]
    failed = [f"- {PEERS[p].title}: {' '.join(why.split())}" for p, why in result.failures.items()]
    if failed:
        parts.append("Not measured, or not to the end:\n\n" + "\n".join(failed))
    for drafts, title in ((False, "drafts off"), (True, "drafts on")):
        if rows := list(_verdict_rows(verdicts(result, drafts=drafts))):
            head = [f"{title}: against the best peer", "best peer", "headrace is", "goal", ""]
            parts.append("\n".join(map(_line, [head, ["---"] * 5, *rows])))
    return "\n\n".join(parts)


def _verdict_rows(found: Sequence[Verdict]) -> Iterator[list[str]]:
    for v in found:
        goal = "–" if v.goal is None else f"{v.goal:.1f}x"
        yield [v.metric, PEERS[v.peer].title, f"{v.ratio:.2f}x", goal, v.outcome]


def _agreement(result: Result) -> dict[str, float]:
    """Share of tokens before the first that FP32 chose differently, over all batch sizes."""
    shares: dict[str, list[float]] = {}
    for row in summarize(result.decode, REFERENCE, TRUTH):
        if row.agreement is not None:
            shares.setdefault(row.peer, []).append(row.agreement)
    return {peer: mean(found) for peer, found in shares.items()}


def _cell(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
