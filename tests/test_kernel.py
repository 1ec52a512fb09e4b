"""The paged kernel against attention in float64: on the GPU where there is one, else interpreted.

What only a card can show is in test_kernel_on_gpu.py; what happens before a kernel runs, and where
none can, is in test_kernel_calls.py.
"""

import copy
import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_equal_logits, odd, paged_cache, random_tokens, snapshot, tiny
from paged_cases import (
    BFLOAT16,
    CAPABILITY,
    DEVICE,
    FILLS,
    FLOAT16,
    FLOAT32,
    INTERPRETED,
    LAYOUTS,
    PADDINGS,
    TYPES,
    Shape,
    addresses,
    addresses_read,
    check,
    error,
    launch_for,
    lengths_around,
    paged_case,
    run,
    tolerance,
)

from kernels import reference
from kernels.paged_attention import paged_attention
from labcore.decode import forward_paged_decode, prefill_packed

pytestmark = pytest.mark.gpu

BLOCK_SIZES = (1, 3, 8, 12, 16, 24, 64, 256)
HEAD_DIMS = (5, 16, 64, 80, 96, 128)
GROUPS = ((2, 2), (2, 1), (6, 2), (4, 1), (8, 1))  # 1, 2, 3, 4 and 8 query heads a group
SPLITS = (1, 2, 3, 5)
EACH_TYPE = pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype)[6:])


def pairwise(**factors) -> list[dict]:
    """Few combinations in which every two values of two factors meet: the same at each call."""
    rng = random.Random(0)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(factors, 2)
        for x, y in itertools.product(factors[a], factors[b])
    }
    chosen = []

    def news(combination):
        return missing.intersection(itertools.combinations(combination.items(), 2))

    while missing:
        wanted = dict(min(missing, key=str))
        tries = [{name: rng.choice(values) for name, values in factors.items()} for _ in range(40)]
        chosen.append(max((some | wanted for some in tries), key=lambda some: len(news(some))))
        missing -= news(chosen[-1])
    return chosen


def name_of(combination: dict) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in combination.values())


# Every size


@pytest.mark.parametrize(
    "some",
    pairwise(
        block_size=BLOCK_SIZES,
        head_dim=HEAD_DIMS,
        heads=GROUPS,
        dtype=TYPES,
        num_splits=SPLITS,
        tile=(16, 32, 64, 128),
        rows=(1, 16),
        layout=tuple(LAYOUTS),
        fill=FILLS,
        padding=PADDINGS,
        spread=(1.0, 100.0),  # logits up to 4, and in the hundreds
    ),
    ids=name_of,
)
def test_every_two_choices_together_equal_the_oracle(some):
    """Source: vllm-project/vllm #39807, #41339, #42510, #2594; triton-lang/triton #4197"""
    how = {name: some[name] for name in ("tile", "num_splits", "rows")}
    what = {name: value for name, value in some.items() if name not in how}
    shape = Shape(lengths_around(some["block_size"]), **what)
    check(paged_case(shape), launch=launch_for(shape, **how))


@pytest.mark.grid
@EACH_TYPE
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_size", (*BLOCK_SIZES, 128))
def test_every_combination_of_choices_equals_the_oracle(block_size, head_dim, dtype):
    fills = itertools.cycle(itertools.product(LAYOUTS, FILLS, PADDINGS, (1.0, 100.0)))
    for heads, num_splits in itertools.product((*GROUPS, (4, 2)), (*SPLITS, 4)):
        layout, fill, padding, spread = next(fills)
        shape = Shape(
            lengths_around(block_size),
            block_size, heads, head_dim, dtype, layout, fill, padding, spread,
        )  # fmt: skip
        check(paged_case(shape), launch=launch_for(shape, 64, num_splits))
    check(paged_case(shape))  # as planned


@pytest.mark.parametrize("heads", [(12, 1), (12, 4), (25, 1), (25, 5)])
@pytest.mark.parametrize("block_size", [1, 8, 12, 16, 24, 64, 128, 256])
def test_12_and_25_heads_need_be_no_power_of_two_whatever_the_block(block_size, heads):
    """Source: vllm-project/vllm #41363, #10938; onnxruntime-genai #2568; flash-attention #828"""
    head_dim = (16, 64, 80)[sum(heads) % 3]
    check(paged_case(Shape((block_size + 1, 2), block_size, heads, head_dim)))


