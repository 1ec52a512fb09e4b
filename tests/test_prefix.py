"""Prefix caching: what is found, what is evicted and in which order, and that counts add up."""

import importlib.util
import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bookkit.traces import HitRate, read_trace, replay
from labcore.blocks import BlockAllocator, BlockTables, DoubleFree, OutOfBlocks, UnknownBlock
from labcore.prefix import PrefixCache, full_blocks
from labcore.workloads import Workload, from_pairs

STRANGE = iter(range(10**6, 10**9))  # tokens that nobody has used


def strangers(n):
    return [next(STRANGE) for _ in range(n)]


def make(num_blocks, block_size):
    cache = PrefixCache(num_blocks)
    return cache, BlockTables(cache, block_size)


def run(tables, seq_id, tokens):
    """What a request does: adopt, store the rest, publish; the tokens found."""
    cache = tables.allocator
    hit = cache.adopt(tables, seq_id, tokens)
    try:
        tables.append(seq_id, len(tokens) - hit)
    except OutOfBlocks:
        tables.drop(seq_id)
        raise
    cache.publish(tables, seq_id, tokens)
    tables.check_invariants()
    return hit


def test_tables_over_another_pool_are_refused_and_neither_pool_changes():
    (cache, tables), (_, others) = make(8, 4), make(8, 4)
    run(tables, "s", [1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="another pool's"):
        cache.adopt(others, "t", [1, 2, 3, 4, 5])
    assert others.seq_ids() == []
    cache.check_invariants()
    others.check_invariants()


def end(tables, *seq_ids):
    for seq_id in seq_ids:
        tables.drop(seq_id)
        tables.check_invariants()


def counts(tables):
    return tuple(tables.allocator.counts().values())


def state(tables):
    cache = tables.allocator
    held = [(s, tables.block_table(s), tables.num_tokens(s)) for s in tables.seq_ids()]
    known = dict(cache._blocks), dict(cache._entries), list(cache._reusable)
    return list(cache._free_ids), list(cache._ref_counts), held, known, cache.hits, cache.queries


# What is found


def test_a_shared_beginning_is_found_and_the_rest_computed():
    """Ids depend on the free list; the order, free ones and then the least recent, does not.

    Source: vllm-project/vllm tests/v1/core/test_prefix_caching.py
    """
    cache, tables = make(10, 16)
    shared = list(range(48))
    assert run(tables, 0, shared + strangers(7)) == 0
    assert run(tables, 1, shared + strangers(5)) == 48
    assert tables.block_table(0) == [0, 1, 2, 3]
    assert tables.block_table(1) == [0, 1, 2, 4]
    assert [cache.ref_count(i) for i in range(5)] == [2, 2, 2, 1, 1]
    assert counts(tables) == (5, 0, 5)
    end(tables, 0, 1)
    assert counts(tables) == (0, 3, 7)
    assert run(tables, 2, shared + strangers(5)) == 48
    assert tables.block_table(2) == [0, 1, 2, 4]
    end(tables, 2)
    assert run(tables, 3, strangers(160)) == 0
    assert tables.block_table(3) == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]
    assert (cache.hits, cache.queries) == (96, 55 + 53 + 53 + 160)


def test_the_sequence_that_ended_first_is_evicted_first_and_its_last_block_before_its_first():
    """Source: vllm-project/vllm tests/v1/core/test_prefix_caching.py"""
    _, tables = make(10, 16)
    run(tables, "a", strangers(87))  # blocks 0 to 5, the last one not full
    run(tables, "b", strangers(48))  # 6, 7, 8
    end(tables, "a", "b")
    tables.add("c", 160)
    assert tables.block_table("c") == [5, 9, 4, 3, 2, 1, 0, 8, 7, 6]


def test_after_one_eviction_the_beginning_of_a_chain_is_still_found():
    """Source: NVIDIA/Megatron-LM PR #5822. With the first block evicted first, nothing would be."""
    cache, tables = make(4, 2)
    chain = [1, 2, 3, 4, 5, 6]
    run(tables, "chain", chain)
    end(tables, "chain")
    for name in "ab":
        run(tables, name, strangers(2))
        end(tables, name)
    assert cache.match(tables, [*chain, 7]) == [0, 1]


