"""From a prompt and a configuration to a checked request. Any thread."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable

from headrace.backends.base import Capabilities
from headrace.runtime.answer import Answer, Request, Text
from headrace.runtime.config import GenerationConfig
from headrace.runtime.core import Sequence
from headrace.runtime.errors import RequestError
from headrace.runtime.grammar.matcher import GrammarCompiler, GrammarMatcher
from headrace.runtime.sampling.candidates import Scratch
from headrace.runtime.sampling.sampler import Sampler, sample_seed
from headrace.runtime.scheduling.limits import Limits


class RequestMaker:
    """Makes the requests of one engine.

    Args:
        eos_token_ids: tokens with which the model ends a text.
        grammars: for requests with a grammar, which are refused without it.
    """

    def __init__(
        self,
        limits: Limits,
        capabilities: Capabilities,
        eos_token_ids: Iterable[int],
        grammars: GrammarCompiler | None,
    ) -> None:
        self._limits, self._vocab_size = limits, capabilities.vocab_size
        self._eos_token_ids, self._grammars = tuple(eos_token_ids), grammars
        self._scratch = Scratch(self._vocab_size)  # of the engine's thread, which samples
        self._next_id = itertools.count().__next__  # atomic

    def make(
        self,
        prompt_ids: Iterable[int],
        config: GenerationConfig,
        make_text: Callable[[GenerationConfig], Text],
    ) -> Request:
        """See `Engine.prepare`."""
        ids = tuple(prompt_ids)
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            beyond = next(i for i in ids if not 0 <= i < self._vocab_size)
            raise RequestError(
                f"the prompt has token {beyond}, but the vocabulary has {self._vocab_size} tokens"
            )
        matcher = self._matcher(config)
        max_new_tokens = self._limits.new_tokens(len(ids), config.max_new_tokens)
        seed = secrets.randbits(64) if config.seed is None else config.seed
        request = Request(self._next_id(), ids, config)
        for index in range(config.n):
            seq_id = self._next_id() if index else request.request_id
            sampler = Sampler(
                config,
                ids,
                self._eos_token_ids,
                sample_seed(seed, index),
                self._scratch,
                None if matcher is None else matcher.copy(),
            )
            sequence = Sequence(
                seq_id,
                list(ids),
                len(ids),
                max_new_tokens,
                inverse_temperature=sampler.inverse_temperature,
                priority=config.priority,
                is_lossy=config.typical_acceptance > 0.0,
            )
            has_logprobs = config.logprobs is not None
            request.answers.append(
                Answer(request, index, sequence, sampler, make_text(config), has_logprobs)
            )
        return request

    def _matcher(self, config: GenerationConfig) -> GrammarMatcher | None:
        if config.grammar is None:
            return None
        if self._grammars is None:
            raise RequestError("this engine was made without a compiler for grammars")
        return self._grammars.matcher(config.grammar)
