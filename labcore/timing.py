"""The book's only timer: contenders in turn, medians, and ratios within one run."""

import os
import platform
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter


def machine() -> str:
    """The processor, its number of cores, and Python's version, for the head of a table.  Given."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
        name = names[0] if names else name
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"


def bench(
    contenders: Mapping[str, Callable[[], object]], repeats: int = 9, seconds: float = 0.02
) -> dict[str, list[float]]:
    """Seconds a call for each contender, `repeats` of them, in the order in which they were taken.

    Each is warmed up and then called often enough to fill about `seconds`; the contenders take
    turns, so that a slow moment of the machine meets all of them. Compare medians, as ratios:
    see `ratio`.  Given.
    """
    calls = {}
    for name, call in contenders.items():
        call()
        start = perf_counter()
        call()
        calls[name] = max(1, round(seconds / max(perf_counter() - start, 1e-9)))
    times = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, call in contenders.items():
            start = perf_counter()
            for _ in range(calls[name]):
                call()
            times[name].append((perf_counter() - start) / calls[name])
    return times


def ratio(times: Mapping[str, list[float]], slow: str, fast: str) -> tuple[float, float, float]:
    """How often `fast` goes into `slow`: median of the turns' ratios, smallest, largest.  Given."""
    ratios = [a / b for a, b in zip(times[slow], times[fast], strict=True)]
    return median(ratios), min(ratios), max(ratios)
