"""Reading request traces: CSV or JSON lines, with the columns of the Azure and the Mooncake traces.

Nothing is dropped in silence. A row that is not what it should be stops the reading, with the file
and the row; a row that is sound but no request for our server (no output, or longer than the
context) is counted and reported.
"""

import csv
import json
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np

from labcore.workloads import Workload

# arrival, prompt, output: the names of the columns in the traces that this module knows
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")  # date and time, 7 digits of a second
MOONCAKE = ("timestamp", "input_length", "output_length")  # milliseconds; also hash_ids
NO_OUTPUT, TOO_LONG = "no output", "longer than the context"


class TraceError(ValueError):
    """A row that cannot be what it claims to be; the message names file, line and value.  Given."""


def read_trace(
    path: str | Path, max_context: int | None = 1_024, hash_block_size: int = 512
) -> Workload:
    """Read a request trace: .csv, or .jsonl with one JSON object a line.

    Arrivals are seconds from the first request; rows out of order are sorted by arrival, with a
    note, and ties keep the order of the file. Rows with no output, and rows whose prompt and
    output together pass `max_context` (None: no limit), are set aside and counted in the
    workload's `set_aside`. Where a row has `hash_ids`, each stands for `hash_block_size` tokens of
    the prompt, the last one perhaps for fewer, and their number must fit the prompt's length.
    Memory grows with the number of requests, not with the size of the file. Raises TraceError with
    file and line, FileNotFoundError.  Given.
    """
    path = Path(path)
    if hash_block_size < 1:
        raise ValueError(f"a block of hashes stands for at least 1 token, got {hash_block_size}")
    rows, set_aside = [], Counter({NO_OUTPUT: 0, TOO_LONG: 0})
    for number, row in _rows(path):
        try:
            request = _request(row, hash_block_size)
        except (KeyError, ValueError, TypeError) as error:
            raise TraceError(f"{path.name}, line {number}: {_reason(error)}") from None
        _, prompt, output, _ = request
        if output == 0:
            set_aside[NO_OUTPUT] += 1
        elif max_context is not None and prompt + output > max_context:
            set_aside[TOO_LONG] += 1
        else:
            rows.append(request)
    return _workload(path, rows, dict(set_aside))


def _rows(path: Path) -> Iterator[tuple[int, dict]]:
    """Each row as a dict, with the number of its line."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".jsonl":
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _json(path, number, line)
        elif path.suffix == ".csv":
            reader = csv.DictReader(file)
            for row in reader:
                yield reader.line_num, row
        else:
            raise TraceError(f"{path.name}: a trace is a .csv or a .jsonl file")


def _json(path: Path, number: int, line: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{path.name}, line {number}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise TraceError(f"{path.name}, line {number}: expected an object, got {line.strip():.40}")
    return row


def _request(row: dict, hash_block_size: int) -> tuple[float, int, int, tuple[int, ...] | None]:
    """(arrival in seconds, prompt, output, ids of the prompt's blocks or None) of one row."""
    if AZURE[0] in row:
        when, prompt, output = (row[column] for column in AZURE)
        return _seconds(when), _tokens(prompt, 1), _tokens(output, 0), None
    when, prompt, output = (row[column] for column in MOONCAKE)
    prompt, output, ids = _tokens(prompt, 1), _tokens(output, 0), row.get("hash_ids")
    if ids is not None:
        needed = -(-prompt // hash_block_size)
        if len(ids) != needed:
            raise ValueError(
                f"{len(ids)} hash_ids, but a prompt of {prompt} tokens has {needed} blocks "
                f"of {hash_block_size}"
            )
        ids = tuple(ids)
    return float(when) / 1_000, prompt, output, ids


def _seconds(when: str) -> float:
    """Seconds since 2000 of '2023-11-16 18:15:46.6805900', all digits of the fraction kept."""
    whole, _, fraction = when.partition(".")
    seconds = (datetime.fromisoformat(whole) - datetime(2000, 1, 1)).total_seconds()
    return seconds + (int(fraction) / 10 ** len(fraction) if fraction else 0)


def _tokens(value: str | int, least: int) -> int:
    if isinstance(value, float) or int(value) < least:
        raise ValueError(f"expected a number of tokens, at least {least}, got {value!r}")
    return int(value)


def _reason(error: Exception) -> str:
    return f"no column {error}" if isinstance(error, KeyError) else str(error)


def _workload(path: Path, rows: list[tuple], set_aside: dict[str, int]) -> Workload:
    late = sum(before[0] > after[0] for before, after in pairwise(rows))
    notes = (f"{late:,} out of order, sorted by arrival",) if late else ()
    rows.sort(key=lambda row: row[0])  # a stable sort: ties keep the order of the file
    arrivals, prompts, outputs, ids = zip(*rows, strict=True) if rows else ((), (), (), ())
    known = bool(rows) and None not in ids
    arrivals = np.array(arrivals, dtype=float)
    return Workload(
        path.name,
        np.array(prompts, dtype=np.int64),
        np.array(outputs, dtype=np.int64),
        arrivals - arrivals[:1],
        tuple(ids) if known else None,
        set_aside,
        notes,
    )
