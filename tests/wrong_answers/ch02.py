"""Answers that the checks of chapter 2 must refuse."""

from bookkit.exercises.ch02 import check_ids, check_queue
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


WRONG = {check_ids: [[0, 1, 2, 3], [1, 3, 0, 4], [0, 3, 1]], check_queue: [Stack, Torn]}
