"""The comparison with other runtimes: rounds, ratios, table, and workers that misbehave."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from smollm2 import require_checkpoint
from tokenizers import Tokenizer

from headrace.exporters.checkpoint.source import open_checkpoint

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from peers import comparison, report, run, starting  # noqa: E402 (found through the line above)
from peers.client import Client, IllegalInstructionError  # noqa: E402
from peers.environments import PeerError, run_logged  # noqa: E402
from peers.machine import busy_cpu_s, busy_cpu_s_of, count_cores, cpu_name_of  # noqa: E402
from peers.measure import MAX_ATTEMPTS, Plan, Sample, is_disturbed, measure, windows  # noqa: E402
from peers.specs import PEERS  # noqa: E402
from peers.worker import answer_all  # noqa: E402

TITLES = {"ours": "Ours", "other": "Other"}
PLAN = Plan(batches=(1, 2), prompt_tokens=4, new_tokens=3, repeats=2)
TEXT = list(range(1000))


def quiet(_text: str) -> None:
    pass


def sample(peer: str, round_: int, first_s: float, wall_s: float, batch: int = 2) -> Sample:
    tokens = tuple((1, 2, 3, 4, 5) for _ in range(batch))
    return Sample(peer, batch, round_, first_s, wall_s, 10.0, 0.01, None, tokens)


class Doubler:
    """An adapter whose tokens are twice the last one of the prompt, and on."""

    def load(self, model: Path, **sizes: Any) -> Mapping[str, str]:
        if model.name == "missing":
            raise FileNotFoundError(model)
        return {"model": model.name}

    def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        if prompts[0][0] == 666:
            return [[1]]
        return [[p[-1] * 2 ** (i + 1) for i in range(new_tokens)] for p in prompts]


def ask(*requests: Mapping[str, Any]) -> list[dict[str, Any]]:
    answers = io.StringIO()
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    answer_all(Doubler(), io.StringIO(lines), answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


LOAD = {"op": "load", "model": "m", "threads": 1, "max_batch": 1, "context_tokens": 8}
LOAD |= {"options": {}}


class TestWorker:
    def test_answers_what_it_is_asked(self) -> None:
        loaded, ran = ask(LOAD, {"op": "run", "prompts": [[1, 5], [7]], "new_tokens": 2})
        assert loaded["about"] == {"model": "m"} and loaded["load_s"] >= 0
        assert ran["token_ids"] == [[10, 20], [14, 28]] and min(ran["wall_s"], ran["cpu_s"]) >= 0
        assert ran["idle_s"] >= 0 and ran["idle_cpu_s"] >= 0

    def test_an_error_is_an_answer_and_the_worker_goes_on(self) -> None:
        failed, loaded = ask({**LOAD, "model": "missing"}, LOAD)
        assert failed["error"].startswith("FileNotFoundError") and "error" not in loaded

    def test_too_few_tokens_are_an_error(self) -> None:
        (answer,) = ask({"op": "run", "prompts": [[666], [1]], "new_tokens": 1})
        assert "asked for 1 tokens of 2 prompts, got [1]" in answer["error"]

    def test_quit_ends_it(self) -> None:
        assert len(ask(LOAD, {"op": "quit"}, LOAD)) == 1


LOUD_WORKER = """
import os, sys
sys.path[:] = {path}
from peers.worker import serve
from test_peers import Doubler

class Loud(Doubler):
    def load(self, model, **sizes):
        print("noise")
        os.write(1, b"of native code")
        return {{}}

