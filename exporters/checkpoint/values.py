"""What a checkpoint is made of, whatever its file format.

A tensor has its Hugging Face name and layout: `[out, in]` for a linear layer, rotary halves (not
interleaved pairs) in query and key rows. Configuration keys are those of config.json.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from headrace.runtime.errors import CheckpointError
from headrace.runtime.manifest import file_sha256

Float = NDArray[np.float32]


class MissingEntryError(CheckpointError, KeyError):
    """A tensor or configuration key that the checkpoint should have is not there."""

    __str__ = Exception.__str__  # KeyError's would put the message in quotes


@dataclass(frozen=True, slots=True)
class QuantBlocks:
    """A block-quantized matrix as the file stores it, nothing rounded again.

    value[o, i] == codes[o, i] * scales[o, i // block_size] + offsets[o, i // block_size],
    computed in float32 and equal, bit for bit, to what `LazyTensor.load` gives.

    Attributes:
        bits: 4 or 8.
        block_size: values along `in` that share a scale.
        codes: [out, in]; int8 where symmetric (Q4_0: -8..7, Q8_0: -128..127), uint8 where there
            are offsets (Q4_1: 0..15).
        scales: float32 [out, in / block_size], float16 values.
        offsets: float32 [out, in / block_size], float16 values; None for 0.
    """

    bits: int
    block_size: int
    codes: NDArray[np.int8] | NDArray[np.uint8]
    scales: Float
    offsets: Float | None

    def dequantize(self) -> Float:
        """float32 [out, in]."""
        out, blocks = self.scales.shape
        values = self.codes.reshape(out, blocks, self.block_size).astype(np.float32)
        values *= self.scales[:, :, None]
        if self.offsets is not None:
            values += self.offsets[:, :, None]
        return values.reshape(out, -1)


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is read when asked for.

    Attributes:
        name: Hugging Face name, "model.layers.0.self_attn.q_proj.weight".
        shape: [out, in] for a matrix.
        dtype: name of the stored type: "Q4_1", "BF16", ...
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    loader: Callable[[], Float]
    block_loader: Callable[[], QuantBlocks] | None = None

    def load(self) -> Float:
        """Read and convert: a new float32 array of `shape`.

        Raises:
            CheckpointError: the file cannot be read any more, or its type cannot be converted.
        """
        return self.loader()

    def plus(self, offset: float) -> LazyTensor:
        """A view whose values are this much larger."""

        def load() -> Float:
            return np.asarray(self.load() + np.float32(offset))

        return dataclasses.replace(self, loader=load, block_loader=None)

    def rows(self, start: int, stop: int, name: str) -> LazyTensor:
        """A view of some rows, or of some values of a vector."""
        view = self.reordered(np.arange(start, stop, dtype=np.int64))
        return dataclasses.replace(view, name=name)

    def reordered(self, order: NDArray[np.int64]) -> LazyTensor:
        """A view whose row i is row order[i]."""

        def blocks() -> QuantBlocks:
            whole = self.blocks()
            assert whole is not None
            offsets = None if whole.offsets is None else whole.offsets[order]
            return dataclasses.replace(
                whole, codes=whole.codes[order], scales=whole.scales[order], offsets=offsets
            )

        return dataclasses.replace(
            self,
            shape=(len(order), *self.shape[1:]),
            loader=lambda: self.load()[order],
            block_loader=None if self.block_loader is None else blocks,
        )

    def transposed(self) -> LazyTensor:
        """A view with rows and columns exchanged."""
        return dataclasses.replace(
            self,
            shape=self.shape[::-1],
            loader=lambda: np.ascontiguousarray(self.load().T),
            block_loader=None,
        )

    def blocks(self) -> QuantBlocks | None:
        """The stored blocks of a Q4_0, Q4_1 or Q8_0 matrix; None for any other type."""
        return None if self.block_loader is None else self.block_loader()


class TensorMap(Mapping[str, LazyTensor]):
    """Tensors by name, in file order; a missing one raises a CheckpointError that names it."""

    def __init__(self, tensors: Mapping[str, LazyTensor], source: Path) -> None:
        self._tensors, self._source = tensors, source

    def __getitem__(self, name: str) -> LazyTensor:
        if name not in self._tensors:
            raise MissingEntryError(
                f"{self._source} has no tensor {name!r}; download or convert the checkpoint again"
            )
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Config(dict[str, object]):
    """Keys of config.json; a missing one raises a CheckpointError that names it."""

    def __missing__(self, key: str) -> object:
        raise MissingEntryError(f"the checkpoint's configuration has no {key!r}")


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """How the checkpoint turns text into tokens and back.

    Attributes:
        tokenizer_json: for `tokenizers.Tokenizer.from_str`. Encode with
            `add_special_tokens=False` and prepend `bos_token_id` where `add_bos` says so.
        eos_token_ids: every token that ends an answer, the main one first.
        chat_template: Jinja source, if the checkpoint has one.
        generation_config: suggested sampling, keys of generation_config.json; may be empty.
    """

    tokenizer_json: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None
    generation_config: dict[str, object]


class Checkpoint:
    """An open checkpoint: use it in a `with` block, or close it.

    Attributes:
        format: "gguf", "safetensors" or "onnx".
        path: what was opened.
        weight_files: the files that hold tensors.
        config: Hugging Face config.json keys.
        tensors: by Hugging Face name.
    """

    def __init__(
        self,
        *,
        format: str,
        path: Path,
        weight_files: tuple[Path, ...],
        config: Config,
        tensors: Mapping[str, LazyTensor],
        make_tokenizer: Callable[[], TokenizerSource],
        resources: ExitStack,
    ) -> None:
        self.format, self.path, self.weight_files = format, path, weight_files
        self.config: dict[str, object] = config
        self.tensors: Mapping[str, LazyTensor] = TensorMap(tensors, path)
        self._make_tokenizer, self._resources = make_tokenizer, resources

    @cached_property
    def tokenizer(self) -> TokenizerSource:
        """Built when first asked for, so that a checkpoint without one can still be inspected.

        Raises:
            CheckpointError: it is missing, damaged, or of a kind that is not known here.
        """
        return self._make_tokenizer()

    def sha256(self) -> str:
        """Hex digest of the weight file, or of the shards' hex digests joined in name order."""
        try:
            digests = [file_sha256(path) for path in self.weight_files]
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from None
        if len(digests) == 1:
            return digests[0]
        return hashlib.sha256("".join(digests).encode("ascii")).hexdigest()

    def close(self) -> None:
        """Close the files; tensors cannot be loaded any more."""
        self._resources.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
