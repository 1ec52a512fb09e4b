"""Blocks and tables against a yardstick of bare Python lists: no checks, one call a block.

Ratios are yardstick's time / ours, in one process, taken in turns: above 1 we are faster.
Run: python benchmarks/blocks.py
"""

from statistics import median

from bookkit.timing import bench, machine, ratio
from labcore.blocks import BlockAllocator, BlockTables

BLOCK_SIZE, NUM_BLOCKS, TABLE = 16, 4_096, 64


class Yardstick:
    """An allocator with counts, and tables on it, as short as it can be."""

    def __init__(self, num_blocks):
        self.free_ids, self.counts = list(range(num_blocks)), [0] * num_blocks
        self.tables, self.lengths = {}, {}

    def allocate(self):
        block_id = self.free_ids.pop()
        self.counts[block_id] = 1
        return block_id

    def retain(self, block_id):
        self.counts[block_id] += 1

    def free(self, block_id):
        self.counts[block_id] -= 1
        if self.counts[block_id] == 0:
            self.free_ids.append(block_id)

    def append(self, seq_id):
        length = self.lengths[seq_id]
        if length % BLOCK_SIZE == 0:
            self.tables[seq_id].append(self.allocate())
        self.lengths[seq_id] = length + 1

    def fork(self, parent, child):
        table = list(self.tables[parent])
        for block_id in table:
            self.retain(block_id)
        self.tables[child], self.lengths[child] = table, self.lengths[parent]

    def drop(self, seq_id):
        for block_id in self.tables.pop(seq_id):
            self.free(block_id)
        del self.lengths[seq_id]


def yardstick_calls():
    """The three operations on the yardstick."""
    pool = Yardstick(NUM_BLOCKS)
    pool.tables["parent"] = [pool.allocate() for _ in range(TABLE)]
    pool.lengths["parent"] = TABLE * BLOCK_SIZE

    def allocate_and_free():
        block_ids = [pool.allocate() for _ in range(TABLE)]
        for block_id in block_ids:
            pool.free(block_id)

    def fork_and_drop():
        pool.fork("parent", "child")
        pool.drop("child")

    def append_tokens():
        pool.tables["new"], pool.lengths["new"] = [], 0
        for _ in range(TABLE * BLOCK_SIZE):
            pool.append("new")
        pool.drop("new")

    return allocate_and_free, fork_and_drop, append_tokens


def our_calls(num_blocks=NUM_BLOCKS):
    """The same three on BlockAllocator and BlockTables."""
    allocator = BlockAllocator(num_blocks)
    tables = BlockTables(allocator, BLOCK_SIZE)
    tables.add("parent", TABLE * BLOCK_SIZE)

    def allocate_and_free():
        allocator.free_many(allocator.allocate_many(TABLE))

    def fork_and_drop():
        tables.fork("parent", "child")
        tables.drop("child")

    def append_tokens():
        tables.add("new")
        for _ in range(TABLE * BLOCK_SIZE):
            tables.append("new")
        tables.drop("new")

    return allocate_and_free, fork_and_drop, append_tokens


def main():
    print(machine())
    names = ("allocate + free 64", "fork + drop 64", "append a token")
    goals = (1, 1, 1 / 3)
    print(f"\n{'':20} {'yardstick':>10} {'ours':>10} {'ratio':>6} {'spread':>13}  goal")
    pairs = zip(names, goals, yardstick_calls(), our_calls(), strict=True)
    for name, goal, yardstick, ours in pairs:
        times = bench({"yardstick": yardstick, "ours": ours}, repeats=21)
        per_call = TABLE * BLOCK_SIZE if name.startswith("append") else 1
        micros = [1e6 * median(times[who]) / per_call for who in times]
        middle, low, high = ratio(times, "yardstick", "ours")
        print(
            f"{name:20} {micros[0]:7.3f} µs {micros[1]:7.3f} µs {middle:6.2f} "
            f"{low:5.2f} to {high:5.2f}  at least {goal:.2f}"
        )
    print("\nPool of 262,144 blocks against one of 1,024 (time ratio; goal: at most 1.5)")
    for name, small, large in zip(names, our_calls(1_024), our_calls(262_144), strict=True):
        middle, low, high = ratio(bench({"small": small, "large": large}, 21), "large", "small")
        print(f"{name:20} {middle:6.2f} {low:5.2f} to {high:5.2f}")


if __name__ == "__main__":
    main()
