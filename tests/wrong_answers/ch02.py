"""Answers that the checks of chapter 2 must refuse."""

from collections import deque
from itertools import product

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


class Queue(BlockAllocator):
    """A right queue, but for calls that it must refuse."""

    make, limit = deque, 0

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self._free_ids = self.make(range(num_blocks))

    def allocate(self):
        return self.allocate_many(1)[0]

    def allocate_many(self, n):
        if not self.limit <= n <= self.num_free:
            raise ValueError(n) if n < 0 else OutOfBlocks(n)
        block_ids = [self._free_ids[i] for i in range(n)]
        self._free_ids = self.make(list(self._free_ids)[max(n, 0) :])
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids


class Minus(Queue):
    """Takes -1 blocks without a word."""

    limit = -1


class AList(Queue):
    """A list, and no deque."""

    make = list


def stops_at_a_refusal(kind):
    """A search that gives a list up when one of its calls is refused."""
    calls = {
        "allocate()": lambda pool: pool.allocate(),
        "retain(0)": lambda pool: pool.retain(0),
        "free(0)": lambda pool: pool.free(0),
    }
    for names in (names for n in range(1, 5) for names in product(calls, repeat=n)):
        pool = kind(2)
        try:
            for name in names:
                calls[name](pool)
            pool.check_invariants()
        except AssertionError:
            return list(names)
        except Exception:
            continue


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
    check_queue: [Stack, Torn, Minus, AList],
    check_shortest: [long_way, always_one, gives_up, stops_at_a_refusal, lambda _: "free(0)"],
    check_invariant: [no_id_twice, adds_up, shipped, lambda *_: True, lambda *_: False],
}
