"""What a drafter needs of a smaller model: its next tokens, and how sure it is of them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from headrace.runtime.core import Sequence


class Wanted(NamedTuple):
    """The token after `sequence.tokens` and `guesses` is wanted."""

    sequence: Sequence
    guesses: list[int]


class Prediction(NamedTuple):
    """A token, and the entropy of what it was chosen from."""

    token_id: int
    entropy_nats: float


class Model(Protocol):
    """A smaller model of the same vocabulary (`runtime.draft_model.DraftModel`)."""

    def unread_tokens(self, sequence: Sequence, num_guesses: int) -> int | None:
        """How many tokens of a running sequence it has not read, at least 1; None where it has no
        room for them and for this many guesses."""
        ...

    def predict(self, wanted: list[Wanted]) -> tuple[list[Prediction | None], float]:
        """Run one step for these sequences, after `unread_tokens` was asked for each.

        Returns:
            The next token of each; None while a long text is being read, and where the model has
            failed. The time that the step took, ms.
        """
        ...
