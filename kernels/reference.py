"""Attention through a block table in plain torch: slow, exact, and read before anything faster.

Every faster path is held against this one. It gathers each sequence's keys and values by its table
and works in float64, so that what differs elsewhere is that path's own rounding.
"""

import math

import torch


def paged_attention(
    queries: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """One query a sequence, against all keys and values that its table names.

    Shapes: queries [batch, q_heads, head_dim]; both pools [num_blocks, block_size, kv_heads,
    head_dim]; block_tables [batch, max_blocks], physical block ids; seq_lens [batch], tokens
    stored. Entries of a table past ceil(seq_len / block_size) are not read, nor are slots past
    seq_len. Each group of q_heads / kv_heads queries reads the same key and value head. `scale` is
    1 / sqrt(head_dim) if None. Returns [batch, q_heads, head_dim] in float64; a sequence of length
    0 gives zeros. Raises ValueError when shapes, heads, lengths or block ids do not fit together.
    """
    _check(queries, key_pool, value_pool, block_tables, seq_lens)
    scale = 1 / math.sqrt(queries.shape[-1]) if scale is None else scale
    num_groups = queries.shape[1] // key_pool.shape[2]
    out = torch.zeros(queries.shape, dtype=torch.float64, device=queries.device)
    for row, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        keys, values = (
            _gather(pool, block_tables[row], length).repeat_interleave(num_groups, dim=1)
            for pool in (key_pool, value_pool)
        )  # [length, q_heads, head_dim]
        scores = torch.einsum("hd,thd->ht", queries[row].double(), keys) * scale
        out[row] = torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values)
    return out


def _gather(pool: torch.Tensor, block_table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of a sequence, in order: [length, kv_heads, head_dim], float64."""
    block_size = pool.shape[1]
    used = block_table[: -(-length // block_size)].long()
    return pool[used].flatten(0, 1)[:length].double()


def _check(queries, key_pool, value_pool, block_tables, seq_lens):
    num_blocks, block_size, kv_heads, head_dim = key_pool.shape
    batch, q_heads = queries.shape[:2]
    if value_pool.shape != key_pool.shape or queries.shape[2] != head_dim:
        shapes = [tuple(t.shape) for t in (queries, key_pool, value_pool)]
        raise ValueError(f"queries, keys and values do not fit together: {shapes}")
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads are no multiple of {kv_heads} key/value heads")
    if len(block_tables) != batch or len(seq_lens) != batch:
        raise ValueError(f"{batch} queries, {len(block_tables)} tables, {len(seq_lens)} lengths")
    for row, length in enumerate(seq_lens.tolist()):
        used = -(-length // block_size)
        if length < 0 or used > block_tables.shape[1]:
            raise ValueError(
                f"row {row}: {length} tokens in a table of {block_tables.shape[1]} blocks"
            )
        ids = block_tables[row, :used]
        if used and not (0 <= ids.min() and ids.max() < num_blocks):
            raise ValueError(f"row {row}: block ids {ids.tolist()} in a pool of {num_blocks}")
