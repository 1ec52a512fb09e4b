"""Answers that the checks of chapter 8b must refuse."""

from math import inf, nan

from bookkit.exercises.ch08b import check_link, check_residents, check_victims, check_watermark

PREFILL = 150e12 / 14e9


def link(kv_heads, block_size, seconds, ways=2):
    """`seconds` are all that the copies cost."""
    spare = block_size / PREFILL - seconds
    return ways * block_size * kv_heads * 16_384 / spare if spare > 0 else inf


def one_way(kv_heads, block_size, latency):
    return link(kv_heads, block_size, 64 * latency, ways=1)


def fewer_copies(kv_heads, block_size, latency):
    return link(kv_heads, block_size, 128 * latency * kv_heads / 32)


def all_heads(kv_heads, block_size, latency):
    return link(32, block_size, 128 * latency)


def off_by_one(kv_heads, block_size, latency):
    return link(kv_heads, block_size + 1, 128 * latency)


def never_none(kv_heads, block_size, latency):
    return 2 * block_size * kv_heads * 16_384 / (block_size / PREFILL - 128 * latency)


WRONG = {
    check_residents: [94, 100, 45, nan],
    check_victims: [(False, 1_195), (1, 1_195), (True, 397), (True, 2_000), (True,)],
    check_link: [
        one_way,
        fewer_copies,
        all_heads,
        off_by_one,
        never_none,
        lambda *_: 25e9,
        lambda *_: 0,
    ],
    check_watermark: [0, 5, 1],
}
