"""headrace beside other runtimes: same checkpoint, prompts, threads; one table from one run.

    python3 tools/peers/run.py --quick                     # as `tools/dev.py peers --quick`
    python3 tools/peers/run.py --output docs/benchmarks    # the full run, kept
    python3 tools/peers/run.py --kinds decode --peers headrace,openvino --batch 1 --json part1.json
    python3 tools/peers/run.py --merge part1.json part2.json --output docs/benchmarks

Each peer gets a virtual environment below `.cache/peers` (pinned versions; the first run compiles
llama.cpp for about five minutes) and a process that stays for the whole run. The peers take turns,
greedy, with the same number of new tokens whatever they say. `same tokens` is the share of a text
before it first differs from that of the FP32 model.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from peers import comparison, plots, report, results  # noqa: E402 (found through the line above)
from peers.comparison import KINDS, Settings  # noqa: E402
from peers.machine import QUIET_LOAD, Machine, this_machine  # noqa: E402
from peers.overview import overview  # noqa: E402
from peers.results import Result, ResultError  # noqa: E402
from peers.specs import PEERS, REFERENCE, TRUTH  # noqa: E402
from peers.starting import start_all  # noqa: E402

_START = time.monotonic()
_QUICK = Settings(repeats=1, prefill_tokens=(512,), requests=16, score_tokens=256)


def main(argv: Sequence[str] | None = None) -> int:
    """0 with a table, failed peers included; 1 if no peer could be measured; 2 for wrong usage."""
    args = _parse(argv)
    command = shlex.join(
        ["python3", "tools/peers/run.py", *(sys.argv[1:] if argv is None else argv)]
    )
    today = datetime.datetime.now(datetime.UTC)
    try:
        if args.output:
            results.require_new([args.output / name for name in _names(today.date().isoformat())])
        if args.merge:
            result = results.merge([results.from_json(p.read_text("utf-8")) for p in args.merge])
        else:
            result = _run(args, command, today.isoformat(timespec="seconds"))
        if args.json:
            results.publish({args.json.name: results.to_json(result)}, args.json.parent)
        text = render(result)
        if args.output:
            contents = (results.to_json(result), text, plots.bars(result))
            names = _names(today.date().isoformat())
            for path in results.publish(dict(zip(names, contents, strict=True)), args.output):
                say(f"wrote {path}")
    except ResultError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    print(f"\n{text}")
    return 0 if result.peers else 1


def _names(date: str) -> list[str]:
    return [f"peers-{date}.{ending}" for ending in ("json", "md", "svg")]


def _run(args: argparse.Namespace, command: str, date: str) -> Result:
    machine = this_machine()
    threads = args.threads or machine.cores
    settings: Settings = args.settings
    say(f"{machine.cpu}, {machine.cores} cores, {threads} threads")
    if machine.load is not None and machine.load > QUIET_LOAD:
        say(f"somebody else is at work here (load {machine.load:.1f}): this may take longer")
    peers = [PEERS[name] for name in args.peers]
    text_ids = comparison.read_text_ids()
    result = Result(
        date=date,
        command=command,
        machine=dataclasses.asdict(machine),
        threads=threads,
        settings=dataclasses.asdict(settings),
        peers={},
        failures={},
    )
    room = settings.room(args.kinds)
    clients, about, failures = start_all(peers, room, threads, machine, say)
    try:
        found, late = comparison.run_all(clients, settings, args.kinds, text_ids, say)
    finally:
        for client in clients.values():
            client.close()
    failures |= late
    if "start" in args.kinds:
        found["starts"] = tuple(
            comparison.measure_starts(
                [PEERS[name] for name in clients if not PEERS[name].drafts],
                *(settings, text_ids, threads, machine, failures, say),
            )
        )
    return dataclasses.replace(result, peers=about, failures=failures, **found)


def render(result: Result) -> str:
    """The whole table in Markdown, with what it holds for."""
    rows = report.summarize(result.decode, REFERENCE, TRUTH)
    titles = {name: peer.title for name, peer in PEERS.items()}
    notes = [*_notes(result), *report.idle_notes(rows, titles)]
    notes += report.disturbance_notes(rows, titles)
    return "\n\n".join([overview(result), "\n".join(f"- {note}" for note in notes)]) + "\n"


def say(text: str) -> None:
    """A line of progress with the time since the start."""
    print(f"[{time.monotonic() - _START:6.1f} s] {text}", file=sys.stderr, flush=True)


def _notes(result: Result) -> list[str]:
    machine = Machine(**result.machine)
    sizes = Settings(**result.settings)
    load = "unknown" if machine.load is None else f"{machine.load:.1f}"
    notes = [
        f"{result.date}, {machine.cpu}, {machine.cores} cores, {machine.system}; "
        f"{result.threads} threads for each peer; load before the run {load}",
        f"decode: {sizes.prompt_tokens} prompt tokens and {sizes.new_tokens} new ones for each "
        f"sequence, greedy, in turn; rounds of a run that count: {sizes.repeats}; medians, and "
        "medians of the ratios within rounds",
        f"load: {sizes.requests} requests, {sizes.requests_per_s:g} a second in the mean, prompts "
        f"and answers of mixed lengths, at most {sizes.load_slots} at a time; memory: the most "
        "that a process of its own held while it answered 4 sequences; start: of a process to its "
        "first token",
        f"fidelity: mean KL over {sizes.score_tokens} tokens from `{TRUTH}`",
        f"command: `{result.command}`",
    ]
    for name, about in result.peers.items():
        versions = ", ".join(f"{package} {v}" for package, v in about["versions"].items())
        remarks = "".join(f"; {remark}" for remark in about.get("remarks", ()))
        notes.append(f"{PEERS[name].title}: {versions}; {about['model']}{remarks}")
    return notes


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round, fewer lengths")
    parser.add_argument("--peers", type=_peers, default=tuple(PEERS), help=", ".join(PEERS))
    parser.add_argument("--kinds", type=_kinds, default=KINDS, help=", ".join(KINDS))
    parser.add_argument("--batch", type=_sizes, help="sequences at once: 1,4,16")
    parser.add_argument("--prompt-tokens", type=_size)
    parser.add_argument("--new-tokens", type=_size)
    parser.add_argument("--repeats", type=_size, help="rounds that count")
    parser.add_argument("--threads", type=_size, help="default: physical cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a new file, to be merged")
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="measure nothing, read these"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="keep JSON, Markdown and a plot there"
    )
    args = parser.parse_args(argv)
    if args.json and (args.json.exists() or not args.json.parent.is_dir()):
        parser.error(f"--json {args.json}: the file exists, or its folder does not")
    for path in args.merge or ():
        if not path.is_file():
            parser.error(f"--merge {path}: no such file")
    asked = {
        "batches": args.batch,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    args.settings = dataclasses.replace(_QUICK if args.quick else Settings(), **given)
    return args


def _kinds(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in KINDS:
            raise argparse.ArgumentTypeError(f"{name!r} is no kind; known: {', '.join(KINDS)}")
    return names


def _size(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_size(part) for part in text.split(",")))


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name!r} is no peer; known: {', '.join(PEERS)}")
    return names


if __name__ == "__main__":
    raise SystemExit(main())
