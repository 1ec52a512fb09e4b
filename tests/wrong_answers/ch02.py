"""Answers that the checks of chapter 2 must refuse."""

from bookkit.exercises.ch02 import check_ids, check_invariant, check_queue, check_shortest
from labcore.blocks import BlockAllocator, OutOfBlocks


class Stack(BlockAllocator):
    """The allocator as it is."""


class Torn(BlockAllocator):
    """A queue that hands out what it has before it refuses."""

    def allocate(self):
        return self.allocate_many(1)[0]

    def allocate_many(self, n):
        for _ in range(n):
            if not self._free_ids:
                raise OutOfBlocks(f"need {n} blocks")
            self._free_ids.sort(reverse=True)
            self._ref_counts[self._free_ids.pop()] = 1


def long_way(kind):
    """Four calls that break two of them, not the fewest."""
    return ["allocate()", "retain(0)", "free(0)", "free(0)"]


def always_one(kind):
    return ["free(0)"]


def gives_up(kind):
    return None


def no_id_twice(pool, held):
    return len(pool._free_ids) == len(set(pool._free_ids) - set(held))


def adds_up(pool, held):
    return pool.num_free + len(held) == pool.num_blocks


def shipped(pool, held):
    pool.check_invariants()


WRONG = {
    check_ids: [[0, 1, 2, 3], [1, 3, 0, 4], [0, 3, 1]],
    check_queue: [Stack, Torn],
    check_shortest: [long_way, always_one, gives_up],
    check_invariant: [no_id_twice, adds_up, shipped, lambda *_: True, lambda *_: False],
}
