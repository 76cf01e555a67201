"""Texts to vectors, with an encoder package that `runtime-export` made.

with Embedder.load("minilm") as embedder:
    vectors = embedder.embed(["How do I reset it?", "Hold the button for ten seconds."])
    print(vectors @ vectors.T)
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from headrace.runtime.encoder.batches import call_tokens, plan_calls
from headrace.runtime.encoder.manifest import EncoderManifest
from headrace.runtime.encoder.pooling import normalized, pool
from headrace.runtime.errors import EngineClosedError, PackageError, RequestError
from headrace.runtime.manifest import package_path

Float = NDArray[np.float32]


class Encoder(Protocol):
    """What an embedder needs of a device: `backends.cpu_avx512.encoder.CpuEncoder`."""

    name: str
    num_threads: int

    def run(self, calls: Sequence[Sequence[Sequence[int]]]) -> Iterable[Float]:
        """Last hidden states of each call, in order: float32 [N, hidden] of all tokens, text after
        text, or of the first tokens alone where the package pools those."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Embeddings:
    """What `Embedder.embed_all` gives.

    Attributes:
        vectors: float32 [texts, dim].
        num_tokens: of each text, special tokens included, before it was cut.
        max_tokens: where texts were cut.
    """

    vectors: Float
    num_tokens: tuple[int, ...]
    max_tokens: int


class Embedder:
    """A loaded encoder. Thread-safe; close it, or use it as a context manager.

    Made by `Embedder.load`. The constructor takes the parts, for tests and special set-ups.

    Attributes:
        dim: of the vectors.
        max_tokens: longest text, special tokens included.
        pooling, normalized: how token states become a vector, as the checkpoint says.
    """

    def __init__(
        self, encoder: Encoder, tokenizer: tokenizers.Tokenizer, manifest: EncoderManifest
    ) -> None:
        self.dim = manifest.model.hidden_size
        self.max_tokens = manifest.model.max_tokens
        self.pooling = manifest.pooling.mode
        self.normalized = manifest.pooling.normalize
        self._encoder, self._tokenizer = encoder, tokenizer
        self._cutting = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self._cutting.enable_truncation(self.max_tokens)
        self._closed = threading.Event()

    @classmethod
    def load(cls, folder: str | Path, *, num_threads: int | None = None) -> Embedder:
        """Load an encoder package.

        Args:
            folder: made by `runtime-export` from a text encoder.
            num_threads: inside the model; one a core unless given.

        Raises:
            ConfigError: `num_threads` is out of range.
            PackageError: it cannot be read, or generates text instead.
            BackendError: the device cannot be used, or memory is short.
        """
        from headrace.runtime.factory import load_embedder

        return load_embedder(Path(folder), num_threads)

    @property
    def name(self) -> str:
        """Kernels and threads in use, for messages."""
        return self._encoder.name

    def embed(self, texts: Sequence[str], *, truncate: bool = False) -> Float:
        """One vector a text: float32 [len(texts), dim], of length 1 where `normalized`.

        Args:
            texts: one or more, none of them empty.
            truncate: of a text longer than `max_tokens` use its beginning; otherwise it is refused.

        Raises:
            RequestError: a text is empty, too long or no text; names its index. Nothing was run.
            BackendError: the device failed.
            EngineClosedError: the embedder was closed.
        """
        return self.embed_all(texts, truncate=truncate).vectors

    def embed_all(self, texts: Sequence[str], *, truncate: bool = False) -> Embeddings:
        """`embed`, with what became of the texts."""
        if self._closed.is_set():
            raise EngineClosedError("the embedder was closed; load it again")
        texts = _checked(texts)
        ids = self._encode(texts)
        num_tokens = tuple(map(len, ids))
        longest = max(range(len(ids)), key=num_tokens.__getitem__)
        if num_tokens[longest] > self.max_tokens and not truncate:
            raise RequestError(
                f"text {longest} has {num_tokens[longest]} tokens, but the model takes "
                f"{self.max_tokens}; split it, or use its beginning with truncate"
            )
        cut = {i: self._cutting.encode(texts[i]).ids for i in _longer(num_tokens, self.max_tokens)}
        ids = [cut.get(i, tokens) for i, tokens in enumerate(ids)]
        vectors = np.empty((len(ids), self.dim), np.float32)
        lengths = [len(tokens) for tokens in ids]
        calls = plan_calls(lengths, call_tokens(sum(lengths), self._encoder.num_threads))
        states = self._encoder.run([[ids[i] for i in call] for call in calls])
        for call, found in zip(calls, states, strict=True):
            rows = [1] * len(call) if self.pooling == "cls" else [lengths[i] for i in call]
            vectors[call] = pool(found, rows, self.pooling)
        if self.normalized:
            vectors = normalized(vectors)
        return Embeddings(vectors, num_tokens, self.max_tokens)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._closed.set()
        self._encoder.close()

    def __enter__(self) -> Embedder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]


def _longer(lengths: Sequence[int], limit: int) -> list[int]:
    return [i for i, length in enumerate(lengths) if length > limit]


def _checked(texts: Any) -> list[str]:
    """Raises RequestError: not a list of texts, none at all, or one of them is empty."""
    if isinstance(texts, (str, bytes, bytearray, Mapping)) or not isinstance(texts, Iterable):
        raise RequestError(
            f"texts must be a list of strings, not {type(texts).__name__}; put it in a list"
        )
    found = list(texts)
    if not found:
        raise RequestError("no texts were given; give at least one")
    for index, text in enumerate(found):
        if not isinstance(text, str):
            raise RequestError(f"text {index} must be a string, not {type(text).__name__}")
        if not text.strip():
            raise RequestError(f"text {index} is empty; leave it out")
        if not _is_unicode(text):
            raise RequestError(f"text {index} holds lone surrogates, which are no Unicode")
    return found


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def load_tokenizer(folder: Path, manifest: EncoderManifest) -> tokenizers.Tokenizer:
    """The package's tokenizer, checked to be the one that was exported.

    Raises:
        PackageError: it is damaged, or makes other ids of the golden texts than it did at export.
    """
    path = package_path(folder, manifest.tokenizer.file)
    try:
        library = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise PackageError(f"{path} cannot be read as a tokenizer: {error}") from None
    library.no_padding()
    library.no_truncation()
    for golden in manifest.tokenizer.golden:
        if tuple(library.encode(golden.text).ids) != golden.token_ids:
            raise PackageError(
                f"{path} makes other tokens of {golden.text!r} than when the package was "
                "exported; export it again, or install the tokenizers version it was made with"
            )
    return library
