"""What happens before a kernel runs: what is refused, what is planned, and where it cannot run.

A call that is refused has changed nothing. Importing never raises, a call says what is missing.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from paged_cases import (
    BFLOAT16,
    DEVICE,
    FLOAT16,
    FLOAT32,
    INTERPRETED,
    Shape,
    paged_case,
    run,
    same_bits,
)

from kernels.paged_attention import MAX_SPLITS, Card, Launch, paged_attention, plan

# Refusals: rows of 3, 0 and 8 tokens in blocks of 4; ids 0 to 5; heads 4 and 2, 8 wide.
SHAPE = Shape((3, 0, 8), 4, (4, 2), 8)


def gaps(tensor):
    """The same numbers, every second place of a wider tensor's last axis."""
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


def far(pool):
    """A pool of this shape whose heads lie 2**30 elements apart. Its memory is never touched."""
    num_blocks, block_size, kv_heads, _ = pool.shape
    strides = block_size * 16, 16, 2**30, 1
    size = (kv_heads - 1) * 2**30 + num_blocks * block_size * 16
    return torch.empty(size, dtype=pool.dtype).as_strided(pool.shape, strides)


def with_entry(tables, row, column, value):
    tables = tables.clone()
    tables[row, column] = value
    return tables


def wanted(*shape):
    return torch.zeros(shape, device=DEVICE)


