"""The yardsticks of the benchmarks do the same work as what they are held against."""

import importlib.util
from pathlib import Path

import pytest

from labcore.admission import Limits, paged
from labcore.simulator import simulate
from labcore.workloads import SHAPES, draw

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("watermark", [0.0, 0.05])
def test_the_lean_loop_counts_what_the_simulator_counts(name, watermark):
    workload = draw(name, 300)
    requests = list(zip(workload.prompts.tolist(), workload.outputs.tolist(), strict=True))
    ours = simulate(paged, workload, watermark=watermark)
    headroom = Limits(2_048, 16, watermark=watermark).headroom
    assert load("simulator").lean_loop(requests, headroom) == (ours.steps, ours.preemptions)


def test_yardstick_and_tables_end_where_they_began():
    blocks = load("blocks")
    for call in (*blocks.yardstick_calls(), *blocks.our_calls()):
        call()
        owner = next(cell.cell_contents for cell in call.__closure__)
        free = getattr(owner, "free_ids", None)
        free = owner.num_free if hasattr(owner, "num_free") else free
        if free is None:
            owner.check_invariants()
            free = owner.allocator.num_free
        free = len(free) if isinstance(free, list) else free
        assert free >= blocks.NUM_BLOCKS - blocks.TABLE
