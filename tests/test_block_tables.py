"""BlockTables: slots, growth around the block boundary, forks and copy on write."""

import itertools

import pytest

from labcore.blocks import BlockAllocator, BlockTables, DoubleFree, OutOfBlocks, blocks_needed


def make_tables(num_blocks, block_size):
    return BlockTables(BlockAllocator(num_blocks), block_size)


def state(tables):
    """Everything a failed call could have changed."""
    allocator = tables.allocator
    return (
        {s: (tables.block_table(s), tables.num_tokens(s)) for s in tables.seq_ids()},
        [allocator.ref_count(b) for b in range(allocator.num_blocks)],
        list(allocator._free_ids),
    )


class Contents:
    """What a cache holds: one token a slot, copied and written as BlockTables says."""

    def __init__(self, tables):
        self.tables, self.slots = tables, {}

    def append(self, seq_id, text):
        stored, size = self.tables.num_tokens(seq_id), self.tables.block_size
        copies = self.tables.append(seq_id, len(text))
        for src, dst in copies:
            for offset in range(size):
                self.slots[dst * size + offset] = self.slots.get(src * size + offset)
        for position, token in enumerate(text, start=stored):
            self.slots[self.tables.slot(seq_id, position)] = token
        return copies

    def read(self, seq_id):
        return "".join(self.slots[slot] for slot in self.tables.slot_mapping(seq_id))


def test_blocks_needed_rounds_up():
    assert [blocks_needed(n, 16) for n in (0, 1, 15, 16, 17, 129)] == [0, 1, 1, 1, 2, 9]


def test_sizes_and_appends():
    """Source: vllm-project/vllm, tests/core/block/test_block_table.py"""
    for num_tokens, blocks in ((1, 1), (16, 1), (129, 9)):
        tables = make_tables(1024, 16)
        tables.add("s", num_tokens)
        assert len(tables.block_table("s")) == blocks
    tables = make_tables(1024, 16)
    for seq_id in range(5):
        tables.add(seq_id, 129)
    assert tables.allocator.num_free == 979
    for start, more in itertools.product((1, 16, 129), repeat=2):
        tables = make_tables(1024, 8)
        tables.add("s", start)
        free = tables.allocator.num_free
        assert tables.append("s", more) == []
        added = blocks_needed(start + more, 8) - blocks_needed(start, 8)
        assert free - tables.allocator.num_free == added


def test_room_reserved_ahead_is_filled_without_another_block():
    """Source: vllm-project/vllm, tests/core/block/test_block_table.py"""
    for start, more in itertools.product((1, 16, 129), repeat=2):
        tables = make_tables(1024, 8)
        tables.add("s", start)
        tables.reserve("s", more)
        free = tables.allocator.num_free
        assert tables.num_tokens("s") == start
        for _ in range(more):
            tables.append("s")
            tables.check_invariants()
        assert tables.allocator.num_free == free


@pytest.mark.parametrize("block_size", [16, 256])
def test_a_block_is_taken_when_the_count_already_stored_is_a_multiple(block_size):
    """Source: GeeeekExplorer/nano-vllm #240, #65, #66"""
    tables = make_tables(4, block_size)
    tables.add("s", block_size)
    assert len(tables.block_table("s")) == 1
    for stored in range(block_size, 2 * block_size + 1):
        before = len(tables.block_table("s"))
        tables.append("s")
        assert len(tables.block_table("s")) - before == (stored % block_size == 0)
    assert tables.num_tokens("s") == 2 * block_size + 1
    assert len(tables.block_table("s")) == 3


