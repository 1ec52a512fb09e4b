"""Sweeps: every row once, in the grid's order, whoever runs it and whatever dies meanwhile."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGINT
from time import sleep
from types import SimpleNamespace

import dask
import distributed
import numpy as np
import pytest
import sweep_runs
import yaml
from distributed import Client, KilledWorker, LocalCluster
from hypothesis import given, settings
from hypothesis import strategies as st

from bookkit.sweep import sweep

ROOT = Path(__file__).resolve().parent.parent


class Serial(Executor):
    """Runs a call where it is submitted. `outcomes` of the first calls can be given instead."""

    def __init__(self, *outcomes):
        self.outcomes, self.calls = list(outcomes), 0

    def submit(self, call, *arguments):
        self.calls += 1
        future = Future()
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if isinstance(outcome, CancelledError):
            future.cancel()
        elif outcome:
            future.set_exception(outcome)
        else:
            future.set_result(call(*arguments))
        return future


@pytest.fixture(scope="module")
def cluster():
    quick = {"distributed.scheduler.allowed-failures": 1}
    with (
        dask.config.set(quick),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def same(n):
    return n


# --- the grid


@pytest.mark.parametrize(
    ("grid", "rows"),
    [
        ({"a": [1, 2], "b": ["x", "y"]}, [(1, "x"), (1, "y"), (2, "x"), (2, "y")]),
        ({"b": ["x", "y"], "a": [1, 2]}, [("x", 1), ("x", 2), ("y", 1), ("y", 2)]),
        ({"a": (n for n in (2, 1))}, [(2,), (1,)]),
        ({"a": range(3), "b": [None]}, [(0, None), (1, None), (2, None)]),
        ([{"a": 1, "b": 9}, {"b": 7, "a": 3}], [(1, 9), (3, 7)]),
        (({"a": n} for n in (5, 4)), [(5,), (4,)]),
        ({"a": [1, True, 1.0]}, [(1,), (True,), (1.0,)]),
        ({"a": [[1, 2], [2, 1]], "b": [{"c": 0}]}, [([1, 2], {"c": 0}), ([2, 1], {"c": 0})]),
        ({"a": []}, []),
        ([], []),
    ],
)
def test_rows_come_in_the_order_of_the_grid(grid, rows):
    table = sweep(grid, lambda **parameters: 0, Serial())
    assert [tuple(row.values()) for row in table] == [(*row, 0) for row in rows]
    assert all(list(row) == [*table[0]] for row in table)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"policy": "paged"}, "'policy' has values in an order, not 'paged'"),
        ({"a": {1, 2}}, "'a' has values in an order, not {1, 2}"),
        ({"a": 3}, "'a' has values in an order, not 3"),
        ({}, "row 0 of the grid, {}: expected the names"),
        ([{"a": 1}, {"b": 1}], r"row 1 of the grid, {'b': 1}: expected the names \['a'\]"),
        ([{"a": 1}, {"a": 1, "b": 1}], "row 1 .* expected the names"),
        ([{"a": 1}, 3], "row 1 of the grid, 3: 'int' object has no attribute 'keys'"),
        ({"error": [1]}, "none of them 'error'"),
        ({1: [2]}, "row 0 of the grid, {1: 2}: a name is text"),
        ({"a": [1, 2, 1]}, "row 2 of the grid, {'a': 1}: the same as a row before"),
        ({"a": [math.nan, math.nan]}, "row 1 .* the same as a row before"),
        ({"a": [2, np.int64(2)]}, "row 1 .* the same as a row before"),
        ({"a": [1, same]}, "row 1 .* a row holds numbers and text, not <function same"),
        ({"a": [1j]}, "row 0 .* a row holds numbers and text, not 1j"),
    ],
)
def test_a_grid_that_is_none_is_refused_before_anything_runs(grid, message):
    executor = Serial()
    with pytest.raises(ValueError, match=message):
        sweep(grid, same, executor)
    assert executor.calls == 0


def test_values_in_and_out_are_pythons_own():
    seen = []

    def run(n):
        seen.append(n)
        return {
            "float": np.float32(0.5),
            "flag": np.bool_(True),
            "list": (np.arange(2), [np.ones(1)]),
        }

    grid = {"n": [np.int64(3), np.float64(0.1), np.arange(2), (4, 5)]}
    table = sweep(grid, run, Serial())
    assert seen == [3, 0.1, [0, 1], [4, 5]]
    assert [type(value) for value in seen] == [int, float, list, list]
    rest = {"float": 0.5, "flag": True, "list": [[0, 1], [[1.0]]]}
    assert table == [{"n": n} | rest for n in seen]
    assert type(table[0]["flag"]) is bool


# --- what a run returns


@dataclass(frozen=True)
class Point:
    x: int
    y: tuple


@pytest.mark.parametrize(
    ("returned", "columns"),
    [
        ({"x": 1, "y": None}, {"x": 1, "y": None}),
        (Point(1, (2, 3)), {"x": 1, "y": [2, 3]}),
        (4.5, {"result": 4.5}),
        (None, {"result": None}),
        ([1, 2], {"result": [1, 2]}),
        ({}, {}),
        (math.inf, {"result": math.inf}),
        ({"n": 3}, {"error": "ValueError: run returns what is not its own: ['n']"}),
        ({"error": "x"}, {"error": "ValueError: run returns what is not its own: ['error']"}),
        ({"x": same}, {"error": "TypeError: a row holds numbers and text, not <function same"}),
    ],
)
def test_a_mapping_a_dataclass_or_one_value_make_the_columns(returned, columns):
    (row,) = sweep({"n": [7]}, lambda n: returned, Serial())
    if "error" in columns:
        assert row.pop("error").startswith(columns.pop("error"))
    assert row == {"n": 7} | columns


def test_other_columns_than_those_of_the_first_row_are_a_failure():
    table = sweep({"n": [1, 2, 3]}, lambda n: {"a": n} if n != 2 else {"a": n, "b": 0}, Serial())
    assert table[1] == {"n": 2, "error": "columns ['a', 'b'], other rows have ['a']"}
    assert [row.get("a") for row in table] == [1, None, 3]
    empty, other = sweep({"n": [1, 2]}, lambda n: {} if n == 1 else {"a": n}, Serial())
    assert (empty, other["error"]) == ({"n": 1}, "columns ['a'], other rows have []")


class Odd(Exception):
    """Cannot be read back from a pickle, which would break a pool of processes."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def test_failures_stand_beside_their_parameters_and_the_rest_is_there():
    def run(n):
        if n == 1:
            raise Odd("this", "that")
        if n == 2:
            sys.exit(3)
        return 1 / (n - 3)

    assert sweep({"n": range(5)}, run, ThreadPoolExecutor(2)) == [
        {"n": 0, "result": -1 / 3},
        {"n": 1, "error": "Odd: this and that"},
        {"n": 2, "error": "SystemExit: 3"},
        {"n": 3, "error": "ZeroDivisionError: division by zero"},
        {"n": 4, "result": 1.0},
    ]