serve(Loud())
"""


def client(code: str, tmp_path: Path) -> Client:
    return Client([sys.executable, "-c", code], tmp_path / "worker.log")


class TestClient:
    def test_talks_to_a_worker(self, tmp_path: Path) -> None:
        worker = client(LOUD_WORKER.format(path=sys.path), tmp_path)
        assert worker.request(LOAD, 60)["about"] == {}
        request = {"op": "run", "prompts": [[3]], "new_tokens": 2}
        assert worker.request(request, 60)["token_ids"] == [[6, 12]]
        with pytest.raises(PeerError, match="asked for 2 tokens"):
            worker.request({"op": "run", "prompts": [[666]], "new_tokens": 2}, 60)
        worker.close()
        assert "native code" in (tmp_path / "worker.log").read_text()

    def test_tells_how_a_worker_ended(self, tmp_path: Path) -> None:
        worker = client("raise SystemExit('no such model')", tmp_path)
        with pytest.raises(PeerError, match="exit code 1: no such model"):
            worker.request(LOAD, 60)
        worker.close()

    @pytest.mark.skipif(sys.platform == "win32", reason="signals")
    @pytest.mark.parametrize(
        ("name", "kind"), [("SIGILL", IllegalInstructionError), ("SIGSEGV", PeerError)]
    )
    def test_tells_of_signals(self, name: str, kind: type[PeerError], tmp_path: Path) -> None:
        die = f"import os, signal; input(); os.kill(os.getpid(), signal.{name})"
        with pytest.raises(PeerError) as caught:
            client(die, tmp_path).request(LOAD, 60)
        assert type(caught.value) is kind

    def test_gives_up_on_a_silent_worker(self, tmp_path: Path) -> None:
        worker = client("import time; time.sleep(600)", tmp_path)
        with pytest.raises(PeerError, match=r"no answer to 'load' in 0\.1 s"):
            worker.request(LOAD, 0.1)
        worker.close()


class Scripted:
    """A runner that notes its turns and fails when told to."""

    def __init__(self, name: str, turns: list[tuple[str, int, int]], fails_at: int = 99) -> None:
        self.name, self.turns, self.fails_at = name, turns, fails_at
        self.prompts: list[tuple[int, ...]] = []

    def request(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        prompts, new_tokens = message["prompts"], message["new_tokens"]
        self.turns.append((self.name, len(prompts), new_tokens))
        self.prompts += [tuple(p) for p in prompts]
        if len(prompts) >= self.fails_at:
            raise PeerError("died of SIGSEGV")
        times = {"wall_s": float(new_tokens), "cpu_s": 0.0, "idle_s": 1.0, "idle_cpu_s": 0.0}
        return {**times, "token_ids": [[1] * new_tokens for _ in prompts]}


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the machine's clock of CPU time shows, one look after the other; then it stands."""
    looks: list[float] = []
    monkeypatch.setattr("peers.measure.busy_cpu_s", lambda: looks.pop(0) if looks else 9e9)
    return looks


