"""From a row of logits to a token.

The definition, of which `sampling.reference` is the slow twin:

1. *Adjust.* Repetition penalty over prompt and answer (transformers: divide a positive logit,
   multiply a negative one), then presence and frequency penalty over the answer (OpenAI, vLLM:
   `logit - presence - frequency * count`), then `logit_bias`, then, before `min_new_tokens`, the
   ban of stop tokens, then the ban of whatever the grammar does not allow here. Computed in
   float64, rounded to float32 after the penalties and after the bias.
2. *Greedy* at a temperature below 1e-5: the largest logit, ties to the smallest id.
3. *Truncate*, on softmax(logits / temperature), in transformers' order: top_k, then top_p over
   what is left, then min_p. (vLLM applies min_p before them, llama.cpp the temperature after them.)
4. *Draw* by inverse CDF with one uniform number keyed by (seed, position). What is kept stands in
   order of descending logit, ties by ascending id; with no truncation at all, in order of id.

So a sequence's text depends on its own logits and seed only, never on its company, and drafts can
be verified by drawing what would have been drawn without them. `typical_acceptance` gives that up:
before 3, a draft that is likely enough is taken (`typical`).

Speed comes from not sorting a vocabulary (`candidates`), nor reading one where the graph gives
probabilities with the largest of each block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from headrace.backends.base import Probabilities
from headrace.runtime.config import GenerationConfig
from headrace.runtime.core import TokenAlternative
from headrace.runtime.errors import BackendError, RequestError
from headrace.runtime.grammar.matcher import GrammarMatcher
from headrace.runtime.sampling.candidates import (
    Ids,
    Logits,
    Scratch,
    alternatives,
    at_least,
    at_least_in_blocks,
    descending,
    draw_by_id,
    draw_candidate,
    largest,
    log_normalizer,
    nucleus_candidates,
    sole_candidate,
    weigh,
)
from headrace.runtime.sampling.penalties import Penalties, has_penalty
from headrace.runtime.sampling.typical import is_typical

GREEDY_BELOW = 1e-5  # temperatures under this are greedy (as in vLLM)

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SAFE_SUMS = (1e-15, 1e25)  # between these, float32 holds a block's weights with room to spare


def _mix(state: int) -> int:
    """The finalizer of splitmix64: a bijection of 64 bits that avalanches (Steele et al., 2014)."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a function of its arguments alone."""
    return (_mix((_mix(seed & _MASK) + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def sample_seed(seed: int, index: int) -> int:
    """Seed of answer `index` of `n` to one prompt; the first answer has the request's own."""
    return seed if index == 0 else _mix((_mix(seed ^ _GOLDEN) + index * _GOLDEN) & _MASK)


class Sampler:
    """Draws the tokens of one sequence.

    `sample` changes nothing but the row it is given; `accept` records a token of the answer. To
    verify drafts, sample a row, accept what was drawn, and go on while it equals the draft.

    Attributes:
        inverse_temperature: of the probabilities that `sample` would like to be given; 0 where it
            needs none.
        draws_likely: whether `likely.draw_likely` may draw for it.

    Args:
        config: of the request.
        prompt: token ids; counted by the repetition penalty only.
        eos_token_ids: the model's.
        seed: of this sequence (`sample_seed`).
        scratch: of the thread that will call `sample`.
        matcher: where this sequence is in its grammar; `accept` moves it on.

    Raises:
        RequestError: `logit_bias` or `stop_token_ids` names a token beyond the vocabulary.
    """

    def __init__(
        self,
        config: GenerationConfig,
        prompt: Sequence[int],
        eos_token_ids: Iterable[int],
        seed: int,
        scratch: Scratch,
        matcher: GrammarMatcher | None = None,
    ) -> None:
        self.config, self.seed = config, seed
        self._scratch, self._matcher = scratch, matcher
        self._generated_len = 0
        for name, ids in (
            ("logit_bias", config.logit_bias.keys()),
            ("stop_token_ids", config.stop_token_ids),
        ):
            if beyond := [i for i in ids if i >= scratch.vocab_size]:
                raise RequestError(
                    f"{name} names token {beyond[0]}, but the vocabulary has "
                    f"{scratch.vocab_size} tokens"
                )
        eos = self._eos = frozenset(i for i in eos_token_ids if i < scratch.vocab_size)
        stops = frozenset(config.stop_token_ids)
        self._stop_ids = stops if config.ignore_eos else stops | eos
        self._late_ids = np.array(sorted(stops | eos), np.int64)
        self._eos_ids = np.array(sorted(eos), np.int64)
        self._bias_ids = np.array(list(config.logit_bias.keys()), np.int64)
        self._bias = np.array(list(config.logit_bias.values()), np.float64)
        self._penalties = Penalties(config, prompt) if has_penalty(config) else None
        self._inv_temperature = (
            1.0 / config.temperature if config.temperature >= GREEDY_BELOW else None
        )
        self._top_k = config.top_k if config.top_k < scratch.vocab_size else 0
        self._weighs_all = self._top_k == 0 and (config.top_p < 1.0 or config.min_p == 0.0)
        adjusts = self._penalties is not None or self._bias_ids.size or config.min_new_tokens
        plain = not adjusts and matcher is None
        self._takes_best = plain and self._inv_temperature is None and config.logprobs is None
        wanted = self._weighs_all and plain
        inverse = self._inv_temperature or 0.0
        # A graph takes it in float32, and computes nothing for what is 0 there.
        usable = wanted and inverse >= np.finfo(np.float32).tiny
        self.inverse_temperature = inverse if usable else 0.0
        needs_more = config.min_p or config.typical_acceptance or config.logprobs is not None
        self.draws_likely = usable and config.top_p < 1.0 and not needs_more

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows nothing more."""
        return self._matcher is not None and self._matcher.complete

    @property
    def forced(self) -> tuple[int, ...]:
        """Tokens that the grammar forces to come next; none without one."""
        return () if self._matcher is None else self._matcher.forced

    def accept(self, token_id: int) -> None:
        """Append a token to the answer.

        Raises:
            RequestError: the grammar asks for more work than it may.
        """
        self._generated_len += 1
        if self._penalties is not None:
            self._penalties.add(token_id)
        if self._matcher is not None and token_id not in self._eos:
            self._matcher.accept(token_id)

    def is_stop_token(self, token_id: int, generated_len: int) -> bool:
        """Whether this token ends the answer, of which it is number `generated_len` (from 1).

        Before `min_new_tokens` none does; `sample` does not draw one there either.
        """
        return token_id in self._stop_ids and generated_len >= self.config.min_new_tokens

    def sample(
        self,
        logits: Logits,
        position: int,
        probabilities: Probabilities | None = None,
        draft: int | None = None,
    ) -> tuple[int, float | None, tuple[TokenAlternative, ...]]:
        """Draw the token at `position` (in the whole sequence, from 0).

        Args:
            logits: float32 [vocab], contiguous; it is written to.
            probabilities: of this row, softmax(logits * inverse_temperature), or None. They save
                reading a whole vocabulary.
            draft: what was guessed; matters with `typical_acceptance` only.

        Returns:
            Token id; its log probability in nats under softmax of the logits as they came, or
            None where not asked for; the most probable tokens of the same distribution.

        Raises:
            RequestError: the request bans every token.
            BackendError: the logits hold NaN or plus infinity, or are all minus infinity.
        """
        assert logits.shape == (self._scratch.vocab_size,)
        if self._takes_best:  # most requests; what follows comes to the same
            return self._best(logits), None, ()
        with np.errstate(over="ignore", invalid="ignore"):
            if self.config.logprobs is None:
                return self._draw(logits, position, probabilities, draft), None, ()
            nats = log_normalizer(logits, self._scratch)
            top = alternatives(logits, nats, self.config.logprobs)
            raw = logits.copy()
            token = self._draw(logits, position, probabilities, draft)
            return token, float(raw[token]) - nats, top

    def guess(
        self, logits: Logits, position: int, probabilities: Probabilities | None = None
    ) -> int:
        """What would be drawn at `position` if these logits of another model were this one's.

        With the uniform number that `sample` will use there: models that agree draw the same, so
        that as a draft this is likelier to be right than the most probable token.

        Args: as of `sample`.
        """
        if self._matcher is None:  # which may be behind this position
            try:
                with np.errstate(over="ignore", invalid="ignore"):
                    return self._draw(logits, position, probabilities, None)
            except (BackendError, RequestError):
                pass  # `sample` will say what is wrong, if it is
        return int(logits.argmax())

    def _draw(
        self,
        logits: Logits,
        position: int,
        probabilities: Probabilities | None,
        draft: int | None,
    ) -> int:
        self._adjust(logits)
        is_forced = self._matcher is not None and bool(self._matcher.forced)
        if self._inv_temperature is None or is_forced:
            return self._best(logits)
        epsilon = self.config.typical_acceptance
        if epsilon and draft is not None and self._is_typical(logits, draft, epsilon):
            return draft
        u = uniform(self.seed, position)
        if self._weighs_all:
            if probabilities is not None and self.inverse_temperature:
                return self._draw_from(probabilities, logits, self._inv_temperature, u)
            return self._draw_weighing_all(logits, self._inv_temperature, u)
        config, peak = self.config, float(logits[self._best(logits)])
        if self._top_k:
            ids = descending(logits, largest(logits, self._top_k))[: self._top_k]
        else:
            bound = peak + math.log(config.min_p) / self._inv_temperature
            margin = 1e-6 * (abs(peak) + abs(bound))  # the exact test follows, in float64
            ids = descending(logits, at_least(logits, bound - margin, self._scratch))
        return draw_candidate(logits, ids, 0.0, self._inv_temperature, config, u)

    def _is_typical(self, logits: Logits, draft: int, epsilon: float) -> bool:
        assert self._inv_temperature is not None
        return is_typical(logits, draft, self._inv_temperature, epsilon, self._scratch)

    def _draw_weighing_all(self, logits: Logits, inv_temperature: float, u: float) -> int:
        """For top_p alone or no truncation, which need the weight of the whole vocabulary."""
        shift = 0.0  # nearly always good enough, and saves the search for the largest logit
        sums = weigh(logits, shift, inv_temperature, self._scratch)
        if not _SAFE_SUMS[0] < float(sums.max()) < _SAFE_SUMS[1]:  # NaN is not, either
            shift = float(logits[self._best(logits)])
            sums = weigh(logits, shift, inv_temperature, self._scratch)
        scratch = self._scratch
        if self.config.top_p == 1.0:
            return draw_by_id(scratch.weights, sums, u)
        return self._draw_nucleus(
            scratch.weights,
            float(sums.sum(dtype=np.float64)),
            lambda bound: at_least(scratch.weights, bound, scratch),
            logits,
            inv_temperature,
            u,
        )

    def _draw_from(
        self, given: Probabilities, logits: Logits, inv_temperature: float, u: float
    ) -> int:
        """`_draw_weighing_all` with weights that were computed elsewhere."""
        weights, sums = given.values, given.block_sums
        total = float(sums.sum(dtype=np.float64))
        if not 0.5 < total < 2.0:  # the logits are damaged: that will say how
            return self._draw_weighing_all(logits, inv_temperature, u)
        if self.config.top_p == 1.0:
            return draw_by_id(weights, sums, u)
        sole = sole_candidate(weights, given.block_maxima, self.config.top_p * total)
        if sole is not None:
            return sole
        return self._draw_nucleus(
            weights,
            total,
            lambda bound: at_least_in_blocks(weights, given.block_maxima, bound),
            logits,
            inv_temperature,
            u,
        )

    def _draw_nucleus(
        self,
        weights: Logits,
        total: float,
        at_least: Callable[[float], Ids],
        logits: Logits,
        inv_temperature: float,
        u: float,
    ) -> int:
        """Draw by weights that are proportional to the probabilities, with a top_p below 1.

        Args:
            total: of the weights.
            at_least: finds the tokens whose weight is at or above a bound.
        """
        ids, rest = nucleus_candidates(weights, total, self.config.top_p, at_least)
        ids = descending(logits, ids)
        rest /= float(weights[ids[0]])
        return draw_candidate(logits, ids, rest, inv_temperature, self.config, u)

    def _best(self, logits: Logits) -> int:
        """The first of the largest logits; raises where it is not a finite number."""
        best = int(logits.argmax())  # the first NaN, if there is one
        if not math.isfinite(logits[best]):
            raise self._no_peak(float(logits[best]))
        return best

    def _adjust(self, logits: Logits) -> None:
        if self._penalties is not None:
            self._penalties.apply(logits)
        if self._bias_ids.size:
            logits[self._bias_ids] = logits[self._bias_ids] + self._bias
        if self._generated_len < self.config.min_new_tokens and self._late_ids.size:
            logits[self._late_ids] -= np.float32(np.inf)  # keeps a NaN one
        if self._matcher is not None:
            self._matcher.restrict(logits, self._eos_ids)

    def _no_peak(self, peak: float) -> Exception:
        """What is wrong with logits whose largest is not a finite number."""
        if peak == math.inf and (self._penalties is not None or self._bias_ids.size):
            return RequestError(
                "penalties and logit_bias make logits infinite; use less extreme values"
            )
        if peak != -math.inf:
            kind = "NaN" if math.isnan(peak) else "infinite"
            return BackendError(f"the model produced {kind} logits; the package may be damaged")
        if self._bias_ids.size or self._generated_len < self.config.min_new_tokens:
            also = "" if self._matcher is None else "grammar, "
            return RequestError(f"{also}logit_bias and min_new_tokens leave no token to draw")
        return BackendError("the model gave every token a probability of zero")
