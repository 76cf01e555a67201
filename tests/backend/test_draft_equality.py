"""Drafts on = drafts off, token for token, on the CPU backend; wherever the drafts come from."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from heads import heads_that_know, random_heads

from headrace.exporters.heads.add import add_heads
from headrace.exporters.heads.checkpoint import write_heads
from headrace.runtime.api import Runtime
from headrace.runtime.config import GenerationConfig
from headrace.runtime.drafting import acceptance, asking, budget, heads
from headrace.runtime.errors import PackageError

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


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("seed", [0, 5], ids=["twin", "stranger"])
def test_a_draft_model(
    tiny_package: Callable[..., Path],
    config: GenerationConfig,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the same weights, and one that is nearly always wrong; it need not be exact."""
    folder, draft = tiny_package("w8a8_row", "int8"), tiny_package("fp32", seed=seed)
    # Asked in every step, whatever it costs here, and believed to be right.
    monkeypatch.setattr(asking, "TRIAL_STEPS", 0)
    monkeypatch.setattr(acceptance, "_MODEL_PRIOR_RATES", (0.9,) * 7)
    plain, _ = answers(folder, config, max_draft_tokens=0)
    drafted, accepted = answers(folder, config, draft_package=draft, draft_pool_tokens=0)
    assert drafted == plain
    assert accepted > 20 or seed


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("knows", [True, False], ids=["fitted", "random"])
def test_draft_heads(
    tiny_checkpoint: Callable[..., Path],
    tiny_package: Callable[..., Path],
    tmp_path: Path,
    config: GenerationConfig,
    knows: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads that know one of the greedy answers, and some that know nothing."""
    monkeypatch.setattr(heads, "TRIAL_STEPS", 0)  # asked in every step
    monkeypatch.setattr(budget.StepCost, "__call__", lambda self, n: 1.0 + 0.01 * n)
    folder = tiny_package("fp32" if knows else "w8a8_row", "int8")
    plain, _ = answers(folder, config, max_draft_tokens=0)
    known = prompts()[0], answers(folder, CONFIGS["greedy"], max_draft_tokens=0)[0][0]
    made = heads_that_know(tiny_checkpoint(), folder, *known) if knows else random_heads()
    write_heads(tmp_path / "heads", made)
    package = shutil.copytree(folder, tmp_path / "package")
    add_heads(tiny_checkpoint(), package, tmp_path / "heads")
    drafted, accepted = answers(package, config, draft_pool_tokens=0)
    _, by_n_grams = answers(folder, config, draft_pool_tokens=0)
    assert drafted == plain
    assert accepted > by_n_grams + 20 or not knows or config.temperature


def test_a_draft_model_has_the_same_tokens(
    tiny_package: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_package("w8a8_row", "int8")
    larger = tiny_package("fp32", vocab=320)
    with pytest.raises(PackageError, match=r"cannot draft for .*: it has 320 tokens, not 256"):
        Runtime.load(folder, draft_package=larger)
    other = shutil.copytree(tiny_package("fp32"), tmp_path / "other")
    change_json(other / "manifest.json", lambda raw: raw["tokenizer"].update(golden=[]))
    change_json(other / "tokenizer.json", swap_letters)
    with pytest.raises(PackageError, match=r"cannot draft for .*: its tokens have other ids"):
        Runtime.load(folder, draft_package=other)


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The file keeps its size, which packages are checked for."""
    size, raw = path.stat().st_size, json.loads(path.read_text(encoding="utf-8"))
    change(raw)
    text = json.dumps(raw, separators=(",", ":"), ensure_ascii=False).encode()
    path.write_bytes(text.ljust(size))


def swap_letters(raw: dict[str, Any]) -> None:
    vocab = raw["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
