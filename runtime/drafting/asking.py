"""How often a draft model is asked in a step: as long as what it says is worth the time it takes.

Each time it gives one token to each of the sequences it is asked for. The next time is worth it if
expected tokens per ms, with the time spent so far, are more than without it. What a next guess is
worth falls from one time to the next, so the first time that is not worth it is the last.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.runtime.drafting.acceptance import AcceptanceTable
from headrace.runtime.drafting.budget import StepCost, draft_lengths
from headrace.runtime.drafting.guess import Guess, Option
from headrace.runtime.drafting.model import Model, Wanted

TRIAL_STEPS = 64  # after so many steps without the model it is tried: it may have become worth it
_SPREAD_STEPS = 32  # reading a text that is new to the model is paid for by so many steps to come
_MEASURED_TOKENS = 16  # rows up to this length say what guessing costs; longer ones read texts


@dataclass(slots=True)
class _Chain:
    """Guesses for one sequence, growing.

    Attributes:
        next_rate: how likely the next guess is right, if those before are.
        next_cost_tokens: what asking for it counts for in the model's step.
        chance: that all guesses so far are right.
    """

    option: Option
    guess: Guess
    next_rate: float
    unread_tokens: int
    next_cost_tokens: float
    chance: float = 1.0

    @property
    def next_worth(self) -> float:
        return self.chance * self.next_rate


class ModelAsker:
    """Asks a draft model for guesses where they are likelier to be right than n-grams.

    Attributes:
        model_ms: time that the model took in the last step.
    """

    def __init__(self, model: Model, table: AcceptanceTable) -> None:
        self._model, self._table = model, table
        self._cost = StepCost()
        self._idle_steps = 0
        self.model_ms = 0.0

    def ask(self, options: list[Option], cost: StepCost, num_sequences: int) -> float:
        """Put the model's guesses into `options`, for as many and as long as pays.

        Args:
            cost: of a step of the large model.
            num_sequences: of the step, those without an option included.

        Returns:
            Expected ms of what the model was asked for.
        """
        self.model_ms = 0.0
        chains = [chain for option in options if (chain := self._chain(option)) is not None]
        if not chains:
            return 0.0
        asked = {id(chain.option) for chain in chains}
        others = [o.guess.chances() for o in options if o.guess and id(o) not in asked]
        lengths = draft_lengths(cost, others, num_sequences - len(others))
        num_tokens = num_sequences + sum(lengths)
        pairs = zip(others, lengths, strict=True)
        expected = num_sequences + sum(sum(chances[:length]) for chances, length in pairs)
        spent_ms, open_chains = 0.0, chains
        while open_chains:
            open_chains.sort(key=lambda chain: chain.next_worth, reverse=True)
            count = self._worthwhile(open_chains, cost, num_tokens, expected, spent_ms)
            if not count and not spent_ms:
                self._idle_steps += 1
                count = 1 if self._idle_steps > TRIAL_STEPS else 0
            if not count:
                break
            self._idle_steps = 0
            spent_ms += self._cost(sum(c.next_cost_tokens for c in open_chains[:count]))
            open_chains = self._extend(open_chains[:count])
            num_tokens += len(open_chains)
            expected += sum(chain.chance for chain in open_chains)
            open_chains = [c for c in open_chains if len(c.guess.tokens) < c.option.limit]
        for chain in chains:
            if chain.guess.tokens:
                chain.option.guess = chain.guess
        return spent_ms

    def _chain(self, option: Option) -> _Chain | None:
        """A chain without guesses; None where n-grams are likelier, or the model has no room."""
        kind = self._table.next_kind(option.entropy_nats)
        rate = option.model_history.rate(kind)
        if option.guess is not None and option.guess.chances()[0] >= rate:
            return None
        unread = self._model.unread_tokens(option.sequence, option.limit)
        if unread is None:
            return None
        sequence = option.sequence
        left = sequence.max_new_tokens - sequence.generated_len
        cost_tokens = 1.0 + (unread - 1) / min(left, _SPREAD_STEPS)
        guess = Guess([], [], option.model_history, asked=kind)
        return _Chain(option, guess, rate, unread, cost_tokens)

    def _worthwhile(
        self,
        chains: list[_Chain],
        cost: StepCost,
        num_tokens: int,
        expected: float,
        spent_ms: float,
    ) -> int:
        """For how many of the chains, the most valuable first, it pays to ask once more."""
        best, best_speed = 0, expected / (cost(num_tokens) + spent_ms)
        asked_tokens = 0.0
        for count, chain in enumerate(chains, 1):
            expected += chain.next_worth
            asked_tokens += chain.next_cost_tokens
            ms = cost(num_tokens + count) + spent_ms + self._cost(asked_tokens)
            if expected / ms > best_speed:
                best, best_speed = count, expected / ms
        return best

    def _extend(self, chains: list[_Chain]) -> list[_Chain]:
        """Ask the model for the next guess of each; those that got one."""
        wanted = [Wanted(chain.option.sequence, chain.guess.tokens) for chain in chains]
        predictions, model_ms = self._model.predict(wanted)
        self.model_ms += model_ms
        unread = [chain.unread_tokens for chain in chains]
        if None not in predictions and max(unread) <= _MEASURED_TOKENS:
            self._cost.observe(sum(unread), model_ms)
        extended = []
        for chain, prediction in zip(chains, predictions, strict=True):
            if prediction is None:
                continue
            kind = self._table.model_kind(prediction.entropy_nats)
            chain.guess.tokens.append(prediction.token_id)
            chain.guess.kinds.append(kind)
            chain.chance *= chain.guess.history.rate(kind)
            chain.unread_tokens, chain.next_cost_tokens = 1, 1.0
            extended.append(chain)
        return extended
