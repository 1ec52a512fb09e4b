"""Attention side by side and through a block table, against softmax written out by hand."""

import itertools
import math
import random

import pytest
import torch
from models import FLOATS, NAN, RUBBISH

from kernels.reference import paged_attention
from labcore.attention import causal_attention, causal_mask, gather, in_place, token_slots

HEADS, HEAD_DIM = 3, 5
ATOL = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 3e-3, torch.bfloat16: 3e-2}
THROUGH_A_TABLE = pytest.mark.parametrize("attention", [gather, in_place])


def lengths_around(block_size):
    return [1, max(1, block_size - 1), block_size, block_size + 1, 3 * block_size + 2]


def paged(lengths, block_size, fill, dtype=torch.float64, seed=0):
    """Queries, pools, tables and lengths; `fill` is in every slot that no sequence owns.

    Blocks are scattered; behind its end a table names blocks that nobody owns.
    """
    torch.manual_seed(seed)
    counts = [-(-n // block_size) for n in lengths]
    num_blocks = sum(counts) + 3
    ids = random.Random(seed).sample(range(num_blocks), num_blocks)
    tables = torch.full((len(lengths), max(counts) + 2), ids.pop())
    tables[:, -1] = ids.pop()
    pools = torch.full((2, num_blocks, block_size, HEADS, HEAD_DIM), fill, dtype=dtype)
    for row, length in enumerate(lengths):
        tables[row, : counts[row]] = torch.tensor([ids.pop() for _ in range(counts[row])])
        for position in range(length):
            block_id, offset = tables[row, position // block_size], position % block_size
            pools[:, block_id, offset] = torch.randn(2, HEADS, HEAD_DIM)
    queries = torch.randn(len(lengths), HEADS, HEAD_DIM).to(dtype)
    return queries, *pools, tables, torch.tensor(lengths)


def dot(xs, ys):
    return sum(float(x) * float(y) for x, y in zip(xs, ys, strict=True))


def through(attention, queries, keys, values, tables, lengths):
    return attention(tables, lengths, keys)(queries, keys, values)


def test_a_mask_shows_each_query_its_own_position_and_all_before_it():
    """Source: huggingface/transformers, continuous batching mask tests"""

    def rows(n, m):
        return ["".join(map(str, row)) for row in causal_mask(n, m).int().tolist()]

    assert rows(4, 4) == ["1000", "1100", "1110", "1111"]
    assert rows(3, 5) == ["11100", "11110", "11111"]
    assert rows(1, 5) == ["11111"]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 6), (2, 6), (5, 6), (6, 6)])
def test_causal_attention_equals_the_softmax_written_out(n, m, dtype):
    torch.manual_seed(0)
    queries = torch.randn(2, n, HEADS, HEAD_DIM, dtype=dtype)
    keys, values = torch.randn(2, 2, m, HEADS, HEAD_DIM, dtype=dtype)
    out = causal_attention(queries, keys, values)
    assert out.shape == queries.shape
    for row, i, head in itertools.product(range(2), range(n), range(HEADS)):
        seen = m - n + i + 1
        weights = [
            math.exp(dot(queries[row, i, head], keys[row, j, head]) / math.sqrt(HEAD_DIM))
            for j in range(seen)
        ]
        for d in range(HEAD_DIM):
            expected = dot(weights, values[row, :seen, head, d]) / sum(weights)
            assert abs(out[row, i, head, d].item() - expected) < ATOL[dtype]


def test_slots_past_the_end_are_those_of_token_0():
    tables = torch.tensor([[3, 1, 999], [2, 999, 999], [0, 5, 4]])
    slots, valid = token_slots(tables, torch.tensor([3, 1, 5]), block_size=2)
    assert slots.tolist() == [[6, 7, 2, 6, 6], [4, 4, 4, 4, 4], [0, 1, 10, 11, 8]]
    assert valid.int().tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]


@THROUGH_A_TABLE
@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("fill", [NAN, RUBBISH], ids=["nan", "rubbish"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_table_leads_to_the_reference_s_answer(attention, block_size, fill, dtype):
    lengths = lengths_around(block_size)
    for batch in ([n] for n in lengths), [lengths], [lengths[::-1]], [[lengths[-1]] * 3]:
        for some in batch:
            case = paged(some, block_size, fill, dtype)
            out = through(attention, *case)
            assert (out.dtype, out.shape) == (dtype, case[0].shape)
            torch.testing.assert_close(
                out.double(), paged_attention(*case), rtol=0, atol=ATOL[dtype]
            )


@THROUGH_A_TABLE
def test_a_length_that_is_one_too_long_or_too_short_is_seen(attention):
    queries, keys, values, tables, lengths = paged([7, 10], 3, RUBBISH)
    expected = paged_attention(queries, keys, values, tables, lengths)
    for off in (-1, 1):
        out = through(attention, queries, keys, values, tables, lengths + off)
        assert ((out - expected).abs().amax((1, 2)) > 1e-3).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fill", [NAN, RUBBISH], ids=["nan", "rubbish"])
def test_gather_also_reads_half_precision(dtype, fill):
    case = paged(lengths_around(16), 16, fill, dtype)
    out = through(gather, *case)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), paged_attention(*case), rtol=0, atol=ATOL[dtype])


@THROUGH_A_TABLE
def test_tables_and_lengths_may_be_int32(attention):
    queries, keys, values, tables, lengths = paged([4, 9], 4, NAN)
    expected = through(attention, queries, keys, values, tables, lengths)
    assert torch.equal(
        through(attention, queries, keys, values, tables.int(), lengths.int()), expected
    )


@THROUGH_A_TABLE
def test_a_block_may_stand_in_several_tables(attention):
    case = paged([9, 9, 9], 4, NAN)
    case[3][1:, :2] = case[3][0, :2]  # the first two blocks are one sequence's, three read them
    torch.testing.assert_close(
        through(attention, *case), paged_attention(*case), rtol=0, atol=1e-12
    )


@THROUGH_A_TABLE
def test_nothing_that_is_read_is_changed_and_layers_do_not_disturb_one_another(attention):
    case = paged([1, 5, 14], 4, RUBBISH)
    queries, keys, values, tables, lengths = case
    before = [tensor.clone() for tensor in case]
    attend = attention(tables, lengths, keys)
    first = attend(queries, keys, values)
    second = attend(queries.flip(0), values, keys)  # another layer: other pools, the same tables
    assert torch.equal(attend(queries, keys, values), first)
    assert not torch.equal(first, second)
    assert all(map(torch.equal, case, before))


@pytest.mark.parametrize("attention", [gather, in_place])
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_a_layer_with_a_number_that_is_none_does_not_spoil_the_next(attention, value):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 4, 4, 2, 8).double()
    tables, lens = torch.tensor([[3, 1], [2, 0]]), torch.tensor([6, 3])
    queries = torch.randn(2, 2, 8).double()
    attend = attention(tables, lens, keys)
    attend(queries, torch.full_like(keys, value), values)
    expected = paged_attention(queries, keys, values, tables, lens)
    assert (attend(queries, keys, values) - expected).abs().max() < 1e-12
