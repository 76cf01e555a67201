"""Answers are in their grammar, and a grammar changes nothing else."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="the extra [grammar] is not installed")

from engine_samples import Answers, run_to_end
from grammar_samples import (
    EOS,
    PIECES,
    SPECIAL,
    VOCAB,
    PieceTokenizer,
    allowed_tokens,
    answer,
    compiler,
    conforms,
    full_match,
    is_compact,
    make_grammar_engine,
    regexes,
    schemas,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_samples import AMBIGUOUS, bell, configs

from headrace.backends.fake import hashed_logits
from headrace.runtime.config import GenerationConfig
from headrace.runtime.errors import ConfigError, RequestError
from headrace.runtime.grammar.matcher import GrammarCompiler
from headrace.runtime.grammar.spec import MAX_GRAMMAR_BYTES, Grammar
from headrace.runtime.sampling import reference
from headrace.runtime.sampling.candidates import Scratch
from headrace.runtime.sampling.sampler import Sampler

PERSON = Grammar.json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
temperatures = st.sampled_from([0.0, 0.8, 1.5])


@settings(max_examples=60, deadline=None)
@given(schemas, temperatures, st.integers(0, 2**32))
def test_answers_are_what_the_schema_describes(
    schema: dict[str, Any], temperature: float, seed: int
) -> None:
    config = GenerationConfig(
        grammar=Grammar.json_schema(schema), temperature=temperature, seed=seed, max_new_tokens=500
    )
    prompt = (5, seed % 90 + 2)
    text, finish, _ = answer(config, prompt)
    assert finish == "stop"
    assert conforms(json.loads(text), schema)
    assert is_compact(text)


@settings(max_examples=100, deadline=None)
@given(regexes, temperatures, st.integers(0, 2**32))
def test_answers_are_what_the_expression_matches(
    pattern: str, temperature: float, seed: int
) -> None:
    config = GenerationConfig(
        grammar=Grammar.regex(f"x{pattern}"), temperature=temperature, seed=seed
    )
    text, finish, _ = answer(config, (5, seed % 90 + 2))
    assert finish == "stop"
    assert full_match(f"x{pattern}", text)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text("ab tr\"'{é1", min_size=1, max_size=6), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(0, 2**16), max_size=5),
)
def test_the_mask_is_exact(texts: list[str], choices: list[int]) -> None:
    """Against every token tried on every text. Where only one text is left to spell, its usual
    tokens are the only ones."""
    matcher = compiler().matcher(Grammar.lark("start: " + " | ".join(map(json.dumps, texts))))
    written = b""
    for choice in choices:
        left = [
            text.encode()[len(written) :] for text in texts if text.encode().startswith(written)
        ]
        expected = {i for i, p in enumerate(PIECES) if p and any(t.startswith(p) for t in left)}
        if b"" in left:
            expected.add(EOS)
        allowed = allowed_tokens(matcher)
        assert allowed == expected or (matcher.forced and allowed < expected)
        assert allowed == {matcher.forced[0]} if matcher.forced else len(allowed) > 1
        token = sorted(allowed)[choice % len(allowed)]
        if token == EOS:
            break
        written += PIECES[token]
        matcher.accept(token)
        assert matcher.complete == (
            texts.count(written.decode(errors="ignore"))
            == len([t for t in texts if t.encode().startswith(written)])
        )
        if matcher.complete:
            break


@settings(max_examples=120, deadline=None)
@given(configs(VOCAB), st.integers(0, 2**32), st.lists(st.integers(0, 2**16), max_size=3))
def test_fast_equals_slow_under_a_grammar(
    config: GenerationConfig, seed: int, choices: list[int]
) -> None:
    matcher = compiler().matcher(Grammar.regex("(ab|[a-z0-9]*|true) [0-9]{2}"))
    sampler = Sampler(config, [3], (EOS,), seed, Scratch(VOCAB), matcher)
    written: list[int] = []
    for choice in choices:
        allowed = sorted(allowed_tokens(matcher) - {EOS})
        written.append(allowed[choice % len(allowed)])
        sampler.accept(written[-1])
    assume(not sampler.is_complete)
    logits = bell(VOCAB, 3.0, seed % 1000)
    allowed_now = allowed_tokens(matcher)
    try:
        slow = reference.sample(config, logits, [3], written, (EOS,), seed, 7, allowed_now)
    except RequestError:
        with pytest.raises(RequestError):
            sampler.sample(logits.copy(), 7)
        return
    token = sampler.sample(logits.copy(), 7)[0]
    assert token in allowed_now
    assert token == slow.token_id or slow.margin < AMBIGUOUS


GRAMMARS = [
    PERSON,
    Grammar.regex("(ab|tr|[0-9]{1,3},? ?)+"),
    Grammar.lark('start: item ("," item){0,5}\nitem: "a" | "(" item item ")" | /[0-9]+/'),
    None,
]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.2, "seed": 4, "repetition_penalty": 1.2, "logit_bias": {20: 3.0}, "n": 2},
    {"temperature": 0.0, "stop": "2", "min_new_tokens": 4},
]


def decode(
    arrivals: list[tuple[int, int, int]], scale: float, **options: Any
) -> tuple[list[Any], int, int]:
    """Answers to requests that arrive at given steps, accepted and drafted tokens."""
    logits = hashed_logits(VOCAB, scale)
    engine = make_grammar_engine(lambda prefix: logits(prefix[-1:]), **options)
    answers, requests, pending = Answers(), [], sorted(arrivals)
    for step in range(5000):
        while pending and (pending[0][0] <= step or not engine.has_work):
            at, grammar, sampling = pending.pop(0)
            values = {**SAMPLING[sampling], "max_new_tokens": 70, "grammar": GRAMMARS[grammar]}
            requests.append(engine.prepare([5, at + 2], GenerationConfig(**values)))
            engine.add(requests[-1])
        if not engine.has_work and not pending:
            break
        answers.take(engine.step())
        engine.check_integrity()
    assert not answers.errors
    results = [
        (answers.tokens[r, i], answers.texts[r, i], answers.finish[r, i])
        for r in requests
        for i in range(r.config.n)
    ]
    drafted = sum(record.drafted for record in engine.steps)
    return results, sum(record.accepted for record in engine.steps), drafted


arrivals = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.integers(0, len(GRAMMARS) - 1),
        st.integers(0, len(SAMPLING) - 1),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=15, deadline=None)
@given(arrivals, st.sampled_from([1.0, 4.0]))
def test_drafts_and_company_change_no_answer(
    requests: list[tuple[int, int, int]], scale: float
) -> None:
    plain, accepted, _ = decode(requests, scale, max_draft_tokens=0)
    assert accepted == 0
    assert decode(requests, scale, max_draft_tokens=8)[0] == plain
    alone = [decode([request], scale, max_draft_tokens=0)[0] for request in sorted(requests)]
    assert [result for results in alone for result in results] == plain


def test_what_is_forced_is_drafted_and_accepted() -> None:
    literal = Grammar.lark('start: "x" /[ab]/ "{\\"name of it\\": \\"" /[0-9]{3}/ "\\"}"')
    config = GenerationConfig(grammar=literal)
    engine, answers = make_grammar_engine(), Answers()
    request = engine.prepare([5, 6], config)
    engine.add(request)
    run_to_end(engine, answers)
    assert full_match('x[ab]{"name of it": "[0-9]{3}"}', answers.texts[request, 0])
    drafted = sum(record.drafted for record in engine.steps)
    accepted = sum(record.accepted for record in engine.steps)
    assert drafted == accepted >= 13  # the last ended the answer: none was sampled behind it
    assert len(engine.steps) < len(answers.tokens[request, 0]) - 10


def test_the_token_limit_holds() -> None:
    whole, finish, tokens = answer(GenerationConfig(grammar=PERSON))
    assert finish == "stop" and EOS not in tokens  # nothing could follow the brace
    for limit in range(1, len(tokens) + 1):
        text, finish, cut = answer(GenerationConfig(grammar=PERSON, max_new_tokens=limit))
        assert whole.startswith(text) and cut == tokens[:limit]
        assert finish == ("stop" if limit == len(tokens) else "length")


def test_stop_strings_hold() -> None:
    text, finish, _ = answer(GenerationConfig(grammar=PERSON, stop='", "age'))
    assert finish == "stop" and text.startswith('{"name": "') and "age" not in text


def test_the_end_of_the_grammar_goes_before_min_new_tokens() -> None:
    config = GenerationConfig(grammar=Grammar.regex("ab|tr"), min_new_tokens=30)
    assert answer(config)[0] in ("ab", "tr")
    config = GenerationConfig(grammar=Grammar.regex("[ab]{1,9}"), min_new_tokens=4, temperature=2)
    assert len(answer(config)[2]) >= 4


def test_the_model_ends_where_the_text_is_whole() -> None:
    def eager(prefix: Any) -> np.ndarray[Any, Any]:
        row = np.zeros(VOCAB, np.float32)
        row[EOS] = 9.0
        return row

    config = GenerationConfig(grammar=Grammar.regex("[0-9]{2,}"))
    text, finish, tokens = answer(config, logits=eager)
    assert full_match("[0-9]{2,}", text) and finish == "stop" and tokens[-1] == EOS


def test_ignore_eos_is_refused() -> None:
    with pytest.raises(ConfigError, match="ignore_eos"):
        GenerationConfig(grammar=PERSON, ignore_eos=True)


def test_a_ban_of_everything_ends_that_request_alone() -> None:
    engine, answers = make_grammar_engine(), Answers()
    bias = {PIECES.index(b"a"): float("-inf"), PIECES.index(b"ab"): float("-inf")}
    config = GenerationConfig(grammar=Grammar.regex("[ab]b"), logit_bias=bias)
    banned = GenerationConfig(
        grammar=Grammar.regex("a."), logit_bias={**bias, PIECES.index(b"abc"): float("-inf")}
    )
    good, bad = engine.prepare([5], config), engine.prepare([5], banned)
    engine.add(good)
    engine.add(bad)
    run_to_end(engine, answers)
    assert answers.texts[good, 0] == "bb"
    assert "grammar, logit_bias" in str(answers.errors[bad])


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex(r"(.|\n)+"),
        Grammar.lark("start: <[*]>+"),
        Grammar.lark("start: <[^3]> /.*/"),
        Grammar.json_schema({"type": "string"}),
    ],
    ids=str,
)
def test_only_tokens_that_show_are_allowed(grammar: Grammar) -> None:
    matcher = compiler().matcher(grammar)
    for _ in range(8):
        allowed = allowed_tokens(matcher) - {EOS}
        assert SPECIAL not in allowed and max(allowed) < len(PIECES)
        matcher.accept(PIECES.index(b'"') if PIECES.index(b'"') in allowed else min(allowed))
        if matcher.complete:
            break


BAD: list[tuple[Grammar, str]] = [
    (Grammar.json_schema({"type": "objct"}), "objct"),
    (Grammar.json_schema({"type": "object", "not": {}}), "not"),
    (Grammar.json_schema({"$ref": "https://example.com/schema.json"}), "example.com"),
    (Grammar.json_schema({"type": "string", "minLength": 5, "maxLength": 2}), "minLength"),
    (Grammar.json_schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
    (Grammar.json_schema('{"a": NaN}'), "cannot be used"),
    (Grammar.json_schema('{"items":' * 200 + "{}" + "}" * 200), "recursion"),
    (Grammar.json_schema({"oneOf": [{"type": "integer"}, {"minimum": 3}]}), "anyOf"),
    (Grammar.regex("(a"), "unclosed group"),
    (Grammar.regex(r"(a)\1"), "backreferences"),
    (Grammar.regex(r"[^\s\S]"), "nothing"),
    (Grammar.json_schema({"type": "integer", "multipleOf": 10**9 + 7}), "too complex"),
    (Grammar.regex("(" * 3000 + "a" + ")" * 3000), "cannot be used"),
    (Grammar.lark("start: ("), "Expected"),
    (Grammar.lark('begin: "a"'), "start"),
    (Grammar.lark("start: <|im_end|>"), "special token"),
    (Grammar.lark(f"start: <[{SPECIAL}]>"), "nothing"),
    (Grammar.lark('start: ""'), "empty text"),
]


@pytest.mark.parametrize(("grammar", "reason"), BAD, ids=[f"{g.kind}-{r}" for g, r in BAD])
def test_a_grammar_that_cannot_be_used_is_refused(grammar: Grammar, reason: str) -> None:
    engine = make_grammar_engine()
    with pytest.raises(RequestError, match=reason) as caught:
        engine.prepare([5], GenerationConfig(grammar=grammar))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    assert not engine.has_work


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Grammar.json_schema("{"), "JSON"),
        (lambda: Grammar.json_schema([1]), "object"),
        (lambda: Grammar.json_schema({"a": object()}), "JSON"),
        (lambda: Grammar.regex("a" * (MAX_GRAMMAR_BYTES + 1)), "at most"),
        (lambda: Grammar.json_schema({"enum": ["x" * MAX_GRAMMAR_BYTES]}), "at most"),
        (lambda: Grammar.regex(""), "not empty"),
        (lambda: Grammar.regex(3), "not empty"),
        (lambda: Grammar.lark("\ud800"), "surrogates"),
        (lambda: Grammar("gbnf", "root ::= x"), "one of"),
    ],
)
def test_data_that_is_no_grammar_is_refused(make: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        make()
    assert len(str(caught.value)) < 400


def test_work_that_explodes_later_ends_that_request_alone() -> None:
    engine, answers = make_grammar_engine(), Answers()
    bomb = GenerationConfig(grammar=Grammar.regex("[ab](c{1000}){1000}"))
    bad, good = engine.prepare([5], bomb), engine.prepare([5], GenerationConfig(grammar=PERSON))
    engine.add(bad)
    engine.add(good)
    run_to_end(engine, answers)
    assert "too complex" in str(answers.errors[bad])
    assert json.loads(answers.texts[good, 0])


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"headrace\[grammar\]"):
        GrammarCompiler(PieceTokenizer(), VOCAB, (EOS,)).matcher(PERSON)


def test_a_grammar_is_compiled_once_and_again_after_a_failure() -> None:
    made = GrammarCompiler(PieceTokenizer(), VOCAB, (EOS,))
    first, second = made.matcher(PERSON), made.matcher(PERSON)
    assert first is not second and first.family is second.family
    first.family.failed = True
    assert made.matcher(PERSON).family is not second.family
    for i in range(20):
        made.matcher(Grammar.regex(f"a{i}"))
    assert made.matcher(PERSON).family is not second.family
