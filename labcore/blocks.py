"""Blocks of KV cache: who owns them, and which tokens they hold.

A call that fails changes nothing; free blocks and those in use add up to the pool.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from itertools import chain, islice
from operator import index

NEVER_USED = -1  # the count of a block that was never handed out


class OutOfBlocks(Exception):
    """More blocks were asked for than are free. Built in: ch02"""


class DoubleFree(Exception):
    """A reference was used or given up that nobody holds. Built in: ch02"""


class UnknownBlock(Exception):
    """No block of this pool, or one that was never handed out. Built in: ch02"""


class BlockAllocator:
    """A pool of equal blocks: a stack of free ones, and for each block the number of its holders.

    Raises ValueError for no blocks. Source: Kwon et al. 2023, sections 4.2 and 4.4.  Built in: ch02
    """

    def __init__(self, num_blocks: int) -> None:
        if type(num_blocks) is not int or num_blocks < 1:
            raise ValueError(f"a pool has at least 1 block, got {num_blocks!r}")
        self.num_blocks = num_blocks
        self._free_ids = list(range(num_blocks - 1, -1, -1))  # pop() hands out block 0 first
        self._ref_counts = [NEVER_USED] * num_blocks

    @property
    def num_free(self) -> int:
        """The number of blocks that can be allocated now. O(1)."""
        return len(self._free_ids)

    def ref_count(self, block_id: int) -> int:
        """The number of holders of a block, 0 if it is free. O(1). Raises UnknownBlock."""
        self._check_id(block_id)
        return max(self._ref_counts[block_id], 0)

    def allocate(self) -> int:
        """Take one block, which then has one holder. O(1). Raises OutOfBlocks."""
        if not self._free_ids:
            raise OutOfBlocks(f"need 1 block, 0 of {self.num_blocks} are free")
        block_id = self._free_ids.pop()
        self._ref_counts[block_id] = 1
        return block_id

    def allocate_many(self, n: int) -> list[int]:
        """Take `n` blocks or none, in single calls' order. O(n). OutOfBlocks, ValueError."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > self.num_free:
            raise OutOfBlocks(f"need {n} blocks, {self.num_free} of {self.num_blocks} are free")
        first = len(self._free_ids) - n
        block_ids = self._free_ids[first:]
        block_ids.reverse()
        del self._free_ids[first:]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def retain(self, block_id: int) -> None:
        """Add a holder to a block in use. O(1). Raises as `free`."""
        self._check_held([block_id])
        self._hold([block_id])

    def free(self, block_id: int) -> None:
        """Give up one reference; the last frees the block. Raises DoubleFree, UnknownBlock."""
        self.free_many([block_id])

    def free_many(self, block_ids: Iterable[int]) -> None:
        """Give up one reference for each id named, or none at all. O(n). Raises as `free`."""
        block_ids = list(block_ids)
        self._check_held(block_ids)
        self._give_up(block_ids)

    def check_invariants(self) -> None:
        """Assert that each block is either on the free list, once, or held. O(num_blocks)."""
        unheld = [i for i, count in enumerate(self._ref_counts) if count < 1]
        assert sorted(self._free_ids) == unheld, f"free {self._free_ids}, without holder {unheld}"

    def _check_id(self, block_id: int) -> None:
        if type(block_id) is not int or not 0 <= block_id < self.num_blocks:
            raise UnknownBlock(f"no block {block_id!r} in a pool of {self.num_blocks}")

    def _check_held(self, block_ids: list[int]) -> None:
        num_blocks, ref_counts = self.num_blocks, self._ref_counts
        for block_id in block_ids:
            if type(block_id) is not int or not 0 <= block_id < num_blocks:
                self._check_id(block_id)
            if ref_counts[block_id] < 1:
                if ref_counts[block_id] == NEVER_USED:
                    raise UnknownBlock(f"block {block_id} was never handed out")
                raise DoubleFree(f"block {block_id} has 0 holders")
        if len(set(block_ids)) < len(block_ids):
            for block_id, times in Counter(block_ids).items():
                if times > (held := ref_counts[block_id]):
                    raise DoubleFree(f"block {block_id}: named {times} times, held {held}")

    def _hold(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self._ref_counts[block_id] += 1

    def _give_up(self, block_ids: list[int]) -> None:
        ref_counts, free_ids = self._ref_counts, self._free_ids
        for block_id in block_ids:
            ref_counts[block_id] = count = ref_counts[block_id] - 1
            if count == 0:
                free_ids.append(block_id)


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens` tokens: the quotient, rounded up. Built in: ch03"""
    full, rest = divmod(num_tokens, block_size)
    return full + (rest > 0)


def plan_growth(
    tables: "BlockTables", growth: Mapping[Hashable, int]
) -> tuple[dict[Hashable, int], dict[Hashable, int], int]:
    """What `append_all(growth)` will do: the logical block that each sequence copies first, the new
    blocks that each needs, and the free blocks that all this takes. Changes nothing.

    Of n writers that alone share a block, n - 1 copy. Raises KeyError, ValueError.  Built in: ch03
    """
    copying, new_blocks, leaving = {}, {}, Counter()
    for seq_id, n in growth.items():
        stored, table = tables.num_tokens(seq_id), tables._tables[seq_id]
        needed = blocks_needed(stored + _count(n), tables.block_size)
        new_blocks[seq_id] = max(0, needed - len(table))
        logical, offset = divmod(stored, tables.block_size)
        if n > 0 and offset > 0:  # a write into a block that holds tokens
            shared = table[logical]
            if tables.allocator.ref_count(shared) - leaving[shared] > 1:
                copying[seq_id] = logical
                leaving[shared] += 1
    return copying, new_blocks, len(copying) + sum(new_blocks.values())


class BlockTables:
    """For each sequence a table: its logical block i is the physical block table[i].

    `num_tokens` counts the tokens whose keys and values are stored. Who writes into a block shared
    by a `fork` gets a copy first: such calls return (source, destination) pairs, which the caller
    copies, in all layers, before it writes. Source: Kwon et al. 2023, sections 4.3 and 4.4.
    Built in: ch03
    """

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        if type(block_size) is not int or block_size < 1:
            raise ValueError(f"block_size is at least 1, got {block_size!r}")
        self.allocator = allocator
        self.block_size = block_size
        self._tables: dict[Hashable, list[int]] = {}
        self._num_tokens: dict[Hashable, int] = {}

    def seq_ids(self) -> list[Hashable]:
        """The sequences that have a table, oldest first."""
        return list(self._tables)

    def num_tokens(self, seq_id: Hashable) -> int:
        """How many tokens a sequence has stored. O(1). Raises KeyError."""
        if seq_id not in self._tables:
            raise KeyError(f"no sequence {seq_id!r}")
        return self._num_tokens[seq_id]

    def block_table(self, seq_id: Hashable) -> list[int]:
        """A copy of a sequence's table. O(len(table)). Raises KeyError."""
        self.num_tokens(seq_id)  # raises KeyError if there is none
        return list(self._tables[seq_id])

    def add(self, seq_id: Hashable, num_tokens: int = 0) -> None:
        """Start a sequence with `num_tokens` stored tokens. Raises OutOfBlocks, ValueError."""
        self._check_new(seq_id)
        num_blocks = blocks_needed(_count(num_tokens), self.block_size)
        block_ids = self.allocator.allocate_many(num_blocks)
        self._num_tokens[seq_id] = index(num_tokens)
        self._tables[seq_id] = block_ids  # last: Ctrl-C leaves no table without a length

    def append(self, seq_id: Hashable, n: int = 1) -> list[tuple[int, int]]:
        """Count `n` more tokens as stored; return the copies to make before they are written.

        O(1) for one token, else O(blocks). Raises OutOfBlocks, KeyError, ValueError.
        """
        stored = self._num_tokens.get(seq_id)
        if n != 1 or stored is None:
            return self.append_all({seq_id: n})
        table, logical = self._tables[seq_id], stored // self.block_size
        if logical == len(table):
            table.append(self.allocator.allocate())
        elif self.allocator._ref_counts[table[logical]] > 1:
            return self.append_all({seq_id: 1})
        self._num_tokens[seq_id] = stored + 1
        return []

    def append_all(self, growth: Mapping[Hashable, int]) -> list[tuple[int, int]]:
        """`append` for several sequences, {seq_id: n}: all of them grow, or none does."""
        copies = self.reserve_all(growth)
        for seq_id, n in growth.items():
            self._num_tokens[seq_id] += index(n)
        return copies

    def reserve(self, seq_id: Hashable, num_tokens: int) -> list[tuple[int, int]]:
        """As `append`, but no token is stored yet: a later append then needs no block."""
        return self.reserve_all({seq_id: num_tokens})

    def reserve_all(self, growth: Mapping[Hashable, int]) -> list[tuple[int, int]]:
        """`reserve` for several sequences, {seq_id: n}: all find their blocks, or none does."""
        copying, new_blocks, total = plan_growth(self, growth)
        fresh = iter(self.allocator.allocate_many(total))
        copies = []
        for seq_id, n in new_blocks.items():
            table = self._tables[seq_id]
            if seq_id in copying:
                logical = copying[seq_id]
                copies.append((table[logical], next(fresh)))
                self.allocator.free(table[logical])
                table[logical] = copies[-1][1]
            table.extend(islice(fresh, n))
        return copies

    def blocks_to_append(self, growth: Mapping[Hashable, int]) -> int:
        """How many free blocks `append_all(growth)` takes, those for copies included."""
        return plan_growth(self, growth)[-1]

    def can_append(self, seq_id: Hashable, n: int = 1) -> bool:
        """Whether `append` would find its blocks; changes nothing."""
        return self.blocks_to_append({seq_id: n}) <= self.allocator.num_free

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Give `child` the parent's blocks that hold tokens, without copying any. O(len(table)).

        Cannot run out of blocks; room that the parent has reserved stays its own, but its next
        write may need a copy. Raises KeyError, ValueError.
        """
        num_tokens = self.num_tokens(parent)
        self._check_new(child)
        num_blocks = blocks_needed(num_tokens, self.block_size)
        shared = self._tables[parent][:num_blocks]
        self.allocator._hold(shared)
        self._num_tokens[child] = num_tokens
        self._tables[child] = shared

    def drop(self, seq_id: Hashable) -> None:
        """End a sequence; its last block is freed first. Raises KeyError, DoubleFree."""
        table = self.block_table(seq_id)
        if not all(map(self.allocator._ref_counts.__getitem__, table)):
            raise DoubleFree(f"{seq_id!r} holds {table}, one of them free")
        self.allocator._give_up(table[::-1])
        del self._tables[seq_id], self._num_tokens[seq_id]

    def slot(self, seq_id: Hashable, position: int) -> int:
        """block_id * block_size + offset of a token. O(1). Raises KeyError, IndexError."""
        stored, position = self.num_tokens(seq_id), index(position)
        if not 0 <= position < stored:
            raise IndexError(f"position {position} of {stored} tokens")
        logical, offset = divmod(position, self.block_size)
        return self._tables[seq_id][logical] * self.block_size + offset

    def slot_mapping(self, seq_id: Hashable, start: int = 0, stop: int | None = None) -> list[int]:
        """The slots of positions `start` to `stop` (all that are stored), in order."""
        stored = self.num_tokens(seq_id)  # raises KeyError if there is none
        stop = stored if stop is None else stop
        return [self.slot(seq_id, position) for position in range(start, stop)]

    def check_invariants(self) -> None:
        """Assert that counts equal holders, and that tables fit lengths. O(pool + tables)."""
        self.allocator.check_invariants()
        holders = Counter(chain.from_iterable(self._tables.values()))
        for block_id in range(self.allocator.num_blocks):
            count = self.allocator.ref_count(block_id)
            assert count == holders[block_id], (block_id, count, holders)
        for seq_id, table in self._tables.items():
            used = blocks_needed(self._num_tokens[seq_id], self.block_size)
            assert used <= len(table) == len(set(table)), (seq_id, table)
            assert all(holders[b] == 1 for b in table[used:]), (seq_id, table)

    def _check_new(self, seq_id):
        if seq_id in self._tables:
            raise ValueError(f"sequence {seq_id!r} exists")


def undo_reserve(tables: BlockTables, before: Mapping[Hashable, list[int]]) -> None:
    """Give sequences back the tables from before a `reserve_all`. O(blocks). Built in: ch05"""
    for seq_id, old in reversed(before.items()):
        taken, tables._tables[seq_id] = tables._tables[seq_id], list(old)
        tables.allocator._hold(old)
        tables.allocator._give_up(taken[::-1])


def _count(n: int) -> int:
    if index(n) < 0:
        raise ValueError(f"a number of tokens cannot be negative, got {n}")
    return index(n)
