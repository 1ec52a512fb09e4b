"""Answers that the checks of chapter 9b must refuse."""

from bookkit.exercises.ch09b import check_beginning_first, check_lie, check_missed
from labcore.prefix import PrefixCache


class Newest(PrefixCache):
    """The beginning first, but of the chain that ended last."""

    def _give_up(self, block_ids):
        super()._give_up(block_ids)
        for block_id in block_ids:
            if block_id in self._reusable:
                self._reusable.move_to_end(block_id, last=False)


class Forgetful(PrefixCache):
    """The beginning first, and nothing is known any more."""

    def _give_up(self, block_ids):
        super()._give_up(list(block_ids)[::-1])
        self.clear()


class Sorted(PrefixCache):
    """By number, which is the order of a chain only in a pool that nobody has used."""

    def _give_up(self, block_ids):
        super()._give_up(sorted(block_ids))


def too_little(kv, name, prompt):
    kv.tables.add(name, len(prompt))
    kv.tables.allocator.publish(kv.tables, name, prompt[:-1])


def nothing(kv, name, prompt):
    kv.tables.add(name, len(prompt))


def computed(kv, name, prompt):
    kv.tables.add(name, len(prompt))
    kv.keys[:] = kv.values[:] = 0
    kv.tables.allocator.publish(kv.tables, name, prompt)


def honest(kv, name, prompt):
    kv.tables.add(name)
    kv.tables.allocator.publish(kv.tables, name, prompt)


def gone(kv, name, prompt):
    kv.tables.add(name, len(prompt))
    kv.tables.allocator.publish(kv.tables, name, prompt)
    kv.tables.drop(name)


WRONG = {
    check_missed: [
        lambda n, b: (n - 1) % b + 1,
        lambda n, b: (n + 1) % b,
        lambda n, b: n // b * b,
        lambda n, b: 8,
    ],
    check_beginning_first: [PrefixCache, Newest, Forgetful, Sorted],
    check_lie: [too_little, nothing, computed, honest, gone],
}