REFUSED = {  # the arguments that change, computed from a case that is right; error; message
    "queries of two axes": (
        lambda c: {"queries": c.queries[0]},
        ValueError,
        r"3, 4, 4, 2, 1 axes: \(4, 8\), \(6, 4, 2, 8\)",
    ),
    "keys of three axes": (lambda c: {"key_pool": c.key_pool[0]}, ValueError, r"\(4, 2, 8\), \(6"),
    "values of another size": (
        lambda c: {"value_pool": c.value_pool[:, :3]},
        ValueError,
        r"do not fit together: .*\(6, 4, 2, 8\), \(6, 3, 2, 8\)",
    ),
    "heads of another width": (
        lambda c: {"queries": c.queries[..., :7]},
        ValueError,
        r"do not fit together: \(3, 4, 7\)",
    ),
    "a pool without blocks": (
        lambda c: {"key_pool": c.key_pool[:0], "value_pool": c.value_pool[:0]},
        ValueError,
        r"\(0, 4, 2, 8\)",
    ),
    "3 query heads for 2": (
        lambda c: {"queries": c.queries[:, :3]},
        ValueError,
        "3 query heads are no multiple of 2",
    ),
    "a table too few": (
        lambda c: {"block_tables": c.block_tables[:2]},
        ValueError,
        "3 queries, 2 tables, 3 lengths",
    ),
    "a length too many": (
        lambda c: {"seq_lens": torch.cat((c.seq_lens, c.seq_lens))},
        ValueError,
        "3 queries, 3 tables, 6 lengths",
    ),
    "queries of another type": (
        lambda c: {"queries": c.queries.half()},
        TypeError,
        r"one type, got torch\.float16, torch\.float32, torch\.float32",
    ),
    "float64": (
        lambda c: {name: getattr(c, name).double() for name in NUMBERS},
        TypeError,
        r"float32, float16 and bfloat16, not torch\.float64",
    ),
    "whole numbers": (
        lambda c: {name: torch.zeros_like(getattr(c, name)).int() for name in NUMBERS},
        TypeError,
        r"not torch\.int32",
    ),
    "tables of int64": (
        lambda c: {"block_tables": c.block_tables.long()},
        TypeError,
        r"int32, got torch\.int64 and torch\.int32",
    ),
    "lengths of int64": (
        lambda c: {"seq_lens": c.seq_lens.long()},
        TypeError,
        r"int32, got torch\.int32 and torch\.int64",
    ),
    "tables on another device": (
        lambda c: {"block_tables": c.block_tables.to("meta")},
        ValueError,
        rf"one device, got {DEVICE}.*meta, {DEVICE}",
    ),
    "queries with gaps": (
        lambda c: {"queries": gaps(c.queries)},
        ValueError,
        r"without gaps: a tensor of shape \(3, 4, 8\) has strides \(64, 16, 2\)",
    ),
    "keys with gaps": (lambda c: {"key_pool": gaps(c.key_pool)}, ValueError, "without gaps"),
    "values with gaps": (lambda c: {"value_pool": gaps(c.value_pool)}, ValueError, "without gaps"),
    "tables with gaps": (
        lambda c: {"block_tables": gaps(c.block_tables)},
        ValueError,
        r"shape \(3, 2\) has strides \(4, 2\)",
    ),
    "lengths with gaps": (lambda c: {"seq_lens": gaps(c.seq_lens)}, ValueError, r"shape \(3,\)"),
    "a length below 0": (
        lambda c: {"seq_lens": c.seq_lens - 1},
        ValueError,
        "row 1: -1 tokens in a table of 2 blocks of 4",
    ),
    "a length past the table": (
        lambda c: {"seq_lens": c.seq_lens * 9 // 8},
        ValueError,
        "row 2: 9 tokens in a table of 2 blocks of 4",
    ),
    "an id below 0": (
        lambda c: {"block_tables": with_entry(c.block_tables, 2, 1, -1)},
        ValueError,
        r"row 2: block ids \[\d, -1\] in a pool of 6",
    ),
    "an id behind the last": (
        lambda c: {"block_tables": with_entry(c.block_tables, 0, 0, 6)},
        ValueError,
        r"row 0: block ids \[6\] in a pool of 6",
    ),
    "fewer rows than a group": (
        lambda c: {"launch": Launch(16, 1)},
        ValueError,
        "1 rows for a group of 2 query heads",
    ),
    "strides of 2**31": (
        lambda c: {"key_pool": far(c.key_pool)},
        ValueError,
        r"a block of shape \(4, 2, 8\) with strides \(16, 1073741824, 1\) spans 2\*\*31",
    ),
    "a head that is too wide": (
        lambda c: {
            "queries": c.queries.repeat(1, 1, 33),
            "key_pool": c.key_pool.repeat(1, 1, 1, 33),
            "value_pool": c.value_pool.repeat(1, 1, 1, 33),
            "out": None,
        },
        ValueError,
        "head sizes up to 256, .* not 2 x 512",
    ),
    "a group that is too large": (
        lambda c: {"queries": c.queries.repeat(1, 257, 1), "out": None},
        ValueError,
        "up to 8,192 numbers in a group's queries .* not 1024 x 16",
    ),
    "out of another shape": (
        lambda c: {"out": wanted(3, 4, 7)},
        ValueError,
        r"out is .*\[3, 4, 8\].*\[3, 4, 7\]",
    ),
    "out of another type": (
        lambda c: {"out": wanted(3, 4, 8).half()},
        ValueError,
        r"out is .*torch\.float32.*torch\.float16",
    ),
    "out with gaps": (
        lambda c: {"out": wanted(3, 8, 8)[:, ::2]},
        ValueError,
        r"out is a contiguous tensor .*strides \(64, 16, 1\)",
    ),
}
NUMBERS = ("queries", "key_pool", "value_pool")
ARGUMENTS = (*NUMBERS, "block_tables", "seq_lens")


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_call_says_the_numbers_and_changes_nothing(what):
    """Source: vllm-project/vllm #39807, #42510 (sizes that were accepted and failed in a kernel)"""
    change, error, message = REFUSED[what]
    case = paged_case(SHAPE)
    out = torch.full_like(case.queries, float("nan"))
    arguments = {name: getattr(case, name) for name in ARGUMENTS} | {"out": out} | change(case)
    watched = [*case.memory, *(t for t in arguments.values() if isinstance(t, torch.Tensor))]
    watched = [t for t in watched if t.is_contiguous() and t.device.type == DEVICE]
    before = [tensor.clone() for tensor in watched]
    with pytest.raises(error, match=message):
        paged_attention(**arguments)
    assert all(map(same_bits, watched, before))


def test_an_entry_past_the_used_ones_may_hold_any_number():
    case = paged_case(replace(SHAPE, padding=2**31 - 1))
    assert case.block_tables.tolist()[1] == [2**31 - 1] * 2
    assert run(case)[0].isfinite().all()


def test_without_check_ids_nobody_looks():
    """Token 3 of row 0 is block -1's: a guard, full of NaN, where another pool's blocks might be"""
    case = paged_case(SHAPE)
    strange = replace(case, block_tables=with_entry(case.block_tables, 0, 0, -1))
    with pytest.raises(ValueError, match="block ids"):
        run(strange)
    out, _ = run(strange, check_ids=False)
    assert out[0].isnan().all() and out[1:].isfinite().all()


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_batch_of_none_gives_none(num_splits):
    case = paged_case(SHAPE)
    none = (case.queries[:0], case.key_pool, case.value_pool, case.block_tables[:0])
    out, lse = paged_attention(
        *none, case.seq_lens[:0], return_lse=True, launch=Launch(16, 2, num_splits)
    )
    assert (out.shape, lse.shape) == ((0, 4, 8), (0, 4))


def test_tables_without_columns_hold_sequences_without_tokens():
    case = paged_case(SHAPE)
    none = replace(case, block_tables=case.block_tables[:, :0], seq_lens=0 * case.seq_lens)
    out, lse = run(none)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_the_stride_of_an_axis_of_one_does_not_matter():
    """Source: ROCm/aiter #597 (a size of 1)"""
    case = paged_case(Shape((3,), 4, (1, 1), 1))
    gapped = [gaps(tensor) for tensor in case.tensors]
    assert {tensor.stride(-1) for tensor in gapped} == {2}
    assert torch.equal(paged_attention(*gapped), paged_attention(*case.tensors))


@pytest.mark.parametrize(
    "wrong",
    [
        {"tile": 8}, {"tile": 48}, {"tile": 0}, {"rows": 0}, {"rows": 3}, {"rows": -2},
        {"num_splits": 0}, {"num_splits": -1}, {"num_splits": 1.5}, {"num_splits": True},
        {"num_warps": 0}, {"num_warps": 3}, {"num_stages": 0}, {"tile": 16.0},
    ],
    ids=str,
)  # fmt: skip
def test_a_launch_that_cannot_be_is_refused_with_its_numbers(wrong):
    """Source: vllm-project/vllm #41339; triton-lang/triton #621 (powers of two, 16 a side)"""
    with pytest.raises(ValueError, match=rf"powers of two.*{'.*'.join(map(_pair, wrong.items()))}"):
        Launch(**{"tile": 16, "rows": 1} | wrong)


def _pair(item):
    return f"{item[0]}={item[1]}"


# Plans

H200, T4 = Card(132), Card(40, tensor_cores=False)
GPT2, LLAMA3_8B = (12, 12, 64), (32, 8, 128)  # heads of queries, of keys, and their width


def planned(model, batch, context, dtype, card):
    """Plan from shapes alone: tensors on "meta" hold nothing."""
    q_heads, kv_heads, head_dim = model
    queries = torch.empty(batch, q_heads, head_dim, dtype=dtype, device="meta")
    pool = torch.empty(batch, 16, kv_heads, head_dim, dtype=dtype, device="meta")
    return plan(queries, pool, context, card)


@pytest.mark.parametrize(
    ("model", "batch", "context", "dtype", "card", "expected"),
    [
        (GPT2, 64, 512, FLOAT32, H200, Launch(64, 1, 1)),
        (GPT2, 64, 512, FLOAT16, H200, Launch(64, 16, 1)),
        (GPT2, 8, 512, FLOAT32, H200, Launch(64, 1, 4)),  # of the 6 that fill it, 2 tiles each
        (GPT2, 64, 4_096, FLOAT16, H200, Launch(64, 16, 1)),
        (LLAMA3_8B, 64, 4_096, BFLOAT16, H200, Launch(64, 16, 1)),
        (LLAMA3_8B, 64, 512, BFLOAT16, H200, Launch(64, 16, 1)),
        (LLAMA3_8B, 1, 4_096, BFLOAT16, H200, Launch(64, 16, 32)),
        (LLAMA3_8B, 1, 32_768, BFLOAT16, H200, Launch(64, 16, 66)),
        (LLAMA3_8B, 1, 4_096, FLOAT32, H200, Launch(32, 4, 64)),
        (GPT2, 8, 1_024, FLOAT32, T4, Launch(32, 1, 2)),
        (GPT2, 8, 1_024, FLOAT16, T4, Launch(32, 1, 2)),
        (LLAMA3_8B, 1, 4_096, FLOAT32, T4, Launch(16, 4, 20)),
        (LLAMA3_8B, 1, 4_096, FLOAT16, T4, Launch(32, 4, 20)),
        ((8, 1, 128), 1, 4_096, FLOAT16, T4, Launch(16, 8, 128)),
        ((71, 1, 64), 1, 4_096, FLOAT16, T4, Launch(16, 128, 128)),
        ((71, 1, 64), 1, 4_096, FLOAT32, H200, Launch(16, 128, 128)),
        ((71, 1, 64), 1, 4_096, FLOAT16, H200, Launch(64, 128, 32)),
        (GPT2, 1, 40, FLOAT16, H200, Launch(64, 16, 1)),
        (GPT2, 1, 0, FLOAT16, H200, Launch(64, 16, 1)),
        (GPT2, 0, 512, FLOAT16, H200, Launch(64, 16, 4)),
        ((1, 1, 64), 1, 10**6, FLOAT16, H200, Launch(64, 16, MAX_SPLITS)),
        ((25, 5, 5), 2, 512, FLOAT32, H200, Launch(32, 8, 8)),
        (GPT2, 8, 512, FLOAT32, None, Launch(512, 1, 1)),
        (LLAMA3_8B, 8, 4_096, BFLOAT16, None, Launch(512, 4, 1)),
        (LLAMA3_8B, 8, 100, BFLOAT16, None, Launch(128, 4, 1)),
        (LLAMA3_8B, 8, 3, BFLOAT16, None, Launch(16, 4, 1)),
    ],
)
def test_tiles_and_splits_follow_from_the_shapes(model, batch, context, dtype, card, expected):
    """About four programs a multiprocessor, each with two tiles or more."""
    assert planned(model, batch, context, dtype, card) == expected


def test_whatever_the_shapes_a_plan_keeps_within_its_limits():
    for model in (GPT2, LLAMA3_8B, (25, 1, 80), (1, 1, 256), (71, 1, 5)):
        for batch, context in ((1, 1), (1, 100), (1, 10**6), (3, 5_000), (500, 200)):
            for dtype, card in ((FLOAT32, H200), (FLOAT16, H200), (FLOAT16, T4), (BFLOAT16, None)):
                launch = planned(model, batch, context, dtype, card)
                assert launch.tile >= 16 and launch.rows >= model[0] // model[1]
                assert 1 <= launch.num_splits <= MAX_SPLITS
                if launch.num_splits > 1:
                    assert 2 * launch.tile * launch.num_splits <= context


def test_what_the_tensors_hold_does_not_change_the_plan():
    """So a launch can be captured in a CUDA graph. `max_seq_len` is a number of the caller's."""
    cases = [paged_case(replace(SHAPE, lengths=n)) for n in ((3, 0, 8), (1, 8, 0), (8, 8, 8))]
    plans = {plan(case.queries, case.key_pool, 8, H200) for case in cases}
    assert plans == {Launch(64, 2, 1)}


def test_the_plan_reckons_with_the_table_s_width_unless_it_is_told_the_longest(monkeypatch):
    asked = []

    def record(queries, key_pool, max_seq_len, card):
        asked.append(max_seq_len)
        return plan(queries, key_pool, max_seq_len, card)

    monkeypatch.setattr("kernels.paged_attention.plan", record)
    case = paged_case(SHAPE)
    out = paged_attention(*case.tensors)
    assert torch.equal(paged_attention(*case.tensors, max_seq_len=5), out)
    assert asked == [8, 5]


# Where kernels cannot run


def test_what_is_set_after_triton_was_imported_comes_too_late(monkeypatch):
    """Compiled kernels say so; interpreted ones stay it. Source: triton-lang/triton #6150"""
    case = paged_case(SHAPE)
    if INTERPRETED:
        run(case)  # imports Triton, unless an earlier test has
        monkeypatch.delenv("TRITON_INTERPRET")
        run(case)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        with pytest.raises(RuntimeError, match="changed after Triton had been imported"):
            run(case)


IN_A_NEW_PROCESS = """
import json, os, sys
sys.modules["triton"] = None  # on a platform without it

import torch
import kernels, kernels.paged_attention, labcore.attention, labcore.decode
from kernels import reference
from kernels.paged_attention import find_kernels, paged_attention
from labcore.decode import forward_paged_decode
from models import odd, paged_cache, snapshot

said, pool = {}, torch.ones(1, 1, 1, 16)
table, one = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
kv = paged_cache(odd(torch.float32), 2, 1)
kv.tables.add("s")

def ask(what, f, *args):
    before = snapshot(kv)
    try:
        f(*args)
        said[what] = "ran"
    except Exception as error:
        said[what] = f"{type(error).__name__}: {error}"
    assert snapshot(kv) == before

def ask_all(what):
    ask(f"{what}: call", paged_attention, pool[0], pool, pool, table, one)
    ask(f"{what}: step", forward_paged_decode, odd(torch.float32), kv, ["s"], [2], "triton")

ask_all("no Triton")
ask("oracle", reference.paged_attention, pool[0], pool, pool, table, one)
del sys.modules["triton"]
ask_all("no GPU")
os.environ["TRITON_INTERPRET"] = "1"
ask_all("too late")
del os.environ["TRITON_INTERPRET"]

from bookkit.compile_only import compile_only

with compile_only("sm_75"):
    ask("float16", find_kernels, pool.half())
    ask("bfloat16", find_kernels, pool.bfloat16())
    ask("elsewhere", find_kernels, pool.to("meta"))
with compile_only("sm_80"):
    ask("bfloat16 from 8.0", find_kernels, pool.bfloat16())
ask("no GPU again", find_kernels, pool)
ask("float64", find_kernels, pool.double())
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said():
    """What a Python without a GPU says to some calls: first without Triton, then with it."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.path.dirname(__file__)}
    done = subprocess.run(
        [sys.executable, "-c", IN_A_NEW_PROCESS],
        env=environment, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no Triton", "the kernels need Triton, which is for Linux: import of triton halted"),
        ("no GPU", "no GPU that Triton can use (0 active drivers"),
        ("too late", "TRITON_INTERPRET was changed after Triton had been imported"),
    ],
)
def test_importing_never_raises_and_a_call_says_in_plain_words_what_is_missing(said, what, message):
    """Nor is a block taken. Source: ServiceNow/Fast-LLM #143; deepseek-ai/DeepSeek-R1 #493"""
    assert said[f"{what}: call"].startswith(f"RuntimeError: {message}")
    assert said[f"{what}: step"] == said[f"{what}: call"]
    assert said["oracle"] == "ran"


def test_a_t4_reads_float16_and_says_why_not_bfloat16(said):
    """Source: vllm-project/vllm #36802"""
    assert said["float16"] == said["bfloat16 from 8.0"] == "ran"
    assert said["bfloat16"] == (
        "TypeError: bfloat16 needs compute capability 8.0, this card has 7.5: use float16"
    )


def test_a_pool_on_another_device_and_numbers_that_no_kernel_reads_are_refused_by_name(said):
    assert said["elsewhere"] == "RuntimeError: the pool is on meta, the kernels run on cpu"
    assert said["float64"].startswith("TypeError: the kernels read float32, float16 and bfloat16")
    assert said["no GPU again"] == said["no GPU: call"]
