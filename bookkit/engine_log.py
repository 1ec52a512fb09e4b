"""Reading the log of a real engine: what it did with each request, and how full it was."""

import math
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

import numpy as np

from bookkit.traces import TraceError, read_field, read_rows, whole
from labcore.workloads import Workload


@dataclass(frozen=True, eq=False)
class EngineLog:
    """What a real engine did with the requests of `workload`, and how full it was each second.

    One entry a request, in order of arrival: when it was `scheduled`, and its `first_token` and
    `last_token` came, in seconds from the first arrival. One a row of the series: `seconds`,
    requests `running` and `waiting`, and `kv_use`, the part of the cache in use, 0 to 1.  Given.
    """

    workload: Workload
    scheduled: np.ndarray
    first_token: np.ndarray
    last_token: np.ndarray
    seconds: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    kv_use: np.ndarray


def read_engine_log(path: str | Path) -> EngineLog:
    """Read an engine's log: the requests at `path`, NAME_requests.jsonl, and the series beside it.

    The clock of the requests' queued_ts, scheduled_ts, first_token_ts and last_token_ts is set by
    the one that waits the least to be queued. Raises as `read_trace`.  Given.
    """
    path = Path(path)
    series = path.with_name(path.name.replace("requests.jsonl", "timeseries.csv"))
    if series == path:
        raise TraceError(f"{path.name}: an engine's log is a NAME_requests.jsonl")
    requests = sorted(read_rows(path, _served), key=itemgetter(0))
    by_second = list(read_rows(series, _second))
    for name, rows in ((path.name, requests), (series.name, by_second)):
        if not rows:
            raise TraceError(f"{name}: no rows")
    for row, ((before, *_), (after, *_)) in enumerate(pairwise(by_second), 2):
        if after <= before:
            raise TraceError(f"{series.name}, row {row}: t = {after} comes after t = {before}")
    arrivals, queued, *times, prompts, outputs = map(np.array, zip(*requests, strict=True))
    zero = arrivals[0] + (queued - arrivals).min()
    workload = Workload(path.name, prompts, outputs, arrivals - arrivals[0])
    columns = map(np.array, zip(*by_second, strict=True))
    return EngineLog(workload, *(time - zero for time in times), *columns)


def _served(row: dict) -> tuple[float, float, float, float, float, int, int]:
    """(arrival, queued, scheduled, first and last token, prompt, output) of a request."""
    columns = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
    times = [read_field(row, column, _number) for column in columns]
    if times != sorted(times):
        raise ValueError(f"{', '.join(columns)} are in this order of time, got {times}")
    lengths = [read_field(row, column, whole, 1) for column in ("input_toks", "output_toks")]
    return read_field(row, "arrival_time", _number), *times, *lengths


def _second(row: dict) -> tuple[float, int, int, float]:
    """(t, running, waiting, part of the cache in use) of a row of the series."""
    running, waiting = (read_field(row, column, whole, 0) for column in ("running", "waiting"))
    used = read_field(row, "kv_cache_pct", _number)
    if used > 100:
        raise ValueError(f"a cache is at most 100% full, got {used}")
    return read_field(row, "t", _number), running, waiting, used / 100


def _number(value: str | float) -> float:
    try:
        number = -1 if isinstance(value, bool) else float(value)
    except (ValueError, TypeError):
        number = -1
    if not 0 <= number < math.inf:
        raise ValueError(f"expected a number, at least 0, got {value!r}")
    return number
