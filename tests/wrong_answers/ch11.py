"""Answers that the checks of chapter 11 must refuse."""

from dataclasses import replace

from bookkit.exercises.ch11 import (
    GIB,
    LLAMA,
    check_cards,
    check_coarse,
    check_grouped,
    check_silent,
)
from labcore.capacity import Plan, read_kv_shape

WEIGHTS = 2 * 70_553_706_496
SHAPE = read_kv_shape(
    LLAMA | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
)


def sized(token_bytes):
    return token_bytes, 1_024 * token_bytes, 10 * GIB // (1_024 * token_bytes)


def chats(cards, heads=None, weights=None, mean=333, block_size=16):
    shape = replace(SHAPE, num_kv_heads=heads or 8 // cards)
    sizes = int(79.18 * GIB), weights or WEIGHTS // cards, int(4.9 * GIB)
    return Plan(shape, *sizes, share=0.9, block_size=block_size).sequences_of_mean(mean)


WRONG = {
    check_grouped: [
        lambda heads: sized(32 * heads * 128 * 2),
        lambda heads: sized(2 * 32 * 32 * 128 * 2),
        lambda heads: sized(2 * 32 * heads * 128 * 16),
        lambda heads: (131_072, 128, 80),
        lambda heads: 131_072,
    ],
    check_coarse: [[67, 67], [68, 68], [91, 92], [67, 75], 67],
    check_cards: [
        lambda cards: chats(cards, heads=8),
        lambda cards: chats(cards, weights=WEIGHTS // 4),
        lambda cards: chats(cards, mean=1_024),
        lambda cards: chats(2) * cards // 2,
        lambda cards: chats(cards) + 2,
    ],
    check_silent: ["head_dim", "hidden_size", "torch_dtype", "model_type", "sliding_window"],
}