def test_room_left_in_the_last_block_counts_and_a_refusal_leaks_nothing():
    """Source: inference-sim/inference-sim #492, #200"""
    for num_blocks, more in ((2, 5), (1, 2)):
        tables = make_tables(num_blocks, 4)
        tables.add("s", 2)
        tables.append("s", more)
        assert tables.allocator.num_free == 0
    tables = make_tables(2, 4)
    tables.add("s", 2)
    before = state(tables)
    with pytest.raises(OutOfBlocks, match="need 2 blocks, 1 of 2 are free"):
        tables.append("s", 9)
    assert state(tables) == before

    tables = make_tables(2, 4)
    tables.add("s", 3)
    tables.add("filler", 4)
    tables.append("s")
    before = state(tables)
    assert not tables.can_append("s")
    with pytest.raises(OutOfBlocks):
        tables.append("s")
    assert state(tables) == before

    tables = make_tables(3, 4)
    with pytest.raises(OutOfBlocks, match="need 5 blocks, 3 of 3"):
        tables.add("long", 17)
    assert tables.seq_ids() == []
    assert tables.allocator.num_free == 3


def test_what_runs_out_is_blocks_not_tokens():
    """Source: sgl-project/sglang #4602, #6731, #6671"""
    tables = make_tables(5, 16)
    for seq_id in "abc":
        tables.add(seq_id, 16)
    growth = dict.fromkeys("abc", 1)
    assert tables.blocks_to_append(growth) == 3
    before = state(tables)
    with pytest.raises(OutOfBlocks, match="need 3 blocks, 2 of 5"):
        tables.append_all(growth)
    assert state(tables) == before
    assert tables.append_all({"a": 1, "b": 1}) == []


def test_slots_follow_the_table():
    tables = make_tables(4, 4)
    for _ in range(3):
        tables.allocator.allocate()
    tables.add("s", 4)
    tables.allocator.free_many([0, 1])
    tables.append("s", 2)
    assert tables.block_table("s") == [3, 1]
    assert tables.slot_mapping("s") == [12, 13, 14, 15, 4, 5]
    assert tables.slot_mapping("s", 3, 5) == [15, 4]
    assert tables.slot("s", 5) == 5
    for position in (-1, 6):
        with pytest.raises(IndexError, match="6 tokens"):
            tables.slot("s", position)


def test_tables_of_one_block_each_taken_from_the_end_of_a_pool():
    """Source: Dao-AILab/flash-attention #1314; tspeterkim/paged-attention-minimal #3"""
    tables = make_tables(128, 16)
    tables.allocator.allocate_many(128)
    tables.allocator.free_many([125, 126, 127])
    for seq_id in range(3):
        tables.add(seq_id, 5)
    assert [tables.block_table(s) for s in range(3)] == [[127], [126], [125]]


def test_a_block_table_is_a_copy():
    tables = make_tables(4, 4)
    tables.add("s", 4)
    tables.block_table("s").append(99)
    assert tables.block_table("s") == [0]


@pytest.mark.parametrize("length", [1, 9, 129])
@pytest.mark.parametrize("first", ["parent", "child"])
def test_a_fork_costs_nothing_and_either_side_may_leave_first(length, first):
    """Source: vllm-project/vllm, tests/core/block/test_block_table.py"""
    tables = make_tables(1024, 8)
    contents = Contents(tables)
    tables.add("parent")
    text = "".join(chr(97 + i % 26) for i in range(length))
    contents.append("parent", text)
    free = tables.allocator.num_free
    tables.fork("parent", "child")
    assert tables.allocator.num_free == free
    tables.drop(first)
    assert tables.allocator.num_free == free
    other = {"parent": "child", "child": "parent"}[first]
    for filler in range(10):  # the pool turns over
        tables.add(filler)
        contents.append(filler, "x" * 600)
        tables.drop(filler)
    assert contents.read(other) == text
    tables.drop(other)
    assert tables.allocator.num_free == 1024


@pytest.mark.parametrize("writer", ["parent", "child"])
@pytest.mark.parametrize(
    ("length", "new_blocks"), [(1, (1, 3, 17)), (16, (1, 2, 17)), (129, (1, 3, 17))]
)
def test_fork_then_append_on_either_side(length, new_blocks, writer):
    """Source: vllm-project/vllm, test_cpu_gpu_block_allocator.py, test_block_manager.py"""
    for more, expected in zip((1, 16, 129), new_blocks, strict=True):
        tables = make_tables(1024, 8)
        tables.add("parent", length)
        tables.fork("parent", "child")
        quiet = {"parent": "child", "child": "parent"}[writer]
        quiet_table, free = tables.block_table(quiet), tables.allocator.num_free
        assert tables.blocks_to_append({writer: more}) == expected
        copies = tables.append(writer, more)
        assert free - tables.allocator.num_free == expected
        assert len(copies) == (length % 8 != 0)
        assert all(src == quiet_table[-1] != dst for src, dst in copies)
        assert tables.block_table(quiet) == quiet_table
        tables.check_invariants()
        tables.drop(writer)
        tables.drop(quiet)
        assert tables.allocator.num_free == 1024