def test_a_hit_makes_a_chain_the_most_recently_used():
    cache, tables = make(6, 2)
    for tokens, order in (([1, 2, 3, 4], [1, 0]), ([5, 6, 7, 8], [1, 0, 3, 2])):
        run(tables, "s", tokens)
        end(tables, "s")
        assert list(cache._reusable) == order
    assert run(tables, "s", [1, 2, 3, 4, 9]) == 4
    assert list(cache._reusable) == [3, 2]
    end(tables, "s")
    assert list(cache._reusable) == [3, 2, 1, 0]


def test_looking_changes_nothing_not_even_the_order():
    cache, tables = make(4, 2)
    for tokens in ([1, 2, 3, 4], [5, 6]):
        run(tables, "s", tokens)
        end(tables, "s")
    before = state(tables)
    assert cache.match(tables, [1, 2, 3, 4, 9]) == [0, 1]
    assert cache.match(tables, [9, 9, 9]) == cache.match(tables, []) == []
    assert state(tables) == before


@pytest.mark.parametrize(("tokens", "found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_at_least_one_token_is_left_to_compute(tokens, found):
    _, tables = make(8, 4)
    text = list(range(12))
    run(tables, "s", text)
    end(tables, "s")
    assert run(tables, "t", text[:tokens]) == found


def test_the_same_tokens_after_another_beginning_are_another_block():
    """Source: vllm-project/vllm, tests of the n-th block's hash"""
    cache, tables = make(8, 4)
    run(tables, "s", [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.match(tables, [5, 6, 7, 8, 9]) == []
    assert cache.match(tables, [9, 9, 9, 9, 5, 6, 7, 8, 1]) == []
    assert cache.match(tables, [1, 2, 3, 4, 5, 6, 7, 9, 9]) == [0]  # one token ends the chain
    assert run(tables, "t", [5, 6, 7, 8, 1, 2, 3, 4]) == 0
    assert cache.match(tables, [5, 6, 7, 8, 1, 2, 3, 4, 0]) == [2, 3]


@pytest.mark.parametrize(
    ("tokens", "size", "found"), [(5, 2, 4), (6, 4, 4), (15, 16, 0), (1, 1, 1)]
)
def test_only_full_blocks_are_kept(tokens, size, found):
    """Source: sglang, radix cache page tests"""
    cache, tables = make(16, size)
    text = list(range(tokens))
    run(tables, "s", text)
    end(tables, "s")
    assert cache.counts()["reusable"] == found // size
    assert cache.adopt(tables, "t", [*text, -1]) == found
    assert b"".join(map(bytes, full_blocks(text, size))) == bytes(text[:found])


def test_240_shared_tokens_in_blocks_of_784_give_no_hit_and_the_report_says_why():
    """Source: vllm-project/vllm #54607, #53749"""
    _, tables = make(8, 784)
    shared = list(range(240))
    assert [run(tables, i, shared + strangers(600)) for i in range(2)] == [0, 0]
    trace = Workload("two", [240, 240], [1, 1], prefix_ids=((7,), (7,)))
    rate = replay(trace, 8, 784, hash_block_size=784)
    assert str(rate) == "0.0%: 0 of 2 blocks of 784 tokens; only full ones are shared"
    assert replay(trace, 99, 16, hash_block_size=784) == HitRate(14, 30, 16)  # 14 of 15, twice 15


def test_a_text_of_the_same_length_with_other_ids_is_not_found():
    """The second turn of a chat, tokenised anew. Source: kekzl/imp PR #2037"""
    cache, tables = make(8, 4)
    run(tables, "first turn", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(cache.match(tables, [1, 2, 3, 4, 5, 67, 0, 8, 9])) == 1


# What is evicted


@pytest.mark.parametrize(("num_blocks", "size"), [(1, 16), (2, 2)])
def test_a_block_that_was_used_again_is_not_found_under_its_old_tokens(num_blocks, size):
    """Source: GeeeekExplorer/nano-vllm #163; vllm-project/vllm PR #4761"""
    cache, tables = make(num_blocks, size)
    p, q = strangers(num_blocks * size), strangers(num_blocks * size)
    for tokens in (p, q):
        assert run(tables, "s", tokens) == 0
        assert len(cache._blocks) == num_blocks
        end(tables, "s")
    assert cache.match(tables, [*p, 1]) == []
    assert len(cache.match(tables, [*q, 1])) == num_blocks
    assert [content for _, content in cache._blocks] == list(full_blocks(q, size))


def test_the_beginning_that_replaces_an_evicted_one_has_no_children():
    """Block 0 is given up by hand before block 1, so the parent goes first and leaves a child."""
    cache, tables = make(2, 2)
    run(tables, "s", [1, 2, 3, 4])
    tables._tables["s"].reverse()
    end(tables, "s")
    assert list(cache._reusable) == [0, 1]
    run(tables, "t", [1, 2])
    assert tables.block_table("t") == [0]
    assert cache.match(tables, [1, 2, 3, 4, 5]) == [0]  # not [0, 1]


def test_free_blocks_go_out_before_any_is_evicted_and_a_refusal_evicts_none():
    cache, tables = make(4, 2)
    run(tables, "s", [1, 2, 3, 4])
    end(tables, "s")
    assert cache.num_free == 4
    assert cache.allocate() == 2
    before = state(tables)
    for refused in (lambda: cache.allocate_many(4), lambda: tables.add("big", 8)):
        with pytest.raises(OutOfBlocks, match="need 4 blocks, 3 of 4 are free"):
            refused()
    with pytest.raises(ValueError, match="-1"):
        cache.allocate_many(-1)
    assert cache.allocate_many(0) == []
    assert state(tables) == before
    assert cache.allocate_many(2) == [3, 1]
    assert cache.allocate() == 0
    with pytest.raises(OutOfBlocks, match="need 1 block, 0 of 4"):
        cache.allocate()


def test_a_reusable_block_has_no_holder():
    cache, tables = make(2, 2)
    run(tables, "s", [1, 2])
    end(tables, "s")
    assert cache.ref_count(0) == 0
    for call in (cache.retain, cache.free):
        with pytest.raises(DoubleFree, match="block 0 has 0 holders"):
            call(0)
        with pytest.raises(UnknownBlock):
            call(1)
    assert counts(tables) == (0, 1, 1)


def test_without_anything_published_it_hands_out_what_the_plain_pool_does():
    plain, cached = (BlockTables(pool(9), 2) for pool in (BlockAllocator, PrefixCache))
    for tables in (plain, cached):
        tables.add("a", 5)
        tables.add("b", 4)
        tables.fork("a", "c")
        tables.append("c", 3)
        tables.drop("b")
        tables.append("a")
        tables.drop("a")
    assert cached.allocator._free_ids == plain.allocator._free_ids
    assert cached.block_table("c") == plain.block_table("c")
    assert cached.allocator.counts() == {"in use": 4, "reusable": 0, "free": 5}


# Counts


def test_in_use_reusable_and_free_are_counted_apart():
    """What was called a leak of a block a request. Source: kekzl/imp #1115 and its end, PR #1120"""
    cache, tables = make(200, 16)
    for reusable in (48, 96):
        for _ in range(24):
            assert run(tables, "s", strangers(33)) == 0
            end(tables, "s")
        assert counts(tables) == (0, reusable, 200 - reusable)
        assert cache.num_free == 200
    assert (cache.hits, cache.queries) == (0, 48 * 33)


def test_clearing_forgets_only_what_nobody_uses():
    """Source: sgl-project/sglang #35270, #6778 and its radix cache's unit tests"""
    cache, tables = make(10, 4)
    shared = strangers(8)
    run(tables, "ends", shared + strangers(5))
    run(tables, "runs", shared + strangers(3))
    end(tables, "ends")
    assert counts(tables) == (3, 1, 6)
    cache.clear()
    assert counts(tables) == (3, 0, 7)
    tables.check_invariants()
    assert cache.match(tables, [*shared, 1]) == tables.block_table("runs")[:2] == [0, 1]
    end(tables, "runs")
    assert counts(tables) == (0, 2, 8)


# Two of the same


def test_of_two_that_compute_the_same_one_gives_its_blocks_up_for_the_other_s():
    """Both come in before either is computed. Source: GeeeekExplorer/nano-vllm #208, #219, #243"""
    cache, tables = make(12, 16)
    prompt = strangers(40)
    for name in "AB":
        assert cache.adopt(tables, name, prompt) == 0
        tables.append(name, 40)
    assert (tables.block_table("A"), tables.block_table("B")) == ([0, 1, 2], [3, 4, 5])
    for name in "AB":
        cache.publish(tables, name, prompt)
        tables.check_invariants()
    assert tables.block_table("B") == [0, 1, 5]
    assert len(cache._blocks) == 2
    assert counts(tables) == (4, 0, 8)
    end(tables, "A", "B")
    assert counts(tables) == (0, 2, 10)
    assert run(tables, "C", prompt) == 32


def test_a_prompt_of_whole_blocks_shares_the_last_one_too_once_it_is_computed():
    cache, tables = make(8, 4)
    prompt = strangers(8)
    run(tables, "first", prompt)
    assert cache.adopt(tables, "second", prompt) == 4
    tables.append("second", 4)
    assert tables.block_table("second") == [0, 2]
    cache.publish(tables, "second", prompt)
    assert tables.block_table("second") == tables.block_table("first") == [0, 1]
    assert counts(tables) == (2, 0, 6)


def test_a_fork_keeps_its_own_blocks_when_the_other_side_changes_to_known_ones():
    """Blocks 2 and 3 are forked before anybody knows them. Their content is known as 0 by then.

    So p's table becomes 0, 3, and block 3 is known after 0. When 0 is evicted, nobody finds 3: it
    is known again when c, which has held it all along, publishes.
    """
    cache, tables = make(6, 2)
    text = [1, 2, 3, 4]
    run(tables, "known", text[:2])
    tables.add("p", 4)
    tables.fork("p", "c")
    assert tables.block_table("c") == [1, 2]
    cache.publish(tables, "p", text)
    assert (tables.block_table("p"), tables.block_table("c")) == ([0, 2], [1, 2])
    tables.check_invariants()
    end(tables, "known", "p")
    cache.clear()
    assert cache.match(tables, [*text, 5]) == []
    cache.publish(tables, "c", text)
    tables.check_invariants()
    assert cache.match(tables, [*text, 5]) == [1, 2]
    end(tables, "c")
    assert counts(tables) == (0, 2, 4)


def test_a_block_nobody_finds_any_more_is_free_once_its_text_has_another():
    cache, tables = make(6, 2)
    text = [1, 2, 3, 4]
    run(tables, "known", text[:2])
    tables.add("p", 4)
    tables.fork("p", "c")
    cache.publish(tables, "p", text)
    end(tables, "known", "p")
    cache.clear()
    run(tables, "again", text)
    cache.publish(tables, "c", text)
    assert tables.block_table("c") == tables.block_table("again")
    assert counts(tables) == (2, 0, 4)
    tables.check_invariants()


# Writing


def test_a_write_behind_adopted_blocks_copies_nothing():
    """Full blocks are never written to, so sharing them costs no copy."""
    _, tables = make(8, 4)
    prompt = strangers(9)
    run(tables, "a", prompt)
    run(tables, "b", prompt)
    assert tables.blocks_to_append({"a": 1, "b": 1}) == 0
    assert tables.append_all({"a": 1, "b": 1}) == []
    assert tables.block_table("a")[:2] == tables.block_table("b")[:2]


def test_a_fork_of_an_adopted_sequence_copies_its_last_block_and_no_other():
    _, tables = make(8, 4)
    prompt = strangers(9)
    run(tables, "a", prompt)
    run(tables, "b", prompt)
    tables.fork("b", "c")
    assert tables.append("c") == [(3, 4)]
    assert tables.append("b") == []
    assert tables.block_table("c") == [0, 1, 4]
    tables.check_invariants()
    end(tables, "a", "b", "c")
    assert counts(tables) == (0, 2, 6)


# Refusals


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c, t: c.adopt(t, "s", [1, 2, 9]), ValueError, "'s' exists"),
        (lambda c, t: c.publish(t, "nobody", [1]), KeyError, "nobody"),
        (lambda c, t: c.publish(t, "s", [1, 2, 3, 4, 5, 6]), ValueError, "6 tokens of 's', 5 are"),
        (lambda c, t: c.publish(t, "s", [1, 2, 3, 9]), ValueError, "block 1 of 's' was published"),
        (lambda c, t: c.publish(t, "s", [9, 2, 3, 4]), ValueError, "block 0 of 's' was published"),
    ],
)
def test_a_call_that_is_refused_changes_nothing(call, error, message):
    cache, tables = make(4, 2)
    run(tables, "s", [1, 2, 3, 4, 5])
    run(tables, "old", [7, 8])
    end(tables, "old")
    before = state(tables)
    with pytest.raises(error, match=message):
        call(cache, tables)
    assert state(tables) == before


# Random operations against a model that knows each prefix by all of its tokens

TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class PrefixCacheAgainstContents(RuleBasedStateMachine):
    """`known` is the model: {all tokens from the first one on: block}. `slots` is a memory.

    `lost` are blocks that keep a key nobody can reach, since a block before them was evicted;
    `idle` are blocks that keep their contents and have no holder, the least recently used first.
    """

    @initialize(num_blocks=st.integers(1, 8), block_size=st.integers(1, 3))
    def start(self, num_blocks, block_size):
        self.cache, self.tables = make(num_blocks, block_size)
        self.texts, self.slots, self.known, self.lost, self.idle = {}, {}, {}, set(), []
        self.names = iter(range(10**6))

    def prefixes(self, text):
        size = self.tables.block_size
        return [tuple(text[: i + size]) for i in range(0, len(text) - size + 1, size)]

    def forget(self, block_id):
        self.idle.remove(block_id)
        self.lost.discard(block_id)
        for prefix in [p for p, block in self.known.items() if block == block_id]:
            del self.known[prefix]
            behind = [p for p in self.known if p[: len(prefix)] == prefix]
            self.lost |= {self.known.pop(p) for p in behind}

    def hold(self, block_ids):
        self.idle = [block_id for block_id in self.idle if block_id not in block_ids]

    def give_up(self, block_id):
        """Called before the table changes: of its holders one leaves."""
        kept = block_id in self.lost or block_id in self.known.values()
        if self.cache.ref_count(block_id) == 1 and kept:
            return [block_id]
        return []

    def grow(self, seq_id, tokens):
        needed = self.tables.blocks_to_append({seq_id: len(tokens)})
        evicted = max(0, needed - self.cache.counts()["free"])
        try:
            copies = self.tables.append(seq_id, len(tokens))
        except OutOfBlocks:
            assert needed > self.cache.num_free
            return False
        for block_id in self.idle[:evicted]:
            self.forget(block_id)
        size = self.tables.block_size
        for source, target in copies:
            for offset in range(size):
                self.slots[target * size + offset] = self.slots.get(source * size + offset)
        for token in tokens:
            slot = self.tables.slot(seq_id, len(self.texts[seq_id]))
            self.slots[slot] = token
            self.texts[seq_id].append(token)
        return True

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.texts)))

    @rule(text=TEXTS, published=st.booleans())
    def add(self, text, published):
        seq_id, expected = next(self.names), []
        for prefix in self.prefixes(text[:-1]):
            if prefix not in self.known:
                break
            expected.append(self.known[prefix])
        assert self.cache.match(self.tables, text) == expected
        hit = self.cache.adopt(self.tables, seq_id, text)
        assert self.tables.block_table(seq_id) == expected
        assert hit == len(expected) * self.tables.block_size < len(text)
        self.texts[seq_id] = text[:hit]
        self.hold(expected)
        if not self.grow(seq_id, text[hit:]):
            self.leave(seq_id)
        elif published:
            self.announce(seq_id, text)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=4))
    def append(self, data, tokens):
        self.grow(self.pick(data), tokens)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def publish(self, data):
        seq_id = self.pick(data)
        stored = self.texts[seq_id]
        self.announce(seq_id, stored[: data.draw(st.integers(0, len(stored)))])

    def announce(self, seq_id, text):
        table = self.tables.block_table(seq_id)
        for logical, prefix in enumerate(self.prefixes(text)):
            own, known = table[logical], self.known.get(prefix)
            if known != own:
                self.lost.discard(own)
            table[logical] = self.known.setdefault(prefix, own)
            self.hold([table[logical]])
        self.cache.publish(self.tables, seq_id, text)
        assert self.tables.block_table(seq_id) == table

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data):
        parent, child = self.pick(data), next(self.names)
        self.tables.fork(parent, child)
        self.texts[child] = list(self.texts[parent])

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def drop(self, data):
        self.leave(self.pick(data))

    def leave(self, seq_id):
        for block_id in reversed(self.tables.block_table(seq_id)):
            self.idle += self.give_up(block_id)
        self.tables.drop(seq_id)
        del self.texts[seq_id]

    @rule()
    def clear(self):
        self.cache.clear()
        for block_id in self.idle.copy():
            self.forget(block_id)

    @invariant()
    def the_cache_knows_what_the_model_knows(self):
        self.tables.check_invariants()
        assert list(self.cache._reusable) == self.idle
        assert self.cache._entries.keys() == self.lost | set(self.known.values())
        in_use = {i for s in self.texts for i in self.tables.block_table(s)}
        assert self.cache.counts()["in use"] == len(in_use)
        assert sum(self.cache.counts().values()) == self.cache.num_blocks
        assert self.cache.num_free == self.cache.num_blocks - len(in_use)

    @invariant()
    def everybody_reads_his_own_tokens(self):
        for seq_id, text in self.texts.items():
            assert [self.slots[slot] for slot in self.tables.slot_mapping(seq_id)] == text


