"""What heads are trained on: texts of the package itself, and the states that go with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_tokenizer

from headrace.exporters.heads import collect as collecting
from headrace.exporters.heads.collect import collect
from headrace.exporters.heads.data import NO_TARGET, OTHER_TOKEN, head_data
from headrace.exporters.heads.wanted import Collected, Wanted
from headrace.exporters.validate import GraphRunner
from headrace.runtime.errors import BackendError
from headrace.runtime.manifest import HIDDEN, LOGITS

TEXT = "the river in a north they went on there and no winter " * 40
WANTED = Wanted(("the river", "in a", "north"), 2, TEXT)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "MAX_NEW_TOKENS", 12)
    monkeypatch.setattr(collecting, "CHUNK_TOKENS", 128)
    monkeypatch.setattr(collecting, "_GROUP_PROMPTS", 2)


def quiet(stage: str, done: int, total: int) -> None:
    pass


def same(one: Collected, other: Collected) -> bool:
    equal = np.array_equal(one.tokens, other.tokens) and np.array_equal(one.states, other.states)
    return equal and one.starts == other.starts


def test_states_are_those_that_tokens_were_drawn_from(
    tiny_package: Callable[..., Path], tmp_path: Path
) -> None:
    package = tiny_package("w8a8_row", "int8")
    found = collect(package, WANTED, tmp_path, quiet)
    # A chunk of the text: the same states as in a reading of its own.
    runner = GraphRunner(next(package.glob("*/ragged.onnx")), 128)
    first_chunk = tiny_tokenizer().encode(TEXT).ids[:128]
    start = found.starts[6]
    assert found.tokens[start : start + 127].tolist() == first_chunk[1:]
    expected = runner.append(first_chunk)[HIDDEN][:-1]
    np.testing.assert_allclose(found.states[start : start + 127], expected, atol=2e-3)
    # The greedy answer to the first prompt: states after the prompt and each token of the answer.
    answer = found.tokens[: found.starts[1]].tolist()
    assert 0 < len(answer) <= 12
    prompt = tiny_tokenizer().encode(
        "<|im_start|>user\nthe river<|im_end|>\n<|im_start|>assistant\n"
    )
    runner.reset()
    outputs = runner.append([*prompt.ids, *answer])
    places = slice(len(prompt.ids) - 1, -1)
    assert outputs[LOGITS][places].argmax(1).tolist() == answer
    states = found.states[: found.starts[1]]
    np.testing.assert_allclose(states, outputs[HIDDEN][places], atol=2e-3)


def test_collection_goes_on_where_it_was_ended(
    tiny_package: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tiny_package("w8a8_row", "int8")
    whole = collect(package, WANTED, tmp_path / "whole", quiet)

    def end_at(number: int) -> Callable[[str, int, int], None]:
        def report(stage: str, done: int, total: int) -> None:
            if done == number:
                raise BackendError("ended")

        return report

    for number in (1, 3, 5, 7):
        with pytest.raises(BackendError, match="ended"):
            collect(package, WANTED, tmp_path / "parts", end_at(number))
        with (tmp_path / "parts" / "states.f16").open("ab") as stream:
            stream.write(b"half a text")
    assert same(collect(package, WANTED, tmp_path / "parts", quiet), whole)


def test_targets_are_the_tokens_behind_the_next() -> None:
    tokens = np.array([5, 6, 5, 7, 9, 9, 5, 6, 8], np.int64)
    states = np.arange(18, dtype=np.float16).reshape(9, 2)
    found = head_data(Collected(tokens, states, [0, 4, 9]), 2, 2, 10, 1, None)
    assert found.token_map.tolist() == [5, 6]
    given, targets = found.batch(np.arange(found.num_train))
    place = {int(token): i for i, token in enumerate(found.token_map)}

    def target(number: int) -> int:
        return place.get(int(tokens[number]), OTHER_TOKEN)

    assert given.tolist() == states[[0, 1, 2, 4, 5, 6, 7]].tolist()
    assert targets.tolist() == [
        [target(1), target(2)],
        [target(2), target(3)],
        [target(3), NO_TARGET],
        [target(5), target(6)],
        [target(6), target(7)],
        [target(7), target(8)],
        [target(8), NO_TARGET],
    ]
