"""What runs on the card: attention through a block table in two kernels.

`split_kernel` reads one part of one sequence, for the query heads that share a key and value head;
`combine_kernel` weighs the parts by their lse, the logarithm of the sum of exponentials.
"""

import triton
import triton.language as tl

NEG = tl.constexpr(-1.0e30)  # below every score, and finite: -inf - (-inf) would be NaN
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(  # no new kernel for what changes from step to step
    do_not_specialize=["stride_table", "num_splits"],
    do_not_specialize_on_alignment=["table_ptr", "len_ptr"],
)
def split_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, len_ptr, out_ptr, lse_ptr,
    scale, num_splits, stride_table, stride_q_row, stride_q_head,
    # A pool's strides are fixed for a model. As constants they save a quarter of the loop.
    K_BLOCK: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr,
    V_BLOCK: tl.constexpr, V_TOKEN: tl.constexpr, V_HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,  # the two above, padded for `tl.dot`, `tl.arange`
    TILE: tl.constexpr, STAGES: tl.constexpr,  # tokens a turn of the loop, turns in flight
    DOT: tl.constexpr,  # the numbers that are multiplied: the pools' own, where that is possible
):  # fmt: skip
    """One split of one sequence for one key/value head: out and lse [batch, q_heads, splits].

    Grid: (batch * KV_HEADS, num_splits). A split without tokens gives 0 and -inf.
    """
    program = tl.program_id(0)
    head = program % KV_HEADS  # the fast one: neighbours read the same tokens' rows
    row = (program // KV_HEADS).to(tl.int64)
    split = tl.program_id(1)
    seq_len = tl.load(len_ptr + row)
    tiles_a_split = ((seq_len + TILE - 1) // TILE + num_splits - 1) // num_splits
    start = split * tiles_a_split * TILE
    end = tl.minimum(start + tiles_a_split * TILE, seq_len)

    d = tl.arange(0, WIDTH)
    in_head = d < HEAD_DIM
    query = tl.arange(0, ROWS)
    q_head = head * GROUP + query
    of_group = (query < GROUP)[:, None] & in_head[None, :]
    q_rows = q_ptr + row * stride_q_row + q_head[:, None] * stride_q_head
    q = tl.load(q_rows + d[None, :], mask=of_group, other=0.0).to(DOT)  # [ROWS, WIDTH]

    top = tl.full([ROWS], NEG, tl.float32)  # of each query: the largest score so far,
    total = tl.full([ROWS], 0.0, tl.float32)  # the sum of 2**(score - top),
    out = tl.full([ROWS, WIDTH], 0.0, tl.float32)  # and of the values with these weights
    for tile in tl.range(start, end, TILE, num_stages=STAGES):
        position = tile + tl.arange(0, TILE)
        is_token = position < end
        entry = table_ptr + row * stride_table + position // BLOCK_SIZE
        block_id = tl.load(entry, mask=is_token, other=0).to(tl.int64)  # then block * stride fits
        offset = position % BLOCK_SIZE
        k_row = k_ptr + head * K_HEAD + block_id * K_BLOCK + offset * K_TOKEN
        v_row = v_ptr + head * V_HEAD + block_id * V_BLOCK + offset * V_TOKEN
        held = is_token[:, None]
        if WIDTH != HEAD_DIM:
            held = held & in_head[None, :]
        k = tl.load(k_row[:, None] + d[None, :], mask=held, other=0.0).to(DOT)  # [TILE, WIDTH]
        v = tl.load(v_row[:, None] + d[None, :], mask=held, other=0.0).to(DOT)  # 0: never 0 x NaN
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)  # [ROWS, TILE]
        score = tl.where(is_token[None, :], score, NEG)
        new_top = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(score - new_top[:, None])  # 0 past the end: each tile holds a token
        total = total * shrink + tl.sum(weight, 1)
        out = tl.dot(weight.to(DOT), v, out * shrink[:, None], input_precision="ieee")
        top = new_top

    divisor = tl.where(total == 0, 1.0, total)
    lse = tl.where(total == 0, -float("inf"), (top + tl.log2(divisor)) * LN2)
    part = (row * KV_HEADS * GROUP + q_head) * num_splits + split
    tl.store(lse_ptr + part, lse, mask=query < GROUP)
    out = (out / divisor[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + part[:, None] * HEAD_DIM + d[None, :], out, mask=of_group)


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    parts_ptr, part_lse_ptr, out_ptr, lse_ptr, num_splits,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,  # num_splits, padded to a power of two
):  # fmt: skip
    """Weigh the parts of one query head by exp(lse): out and lse [batch, q_heads].

    Grid: (batch * q_heads,). A sequence without tokens gives 0 and -inf.
    """
    query = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, WIDTH)
    there = split < num_splits
    part = query * num_splits + split
    lse = tl.load(part_lse_ptr + part, mask=there, other=-float("inf"))
    held = there[:, None] & (d < HEAD_DIM)[None, :]
    out = tl.load(parts_ptr + part[:, None] * HEAD_DIM + d[None, :], mask=held, other=0.0)
    top = tl.maximum(tl.max(lse, 0), NEG)
    weight = tl.exp(lse - top)
    total = tl.sum(weight, 0)
    divisor = tl.where(total == 0, 1.0, total)
    out = tl.sum(out * weight[:, None], 0) / divisor
    tl.store(out_ptr + query * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
    tl.store(lse_ptr + query, tl.where(total == 0, -float("inf"), top + tl.log(divisor)))
