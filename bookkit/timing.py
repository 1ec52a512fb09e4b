"""The book's only timer: contenders in turn, medians, and ratios within one run."""

import ast
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping
from datetime import date
from hashlib import sha256
from pathlib import Path
from statistics import median
from time import perf_counter

KERNELS = Path(__file__).resolve().parent.parent / "kernels"


def machine() -> str:
    """The processor, its number of cores, and Python's version, for the head of a table.  Given."""
    cpuinfo = Path("/proc/cpuinfo")  # Linux alone has it, and not on every processor a name there
    named = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    name = named[1].strip() if named else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"


def write_record(path: Path, command: str, facts: Mapping) -> None:
    """Write a benchmark's `facts` for the book, under machine, date, commit, command.  Given."""
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True)
    head = {"machine": machine(), "date": str(date.today()), "commit": commit.strip()}
    path.write_text(json.dumps(head | {"command": command} | dict(facts), indent=1) + "\n")


def bench(
    contenders: Mapping[str, Callable[[], object]],
    repeats: int = 9,
    seconds: float = 0.02,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, list[float]]:
    """Seconds a call for each contender, `repeats` of them, in the order in which they were taken.

    Each is warmed up and then called often enough to fill about `seconds`; the contenders take
    turns, so that a slow moment of the machine meets all of them. Compare medians, as ratios:
    see `ratio`. Where calls return before their work is done, `clock` waits for it.  Given.
    """
    calls = {}
    for name, call in contenders.items():
        call()
        start = clock()
        call()
        calls[name] = max(1, round(seconds / max(clock() - start, 1e-9)))
    times = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, call in contenders.items():
            start = clock()
            for _ in range(calls[name]):
                call()
            times[name].append((clock() - start) / calls[name])
    return times


def ratio(times: Mapping[str, list[float]], slow: str, fast: str) -> tuple[float, float, float]:
    """How often `fast` goes into `slow`: median of the turns' ratios, smallest, largest.  Given."""
    ratios = [a / b for a, b in zip(times[slow], times[fast], strict=True)]
    return median(ratios), min(ratios), max(ratios)


def kernel_fingerprint(folder: Path = KERNELS) -> str:
    """12 hex digits of the code in `folder` that decides how fast the kernels run.  Given.

    They are made from the syntax trees of the device code and of its launcher. Comments, layout,
    texts and Python's version do not count.
    """
    code = []
    for name in ("split_kv.py", "paged_attention.py"):
        for node in ast.walk(ast.parse((folder / name).read_text("utf-8"))):
            words = [v for _, v in ast.iter_fields(node) if isinstance(v, str | int | float)]
            if all(str(word).isidentifier() or not isinstance(word, str) for word in words):
                code += [type(node).__name__, *map(repr, words)]  # no text for a reader
    return sha256(" ".join(code).encode()).hexdigest()[:12]
