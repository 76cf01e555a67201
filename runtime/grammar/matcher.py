"""Where an answer is in its grammar, and which tokens may come next. Uses llguidance.

The vocabulary that llguidance is given holds the bytes of every token that shows as text, and
nothing for special tokens, end-of-sequence tokens and columns without a token: those are never
allowed, not even where a grammar names them by number. One token is added beyond the vocabulary,
by which it says that the text may end here; what that means for the model's own tokens is the
sampler's matter.

Sizes are bounded by `grammar.MAX_GRAMMAR_BYTES` and by llguidance's limits, which count work and
not time: the same grammar passes or fails on every machine.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.runtime.errors import ConfigError, RequestError
from headrace.runtime.grammar.spec import Grammar

if TYPE_CHECKING:
    import llguidance

CACHED_GRAMMARS = 16
MAX_FORCED_TOKENS = 64  # that are known ahead
# Work for the tables of a grammar (100,000 is 160 ms at most) and for what follows one token
# (50,000 is 150 ms at most, for a long repetition that is forced), and the states that the answers
# to a grammar may come to see together (about 2 kB each).
LIMITS = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}

_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_REASON_CHARACTERS = 300
_TOO_COMPLEX = re.compile(r"\bfuel\b|too big|too many|schema too large", re.IGNORECASE)


class Vocabulary(Protocol):
    """What is needed of `runtime.tokenizer.Tokenizer`."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode_fragment(self, text: str) -> list[int]: ...


