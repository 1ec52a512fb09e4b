"""Answers that the checks of chapter 5 must refuse."""

import torch
import torch.nn.functional as F

from bookkit.exercises.ch05 import (
    check_careless,
    check_copy,
    check_rows_copied,
    check_views,
    check_zoo,
)
from labcore.attention import gather, in_place


def sliced(block_tables, seq_lens, pool, stop=0, copied=False, order=None, other=in_place):
    """The right one, and what may be wrong with its ends, or with what it takes for an order."""
    ids = block_tables[0].tolist()
    order = order or (lambda ids: [*range(ids[0], ids[0] + len(ids))])
    if len(block_tables) > 1 or ids != order(ids):
        return other(block_tables, seq_lens, pool)
    first = ids[0] * pool.shape[1]

    def attend(queries, key_pool, value_pool):
        own = slice(first, first + int(seq_lens[0]) + stop)
        k, v = (p.flatten(0, 1)[None, own].transpose(1, 2) for p in (key_pool, value_pool))
        if copied:
            k, v = k.contiguous(), v.contiguous()
        return F.scaled_dot_product_attention(queries[:, :, None], k, v)[:, :, 0]

    return attend


def one_short(*args):
    return sliced(*args, stop=-1)


def one_past(*args):
    return sliced(*args, stop=1)


def never_asks(*args):
    return sliced(*args, order=lambda ids: ids)


def only_upwards(*args):
    return sliced(*args, order=sorted)


def gathers_elsewhere(*args):
    return sliced(*args, other=gather)


def copies(*args):
    return sliced(*args, copied=True)


def zeros(block_tables, seq_lens, pool):
    return lambda queries, key_pool, value_pool: torch.zeros_like(queries)


def reads_on(block_tables, seq_lens, pool, past=0, masked=True):
    """Past its own end, as far as the longest; `past` moves the mask."""
    size, places = pool.shape[1], torch.arange(int(seq_lens.max()))
    slots = block_tables[:, places // size] * size + places % size
    mask = (places < seq_lens[:, None] + past)[:, None, None] if masked else None

    def attend(queries, key_pool, value_pool):
        k, v = (p.flatten(0, 1)[slots].transpose(1, 2) for p in (key_pool, value_pool))
        return F.scaled_dot_product_attention(queries[:, :, None], k, v, mask)[:, :, 0]

    return attend


def no_mask(*args):
    return reads_on(*args, masked=False)


def mask_too_wide(*args):
    return reads_on(*args, past=1)


def by_way_of_a_temporary(pool, order, kept):
    kept.copy_(pool[order])


def inverse(pool, order, kept):
    kept[order] = pool


def in_order(pool, order, kept):
    kept.copy_(pool)


def a_new_tensor(pool, order, kept):
    return torch.index_select(pool, 0, order)


def only_tables(kv, texts):
    kv.check_invariants()


def only_keys(kv, texts):
    for seq_id, text in texts.items():
        found = kv.keys.flatten(1, 2)[:, kv.tables.slot_mapping(seq_id)]
        assert (found == torch.tensor(text)[:, None, None]).all()


def only_lengths(kv, texts):
    return all(kv.tables.num_tokens(seq_id) == len(text) for seq_id, text in texts.items())


def suspects_all(kv, texts):
    return False


WRONG = {
    check_rows_copied: [
        lambda lens, size: sum(lens),
        lambda lens, size: size * sum(-(-n // size) for n in lens),
        lambda lens, size: len(lens) * size * -(-max(lens) // size),
        lambda lens, size: 312,
    ],
    check_views: [
        *(gather, in_place, one_short, one_past, never_asks, only_upwards),
        *(gathers_elsewhere, copies, zeros),
    ],
    check_copy: [by_way_of_a_temporary, inverse, in_order, a_new_tensor],
    check_careless: [gather, in_place, no_mask, mask_too_wide, zeros],
    check_zoo: [only_tables, only_keys, only_lengths, suspects_all],
}
