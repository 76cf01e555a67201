"""Texts that show whether two tokenizers are the same, with the token ids they get."""

from __future__ import annotations

from tokenizers import Tokenizer

from headrace.runtime.manifest import GoldenText

GOLDEN_TEXTS = (
    "Hello, world!",
    " leading and trailing spaces  ",
    "tabs\tand\n\nnew lines\r\n    indented",
    "0 12 345 6789 3.14159 1e-5 ½ ٣",
    "don't I'LL we've IT'S",
    "def f(x):\n    return x ** 2  # square\n",
    "naïve café — “quotes” …",
    "日本語のテキスト と 한국어",
    "مرحبا हिन्दी ภาษาไทย",
    "👩‍👩‍👧 🇫🇷 👍🏽",
    "e\u0301 vs \u00e9, zero\u200bwidth, \ufeffbom",
    "<|im_start|>user\nhi<|im_end|> </s> <0x0A>",
    "\U0001f9ff\U000e0041\u0378\ue000",
)


def golden_texts(tokenizer: Tokenizer) -> tuple[GoldenText, ...]:
    """Each text with its ids, without tokens that a post-processor would add."""
    return tuple(
        GoldenText(text=text, token_ids=tuple(tokenizer.encode(text, add_special_tokens=False).ids))
        for text in GOLDEN_TEXTS
    )
