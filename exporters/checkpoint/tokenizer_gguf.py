"""A tokenizer.json rebuilt from GGUF metadata (`tokenizer.ggml.*`).

Two kinds are known: "gpt2" (byte-level BPE with merges and a named pre-tokenizer) and "llama"
(SentencePiece BPE: merges follow from the scores, unknown characters become bytes).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from headrace.exporters.checkpoint.gguf_config import GgufMetadata
from headrace.exporters.checkpoint.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from headrace.exporters.checkpoint.spm_merges import merges_from_scores
from headrace.exporters.checkpoint.tokenizers_errors import map_tokenizers_errors
from headrace.exporters.checkpoint.values import MissingEntryError, TokenizerSource
from headrace.runtime.errors import CheckpointError

_LOG = logging.getLogger(__name__)

_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
_SPACE = "\u2581"  # SentencePiece writes a space as this

# Tokens that end an answer wherever a vocabulary has them. Files seldom name more than one of
# theirs, and some mark them as ordinary tokens.
_END_TOKENS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
    }
)
_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


class _Type(IntEnum):
    """`tokenizer.ggml.token_type`; other values are pieces like any other."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens by id, with the type of each."""

    tokens: list[str]
    types: list[int]

    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}


def tokenizer_from_metadata(metadata: GgufMetadata) -> TokenizerSource:
    """Build the tokenizer and say how to use it.

    Raises:
        CheckpointError: there is none, it is damaged, or of a kind that is not known here.
    """
    if "tokenizer.ggml.model" not in metadata:
        raise MissingEntryError(
            f"{metadata.path} has no tokenizer (metadata key 'tokenizer.ggml.model'); "
            "convert the checkpoint again with its tokenizer files beside it"
        )
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in (_BYTE_LEVEL, _SENTENCEPIECE):
        raise CheckpointError(
            f"{metadata.path} has a tokenizer of kind {kind!r}; known kinds: "
            f"{_BYTE_LEVEL}, {_SENTENCEPIECE}"
        )
    vocabulary = _vocabulary(metadata)
    if kind == _BYTE_LEVEL:
        rule = _pre_tokenizer(metadata)
        tokenizer = _byte_level(metadata, vocabulary, rule)
        add_bos, default_bos, default_eos = rule.add_bos, None, None
    else:
        tokenizer = _sentencepiece(metadata, vocabulary)
        add_bos, default_bos, default_eos = True, 1, 2
    _add_tokens(tokenizer, vocabulary)
    bos = _token_id(metadata, "bos", vocabulary, default_bos)
    if (said := metadata.maybe_flag("tokenizer.ggml.add_bos_token")) is not None:
        add_bos = said
    if add_bos and bos is None:
        raise MissingEntryError(
            f"{metadata.path} starts texts with a BOS token, but has no metadata key "
            "'tokenizer.ggml.bos_token_id'"
        )
    if metadata.maybe_flag("tokenizer.ggml.add_eos_token"):
        raise CheckpointError(
            f"{metadata.path} ends every text with an EOS token, which is not how a text "
            "generator is prompted; it is not supported"
        )
    eos = _end_ids(metadata, vocabulary, default_eos)
    return TokenizerSource(
        tokenizer_json=tokenizer.to_str(),
        bos_token_id=bos,
        eos_token_ids=eos,
        add_bos=add_bos,
        chat_template=metadata.maybe_text("tokenizer.chat_template"),
        generation_config=_generation_config(metadata, bos, eos),
    )


def _vocabulary(metadata: GgufMetadata) -> _Vocabulary:
    tokens = [
        token or f"[EMPTY_{i}]" for i, token in enumerate(metadata.texts("tokenizer.ggml.tokens"))
    ]
    if not tokens:
        raise CheckpointError(f"{metadata.path} has an empty vocabulary; convert it again")
    if len(set(tokens)) != len(tokens):
        twice = next(token for token, count in Counter(tokens).items() if count > 1)
        raise CheckpointError(f"{metadata.path} has token {twice!r} twice in its vocabulary")
    numbers = metadata.maybe_numbers("tokenizer.ggml.token_type", "iu")
    types = [_Type.NORMAL.value] * len(tokens) if numbers is None else [int(n) for n in numbers]
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{metadata.path} has {len(tokens)} tokens, but {len(types)} token types"
        )
    for i, token in enumerate(tokens):
        if token in _END_TOKENS:
            types[i] = _Type.CONTROL
    return _Vocabulary(tokens, types)


