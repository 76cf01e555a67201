"""How byte-level BPE vocabularies cut a text into words, by the name that GGUF gives it. Only data.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) and leaves the rule to the reader; these
are the rules of the original tokenizer.json files. Each expression cuts the pieces that the one
before left, and what it does not match is a piece too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_SHORT = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_SHORT}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = rf"(?i:{_SHORT})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_ONE_DIGIT = rf"{_WORD}|\p{{N}}|{_TAIL}"
_THREE_DIGITS = rf"{_WORD}|\p{{N}}{{1,3}}|{_TAIL}"

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+SUFFIX|"
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*SUFFIX"
)
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED.replace('SUFFIX', '')}|\p{{N}}|{_CASED_TAIL}"
_GPT4O = rf"{_CASED.replace('SUFFIX', f'(?i:{_SHORT})?')}|\p{{N}}{{1,3}}|{_CASED_TAIL}"

_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`ignore_merges`: a word that is a token stays whole, whatever the merges say.

    `add_bos` holds where the file does not say.
    """

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


def _named(rule: PreTokenizer, *names: str) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names, rule)


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **_named(PreTokenizer(_DEFAULT), "default"),
    **_named(PreTokenizer((_GPT2,)), "gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "mellum"),
    **_named(
        PreTokenizer((r"\p{N}", _GPT2)),
        *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    ),
    **_named(
        PreTokenizer((_THREE_DIGITS,), ignore_merges=True, add_bos=True),
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
    ),
    **_named(PreTokenizer((_THREE_DIGITS,)), "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"),
    **_named(
        PreTokenizer((_ONE_DIGIT,)),
        *("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "grok-2"),
    ),
    **_named(PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
    **_named(PreTokenizer((_GPT4O,)), "gpt-4o", "llama4"),
}