# --- who runs it


def test_processes_give_the_rows_of_a_plain_loop_in_its_order():
    grid = [{"n": n, "late": 6} for n in range(7)]
    assert sweep(grid, sweep_runs.squares) == [row | sweep_runs.squares(**row) for row in grid]


def test_a_given_executor_is_left_open():
    with ThreadPoolExecutor(3) as threads:
        grid = [{"n": n, "late": 3} for n in range(4)]
        table = sweep(grid, sweep_runs.squares, threads)
        assert table == [row | sweep_runs.squares(**row) for row in grid]
        assert threads.submit(same, 8).result() == 8


def test_a_process_that_dies_costs_no_other_row_anything(tmp_path):
    log = tmp_path / "log"
    table = sweep({"n": range(8), "log": [str(log)]}, sweep_runs.moody)
    assert [row["n"] for row in table] == list(range(8))
    assert [row.get("result") for row in table] == [1, 1, 2, 1, None, 1, None, 1]
    assert table[4]["error"].startswith("BrokenProcessPool: ")
    assert table[6]["error"] == "ValueError: six"
    assert sorted(log.read_text().split()) == list("0122344567")


def test_a_function_that_no_process_can_import_is_refused_at_once():
    with pytest.raises(ValueError, match=r"cannot import .*lambda.*Put it into a module"):
        sweep({"n": [1]}, lambda n: n)


