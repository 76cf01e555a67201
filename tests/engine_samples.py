"""Small parts for tests of scheduler, engine and runtime: letters for tokens, no model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from piped import piped

from headrace.backends.fake import FakeBackend, scripted_logits
from headrace.runtime.answer import Request, StepEvent
from headrace.runtime.api import Runtime
from headrace.runtime.config import EngineConfig, GenerationConfig
from headrace.runtime.core import FinishReason, RowResult, SampledToken, StepPlan, StepResult
from headrace.runtime.engine import Engine
from headrace.runtime.scheduling.limits import Limits
from headrace.runtime.text import TextStream

across_pipes = False  # whether backends of engines stand at the other end of pipes

EOS = 0
LETTERS = "\0abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 "
VOCAB = 64
CHAT = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant "


class LetterTokenizer:
    """Token i is the i-th of `LETTERS`; 0 ends a text and is not shown. What is no letter is read
    as a space, which is the last one."""

    bos_token, eos_token = "", ""
    control_tokens: tuple[str, ...] = ()

    def encode_prompt(self, text: str) -> list[int]:
        return [LETTERS.find(letter) % VOCAB for letter in text]

    def encode_segments(self, segments: Sequence[tuple[str, bool]]) -> list[int]:
        return self.encode_prompt("".join(text for text, _ in segments))

    def special_marks(self, texts: Iterable[str]) -> dict[int, bytes]:
        return {}

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == EOS else LETTERS[token_id].encode()


def make_text(config: GenerationConfig) -> TextStream:
    tokenizer: object = LetterTokenizer()
    return TextStream(tokenizer, config.stop, config.include_stop_str_in_output)  # type: ignore[arg-type]


def make_engine(backend: FakeBackend | None = None, **options: Any) -> Engine:
    config, made = EngineConfig.from_dict(options), backend or FakeBackend(max_slots=16)
    return Engine(piped(made) if across_pipes else made, make_text, [EOS], config)


def make_runtime(backend: FakeBackend | None = None, **options: Any) -> Runtime:
    return Runtime(make_engine(backend, **options), LetterTokenizer(), chat_template=CHAT)


def speller(text: str) -> FakeBackend:
    """A backend that answers every one-letter prompt with `text` and then ends it."""

    def script(prefix: object) -> int:
        position = len(prefix) - 1  # type: ignore[arg-type]
        return LETTERS.index(text[position]) if position < len(text) else EOS

    return FakeBackend(max_slots=4, logits=scripted_logits(VOCAB, script))


def make_limits(**changes: Any) -> Limits:
    values: dict[str, Any] = {
        "max_slots": 4,
        "context_tokens": 64,
        "kv_budget_tokens": 256,
        "kv_bytes_per_token": 4,
        "prefix_cache_tokens": 0,
        "max_chunk_tokens": 32,
        "inter_token_bound_ms": 100.0,
    }
    return Limits(**{**values, **changes})


def result_of(plan: StepPlan, token_id: int = 7, model_ms: float = 1.0) -> StepResult:
    """A step in which every row with logits drew the same token."""
    drawn = (SampledToken(token_id, 0.0),)
    rows = tuple(RowResult(row.seq_id, drawn if row.num_logits else ()) for row in plan.rows)
    return StepResult(plan.step_id, rows, model_ms)


class Answers:
    """Collects the events of an engine by request and answer."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[Request, int], list[int]] = {}
        self.texts: dict[tuple[Request, int], str] = {}
        self.finish: dict[tuple[Request, int], FinishReason] = {}
        self.errors: dict[Request, Exception] = {}

    def take(self, events: list[StepEvent]) -> None:
        for event in events:
            if event.delta is None:
                assert event.error is not None and event.request not in self.errors
                self.errors[event.request] = event.error
                continue
            key = event.request, event.delta.index
            assert key not in self.finish, "a delta after the last"
            self.tokens.setdefault(key, []).extend(event.delta.token_ids)
            self.texts[key] = self.texts.get(key, "") + event.delta.text
            if event.delta.finish_reason is not None:
                self.finish[key] = event.delta.finish_reason


def run_to_end(engine: Engine, answers: Answers, max_steps: int = 5000) -> None:
    for _ in range(max_steps):
        if not engine.has_work:
            return
        answers.take(engine.step())
        engine.check_integrity()
    raise AssertionError(f"not done after {max_steps} steps")


def tokens_alone(prompt: Sequence[int], config: GenerationConfig, **options: Any) -> list[int]:
    """What a request gets when nobody else is there."""
    engine, answers = make_engine(**options), Answers()
    request = engine.prepare(prompt, config)
    engine.add(request)
    run_to_end(engine, answers)
    return answers.tokens[request, 0]


def run_arrivals(
    engine: Engine,
    arrivals: Iterable[tuple[int, list[int], GenerationConfig]],
    cancel_at: int | None,
) -> list[tuple[Any, Any, Any]]:
    """Tokens, text and end of every answer to requests that arrive at given steps.

    The first request is cancelled at `cancel_at` and left out: its length depends on the speed.
    """
    answers, requests = Answers(), []
    pending = sorted(arrivals, key=lambda arrival: arrival[0])
    for step in range(5000):
        while pending and (pending[0][0] <= step or not engine.has_work):
            _, prompt, config = pending.pop(0)
            requests.append(engine.prepare(prompt, config))
            engine.add(requests[-1])
        if step == cancel_at and requests:
            answers.take(engine.cancel(requests[0]))
        if not engine.has_work and not pending:
            break
        answers.take(engine.step())
        engine.check_integrity()
    assert not answers.errors
    return [
        (answers.tokens.get((r, i)), answers.texts.get((r, i)), answers.finish.get((r, i)))
        for r in requests[0 if cancel_at is None else 1 :]
        for i in range(r.config.n)
    ]
