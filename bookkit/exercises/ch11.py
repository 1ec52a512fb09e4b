"""Checks of chapter 11: how many sequences fit."""

from collections.abc import Callable, Sequence

import numpy as np

from bookkit.check import Verdict, check, each_guess, expect
from labcore.admission import paged
from labcore.capacity import UnsupportedConfig, read_kv_shape
from labcore.simulator import simulate
from labcore.workloads import draw

GIB = 2**30
RUNNING = 333  # tokens of a chat that runs, in the mean
#: Llama-3.1-8B's config.json, the part that is read.  Given.
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip


def check_grouped(cache: Callable[[int], tuple]) -> Verdict:
    """Exercise 1: bytes a token, bytes a full sequence, full sequences in 10 GiB.  Given."""

    def test(cache):
        for num_kv_heads in (32, 8, 1, 2, 4, 16):
            token = np.empty((2, 32, num_kv_heads, 128), np.float16)  # keys and values, each layer
            full = 1_024 * token.nbytes
            expected = (token.nbytes, full, 10 * GIB // full)
            expect(tuple(cache(num_kv_heads)), expected, f"{num_kv_heads} key/value heads")

    return check(cache, test, "six numbers of heads, against the size of an array.")


def check_coarse(guess: Sequence[float] | None) -> Verdict:
    """Exercise 2: chats on the RTX 3090 in blocks of 256, by formula and simulated.  Given."""
    slots = 121 * 256  # whole blocks in 1,951 of 16
    formula = int(slots / (RUNNING + 255 / 2))
    simulated = simulate(paged, draw("chat"), slots, 256).mean_resident
    answers = {"by the formula": (formula, 0), "in the simulator": (simulated, 1)}
    return each_guess(guess, answers, "the formula is a little too careful here.")


def check_cards(chats: Callable[[int], int]) -> Verdict:
    """Exercise 3: chats of a model of 70 billion parameters on 2, 4 and 8 cards.  Given."""

    def test(chats):
        for cards in (2, 4, 8):
            weights = 2 * 70_553_706_496 / cards
            left = (0.9 * 79.18 - 4.9) * GIB - weights
            token_bytes = 2 * 80 * 128 * 2 * 8 / cards
            expected, found = int(left / token_bytes / (RUNNING + 15 / 2)), chats(cards)
            case = f"{cards} cards: expected {expected:,} chats, got {found!r}."
            assert abs(found - expected) <= 1, case

    return check(chats, test, "2, 4 and 8 cards, to one chat.")


def check_silent(key: str | None) -> Verdict:
    """Exercise 4: the key without which a config still answers, four times too much.  Given."""

    def test(key):
        assert key in LLAMA, f"there is no key {key!r} in Llama's config."
        try:
            shape = read_kv_shape({k: v for k, v in LLAMA.items() if k != key})
        except UnsupportedConfig as error:
            raise AssertionError(f"without {key} the config is refused: {error}.") from None
        expect(shape.token_bytes, 4 * 131_072, f"without {key}, bytes a token")

    return check(key, test, "no refusal, and four times the bytes.")
