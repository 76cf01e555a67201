"""A backend without a model, for tests of whatever sits above one.

Its logits are a pure function of the tokens that a slot holds, and slots hold exactly what plans
put there: a wrong `past_len`, a missing copy or a row in the wrong slot changes what comes out, or
is refused where a real device would read garbage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Capabilities, StepOutput
from headrace.backends.kv_ops import apply_kv_ops
from headrace.runtime.core import Row, StepPlan
from headrace.runtime.errors import BackendError, EngineProcessError

LogitsFn = Callable[[Sequence[int]], NDArray[np.float32]]

_MASK = (1 << 64) - 1


def hashed_logits(vocab_size: int, scale: float = 2.0) -> LogitsFn:
    """Logits drawn from a normal distribution, keyed by every token of the prefix."""

    def logits(prefix: Sequence[int]) -> NDArray[np.float32]:
        key = len(prefix)
        for token in prefix:
            key = ((key ^ token) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK
            key ^= key >> 29
        generator = np.random.Generator(np.random.Philox(key=key))
        return generator.standard_normal(vocab_size, np.float32) * np.float32(scale)

    return logits


def scripted_logits(vocab_size: int, script: Callable[[Sequence[int]], int]) -> LogitsFn:
    """Logits that leave no doubt about the next token: the one that `script` names."""

    def logits(prefix: Sequence[int]) -> NDArray[np.float32]:
        row = np.zeros(vocab_size, np.float32)
        row[script(prefix)] = 30.0
        return row

    return logits


class _Slots:
    """The tokens that slots hold; 4 bytes each where they are read."""

    def __init__(self, num_slots: int) -> None:
        self.held: list[list[int]] = [[] for _ in range(num_slots)]

    def release(self, slot: int) -> None:
        self.held[slot] = []

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        self.held[target] = self._first(source, num_tokens)

    def read(self, slot: int, num_tokens: int) -> bytes:
        return np.array(self._first(slot, num_tokens), "<i4").tobytes()

    def write(self, slot: int, num_tokens: int, data: bytes) -> None:
        self.held[slot] = np.frombuffer(data, "<i4").tolist()
        _require(len(self.held[slot]) == num_tokens, "a write has another length")

    def _first(self, slot: int, num_tokens: int) -> list[int]:
        held = self.held[slot]
        _require(num_tokens <= len(held), f"{num_tokens} tokens are more than the slot holds")
        return held[:num_tokens]


class FakeBackend:
    """See `backends.base.Backend` for the contract of the four methods.

    Args:
        vocab_size: columns of the logits.
        context_tokens, max_slots, max_row_tokens, kv_budget_tokens: as in `Capabilities`; the
            budget defaults to full slots.
        logits: float32 [vocab] of a token prefix; `hashed_logits` unless given.
        fail_at: numbers of the steps, counted from 0, that raise a `BackendError`.
        die_at: numbers of steps at which everything in the slots is lost (EngineProcessError).
        delay_ms: time that a step takes, spent asleep as if inside native code.
        gives_hidden: hidden states, too: the prefix itself, float32 [context_tokens], -1 behind it.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        context_tokens: int = 256,
        max_slots: int = 4,
        max_row_tokens: int = 64,
        kv_budget_tokens: int | None = None,
        logits: LogitsFn | None = None,
        fail_at: Collection[int] = (),
        die_at: Collection[int] = (),
        delay_ms: float = 0.0,
        gives_hidden: bool = False,
    ) -> None:
        self.capabilities = Capabilities(
            name="fake",
            vocab_size=vocab_size,
            context_tokens=context_tokens,
            max_slots=max_slots,
            max_row_tokens=max_row_tokens,
            kv_bytes_per_token=4,
            kv_budget_tokens=(
                context_tokens * max_slots if kv_budget_tokens is None else kv_budget_tokens
            ),
            exact_rows=True,
            kv_identity="fake",
            hidden_size=context_tokens if gives_hidden else 0,
        )
        self.closed = False
        self._logits = logits or hashed_logits(vocab_size)
        self._fail_at, self._die_at, self._delay_ms = fail_at, die_at, delay_ms
        self._kv = _Slots(max_slots)
        self.num_steps = self.num_rests = 0
        self._output: tuple[int, StepOutput] | None = None

    @property
    def held_tokens(self) -> int:
        """Tokens of KV in all slots."""
        return sum(map(len, self._kv.held))

    def load(self) -> Capabilities:
        return self.capabilities

    def submit(self, plan: StepPlan) -> int:
        _require(not self.closed, "the backend is closed")
        _require(self._output is None, "a step is in flight")
        step = self.num_steps
        if plan.is_rest:
            self.num_rests += 1
            self._output = step, self._nothing()
            return step
        self.num_steps += 1
        start = time.perf_counter()
        if self._delay_ms:
            time.sleep(self._delay_ms / 1e3)
        if step in self._fail_at:
            raise BackendError(f"injected failure of step {step}")
        if step in self._die_at:
            self._kv = _Slots(len(self._kv.held))
            raise EngineProcessError(f"injected end at step {step}")
        reads = apply_kv_ops(self._kv, plan.kv_ops)
        slots = [row.slot for row in plan.rows]
        _require(slots == sorted(set(slots)), f"slots {slots} are not ascending")
        prefixes = [prefix for row in plan.rows for prefix in self._append(row)]
        logits = [self._logits(prefix) for prefix in prefixes]
        _require(
            self.held_tokens <= self.capabilities.kv_budget_tokens,
            f"{self.held_tokens} tokens exceed the KV budget",
        )
        stacked = np.array(logits, np.float32).reshape(-1, self.capabilities.vocab_size)
        model_ms = (time.perf_counter() - start) * 1e3
        hidden = self._hidden(prefixes) if self.capabilities.hidden_size else None
        entropies = entropy_nats(stacked)
        self._output = step, StepOutput(stacked, entropies, model_ms, None, reads, hidden)
        return step

    def collect(self, ticket: int) -> StepOutput:
        _require(self._output is not None, "no step is in flight")
        assert self._output is not None
        step, output = self._output
        _require(step == ticket, f"step {ticket} is not in flight")
        self._output = None
        return output

    def close(self) -> None:
        self.closed = True
        self._kv = _Slots(len(self._kv.held))

    def _nothing(self) -> StepOutput:
        """Of no rows."""
        logits = np.empty((0, self.capabilities.vocab_size), np.float32)
        return StepOutput(logits, np.empty(0, np.float32), 0.0)

    def _hidden(self, prefixes: list[list[int]]) -> NDArray[np.float32]:
        states = np.full((len(prefixes), self.capabilities.hidden_size), -1, np.float32)
        for state, prefix in zip(states, prefixes, strict=True):
            state[: len(prefix)] = prefix
        return states

    def _append(self, row: Row) -> list[list[int]]:
        """Write a row to its slot; the prefixes that its `num_logits` logits are of."""
        caps, held = self.capabilities, self._kv.held[row.slot]
        _require(0 < len(row.tokens) <= caps.max_row_tokens, f"{row} has too many or no tokens")
        _require(row.past_len <= len(held), f"{row} says more is cached than {len(held)} tokens")
        _require(row.past_len + len(row.tokens) <= caps.context_tokens, f"{row} leaves the context")
        _require(all(0 <= t < caps.vocab_size for t in row.tokens), f"{row} leaves the vocabulary")
        del held[row.past_len :]
        held += row.tokens
        ends = range(len(held) - row.num_logits + 1, len(held) + 1)
        return [held[:end] for end in ends]


def entropy_nats(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Entropy of softmax(logits), nats: float32 [R, vocab] -> float32 [R]."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True, initial=-np.inf)
    weights = np.exp(shifted)
    total = weights.sum(axis=1)
    expected = np.where(weights > 0, weights * shifted, 0.0).sum(axis=1) / total
    return np.asarray(np.log(total) - expected, np.float32)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BackendError(f"fake backend: {message}")
