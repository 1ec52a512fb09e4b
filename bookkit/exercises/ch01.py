"""Checks of chapter 1: what reserving wastes, and memory that is given out in one piece."""

import random
from bisect import insort
from collections.abc import Callable

from bookkit.check import Verdict, check, compare, expect, told_with
from bookkit.contiguous import FirstFit
from labcore.workloads import draw


def check_share(guess: float | None) -> Verdict:
    """Exercise 1: per cent of the memory in use, at a mean length of 100.  Given."""
    stored = set_aside = 0
    for prompt, output, _ in draw(((50, 0.6), (31, 0.7))):
        stored += sum(range(prompt + 1, prompt + output + 1))
        set_aside += 1_024 * output
    answer = 100 * stored / set_aside
    return compare(guess, answer, 0.3, f"it is {answer:.1f}%, and you were within 0.3.")


def check_best_fit(memory: type | None) -> Verdict:
    """Exercise 2: an allocator that takes the shortest hole of those long enough.  Given."""

    def shortest(fitting):
        return min(fitting, key=lambda hole: hole[1])

    tried = "1,200 requests of random size, exact fits and refusals among them."
    return check(memory, lambda kind: _play(kind, shortest, _joined), tried)


def check_forgetful(memory: type | None) -> Verdict:
    """Exercise 3: a first-fit allocator that never joins two holes.  Given."""
    tried = "holes and regions are as expected whatever was taken and freed, in 40 memories."
    return check(memory, lambda kind: _play(kind, lambda fitting: fitting[0], sorted), tried)


def check_calls(calls: list[tuple[str, int]] | None) -> Verdict:
    """Exercise 3: calls to a memory of two tokens that find out whether it joins holes.  Given."""

    def test(calls):
        whole, forgetful = FirstFit(2), _Forgetful(2)
        for name, argument in calls:
            assert name in ("allocate", "free"), f"there is no call {name!r}."
            known = name == "allocate" or argument in whole.taken
            assert known, f"free({argument!r}): no region starts there; both refuse."
            one, other = (getattr(pool, name)(argument) for pool in (whole, forgetful))
            if one != other:
                break
        else:
            raise AssertionError(f"the two answer alike, {len(calls)} calls long.")
        assert len(calls) == 3, f"the two differ, but not all of the {len(calls)} calls are needed."

    return check(calls, test, "the third call fails, and only because two holes were not joined.")


class _Forgetful(FirstFit):
    """First fit that leaves holes as they are."""

    def free(self, start):
        end = self.taken.pop(start)
        self.num_free += end - start
        insort(self.holes, (start, end))


def _play(kind: Callable, pick: Callable, tidied: Callable) -> None:
    """Assert that an allocator picks its holes, and tidies up, like a list in order of start."""
    for seed in range(40):
        draw = random.Random(seed)
        pool, holes, taken = kind(24), [(0, 24)], {}
        for _ in range(30):
            size = draw.randint(1, 8)
            fitting = [hole for hole in holes if hole[1] >= size]
            start, length = pick(fitting) if fitting else (None, 0)
            case = f"allocate({size}) with holes {holes}"
            with told_with(case):
                found = _start(pool, size)
            expect(found, start, case)
            if fitting:
                taken[start] = size
                holes.remove((start, length))
                holes = sorted(holes + [(start + size, length - size)] * (length > size))
            if taken and (not fitting or draw.random() < 0.5):
                start = draw.choice(list(taken))
                case = f"holes {holes}, then free({start}) of {taken[start]}; holes"
                holes = tidied([*holes, (start, taken.pop(start))])
                pool.free(start)
                expect(sorted(pool.holes), holes, case)
                assert start not in pool.taken, f"after free({start}) it is still in `taken`."


def _start(pool, size: int) -> int | None:
    """Where a region of `size` starts, or None where the allocator of chapter 1 refuses."""
    try:
        return pool.allocate(size)
    except Exception as error:
        if type(error).__name__ != "DoesNotFit":
            raise
        return None


def _joined(holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The holes token by token: one starts wherever the token before is not free."""
    free = {token for start, length in holes for token in range(start, start + length)}
    starts = sorted(token for token in free if token - 1 not in free)
    ends = sorted(token + 1 for token in free if token + 1 not in free)
    return [(start, end - start) for start, end in zip(starts, ends, strict=True)]
