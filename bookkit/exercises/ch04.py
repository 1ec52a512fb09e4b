"""Checks of chapter 4: the model, and the caches everyone starts with."""

from collections.abc import Callable
from itertools import pairwise

import torch

from bookkit.check import Verdict, check, compare, expect, told_with
from labcore.attention import causal_attention
from labcore.caches import ConcatKV, forward_cached
from labcore.gpt2 import GPT2Config, random_gpt2

SMALL = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=29, n_positions=16)


def check_even_batch(guess: float | None) -> Verdict:
    """Exercise 1: the batch at which a 7B model's caches of 1,024 tokens equal its weights.  Given.

    A layer has 12 matrices of width x width, 13 rows of biases and norms; then come the tables.
    """
    layers, width = 32, 4_096
    layer = 12 * width**2 + 13 * width
    weights = layers * layer + (50_257 + 1_024 + 2) * width
    answer = weights / (2 * layers * width * 1_024)
    return compare(guess, answer, 1.5, f"{answer:.1f}: the ratio grows with the width.")


def check_doubling(cache: type | None) -> Verdict:
    """Exercise 2: a cache whose buffers double, to the least power of two that suffices.  Given."""
    tried = "rooms from 1 to 16, a step done twice, foreign numbers past the end, every copy."
    starts = [1], [3], [4], [5], [1, 6], [3, 6]
    return check(cache, lambda kind: [_grow(kind, stops) for stops in starts], tried)


def _grow(kind: type, stops: list[int]) -> None:
    """Try a cache with some tokens at once, then singly, to 16; a step's first try is given up."""
    torch.manual_seed(stops[0])
    cache, end, copied = kind(SMALL), 0, 0
    q, k, v = torch.randn(3, SMALL.n_layer, 2, 16, 2, 4, dtype=torch.float64)
    for start, end in pairwise([0, *stops, *range(stops[-1] + 1, 17)]):
        case = f"a prompt of {stops[0]}, then from {start} to {end} tokens"
        room = 1 << (end - 1).bit_length()
        copied += 2 * SMALL.n_layer * start * (start > 0 and room > 1 << (start - 1).bit_length())
        new = [x[:, :, start:end] for x in (q, k, v)]
        with told_with(case):
            cache.attend(0, *(10 + x[0] for x in new))  # and the plug is pulled
        for layer in range(SMALL.n_layer):
            with told_with(case):
                out = cache.attend(layer, *(x[layer] for x in new))
            wanted = causal_attention(q[layer, :, start:end], k[layer, :, :end], v[layer, :, :end])
            assert torch.allclose(out, wanted, atol=1e-9), f"{case}: another result than dense."
            for buffers in (cache.keys, cache.values):
                expect(buffers[layer].shape[1], room, f"{case}: the room of layer {layer}")
                buffers[layer][:, end:] = torch.nan
        cache.num_tokens = end
        expect(cache.copied, copied, f"{case}: tokens copied, in keys and values of two layers")


def check_off_by_one(forward: Callable | None) -> Verdict:
    """Exercise 3: a step that takes the position after the right one.  Given."""

    def test(forward):
        model = random_gpt2(SMALL).double()
        tokens = torch.randint(29, (1, 16), generator=torch.Generator().manual_seed(4))
        for prompt in (1, 2, 9):
            cache = ConcatKV(SMALL)
            forward_cached(model, cache, tokens[:, :prompt])
            for n in range(prompt, 15):
                case = f"token {n + 1}, after a prompt of {prompt}"
                logits = forward(model, cache, tokens[:, n : n + 1])
                expect(cache.num_tokens, n + 1, f"{case}: tokens counted")
                expect(tuple(logits.shape), (1, 29), f"{case}: the shape of the logits")
                right = _shifted(model, tokens[:, : n + 1], [*range(n + 1)])
                wanted = _shifted(
                    model, tokens[:, : n + 1], [*range(prompt), *range(prompt + 1, n + 2)]
                )
                assert not _same(logits, right), f"{case}: nothing is wrong, it stands at {n}."
                assert _same(logits, wanted), f"{case}: not the logits of position {n + 1}."
        try:
            forward(model, cache, tokens[:, 15:])
        except (IndexError, ValueError):  # the table's, or a check's, as in forward_cached
            return
        raise AssertionError("token 16 of 16 positions: expected an error, got none.")

    return check(forward, test, "prompts of 1, 2 and 9: nothing raises before the last position.")


def _same(logits: torch.Tensor, others: torch.Tensor) -> bool:
    return bool((logits - others).abs().max() < 1e-9)


def _shifted(model, tokens: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """The last logits of a text whose tokens stand where they are told, without a cache."""

    def attend(layer, q, k, v):
        return causal_attention(q, k, v)

    return model.logits(model.hidden(tokens, torch.tensor([positions]), attend)[:, -1])
