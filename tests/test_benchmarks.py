"""The yardsticks of the benchmarks do the same work as what they are held against."""

import importlib.util
import json
from pathlib import Path

import pytest

from labcore import admission
from labcore.admission import (
    Limits,
    Policy,
    decaying_ratio,
    expect_declared,
    expect_like_others,
    fewest_generated,
    future_peak,
    least_computed,
    lowest_priority,
    newest,
    oldest,
    oracle,
    paged,
)
from labcore.gpt2 import GPT2Config, random_gpt2
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


def test_every_policy_and_victim_has_its_row_of_requests_a_second(capsys):
    simulator = load("simulator")
    simulator.requests_per_second(40)
    rows = capsys.readouterr().out
    made = [name for name, value in vars(admission).items() if isinstance(value, Policy)]
    rules = [decaying_ratio, expect_declared, expect_like_others, future_peak, oracle]
    rules += [fewest_generated, least_computed, lowest_priority, newest, oldest]
    for name in [*made, *(rule.__name__ for rule in rules)]:
        assert name in rows
    assert "The slowest run took" in rows


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


def test_static_cache_and_pool_store_the_same_tokens_in_the_decode_benchmark(monkeypatch):
    decode = load("decode")
    monkeypatch.setattr(decode, "REPEATS", 2)
    monkeypatch.setattr(decode, "STEPS", 4)
    model = random_gpt2(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=50, n_positions=64))
    step, static, paged = decode.time_step(model, batch=3, context=20)
    assert static.num_tokens == 22
    for kv in paged.values():
        assert [kv.tables.num_tokens(row) for row in range(3)] == [22] * 3
        assert kv.tables.block_table(0) != sorted(kv.tables.block_table(0))
        kv.tables.check_invariants()
    attention = decode.time_attention(3, 20, static, paged)
    assert {"batch", "context", "gather", "in_place"} <= set(step) & set(attention)


def test_the_recorded_decode_run_names_its_machine_and_holds_every_shape():
    decode = load("decode")
    recorded = json.loads(decode.RESULT.read_text())
    head = ("machine", "threads", "torch", "date", "commit", "command")
    assert all(recorded[key] for key in head)
    for part in ("step", "attention"):
        assert [(row["batch"], row["context"]) for row in recorded[part]] == decode.SHAPES
        assert all(row["gather"][0] > 0 < row["in_place"][0] for row in recorded[part])
