"""Sweeps: one function run for every row of a grid of parameters, on all cores or on a cluster.

Parameters and results are what JSON can hold. NumPy's numbers become Python's, arrays and tuples
lists, on the way in and on the way out: a row read from a file equals the row that was run.
Whatever should differ between two rows is a parameter, a seed too.
"""

import json
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, is_dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue

from tqdm import tqdm


def sweep(
    grid: Mapping[str, Sequence] | Iterable[Mapping],
    run: Callable,
    executor: Executor | None = None,
    file: str | Path | None = None,
) -> list[dict]:
    """Call `run(**parameters)` for each row of `grid`; a table, one dict of both for each row.

    `grid` maps names to values, for all combinations, or lists the rows; the table keeps its order.
    `run` returns a mapping or a dataclass, the same columns each time, or one value, the column
    `result`. A row whose worker dies is run once more. One that fails has one column, `error`.

    By default each core gets a process, which imports `run`; a function of a notebook needs threads
    or Dask's `Client.get_executor()`. A given executor stays open, and must mend itself. Each row
    that ends well is added to `file` at once, and is not run again by the next call. Raises
    ValueError, with the row or the line, for a grid or a file that cannot be right.  Given.
    """
    rows = _rows(grid)
    name = f"{run.__module__}.{getattr(run, '__qualname__', '')}"
    if file and name.endswith("."):
        raise ValueError(f"a file knows its function by name, and {run!r:.60} has none")
    table = _read(Path(file), name, rows) if file else {}
    todo = [key for key in rows if key not in table]
    columns, failed = next((results.keys() for results in table.values()), None), 0
    with (
        open(file, "a", buffering=1) if file else nullcontext() as lines,
        tqdm(total=len(rows), initial=len(table), unit="run", delay=5, leave=False) as bar,
        closing(_outcomes(run, todo, executor)) as outcomes,
    ):
        for key, results in outcomes:
            if "error" not in results:
                columns = results.keys() if columns is None else columns
                if results.keys() != columns:
                    results = {"error": f"columns {[*results]}, other rows have {[*columns]}"}
                elif file:
                    line = {"run": name, "parameters": rows[key], "results": results}
                    lines.write(json.dumps(line) + "\n")
            table[key] = results
            failed += "error" in results
            bar.set_postfix(failed=failed, refresh=False)
            bar.update()
    return [rows[key] | table[key] for key in rows]


def _rows(grid) -> dict[str, dict]:
    """The rows by their text, in order."""
    if isinstance(grid, Mapping):
        for name, values in grid.items():
            if isinstance(values, str | bytes | Set | Mapping) or not isinstance(values, Iterable):
                raise ValueError(f"{name!r} has values in an order, not {values!r:.60}")
        grid = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    rows, names = {}, []
    for i, row in enumerate(grid):
        try:
            names = names or [*row]
            if not names or row.keys() != {*names} or "error" in names:
                raise ValueError(f"expected the names {names}, and none of them 'error'")
            plain = json.loads(json.dumps({name: row[name] for name in names}, default=_plain))
            if plain.keys() != row.keys():
                raise ValueError("a name is text")
            if rows.setdefault(json.dumps(plain, sort_keys=True), plain) is not plain:
                raise ValueError("the same as a row before it")
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"row {i} of the grid, {row!r:.200}: {error}") from None
    return rows


def _plain(value):
    """Numbers and arrays of NumPy and torch as Python's."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"a row holds numbers and text, not {value!r:.60}")
    return value.tolist()


def _read(path, name, rows) -> dict[str, dict]:
    """The results in a file, by the row's text. A last line that was not written out is cut off."""
    *lines, rest = path.read_bytes().split(b"\n") if path.exists() else [b""]
    table = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            key = json.dumps(row["parameters"], sort_keys=True)
            if row["run"] != name:
                raise ValueError(f"a row of {row['run']}, not of {name}")
            if key not in rows or key in table:
                raise ValueError(f"{key} is {'there twice' if key in table else 'not in the grid'}")
            table[key] = results = dict(row["results"])
            if taken := results.keys() & {*row["parameters"], "error"}:
                raise ValueError(f"results are not called {sorted(taken)}")
            if results.keys() != (columns := next(iter(table.values())).keys()):
                raise ValueError(f"columns {[*results]}, rows before it have {[*columns]}")
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}, is no row of this sweep: {error}") from None
    if not rest.startswith(b'{"run": "'[: len(rest)]):
        raise ValueError(f"{path}, line {len(lines) + 1}, is no row of a sweep")
    if rest:
        os.truncate(path, path.stat().st_size - len(rest))
    return table


def _outcomes(run, keys, executor) -> Iterator[tuple[str, dict]]:
    """Each row's text, and its results or error, as they finish.

    A process is a pool of its own, with one row at a time: if it dies, it died of that row.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pools = [executor] * len(keys) if executor else [None] * min(cores, len(keys))
    todo, again, running, done = deque(keys), set(), {}, SimpleQueue()
    with ExitStack() as stack:
        stack.callback(lambda: [future.cancel() for future in running])
        if pools and not executor:
            pools[-1] = _process(stack)
            _check(pools[-1], run)
        while todo or running:
            while todo and pools and done.empty():
                key, pool = todo.popleft(), pools.pop() or _process(stack)
                future = _submit(pool, _call, run, key, key in again)
                running[future] = key, pool
                future.add_done_callback(done.put)
            future = done.get()
            key, pool = running.pop(future)
            try:
                yield key, json.loads(future.result())
            except Exception as error:
                died = isinstance(error, BrokenExecutor | CancelledError)
                if (died or type(error).__name__ == "KilledWorker") and key not in again:  # Dask's
                    again.add(key)
                    todo.append(key)
                else:
                    yield key, {"error": f"{type(error).__name__}: {error}"}
                pool = executor if isinstance(error, BrokenExecutor) else pool
            pools.append(pool)


def _process(stack) -> Executor:
    """A process that starts afresh: the fork of one with threads, such as torch's, may hang."""
    return stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))


def _check(pool, run) -> None:
    try:
        pool.submit(pickle.loads, pickle.dumps(run)).result()
    except Exception as error:
        name = getattr(run, "__qualname__", run)
        raise ValueError(
            f"a new process cannot import {name}: {error}. Put it into a module, and call sweep "
            "under `if __name__ == '__main__':`; in a notebook, give an executor"
        ) from error


def _submit(pool, *call) -> Future:
    """A future even from a pool that refuses."""
    try:
        return pool.submit(*call)
    except Exception as error:
        future = Future()
        future.set_exception(error)
        return future


def _call(run, key, again) -> str:
    """The results or the error of one row, as text. `again` makes it another task for Dask."""
    try:
        parameters = json.loads(key)
        results = run(**parameters)
        if is_dataclass(results):
            results = asdict(results)
        if not isinstance(results, Mapping):
            results = {"result": results}
        if taken := results.keys() & {*parameters, "error"}:
            raise ValueError(f"run returns what is not its own: {sorted(taken)}")
        return json.dumps(dict(results), default=_plain)
    except (Exception, SystemExit) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})
