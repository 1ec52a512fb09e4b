"""Random operations on BlockTables against a model that keeps every token of everyone."""

import math
from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from labcore.blocks import BlockAllocator, BlockTables, OutOfBlocks

AMOUNTS = st.integers(0, 9)


class TablesAgainstTokens(RuleBasedStateMachine):
    """`texts` is the model: each sequence's tokens. `slots` is a cache, kept as the tables say."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def start(self, num_blocks, block_size):
        self.tables = BlockTables(BlockAllocator(num_blocks), block_size)
        self.texts, self.slots = {}, {}
        self.next_id, self.next_token = 0, 0

    def carry_out(self, copies):
        size = self.tables.block_size
        for src, dst in copies:
            for offset in range(size):
                self.slots[dst * size + offset] = self.slots.get(src * size + offset)

    def write(self, seq_id, n):
        start = len(self.texts[seq_id])
        for position in range(start, start + n):
            self.slots[self.tables.slot(seq_id, position)] = self.next_token
            self.texts[seq_id].append(self.next_token)
            self.next_token += 1

    def snapshot(self):
        tables = {s: (self.tables.block_table(s), self.tables.num_tokens(s)) for s in self.texts}
        return tables, list(self.tables.allocator._free_ids)

    def grow(self, growth):
        """All of the group grows, or nothing changes; what it takes was foretold."""
        needed, before = self.tables.blocks_to_append(growth), self.snapshot()
        free = self.tables.allocator.num_free
        try:
            copies = self.tables.append_all(growth)
        except OutOfBlocks:
            assert needed > free
            assert self.snapshot() == before
            return
        assert free - self.tables.allocator.num_free == needed
        self.carry_out(copies)
        for seq_id, n in growth.items():
            self.write(seq_id, n)

    @rule(n=AMOUNTS)
    def add(self, n):
        before = self.snapshot()
        try:
            self.tables.add(self.next_id, n)
        except OutOfBlocks:
            assert self.snapshot() == before
            assert self.next_id not in self.tables.seq_ids()
            return
        self.texts[self.next_id] = []
        self.write(self.next_id, n)
        self.next_id += 1

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), n=AMOUNTS)
    def append(self, data, n):
        self.grow({data.draw(st.sampled_from(sorted(self.texts))): n})

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def append_one(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.texts)))
        possible, before = self.tables.can_append(seq_id), self.snapshot()
        try:
            self.carry_out(self.tables.append(seq_id))
        except OutOfBlocks:
            assert not possible
            assert self.snapshot() == before
            return
        assert possible
        self.write(seq_id, 1)

    @precondition(lambda self: len(self.texts) > 1)
    @rule(data=st.data())
    def append_to_a_group(self, data):
        members = st.lists(st.sampled_from(sorted(self.texts)), min_size=2, unique=True)
        self.grow({seq_id: data.draw(st.integers(0, 3)) for seq_id in data.draw(members)})

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), n=AMOUNTS)
    def reserve(self, data, n):
        seq_id, before = data.draw(st.sampled_from(sorted(self.texts))), self.snapshot()
        try:
            self.carry_out(self.tables.reserve(seq_id, n))
        except OutOfBlocks:
            assert self.snapshot() == before
            return
        free = self.tables.allocator.num_free
        assert self.tables.append(seq_id, n) == []
        assert self.tables.allocator.num_free == free
        self.write(seq_id, n)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def reserve_and_leave_open(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.texts)))
        if self.tables.blocks_to_append({seq_id: 4}) <= self.tables.allocator.num_free:
            self.carry_out(self.tables.reserve(seq_id, 4))

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(sorted(self.texts)))
        free = self.tables.allocator.num_free
        self.tables.fork(parent, self.next_id)
        assert self.tables.allocator.num_free == free
        self.texts[self.next_id] = list(self.texts[parent])
        self.next_id += 1

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def drop(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.texts)))
        self.tables.drop(seq_id)
        del self.texts[seq_id]

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for seq_id, text in self.texts.items():
            assert [self.slots[slot] for slot in self.tables.slot_mapping(seq_id)] == text

    @invariant()
    def counts_equal_holders_and_nothing_is_lost(self):
        self.tables.check_invariants()
        allocator, holders = self.tables.allocator, Counter()
        for seq_id, text in self.texts.items():
            table = self.tables.block_table(seq_id)
            assert len(table) >= math.ceil(len(text) / self.tables.block_size)
            holders.update(table)
        assert allocator.num_free == allocator.num_blocks - len(holders)
        assert all(allocator.ref_count(b) == holders[b] for b in range(allocator.num_blocks))

    def teardown(self):
        for seq_id in list(self.texts):
            self.tables.drop(seq_id)
        assert self.tables.allocator.num_free == self.tables.allocator.num_blocks


TestTablesAgainstTokens = TablesAgainstTokens.TestCase
TestTablesAgainstTokens.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
