"""The tokenizer of an encoder's folder: it puts special tokens around a text by itself."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from headrace.exporters.checkpoint.golden import GOLDEN_TEXTS
from headrace.exporters.checkpoint.json_files import maybe_object
from headrace.exporters.checkpoint.tokenizer_hf import read_tokenizer
from headrace.exporters.checkpoint.tokenizers_errors import map_tokenizers_errors
from headrace.runtime.errors import CheckpointError
from headrace.runtime.manifest import GoldenText

# transformers writes a huge number where it knows none.
_NO_LIMIT = 1 << 24


def encoder_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """A Tokenizer that neither pads nor truncates.

    Raises:
        CheckpointError: it is missing or damaged, or has tokens that the model does not.
    """
    tokenizer = read_tokenizer(folder)
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has a token {largest}, but the embedding has {vocab_size} "
            "rows; download the checkpoint again"
        )
    return tokenizer


def tokenizer_limit(folder: Path) -> int | None:
    """Longest text that tokenizer_config.json allows; None where it says nothing."""
    limit = maybe_object(folder / "tokenizer_config.json").get("model_max_length")
    return limit if type(limit) is int and 3 <= limit < _NO_LIMIT else None


def encoder_golden_texts(tokenizer: Tokenizer) -> tuple[GoldenText, ...]:
    """Texts with all their token ids, special tokens included."""
    with map_tokenizers_errors("the tokenizer cannot encode"):
        return tuple(
            GoldenText(text=text, token_ids=tuple(tokenizer.encode(text).ids))
            for text in GOLDEN_TEXTS
        )
