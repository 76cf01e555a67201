"""The comparison's results: merging, the whole table, files that are never overwritten, load."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from peers import comparison, run  # noqa: E402 (found through the line above)
from peers.arrivals import Arrival, draw_arrivals, serve_in_batches  # noqa: E402
from peers.comparison import Settings, serve_load  # noqa: E402
from peers.environments import PeerError  # noqa: E402
from peers.machine import this_machine  # noqa: E402
from peers.measure import Sample  # noqa: E402
from peers.overview import metrics, overview, verdicts  # noqa: E402
from peers.plots import bars  # noqa: E402
from peers.results import (  # noqa: E402
    LoadSample,
    Result,
    ResultError,
    StartSample,
    from_json,
    merge,
    publish,
    to_json,
)
from peers.worker import answer_all  # noqa: E402


def decoded(peer: str, wall_s: float, round_: int = 1, batch: int = 1) -> Sample:
    tokens = tuple((1, 2, 3, 4, 5) for _ in range(batch))
    return Sample(peer, batch, round_, 1.0, wall_s, 10.0, 0.01, None, tokens)


def result(*samples: Sample, **fields: Any) -> Result:
    made = Result(
        date="2026-01-02T03:04:05+00:00",
        command="run",
        machine=dataclasses.asdict(this_machine()),
        threads=2,
        settings=dataclasses.asdict(Settings(batches=(1,))),
        peers={s.peer: {"versions": {s.peer: "1"}, "model": "m"} for s in samples},
        failures={},
        decode=samples,
    )
    return dataclasses.replace(made, **fields)


# headrace decodes 4 tokens a second, CTranslate2 2, OpenVINO 8, in each of two rounds
TWO_ROUNDS = [
    decoded(peer, 1 + seconds, round_)
    for round_ in (1, 2)
    for peer, seconds in (("headrace", 1.0), ("ctranslate2", 2.0), ("openvino", 0.5))
]


class TestMerge:
    def test_rounds_of_two_files_stay_pairs(self) -> None:
        slow = [decoded("headrace", 11.0), decoded("ctranslate2", 21.0)]
        both = merge([result(*TWO_ROUNDS), result(*slow)])
        (speed,) = (m for m in metrics(both) if m.title.startswith("decode"))
        assert len(speed.values["headrace"]) == 3
        # pairs across files would be 20 against 1
        assert speed.ratio("headrace", "ctranslate2") == pytest.approx(2.0)

    def test_kinds_and_batches_of_two_files_are_joined(self) -> None:
        four = result(decoded("headrace", 3.0, batch=4))
        four = dataclasses.replace(
            four,
            settings={**four.settings, "batches": [4]},
            failures={"openvino": "died"},
            divergence={"headrace": 0.01},
        )
        both = merge([result(*TWO_ROUNDS), four])
        assert both.settings["batches"] == [1, 4]
        assert both.failures == {"openvino": "died"} and both.divergence == {"headrace": 0.01}
        assert set(both.peers) == {"headrace", "ctranslate2", "openvino"}

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"threads": 1}, "settings differ"),
            ({"settings": {"batches": [], "new_tokens": 1}}, "settings differ"),
            ({"machine": {"cpu": "another"}}, "two machines"),
            ({"peers": {"headrace": {"versions": {"headrace": "2"}}}}, "two versions of headrace"),
        ],
    )
    def test_what_does_not_belong_together_is_refused(
        self, change: dict[str, Any], reason: str
    ) -> None:
        with pytest.raises(ResultError, match=reason):
            merge([result(*TWO_ROUNDS), dataclasses.replace(result(*TWO_ROUNDS), **change)])

    def test_a_file_holds_everything(self) -> None:
        whole = result(
            *TWO_ROUNDS,
            prefill=(dataclasses.replace(decoded("openvino", 2.0), prompt_tokens=512),),
            loads=(LoadSample("headrace", 1, 50, 5.0, (1.0, 2.0)),),
            starts=(StartSample("headrace", 1, 0.5, None),),
        )
        again = from_json(to_json(whole))
        assert again.decode == whole.decode and again.prefill == whole.prefill
        assert to_json(again) == to_json(whole)


class TestOverview:
    def test_every_peer_has_a_line_and_failures_are_told(self) -> None:
        text = overview(result(*TWO_ROUNDS, failures={"llama_cpp": "died of\nSIGILL"}))
        assert "| headrace | 4 | 1000 |" in text and "| CTranslate2, int8 | 2 | 1000 |" in text
        assert "- llama.cpp, sequences batched: died of SIGILL" in text

    def test_the_best_peer_is_the_one_to_beat(self) -> None:
        verdict = verdicts(result(*TWO_ROUNDS), drafts=False)[0]
        assert (verdict.peer, verdict.ratio) == ("openvino", pytest.approx(0.5))
        assert verdict.outcome == "not reached, behind"

    def test_less_memory_is_better(self) -> None:
        held = {"headrace": 300_000_000, "ctranslate2": 600_000_000}
        starts = tuple(StartSample(peer, 1, 1.0, size) for peer, size in held.items())
        found = {v.metric: v for v in verdicts(result(starts=starts), drafts=False)}
        assert found["memory, MB"].ratio == pytest.approx(2.0)
        assert found["memory, MB"].outcome == "reached"
        assert found["start, s"].outcome == "ahead"

    @pytest.mark.parametrize(("ours", "outcome"), [(0.012, "reached"), (0.02, "not reached")])
    def test_speed_at_lower_fidelity_does_not_count(self, ours: float, outcome: str) -> None:
        samples = [decoded("headrace", 2.0), decoded("ctranslate2", 3.0)]
        found = result(*samples, divergence={"headrace": ours, "ctranslate2": 0.01})
        assert verdicts(found, drafts=False)[0].outcome.split(":")[0] == outcome

    def test_drafts_are_compared_with_drafts(self) -> None:
        samples = [*TWO_ROUNDS, decoded("headrace_drafts", 1.5), decoded("openvino_lookup", 1.8)]
        (speed, _) = verdicts(result(*samples), drafts=True)
        assert (speed.peer, speed.ratio) == ("openvino_lookup", pytest.approx(1.6))

    def test_the_picture_is_well_formed_and_has_all_bars(self) -> None:
        picture = ElementTree.fromstring(bars(result(*TWO_ROUNDS)))
        kinds = [node.tag.rpartition("}")[2] for node in picture]
        assert kinds.count("rect") == 1 + 3


class TestFiles:
    def test_nothing_is_overwritten(self, tmp_path: Path) -> None:
        publish({"a": "1"}, tmp_path / "new")
        with pytest.raises(ResultError, match="a exists"):
            publish({"b": "2", "a": "2"}, tmp_path / "new")
        assert [p.name for p in (tmp_path / "new").iterdir()] == ["a"]
        assert (tmp_path / "new" / "a").read_text() == "1"

    def test_merged_files_are_kept_once(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        part = tmp_path / "part.json"
        part.write_text(to_json(result(*TWO_ROUNDS)))
        argv = ["--merge", str(part), "--output", str(tmp_path / "kept")]
        assert run.main(argv) == 0
        assert "| CTranslate2, int8 |" in capsys.readouterr().out
        kept = {path.suffix: path for path in (tmp_path / "kept").iterdir()}
        assert set(kept) == {".json", ".md", ".svg"}
        assert run.main(argv) == 2
        assert "exists" in capsys.readouterr().err

    @pytest.mark.parametrize("argv", [["--kinds", "beauty"], ["--merge", "missing.json"]])
    def test_wrong_usage(self, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            run.main(argv)
        assert caught.value.code == 2 and argv[1] in capsys.readouterr().err


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class TestLoad:
    def test_who_waits_goes_together_and_ends_together(self) -> None:
        clock, batches = Clock(), []

        def generate(prompts: Sequence[list[int]], new_tokens: int) -> None:
            batches.append((len(prompts), new_tokens))
            clock.now_s += new_tokens

        arrivals = [Arrival(at, [1], n) for at, n in ((2.0, 5), (3.0, 1), (4.0, 9), (5.0, 2))]
        done = serve_in_batches(generate, arrivals, 2, now=clock, sleep=clock.sleep)
        assert batches == [(1, 5), (2, 9), (1, 2)]
        assert done == [7.0, 16.0, 16.0, 18.0]

    def test_arrivals_are_the_same_for_all_and_in_order(self) -> None:
        arrivals = draw_arrivals(list(range(1000)), 200, 4.0, seed=7)
        assert arrivals == draw_arrivals(list(range(1000)), 200, 4.0, seed=7)
        times = [a.at_s for a in arrivals]
        assert times == sorted(times) and 35 < times[-1] < 70
        assert {16 <= len(a.prompt) <= 256 and 16 <= a.new_tokens <= 96 for a in arrivals} == {True}

    def test_latency_counts_from_the_arrival(self) -> None:
        class Fixed:
            def request(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
                return {"wall_s": 9.0, "done_s": [a["at_s"] + 2 for a in message["arrivals"]]}

        class Dead:
            def request(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
                raise PeerError("gone")

        settings = Settings(repeats=2, requests=3)
        failures: dict[str, str] = {}
        runners = {"headrace": Fixed(), "openvino": Dead()}
        text = list(range(500))
        samples = serve_load(runners, settings, text, failures, lambda _: None, settle_s=0)
        assert [s.peer for s in samples] == ["headrace"] * 2
        assert samples[0].latencies_s == pytest.approx((2.0,) * 3)
        assert failures == {"openvino": "under load: gone"}


class Adapter:
    def load(self, model: Path, **sizes: Any) -> Mapping[str, str]:
        return {}

    def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        self.largest = max(getattr(self, "largest", 0), len(prompts))
        return [[1] * new_tokens for _ in prompts]


class Open(Adapter):
    def logits(self, token_ids: list[int]) -> Any:
        return np.eye(3)[token_ids]


def ask(adapter: Any, *requests: Mapping[str, Any]) -> list[dict[str, Any]]:
    answers = io.StringIO()
    answer_all(adapter, io.StringIO("".join(json.dumps(r) + "\n" for r in requests)), answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


class TestWorker:
    def test_serves_in_batches_of_the_size_it_was_loaded_for(self) -> None:
        load = {"op": "load", "model": "m", "threads": 1, "max_batch": 2, "context_tokens": 8}
        arrivals = [{"at_s": 0.0, "prompt": [1], "new_tokens": 2}] * 5
        adapter = Adapter()
        _, served = ask(adapter, {**load, "options": {}}, {"op": "serve", "arrivals": arrivals})
        assert len(served["done_s"]) == 5 and adapter.largest == 2
        assert served["peak_bytes"] is None or served["peak_bytes"] > 1e6

    def test_shows_logits_where_it_has_them(self, tmp_path: Path) -> None:
        request = {"op": "score", "token_ids": [2, 0], "file": str(tmp_path / "x.npy")}
        (closed,) = ask(Adapter(), request)
        assert closed["exposed"] is False and not list(tmp_path.iterdir())
        (shown,) = ask(Open(), request)
        assert shown["exposed"] is True
        assert np.load(tmp_path / "x.npy").tolist() == [[0, 0, 1], [1, 0, 0]]


def test_room_is_for_what_is_measured() -> None:
    settings = Settings(batches=(1, 4), prompt_tokens=8, new_tokens=8, prefill_tokens=(600,))
    assert settings.room(("decode",)).batches == (1, 4)
    room = settings.room(comparison.KINDS)
    assert max(room.batches) == settings.load_slots
    assert room.prompt_tokens + room.new_tokens == 601
