"""Prefix caching: prompts that begin alike share blocks, and blocks outlive their sequence.

A `PrefixCache` is a pool that remembers what its full blocks hold. An `Engine` uses it if the pool
of its `PagedKV` is one; there is no other switch::

    kv = PagedKV(model.config, num_blocks=64, block_size=16, allocator=PrefixCache)
    cache = kv.tables.allocator
    hit = cache.adopt(kv.tables, "Ana", ids)  # starts Ana with the blocks of cache.match(...)
    prefill_packed(model, kv, {"Ana": ids[hit:]})  # at least one token is always computed
    cache.publish(kv.tables, "Ana", ids)  # stored now, so others may find the full blocks
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, count

from labcore.blocks import BlockAllocator, BlockTables

ROOT = 0  # the node before every first block


class PrefixCache(BlockAllocator):
    """A pool in which a block that nobody holds keeps its contents until the room is needed.

    A block is in use, reusable or free. When no free one is left, the reusable one that was used
    least recently is evicted. A block is known by the node before it and its tokens, compared and
    not merely hashed; nodes are numbers that never come again. `hits` of `queries` tokens were
    found so far.
    Source: vLLM v1, which keys by a chain of hashes.  Built in: ch09b
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.hits = self.queries = 0
        self._blocks: dict[tuple, int] = {}  # key, which is (node before, tokens): block
        self._entries: dict[int, tuple[int, tuple]] = {}  # block: (its node, its key)
        self._reusable: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._new_nodes = count(ROOT + 1)

    @property
    def num_free(self) -> int:
        """The number of blocks that can be allocated now: free and reusable ones. O(1)."""
        return len(self._free_ids) + len(self._reusable)

    def counts(self) -> dict[str, int]:
        """How many blocks are in use, reusable and free; they add up to the pool. O(1)."""
        reusable, free = len(self._reusable), len(self._free_ids)
        return {"in use": self.num_blocks - reusable - free, "reusable": reusable, "free": free}

    def match(self, tables: BlockTables, tokens: Sequence[Hashable]) -> list[int]:
        """The blocks of the longest known beginning, never of all: one token is left to compute."""
        found, node = [], ROOT
        for content in full_blocks(tokens[:-1], tables.block_size):
            if (block_id := self._blocks.get((node, content))) is None:
                break
            found.append(block_id)
            node = self._entries[block_id][0]
        return found

    def adopt(self, tables: BlockTables, seq_id: Hashable, tokens: Sequence[Hashable]) -> int:
        """Start a new sequence with the blocks that `match`; the tokens in them. ValueError."""
        if tables.allocator is not self:
            raise ValueError(f"the tables for {seq_id!r} are another pool's")
        found = self.match(tables, tokens)
        tables.add(seq_id)
        self._hold(found)
        tables._tables[seq_id] = found
        tables._num_tokens[seq_id] = hit = len(found) * tables.block_size
        self.hits, self.queries = self.hits + hit, self.queries + len(tokens)
        return hit

    def publish(self, tables: BlockTables, seq_id: Hashable, tokens: Sequence[Hashable]) -> None:
        """Let others find the full blocks of a sequence's first tokens, which must be stored.

        A block whose content has a block already is given up for that one. Raises KeyError, and
        ValueError for tokens that are not stored, or that contradict those published before.
        """
        if len(tokens) > (stored := tables.num_tokens(seq_id)):
            raise ValueError(f"{len(tokens)} tokens of {seq_id!r}, {stored} are stored")
        contents, table = list(full_blocks(tokens, tables.block_size)), tables._tables[seq_id]
        for block_id, content in zip(table, contents, strict=False):
            if block_id in self._entries and self._entries[block_id][1][1] != content:
                raise ValueError(f"block {block_id} of {seq_id!r} was published with other tokens")
        node = ROOT
        for logical, content in enumerate(contents):
            own, known = table[logical], self._blocks.get((node, content))
            if known != own:
                self._forget(own)  # it may be known after a block that was evicted since
            if known is None:
                self._blocks[node, content] = known = own
                self._entries[own] = next(self._new_nodes), (node, content)
            elif known != own:
                self._hold([known])
                table[logical] = known
                self._give_up([own])
            node = self._entries[known][0]

    def clear(self) -> None:
        """Make all reusable blocks free; those in use stay known. O(num_blocks)."""
        self._evict(len(self._reusable))

    def allocate(self) -> int:
        """Take one block. O(1). Raises OutOfBlocks."""
        self._evict(1 - len(self._free_ids))
        return super().allocate()

    def allocate_many(self, n: int) -> list[int]:
        """Take `n` blocks or none: free ones, then evicted ones. O(n). Raises as the pool does."""
        self._evict(n - len(self._free_ids))
        return super().allocate_many(n)

    def check_invariants(self) -> None:
        """Assert that a block is in one class, and that a key has one block. O(num_blocks)."""
        unheld = [i for i, holders in enumerate(self._ref_counts) if holders < 1]
        assert sorted(chain(self._free_ids, self._reusable)) == unheld, (self.counts(), unheld)
        keys = {key: block_id for block_id, (_, key) in self._entries.items()}
        assert keys == self._blocks, (keys, self._blocks)
        assert self._reusable.keys() <= self._entries.keys(), self._reusable
        assert self._entries.keys().isdisjoint(self._free_ids), (self._free_ids, self._entries)

    def _evict(self, n):
        """Make `n` reusable blocks free, to be handed out after those that are; or none."""
        if 0 < n <= len(self._reusable):
            evicted = [self._reusable.popitem(last=False)[0] for _ in range(n)]
            for block_id in evicted:
                self._forget(block_id)
            self._free_ids[:0] = reversed(evicted)

    def _forget(self, block_id):
        _, key = self._entries.pop(block_id, (None, None))
        self._blocks.pop(key, None)

    def _hold(self, block_ids):
        for block_id in block_ids:
            self._reusable.pop(block_id, None)
        super()._hold(block_ids)

    def _give_up(self, block_ids):
        for block_id in block_ids:
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if block_id in self._entries:
                    self._reusable[block_id] = None
                else:
                    self._free_ids.append(block_id)


def full_blocks(tokens: Sequence[Hashable], block_size: int) -> Iterator[tuple]:
    """The tokens of each full block: what is left over cannot be shared. Built in: ch09b"""
    for end in range(block_size, len(tokens) + 1, block_size):
        yield tuple(tokens[end - block_size : end])


def start(tables: BlockTables, seq_id: Hashable, tokens: Sequence[Hashable]) -> int:
    """`adopt`; in a pool that knows nothing the sequence starts empty, and 0 is found. Given."""
    if isinstance(tables.allocator, PrefixCache):
        return tables.allocator.adopt(tables, seq_id, tokens)
    tables.add(seq_id)
    return 0


def publish(tables: BlockTables, seq_id: Hashable, tokens: Sequence[Hashable]) -> None:
    """`PrefixCache.publish`; in a pool that knows nothing, nothing. Given."""
    if isinstance(tables.allocator, PrefixCache):
        tables.allocator.publish(tables, seq_id, tokens)


def known_in_use(tables: BlockTables, tokens: Sequence[Hashable]) -> int:
    """How many of the blocks that `match` are in use: whoever adopts those takes no room. Given."""
    pool = tables.allocator
    found = pool.match(tables, tokens) if isinstance(pool, PrefixCache) else []
    return sum(pool.ref_count(block_id) > 0 for block_id in found)
