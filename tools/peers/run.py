"""headrace beside other runtimes: same checkpoint, prompts, threads; one table from one run.

    python3 tools/peers/run.py
    python3 tools/peers/run.py --peers headrace,openvino --batch 1,16 --json figures.json

Each peer gets a virtual environment below `.cache/peers` (pinned versions; the first run compiles
llama.cpp for about five minutes) and a process that stays for the whole run. The peers take turns,
greedy, with the same number of new tokens whatever they say.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from peers import report  # noqa: E402 (found through the line above)
from peers.machine import QUIET_LOAD, this_machine  # noqa: E402
from peers.measure import Plan, measure  # noqa: E402
from peers.specs import PEERS, REFERENCE  # noqa: E402
from peers.starting import start_all  # noqa: E402

PROMPT_IDS = ROOT / "tools" / "peers" / "prompt_ids.json"
_START = time.monotonic()


def main(argv: Sequence[str] | None = None) -> int:
    """0 with a table, failed peers included; 1 if no peer could be measured; 2 for wrong usage."""
    args = _parse(argv)
    machine = this_machine()
    threads = args.threads or machine.cores
    plan = Plan(args.batch, args.prompt_tokens, args.new_tokens, args.repeats)
    say(f"{machine.cpu}, {machine.cores} cores, {threads} threads")
    if machine.load is not None and machine.load > QUIET_LOAD:
        say(f"somebody else is at work here (load {machine.load:.1f}): this may take longer")
    peers = [PEERS[name] for name in args.peers]
    clients, about, failures = start_all(peers, plan, threads, machine, say)
    text_ids = json.loads(PROMPT_IDS.read_text("utf-8"))
    try:
        samples, late_failures = measure(clients, plan, text_ids, say)
    finally:
        for client in clients.values():
            client.close()
    rows = report.summarize(samples, REFERENCE)
    failures = {**failures, **late_failures}
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": dataclasses.asdict(machine),
        "threads": threads,
        "plan": dataclasses.asdict(plan),
        "peers": about,
        "failures": failures,
        **report.as_json(rows, samples),
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    titles = {name: PEERS[name].title for name in args.peers}
    print()
    print(report.table(rows, titles, REFERENCE, failures))
    print()
    notes = [*report.idle_notes(rows, titles), *report.disturbance_notes(rows, titles)]
    for note in [*_notes(result, titles), *notes]:
        print(f"- {note}")
    return 0 if rows else 1


def say(text: str) -> None:
    """A line of progress with the time since the start."""
    print(f"[{time.monotonic() - _START:6.1f} s] {text}", file=sys.stderr, flush=True)


def _notes(result: Mapping[str, Any], titles: Mapping[str, str]) -> list[str]:
    machine, plan = result["machine"], result["plan"]
    load = "unknown" if machine["load"] is None else f"{machine['load']:.1f}"
    notes = [
        f"{result['date']}, {machine['cpu']}, {machine['cores']} cores, {machine['system']}; "
        f"{result['threads']} threads for each peer; load before the run {load}",
        f"{plan['prompt_tokens']} prompt tokens and {plan['new_tokens']} new ones for each "
        f"sequence, greedy; medians of {plan['repeats']} rounds in turn at each batch size; "
        f"`{REFERENCE} is` over 1 means that it is faster, with lowest and highest of the rounds",
    ]
    for name, about in result["peers"].items():
        versions = ", ".join(f"{package} {v}" for package, v in about["versions"].items())
        note = f"; {about['note']}" if "note" in about else ""
        notes.append(
            f"{titles[name]}: {versions}; {about['model']}; load {about['load_s']:.1f} s{note}"
        )
    return notes


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=_peers, default=tuple(PEERS), help=", ".join(PEERS))
    parser.add_argument("--batch", type=_sizes, default=(1, 4, 8), help="sequences at once: 1,4,8")
    parser.add_argument("--prompt-tokens", type=_size, default=128)
    parser.add_argument("--new-tokens", type=_size, default=64)
    parser.add_argument("--repeats", type=_size, default=3)
    parser.add_argument("--threads", type=_size, help="default: physical cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a new file for all figures")
    args = parser.parse_args(argv)
    if args.json and (args.json.exists() or not args.json.parent.is_dir()):
        parser.error(f"--json {args.json}: the file exists, or its folder does not")
    return args


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
