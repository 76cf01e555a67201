"""Drafts on = drafts off, token for token, on the CPU backend; wherever the drafts come from."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.runtime.api import Runtime
from headrace.runtime.config import GenerationConfig

CONFIGS = {
    "greedy": GenerationConfig(max_new_tokens=48, ignore_eos=True),
    "sampled": GenerationConfig(
        max_new_tokens=48, temperature=0.8, top_p=0.95, seed=7, ignore_eos=True
    ),
}
Written = list[tuple[int, ...]]


def prompts() -> list[list[int]]:
    """Some begin alike, some come twice."""
    rng = random.Random(4)
    found = [[rng.randrange(3, 256) for _ in range(rng.randrange(4, 40))] for _ in range(6)]
    return [*found, *found[:3], found[0][:3] + found[1]]


def answers(folder: Path, config: GenerationConfig, **options: Any) -> tuple[Written, int]:
    """What is written to requests that come a few at a time, one of them cancelled, and how many
    drafts were accepted."""
    written: Written = []
    with Runtime.load(folder, max_sequences=3, num_threads=1, **options) as runtime:
        for first in range(0, 10, 5):
            handles = [runtime.submit(ids, config) for ids in prompts()[first : first + 5]]
            extra = runtime.submit([9, 8, 7], config)
            written += [handle.result().choices[0].token_ids for handle in handles[:2]]
            extra.cancel()
            written += [handle.result().choices[0].token_ids for handle in handles[2:]]
        return written, sum(step.accepted for step in runtime.steps)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_n_gram_drafts(tiny_package: Callable[..., Path], config: GenerationConfig) -> None:
    folder = tiny_package("w8a8_row", "int8")
    plain, none = answers(folder, config, max_draft_tokens=0)
    pooled, accepted = answers(folder, config)
    apart, _ = answers(folder, config, draft_pool_tokens=0)
    assert none == 0 and accepted > 0
    assert pooled == apart == plain