TestPrefixCacheAgainstContents = PrefixCacheAgainstContents.TestCase
TestPrefixCacheAgainstContents.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None
)


# Traces


def trace(*requests):
    """(prompt, ids) pairs."""
    prompts, ids = zip(*requests, strict=True)
    return Workload("trace", prompts, [1] * len(prompts), prefix_ids=ids)


def test_a_trace_without_prefix_ids_does_not_report_0_percent():
    """Source: Azure/AzurePublicDataset #53"""
    assert str(replay(from_pairs([(40, 4), (40, 4)]), 100)) == "not known from this trace"


def test_a_hit_of_one_id_is_as_many_blocks_as_it_stands_for():
    """512 + 8 tokens; then the same id, and another one behind it: 32 blocks of 16 are found."""
    two = trace((520, (1, 2)), (600, (1, 3)))
    assert replay(two, 1_000) == HitRate(32, 33 + 38, 16)
    assert replay(two, 1_000, block_size=512) == HitRate(1, 4, 512)
    assert (
        str(replay(two, None)) == "45.1%: 32 of 71 blocks of 16 tokens; only full ones are shared"
    )


def test_a_prompt_of_whole_blocks_computes_its_last_one_again():
    assert replay(trace((64, (1,)), (64, (1,))), 8) == HitRate(3, 8, 16)