@pytest.mark.parametrize(("heads", "head_dim"), [(12, 64), (25, 64), (17, 16)])
def test_12_17_and_25_heads_may_each_have_keys_of_their_own(heads, head_dim):
    """Source: triton-lang/kernels #6; vllm-project/vllm, kernel cache tests. 12 and 25: GPT-2's"""
    check(paged_case(Shape((19, 3), 8, (heads, heads), head_dim)))


@EACH_TYPE
def test_a_launch_as_planned_equals_the_oracle(dtype):
    check(paged_case(Shape((700, 0, 17, 1_024), heads=(2, 1), dtype=dtype)))


@EACH_TYPE
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("head_dim", [1, 16])
def test_one_of_everything(head_dim, num_splits, dtype):
    """One sequence, head, block, token and table entry, and strides of 1: constants, if compiled.

    Source: ROCm/aiter #597; triton-lang/triton #3102
    """
    keys = torch.ones(1, 1, 1, head_dim, dtype=dtype, device=DEVICE)
    table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    launch = launch_for(Shape((1,), 1, (1, 1), head_dim, dtype), num_splits=num_splits)
    out, lse = paged_attention(
        keys[0], keys, 3 * keys, table, table[0] + 1, return_lse=True, launch=launch
    )
    assert torch.equal(out, 3 * keys[0])
    assert lse.item() == pytest.approx(math.sqrt(head_dim), rel=1e-6)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_random_shapes_equal_the_oracle(data):
    def draw(*values):
        return data.draw(st.sampled_from(values))

    kv_heads = draw(1, 2, 3)
    lengths = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=3))
    shape = Shape(
        tuple(lengths) if any(lengths) else (1,),
        data.draw(st.integers(1, 40)),
        (kv_heads * data.draw(st.integers(1, 5)), kv_heads),
        data.draw(st.integers(1, 40)),
        draw(*TYPES),
        draw(*LAYOUTS),
        draw(*FILLS),
        draw(*PADDINGS),
        draw(0.0, 1.0, 30.0),
    )
    launch = launch_for(shape, draw(16, 32), draw(1, 2, 7))
    check(paged_case(shape, seed=draw(0, 1)), launch=launch)


# What must not move the answer


@pytest.mark.parametrize("lengths", [(1_025, 1_027, 1_025), (1_027, 1, 1_025, 2, 1_027)])
def test_the_block_size_does_not_move_the_answer(lengths):
    """Source: vllm-project/vllm test_triton_decode_attention; flashinfer #725"""
    shape = Shape(lengths, heads=(1, 1), head_dim=16)
    launch = launch_for(shape, 256, 2)
    cases = [paged_case(replace(shape, block_size=size)) for size in (1, 8, 16, 32)]
    answers = [run(case, launch=launch)[0] for case in cases]
    expected = reference.paged_attention(*cases[0].tensors)
    for case, answer in zip(cases, answers, strict=True):
        torch.testing.assert_close(answer.double(), expected, rtol=0, atol=1e-5)
        assert torch.equal(case.queries, cases[0].queries)
        if INTERPRETED:  # a compiler may fuse other products and sums for another block size
            assert torch.equal(answer, answers[0])


@pytest.mark.parametrize(
    ("lengths", "block_size", "blocks", "last"),
    [((45, 8, 25, 22), 16, [3, 1, 2, 2], [13, 8, 9, 6]), ((1, 2), 2, [1, 1], [1, 2])],
)
def test_short_rows_beside_long_ones_are_not_lost(lengths, block_size, blocks, last):
    """Source: flashinfer page tests, #320"""
    case = paged_case(Shape(lengths, block_size))
    assert (case.block_tables >= 0).sum(1).tolist() == blocks
    assert [(n - 1) % block_size + 1 for n in lengths] == last
    check(case)
    assert run(case)[0].abs().amax(2).min() > 0.01