@pytest.mark.parametrize("name", ["-c", "script.py"])
def test_a_notebook_and_a_script_without_a_guard_are_told_what_to_do(tmp_path, name):
    """The __main__ of a notebook has no file, nor has that of `python -c`."""
    text = "from bookkit.sweep import sweep\ndef run(n): return n\nsweep({'n': [1]}, run)"
    (tmp_path / "script.py").write_text(text)
    command = [sys.executable, name, text]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert "ValueError: a new process cannot import run: " in last
    assert "under `if __name__ == '__main__':`; in a notebook, give an executor" in last


@pytest.mark.parametrize(
    "lost", [CancelledError(), KilledWorker("row", SimpleNamespace(address="tcp"), 3)]
)
def test_a_row_whose_worker_is_lost_is_run_once_more_and_then_fails(lost):
    assert sweep({"n": [1, 2]}, same, Serial(lost)) == [
        {"n": 1, "result": 1},
        {"n": 2, "result": 2},
    ]
    executor = Serial(lost, None, lost)
    first, second = sweep({"n": [1, 2]}, same, executor)
    assert first["error"].startswith(type(lost).__name__) and second["result"] == 2
    assert executor.calls == 3


def test_a_given_pool_that_breaks_ends_the_rows_that_it_had():
    """A broken pool refuses all work, and only its owner can replace it."""
    with ThreadPoolExecutor(1, initializer=sys.exit) as pool:
        table = sweep({"n": [1, 2]}, same, pool)
    assert [row["error"].split(":")[0] for row in table] == ["BrokenThreadPool"] * 2


def test_on_a_cluster_the_rows_are_those_of_the_processes(cluster):
    grid = {"n": range(12), "late": [0]}
    table = sweep(grid, sweep_runs.squares, cluster.get_executor())
    assert table == sweep(grid, sweep_runs.squares, Serial())
    assert sweep({"n": [3]}, lambda n: n + 1, cluster.get_executor()) == [{"n": 3, "result": 4}]
    assert cluster.submit(sweep_runs.squares, 8).result()["square"] == 64


def test_a_worker_killed_in_mid_sweep_costs_a_cluster_no_row_and_doubles_none(cluster, tmp_path):
    log, file = tmp_path / "log", tmp_path / "rows.jsonl"
    grid = {"n": range(20), "log": [str(log)]}
    table = sweep(grid, sweep_runs.fragile, cluster.get_executor(), file)
    assert [(row["n"], row["result"]) for row in table] == [(n, n * n) for n in range(20)]
    assert log.read_text().split().count("5") == 2
    written = [json.loads(line)["parameters"]["n"] for line in file.read_text().splitlines()]
    assert sorted(written) == list(range(20))


# --- the file


def swept(file, grid=range(6), fails=()):
    """The table, and which rows were run."""
    ran = []

    def run(n):
        ran.append(n)
        if n in fails:
            raise ValueError(n)
        return {"square": n * n}

    return sweep({"n": grid}, run, Serial(), file), ran


def test_a_second_call_runs_only_what_has_not_ended_well(tmp_path):
    file = tmp_path / "rows.jsonl"
    table, ran = swept(file, fails=[2, 4])
    assert ran == [0, 1, 2, 3, 4, 5] and table[2] == {"n": 2, "error": "ValueError: 2"}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["parameters"]["n"] for line in lines] == [0, 1, 3, 5]
    assert lines[1]["results"] == {"square": 1} and lines[1]["run"].endswith("swept.<locals>.run")
    table, ran = swept(file)
    assert ran == [2, 4] and table == [{"n": n, "square": n * n} for n in range(6)]
    assert swept(file) == (table, [])
    table, ran = swept(file, grid=range(7, -1, -1))
    assert ran == [7, 6] and [row["n"] for row in table] == [7, 6, 5, 4, 3, 2, 1, 0]