def test_a_fork_of_a_fork_before_anyone_writes():
    """Source: nanvix/nanvix #2512, PR #2515"""
    tables = make_tables(6, 4)
    contents = Contents(tables)
    tables.add("a")
    contents.append("a", "prefix")
    original = tables.block_table("a")
    tables.fork("a", "b")
    tables.fork("b", "c")
    assert [tables.allocator.ref_count(block_id) for block_id in original] == [3, 3]
    assert [len(contents.append(s, s.upper())) for s in "cba"] == [1, 1, 0]
    assert tables.block_table("a") == original
    assert tables.allocator.num_free == 2
    assert [contents.read(s) for s in "abc"] == ["prefixA", "prefixB", "prefixC"]
    for seq_id in "bca":
        tables.drop(seq_id)
    assert tables.allocator.num_free == 6


@pytest.mark.parametrize("order", ["cp", "pc"])
def test_the_copy_gives_up_the_old_block_once(order):
    """Source: vllm-project/vllm #1556, #1584, #1930, PR #3347"""
    for leaving in ("cp", "pc"):
        tables = make_tables(8, 4)
        tables.add("p", 6)
        tables.fork("p", "c")
        copies = [copy for writer in order for copy in tables.append(writer)]
        assert len(copies) == 1
        for seq_id in leaving:
            tables.drop(seq_id)
            tables.check_invariants()
        assert tables.allocator.num_free == 8


def test_a_prefix_of_forty_tokens_then_two_branches():
    """Source: Kwon et al. 2023, section 4.4"""
    tables = make_tables(16, 16)
    tables.add("one", 40)
    tables.fork("one", "two")
    assert 16 - tables.allocator.num_free == 3
    assert [tables.allocator.ref_count(b) for b in tables.block_table("one")] == [2, 2, 2]
    assert tables.append("one") == [(2, 3)]
    assert tables.append("two") == []
    assert 16 - tables.allocator.num_free == 4
    assert (tables.block_table("one"), tables.block_table("two")) == ([0, 1, 3], [0, 1, 2])


@pytest.mark.parametrize(("prompt", "copies", "used"), [(8, 0, 6), (9, 3, 6)])
@pytest.mark.parametrize("together", [True, False])
def test_samples_of_one_prompt_copy_only_a_part_full_block(prompt, copies, used, together):
    """Source: vllm tests (n samples, append slots); NVIDIA TensorRT-LLM PR #14945"""
    tables = make_tables(10, 4)
    tables.add(0, prompt)
    for sample in range(1, 4):
        tables.fork(0, sample)
    if together:
        assert tables.blocks_to_append(dict.fromkeys(range(4), 1)) == used - blocks_needed(
            prompt, 4
        )
        made = tables.append_all(dict.fromkeys(range(4), 1))
    else:
        each = [tables.append(sample) for sample in range(4)]
        assert [len(c) for c in each] == ([1, 1, 1, 0] if copies else [0] * 4)
        made = [copy for copies_of_one in each for copy in copies_of_one]
    assert len(made) == copies
    assert 10 - tables.allocator.num_free == used
    tables.check_invariants()
    free = tables.allocator.num_free
    tables.drop(3)
    assert tables.allocator.num_free == free + 1  # only what the sample did not share


def test_a_group_grows_as_a_whole_or_not_at_all():
    tables = make_tables(5, 4)
    tables.add(0, 9)
    for sample in range(1, 4):
        tables.fork(0, sample)
    before = state(tables)
    with pytest.raises(OutOfBlocks, match="need 3 blocks, 2 of 5"):
        tables.append_all(dict.fromkeys(range(4), 1))
    assert state(tables) == before
    assert tables.can_append(0)
    assert tables.append_all({0: 1, 1: 1}) == [(2, 3), (2, 4)]