class GrammarCompiler:
    """Makes matchers for one model. Thread-safe; the newest grammars are kept.

    Args:
        vocabulary: of the model.
        vocab_size: columns of its logits.
        eos_token_ids: tokens that end a text; they are no text themselves.
    """

    def __init__(
        self, vocabulary: Vocabulary, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._vocabulary, self._vocab_size = vocabulary, vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._lock = threading.Lock()
        self._tokens: _Tokens | None = None  # made when first needed: takes a second
        self._compiled: OrderedDict[Grammar, GrammarMatcher] = OrderedDict()

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the start of a text.

        Raises:
            ConfigError: llguidance is not installed.
            RequestError: the grammar is wrong, uses what is not supported, is too large, or
                allows no text at all.
        """
        with self._lock:
            first = self._compiled.get(grammar)
            if first is not None and not first.family.failed:
                self._compiled.move_to_end(grammar)
                return first.copy()
            if self._tokens is None:
                self._tokens = self._make_tokens()
        first = _compile(grammar, self._tokens)
        with self._lock:
            self._compiled[grammar] = first
            while len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return first.copy()

    def _make_tokens(self) -> _Tokens:
        library = load_llguidance()
        size, known = self._vocab_size, self._vocabulary.token_bytes
        tokens = [b"" if i in self._eos_token_ids else known(i) for i in range(size)]
        source = _TokenSource([*tokens, b"\xff<end>"], self._vocabulary)
        tokenizer = library.LLTokenizer(
            library.TokenizerWrapper(source), n_vocab=size + 1, eos_token=size
        )
        shown = np.packbits([*map(bool, tokens), True], bitorder="little")
        return _Tokens(tokenizer, size, int.from_bytes(shown.tobytes(), "little"))


class _Tokens(NamedTuple):
    """What matchers of one model share.

    Attributes:
        vocab_size: columns of the logits; the number of the token that stands for the end.
        shown: a bit a token: whether it is text, or the end.
    """

    tokenizer: llguidance.LLTokenizer
    vocab_size: int
    shown: int


class _TokenSource:
    """A vocabulary in the form that llguidance wants."""

    def __init__(self, tokens: list[bytes], vocabulary: Vocabulary) -> None:
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1
        self.bos_token_id = None
        self.special_token_ids: tuple[int, ...] = ()
        self._encode = vocabulary.encode_fragment

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


class _Family:
    """Matchers of one compiled grammar share its tables, and what went wrong with them."""

    __slots__ = ("failed",)

    def __init__(self) -> None:
        self.failed = False


class GrammarMatcher:
    """One answer's place in its grammar. Made by `GrammarCompiler`; used by one thread.

    Attributes:
        complete: the text is whole and nothing may follow.
        may_end: the text is whole as it is.
        forced: tokens that must come next, one after the other; none where there is a choice, or
            the text may end.
    """

    __slots__ = ("_allowed", "_matcher", "_tokens", "complete", "family", "forced", "may_end")

    def __init__(self, matcher: llguidance.LLMatcher, tokens: _Tokens, family: _Family) -> None:
        self._matcher, self._tokens, self.family = matcher, tokens, family
        self._allowed = b""  # a bit a token, the least significant first, then one for the end
        self.complete = self.may_end = False
        self.forced: tuple[int, ...] = ()

    def look(self) -> None:
        """Find what may come next.

        Raises:
            RequestError: that took more work than is allowed, or the grammar has a dead end.
        """
        matcher, (_, end, shown) = self._matcher, self._tokens
        bits, stopped = b"", matcher.is_stopped()
        if not stopped:
            bits = matcher.compute_bitmask()
        if matcher.is_error():
            raise self._failed()
        allowed = int.from_bytes(bits, "little") & shown
        if not allowed and not stopped:
            raise _refused("cannot go on")
        self.may_end = stopped or bool(allowed >> end & 1)
        self.complete = stopped or allowed == 1 << end
        if allowed.bit_count() == 1 and not self.may_end:
            self.forced = tuple(matcher.compute_ff_tokens()[:MAX_FORCED_TOKENS])
            if not self.forced or not shown >> self.forced[0] & 1:
                self.forced = (allowed.bit_length() - 1,)
        else:
            self._allowed = allowed.to_bytes(len(bits), "little")

    def accept(self, token_id: int) -> None:
        """Append a token that is allowed.

        Raises:
            RequestError: as `look`.
        """
        assert not self.complete
        if not self._matcher.consume_token(token_id):
            raise self._failed()
        self.forced = self.forced[1:]
        if not self.forced:
            self.look()

    def restrict(self, logits: NDArray[np.float32], end_ids: NDArray[np.int64]) -> None:
        """Set the logits, float32 [vocab], of all tokens that may not come next to minus infinity.

        Args:
            end_ids: tokens that end a text; allowed where it is whole.
        """
        if self.forced:
            value = logits[self.forced[0]]
            logits.fill(-np.inf)
            logits[self.forced[0]] = value
            return
        bits = np.frombuffer(self._allowed, np.uint8)
        allowed = np.unpackbits(bits, count=logits.size, bitorder="little").view(np.bool_)
        if self.may_end:
            allowed[end_ids] = True
        np.copyto(logits, np.float32(-np.inf), where=~allowed)

    def copy(self) -> GrammarMatcher:
        """Another answer at the same place."""
        twin = GrammarMatcher(self._matcher.deep_copy(), self._tokens, self.family)
        twin._allowed, twin.forced = self._allowed, self.forced
        twin.complete, twin.may_end = self.complete, self.may_end
        return twin

    def _failed(self) -> RequestError:
        self.family.failed = True
        return _refused("cannot go on", self._matcher.get_error())


def _compile(grammar: Grammar, tokens: _Tokens) -> GrammarMatcher:
    library = load_llguidance()
    make, what = library.LLMatcher, f"the grammar ({grammar.kind})"
    try:
        if grammar.kind == "json_schema":
            text = make.grammar_from_json_schema(grammar.text, overrides=_JSON_FORM)
        elif grammar.kind == "regex":
            text = make.grammar_from_regex(grammar.text)
        else:
            text = make.grammar_from_lark(grammar.text)
        limits = library.LLParserLimits(**LIMITS)
        made = make(tokens.tokenizer, text, log_level=0, limits=limits)
    except (ValueError, RuntimeError) as error:  # how it tells of JSON that it cannot read
        raise _refused("cannot be used", str(error), what) from None
    if made.is_error():
        raise _refused("cannot be used", made.get_error(), what)
    matcher = GrammarMatcher(made, tokens, _Family())
    matcher.look()
    if matcher.complete:
        raise RequestError(f"{what} allows nothing but the empty text")
    return matcher


def _refused(verdict: str, reason: str = "", what: str = "the grammar") -> RequestError:
    """One line of what llguidance says, whose texts can be long."""
    if "oneOf" in reason:
        reason = "the alternatives of a oneOf may overlap; write anyOf"
    elif _TOO_COMPLEX.search(reason):
        reason = f"it is too complex ({reason}); simplify it"
    elif not reason or reason.startswith("NoExtension"):
        reason = "nothing that it allows can be written with the model's tokens"
    reason = " ".join(reason.replace("<non-verbose/>", "").split())
    if len(reason) > _MAX_REASON_CHARACTERS:
        reason = reason[:_MAX_REASON_CHARACTERS] + "..."
    return RequestError(f"{what} {verdict}: {reason}")


def load_llguidance() -> Any:
    """The module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import llguidance
    except ImportError:
        remedy = 'llguidance to be installed: pip install "headrace[grammar]"'
        raise ConfigError("grammar", "...", remedy) from None
    return llguidance
