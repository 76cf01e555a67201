"""Well-formed files that mean harm or nonsense: what byte-wise damage does not find."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import byte_level_tokenizer, write_folder, write_gguf

from headrace.exporters.checkpoint.source import open_checkpoint
from headrace.exporters.checkpoint.spm_merges import merges_from_scores
from headrace.exporters.checkpoint.tokenizers_errors import map_tokenizers_errors
from headrace.runtime.errors import CheckpointError

_WORD = {"type": "WordLevel", "vocab": {}, "unk_token": "<unk>"}
_UNIGRAM = {"type": "Unigram", "unk_id": None, "vocab": [["b", -1.0]]}
_CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
_SPLIT = {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
_UNNAMED = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "Z", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": _WORD, "added_tokens": []}, "cannot encode"),
        ({"model": _UNIGRAM, "added_tokens": []}, "cannot encode"),
        ({"pre_tokenizer": _SPLIT}, "not a valid tokenizer"),
        ({"normalizer": _CHARSMAP}, "not a valid tokenizer"),  # a panic within the library
        ({"post_processor": _UNNAMED}, "cannot encode"),  # another
    ],
)
def test_tokenizers_that_cannot_work(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    content = json.loads(byte_level_tokenizer().to_str()) | {"pre_tokenizer": None} | changes
    (write_folder(tmp_path) / "tokenizer.json").write_text(json.dumps(content))
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=expected):
        _ = checkpoint.tokenizer


def test_an_interrupt_is_no_damaged_tokenizer() -> None:
    with pytest.raises(KeyboardInterrupt), map_tokenizers_errors("the tokenizer"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_half_a_surrogate_pair_is_refused(tmp_path: Path, name: str) -> None:
    """It could be read, but not be written into a package."""
    path = write_folder(tmp_path) / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | {"chat_template": "\ud800"}))
    with pytest.raises(CheckpointError, match=name), open_checkpoint(tmp_path) as checkpoint:
        _ = checkpoint.tokenizer


@pytest.mark.parametrize("template", [[{"name": ["x"], "template": "T"}], {"a": 1}, [3], 3, []])
def test_chat_templates_of_no_known_form_are_none(tmp_path: Path, template: object) -> None:
    settings = {"chat_template": template}
    (write_folder(tmp_path) / "tokenizer_config.json").write_text(json.dumps(settings))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tokenizer.chat_template is None


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_text_that_is_no_path(name: str) -> None:
    with pytest.raises(CheckpointError):  # which message depends on the file system
        open_checkpoint(Path(name))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    os.mkfifo(path)
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            open_checkpoint(path)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert [type(error) for error in errors] == [CheckpointError]


@pytest.mark.parametrize("blocks", [1, 3])
def test_layers_and_block_count_agree(tmp_path: Path, blocks: int) -> None:
    """A count that is too small would silently drop layers."""
    path = write_gguf(tmp_path / "m.gguf", llama__block_count=blocks)
    with pytest.raises(CheckpointError, match=f"{blocks} layers"):
        open_checkpoint(path)


def test_merges_of_a_token_without_end() -> None:
    """As many cuts as characters would take hours here."""
    endless = "ab" * 5_000_000
    assert merges_from_scores(["a", "b", "ab", endless], [0, 0, -1, -2]) == [("a", "b")]


def test_merges_equal_those_of_every_cut() -> None:
    tokens = ["a", "b", "ab", "ba", "aba", "abab", "bababa", "", "abababab"]
    scores = [-float(i * 7 % 9) for i in range(len(tokens))]
    expected = []
    for whole in sorted(range(len(tokens)), key=lambda i: (-scores[i], i)):
        token = tokens[whole]
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in halves if pair[0] in tokens and pair[1] in tokens]
        expected += sorted(known, key=lambda pair: tuple(map(tokens.index, pair)))
    assert merges_from_scores(tokens, scores) == expected
