"""The yardsticks of the benchmarks do the same work as what they are held against."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bookkit.timing import KERNELS, kernel_fingerprint
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


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return load("gpu")


def small_job(gpu, timed=True, **builds):
    """Ways to attend to two sequences, by name."""
    contenders = sys.modules["contenders"]
    shape = contenders.Shape((4, 2, 8), (5, 12), "float32", block_size=4)
    methods = [contenders.Method(name, build) for name, build in builds.items()]
    return contenders.Job(shape, methods, seconds=1, timed=timed)


def right(batch):
    return lambda i: batch.expected.float()


def unwritten(batch):
    return lambda i: batch.out


def missing(batch):
    raise ImportError("no such thing in this torch")


def examined(gpu, **builds):
    run = gpu.Run(torch.device("cpu"))
    gpu.examine(run, small_job(gpu, **builds))
    return run, {kind: [row["method"] for row in run.result[kind]] for kind in ("rows", "failed")}


def test_the_rehearsal_on_a_cpu_checks_and_times_every_method(tmp_path):
    """In a process of its own: it sets TRITON_INTERPRET before Triton is imported."""
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-W", "ignore", "gpu.py", "--tiny", "--out", out]
    subprocess.run(command, cwd=BENCHMARKS, check=True, capture_output=True)
    result = json.loads(out.read_text())
    assert result["device"] == "cpu, interpreter"
    head = ("machine", "torch", "triton", "kernels", "date", "commit", "command", "copy")
    assert all(result[key] for key in head)
    assert len({row["launch"]["num_splits"] for row in result["checks"]}) == 2
    assert {row["dtype"] for row in result["checks"]} == {"float32", "float16", "bfloat16"}
    timed, failed = ({row["method"] for row in result[kind]} for kind in ("rows", "failed"))
    ours = {name for name in timed if name.startswith("kernel")}
    assert {"kernel", "kernel, eager", "kernel, eager, ids checked", "kernel, num_stages=1"} <= ours
    assert {"contiguous SDPA", "gather + SDPA", "flex_attention"} <= timed
    assert not any(name.startswith("kernel") for name in failed) and "varlen_attn" in failed
    for row in result["rows"]:
        assert row["us"] > 0 and row["us_20_80"][0] <= row["us"] <= row["us_20_80"][1]
        assert row["error"] < 0.012 and row["bytes"] > 0 and row["to_kernel"]
    assert result["skipped"] == [] and list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("name", ["kernel", "kernel, num_warps=8"])
def test_a_wrong_kernel_is_reported_and_not_timed(gpu, name):
    run, found = examined(gpu, **{"contiguous SDPA": right, name: unwritten})
    assert found == {"rows": ["contiguous SDPA"], "failed": [name]}
    assert "relative error nan" in run.result["failed"][0]["why"] and run.wrong == 1


def test_one_wrong_token_of_one_head_is_seen(gpu):
    def one_off(batch):
        wrong = batch.expected.float().clone()
        wrong[1, 3] *= 1.001
        return lambda i: wrong

    assert examined(gpu, kernel=one_off)[1] == {"rows": [], "failed": ["kernel"]}


def test_a_method_that_fails_leaves_the_others(gpu):
    run, found = examined(gpu, kernel=right, varlen_attn=missing, flex_attention=unwritten)
    assert found == {"rows": ["kernel"], "failed": ["varlen_attn", "flex_attention"]}
    assert run.wrong == 0
    assert run.result["failed"][0]["why"] == "ImportError: no such thing in this torch"


def test_a_torch_without_paged_peers_is_told_apart_from_a_wrong_one(gpu, monkeypatch):
    contenders = sys.modules["contenders"]
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, key: None)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.flex_attention", None)
    builds = {"varlen_attn": contenders.varlen_paged, "flex_attention": contenders.flex_paged}
    run, found = examined(gpu, kernel=right, **builds)
    assert found == {"rows": ["kernel"], "failed": ["varlen_attn", "flex_attention"]}
    assert "takes no block table" in run.result["failed"][0]["why"]


def test_what_was_found_is_on_disk_after_every_row(gpu, tmp_path, monkeypatch):
    run = gpu.Run(torch.device("cpu"), tmp_path / "gpu.json")
    on_disk = []
    monkeypatch.setattr(
        gpu, "line", lambda *_: on_disk.append(json.loads(run.path.read_text())) or ""
    )
    gpu.examine(run, small_job(gpu, kernel=right, missing=missing, other=right))
    assert [(len(seen["failed"]), len(seen["rows"])) for seen in on_disk] == [
        (1, 0),
        (1, 1),
        (1, 2),
    ]


def test_when_time_is_short_the_rest_is_named_as_skipped(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    monkeypatch.setattr(gpu, "find_kernels", lambda pool: (None, None))
    out = tmp_path / "gpu.json"
    assert gpu.main(["--tiny", "--budget", "0", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["rows"] == [] and len(result["skipped"]) > 5
    assert result["skipped"][-1]["method"] == "5 methods"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no CUDA device here; --tiny"),
        (["--tiny", "--record"], "nothing that could be recorded"),
    ],
)
def test_nothing_is_recorded_that_no_gpu_did(gpu, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit:
        gpu.main(arguments)
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_on_a_gpu_a_graph_holds_one_call_for_each_pool(gpu, monkeypatch):
    """torch.cuda is played by a stand-in: this shows the calls, not that a card takes them."""
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    recorded, calls = [], []

    class Graph:
        def replay(self):
            recorded.append("replayed")

    stand_in = {
        "Stream": lambda: stream, "current_stream": lambda: stream, "CUDAGraph": Graph,
        "stream": nullcontext, "graph": lambda graph, stream: nullcontext(recorded.append("graph")),
        "synchronize": lambda: recorded.append("waited"),
        "get_device_properties": lambda device: SimpleNamespace(
            name="H200", multi_processor_count=132, L2_cache_size=60 << 20
        ),
    }  # fmt: skip
    for name, value in stand_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
    run = gpu.Run(torch.device("cuda"))
    assert run.result["device"] == "H200" and run.least_bytes > 30 * (60 << 20)
    replay = run.contender(calls.append, 3)
    assert calls == [0, 1, 2] * 2 and recorded == ["graph"]  # warm, then captured
    run.times({"kernel": replay})
    assert recorded[:3] == ["graph", "replayed", "waited"] and calls == [0, 1, 2] * 2
    run.contender(calls.append, 3, eager=True)()
    assert calls == [0, 1, 2] * 3 and recorded.count("graph") == 1


@pytest.mark.parametrize(
    ("batch", "context", "block_size", "of_copy", "ratio", "said"),
    [
        (64, 4096, 16, 0.93, 1.02, ["0.9: met", "1.0: missed"]),
        (64, 512, 16, 0.85, 0.97, ["1.0: met"]),
        (64, 4096, 1, 0.5, 1.5, []),
        (1, 4096, 16, 0.3, 1.5, []),
    ],
)
def test_the_goals_stand_beside_the_figures_they_are_for(
    gpu, batch, context, block_size, of_copy, ratio, said
):
    facts = {
        "model": "GPT-2", "batch": batch, "context": context, "dtype": "float16",
        "block_size": block_size, "order": "scattered", "method": "kernel",
        "us": 1.0, "us_20_80": [1.0, 1.0], "tb_per_s": 1.0,
        "of_copy": of_copy, "to_contiguous": [ratio, ratio, ratio],
    }  # fmt: skip
    line = gpu.line("rows", facts)
    assert line.count("goal") == len(said) and all(goal in line for goal in said)
    assert "goal" not in gpu.line("rows", facts | {"method": "gather + SDPA"})


@pytest.mark.slow
def test_compiling_ahead_fills_the_cache_that_the_run_will_look_into(tmp_path):
    code = (
        "import gpu; job = next(gpu.jobs(gpu.Card(132), tiny=False));"
        "gpu.compile_all([job._replace(methods=job.methods[:1])], 'sm_90', seconds=60)"
    )
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    said = subprocess.run(
        command, cwd=BENCHMARKS, env=env, check=True, capture_output=True, text=True
    )
    assert said.stdout.startswith("compiled 1 of 1")
    assert [path.name for path in tmp_path.rglob("*.cubin")] == ["split_kernel.cubin"]


@pytest.fixture
def kernels_copy(tmp_path):
    shutil.copytree(KERNELS, tmp_path, dirs_exist_ok=True)

    def change(name, old, new):
        text = (tmp_path / name).read_text()
        assert old in text
        (tmp_path / name).write_text(text.replace(old, new, 1))
        return kernel_fingerprint(tmp_path)

    return change


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("split_kv.py", "total * shrink + tl.sum", "total * shrink - tl.sum"),
        ("split_kv.py", "NEG = tl.constexpr(-1.0e30)", "NEG = tl.constexpr(-1.0e29)"),
        ("split_kv.py", "STAGES: tl.constexpr", "STAGES"),
        ("split_kv.py", '"stride_table", ', ""),
        ("paged_attention.py", "4 * card.num_sms", "5 * card.num_sms"),
        ("paged_attention.py", "num_warps: int = 4", "num_warps: int = 8"),
        ("paged_attention.py", "MAX_SPLITS = 128", "MAX_SPLITS = 64"),
        ("paged_attention.py", "[batch * kv_heads, num_splits]", "[num_splits, batch * kv_heads]"),
    ],
)
def test_what_changes_speed_changes_the_fingerprint(kernels_copy, name, old, new):
    assert kernels_copy(name, old, new) != kernel_fingerprint()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("split_kv.py", "# [ROWS, TILE]", "# another comment"),
        ("split_kv.py", "One split of one sequence", "Other words"),
        ("split_kv.py", "    of_group = ", "\n\n    of_group = "),
        ("paged_attention.py", "Choose tile, splits and warps", "Other words"),
        ("paged_attention.py", "at least 16, rows", "from 16, rows"),
        ("paged_attention.py", "no GPU that Triton can use", "no card"),
    ],
)
def test_what_speaks_to_a_reader_does_not(kernels_copy, name, old, new):
    assert kernels_copy(name, old, new) == kernel_fingerprint()


def test_a_recorded_gpu_run_names_its_machine_and_holds_no_wrong_kernel(gpu):
    if not gpu.RESULT.exists():
        pytest.skip("no run on a GPU is recorded")
    result = json.loads(gpu.RESULT.read_text())
    head = ("device", "sms", "l2_bytes", "driver", "cuda", "torch", "triton", "kernels", "date")
    assert all(result[key] for key in head) and "interpreter" not in result["device"]
    assert result["copy"] and result["checks"] and result["rows"]
    wrong = [row for row in result["failed"] if row["why"].startswith("Wrong")]
    assert not any(row["method"].startswith("kernel") for row in wrong)
