"""Blocks of preempted sequences in the host's memory, until there is room on the device again."""

from collections.abc import Hashable
from itertools import chain

import torch

from labcore.admission import Admission
from labcore.blocks import BlockAllocator, blocks_needed
from labcore.caches import PagedKV


class HostPool:
    """Room in the host's memory for `num_blocks` blocks of a `PagedKV`, each sequence whole.

    Blocks that it shares are copied, and are its own from then on.
    Source: Kwon et al. 2023, section 4.5; vLLM v0 did this, v1 does not. Built in: ch08b
    """

    def __init__(self, kv: PagedKV, num_blocks: int) -> None:
        self.kv, self.allocator = kv, BlockAllocator(num_blocks)
        shape = (len(kv.keys), num_blocks, *kv.keys.shape[2:])
        self.keys = torch.empty(shape, dtype=kv.keys.dtype)
        self.values = torch.empty(shape, dtype=kv.keys.dtype)
        self.tables: dict[Hashable, list[int]] = {}
        self.num_tokens: dict[Hashable, int] = {}

    def has_room(self, seq_id: Hashable) -> bool:
        """Whether the blocks that hold its tokens fit into what is free here. Raises KeyError."""
        return len(self._used(seq_id)) <= self.allocator.num_free

    def swap_out(self, seq_id: Hashable) -> None:
        """Move a sequence from the device. Raises OutOfBlocks, KeyError, ValueError."""
        if seq_id in self.tables:
            raise ValueError(f"sequence {seq_id!r} is in the host's memory already")
        used, num_tokens = self._used(seq_id), self.kv.tables.num_tokens(seq_id)
        table = self.allocator.allocate_many(len(used))
        try:
            for here, there in ((self.keys, self.kv.keys), (self.values, self.kv.values)):
                here[:, table] = there[:, used].cpu()
            self.kv.tables.drop(seq_id)
        except BaseException:  # Ctrl-C, say: it stays where it is
            self.allocator.free_many(reversed(table))
            raise
        self.tables[seq_id], self.num_tokens[seq_id] = table, num_tokens

    def can_return(self, seq_id: Hashable, lookahead: int = 0) -> Admission:
        """Whether it fits on the device now with `lookahead` more tokens, or ever. KeyError."""
        allocator, block_size = self.kv.tables.allocator, self.kv.tables.block_size
        needed = blocks_needed(self.num_tokens[seq_id] + lookahead, block_size)
        if needed > allocator.num_blocks:
            return Admission.NEVER
        return Admission.OK if needed <= allocator.num_free else Admission.LATER

    def swap_in(self, seq_id: Hashable) -> None:
        """Move it back. Raises OutOfBlocks, KeyError, ValueError if the device has one so named."""
        table, tables = self.tables[seq_id], self.kv.tables
        tables.add(seq_id, self.num_tokens[seq_id])
        try:
            used = tables.block_table(seq_id)
            for here, there in ((self.keys, self.kv.keys), (self.values, self.kv.values)):
                there[:, used] = here[:, table].to(there.device)
        except BaseException:
            tables.drop(seq_id)
            raise
        self.forget(seq_id)

    def forget(self, seq_id: Hashable) -> None:
        """Give up what is stored here of a sequence. Raises KeyError."""
        self.allocator.free_many(reversed(self.tables.pop(seq_id)))
        del self.num_tokens[seq_id]

    def check_invariants(self) -> None:
        """Assert that each block here is free or one sequence's, and that tables fit lengths."""
        self.allocator.check_invariants()
        held = list(chain.from_iterable(self.tables.values()))
        assert len(held) == len(set(held)), self.tables
        assert len(held) + self.allocator.num_free == self.allocator.num_blocks, self.tables
        for seq_id, table in self.tables.items():
            assert len(table) == blocks_needed(self.num_tokens[seq_id], self.kv.tables.block_size)

    def _used(self, seq_id):
        """The device's blocks that hold a token; reserved ones stay behind."""
        tables = self.kv.tables
        used = blocks_needed(tables.num_tokens(seq_id), tables.block_size)
        return tables.block_table(seq_id)[:used]
