"""Text to token ids and back, by the package's `tokenizer.json`.

Control tokens are the added tokens of the vocabulary (`<|im_end|>`, `<tool_call>`) but for runs of
spaces. In a raw prompt they are recognised, as in other runtimes: whoever writes it writes the
whole of it. In a chat only the template may produce them: `encode_segments` cuts the text inside
of any that the rest of the text would form, so that they become ordinary pieces.

Decoding is by bytes: each token stands for some, and a text is their UTF-8. This equals the
library's own decoding of well-formed text. Of ill-formed bytes each maximal part becomes one
U+FFFD; a SentencePiece vocabulary would otherwise turn a whole run of byte tokens, good characters
included, into as many of them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from headrace.runtime.errors import PackageError, RequestError
from headrace.runtime.manifest import TokenizerInfo, package_path

_SPACE_PIECE = "\u2581"  # how SentencePiece writes a space
_LONER = "\x02"  # a control character that no merge begins or ends with
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level piece stands for (GPT-2's bijection)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    shifted = {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_ALPHABET = _byte_level_alphabet()


class Tokenizer:
    """One package's tokenizer. Thread-safe; made by `load`.

    Attributes:
        vocab_size: ids of the tokenizer; the model's logits may have more columns.
        eos_token_ids: tokens that end an answer.
        bos_token, eos_token: as text, for chat templates; "" where there is none.
        control_tokens: texts of the special tokens.
    """

    def __init__(self, library: tokenizers.Tokenizer, info: TokenizerInfo) -> None:
        library.no_padding()
        library.no_truncation()
        self._library, self._info = library, info
        self.vocab_size: int = library.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = info.eos_token_ids
        added = library.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        control = {
            i: t.content for i, t in added.items() if t.content.strip(_SPACE_PIECE + " \t\n")
        }
        self.control_tokens = tuple(added[i].content for i in sorted(self._special_ids))
        self._control_ids = frozenset(control)
        longest_first = sorted(control.values(), key=len, reverse=True)
        # A pattern that matches nothing where there are no control tokens.
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._byte_level, self._strips_start = _decoder_kind(library)
        self._bytes: dict[int, bytes] = {}
        self.bos_token = self._token_text(info.bos_token_id)
        self.eos_token = self._token_text(next(iter(info.eos_token_ids), None))

    @classmethod
    def load(cls, folder: Path, info: TokenizerInfo) -> Tokenizer:
        """Load a package's tokenizer and check that it is the one that was exported.

        Raises:
            PackageError: the file is damaged, of an unknown kind, or makes other ids of the
                golden texts than it did at export.
        """
        path = package_path(folder, info.file)
        try:
            library = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
            tokenizer = cls(library, info)
        except PackageError as error:
            raise PackageError(f"{path}: {error}") from None
        except Exception as error:  # the library raises bare Exception
            raise PackageError(f"{path} cannot be read as a tokenizer: {error}") from None
        for golden in info.golden:
            ids = tokenizer._encode(golden.text)
            if tuple(ids) != golden.token_ids:
                raise PackageError(
                    f"{path} makes other tokens of {golden.text!r} than when the package was "
                    "exported; export it again, or install the tokenizers version it was made with"
                )
        return tokenizer

    def has_tokens_of(self, other: Tokenizer) -> bool:
        """Whether each token has the same id in both."""
        mine, theirs = (t._library.get_vocab(with_added_tokens=True) for t in (self, other))
        return bool(mine == theirs)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt, control tokens recognised, with the BOS token once if the model
        wants one.

        Raises:
            RequestError: the prompt is empty or not text.
        """
        if not isinstance(text, str):
            raise RequestError(f"the prompt must be a string, not {type(text).__name__}")
        if not text:
            raise RequestError("the prompt is empty")
        ids = self._encode(text)
        bos = self._info.bos_token_id
        if self._info.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def encode_segments(self, segments: Sequence[tuple[str, bool]]) -> list[int]:
        """Ids of the joined texts of (text, trusted) pairs.

        Where no control token touches an untrusted text these are the ids of the whole text;
        otherwise it is encoded in pieces, cut inside of each that does. No BOS token is added.

        Raises:
            RequestError: an untrusted text would become a control token all the same (by the
                tokenizer's normalization), or is not valid Unicode.
        """
        text = "".join(part for part, _ in segments)
        pieces, own = self._cut(text, _untrusted_mask(segments))
        ids = [i for piece in pieces for i in self._encode(piece)]
        found = self._count_control(ids)
        if found > own:  # unless a trusted text is normalized into one, an untrusted one was
            own = sum(self._count_control(self._encode(part)) for part, safe in segments if safe)
        if found > own:
            raise RequestError(
                "the text of a message would become a control token of the model; "
                "remove the marker from it"
            )
        return ids

    def encode_fragment(self, text: str) -> list[int]:
        """Ids whose bytes are exactly those of a part of an answer; never a special token.

        What the library makes of the text where that is exact, also behind a character that
        merges with nothing (SentencePiece puts a space before a text); else the longest pieces.
        """
        data = text.encode("utf-8", "replace")
        for lead in ("", _LONER):
            ids = self._encode(lead + data.decode())
            skipped = len(self._encode(lead)) if lead else 0
            if b"".join(map(self.token_bytes, ids[skipped:])) == data:
                return ids[skipped:]
        return self._longest_pieces(data)

    @functools.cached_property
    def _pieces(self) -> dict[bytes, int]:
        return {self.token_bytes(i): i for i in reversed(range(self.vocab_size))}

    def _longest_pieces(self, data: bytes) -> list[int]:
        pieces = self._pieces
        longest = max(map(len, pieces))
        ids: list[int] = []
        start = 0
        while start < len(data):
            ends = range(min(len(data), start + longest), start, -1)
            end = next((end for end in ends if data[start:end] in pieces), None)
            if end is None:  # a byte that the vocabulary lacks: nothing can be written here
                break
            ids.append(pieces[data[start:end]])
            start = end
        return ids

    def decode(self, ids: Iterable[int], *, at_start: bool = True) -> str:
        """Text of token ids; special tokens and ids beyond the vocabulary are not shown.

        Args:
            at_start: the ids begin a text, so that the space which some tokenizers put before it
                is taken off. False for an answer, which goes on from its prompt.
        """
        data = b"".join(map(self.token_bytes, ids))
        if at_start and self._strips_start and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, possibly part of a character; b"" if it is not shown."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._find_bytes(token_id)
        return data

    def special_marks(self, texts: Iterable[str]) -> dict[int, bytes]:
        """Bytes, by id, of special tokens that are one of these texts."""
        wanted = {self._library.token_to_id(text): text.encode() for text in texts}
        return {i: data for i, data in wanted.items() if i in self._special_ids}

    def _find_bytes(self, token_id: int) -> bytes:
        piece = self._library.id_to_token(token_id)
        if piece is None or token_id in self._special_ids:
            return b""
        if self._byte_level:
            if all(character in _ALPHABET for character in piece):
                return bytes(_ALPHABET[character] for character in piece)
            return bytes(piece, "utf-8")
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return bytes(piece.replace(_SPACE_PIECE, " "), "utf-8")

    def _token_text(self, token_id: int | None) -> str:
        return "" if token_id is None else self._library.id_to_token(token_id) or ""

    def _encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        except (UnicodeError, TypeError):
            raise RequestError("the text holds lone surrogates, which are no Unicode") from None
        return ids

    def _count_control(self, ids: Iterable[int]) -> int:
        return sum(i in self._control_ids for i in ids)

    def _cut(self, text: str, untrusted: bytes) -> tuple[list[str], int]:
        """Pieces of `text` in which no control token touches an untrusted character, and how many
        control tokens they hold.

        Args:
            untrusted: one byte a character of `text`, 1 for an untrusted one.
        """
        pieces, own, start, position = [], 0, 0, 0
        while match := self._control.search(text, position):
            begin, position = match.span()
            if 1 not in untrusted[begin:position]:
                own += 1
            elif position - begin > 1:  # the rest of the token may hold another: search it too
                pieces.append(text[start : begin + 1])
                start = position = begin + 1
        pieces.append(text[start:])
        return pieces, own


def _untrusted_mask(segments: Sequence[tuple[str, bool]]) -> bytes:
    return b"".join((b"\0" if trusted else b"\1") * len(text) for text, trusted in segments)


def _decoder_kind(library: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """Whether pieces are byte-level, and whether a text loses the space at its start.

    Raises:
        PackageError: the decoder is neither byte-level nor SentencePiece's.
    """
    decoder = library.decoder
    described: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {}
    steps = described.get("decoders", [described])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return True, False
    strips = False
    for kind, step in zip(kinds, steps, strict=True):
        if kind == "Strip" and (step["content"], step["stop"]) == (" ", 0) and step["start"] < 2:
            strips = step["start"] == 1
        elif kind == "Metaspace" and step["replacement"] == _SPACE_PIECE:
            strips = step.get("prepend_scheme", "always") != "never"
        elif kind == "Replace" and step["pattern"] == {"String": _SPACE_PIECE}:
            if step["content"] != " ":
                raise PackageError("the tokenizer decodes spaces in an unknown way")
        elif kind not in ("ByteFallback", "Fuse"):
            raise PackageError(
                f"a tokenizer that decodes with {kind} is not supported; known are byte-level "
                "and SentencePiece vocabularies"
            )
    return False, strips
