"""What only a card can show of the kernel. Not collected where kernels are interpreted."""

from dataclasses import replace

import pytest
import torch
from paged_cases import DEVICE, TYPES, Shape, check, launch_for, paged_case

from kernels import reference
from kernels.paged_attention import paged_attention

pytestmark = pytest.mark.gpu
SHAPE = Shape((700, 0, 17, 1_024), heads=(8, 2))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("num_warps", [1, 2, 8])
@pytest.mark.parametrize("num_stages", [1, 3, 5])
def test_warps_and_stages_do_not_move_the_answer(num_stages, num_warps, dtype):
    """With 8 KiB of keys a tile, and as many of values, all of it fits on a T4."""
    shape = replace(SHAPE, dtype=dtype)
    tile = 2**13 // (64 * dtype.itemsize)
    launch = replace(launch_for(shape, tile, 3), num_warps=num_warps, num_stages=num_stages)
    check(paged_case(shape), launch=launch)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_captured_call_reads_what_stands_in_its_tensors_when_it_is_replayed(num_splits):
    """New queries, keys, tables and lengths in the same memory: each time the eager call's bits."""
    cases = [paged_case(SHAPE, seed) for seed in (0, 1)]
    lengths = torch.tensor([1, 1_024, 33, 0], dtype=torch.int32, device=DEVICE)
    cases[1] = replace(cases[1], block_tables=cases[1].block_tables[[3, 3, 3, 0]], seq_lens=lengths)
    queries, key_pool, value_pool, tables, seq_lens = (t.clone() for t in cases[0].tensors)
    launch = launch_for(SHAPE, num_splits=num_splits)

    def call():
        return paged_attention(
            queries, key_pool, value_pool, tables, seq_lens, launch=launch, check_ids=False
        )

    call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for case in (*cases, cases[0]):
        for tensor, new in zip(
            (queries, key_pool, value_pool, tables, seq_lens), case.tensors, strict=True
        ):
            tensor.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        eager = call()
        torch.cuda.synchronize()
        assert torch.equal(out, eager)
        expected = reference.paged_attention(*case.tensors)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one card")
def test_tensors_may_be_on_another_card_than_the_current_one():
    case = paged_case(SHAPE)
    expected = reference.paged_attention(*case.tensors)
    with torch.cuda.device(0):
        out = paged_attention(*(tensor.to("cuda:1") for tensor in case.tensors))
    assert out.device == torch.device("cuda:1")
    torch.testing.assert_close(out.double().to(DEVICE), expected, rtol=0, atol=1e-5)
