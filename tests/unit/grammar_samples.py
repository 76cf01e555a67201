"""A small vocabulary that can write JSON, engines that use it, and slow twins of its grammars."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from engine_samples import Answers, run_to_end
from hypothesis import strategies as st

from headrace.backends.fake import FakeBackend, LogitsFn, hashed_logits
from headrace.runtime.config import EngineConfig, GenerationConfig
from headrace.runtime.engine import Engine
from headrace.runtime.grammar.matcher import GrammarCompiler, GrammarMatcher
from headrace.runtime.text import TextStream

EOS, SPECIAL = 0, 1
VISIBLE = [
    *(chr(code) for code in range(32, 127)),
    *("\n", "\t", "é", '{"', '": ', '", "', '"}', "tr", "true", "null", "ab", "abc", "12", "  "),
    *('"a', "a", "<eos>", "<tool>"),
]
PIECES = [b"", b"", *(piece.encode() for piece in dict.fromkeys(VISIBLE))]
VOCAB = len(PIECES) + 5  # some columns have no token


class PieceTokenizer:
    """Token 0 ends a text and token 1 is special: neither shows. Texts become longest pieces."""

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id] if token_id < len(PIECES) else b""

    def special_marks(self, texts: Iterable[str]) -> dict[int, bytes]:
        return {}

    def encode_fragment(self, text: str) -> list[int]:
        data, start, ids = text.encode(), 0, []
        while start < len(data):
            best = max((p for p in PIECES[2:] if data.startswith(p, start)), key=len)
            ids.append(PIECES.index(best))
            start += len(best)
        return ids


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(PieceTokenizer(), VOCAB, (EOS,))


def make_grammar_engine(logits: LogitsFn | None = None, **options: Any) -> Engine:
    backend = FakeBackend(
        vocab_size=VOCAB, max_slots=8, context_tokens=1500, logits=logits or hashed_logits(VOCAB)
    )
    tokenizer: Any = PieceTokenizer()
    return Engine(
        backend,
        lambda config: TextStream(tokenizer, config.stop, config.include_stop_str_in_output),
        [EOS],
        EngineConfig.from_dict(options),
        grammars=compiler(),
    )


def answer(
    config: GenerationConfig, prompt: tuple[int, ...] = (5, 6), **options: Any
) -> tuple[str, str, list[int]]:
    """Text, finish reason and tokens of a request that runs alone."""
    engine, answers = make_grammar_engine(**options), Answers()
    request = engine.prepare(prompt, config)
    engine.add(request)
    run_to_end(engine, answers)
    if request in answers.errors:
        raise answers.errors[request]
    return (
        answers.texts[request, 0],
        answers.finish[request, 0].value,
        answers.tokens[request, 0],
    )


def allowed_tokens(matcher: GrammarMatcher) -> set[int]:
    """Tokens that may come next, the end among them where the text may end."""
    logits = np.zeros(VOCAB, np.float32)
    matcher.restrict(logits, np.array([EOS]))
    return {int(i) for i in np.flatnonzero(logits == 0)}


def conforms(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value is what a schema of `schemas` describes."""
    if "enum" in schema:
        return any(value == item and type(value) is type(item) for item in schema["enum"])
    if "anyOf" in schema:
        return any(conforms(value, option) for option in schema["anyOf"])
    kind = schema["type"]
    if kind == "null":
        return value is None
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "integer":
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "array":
        fits = isinstance(value, list) and len(value) <= schema["maxItems"]
        return fits and all(conforms(item, schema["items"]) for item in value)
    known = schema["properties"]
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= value.keys() <= known.keys()
        and all(conforms(value[key], known[key]) for key in value)
    )


_LEAVES = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-50, 50),
        st.integers(0, 300),
    ),
    st.builds(
        lambda items: {"enum": items},
        st.lists(st.sampled_from(["a", "abc", "", 7, True, None]), min_size=1, max_size=3),
    ),
)


@st.composite
def _objects(draw: st.DrawFn, parts: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(["a", "b", "tr", "a b", "é", '"']), unique=True))
    return {
        "type": "object",
        "properties": {name: draw(parts) for name in names},
        "required": [name for name in names if draw(st.booleans())],
        "additionalProperties": False,
    }


# Schemas whose answers are short whatever the model says.
schemas = st.recursive(
    _LEAVES,
    lambda parts: st.one_of(
        _objects(parts),
        st.builds(
            lambda items, n: {"type": "array", "items": items, "maxItems": n},
            parts,
            st.integers(0, 3),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(parts, min_size=1, max_size=2)),
    ),
    max_leaves=5,
)

# Expressions that Python and Rust read alike, in which nothing goes on for ever.
regexes = st.recursive(
    st.sampled_from(["a", "b", "ab", "[0-9]", "[^a]", r"\.", "é", " ", "true"]),
    lambda parts: st.one_of(
        st.builds("{}{}".format, parts, parts),
        st.builds("(?:{}|{})".format, parts, parts),
        st.builds("(?:{}){{{},3}}".format, parts, st.integers(0, 3)),
        st.builds("(?:{})?".format, parts),
    ),
    max_leaves=6,
)


def full_match(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text, re.DOTALL) is not None


def is_compact(text: str) -> bool:
    """Whether JSON has the white space that answers have."""
    return (
        text == json.dumps(json.loads(text), ensure_ascii=False) or "\\u" in text or "\\/" in text
    )
