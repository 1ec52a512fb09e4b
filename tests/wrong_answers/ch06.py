"""Answers that the checks of chapter 6 must refuse."""

from itertools import product

import torch

from bookkit.exercises.ch06 import FILLINGS, MASKS, check_masks, check_prefill, check_small_blocks


def torch_prefill(ends, to_read=None):
    """Attention in torch, in which query i sees `ends(i, past, n)` tokens."""

    def prefill(queries, key_pool, value_pool, block_table, past):
        n, block_size = len(queries), key_pool.shape[1]
        out = torch.empty_like(queries)
        for i in range(n):
            end = ends(i, past, n)
            position = torch.arange(to_read(end, block_size) if to_read else end)
            ids = block_table[0][position // block_size].long()
            slots = ids * block_size + position % block_size
            k, v = (pool.flatten(0, 1)[slots] for pool in (key_pool, value_pool))
            scores = torch.einsum("hd,thd->ht", queries[i], k) / 4
            scores[:, end:] = -1e30
            out[i] = torch.einsum("ht,thd->hd", scores.softmax(-1), v)
        return out

    return prefill


def right(i, past, n):
    return past + i + 1


def whole_blocks(end, block_size):
    return -(-end // block_size) * block_size


def one_head(*args):
    return torch_prefill(right)(*args)[:, :1].expand(-1, 2, -1)


WRONG = {
    check_small_blocks: [
        [32_768, 1, 64],
        [131_072, 16, 64],
        [131_072, 1, 1],
        [131_072, 1],
        [131_073, 1, 64],
    ],
    check_prefill: [
        lambda queries, *_: torch.zeros_like(queries),
        lambda queries, *_: queries[:1],
        lambda *_: None,
        torch_prefill(lambda i, past, n: past + n),  # no causal mask
        torch_prefill(lambda i, past, n: max(1, past + i)),  # not its own position
        torch_prefill(lambda i, past, n: past + 1),
        torch_prefill(right, whole_blocks),  # NaN times no weight
        one_head,
    ],
    check_masks: [
        [],
        list(product(MASKS, FILLINGS)),
        [("scores", filling) for filling in FILLINGS],
        [("scores", "10,000"), ("scores", "NaN"), ("v", "NaN")],
        [("q", "0")],
        ("v", "NaN"),  # a pair, and not a list of pairs
    ],
}