@pytest.mark.usefixtures("busy")
class TestRounds:
    def test_peers_take_turns(self) -> None:
        turns: list[tuple[str, int, int]] = []
        runners = {name: Scripted(name, turns) for name in "ab"}
        samples, failures = measure(runners, PLAN, TEXT, quiet, settle_s=0)
        once = [(name, 1, new_tokens) for name in "ab" for new_tokens in (1, 3)]
        twice = [(name, 2, new_tokens) for name, _, new_tokens in once]
        assert turns == once * 3 + twice * 3 and not failures
        assert [(s.batch, s.round, s.peer) for s in samples] == [
            (batch, round_, peer) for batch in (1, 2) for round_ in (1, 2) for peer in "ab"
        ]
        assert (samples[0].first_s, samples[0].wall_s) == (1.0, 3.0)

    def test_same_prompts_for_all_and_none_twice(self) -> None:
        turns: list[tuple[str, int, int]] = []
        a, b = (Scripted(name, turns) for name in "ab")
        measure({"a": a, "b": b}, PLAN, TEXT, quiet, settle_s=0)
        assert a.prompts == b.prompts and len(set(a.prompts)) == len(a.prompts)
        assert {len(p) for p in a.prompts} == {PLAN.prompt_tokens}

    def test_a_peer_that_fails_leaves_the_others_alone(self) -> None:
        turns: list[tuple[str, int, int]] = []
        runners = {"a": Scripted("a", turns, fails_at=2), "b": Scripted("b", turns)}
        samples, failures = measure(runners, PLAN, TEXT, quiet, settle_s=0)
        assert failures == {"a": "at 2 at once: died of SIGSEGV"}
        assert [s.peer for s in samples] == ["a", "b", "a", "b", "b", "b"]
        assert turns.count(("a", 2, 1)) == 1  # not asked again

    def test_disturbed_rounds_are_measured_again(self, busy: list[float]) -> None:
        busy += [0, 0, 0, 1e6]  # the warm-up, then a round in which others were at work
        plan = replace(PLAN, batches=(1,))
        runners = {"a": Scripted("a", [])}
        samples, _ = measure(runners, plan, TEXT, quiet, settle_s=0)
        assert [s.round for s in samples] == [2, 3] and not is_disturbed(samples)

    def test_disturbed_rounds_are_better_than_none(self, busy: list[float]) -> None:
        busy += [1e6 * i for i in range(1000)]
        turns: list[tuple[str, int, int]] = []
        plan = replace(PLAN, batches=(1,))
        samples, _ = measure({"a": Scripted("a", turns)}, plan, TEXT, quiet, settle_s=0)
        assert [s.round for s in samples] == [1, 2] and is_disturbed(samples)
        assert len(turns) == 2 * (1 + MAX_ATTEMPTS * plan.repeats)
        (note,) = report.disturbance_notes(report.summarize(samples, "a"), {"a": "A"})
        assert "in 2 of the 2 rounds of A with 1 at once" in note

    def test_an_interrupt_leaves_a_table(self) -> None:
        class Interrupted(Scripted):
            def request(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
                if len(self.turns) == 5:  # within the second round
                    raise KeyboardInterrupt
                return super().request(message, timeout_s)

        samples, failures = measure({"a": Interrupted("a", [])}, PLAN, TEXT, quiet, settle_s=0)
        assert [(s.batch, s.round) for s in samples] == [(1, 1)] and not failures

    @pytest.mark.model
    def test_the_text_is_the_licence(self) -> None:
        """In tokens of the checkpoint, so that the driver needs no tokenizer."""
        with open_checkpoint(require_checkpoint()) as checkpoint:
            tokenizer = Tokenizer.from_str(checkpoint.tokenizer.tokenizer_json)
        text = (ROOT / "LICENSE").read_text("utf-8")
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == json.loads(comparison.PROMPT_IDS.read_text("utf-8"))

    def test_prompts_run_through_a_short_text(self) -> None:
        assert list(islice(windows([1, 2, 3], 4), 2)) == [[1, 2, 3, 1], [3, 1, 2, 3]]


class TestFigures:
    def test_rates_are_medians(self) -> None:
        walls = [2.0, 4.0, 10.0]
        (row,) = report.summarize([sample("ours", i, 1.0, w) for i, w in enumerate(walls)], "ours")
        assert (row.batch, row.rounds) == (2, 3)
        assert row.tok_s == 2 * 5 / 4.0  # 2 sequences of 5 tokens
        assert row.decode_tok_s == 2 * 4 / 3.0
        assert row.first_ms == 1000.0 and row.idle_share == pytest.approx(0.001)

    def test_ratios_pair_rounds(self) -> None:
        """A machine that is four times slower in one round changes no ratio."""
        samples = [sample("ours", i, 0.5 * s, 1.0 * s) for i, s in enumerate((1, 4, 1))]
        samples += [sample("other", i, 0.5 * s, 2.0 * s) for i, s in enumerate((1, 4, 1))]
        ours, other = report.summarize(samples, "ours")
        assert ours.total_ratio == report.Ratio(1.0, 1.0, 1.0)
        assert other.total_ratio == report.Ratio(2.0, 2.0, 2.0)
        assert other.decode_ratio is not None and other.decode_ratio.median == 3.0
        assert other.first_ratio is not None and other.first_ratio.median == 1.0

    def test_rounds_without_the_reference_have_no_ratio(self) -> None:
        samples = [sample("ours", 1, 1, 2), sample("other", 1, 1, 4), sample("other", 2, 1, 40)]
        other = report.summarize(samples, "ours")[1]
        assert other.total_ratio == report.Ratio(2.0, 2.0, 2.0) and other.rounds == 2
        (alone,) = report.summarize([sample("other", 1, 1, 4)], "ours")
        assert alone.total_ratio is None and alone.agreement is None

    def test_one_new_token_is_no_decoding(self) -> None:
        one = replace(sample("ours", 1, 1.0, 1.1), token_ids=((7,), (8,)))
        (row,) = report.summarize([one], "ours")
        assert row.decode_tok_s is None and row.decode_ratio is None

    def test_agreement_ends_at_the_first_difference(self) -> None:
        other = replace(sample("other", 1, 1, 2), token_ids=((1, 2, 0, 4, 5), (1, 2, 3, 4, 5)))
        row = report.summarize([sample("ours", 1, 1, 2), other], "ours")[1]
        assert row.agreement == pytest.approx((2 / 5 + 1) / 2)


class TestTable:
    def rows(self) -> list[report.Row]:
        samples = [sample("other", 1, 0.5, 3.0, batch=8), sample("ours", 1, 0.5, 2.0, batch=8)]
        return report.summarize([sample("ours", 1, 0.5, 1.0, batch=1), *samples], "ours")

    def test_a_line_for_each_peer_and_batch_size(self) -> None:
        lines = report.table(self.rows(), TITLES, "ours", {}).splitlines()
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        assert cells[0][:4] == ["at once", "peer", "tok/s", "ours is"]
        assert [line[:2] for line in cells[2:]] == [["1", "Ours"], ["8", "Other"], ["8", "Ours"]]
        assert cells[3][2:4] == ["13.3", "1.50x (1.50–1.50)"]
        assert len({len(line) for line in lines}) == 1  # aligned

    def test_failures_are_lines_and_cannot_break_the_table(self) -> None:
        text = report.table(self.rows(), TITLES, "ours", {"other": "a | b\nc"})
        last = text.splitlines()[-1]
        assert "Other" in last and "failed: a / b c" in last
        assert last.count("|") == text.splitlines()[0].count("|")

    def test_all_failed(self) -> None:
        assert "failed: x" in report.table([], TITLES, "ours", {"ours": "x"})

    def test_spinning_while_others_run_is_told(self) -> None:
        spinning = [replace(row, idle_share=0.9) for row in self.rows() if row.peer == "other"]
        notes = report.idle_notes([self.rows()[0], *spinning], TITLES)
        assert notes[-1].startswith("not a fair run: Other used 90%") and len(notes) == 2
        assert len(report.idle_notes(self.rows(), TITLES)) == 1

    def test_json(self) -> None:
        data = json.loads(json.dumps(report.as_json(self.rows(), [sample("ours", 1, 1, 2)])))
        assert data["rows"][0]["tok_s"] == 5.0 and data["samples"][0]["wall_s"] == 2
        assert "token_ids" not in data["samples"][0]


class TestMachine:
    def test_names_the_cpu(self) -> None:
        text = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\n"
        assert cpu_name_of(text * 2) == "AMD EPYC (cpu family 25, model 17)"
        assert cpu_name_of("processor : 0")

    def test_counts_busy_time(self) -> None:
        stat = "cpu  100 20 30 5000 600 7 8 9 10 11\ncpu0 1 2 3\n"
        assert busy_cpu_s_of(stat, ticks_per_s=100) == 1.74
        assert (busy_cpu_s() or 1) > 0

    def test_counts_cores_not_threads(self) -> None:
        assert count_cores(["0,4\n", "1,5\n", "0,4\n"]) == 2


class TestSetUp:
    def test_a_failed_command_names_its_last_line(self, tmp_path: Path) -> None:
        command = [sys.executable, "-c", "print('compiling'); raise SystemExit('no compiler')"]
        with pytest.raises(PeerError, match="building failed: no compiler"):
            run_logged(command, tmp_path / "log", "building", quiet)

    def test_an_illegal_instruction_leads_to_another_build(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        builds: list[bool] = []
        monkeypatch.setattr(
            starting.environments,
            "ensure",
            lambda *a, without_amx=False: builds.append(without_amx),
        )
        monkeypatch.setattr(starting.environments, "was_built_without_amx", lambda _: bool(builds))

        def start(*_: object) -> object:
            if builds:
                return "worker"
            raise IllegalInstructionError("died of an illegal instruction")

        monkeypatch.setattr(starting, "_start", start)
        machine = run.this_machine()
        assert starting.start(PEERS["llama_cpp"], ROOT, PLAN, 1, machine, quiet) == "worker"
        assert builds == [True]
        builds.clear()
        with pytest.raises(IllegalInstructionError):
            starting.start(PEERS["openvino"], ROOT, PLAN, 1, machine, quiet)
        assert not builds

    def test_without_any_peer_there_is_a_table_and_exit_code_1(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise PeerError("no network")

        monkeypatch.setattr(starting.environments, "ensure", refuse)
        assert run.main(["--peers", "headrace,openvino"]) == 1
        assert capsys.readouterr().out.count(": no checkpoint: no network") == 2

    @pytest.mark.parametrize(
        "argv", [["--peers", "vllm"], ["--batch", "0"], ["--batch", "1,x"], ["--json", str(ROOT)]]
    )
    def test_wrong_usage(self, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            run.main(argv)
        assert caught.value.code == 2 and argv[0] in capsys.readouterr().err

    def test_everything_is_pinned(self) -> None:
        for peer in PEERS.values():
            pins = [*peer.environment.wheels, *filter(None, [peer.environment.source])]
            assert all("==" in pin for pin in pins)
            assert pins or peer.environment.holds_headrace
            assert (ROOT / "tools" / "/".join(peer.module.split("."))).with_suffix(".py").exists()