def test_a_row_is_in_the_file_as_soon_as_it_has_ended(tmp_path):
    file, seen = tmp_path / "rows.jsonl", []
    sweep({"n": range(3)}, lambda n: seen.append(file.read_text().count("\n")), Serial(), file)
    assert seen == [0, 1, 2]


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 1_000))
def test_a_file_cut_off_anywhere_is_taken_up_from_there(tmp_path_factory, cut):
    file = tmp_path_factory.mktemp("cut") / "rows.jsonl"
    whole, _ = swept(file, range(4))
    text = file.read_bytes()
    cut %= len(text) + 1
    file.write_bytes(text[:cut])
    table, ran = swept(file, range(4))
    assert table == whole and ran == list(range(text[:cut].count(b"\n"), 4))
    assert sorted(file.read_bytes().splitlines()) == sorted(text.splitlines())


def test_rows_are_the_same_read_or_run(tmp_path):
    def run(n):
        return {"value": n, "more": [1.1e-300, -0.0, 10**20, "é\n"]}

    grid = {"n": [math.inf, math.nan, 0.1 + 0.2, "ä", None, [1, {"a": (2,)}]]}
    fresh = sweep(grid, run, Serial(), tmp_path / "rows.jsonl")
    executor = Serial()
    assert repr(sweep(grid, run, executor, tmp_path / "rows.jsonl")) == repr(fresh)
    assert executor.calls == 0


def line(n=0, run="test_sweep.swept.<locals>.run", **results):
    results = results or {"square": n * n}
    return json.dumps({"run": run, "parameters": {"n": n}, "results": results})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line(0), line(9)], 'line 2, is no row of this sweep: {"n": 9} is not in the grid'),
        ([line(0), line(1), line(0)], 'line 3, .*: {"n": 0} is there twice'),
        (
            [line(0, "test_sweep.other")],
            "line 1, .*: a row of test_sweep.other, not of test_sweep.",
        ),
        ([line(0), "", line(1)], "line 2, .*: Expecting value"),
        ([line(0), '{"run": "half'], "line 2, .*: Unterminated string"),
        (["n,square", "0,0"], "line 1, .*: Expecting value"),
        (["[1]"], "line 1, .*: list indices"),
        (['{"run": "x"}'], "line 1, .*: 'parameters'"),
        ([line(0).replace("0}", '0, "m": 1}', 1)], "line 1, .* is not in the grid"),
        ([line(0), line(1).replace("square", "n")], r"line 2, .*: results are not called \['n'\]"),
        ([line(0, error="no")], r"line 1, .*: results are not called \['error'\]"),
        ([line(0), line(1, cube=1)], r"line 2, .*: columns \['cube'\], rows before it have"),
    ],
)
def test_a_file_that_holds_something_else_is_refused_and_left_as_it_is(tmp_path, lines, message):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{text}\n" for text in lines))
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"rows\.jsonl, " + message):
        swept(file)
    assert file.read_bytes() == before


@pytest.mark.parametrize("text", ["1,2", line(0) + "\nrest", '{"n": 1}'])
def test_an_unfinished_line_is_cut_only_where_a_sweep_wrote_it(tmp_path, text):
    file = tmp_path / "notes.txt"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"line {1 + text.count(chr(10))}, is no row of a sweep"):
        swept(file)
    assert file.read_text() == text


