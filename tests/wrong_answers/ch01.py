"""Answers that the checks of chapter 1 must refuse."""

from itertools import pairwise

from chapters import ROOT, definitions, read_chapter

from bookkit.exercises.ch01 import check_best_fit, check_calls, check_forgetful, check_share

CHAPTER = {"pairwise": pairwise}
for cell in read_chapter(ROOT / "notebooks" / "ch01_waste.md").cells:
    if {"merged", "DoesNotFit", "FirstFit"} & set(definitions(cell.tree)):
        exec(cell.source, CHAPTER)
FirstFit, DoesNotFit = CHAPTER["FirstFit"], CHAPTER["DoesNotFit"]


def length(hole):
    return hole[1]


class WorstFit(FirstFit):
    def find(self, size):
        return max((h for h in self.holes if h[1] >= size), key=length, default=None)


class NeverExact(FirstFit):
    def find(self, size):
        return min((h for h in self.holes if h[1] > size), key=length, default=None)


class Shortest(FirstFit):
    """Looks at the length of a hole and not at what has to go in."""

    def find(self, size):
        return min(self.holes, key=length, default=None)


class LastFit(FirstFit):
    """Of equals the last, where the first is asked for."""

    def find(self, size):
        return min((h for h in self.holes[::-1] if h[1] >= size), key=lambda h: h[1], default=None)


class Always:
    """A constant: every region starts at 0."""

    holes = ((0, 24),)

    def __init__(self, size):
        pass

    def allocate(self, size):
        return 0

    def free(self, start):
        pass


class Unsorted(FirstFit):
    def free(self, start):
        self.holes.append((start, self.taken.pop(start)))


class Short(FirstFit):
    """A hole that is one token shorter than the region was."""

    def free(self, start):
        length = self.taken.pop(start)
        self.holes = sorted([*self.holes, (start, length - 1)])


class Undead(FirstFit):
    """A hole, and still a region: a second free would pass."""

    def free(self, start):
        self.holes = sorted([*self.holes, (start, self.taken[start])])


class NoDefault(FirstFit):
    def find(self, size):
        return min((h for h in self.holes if h[1] >= size), key=length)


class Leaky(FirstFit):
    def free(self, start):
        del self.taken[start]


WRONG = {
    check_share: [0, 9.8, 7.8, 0.09, float("nan"), "9.0"],
    check_best_fit: [FirstFit, WorstFit, NeverExact, Shortest, LastFit, NoDefault, Leaky, Always],
    check_forgetful: [FirstFit, Unsorted, Short, Undead, Leaky, Always],
    check_calls: [
        [],
        [("allocate", 1), ("free", 0)],
        [("allocate", 2), ("free", 0), ("allocate", 2)],
        [("allocate", 1), ("allocate", 1), ("free", 0), ("free", 1), ("allocate", 2)],
        [("allocate", 1), ("free", 1), ("allocate", 2)],
        [("reserve", 1), ("free", 0), ("allocate", 2)],
    ],
}
