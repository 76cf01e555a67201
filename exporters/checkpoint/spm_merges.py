"""Merges of a SentencePiece BPE vocabulary, which stores scores instead."""

from __future__ import annotations

from collections.abc import Sequence


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of tokens in the order in which they are to be merged.

    SentencePiece joins the neighbours whose union has the highest score, the leftmost on a tie.
    So all ways to make a better token come before all ways to make a worse one; ways to make the
    same token are ordered by the id of their left part. Exact while scores are distinct, as
    SentencePiece's trainer makes them: ranks cannot say "leftmost of two different tokens".
    """
    ids = {token: i for i, token in enumerate(tokens)}
    lengths = sorted({len(token) for token in tokens} - {0})  # the only places to cut: a damaged
    known_lengths = set(lengths)  # file's endless token would take quadratic time otherwise
    merges: list[tuple[str, str]] = []
    for whole in sorted(range(len(tokens)), key=lambda i: (-scores[i], i)):
        token = tokens[whole]
        pairs = [
            (token[:cut], token[cut:])
            for cut in lengths
            if len(token) - cut in known_lengths and token[:cut] in ids and token[cut:] in ids
        ]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges
