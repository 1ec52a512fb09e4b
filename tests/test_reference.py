"""The oracle itself, against torch's dense attention, with NaN in every slot that nobody owns."""

import pytest
import torch

from kernels.reference import paged_attention

BLOCK_SIZE, NUM_BLOCKS, HEAD_DIM = 4, 12, 8
LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE + 2]


def paged_batch(kv_heads, seed=0):
    """Dense keys and values of each sequence, and the same in a pool full of NaN."""
    torch.manual_seed(seed)
    pools = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, kv_heads, HEAD_DIM), float("nan")).double()
    tables = torch.full((len(LENGTHS), 4), -1, dtype=torch.int32)
    dense, ids = [], torch.randperm(NUM_BLOCKS).tolist()
    for row, length in enumerate(LENGTHS):
        keys_values = torch.randn(2, length, kv_heads, HEAD_DIM).double()
        for position in range(length):
            logical, offset = divmod(position, BLOCK_SIZE)
            if offset == 0:
                tables[row, logical] = ids.pop()
            pools[:, tables[row, logical], offset] = keys_values[:, position]
        dense.append(keys_values)
    return dense, pools, tables


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (6, 2), (4, 1)])
def test_equals_dense_attention_whatever_the_slots_nobody_owns_hold(q_heads, kv_heads):
    dense, (keys, values), tables = paged_batch(kv_heads)
    queries = torch.randn(len(LENGTHS), q_heads, HEAD_DIM).double()
    out = paged_attention(queries, keys, values, tables, torch.tensor(LENGTHS))
    for row, (k, v) in enumerate(dense):
        expected = torch.nn.functional.scaled_dot_product_attention(
            queries[row, None, :, None], *(x.transpose(0, 1)[None] for x in (k, v)), enable_gqa=True
        )
        torch.testing.assert_close(out[row], expected[0, :, 0], rtol=0, atol=1e-12)


def test_permuting_physical_blocks_changes_nothing():
    _, (keys, values), tables = paged_batch(2)
    queries, lengths = torch.randn(len(LENGTHS), 2, HEAD_DIM), torch.tensor(LENGTHS)
    moved = torch.randperm(NUM_BLOCKS)
    elsewhere = torch.where(tables < 0, tables, moved[tables.long()].int())
    back = moved.argsort()
    expected = paged_attention(queries, keys, values, tables, lengths)
    assert torch.equal(
        paged_attention(queries, keys[back], values[back], elsewhere, lengths), expected
    )


def test_a_wrong_table_entry_is_seen():
    _, (keys, values), tables = paged_batch(2)
    queries, lengths = torch.randn(len(LENGTHS), 2, HEAD_DIM), torch.tensor(LENGTHS)
    good = paged_attention(queries, keys, values, tables, lengths)
    tables[4, 1] = tables[2, 0]
    assert not torch.allclose(paged_attention(queries, keys, values, tables, lengths)[4], good[4])


def test_an_empty_sequence_gives_zeros():
    _, (keys, values), tables = paged_batch(2)
    out = paged_attention(torch.randn(5, 2, HEAD_DIM), keys, values, tables, torch.zeros(5).int())
    assert torch.equal(out, torch.zeros(5, 2, HEAD_DIM).double())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": torch.tensor([17, 1, 1, 1, 1])}, "17 tokens in a table of 4 blocks"),
        ({"seq_lens": torch.tensor([1, 1, 1, 1])}, "5 queries, 5 tables, 4 lengths"),
        ({"block_tables": torch.full((5, 4), 12)}, "in a pool of 12"),
        ({"queries": torch.randn(5, 3, HEAD_DIM)}, "3 query heads are no multiple of 2"),
        ({"queries": torch.randn(5, 2, HEAD_DIM + 1)}, "do not fit together"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_the_numbers(change, message):
    _, (keys, values), tables = paged_batch(2)
    arguments = {
        "queries": torch.randn(5, 2, HEAD_DIM),
        "key_pool": keys,
        "value_pool": values,
        "block_tables": tables,
        "seq_lens": torch.tensor(LENGTHS),
    }
    with pytest.raises(ValueError, match=message):
        paged_attention(**(arguments | change))


@pytest.mark.parametrize(
    ("lengths", "blocks", "used"),
    [((45, 8, 25, 22), (3, 1, 2, 2), (13, 8, 9, 6)), ((1_025, 1_027), (65, 65), (1, 3))],
)
def test_the_block_size_does_not_move_the_answer(lengths, blocks, used):
    """Source: vllm-project/vllm test_triton_decode_attention; flashinfer page tests, #725, #320"""
    assert tuple(-(-n // 16) for n in lengths) == blocks
    assert tuple((n - 1) % 16 + 1 for n in lengths) == used
    torch.manual_seed(0)
    dense = [torch.randn(2, n, 1, HEAD_DIM).double() for n in lengths]
    queries, answers = torch.randn(len(lengths), 2, HEAD_DIM).double(), []
    for size in (1, 2, 8, 16, 32):
        per_row = -(-max(lengths) // size)
        ids = torch.randperm(per_row * len(lengths), dtype=torch.int32)
        tables = ids.view(len(lengths), per_row)
        pools = torch.full((2, len(ids), size, 1, HEAD_DIM), float("nan")).double()
        for row, keys_values in enumerate(dense):
            for position in range(lengths[row]):
                at = tables[row, position // size], position % size
                pools[:, at[0], at[1]] = keys_values[:, position]
        answers.append(paged_attention(queries, *pools, tables, torch.tensor(lengths)))
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0], rtol=0, atol=1e-12)
    assert not (answers[0] == 0).all(dim=-1).any()


def test_one_of_everything():
    """Source: ROCm/aiter #597; triton-lang/triton #3102 (sizes of 1)"""
    keys, values = torch.randn(2, 1, 1, 1, 1).double()
    one, table = torch.ones(1).int(), torch.zeros(1, 1).int()
    assert torch.equal(
        paged_attention(torch.ones(1, 1, 1), keys, values, table, one), values[0, 0, None]
    )
