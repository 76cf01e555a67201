"""Damaged and hostile files: a CheckpointError, never another exception or a huge allocation."""

from __future__ import annotations

import itertools
import struct
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import default_metadata, write_folder, write_gguf
from gguf import GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.exporters.checkpoint.source import open_checkpoint
from headrace.runtime.errors import CheckpointError

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST_SHARD, SECOND_SHARD = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "scratch.gguf"


def read_everything(path: Path) -> None:
    """Open, build the tokenizer, load every tensor."""
    with open_checkpoint(path) as checkpoint:
        for tensor in checkpoint.tensors.values():
            values = tensor.load()
            assert values.shape == tensor.shape
            tensor.blocks()
        assert checkpoint.tokenizer.tokenizer_json


def survives(path: Path) -> bool:
    """Whether it could be read; any exception but CheckpointError fails the test."""
    try:
        read_everything(path)
    except CheckpointError as error:
        assert str(error) and "\n" not in str(error).replace(str(path), "")
        return False
    return True


@cache
def small_gguf() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write_gguf(Path(folder) / "m.gguf").read_bytes()


@cache
def small_folder() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        files = sorted(write_folder(Path(folder), shards=2).iterdir())
        return {file.name: file.read_bytes() for file in files}


def test_the_samples_can_be_read(tmp_path: Path, scratch: Path) -> None:
    scratch.write_bytes(small_gguf())
    assert survives(scratch)
    _put(tmp_path / "hf", small_folder())
    assert survives(tmp_path / "hf")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"GGU", "not a checkpoint"),
        (b"GGUF", "truncated"),
        (b"\0" * 100, "not a checkpoint"),
        (b"a text file that is no checkpoint", "not a checkpoint"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(64), "GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(64), "big-endian"),
    ],
)
def test_not_a_checkpoint(scratch: Path, content: bytes, expected: str) -> None:
    scratch.write_bytes(content)
    with pytest.raises(CheckpointError, match=expected):
        open_checkpoint(scratch)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "missing.gguf")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        open_checkpoint(tmp_path)
    (tmp_path / "inner.gguf").write_bytes(small_gguf())
    with pytest.raises(CheckpointError, match=r"give the file itself.*inner\.gguf"):
        open_checkpoint(tmp_path)


def test_gguf_truncated_anywhere(scratch: Path) -> None:
    """Every byte of the header, then every boundary of a tensor and its neighbours."""
    whole = small_gguf()
    scratch.write_bytes(whole)
    tensors = GGUFReader(scratch).tensors
    data_start = min(tensor.data_offset for tensor in tensors)
    data_end = max(tensor.data_offset + tensor.n_bytes for tensor in tensors)
    ends = {tensor.data_offset + tensor.n_bytes + d for tensor in tensors for d in (-1, 0, 1)}
    for size in sorted({*range(0, data_start, 7), *(e for e in ends if e < data_end)}):
        scratch.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            open_checkpoint(scratch)


HUGE = [2**31, 2**32, 2**62, 2**63, 2**64 - 1]