def test_room_reserved_ahead_is_not_shared_with_a_child():
    tables = make_tables(8, 4)
    tables.add("parent", 5)
    tables.reserve("parent", 10)
    tables.fork("parent", "child")
    assert len(tables.block_table("parent")) == 4
    assert tables.block_table("child") == tables.block_table("parent")[:2]
    assert len(tables.append("parent", 10)) == 1  # the block both had begun
    tables.check_invariants()


def test_reserving_makes_the_copy_so_that_writing_needs_no_block():
    tables = make_tables(8, 4)
    tables.add("parent", 5)
    tables.fork("parent", "child")
    assert tables.reserve("child", 3) == [(1, 2)]
    free = tables.allocator.num_free
    assert tables.append("child", 3) == []
    assert tables.allocator.num_free == free


def test_appending_nothing_changes_nothing():
    tables = make_tables(8, 4)
    tables.add("parent", 5)
    tables.fork("parent", "child")
    before = state(tables)
    assert tables.append("child", 0) == tables.append_all({}) == tables.reserve("child", 0) == []
    assert state(tables) == before


def test_a_dropped_table_comes_back_in_the_same_order():
    tables = make_tables(8, 4)
    tables.add("s", 12)
    table = tables.block_table("s")
    tables.drop("s")
    tables.add("t", 12)
    assert tables.block_table("t") == table


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: t.add("s"), ValueError, "'s' exists"),
        (lambda t: t.add("new", -1), ValueError, "-1"),
        (lambda t: t.add("new", 2.5), TypeError, "float"),
        (lambda t: t.append("s", -1), ValueError, "-1"),
        (lambda t: t.append("s", 1.5), TypeError, "float"),
        (lambda t: t.append("x"), KeyError, "'x'"),
        (lambda t: t.append_all({"s": 5, "x": 1}), KeyError, "'x'"),
        (lambda t: t.append_all({"s": 5, "full": -3}), ValueError, "-3"),
        (lambda t: t.append_all({"s": 5, "full": "1"}), TypeError, "str"),
        (lambda t: t.reserve("x", 1), KeyError, "'x'"),
        (lambda t: t.reserve("s", 999), OutOfBlocks, "of 8 are free"),
        (lambda t: t.fork("x", "y"), KeyError, "'x'"),
        (lambda t: t.fork("s", "full"), ValueError, "'full' exists"),
        (lambda t: t.fork("s", "s"), ValueError, "'s' exists"),
        (lambda t: t.drop("x"), KeyError, "'x'"),
        (lambda t: t.slot("x", 0), KeyError, "'x'"),
        (lambda t: t.num_tokens("x"), KeyError, "'x'"),
        (lambda t: t.block_table("x"), KeyError, "'x'"),
        (lambda t: t.can_append("x"), KeyError, "'x'"),
        (lambda t: t.slot_mapping("s", 0, 9), IndexError, "5 tokens"),
    ],
)
def test_a_refused_call_changes_nothing(call, error, message):
    tables = make_tables(8, 4)
    tables.add("s", 5)
    tables.add("full", 4)
    before = state(tables)
    with pytest.raises(error, match=message):
        call(tables)
    assert state(tables) == before
    tables.check_invariants()


@pytest.mark.parametrize("block_size", [0, -1, 1.5, None, True])
def test_a_block_that_holds_no_token_is_refused(block_size):
    with pytest.raises(ValueError, match="block_size is at least 1"):
        make_tables(4, block_size)


def test_a_block_given_up_behind_the_tables_back_is_noticed_and_not_silenced():
    """Source: vllm-project/vllm #1556, #1584, #1930 (the error was silenced there at first)"""
    tables = make_tables(8, 4)
    tables.add("s", 6)
    tables.fork("s", "t")
    tables.allocator.free(0)
    with pytest.raises(AssertionError, match=r"\(0, 1, Counter"):
        tables.check_invariants()
    tables.drop("t")
    before = state(tables)
    with pytest.raises(DoubleFree, match=r"'s' holds \[0, 1\]"):
        tables.drop("s")
    assert state(tables) == before


