"""Attention through a block table in plain torch and float64: slow, exact, the oracle of the rest.

The checks at the end are those of the fast path, too.
"""

import math

import torch
from torch import Tensor


def paged_attention(
    queries: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float | None = None,
) -> Tensor:
    """One query a sequence, against all keys and values that its table names.

    Shapes: queries [batch, q_heads, head_dim]; both pools [num_blocks, block_size, kv_heads,
    head_dim]; block_tables [batch, max_blocks], physical block ids; seq_lens [batch], tokens
    stored. Nothing past seq_len is read. Each group of q_heads / kv_heads queries reads the same
    key and value head. `scale` is 1 / sqrt(head_dim) if None. Returns [batch, q_heads, head_dim] in
    float64; a sequence of length 0 gives zeros. Raises ValueError when shapes, heads, lengths or
    block ids do not fit together.
    """
    check_shapes(queries, key_pool, value_pool, block_tables, seq_lens)
    check_tables(key_pool, block_tables, seq_lens)
    scale = 1 / math.sqrt(queries.shape[-1]) if scale is None else scale
    group = queries.shape[1] // key_pool.shape[2]
    out = torch.zeros(queries.shape, dtype=torch.float64, device=queries.device)
    for row, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        used = block_tables[row, : -(-length // key_pool.shape[1])].long()
        keys, values = (
            pool[used].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
            for pool in (key_pool, value_pool)
        )  # [length, q_heads, head_dim]
        scores = torch.einsum("hd,thd->ht", queries[row].double(), keys) * scale
        out[row] = torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values)
    return out


def check_shapes(
    queries: Tensor, key_pool: Tensor, value_pool: Tensor, block_tables: Tensor, seq_lens: Tensor
) -> None:
    """Raise ValueError unless the shapes fit together. Looks at no element."""
    tensors = queries, key_pool, value_pool, block_tables, seq_lens
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    if [tensor.dim() for tensor in tensors] != [3, 4, 4, 2, 1]:
        raise ValueError(
            f"queries, keys, values, tables, lengths have 3, 4, 4, 2, 1 axes: {shapes}"
        )
    batch, q_heads, head_dim = queries.shape
    kv_heads = key_pool.shape[2]
    if value_pool.shape != key_pool.shape or head_dim != key_pool.shape[3] or 0 in key_pool.shape:
        raise ValueError(f"queries, keys and values do not fit together: {shapes}")
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads are no multiple of {kv_heads} key/value heads")
    if len(block_tables) != batch or len(seq_lens) != batch:
        raise ValueError(f"{batch} queries, {len(block_tables)} tables, {len(seq_lens)} lengths")


def check_tables(key_pool: Tensor, block_tables: Tensor, seq_lens: Tensor) -> None:
    """Raise ValueError for a length that its table cannot hold, or a used id outside the pool."""
    num_blocks, block_size = key_pool.shape[:2]
    used = -(-seq_lens // block_size)  # blocks
    room = block_tables.shape[1]
    is_used = torch.arange(room, device=used.device) < used[:, None]
    outside = is_used & ((block_tables < 0) | (block_tables >= num_blocks))
    wrong = (seq_lens < 0) | (used > room) | outside.any(dim=1)
    if not wrong.any():
        return
    row = int(wrong.int().argmax())
    length, ids = int(seq_lens[row]), block_tables[row, : max(0, used[row])].tolist()
    if not 0 <= length <= room * block_size:
        raise ValueError(f"row {row}: {length} tokens in a table of {room} blocks of {block_size}")
    raise ValueError(f"row {row}: block ids {ids} in a pool of {num_blocks}")
