"""Attention through a block table on a GPU: our kernels against a copy, a gather, and torch's own.

Run: make gpu, or PYTHONPATH=. python benchmarks/gpu.py [--record | --out FILE] [--budget 220]
Takes under four minutes and 10 GB of GPU memory; compiles on all cores first. The JSON is written
again after every row; --record writes book/results/gpu.json for the book.
--tiny rehearses on a CPU, in Triton's interpreter: its times mean nothing.
--compile sm_90 compiles every kernel of a run for a card that is not here.

Each method is held against float64; what is wrong is reported, and not timed. Then a CUDA graph
calls it once for each of several pools, together far larger than the L2; the methods of a shape
take turns. A row gives microseconds a call (median, 20th and 80th percentile of the turns), the
bandwidth that is for the bytes that must move, and ratios of time to contiguous attention and to
our kernel by its plan (median, smallest and largest of the turns). "Eager" rows launch from Python,
call by call: at small shapes that is what a launch costs.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import torch
from contenders import Batch, Wrong, jobs

from bookkit.timing import bench, kernel_fingerprint, machine, ratio
from kernels.paged_attention import Card, find_kernels, paged_attention

RESULT = Path(__file__).resolve().parent.parent / "book/results/gpu.json"
GOALS = {"of_copy": 0.9, "to_contiguous": 1.0}  # of an H200 at 64 x 4096, and from 64 x 512 up


class Run:
    """Where this runs, how long it may, and what it has found."""

    def __init__(self, device, path=None, budget=220.0):
        self.device, self.path, self.end, self.wrong = device, path, perf_counter() + budget, 0
        self.on_gpu = device.type == "cuda"
        card, self.least_bytes = describe(device)
        self.result = card | {
            "machine": machine(), "torch": torch.__version__, "kernels": kernel_fingerprint(),
            "date": str(date.today()), "commit": said_by("git", "rev-parse", "--short", "HEAD"),
            "command": " ".join(["python", *sys.argv]), "copy": None,
            "checks": [], "rows": [], "failed": [], "skipped": [],
        }  # fmt: skip

    def left(self):
        return self.end - perf_counter()

    def add(self, kind, facts):
        """Keep, write and print one thing more: a run that is cut short leaves what it had."""
        self.result[kind].append(facts)
        self.save()
        print(line(kind, facts), flush=True)

    def save(self):
        if self.path:
            text, written = json.dumps(self.result, default=asdict), self.path.with_suffix(".tmp")
            written.write_text(text.replace('{"model"', '\n{"model"') + "\n")  # a line for each row
            os.replace(written, self.path)

    @contextmanager
    def reporting(self, **facts):
        """What fails in here is one thing more."""
        try:
            yield
        except Exception as error:
            self.wrong += isinstance(error, Wrong) and facts["method"].startswith("kernel")
            self.add("failed", facts | {"why": f"{type(error).__name__}: {error}"[:200]})

    def contender(self, call, pairs, eager=False):
        """A function that calls once for each pair of pools: on a GPU, one CUDA graph."""

        def work():
            for i in range(pairs):
                call(i)

        return cuda_graph(work) if self.on_gpu and not eager else work

    def times(self, contenders):
        """Seconds a call of each contender, turn by turn."""
        if self.on_gpu:
            return bench(contenders, repeats=15, seconds=0.01, clock=when_done)
        return bench(contenders, repeats=2, seconds=0)


def describe(device):
    """What the results say about it, and so many bytes that its L2 will not remember them."""
    import triton

    if device.type == "cpu":
        return {"device": "cpu, interpreter", "triton": triton.__version__}, 0
    card = torch.cuda.get_device_properties(device)
    facts = {
        "device": card.name, "sms": card.multi_processor_count, "l2_bytes": card.L2_cache_size,
        "driver": said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda, "triton": triton.__version__,
    }  # fmt: skip
    return facts, max(2e9, 32 * card.L2_cache_size)


def when_done():
    """The time at which the card has done all that it was given."""
    torch.cuda.synchronize()
    return perf_counter()


def cuda_graph(work):
    """The replay of all that `work` launches. It keeps no tensor alive: the caller must."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a capture that failed would leave its own stream in charge
        work()  # what compiles, or allocates once, does so here
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def said_by(*command):
    """The first line that a command prints, or "unknown"."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run.stdout.partition("\n")[0].strip()


def time_copy(run):
    """What the memory gives: bytes read and written by a copy of 2 GiB."""
    source = torch.randn((2 << 30 if run.on_gpu else 4 << 20) // 4, device=run.device)
    target = torch.empty_like(source)
    copy = run.contender(lambda _: target.copy_(source), 1)
    rates = [2 * source.nbytes / seconds / 1e12 for seconds in run.times({"copy": copy})["copy"]]
    run.result["copy"] = {"tb_per_s": median(rates), "range": [min(rates), max(rates)]}
    print(f"copy: {median(rates):.3g} TB/s ({min(rates):.3g} to {max(rates):.3g})", flush=True)


def examine(run, job):
    """Check each method of a job; time in turns those that are right."""
    batch = Batch(job.shape, run.device, run.least_bytes * job.timed)
    if not job.timed:
        batch.poison()
    found, contenders, calls = {}, {}, []
    for name, build, launch, change, eager in job.methods:
        facts = job.shape.facts() | {"method": name}
        facts |= {"launch": launch, "change": change} if launch else {}
        with run.reporting(**facts):
            calls.append(build(batch))
            facts["error"] = batch.error(calls[-1])
            if job.timed:
                contenders[name] = run.contender(calls[-1], len(batch.pools), eager)
                found[name] = facts
            else:
                run.add("checks", facts)
    times = run.times(contenders)
    for name, facts in found.items():
        run.add("rows", facts | measured(run, batch, times, name))


def measured(run, batch, times, name):
    """The figures of a row."""
    micros = [1e6 * seconds / len(batch.pools) for seconds in times[name]]
    low, *_, high = quantiles(micros, n=5, method="inclusive")
    speed, copy = batch.bytes / median(micros) / 1e6, run.result["copy"]
    row = {
        "us": round(median(micros), 2), "us_20_80": [round(low, 2), round(high, 2)],
        "bytes": batch.bytes, "pools": len(batch.pools), "tb_per_s": round(speed, 4),
        "of_copy": round(speed / copy["tb_per_s"], 4) if copy else None,
    }  # fmt: skip
    for key, other in (("to_contiguous", "contiguous SDPA"), ("to_kernel", "kernel")):
        if other in times:
            row[key] = [round(x, 3) for x in ratio(times, name, other)]
    return row


def line(kind, facts):
    """One thing found, as it is printed."""
    if "model" not in facts:
        return f"{kind:7} {facts['method']} {facts['why']}"
    said = "{model} {batch} x {context} {dtype}, {order} blocks of {block_size}: {method} "
    said = f"{kind:7} {said.format(**facts)}"
    if kind == "checks":
        return f"{said}error {facts['error']:.1e}"
    if kind != "rows":
        return said + facts.get("why", "")
    said += "{us} us {us_20_80}, {tb_per_s} TB/s".format(**facts)
    for key in ("of_copy", "to_contiguous"):
        if facts.get(key):
            said += f", {key} {facts[key]}{goal(key, facts)}"
    return said


def goal(key, facts):
    """What an H200 should reach here, if anything, and does it."""
    if facts["method"] != "kernel" or facts["batch"] < 64 or facts["block_size"] < 16:
        return ""
    if key == "to_contiguous":
        met = facts[key][0] <= GOALS[key]
    elif facts["context"] >= 4096:
        met = facts[key] >= GOALS[key]
    else:
        return ""
    return f" (goal on an H200 {GOALS[key]}: {'met' if met else 'missed'})"


def compile_variant(target, shape, launch):
    """In a process of its own: leave a kernel in Triton's cache on disk."""
    from bookkit.compile_only import compile_only

    queries, pool = shape.empty("cpu")
    tables, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with compile_only(target):
        paged_attention(queries, pool, pool, tables, lens, launch=launch, check_ids=False)