@pytest.mark.parametrize("rest", ["abc", "bc"])
def test_a_group_that_shares_blocks_comes_back_only_with_its_sharing(rest):
    """Source: vllm-project/vllm #1423, PR #2186, #4422, #4451, #8844, PR #12"""
    tables = make_tables(5, 4)

    def come_in(members):
        tables.add(members[0], 6)
        for member in members[1:]:
            tables.fork(members[0], member)
        assert len(tables.append_all(dict.fromkeys(members, 2))) == len(members) - 1
        assert tables.allocator.num_free == 5 - 1 - len(members)
        tables.check_invariants()

    come_in("abc")
    for member in "abc":  # those that have finished, then the rest, which is preempted
        tables.drop(member)
    assert tables.allocator.num_free == 5
    come_in(rest)
    for member in rest:
        tables.drop(member)
    for member in "ab":
        tables.add(member, 8)
    before = state(tables)
    with pytest.raises(OutOfBlocks, match="need 2 blocks, 1 of 5"):  # without sharing: 6 > 5
        tables.add("c", 8)
    assert state(tables) == before


def test_the_invariants_notice_a_table_too_short_a_repeated_block_and_shared_room():
    short, repeated, shared = make_tables(4, 4), make_tables(4, 4), make_tables(4, 4)
    for tables in (short, repeated, shared):
        tables.add("s", 4)
    short._num_tokens["s"] = 5
    with pytest.raises(AssertionError, match="'s'"):
        short.check_invariants()
    repeated._tables["s"].append(0)
    repeated.allocator.retain(0)
    with pytest.raises(AssertionError, match="'s'"):
        repeated.check_invariants()
    shared.reserve("s", 4)
    shared.fork("s", "t")
    shared._tables["t"].append(1)
    shared.allocator.retain(1)
    with pytest.raises(AssertionError, match="'s'"):
        shared.check_invariants()


def test_an_empty_range_of_slots_is_empty():
    tables = make_tables(4, 4)
    tables.add("s", 5)
    assert tables.slot_mapping("s", 0, 0) == tables.slot_mapping("s", 3, 2) == []


def test_numbers_of_tokens_may_be_numpy_s():
    np = pytest.importorskip("numpy")
    tables = make_tables(8, 4)
    tables.add("s", np.int64(5))
    tables.fork("s", "t")
    assert tables.append_all({"s": np.uint8(3), "t": np.int64(1)}) == [(1, 2)]
    assert tables.append("s", np.int64(1)) == []
    assert {type(tables.num_tokens(s)) for s in "st"} == {int}


def test_a_preempted_sequence_comes_back_with_all_its_tokens_or_not_at_all():
    """Source: jjang-ai/vmlx PR #68 (one in ten preempted once); vllm-project/vllm #25538"""
    tables = make_tables(8, 4)
    tables.add("old", 9)
    tables.add("s", 7)
    tables.append("s", 6)
    stored = tables.num_tokens("s")
    tables.drop("s")
    tables.append("old", 8)
    before = state(tables)
    with pytest.raises(OutOfBlocks, match="need 4 blocks, 3 of 8"):
        tables.add("s", stored)
    assert state(tables) == before
    tables.drop("old")
    tables.add("s", stored)
    assert (tables.num_tokens("s"), tables.allocator.num_free) == (13, 4)


def test_slots_of_an_unknown_sequence_are_refused():
    with pytest.raises(KeyError, match="'x'"):
        make_tables(4, 4).slot_mapping("x", 0, 0)


def test_a_slot_is_an_int_whatever_the_position_is():
    np = pytest.importorskip("numpy")
    tables = make_tables(64, 64)
    tables.allocator.allocate_many(np.uint8(10))
    tables.add("s", 60)
    assert tables.slot("s", np.uint8(3)) == 643
    assert type(tables.slot("s", np.int64(3))) is int
