"""Checks of chapter 2: the allocator."""

from bookkit.check import Verdict, check, expect
from labcore.blocks import BlockAllocator, OutOfBlocks


def check_ids(guess: list[int] | None) -> Verdict:
    """Exercise 1: the ids that come after 0 to 3 were taken, and 1, 3 and 0 freed.  Given."""

    def test(ids):
        pool = BlockAllocator(6)
        pool.allocate_many(4)
        pool.free_many([1, 3])
        pool.free(0)
        answer = pool.allocate_many(4)
        wrong = [
            i for i, (mine, right) in enumerate(zip(ids, answer, strict=False)) if mine != right
        ]
        assert len(ids) == 4, f"four ids are asked for, got {len(ids)}."
        assert not wrong, f"the first {wrong[0]} are right; then another block lies on top."

    return check(guess, test, "last in, first out, and a list is freed in its own order.")


def check_queue(allocator: type | None) -> Verdict:
    """Exercise 2: an allocator whose free list is a queue.  Given."""

    def test(kind):
        pool = kind(8)
        expect(prompt := pool.allocate_many(3), [0, 1, 2], "the first three of eight blocks")
        pool.free_many(prompt)
        expect(pool.allocate_many(3), [3, 4, 5], "three were freed, five are older")
        expect(pool.allocate(), 6, "one more, by `allocate`")
        try:
            pool.allocate_many(5)
        except OutOfBlocks:
            pass
        else:
            raise AssertionError("`allocate_many(5)` with four free: expected OutOfBlocks.")
        expect(pool.num_free, 4, "after a call that was refused, free blocks")
        expect(pool.allocate_many(4), [7, 0, 1, 2], "what the refused call left")
        pool.check_invariants()

    return check(allocator, test, "oldest first, all or nothing, and the invariants hold.")