def compile_all(work, target, seconds):
    """Compile what these jobs launch, on all cores, as far as the seconds go."""
    from bookkit.compile_only import TARGETS

    if target not in TARGETS:
        raise ValueError(f"{target} is none of {', '.join(TARGETS)}")
    start = perf_counter()
    variants = {}  # lengths change no kernel
    for job in work:
        shape = replace(job.shape, lengths=(1,), in_order=False)
        variants |= {(shape, method.launch): None for method in job.methods if method.launch}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as workers:
        futures = [workers.submit(compile_variant, target, *variant) for variant in variants]
        done = wait(futures, timeout=seconds).done
        workers.shutdown(cancel_futures=True)
    wrong = sorted({str(future.exception()) for future in done if future.exception()})
    print(f"compiled {len(done)} of {len(futures)} in {perf_counter() - start:.0f} s", *wrong)


def arguments(given):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", action="store_true", help=f"write {RESULT.name} for the book")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    parser.add_argument("--budget", type=float, default=220, help="seconds; the rest is skipped")
    parser.add_argument("--tiny", action="store_true", help="rehearse on a CPU, interpreted")
    parser.add_argument("--compile", metavar="sm_90", help="compile for an absent card only")
    options = parser.parse_args(given)
    if options.tiny and options.record:
        parser.error("--tiny measures nothing that could be recorded")
    if not (options.tiny or options.compile or torch.cuda.is_available()):
        parser.error("no CUDA device here; --tiny rehearses on a CPU")
    os.environ["TRITON_INTERPRET"] = "1" if options.tiny else "0"  # Triton is not imported yet
    return options


def main(given=None):
    """Returns 1 if one of our kernels was wrong, else 0."""
    options = arguments(given)
    if options.compile:
        compile_all(jobs(Card(132), tiny=False), options.compile, seconds=3600)
        return 0
    torch.manual_seed(0)
    device = torch.device("cpu" if options.tiny else "cuda")
    run = Run(device, RESULT if options.record else options.out, options.budget)
    _, card = find_kernels(torch.empty(1, device=device))
    work = list(jobs(card, options.tiny))
    if run.on_gpu:
        with run.reporting(method="compiling ahead"):
            target = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
            compile_all(work, target, seconds=60)
    with run.reporting(method="copy"):
        time_copy(run)
    for job in work:
        facts = job.shape.facts() | {"method": f"{len(job.methods)} methods"}
        if run.left() < job.seconds:
            run.add("skipped", facts)
            continue
        with run.reporting(**facts):
            examine(run, job)
    print()
    for row in run.result["rows"]:
        if row["method"] == "kernel" and row["change"] is None:
            print(line("rows", row))
    print({kind: len(run.result[kind]) for kind in ("checks", "rows", "failed", "skipped")})
    return int(run.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
