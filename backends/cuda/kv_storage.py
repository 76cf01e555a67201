"""Keys and values on the device, and what a slot's tokens are as bytes.

One piece of memory holds, for each layer, keys and then values, each `[blocks, block_tokens,
kv_heads, head_dim]` float16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.backends.cuda.blocks import BlockCopy, BlockPool
from headrace.backends.cuda.device import Device

_HALF_BYTES = 2


class KvStorage:
    """A pool of blocks and the memory that they lie in.

    Attributes:
        shape: of keys or values of a layer.
        addresses: of keys of layer 0, values of layer 0, keys of layer 1, ...

    Raises:
        BackendError: the device has not enough memory.
    """

    def __init__(
        self, device: Device, pool: BlockPool, *, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> None:
        self.pool = pool
        self.shape = (pool.num_blocks, pool.block_tokens, num_kv_heads, head_dim)
        self._device = device
        self._token_bytes = num_kv_heads * head_dim * _HALF_BYTES
        self._block_bytes = pool.block_tokens * self._token_bytes
        part_bytes = pool.num_blocks * self._block_bytes
        self._memory: int | None = device.allocate(2 * num_layers * part_bytes)
        self.addresses = [self._memory + i * part_bytes for i in range(2 * num_layers)]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        size = self._block_bytes
        for copy in copies:
            for part in self.addresses:
                self._device.copy(part + copy.source * size, part + copy.target * size, size)

    def release(self, slot: int) -> None:
        """The slot holds nothing any more."""
        self.pool.release(slot)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Let `target` hold the first positions of `source`: the blocks are shared."""
        self.pool.share(source, target, num_tokens)

    def read(self, slot: int, num_tokens: int) -> bytes:
        """The first positions of a slot, [layers, 2, num_tokens, kv_heads, head_dim]."""
        assert num_tokens <= self.pool.held_tokens(slot)
        return b"".join(
            self._device.read(address, size) for address, size in self._pieces(slot, num_tokens)
        )

    def write(self, slot: int, num_tokens: int, data: bytes) -> None:
        """Let a slot hold what `read` gave.

        Raises:
            BackendError: the pool has not enough blocks; the slot is empty then.
        """
        self.pool.release(slot)
        self.pool.write(slot, 0, num_tokens)
        done = 0
        for address, size in self._pieces(slot, num_tokens):
            self._device.write(address, data[done : done + size])
            done += size
        assert done == len(data)

    def close(self) -> None:
        """Give the memory back."""
        if self._memory is not None:
            self._device.release(self._memory)
        self._memory = None

    def _pieces(self, slot: int, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Address and bytes of a slot's first tokens: part by part, block by block."""
        blocks = self.pool.table(slot)[: -(-num_tokens // self.pool.block_tokens)]
        for part in self.addresses:
            for i, block in enumerate(blocks):
                here = min(self.pool.block_tokens, num_tokens - i * self.pool.block_tokens)
                yield part + block * self._block_bytes, here * self._token_bytes
