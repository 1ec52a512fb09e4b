"""Attention over keys that lie side by side, and through a block table.

`gather`, `in_place` and `triton_kernel` turn the tables into indices, once a step, and return the
function that every layer calls with its own pools.
"""

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.paged_attention import find_kernels, paged_attention

IN_PLACE_DTYPES = (torch.float32, torch.float64)


def causal_mask(n: int, m: int, device: torch.device | None = None) -> Tensor:
    """What the last n of m positions may see: [n, m], True where they may.  Built in: ch04"""
    return torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n)


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Each of the last n positions over itself and all before it.

    Queries and result [batch, n, heads, head_dim]; keys and values [batch, m, heads, head_dim], m
    >= n. Built in: ch04
    """
    n, m = queries.shape[1], keys.shape[1]
    mask = causal_mask(n, m, queries.device) if 1 < n < m else None
    queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
    out = F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=n == m)
    return out.transpose(1, 2)  # from [batch, heads, n, head_dim]


def token_slots(block_tables: Tensor, seq_lens: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """The slot of each token, and which of them are tokens at all: both [batch, longest].

    From block_tables [batch, max_blocks] and seq_lens [batch], each at least 1. Past its end a
    sequence reads its own token 0 again: nobody wrote the slot there, and 0 x NaN is NaN.
    Built in: ch05
    """
    positions = torch.arange(int(seq_lens.max()), device=block_tables.device)
    valid = positions < seq_lens[:, None]
    positions = torch.where(valid, positions, 0)
    slots = block_tables.gather(1, positions // block_size) * block_size + positions % block_size
    return slots, valid


def gather(block_tables: Tensor, seq_lens: Tensor, pool: Tensor) -> Callable:
    """Copy every sequence's keys and values side by side, then attend with a mask.

    block_tables and seq_lens as in `token_slots`; `pool` is one layer's, for its shape [num_blocks,
    block_size, heads, head_dim]. Returns attend(queries, key_pool, value_pool), with queries and
    result [batch, heads, head_dim]. Reads the cache, writes it, reads it again.  Built in: ch05
    """
    slots, valid = token_slots(block_tables, seq_lens, pool.shape[1])
    mask = None if valid.all() else valid[:, None, None]

    def attend(queries, key_pool, value_pool):
        keys, values = (
            p.flatten(0, 1)[slots].transpose(1, 2) for p in (key_pool, value_pool)
        )  # [batch, heads, longest, head_dim]
        return F.scaled_dot_product_attention(queries[:, :, None], keys, values, mask)[:, :, 0]

    return attend


def in_place(block_tables: Tensor, seq_lens: Tensor, pool: Tensor) -> Callable:
    """Read keys and values where they lie, and copy none. Takes and returns what `gather` does.

    The pools are of IN_PLACE_DTYPES: `sampled_addmm` knows no other.  Built in: ch05
    """
    num_blocks, block_size, heads, head_dim = pool.shape
    slots, valid = token_slots(block_tables, seq_lens, block_size)
    batch, longest = slots.shape
    head = torch.arange(heads, device=pool.device)[:, None]
    rows = (slots[:, None] * heads + head).flatten()  # [batch * heads * longest], of the flat pool
    starts = torch.arange(0, len(rows) + 1, longest, device=pool.device)
    with warnings.catch_warnings(action="ignore"):  # torch calls its compressed rows a beta
        wanted = torch.sparse_csr_tensor(
            starts,
            rows,
            pool.new_zeros(len(rows)),
            (batch * heads, num_blocks * block_size * heads),
            check_invariants=False,
        )
    scores = wanted.values().view(batch, heads, longest)  # a view: the product is written into it
    past_end = None if valid.all() else ~valid[:, None]

    def attend(queries, key_pool, value_pool):
        scores.zero_()  # beta=0 multiplies what the last layer left: 0 x inf is NaN
        torch.sparse.sampled_addmm(
            wanted,
            queries.reshape(-1, head_dim),
            key_pool.view(-1, head_dim).T,
            beta=0.0,
            alpha=head_dim**-0.5,
            out=wanted,
        )
        if past_end is not None:
            scores.masked_fill_(past_end, -torch.inf)
        out, *_ = torch.embedding_bag(  # mode 0, its default: sums
            value_pool.view(-1, head_dim),
            rows,
            starts,
            per_sample_weights=scores.softmax(-1).flatten(),
            include_last_offset=True,
        )
        return out.view(queries.shape)

    return attend


def triton_kernel(block_tables: Tensor, seq_lens: Tensor, pool: Tensor) -> Callable:
    """Let a kernel read keys and values where they lie. Takes and returns what `gather` does.

    Raises as `kernels.paged_attention.find_kernels`.  Built in: ch06
    """
    find_kernels(pool)
    block_tables, seq_lens = block_tables.int(), seq_lens.int()

    def attend(queries, key_pool, value_pool):
        return paged_attention(
            queries, key_pool, value_pool, block_tables, seq_lens, check_ids=False
        )

    return attend