def _header(*, tensors: int = 0, keys: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + body


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _absurd_headers() -> Iterator[bytes]:
    record = _text("t") + struct.pack("<I", 2)
    for n in HUGE:
        yield _header(tensors=n)
        yield _header(keys=n)
        yield _header(keys=1, body=struct.pack("<Q", n) + b"key")
        yield _header(keys=1, body=_text("k") + struct.pack("<IQ", 8, n) + b"value")
        for kind in range(14):  # array of n items
            yield _header(keys=1, body=_text("k") + struct.pack("<IIQ", 9, kind, n))
        yield _header(tensors=1, body=record + struct.pack("<QQIQ", n, n, 0, 0))
        yield _header(tensors=1, body=record + struct.pack("<QQIQ", 32, 1, 3, n))
        yield _header(tensors=1, body=_text("t") + struct.pack("<I", n % 2**32) + bytes(64))
    nested = b"".join(struct.pack("<IQ", 9, 1) for _ in range(10_000))
    yield _header(keys=1, body=_text("k") + struct.pack("<I", 9) + nested)


def test_absurd_counts_allocate_nothing(scratch: Path) -> None:
    tracemalloc.start()
    try:
        for content in _absurd_headers():
            scratch.write_bytes(content + bytes(64))
            with pytest.raises(CheckpointError):
                open_checkpoint(scratch)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_zeros_are_not_read_as_millions_of_empty_texts(scratch: Path) -> None:
    content = _header(keys=1, body=_text("k") + struct.pack("<IIQ", 9, 8, 1 << 25))
    with scratch.open("wb") as stream:
        stream.write(content)
        stream.truncate(1 << 29)  # takes no space where files may have holes
    with pytest.raises(CheckpointError, match=f"claims {1 << 25} items of metadata key 'k'"):
        open_checkpoint(scratch)
    scratch.write_bytes(_header(keys=1, body=_text("k") + struct.pack("<IIQ", 9, 8, 5)) + bytes(39))
    with pytest.raises(CheckpointError, match="claims 5 items of metadata key 'k'"):
        open_checkpoint(scratch)


@FUZZ
@given(data=st.data())
def test_gguf_with_changed_bytes(data: st.DataObject) -> None:
    content = bytearray(small_gguf())
    positions = st.integers(0, len(content) - 1) | st.integers(0, 2000)
    for at in data.draw(st.lists(positions, min_size=1, max_size=8)):
        width = data.draw(st.sampled_from([1, 4, 8]))
        content[at : at + width] = data.draw(st.binary(min_size=width, max_size=width))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(content)
        survives(path)


@FUZZ
@given(tail=st.binary(max_size=200), keys=st.integers(0, 4), tensors=st.integers(0, 4))
def test_gguf_of_random_bytes(tail: bytes, keys: int, tensors: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(_header(tensors=tensors, keys=keys, body=tail))
        assert not survives(path)


_VALUES = (
    st.none()
    | st.booleans()
    | st.integers(0, 2**32 - 1)
    | st.floats(width=32)
    | st.text(max_size=8)
    | st.lists(st.integers(-3, 3), max_size=4)
    | st.lists(st.text(max_size=4), max_size=4)
    | st.lists(st.floats(width=32), max_size=4)
)


@FUZZ
@given(changes=st.dictionaries(st.sampled_from(sorted(default_metadata())), _VALUES, min_size=1))
def test_gguf_with_any_metadata(changes: dict[str, Any]) -> None:
    """Well-formed files whose values make no sense."""
    with tempfile.TemporaryDirectory() as folder:
        cleaned: Any = {key: None if value == [] else value for key, value in changes.items()}
        path = write_gguf(Path(folder) / "m.gguf", **cleaned)
        survives(path)


def _truncate(content: bytes, data: st.DataObject) -> bytes:
    return content[: data.draw(st.integers(0, max(0, len(content) - 1)))]


def _change(content: bytes, data: st.DataObject) -> bytes:
    changed = bytearray(content)
    for at in data.draw(st.lists(st.integers(0, min(len(content), 3000) - 1), max_size=8)):
        changed[at] = data.draw(st.integers(0, 255))
    return bytes(changed)


def _replace(_: bytes, data: st.DataObject) -> bytes:
    return data.draw(st.binary(max_size=64) | st.text(max_size=64).map(str.encode))


@FUZZ
@given(
    file=st.sampled_from(["config.json", "tokenizer.json", INDEX, FIRST_SHARD]),
    damage=st.sampled_from([_truncate, _change, _replace]),
    data=st.data(),
)
def test_damaged_folder(
    file: str, damage: Callable[[bytes, st.DataObject], bytes], data: st.DataObject
) -> None:
    files = small_folder()
    with tempfile.TemporaryDirectory() as folder:
        _put(Path(folder), files | {file: damage(files[file], data)})
        survives(Path(folder))


@pytest.mark.parametrize(
    "header",
    [
        "{}",
        "[]",
        "{" * 1000,
        '{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,17]}}',
        '{"a":{"dtype":"F32","shape":[4],"data_offsets":[8,0]}}',
        '{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,99999999999999]}}',
        '{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,16]}}',
        '{"a":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}',
        '{"a":{"dtype":"X9","shape":[4],"data_offsets":[0,16]}}',
        '{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
        '"b":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    ],
)
def test_hostile_safetensors_header(tmp_path: Path, header: str) -> None:
    _put(tmp_path, small_folder())
    (tmp_path / INDEX).unlink()
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    for size in (len(header), 0, 2**40, 2**63, 2**64 - 1):
        content = struct.pack("<Q", size) + header.encode() + bytes(16)
        (tmp_path / WEIGHTS).write_bytes(content)
        with pytest.raises(CheckpointError):
            read_everything(tmp_path)


def test_truncated_shards(tmp_path: Path) -> None:
    files = small_folder()
    whole = files[SECOND_SHARD]
    _put(tmp_path, files)
    for size in itertools.chain(range(0, 2500, 7), range(2500, len(whole), 4999)):
        (tmp_path / SECOND_SHARD).write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=SECOND_SHARD):
            open_checkpoint(tmp_path)


def _put(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
