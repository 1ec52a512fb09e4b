"""The lengths of a trace as tables of quantiles: small enough to ship, and to draw from."""

import json
from math import inf
from operator import index
from pathlib import Path

import numpy as np

from labcore.workloads import TOO_LONG, Workload

# where the quantiles of a table stand: close together at the ends, where one request weighs most
PERCENT = [0, 1, *range(5, 91, 5), 92, 94, 96, 98, 99, 99.5, 100]
#: The tables that are shipped, with their source; written by benchmarks/traces.py.  Given.
TABLES = Path(__file__).with_name("azure2023.json")


def quantiles(workload: Workload, bands: int = 10) -> dict:
    """The table of a workload's lengths that `draw_quantiles` takes; JSON can hold it.

    In order of prompt, requests are cut into `bands` of one size; each has the quantiles of its
    prompts and outputs at `percent`. Raises TypeError, and ValueError for fewer than bands.  Given.
    """
    if not isinstance(workload, Workload):
        raise TypeError(f"expected a Workload, got {workload!r:.40}")
    if not 1 <= index(bands) <= len(workload):
        raise ValueError(f"{len(workload)} requests cannot be cut into {bands} bands")
    parts = np.array_split(np.argsort(workload.prompts, kind="stable"), bands)
    table = {"percent": PERCENT}
    for kind in ("prompts", "outputs"):
        lengths = getattr(workload, kind)
        rows = [np.percentile(lengths[part], PERCENT, method="inverted_cdf") for part in parts]
        table[kind] = np.array(rows).tolist()
    return table


def draw_quantiles(
    table: str | dict, num_requests: int = 3_000, seed: int = 0, max_context: int | None = 1_024
) -> Workload:
    """Draw requests from the quantiles of a trace: azure_conv, azure_code, or a table of your own.

    Each draw takes a band, and in it a prompt and an output, independently and linearly between the
    quantiles. Those above `max_context` (None: no limit) are set aside. Raises ValueError.  Given.
    """
    name = table if isinstance(table, str) else "quantiles"
    if isinstance(table, str):
        tables = json.loads(TABLES.read_text(encoding="utf-8"))["tables"]
        if name not in tables:
            raise ValueError(f"no table {name!r}: choose one of {', '.join(tables)}")
        table = tables[name]
    percent, rows = _checked(table)
    rng = np.random.default_rng(seed)
    band = rng.integers(rows.shape[1], size=num_requests)
    at = 101 * band + rng.uniform(0, 100, (2, num_requests))  # all bands, one after the other
    places = np.add.outer(101 * np.arange(rows.shape[1]), percent).ravel()
    prompts, outputs = (
        np.rint(np.interp(x, places, row.ravel())).astype(np.int64)
        for x, row in zip(at, rows, strict=True)
    )
    fits = prompts + outputs <= (inf if max_context is None else max_context)
    set_aside = {TOO_LONG: int((~fits).sum())}
    return Workload(name, prompts[fits], outputs[fits], set_aside=set_aside)


def _checked(table: dict) -> tuple[np.ndarray, np.ndarray]:
    """The percentages of a table, and its quantiles [prompts and outputs, bands, percentages]."""
    try:
        percent = np.array(table["percent"], float)
        rows = np.array([table["prompts"], table["outputs"]], float)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no table of percent, prompts and outputs: {error}") from None
    rising = percent.ndim == 1 < percent.size and percent[0] == 0 and percent[-1] == 100
    if not (rising and (np.diff(percent) > 0).all() and rows.shape[2:] == percent.shape):
        raise ValueError(
            f"a row has a quantile for each percent, from 0 to 100, got {rows.shape} at {percent}"
        )
    if not (rows.size and (np.diff(rows) >= 0).all() and 1 <= rows.min() <= rows.max() < 2**53):
        raise ValueError("quantiles are lengths of at least 1 token that never fall")
    return percent, rows
