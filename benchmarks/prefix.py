"""A prefix cache: a hit of 64 blocks and a miss that evicts 64, in pools of 1,024 to 65,536.

The yardstick finds a cached block by its key as well, but keeps what may be reused in a queue and
takes it from the middle with `remove`, which looks at every block before it.
Run: python benchmarks/prefix.py
"""

from collections import deque
from itertools import count
from statistics import median

from bookkit.timing import bench, machine, ratio
from labcore.blocks import BlockTables
from labcore.prefix import PrefixCache

BLOCK_SIZE, TABLE = 16, 64
SIZES = (1_024, 4_096, 16_384, 65_536)
HIT_MS, GROWTH = 0.2, 1.5  # the goals: a hit's time, and the largest pool against the smallest


def our_calls(num_blocks):
    """(hit, miss, the tables) in a pool that is full of reusable blocks."""
    cache = PrefixCache(num_blocks)
    tables, new_tokens = BlockTables(cache, BLOCK_SIZE), count()

    def miss():
        tokens = [next(new_tokens) for _ in range(TABLE * BLOCK_SIZE)]
        found = cache.adopt(tables, "new", tokens)
        tables.append("new", len(tokens) - found)
        cache.publish(tables, "new", tokens)
        tables.drop("new")

    for _ in range(num_blocks // TABLE):
        miss()
    end = next(new_tokens)
    known = list(range(end - TABLE * BLOCK_SIZE, end + 1))  # one token more: it is computed

    def hit():
        found = cache.adopt(tables, "known", known)
        tables.drop("known")
        return found

    return hit, miss, tables


def yardstick_hit(num_blocks):
    """A hit of 64 blocks where a queue holds all that nobody uses, the last used at its end."""
    queue, keys = deque(range(num_blocks)), {}
    for block_id in range(num_blocks - TABLE, num_blocks):
        keys[block_id * BLOCK_SIZE] = block_id

    def hit():
        found = list(keys.values())
        for block_id in found:
            queue.remove(block_id)
        queue.extend(found)
        return len(found) * BLOCK_SIZE

    return hit


def measure(sizes=SIZES, repeats=15):
    """Times of the three calls, {name: {size: seconds of each turn}}; the sizes take turns."""
    ours = {size: our_calls(size) for size in sizes}
    contenders = {
        "hit of 64 blocks": {size: calls[0] for size, calls in ours.items()},
        "miss, 64 evicted": {size: calls[1] for size, calls in ours.items()},
        "yardstick's hit": {size: yardstick_hit(size) for size in sizes},
    }
    return {name: bench(calls, repeats) for name, calls in contenders.items()}


def main():
    print(machine())
    times = measure()
    print(f"\n{'blocks in the pool':20}" + "".join(f"{size:>12,}" for size in SIZES))
    for name, by_size in times.items():
        row = "".join(f"{1e3 * median(by_size[size]):9.3f} ms" for size in SIZES)
        middle, low, high = ratio(by_size, SIZES[-1], SIZES[0])
        print(f"{name:20}{row}   last / first {middle:.2f} ({low:.2f} to {high:.2f})")
    print(f"\nGoals: a hit under {HIT_MS} ms; a hit's last / first at most {GROWTH}")


if __name__ == "__main__":
    main()