@EACH_TYPE
@pytest.mark.parametrize("num_splits", [1, 3])
def test_rows_of_the_batch_in_another_order_give_the_same_bits_in_that_order(num_splits, dtype):
    """Source: vllm-project/vllm test_attention.py; tspeterkim/paged-attention-minimal #3"""
    shape = Shape((5, 77, 0, 40, 19), heads=(2, 1), dtype=dtype)
    case, launch = paged_case(shape), launch_for(shape, 16, num_splits)
    order = torch.tensor([3, 0, 4, 1, 2], device=DEVICE)
    out, lse = run(case, launch=launch)
    queries, tables, lengths = (
        tensor[order] for tensor in (case.queries, case.block_tables, case.seq_lens)
    )
    moved = replace(case, queries=queries, block_tables=tables, seq_lens=lengths)
    again, again_lse = run(moved, launch=launch)
    assert torch.equal(again, out[order])
    assert torch.equal(again_lse, lse[order])


def test_three_sequences_of_one_block_each_in_falling_order():
    """Source: Dao-AILab/flash-attention #1314; tspeterkim/paged-attention-minimal #3"""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 128, 16, 1, 64, device=DEVICE)
    queries = torch.randn(3, 1, 64, device=DEVICE)
    tables = torch.tensor([[127], [126], [125]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([16, 9, 1], dtype=torch.int32, device=DEVICE)
    out = paged_attention(queries, keys, values, tables, lengths)
    for row, (block_id, length) in enumerate([(127, 16), (126, 9), (125, 1)]):
        weights = (keys[block_id, :length, 0] @ queries[row, 0] / 8).softmax(0)
        expected = weights @ values[block_id, :length, 0]
        torch.testing.assert_close(out[row, 0], expected, rtol=0, atol=1e-5)


def test_a_block_may_stand_in_several_tables():
    """Source: Kwon et al. 2023, section 4.4"""
    case = paged_case(Shape((40, 37, 33)))
    case.block_tables[1:, :2] = case.block_tables[0, :2]
    out, _ = run(case)
    assert (error(out, reference.paged_attention(*case.tensors), case) <= tolerance(case)).all()


@pytest.mark.parametrize("scale", [0, 0.3, 1, -2.0])
def test_the_scale_may_be_any_number(scale):
    shape = Shape((50, 0, 17), dtype=FLOAT16)
    check(paged_case(shape), scale, launch=launch_for(shape, 16, 2))


@EACH_TYPE
def test_with_equal_logits_the_sum_of_the_softmax_counts_the_tokens(dtype):
    """In every type: the sums are float32. A token more or less moves log(513) by 2e-3."""
    shape = Shape((1, 15, 16, 17, 511, 512, 513), heads=(1, 1), dtype=dtype)
    case = paged_case(replace(shape, spread=0.0))
    for num_splits in (1, 4):
        _, lse = run(case, launch=launch_for(shape, 64, num_splits))
        torch.testing.assert_close(lse[:, 0], case.seq_lens.log(), rtol=0, atol=1e-5)


def test_sums_of_the_parts_of_a_sequence_weigh_their_answers_into_that_of_the_whole():
    """Source: Dao et al. 2023, "Flash-Decoding" """
    case = paged_case(Shape((64,), heads=(2, 1)))
    first = replace(case, seq_lens=case.seq_lens - 32)
    second = replace(first, block_tables=case.block_tables[:, 2:])
    (out, lse), *parts = (run(some) for some in (case, first, second))
    weights = torch.stack([part_lse for _, part_lse in parts]).sub(lse).exp()
    whole = sum(weight[..., None] * part for weight, (part, _) in zip(weights, parts, strict=True))
    torch.testing.assert_close(weights.sum(0), torch.ones_like(lse), rtol=0, atol=1e-6)
    torch.testing.assert_close(whole, out, rtol=0, atol=1e-6)


def test_blocks_and_queries_may_lie_past_what_32_bits_count():
    """Between the first and the last are 2**31 numbers. Only pages that are written take memory."""
    stride = 2**30 + 16
    memory = torch.empty(2 * stride + 3 * 256, dtype=FLOAT16, device=DEVICE)
    key_pool = memory.as_strided((3, 8, 1, 16), (stride, 16, 16, 1))
    value_pool = memory.as_strided((3, 8, 1, 16), (stride, 16, 16, 1), 256)
    queries = memory.as_strided((3, 1, 16), (stride, 16, 1), 512)
    torch.manual_seed(0)
    for tensor in (key_pool, value_pool, queries):
        tensor.copy_(torch.randn(tensor.shape))
    tables = torch.tensor([[0, 1], [1, 2], [2, 0]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([16, 9, 15], dtype=torch.int32, device=DEVICE)
    out = paged_attention(queries, key_pool, value_pool, tables, lengths)
    expected = reference.paged_attention(queries, key_pool, value_pool, tables, lengths)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-3)


# The tests can fail


@EACH_TYPE
def test_the_tolerances_see_what_kernels_get_wrong(dtype):
    case = paged_case(Shape((33, 47, 40), 1, dtype=dtype))
    tables, lengths = case.block_tables, case.seq_lens
    token_16, shorter = [*range(15), *range(16, 47)], lengths - 1
    strange = tables.clone()
    strange[:, 20] = tables[:, 20].roll(1)
    mistakes = {
        "a token too few": {"seq_lens": shorter},
        "a token too many": {
            "seq_lens": lengths + 1,
            "block_tables": tables.where(tables >= 0, tables[0, 0])[:, [*range(47), 0]],
        },
        "the end of the first tile left out": {
            "block_tables": tables[:, token_16],
            "seq_lens": shorter,
        },
        "a block of another sequence": {"block_tables": strange},
        "keys of the other head": {"key_pool": case.key_pool.flip(2)},
        "values of the other head": {"value_pool": case.value_pool.flip(2)},
        "queries of another group": {"queries": case.queries[:, [0, 2, 1, 3]]},
        "another scale": {"queries": case.queries * 1.1},
    }
    out, _ = run(case)
    for mistake, wrong in {"none": {}, **mistakes}.items():
        expected = reference.paged_attention(*replace(case, **wrong).tensors)
        seen = error(out, expected, case).max() > tolerance(case)
        assert seen == (mistake != "none"), mistake


def test_a_kernel_that_reads_past_a_table_is_found_by_what_lies_round_the_pool():
    """Source: gpu-mode/lectures #47; triton-lang/triton #4755 (reads out of bounds go unseen)"""
    case = paged_case(Shape((16, 32), padding=-1))
    longer = replace(case, seq_lens=case.seq_lens + torch.tensor([1, 0]).int().to(DEVICE))
    with pytest.raises(ValueError, match=r"row 0: block ids \[\d+, -1\] in a pool of 6"):
        paged_attention(*longer.tensors)
    out, lse = run(longer, check_ids=False)  # block -1 of the pool is one of the guards
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter tells what a kernel reads")
@pytest.mark.parametrize("block_size", [1, 8])
def test_a_call_reads_each_key_and_value_once_and_nothing_that_is_not_its_own(block_size):
    """No slot or table entry past a sequence's end, not even where its number would be thrown away.

    Source: gpu-mode/lectures #47; triton-lang/triton #4755
    """
    shape = Shape((17, 0, 50, 16), block_size, (6, 2), 5, layout="mixed")
    case = paged_case(shape)
    with addresses_read() as read:
        run(case, launch=launch_for(shape, 16))
    own, others = [], [addresses(case.queries), addresses(case.seq_lens)]
    for row, length in enumerate(shape.lengths):
        position = torch.arange(length)
        block_ids = case.block_tables[row, position // block_size].long()
        for pool in (case.key_pool, case.value_pool):
            own += addresses(pool)[block_ids, position % block_size].flatten().tolist()
        others.append(addresses(case.block_tables)[row, : -(-length // block_size)])
    times = Counter(read)
    assert {times.pop(address) for address in own} == {1}
    assert times.keys() == {address for some in others for address in some.flatten().tolist()}


# What the interpreter cannot show


@triton.jit
def racing_kernel(total_ptr):
    """Every program adds 1 to the same number, and none waits for another."""
    tl.store(total_ptr, tl.load(total_ptr) + 1)


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, SIDE: tl.constexpr, PRECISION: tl.constexpr):
    """out = a @ b, of square matrices, with sums in float32."""
    row, column = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    at = row * SIDE + column
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(out_ptr + at, tl.dot(a, b, input_precision=PRECISION))


def error_of_a_product(dtype, precision):
    torch.manual_seed(0)
    a, b = torch.randn(2, 64, 64, device=DEVICE).to(dtype)
    out = torch.empty(64, 64, device=DEVICE)
    product_kernel[1,](a, b, out, SIDE=64, PRECISION=precision)
    return (out.double() - a.double() @ b.double()).abs().max().item()


@triton.jit
def round_kernel(number_ptr, out_ptr):
    """Store a number in out's type."""
    tl.store(out_ptr, tl.load(number_ptr).to(out_ptr.dtype.element_ty))


def test_a_race_gives_the_right_sum_where_programs_run_one_after_another():
    """So a right answer from the interpreter says nothing on races; a card loses most of these.

    Source: triton-lang/triton #11153, #2983, #3596
    """
    total = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    programs = 4 if INTERPRETED else 4_096
    racing_kernel[programs,](total)
    assert (total.item() == programs) == INTERPRETED


def test_products_of_float32_lose_bits_on_a_card_unless_told_otherwise():
    """The kernels say "ieee"; the interpreter knows no other. So it fixes no tolerance.

    Source: triton-lang/triton #5895, #8654, #1671, #6265
    """
    assert error_of_a_product(FLOAT32, "ieee") < 1e-4
    assert (error_of_a_product(FLOAT32, None) > 1e-3) == (CAPABILITY >= (8, 0))


def test_the_interpreter_multiplies_bfloat16_wrongly_and_float16_rightly():
    """It multiplies their bits as whole numbers, so `paged_attention` makes them float32 there.

    Source: triton-lang/triton #11584
    """
    for dtype in TYPES[1:]:
        assert (error_of_a_product(dtype, None) < 1e-4) == (dtype == FLOAT16 or not INTERPRETED)


def test_the_interpreter_cuts_bits_off_a_bfloat16_where_a_card_rounds():
    """Hence the tolerance of an answer: up to 2**-8 of it is lost, not 2**-9."""
    number = torch.tensor([1.9999], device=DEVICE)
    out = torch.empty(1, dtype=BFLOAT16, device=DEVICE)
    round_kernel[1,](number, out)
    assert out.item() == (1.9921875 if INTERPRETED else 2.0)


# GPT-2


def stored(dtype, model):
    """A model, a cache in which three sequences have tokens, and one more token for each."""
    model = copy.deepcopy(model(dtype)).to(DEVICE)
    kv = paged_cache(model, 24, 4)
    prompts = {n: random_tokens(n, n, model.config.vocab_size) for n in (3, 8, 21)}
    for seq_id in prompts:
        kv.tables.add(seq_id)
    prefill_packed(model, kv, prompts)
    return model, kv, list(prompts), random_tokens(3, 0, model.config.vocab_size)


@pytest.mark.parametrize("model", [tiny, odd])
def test_a_step_of_gpt2_gives_the_logits_of_a_gathered_step(model):
    """Heads 64 wide, and 3 heads of 5 numbers."""
    steps = [
        forward_paged_decode(*stored(FLOAT32, model), attention=attention)
        for attention in ("gather", "triton")
    ]
    assert_equal_logits(steps[1], steps[0])


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_a_step_of_gpt2_in_half_precision_is_as_exact_as_a_gathered_one(dtype):
    exact = forward_paged_decode(*stored(torch.float64, odd), attention="gather")
    gathered, ours = (
        forward_paged_decode(*stored(dtype, odd), attention=attention).double() - exact
        for attention in ("gather", "triton")
    )
    assert ours.abs().max() < 2 * gathered.abs().max()


def test_float64_is_refused_before_any_block_is_taken():
    model, kv, seq_ids, tokens = stored(torch.float64, odd)
    before = snapshot(kv)
    with pytest.raises(TypeError, match=r"float32, float16 and bfloat16, not torch\.float64"):
        forward_paged_decode(model, kv, seq_ids, tokens, attention="triton")
    assert snapshot(kv) == before
