"""Reading request traces: CSV or JSON lines, with the columns of the Azure and the Mooncake traces.

Nothing is dropped in silence. A row that is not what it should be stops the reading, with the file
and the row; a row that is sound but no request for our server (no output, or longer than the
context) is counted and reported.
"""

import csv
import json
import math
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np

from labcore.blocks import blocks_needed
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
    for number, row in _text_rows(path):
        try:
            request = _request(row, hash_block_size)
        except (KeyError, ValueError, TypeError, OverflowError) as error:
            raise TraceError(f"{path.name}, line {number}: {_reason(error)}") from None
        _, prompt, output, _ = request
        if output == 0:
            set_aside[NO_OUTPUT] += 1
        elif max_context is not None and prompt + output > max_context:
            set_aside[TOO_LONG] += 1
        else:
            rows.append(request)
    return _workload(path, rows, dict(set_aside))


def block_keys(
    ids: tuple[int, ...], prompt: int, block_size: int, hash_block_size: int = 512
) -> list[tuple[int, int]]:
    """The keys of a prompt's full blocks of `block_size`, from a trace's ids of its larger ones.

    Each id stands for hash_block_size / block_size of our blocks: part k of id i has key (i, k).
    A part-full block has no key, since only full blocks can be shared.
    Raises ValueError if the sizes do not divide.  Given.
    """
    if block_size < 1 or hash_block_size % block_size:
        raise ValueError(f"blocks of {block_size} tokens do not divide one of {hash_block_size}")
    parts = hash_block_size // block_size
    return [(ids[k // parts], k % parts) for k in range(prompt // block_size)]


def _text_rows(path: Path) -> Iterator[tuple[int, dict]]:
    """`_rows`, and an error that names the file where it is no text."""
    try:
        yield from _rows(path)
    except UnicodeDecodeError as error:
        raise TraceError(f"{path.name}: not a text file in UTF-8: {error}") from None


def _rows(path: Path) -> Iterator[tuple[int, dict]]:
    """Each row as a dict, with the number of its line."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".jsonl":
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _json(path, number, line)
        elif path.suffix == ".csv":
            reader = csv.DictReader(file)
            try:
                for row in reader:
                    yield reader.line_num, row
            except csv.Error as error:
                raise TraceError(f"{path.name}, line {reader.line_num}: {error}") from None
        else:
            raise TraceError(f"{path.name}: a trace is a .csv or a .jsonl file")


def _json(path: Path, number: int, line: str) -> dict:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path.name}, line {number}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise TraceError(f"{path.name}, line {number}: expected an object, got {line.strip():.40}")
    return row


def _request(row: dict, hash_block_size: int) -> tuple[tuple[int, float], int, int, tuple | None]:
    """(arrival in seconds, prompt, output, ids of the prompt's blocks or None) of one row."""
    if None in row:
        raise ValueError(f"{len(row[None])} more values than columns: {row[None]}")
    if AZURE[0] in row:
        when, prompt, output = (row[column] for column in AZURE)
        return _seconds(when), _tokens(prompt, 1), _tokens(output, 0), None
    when, prompt, output = (row[column] for column in MOONCAKE)
    prompt, output, ids = _tokens(prompt, 1), _tokens(output, 0), row.get("hash_ids")
    if not math.isfinite(float(when)) or isinstance(when, bool):
        raise ValueError(f"expected a time in milliseconds, got {when!r}")
    if ids is not None:
        if type(ids) is not list or not all(type(i) is int for i in ids):
            raise ValueError(f"hash_ids are a list of whole numbers, got {ids!r:.40}")
        needed = blocks_needed(prompt, hash_block_size)
        if len(ids) != needed:
            raise ValueError(
                f"{len(ids)} hash_ids, but a prompt of {prompt} tokens has {needed} blocks "
                f"of {hash_block_size}"
            )
        ids = tuple(ids)
    return (0, float(when) / 1_000), prompt, output, ids


def _seconds(when: str) -> tuple[int, float]:
    """(whole seconds since 2000, the fraction) of '2023-11-16 18:15:46.6805900'.

    Kept apart, because one float of this size cannot tell two neighbours of seven digits.
    """
    whole, _, fraction = str(when).partition(".")
    if fraction.strip("0123456789"):
        raise ValueError(f"expected digits after the seconds, got {fraction!r}")
    since = datetime.fromisoformat(whole) - datetime(2000, 1, 1)
    return int(since.total_seconds()), float(f"0.{fraction or 0}")


def _tokens(value: str | int, least: int) -> int:
    digits = str(value).strip()
    if not (digits.isascii() and digits.isdigit()) or not least <= int(digits) < 2**62:
        raise ValueError(f"expected a number of tokens, at least {least}, got {value!r}")
    return int(digits)


def _reason(error: Exception) -> str:
    return f"no column {error}" if isinstance(error, KeyError) else str(error)


def _workload(path: Path, rows: list[tuple], set_aside: dict[str, int]) -> Workload:
    late = sum(before[0] > after[0] for before, after in pairwise(rows))
    notes = (f"{late:,} out of order, sorted by arrival",) if late else ()
    rows.sort(key=lambda row: row[0])  # a stable sort: ties keep the order of the file
    arrivals, prompts, outputs, ids = zip(*rows, strict=True) if rows else ((), (), (), ())
    known = bool(rows) and None not in ids
    arrivals = np.array([(s - arrivals[0][0]) + (f - arrivals[0][1]) for s, f in arrivals])
    return Workload(
        path.name,
        np.array(prompts, dtype=np.int64),
        np.array(outputs, dtype=np.int64),
        arrivals,
        tuple(ids) if known else None,
        set_aside,
        notes,
    )
