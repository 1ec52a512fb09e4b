"""Blocks of preempted sequences in the host's memory, until there is room on the device again."""

from collections.abc import Hashable

import torch

from labcore.admission import Admission
from labcore.blocks import BlockAllocator, BlockTables, blocks_needed
from labcore.caches import PagedKV


class HostPool:
    """Room in the host's memory for `num_blocks` blocks of a `PagedKV`, each sequence whole.

    `tables` say who is here: drop whoever will not return. Blocks that a sequence shares on the
    device are copied, and are its own from then on.
    Source: Kwon et al. 2023, section 4.5; vLLM v0 did this, v1 does not. Built in: ch08b
    """

    def __init__(self, kv: PagedKV, num_blocks: int) -> None:
        self.kv = kv
        self.tables = BlockTables(BlockAllocator(num_blocks), kv.tables.block_size)
        shape = (len(kv.keys), num_blocks, *kv.keys.shape[2:])
        self.keys = torch.empty(shape, dtype=kv.keys.dtype)
        self.values = torch.empty(shape, dtype=kv.keys.dtype)

    def has_room(self, seq_id: Hashable) -> bool:
        """Whether the blocks that hold its tokens fit into what is free here. Raises KeyError."""
        needed = blocks_needed(self.kv.tables.num_tokens(seq_id), self.tables.block_size)
        return needed <= self.tables.allocator.num_free

    def can_return(self, seq_id: Hashable, lookahead: int = 0) -> Admission:
        """Whether it fits on the device now with `lookahead` more tokens, or ever. KeyError."""
        allocator = self.kv.tables.allocator
        needed = blocks_needed(self.tables.num_tokens(seq_id) + lookahead, self.tables.block_size)
        if needed > allocator.num_blocks:
            return Admission.NEVER
        return Admission.OK if needed <= allocator.num_free else Admission.LATER

    def swap_out(self, seq_id: Hashable) -> None:
        """Move a sequence here. Raises OutOfBlocks, KeyError, ValueError if it is here."""
        move(seq_id, self.kv, self)

    def swap_in(self, seq_id: Hashable) -> None:
        """Move it back. Raises OutOfBlocks, KeyError, ValueError if the device has one so named."""
        move(seq_id, self, self.kv)

    def check_invariants(self) -> None:
        """Assert that each block here is free or one sequence's, and that tables fit lengths."""
        self.tables.check_invariants()


def move(seq_id: Hashable, source: PagedKV | HostPool, target: PagedKV | HostPool) -> None:
    """Copy the blocks that hold a sequence's tokens, then drop it at the source.

    Blocks that are reserved and empty stay behind. Raises OutOfBlocks, KeyError, ValueError; after
    any error the sequence is where it was. Cost: its blocks, over the link. Built in: ch08b
    """
    target.tables.add(seq_id, source.tables.num_tokens(seq_id))
    try:
        new = target.tables.block_table(seq_id)
        old = source.tables.block_table(seq_id)[: len(new)]
        for there, here in ((target.keys, source.keys), (target.values, source.values)):
            there[:, new] = here[:, old].to(there.device)
        source.tables.drop(seq_id)
    except BaseException:  # no memory for a copy, or Ctrl-C
        target.tables.drop(seq_id)
        raise
