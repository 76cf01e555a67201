"""KV operations of a plan on a backend's storage, and what makes two storages the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from headrace.runtime.core import KvCopy, KvOp, KvRead, KvRelease
from headrace.runtime.manifest import MANIFEST_FILE, TargetInfo, package_path


class KvSlots(Protocol):
    """Slots of keys and values; what a slot's bytes mean is the storage's own business."""

    def release(self, slot: int) -> None: ...

    def copy(self, source: int, target: int, num_tokens: int) -> None: ...

    def read(self, slot: int, num_tokens: int) -> bytes: ...

    def write(self, slot: int, num_tokens: int, data: bytes) -> None: ...


def apply_kv_ops(slots: KvSlots, ops: Iterable[KvOp]) -> tuple[bytes, ...]:
    """Carry operations out in their order; what reads among them hand out."""
    reads = []
    for op in ops:
        if isinstance(op, KvRelease):
            slots.release(op.slot)
        elif isinstance(op, KvCopy):
            slots.copy(op.source, op.target, op.num_tokens)
        elif isinstance(op, KvRead):
            reads.append(slots.read(op.slot, op.num_tokens))
        else:
            slots.write(op.slot, op.num_tokens, op.data)
    return tuple(reads)


def kv_identity(folder: Path, target: TargetInfo) -> str:
    """`Capabilities.kv_identity`: the manifest has digests of all files and the cache's layout."""
    manifest = package_path(folder, MANIFEST_FILE).read_bytes()
    return f"{target.device} {target.name} {hashlib.sha256(manifest).hexdigest()}"
