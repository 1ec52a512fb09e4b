"""BlockAllocator: tiny pools, literal ids."""

import random
from collections import Counter, deque

import pytest

from labcore.blocks import (
    BlockAllocator,
    BlockTables,
    DoubleFree,
    OutOfBlocks,
    UnknownBlock,
    blocks_needed,
)


def test_blocks_come_in_ascending_order_at_first():
    allocator = BlockAllocator(4)
    assert [allocator.allocate() for _ in range(4)] == [0, 1, 2, 3]


def test_freed_blocks_are_reused_last_in_first_out():
    allocator = BlockAllocator(4)
    allocator.allocate_many(4)
    for block_id in (2, 0, 3):
        allocator.free(block_id)
    assert allocator.allocate_many(3) == [3, 0, 2]


def test_many_blocks_come_in_the_order_of_single_calls():
    one_by_one, at_once = BlockAllocator(6), BlockAllocator(6)
    for allocator in (one_by_one, at_once):
        allocator.allocate_many(6)
        allocator.free_many([4, 1, 5, 0])
    assert at_once.allocate_many(4) == [one_by_one.allocate() for _ in range(4)] == [0, 5, 1, 4]


@pytest.mark.parametrize("num_blocks", [1, 1024])
def test_a_full_pool_refuses_and_one_freed_block_is_usable_again_and_again(num_blocks):
    """Source: vllm-project/vllm, tests/core/block/test_naive_block.py"""
    allocator = BlockAllocator(num_blocks)
    assert len({allocator.allocate() for _ in range(num_blocks)}) == num_blocks
    middle = num_blocks // 2
    for _ in range(100):
        with pytest.raises(OutOfBlocks, match=f"need 1 block, 0 of {num_blocks}"):
            allocator.allocate()
        assert allocator.num_free == 0
        allocator.free(middle)
        assert allocator.allocate() == middle
    for freed in range(num_blocks):
        allocator.free(freed)
        assert allocator.num_free == freed + 1
    allocator.check_invariants()


def test_a_second_free_is_an_error_and_the_pool_stays_sound():
    """Source: vllm-project/vllm, tests/core/test_block_manager.py; issues #1556, #1584, #1930"""
    allocator = BlockAllocator(4)
    allocator.allocate_many(4)
    for block_id in range(4):
        allocator.free(block_id)
    for block_id in range(4):
        with pytest.raises(DoubleFree, match=f"block {block_id}"):
            allocator.free(block_id)
    assert allocator.num_free == 4
    assert sorted(allocator.allocate_many(4)) == [0, 1, 2, 3]


UNKNOWN = [99, -1, 4, "0", 1.0, True, None, 2**70]


@pytest.mark.parametrize("block_id", UNKNOWN, ids=repr)
@pytest.mark.parametrize("call", ["free", "retain", "ref_count"])
def test_an_id_that_is_no_block_is_refused_and_nothing_changes(call, block_id):
    """Source: vllm-project/vllm #1556 (an id of -1 must not mean the last block)."""
    allocator = BlockAllocator(4)
    allocator.allocate_many(4)
    with pytest.raises(UnknownBlock, match="in a pool of 4"):
        getattr(allocator, call)(block_id)
    with pytest.raises(UnknownBlock):
        allocator.free_many([0, 1, block_id])
    assert [allocator.ref_count(i) for i in range(4)] == [1, 1, 1, 1]
    allocator.check_invariants()


@pytest.mark.parametrize("call", ["free", "retain"])
def test_a_block_that_was_never_handed_out_is_told_from_one_freed_twice(call):
    allocator = BlockAllocator(4)
    allocator.free(allocator.allocate())
    with pytest.raises(DoubleFree, match="block 0 has 0 holders"):
        getattr(allocator, call)(0)
    with pytest.raises(UnknownBlock, match="block 3 was never handed out"):
        getattr(allocator, call)(3)
    assert allocator.ref_count(0) == allocator.ref_count(3) == 0


def test_allocating_many_takes_all_or_none():
    allocator = BlockAllocator(4)
    allocator.allocate()
    with pytest.raises(OutOfBlocks, match="need 4 blocks, 3 of 4 are free"):
        allocator.allocate_many(4)
    with pytest.raises(ValueError, match="-1"):
        allocator.allocate_many(-1)
    assert allocator.num_free == 3
    assert allocator.allocate_many(0) == []
    assert allocator.allocate_many(3) == [1, 2, 3]


