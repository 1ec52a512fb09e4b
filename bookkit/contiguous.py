"""Memory that is given out in one piece: what a free total does not say.

`allocate` gives the start of a region, or None where no hole is large enough, though `num_free`
may be: external fragmentation.
"""

from bisect import bisect, insort
from numbers import Integral
from operator import index


class FirstFit:
    """Take from the first hole that is large enough, by address. O(holes) a call. Given."""

    def __init__(self, size: int) -> None:
        self.size = self.num_free = _whole(size)
        self.holes = [(0, self.size)]  # (start, end), by start; no two touch
        self.taken: dict[int, int] = {}  # start: end

    def allocate(self, size: int) -> int | None:
        """Take `size` tokens in one piece. Raises ValueError for a size below 1."""
        size = _whole(size)
        for i, (start, end) in enumerate(self.holes):
            if end - start >= size:
                self.holes[i : i + 1] = [(start + size, end)] * (end - start > size)
                self.taken[start] = start + size
                self.num_free -= size
                return start
        return None

    def free(self, start: int) -> None:
        """Give a region back; holes that touch become one. Raises KeyError if none starts here."""
        start = index(start)  # 0.0 is found, too, and would stay in the holes
        end = self.taken.pop(start)
        self.num_free += end - start
        i = bisect(self.holes, (start, end))
        if i < len(self.holes) and self.holes[i][0] == end:
            end = self.holes.pop(i)[1]
        if i and self.holes[i - 1][1] == start:
            start = self.holes.pop(i - 1)[0]
        insort(self.holes, (start, end))

    def check_invariants(self) -> None:
        """Assert that holes and regions cover the memory once, and that no two holes touch."""
        _check_cover(self.size, [*self.holes, *self.taken.items()])
        assert not {end for _, end in self.holes} & {start for start, _ in self.holes}, self.holes


class Buddy:
    """Give out powers of two, each at a multiple of its length. O(holes) a call.

    Source: Knowlton 1965; Orca's baselines in the PagedAttention paper (section 6.1). Given.
    """

    def __init__(self, size: int) -> None:
        self.size = self.num_free = size = _whole(size)
        self.holes: set[tuple[int, int]] = set()  # (length, start)
        self.taken: dict[int, int] = {}  # start: length
        start = 0
        for bit in reversed(range(size.bit_length())):
            if size >> bit & 1:
                self.holes.add((1 << bit, start))
                start += 1 << bit

    def allocate(self, size: int) -> int | None:
        """Take the next power of two from `size` tokens. Raises ValueError for a size below 1."""
        size = _whole(size)
        wanted = 1 << (size - 1).bit_length()
        length, start = min((hole for hole in self.holes if hole[0] >= wanted), default=(0, 0))
        if not length:
            return None
        self.holes.remove((length, start))
        while length > wanted:
            length //= 2
            self.holes.add((length, start + length))
        self.taken[start] = length
        self.num_free -= length
        return start

    def free(self, start: int) -> None:
        """Give a region back, and join buddies. Raises KeyError if none starts here."""
        start = index(start)
        length = self.taken.pop(start)
        self.num_free += length
        while (buddy := (length, start ^ length)) in self.holes:
            self.holes.remove(buddy)
            start, length = min(start, buddy[1]), 2 * length
        self.holes.add((length, start))

    def check_invariants(self) -> None:
        """Assert that holes and regions cover the memory once, each a multiple of its length."""
        pieces = [*self.holes, *((length, start) for start, length in self.taken.items())]
        assert all(start % length == 0 for length, start in pieces), pieces
        _check_cover(self.size, [(start, start + length) for length, start in pieces])


def _whole(size):
    """Python's own integer, as NumPy's would not do in a list."""
    if not (isinstance(size, Integral) and size >= 1):
        raise ValueError(f"memory holds a whole number of tokens, at least 1, got {size!r}")
    return int(size)


def _check_cover(size, pieces):
    at = 0
    for start, end in sorted(pieces):
        assert start == at < end, f"{start} to {end} after {at}"
        at = end
    assert at == size, f"{at} of {size} tokens"