def test_a_small_pool_forgets_what_a_large_one_finds():
    """Two conversations take turns: 3 blocks each, then 4. In 4 blocks 1 of 3 is left."""
    turns = trace((48, (1,)), (48, (2,)), (64, (1,)), (64, (2,)))
    assert replay(turns) == replay(turns, 8) == HitRate(6, 14, 16)
    assert replay(turns, 6) == HitRate(5, 14, 16)
    assert replay(turns, 4) == HitRate(1, 14, 16)


def test_a_prompt_larger_than_the_pool_and_sizes_that_do_not_divide_are_refused():
    with pytest.raises(OutOfBlocks, match="need 4 blocks, 3 of 3"):
        replay(trace((64, (1,))), 3)
    with pytest.raises(ValueError, match="24 tokens do not divide one of 512"):
        replay(trace((64, (1,))), 3, 24)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        replay(trace((64, (1,))), 3, 0)


@pytest.mark.skipif("LABCORE_TRACES" not in os.environ, reason="needs the real traces")
def test_the_ideal_hit_rate_of_the_mooncake_conversations_is_36_6_percent():
    path = Path(os.environ["LABCORE_TRACES"]) / "mooncake" / "conversation_trace.jsonl"
    ideal = replay(read_trace(path, max_context=None), None, 512)
    assert ideal == HitRate(105_592, 288_500, 512)
    assert str(ideal).startswith("36.6%: ")


# The benchmark


def test_what_the_benchmark_times_is_a_hit_of_64_blocks_and_a_miss_that_evicts_64():
    path = Path(__file__).resolve().parent.parent / "benchmarks" / "prefix.py"
    spec = importlib.util.spec_from_file_location("benchmark_prefix", path)
    prefix = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prefix)
    hit, miss, tables = prefix.our_calls(256)
    assert counts(tables) == (0, 256, 0)
    before = list(tables.allocator._reusable)
    assert hit() == prefix.yardstick_hit(256)() == 64 * 16
    assert list(tables.allocator._reusable) == before  # the last used is used again
    miss()
    assert list(tables.allocator._reusable)[:192] == before[64:]
    assert counts(tables) == (0, 256, 0)
    times = prefix.measure((64, 128), repeats=1)
    assert {len(by_size) for by_size in times.values()} == {2}
