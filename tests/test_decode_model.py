"""Random work on a small model and a pool that is too small, against the model without a cache.

After every step each slot that holds no token is spoiled: in one run with NaN, in one with 1e4.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from models import (
    NAN,
    PATHS,
    RUBBISH,
    assert_equal_logits,
    dense,
    odd,
    paged_cache,
    poison,
    snapshot,
    used,
)

from labcore.blocks import OutOfBlocks, blocks_needed
from labcore.decode import forward_paged_decode, prefill_packed, prefill_paged

VOCABULARY, POSITIONS = 53, 64  # more than 9 blocks of 5 can hold, and a prompt
TOKENS = st.integers(0, VOCABULARY - 1)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=9)
CHUNKS = st.sampled_from([None, 1, 3, 4])


class DecodeAgainstDense(RuleBasedStateMachine):
    """`texts` is the model: the tokens of each sequence. `waiting` holds those of the preempted."""

    spoil = NAN

    @initialize(num_blocks=st.integers(4, 9), block_size=st.integers(1, 5), order=st.randoms())
    def start(self, num_blocks, block_size, order):
        self.model = odd(n_positions=POSITIONS)
        ids = order.sample(range(num_blocks), num_blocks)
        self.kv = paged_cache(self.model, num_blocks, block_size, ids)
        self.where = self.kv.keys.data_ptr(), self.kv.values.data_ptr()
        self.texts, self.waiting, self.next_id = {}, [], 0
        self.admit_whole(self.new_id(), [1, 2, 3], None)

    def new_id(self):
        self.next_id += 1
        return self.next_id

    def one(self, data):
        return data.draw(st.sampled_from(sorted(self.texts)))

    def grow(self, growth, call):
        """All of {seq_id: tokens} is stored and its logits are right, or nothing changes."""
        tables, before = self.kv.tables, snapshot(self.kv)
        needed = tables.blocks_to_append({s: len(tokens) for s, tokens in growth.items()})
        free = tables.allocator.num_free
        try:
            logits = call()
        except OutOfBlocks:
            assert needed > free
            assert snapshot(self.kv) == before
            return False
        assert free - tables.allocator.num_free == needed
        for row, (seq_id, tokens) in zip(logits, growth.items(), strict=True):
            self.texts[seq_id] += tokens
            assert_equal_logits(row, dense(self.model, self.texts[seq_id])[-1])
        return True

    def prefill(self, seq_id, tokens, chunk):
        def call():
            return prefill_paged(self.model, self.kv, seq_id, tokens, chunk)[None]

        return self.grow({seq_id: tokens}, call)

    def admit_whole(self, seq_id, tokens, chunk):
        """Come in with all tokens, or not at all."""
        self.kv.tables.add(seq_id)
        self.texts[seq_id] = []
        if not self.prefill(seq_id, tokens, chunk):
            self.kv.tables.drop(seq_id)
            del self.texts[seq_id]

    @rule(tokens=PROMPTS, chunk=CHUNKS)
    def admit(self, tokens, chunk):
        self.admit_whole(self.new_id(), tokens, chunk)

    @rule(prompts=st.lists(PROMPTS, min_size=2, max_size=3))
    def admit_together(self, prompts):
        growth = {self.new_id(): tokens for tokens in prompts}
        for seq_id in growth:
            self.kv.tables.add(seq_id)
            self.texts[seq_id] = []
        if not self.grow(growth, lambda: prefill_packed(self.model, self.kv, growth)):
            for seq_id in growth:
                self.kv.tables.drop(seq_id)
                del self.texts[seq_id]

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=PROMPTS, chunk=CHUNKS)
    def continue_a_text(self, data, tokens, chunk):
        self.prefill(self.one(data), tokens, chunk)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), path=st.sampled_from(sorted(PATHS)))
    def decode(self, data, path):
        rows = data.draw(st.lists(st.sampled_from(sorted(self.texts)), min_size=1, unique=True))
        growth = {seq_id: [data.draw(TOKENS)] for seq_id in rows}
        tokens = [token for (token,) in growth.values()]

        def call():
            return forward_paged_decode(self.model, self.kv, rows, tokens, PATHS[path])

        self.grow(growth, call)

    @precondition(lambda self: self.texts)
    @rule(token=TOKENS, path=st.sampled_from(sorted(PATHS)))
    def decode_all(self, token, path):
        growth = {seq_id: [(token + seq_id) % VOCABULARY] for seq_id in reversed(self.texts)}
        tokens = [token for (token,) in growth.values()]

        def call():
            return forward_paged_decode(self.model, self.kv, list(growth), tokens, PATHS[path])

        self.grow(growth, call)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data):
        parent, child, before = self.one(data), self.new_id(), used(self.kv)
        self.kv.tables.fork(parent, child)
        self.texts[child] = list(self.texts[parent])
        assert used(self.kv) == before

    @precondition(lambda self: len(self.texts) > 1)
    @rule(data=st.data())
    def drop(self, data):
        seq_id = self.one(data)
        self.kv.tables.drop(seq_id)
        del self.texts[seq_id]

    @precondition(lambda self: len(self.texts) > 1)
    @rule()
    def preempt_the_newest(self):
        seq_id, text = self.texts.popitem()
        self.kv.tables.drop(seq_id)
        self.waiting.append(text)

    @precondition(lambda self: self.waiting)
    @rule(chunk=CHUNKS)
    def recompute(self, chunk):
        tokens = self.waiting[0]
        seq_id = self.new_id()
        self.admit_whole(seq_id, tokens, chunk)
        if seq_id in self.texts:
            self.waiting.pop(0)

    @invariant()
    def everything_adds_up_and_what_nobody_owns_is_spoiled(self):
        tables = self.kv.tables
        tables.check_invariants()
        assert (self.kv.keys.data_ptr(), self.kv.values.data_ptr()) == self.where
        assert {s: tables.num_tokens(s) for s in self.texts} == dict(
            zip(self.texts, map(len, self.texts.values()), strict=True)
        )
        for seq_id, text in self.texts.items():
            needed = blocks_needed(len(text), tables.block_size)
            assert len(tables.block_table(seq_id)) == needed
        poison(self.kv, self.spoil)

    def teardown(self):
        """Whoever is still there reads one more token right; then every block comes back."""
        for seq_id in list(self.texts):
            if self.kv.tables.can_append(seq_id):
                self.prefill(seq_id, [seq_id % VOCABULARY], None)
            self.kv.tables.drop(seq_id)
        assert used(self.kv) == 0


class DecodeAgainstDenseInRecycledSlots(DecodeAgainstDense):
    spoil = RUBBISH


SETTINGS = settings(max_examples=50, stateful_step_count=25, deadline=None)
TestDecodeAgainstDense = DecodeAgainstDense.TestCase
TestDecodeAgainstDense.settings = SETTINGS
TestDecodeAgainstDenseInRecycledSlots = DecodeAgainstDenseInRecycledSlots.TestCase
TestDecodeAgainstDenseInRecycledSlots.settings = SETTINGS
