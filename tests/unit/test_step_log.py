"""What is told about steps: who shared them, which tokens were guessed, what the cache had."""

from __future__ import annotations

from engine_samples import LETTERS, VOCAB, make_engine, make_runtime

from headrace.backends.fake import FakeBackend, scripted_logits
from headrace.runtime.completion import TokenDelta
from headrace.runtime.config import GenerationConfig
from headrace.runtime.core import LaneRecord
from headrace.runtime.engine import Engine
from headrace.runtime.step_log import LANE_LOG_LENGTH

CYCLE = "abcdefgh"


def reciter() -> FakeBackend:
    """A model that says the alphabet's first letters over and over, which drafts get right."""

    def script(prefix: object) -> int:
        return LETTERS.index(CYCLE[len(prefix) % len(CYCLE)])  # type: ignore[arg-type]

    logits = scripted_logits(VOCAB, script)
    # Asleep for most of a step, so that drafts are worth it on any machine.
    return FakeBackend(max_slots=4, logits=logits, context_tokens=1024, delay_ms=1.0)


def deltas_of(engine: Engine, *configs: GenerationConfig) -> list[TokenDelta]:
    for config in configs:
        engine.add(engine.prepare([1, 2, 3], config))
    found = []
    while engine.has_work:
        found += [event.delta for event in engine.step() if event.delta is not None]
    return found


def test_lanes_agree_with_the_steps_and_the_tokens() -> None:
    engine = make_engine(reciter())
    config = GenerationConfig(max_new_tokens=60)
    deltas = deltas_of(engine, config, GenerationConfig(max_new_tokens=20))
    lanes: list[LaneRecord] = list(engine.log.lanes)
    assert len(lanes) == len(engine.steps)
    for lane, step in zip(lanes, engine.steps, strict=True):
        assert lane.step_id == step.step_id and len(lane.rows) == step.num_rows
        assert sum(row.num_tokens for row in lane.rows) == step.num_tokens
        assert sum(row.drafted for row in lane.rows) == step.drafted
        assert sum(row.accepted for row in lane.rows) == step.accepted
        assert all(0 <= row.accepted <= row.drafted < row.num_tokens for row in lane.rows)
    assert [lane.end_s for lane in lanes] == sorted(lane.end_s for lane in lanes)
    assert max(len(lane.rows) for lane in lanes) == 2  # they shared steps
    rows = [row for lane in lanes for row in lane.rows]
    assert any(row.is_prompt for row in rows)
    assert {row.seq_id for row in rows} == {0, 1}
    accepted = sum(delta.num_accepted for delta in deltas)
    assert accepted == sum(row.accepted for row in rows) > 20
    for delta in deltas:
        assert 0 <= delta.num_accepted <= len(delta.token_ids)


def test_the_log_is_bounded() -> None:
    engine = make_engine(reciter(), max_draft_tokens=0)
    deltas_of(engine, GenerationConfig(max_new_tokens=LANE_LOG_LENGTH + 20))
    assert len(engine.log.lanes) == LANE_LOG_LENGTH < len(engine.steps)


def test_what_the_cache_had_is_counted() -> None:
    prompt = "the quick brown fox jumps over a lazy dog"
    with make_runtime(reciter()) as runtime:

        def found(text: str) -> set[int]:
            return {delta.cached_tokens for delta in runtime.stream(text, max_new_tokens=8)}

        assert found(prompt) == {0}
        assert found(prompt) == {len(prompt) - 1}  # the last token's logits are wanted
        assert found(prompt + " and then some more") == {len(prompt)}


def test_an_interrupted_answer_does_not_count_its_own_tokens() -> None:
    """It comes back to what it computed itself, which is no find."""
    engine = make_engine(FakeBackend(max_slots=2, kv_budget_tokens=68))
    config = GenerationConfig(max_new_tokens=60, ignore_eos=True)
    long = engine.prepare([1, 2, 3], config)
    engine.add(long)
    for _ in range(30):
        engine.step()
    engine.add(engine.prepare([4, 5], GenerationConfig(max_new_tokens=5, priority=10)))
    order, cached = list[int](), set[int]()
    while engine.has_work:
        for event in engine.step():
            assert event.delta is not None
            order.append(event.request.request_id)
            if event.request is long:
                cached.add(event.delta.cached_tokens)
    assert order[0] != order[-1] == long.request_id  # it was interrupted, and went on
    assert cached == {0}


def test_drafts_behind_a_stop_string_do_not_count() -> None:
    """They were right, but nobody gets them."""
    engine = make_engine(reciter())
    config = GenerationConfig(max_new_tokens=60, min_new_tokens=30, stop=("fg", "habch"))
    stop_late = GenerationConfig(max_new_tokens=60, stop=("ghabcdefghabcdefghabcdefghab",))
    for wanted in (config, stop_late):
        deltas = deltas_of(engine, wanted)
        ids = {lane.rows[0].seq_id for lane in engine.log.lanes if lane.rows}
        rows = [row for lane in engine.log.lanes for row in lane.rows if row.seq_id == max(ids)]
        assert sum(row.accepted for row in rows) == sum(delta.num_accepted for delta in deltas)
    assert deltas[-1].matched_stop and deltas[-1].num_accepted