def test_freeing_many_gives_up_all_or_none():
    allocator = BlockAllocator(4)
    allocator.allocate_many(3)
    allocator.retain(1)
    for bad in ([0, 1, 2, 3], [0, 1, 0], [1, 1, 1], [2, "x"]):
        with pytest.raises((DoubleFree, UnknownBlock)):
            allocator.free_many(bad)
        assert [allocator.ref_count(i) for i in range(4)] == [1, 2, 1, 0]
        assert allocator.num_free == 1
    allocator.free_many(iter([1, 1, 0]))
    assert allocator.num_free == 3
    assert allocator.allocate_many(3) == [0, 1, 3]


def test_a_list_may_name_a_block_as_often_as_it_is_held():
    allocator = BlockAllocator(1)
    block_id = allocator.allocate()
    allocator.retain(block_id)
    with pytest.raises(DoubleFree):
        allocator.free_many([block_id] * 3)
    assert allocator.ref_count(block_id) == 2
    allocator.free_many([block_id] * 2)
    assert allocator.num_free == 1


def test_a_shared_block_is_free_when_its_last_holder_leaves():
    allocator = BlockAllocator(2)
    block_id = allocator.allocate()
    allocator.retain(block_id)
    allocator.free(block_id)
    assert (allocator.ref_count(block_id), allocator.num_free) == (1, 1)
    allocator.free(block_id)
    assert (allocator.ref_count(block_id), allocator.num_free) == (0, 2)


def test_counts_pass_255():
    """Source: nyxos-dev/nyx-os #82 (counts kept in 8 bits stuck at 255)."""
    allocator = BlockAllocator(8)
    tables = BlockTables(allocator, block_size=16)
    tables.add("prefix", 40)
    blocks = tables.block_table("prefix")
    for child in range(300):
        tables.fork("prefix", child)
    assert [allocator.ref_count(block_id) for block_id in blocks] == [301] * 3
    assert allocator.num_free == 5
    for child in range(300):
        tables.drop(child)
    assert [allocator.ref_count(block_id) for block_id in blocks] == [1] * 3
    tables.drop("prefix")
    assert allocator.num_free == 8


@pytest.mark.parametrize("num_blocks", [0, -1, 2.0, "8", True])
def test_a_pool_without_blocks_is_refused(num_blocks):
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockAllocator(num_blocks)


def test_the_invariants_notice_a_leak_and_a_block_freed_twice():
    leaking, doubled = BlockAllocator(4), BlockAllocator(4)
    leaking._free_ids.pop()
    doubled._free_ids.append(doubled._free_ids[0])
    for allocator in (leaking, doubled):
        with pytest.raises(AssertionError):
            allocator.check_invariants()


def test_two_thousand_requests_with_aborts_end_with_every_block_free():
    """Source: jjang-ai/vmlx PR #68; sgl-project/sglang #105, #140; kekzl/imp #1642

    A small server: 70% of the requests end by themselves, 10% are aborted while they wait, 10%
    while they run, and 10% are preempted once and come back with all their tokens.
    """
    rng = random.Random(0)
    tables = BlockTables(BlockAllocator(64), block_size=16)
    waiting, running, seen = deque(), {}, Counter()

    def step():
        while waiting and blocks_needed(waiting[0][1], 16) <= tables.allocator.num_free:
            seq_id, stored, left, ending = waiting.popleft()
            tables.add(seq_id, stored)
            running[seq_id] = left, ending
        for seq_id, (left, ending) in list(running.items()):
            grow = min(left, 8)
            fits = tables.can_append(seq_id, grow)
            if fits:
                tables.append(seq_id, grow)
                left -= grow
            if ending == "preempted" or not fits:
                seen["preempted"] += 1
                waiting.appendleft((seq_id, tables.num_tokens(seq_id), left, "normal"))
            elif left and ending == "normal":
                running[seq_id] = left, ending
                continue
            else:
                seen["aborted running" if left else "finished"] += 1
            tables.drop(seq_id)
            del running[seq_id]

    def reconcile():
        held = {block_id for seq_id in running for block_id in tables.block_table(seq_id)}
        assert tables.allocator.num_free == len(set(tables.allocator._free_ids)) == 64 - len(held)
        tables.check_invariants()

    for request in range(2_000):
        ending = rng.choices(["normal", "waiting", "running", "preempted"], [7, 1, 1, 1])[0]
        waiting.append((request, rng.randint(1, 200), rng.randint(9, 100), ending))
        step()
        if ending == "waiting" and waiting and waiting[-1][0] == request:
            waiting.pop()
            seen["aborted waiting"] += 1
        if request % 100 == 99:
            reconcile()
    while waiting or running:
        step()
    reconcile()
    assert tables.allocator.num_free == 64
    assert min(seen.values()) > 100
    assert sum(seen.values()) - seen["preempted"] == 2_000