def _pre_tokenizer(metadata: GgufMetadata) -> PreTokenizer:
    name = metadata.maybe_text("tokenizer.ggml.pre")
    if name is None:
        _LOG.warning(
            "%s does not name its pre-tokenizer; the default one may cut texts in other places "
            "than the model learned",
            metadata.path,
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{metadata.path} names pre-tokenizer {name!r}, which is not known here; known ones: "
            f"{', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]


def _byte_level(metadata: GgufMetadata, vocabulary: _Vocabulary, rule: PreTokenizer) -> Tokenizer:
    # The separator is the first space that is not the first character.
    merges = [
        (merge[: (cut := merge.find(" ", 1))], merge[cut + 1 :])
        for merge in metadata.texts("tokenizer.ggml.merges")
    ]
    tokenizer = _bpe(metadata, vocabulary, merges, ignore_merges=rule.ignore_merges)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(e), behavior="isolated") for e in rule.expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: GgufMetadata, vocabulary: _Vocabulary) -> Tokenizer:
    scores = metadata.maybe_numbers("tokenizer.ggml.scores", "f")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"{metadata.path} needs one of 'tokenizer.ggml.scores' for each of its "
            f"{len(vocabulary.tokens)} tokens; convert it again"
        )
    prefix = metadata.maybe_flag("tokenizer.ggml.add_space_prefix") is not False
    unknown = _token_id(metadata, "unknown", vocabulary, 0)
    assert unknown is not None
    tokenizer = _bpe(
        metadata,
        vocabulary,
        merges_from_scores(vocabulary.tokens, scores),
        unk_token=vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _bpe(
    metadata: GgufMetadata,
    vocabulary: _Vocabulary,
    merges: list[tuple[str, str]],
    **options: object,
) -> Tokenizer:
    with map_tokenizers_errors(f"{metadata.path}: vocabulary and merges do not fit together"):
        return Tokenizer(BPE(vocab=vocabulary.ids(), merges=merges, **options))


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Tokens that are found in a text before anything else, in the order of their ids.

    Control tokens are special: decoding can leave them out, encoding can be told not to see them.
    """
    special = (_Type.CONTROL, _Type.UNKNOWN)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind in special, normalized=False)
            for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if kind in special or kind == _Type.USER_DEFINED
        ]
    )


def _token_id(
    metadata: GgufMetadata, role: str, vocabulary: _Vocabulary, default: int | None
) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    value = metadata.maybe_integer(key)
    value = default if value is None else value
    if value is not None and not 0 <= value < len(vocabulary.tokens):
        raise CheckpointError(
            f"{metadata.path}: {key} is {value}, but there are {len(vocabulary.tokens)} tokens"
        )
    return value


def _end_ids(
    metadata: GgufMetadata, vocabulary: _Vocabulary, default_eos: int | None
) -> tuple[int, ...]:
    named = [
        _token_id(metadata, "eos", vocabulary, default_eos),
        _token_id(metadata, "eot", vocabulary, None),
        _token_id(metadata, "eom", vocabulary, None),
    ]
    spelled = [i for i, token in enumerate(vocabulary.tokens) if token in _END_TOKENS]
    return tuple(dict.fromkeys([*(i for i in named if i is not None), *spelled]))


def _generation_config(
    metadata: GgufMetadata, bos: int | None, eos: Sequence[int]
) -> dict[str, object]:
    config: dict[str, object] = {"bos_token_id": bos, "eos_token_id": list(eos)}
    for key, name in _SAMPLING_KEYS.items():
        if (value := metadata.maybe_number(key)) is not None:
            config[name] = int(value) if name == "top_k" else value
    return config
