"""Checks of chapter 2: the allocator."""

from collections import deque
from collections.abc import Callable

from bookkit.check import Verdict, check, expect
from bookkit.zoo import hunt
from labcore.blocks import BlockAllocator, DoubleFree, OutOfBlocks, UnknownBlock


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
        assert not wrong, f"after {answer[: wrong[0]] or 'the frees'} another block lies on top."

    return check(guess, test, "last in, first out, and a list is freed in its own order.")


def check_queue(allocator: type | None) -> Verdict:
    """Exercise 2: an allocator whose free list is a queue.  Given."""

    def test(kind):
        pool = kind(8)
        expect(prompt := pool.allocate_many(3), [0, 1, 2], "the first three of eight blocks")
        expect(type(pool._free_ids), deque, "the type of `_free_ids`")
        pool.free_many(prompt)
        expect(pool.allocate_many(3), [3, 4, 5], "three were freed, five are older")
        expect(pool.allocate(), 6, "one more, by `allocate`")
        refuses(pool, "allocate_many", 5, OutOfBlocks)
        refuses(pool, "allocate_many", -1, ValueError)
        expect(pool.allocate_many(4), [7, 0, 1, 2], "what the refused calls left")
        refuses(pool, "allocate", None, OutOfBlocks)
        pool.check_invariants()

    def refuses(pool, name, n, error):
        call, free = f"{name}({'' if n is None else n})", pool.num_free
        try:
            found = getattr(pool, name)(*[] if n is None else [n])
        except Exception as raised:
            found = raised
        right = isinstance(found, error)
        assert right, f"{call} with {free} free: expected {error.__name__}, got {found!r}."
        expect(pool.num_free, free, f"after {call} was refused, free blocks")

    return check(allocator, test, "oldest first, all or nothing, and the invariants hold.")


class StartsAtZero(BlockAllocator):
    """A new block has no holder.  Given."""

    def allocate(self):
        """Take a block that nobody holds."""
        block_id = super().allocate()
        self._ref_counts[block_id] = 0
        return block_id


class Unchecked(BlockAllocator):
    """A second free is carried out.  Given."""

    def free(self, block_id):
        """Give up a reference that there may not be."""
        if self._ref_counts[block_id] > 0:
            super().free(block_id)
        else:
            self._free_ids.append(block_id)


class FreesShared(BlockAllocator):
    """The first to leave frees a shared block.  Given."""

    def free(self, block_id):
        """Give up a reference, and the block with it."""
        super().free(block_id)
        if self._ref_counts[block_id] > 0:
            self._free_ids.append(block_id)


class HoldsAnyway(BlockAllocator):
    """A refused retain counts.  Given."""

    def retain(self, block_id):
        """Add a holder; where there was none, complain, and keep it."""
        try:
            super().retain(block_id)
        except (DoubleFree, UnknownBlock):
            self._ref_counts[block_id] = 1
            raise


class Silent(BlockAllocator):
    """A second free is refused without a word.  Given."""

    def free(self, block_id):
        """Give up a reference if there is one."""
        try:
            super().free(block_id)
        except DoubleFree:
            pass


def check_shortest(search: Callable | None) -> Verdict:
    """Exercise 3: the shortest calls after which `check_invariants` objects, or None.  Given."""

    def objects(kind, names):
        pool = kind(2)
        calls = {
            "allocate()": pool.allocate,
            "retain(0)": lambda: pool.retain(0),
            "free(0)": lambda: pool.free(0),
            "free_many([0, 0])": lambda: pool.free_many([0, 0]),
        }
        for name in names:
            assert name in calls, f"{name!r} is no name in CALLS."
            try:
                calls[name]()
            except (OutOfBlocks, DoubleFree, UnknownBlock):
                pass
        try:
            pool.check_invariants()
        except AssertionError:
            return True
        return False

    def test(search):
        shortest = {StartsAtZero: 1, Unchecked: 1, HoldsAnyway: 1, FreesShared: 3, Silent: None}
        for kind, length in shortest.items():
            what, names = kind.__doc__.split(".")[0].lower(), search(kind)
            if length is None or names is None:
                assert names == length, f"where {what}: expected {_calls(length)}, got {names!r}."
                continue
            assert objects(kind, names), f"where {what}: the invariants hold after {names}."
            expect(len(names), length, f"where {what}, the number of calls")

    return check(search, test, "five other allocators, one of them without a broken state.")


def _calls(length: int | None) -> str:
    """How many calls a list should have, in words."""
    return "None" if length is None else f"a list of {length} {'call' if length == 1 else 'calls'}"


def check_invariant(invariant: Callable | None) -> Verdict:
    """Exercise 4: an invariant of (pool, held) that catches three mutants.  Given."""
    return hunt(invariant, "ch02")
