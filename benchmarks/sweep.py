"""A sweep of 10,000 short simulations, and of runs of other lengths: a loop, processes, Dask.

One process a core, or one worker of a Dask cluster on this machine. Speed-ups are the plain loop's
seconds / the sweep's, in one run; the tables must be equal. The overhead is what a run costs a
worker beyond computing: (workers x seconds - the loop's) / runs. In the seconds of the simulations
is the start of the processes, not that of the cluster. Runs of other lengths are few, and meet a
pool that is there already; the median of three turns counts, and all are recorded.
Run: python benchmarks/sweep.py [--runs N] [--record]
Takes under three minutes on two quiet cores; --record writes book/results/sweep.json for the book.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from time import perf_counter, process_time

from bookkit.sweep import sweep
from bookkit.timing import machine, write_record
from labcore.admission import paged
from labcore.simulator import simulate
from labcore.workloads import draw

RESULT = Path(__file__).resolve().parent.parent / "book/results/sweep.json"
RUNS, REQUESTS = 10_000, 300
LENGTHS = (1, 3, 10, 30, 100)  # ms of processor time a run
SECONDS, TURNS = 1, 3  # of computing for each length and turn


def run(workload, watermark, seed):
    """One short simulation: about 3 ms."""
    result = simulate(paged, draw(workload, REQUESTS, seed), budget=4_096, watermark=watermark)
    return {"steps": result.steps, "preemptions": result.preemptions}


def spin(ms, seed):
    """Keep a processor busy for `ms` milliseconds of its time."""
    end = process_time() + ms / 1e3
    while process_time() < end:
        pass
    return {"seed_again": seed}


def loop(grid, call):
    """What a sweep is held against."""
    return [row | call(**row) for row in grid]


def once(call, *arguments):
    start = perf_counter()
    return call(*arguments), perf_counter() - start


def compare(grid, call, executors, workers):
    """Facts of each way to run a grid. Half of the plain loop comes before the others."""
    middle = len(grid) // 2
    first, before = once(loop, grid[:middle], call)
    swept = {how: once(sweep, grid, call, executor) for how, executor in executors.items()}
    second, after = once(loop, grid[middle:], call)
    serial = before + after
    facts = {"loop": {"seconds": round(serial, 3), "runs_per_second": round(len(grid) / serial)}}
    for how, (table, seconds) in swept.items():
        assert table == first + second, how
        facts[how] = {
            "seconds": round(seconds, 3),
            "runs_per_second": round(len(grid) / seconds),
            "speedup": round(serial / seconds, 3),
            "overhead_ms": round(1e3 * (workers * seconds - serial) / len(grid), 3),
        }
    return facts


def middle_of(turns):
    """The turn with the median speed-up, and the speed-ups of all."""
    turns = sorted(turns, key=itemgetter("speedup"))
    return turns[len(turns) // 2] | {"speedups": [turn["speedup"] for turn in turns]}


def measure(runs, lengths, seconds, executors, pool, workers):
    """The simulations, then runs of each length, printed as they come."""
    grid = [
        {"workload": workload, "watermark": watermark, "seed": seed}
        for workload in ("chat", "long_answer")
        for watermark in (0.0, 0.02, 0.05, 0.1, 0.2)
        for seed in range(runs // 10)
    ]
    facts = compare(grid, run, executors, workers)
    print(f"{len(grid):,} simulations of {REQUESTS} requests, {workers} workers")
    for how in facts:
        print(f"{how:10} {facts[how]}", flush=True)
    nothing = [{"ms": 0, "seed": seed} for seed in range(10 * workers)]
    _, start = once(sweep, nothing, spin)
    print(f"Starting the processes: {start:.2f} s")
    result = {"runs": len(grid), "simulations": facts, "start_seconds": round(start, 3)}
    result["lengths"] = []
    executors = executors | {"processes": pool}
    sweep(nothing, spin, pool)
    for ms in lengths:
        grid = [{"ms": ms, "seed": seed} for seed in range(int(1e3 * seconds / ms))]
        turns = [compare(grid, spin, executors, workers) for _ in range(TURNS)]
        facts = {how: middle_of([turn[how] for turn in turns]) for how in executors}
        result["lengths"].append({"ms": ms, "runs": len(grid)} | facts)
        for how in executors:
            print(f"{len(grid):5,} runs of {ms:3} ms, {how:10} {facts[how]}", flush=True)
    return result


def main():
    from distributed import Client, LocalCluster  # here: a new process imports what stands above

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=RUNS, help="simulations, a multiple of 10")
    parser.add_argument("--record", action="store_true", help=f"write {RESULT.name} for the book")
    options = parser.parse_args()
    print(machine())
    workers = os.cpu_count()
    with (
        LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        ProcessPoolExecutor(workers, get_context("spawn")) as pool,
    ):
        executors = {"processes": None, "dask": client.get_executor()}
        sweep({"ms": [0], "seed": range(20)}, spin, executors["dask"])  # workers import it all
        result = measure(options.runs, LENGTHS, SECONDS, executors, pool, workers)
    if options.record:
        head = {"workers": workers, "requests": REQUESTS}
        head |= {package: version(package) for package in ("dask", "numpy")}
        write_record(RESULT, "python benchmarks/sweep.py --record", head | result)


if __name__ == "__main__":
    main()
