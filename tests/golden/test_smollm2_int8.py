"""The default package of the real model: an answer, and the same tokens in any company."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from smollm2 import golden

from headrace.runtime import Runtime

pytestmark = pytest.mark.model

SAMPLING = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 7},
}


@pytest.fixture(scope="module")
def runtime(smollm2_package: Callable[[str, str], Path]) -> Iterator[Runtime]:
    """Keeps no texts: what is compared here is computed each time."""
    package = smollm2_package("w8a8_row", "auto")
    with Runtime.load(package, max_sequences=16, prefix_cache_bytes=0) as made:
        yield made


def test_the_default_is_an_int8_cache(runtime: Runtime) -> None:
    assert runtime.capabilities.kv_bytes_per_token == 30 * 2 * 3 * 64
    assert runtime.capabilities.exact_rows


def test_capital_of_france(runtime: Runtime) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert "Paris" in runtime.chat(question, max_new_tokens=32).text


@pytest.mark.parametrize("sampling", SAMPLING)
def test_batch_is_single(runtime: Runtime, sampling: str) -> None:
    """16 prompts of different lengths that arrive at random times give the tokens that each gives
    alone."""
    texts = [entry["prompt_ids"] for entry in golden()["prompts"]][:16]
    options = {**SAMPLING[sampling], "max_new_tokens": 24, "ignore_eos": True}
    alone = [runtime.generate(ids, **options).token_ids for ids in texts]
    rng = random.Random(3)
    handles = []
    for ids in texts:
        handles.append(runtime.submit(ids, **options))
        time.sleep(rng.random() * 0.05)
    together = [handle.result(120).token_ids for handle in handles]
    assert together == alone
    assert len(set(together)) > 12  # different prompts, different answers


def test_chunked_prefill_is_whole_prefill(
    runtime: Runtime, smollm2_package: Callable[[str, str], Path]
) -> None:
    ids = max((entry["prompt_ids"] for entry in golden()["prompts"]), key=len)
    options = {"max_new_tokens": 24, "ignore_eos": True, "logprobs": 3}
    whole = runtime.generate(ids, **options)
    package = smollm2_package("w8a8_row", "auto")
    with Runtime.load(package, max_sequences=2, max_chunk_tokens=17, prefix_cache_bytes=0) as small:
        chunked = small.generate(ids, **options)
    assert chunked.token_ids == whole.token_ids
    assert chunked.choices[0].logprobs == whole.choices[0].logprobs
    assert chunked.choices[0].entropy_nats == whole.choices[0].entropy_nats


@pytest.mark.parametrize("sampling", SAMPLING)
def test_drafts_change_nothing(
    runtime: Runtime, smollm2_package: Callable[[str, str], Path], sampling: str
) -> None:
    """Texts that repeat themselves, so that drafts are made and accepted."""
    texts = [
        entry["prompt_ids"] + entry["token_ids"] + entry["prompt_ids"]
        for entry in golden()["prompts"][:12]
    ]
    options = {**SAMPLING[sampling], "max_new_tokens": 64, "ignore_eos": True, "logprobs": 1}
    first = runtime.steps[-1].step_id if runtime.steps else -1
    drafted = runtime.generate(texts, **options)
    accepted = sum(step.accepted for step in runtime.steps if step.step_id > first)
    package = smollm2_package("w8a8_row", "auto")
    with Runtime.load(package, max_sequences=16, max_draft_tokens=0) as without:
        plain = without.generate(texts, **options)
    assert [c.choices for c in drafted] == [c.choices for c in plain]
    assert accepted > 50


@pytest.mark.parametrize("sampling", SAMPLING)
def test_prefixes_change_nothing(
    runtime: Runtime, smollm2_package: Callable[[str, str], Path], sampling: str
) -> None:
    """Chats that grow by turns and begin alike."""
    texts = [entry["prompt_ids"] for entry in golden()["prompts"][:6]]
    options = {**SAMPLING[sampling], "max_new_tokens": 12, "ignore_eos": True, "logprobs": 1}
    package = smollm2_package("w8a8_row", "auto")
    first = runtime.steps[-1].step_id if runtime.steps else -1
    with Runtime.load(package, max_sequences=8) as keeping:
        chats = [list(ids) for ids in texts]
        for turn in range(3):
            kept = keeping.generate(chats, **options)
            plain = runtime.generate(chats, **options)
            assert [c.choices for c in kept] == [c.choices for c in plain]
            for chat, answer in zip(chats, kept, strict=True):
                chat += [*answer.token_ids, *texts[turn][:20]]
        fed = sum(step.num_tokens for step in keeping.steps)
    computed = sum(step.num_tokens for step in runtime.steps if step.step_id > first)
    assert fed < 0.6 * computed