def test_columns_that_the_file_does_not_have_are_a_failure_and_not_written(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(line(0, cube=0) + "\n")
    table, _ = swept(file, range(2))
    assert table[1] == {"n": 1, "error": "columns ['square'], other rows have ['cube']"}
    assert file.read_text() == line(0, cube=0) + "\n"


def test_a_file_wants_a_function_with_a_name_and_a_folder_that_exists(tmp_path):
    with pytest.raises(ValueError, match="a file knows its function by name"):
        sweep({"n": [1]}, partial(same), Serial(), tmp_path / "rows.jsonl")
    assert sweep({"n": [1]}, partial(same), Serial()) == [{"n": 1, "result": 1}]
    with pytest.raises(FileNotFoundError):
        sweep({"n": [1]}, same, Serial(), tmp_path / "none" / "rows.jsonl")


def test_an_interrupted_sweep_has_written_what_it_had_and_starts_nothing_more(tmp_path):
    ran, file = [], tmp_path / "rows.jsonl"

    def run(n):
        ran.append(n)
        if n == 3:
            sleep(0.3)  # by then the rows before it are written
            os.kill(os.getpid(), SIGINT)
            sleep(1)
        return {"square": n}

    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(KeyboardInterrupt):
            sweep({"n": range(100)}, run, threads, file)
    assert ran == [0, 1, 2, 3]
    assert [json.loads(text)["parameters"]["n"] for text in file.read_text().splitlines()] == [
        0,
        1,
        2,
    ]


# --- what it loads, and what it costs


def test_a_sweep_loads_neither_torch_nor_matplotlib_nor_dask():
    heavy = {"torch", "matplotlib", "triton", "numpy", "dask", "distributed"}
    code = f"import sys, bookkit.sweep; print(*sorted({heavy} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "\n"


# --- the benchmark, and the page


def load_benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_sweep", ROOT / "benchmarks/sweep.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_gets_the_same_table_from_everybody(cluster, capsys, monkeypatch):
    benchmark = load_benchmark()
    executors = {"processes": Serial(), "dask": cluster.get_executor()}
    monkeypatch.setattr(benchmark, "sweep", lambda *a: sweep(*a) if a[2:] else None)  # no start
    result = benchmark.measure(10, [1], 0.005, executors, Serial(), workers=2)
    assert result["runs"] == 10 and [row["runs"] for row in result["lengths"]] == [5]
    assert result["simulations"]["loop"]["seconds"] > 0
    speedups = result["lengths"][0]["dask"]["speedups"]
    assert speedups[1] == result["lengths"][0]["dask"]["speedup"] and len(speedups) == 3
    assert "10 simulations of 300 requests, 2 workers" in capsys.readouterr().out


def test_the_recorded_sweep_names_its_machine_and_holds_every_length():
    benchmark = load_benchmark()
    recorded = json.loads(benchmark.RESULT.read_text())
    head = ("machine", "workers", "dask", "numpy", "date", "commit", "command")
    assert all(recorded[key] for key in head)
    assert recorded["runs"] == benchmark.RUNS
    assert [row["ms"] for row in recorded["lengths"]] == [*benchmark.LENGTHS]


PAGE = (ROOT / "book/cluster.md").read_text()
SCRIPT, CLUSTER = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


def test_the_script_on_the_page_runs_on_all_cores(tmp_path):
    (tmp_path / "one_run.py").write_text(SCRIPT)
    command = [sys.executable, "one_run.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "16 rows, 0 failures\n"
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 16


def test_the_call_on_a_cluster_that_the_page_shows_runs(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    address = cluster.scheduler.address
    names = {"sweep": sweep, "one_run": sweep_runs.squares, "grid": {"n": [3], "late": [0]}}
    exec(CLUSTER.replace("tcp://10.0.0.1:8786", address), names)
    names["client"].close()
    assert names["rows"] == [{"n": 3, "late": 0, "square": 9, "half": 1.5}]
    assert (tmp_path / "rows.jsonl").is_file()


def test_what_the_page_says_of_dask_is_so():
    worker = importlib.import_module("distributed.cli.dask_worker").main
    known = {name for option in worker.params for name in option.opts}
    assert set(re.findall(r"--\w+", PAGE.split("dask worker")[1].split("\n")[0])) <= known
    defaults = yaml.safe_load((Path(distributed.__file__).parent / "distributed.yaml").read_text())
    assert (
        defaults["distributed"]["scheduler"]["allowed-failures"] + 1 == 4 and "four dying" in PAGE
    )
