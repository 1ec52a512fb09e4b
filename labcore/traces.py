"""Reading request traces: CSV or JSON lines, with the columns of the Azure and the Mooncake traces.

Nothing is dropped in silence. A row that is not what it should be stops the reading, with the file
and the row; a row that is sound but no request for our server (no output, or longer than the
context) is counted and reported.
"""

import csv
import json
import math
from datetime import datetime
from fileinput import FileInput
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

import numpy as np

from labcore.blocks import blocks_needed
from labcore.workloads import Workload

# arrival, prompt, output: the names of the columns in the traces that this module knows
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")  # date and time, 7 digits of a second
MOONCAKE = ("timestamp", "input_length", "output_length")  # milliseconds; also hash_ids
TICKS = 10**7  # a second: arrivals are compared as whole numbers, exact to the seventh digit
NO_OUTPUT, TOO_LONG = "no output", "longer than the context"
# what a row can raise that is not what it should be
ROW_ERRORS = (KeyError, ValueError, TypeError, OverflowError, RecursionError, csv.Error)


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
    if path.suffix not in (".csv", ".jsonl"):
        raise TraceError(f"{path.name}: a trace is a .csv or a .jsonl file")
    if hash_block_size < 1:
        raise ValueError(f"a block of hashes stands for at least 1 token, got {hash_block_size}")
    requests, set_aside = [], {NO_OUTPUT: 0, TOO_LONG: 0}
    with FileInput(path, encoding="utf-8-sig") as lines:
        is_csv = path.suffix == ".csv"
        rows = csv.DictReader(lines) if is_csv else map(json.loads, filter(str.strip, lines))
        try:
            for row in rows:
                request = _request(row, hash_block_size)
                _, prompt, output, _ = request
                if output == 0:
                    set_aside[NO_OUTPUT] += 1
                elif max_context is not None and prompt + output > max_context:
                    set_aside[TOO_LONG] += 1
                else:
                    requests.append(request)
        except UnicodeDecodeError as error:
            raise TraceError(f"{path.name}: not a text file in UTF-8: {error}") from None
        except ROW_ERRORS as error:
            raise TraceError(f"{path.name}, line {lines.lineno()}: {_reason(error)}") from None
    return _workload(path.name, requests, set_aside)


def block_keys(
    ids: tuple[int, ...], prompt: int, block_size: int, hash_block_size: int = 512
) -> list[tuple[int, int]]:
    """The keys of a prompt's full blocks of `block_size`, from a trace's ids of its larger ones.

    Each id stands for hash_block_size / block_size of our blocks: part k of id i has key (i, k).
    A part-full block has no key, since only full blocks can be shared. Raises ValueError if the
    sizes do not divide.  Given.
    """
    if block_size < 1 or hash_block_size % block_size:
        raise ValueError(f"blocks of {block_size} tokens do not divide one of {hash_block_size}")
    parts = hash_block_size // block_size
    return [(ids[k // parts], k % parts) for k in range(prompt // block_size)]


def _request(row: dict, hash_block_size: int) -> tuple[int, int, int, tuple | None]:
    """(arrival in ticks, prompt, output, ids of the prompt's blocks or None) of one row."""
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {row!r:.40}")
    if None in row:
        raise ValueError(f"{len(row[None])} more values than columns: {row[None]}")
    columns, ticks = (AZURE, _ticks) if AZURE[0] in row else (MOONCAKE, _ticks_of_ms)
    when, prompt, output = (row[column] for column in columns)
    prompt, output = _tokens(prompt, 1), _tokens(output, 0)
    return ticks(when), prompt, output, _hash_ids(row.get("hash_ids"), prompt, hash_block_size)


def _ticks(when: str) -> int:
    """Ticks since 2000 of '2023-11-16 18:15:46.6805900': a datetime drops the seventh digit."""
    moment = datetime.fromisoformat(str(when)).replace(microsecond=0)
    _, _, fraction = str(when).partition(".")
    seconds = round((moment - datetime(2000, 1, 1)).total_seconds())
    return seconds * TICKS + int(f"{fraction:0<7.7}")


def _ticks_of_ms(when: float) -> int:
    if isinstance(when, bool) or not math.isfinite(float(when)):
        raise ValueError(f"expected a time in milliseconds, got {when!r}")
    return round(float(when) * TICKS / 1_000)


def _hash_ids(ids: list | None, prompt: int, hash_block_size: int) -> tuple[int, ...] | None:
    """The ids of a prompt's blocks, or None where the trace does not tell them."""
    if ids is None:
        return None
    if type(ids) is not list or not all(type(i) is int for i in ids):
        raise ValueError(f"hash_ids are a list of whole numbers, got {ids!r:.40}")
    needed = blocks_needed(prompt, hash_block_size)
    if len(ids) != needed:
        raise ValueError(f"{len(ids)} hash_ids, but {needed} blocks in a prompt of {prompt} tokens")
    return tuple(ids)


def _tokens(value: str | int, least: int) -> int:
    digits = str(value).strip()
    if not (digits.isascii() and digits.isdigit()) or not least <= int(digits) < 2**62:
        raise ValueError(f"expected a number of tokens, at least {least}, got {value!r}")
    return int(digits)


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no column {error}"
    is_json = isinstance(error, json.JSONDecodeError | RecursionError)
    return f"not JSON: {error}" if is_json else str(error)


def _workload(name: str, requests: list[tuple], set_aside: dict[str, int]) -> Workload:
    late = sum(before[0] > after[0] for before, after in pairwise(requests))
    notes = (f"{late:,} out of order, sorted by arrival",) if late else ()
    requests.sort(key=itemgetter(0))  # a stable sort: ties keep the order of the file
    ticks, prompts, outputs, ids = zip(*requests, strict=True) if requests else ((), (), (), ())
    arrivals = np.array([(tick - ticks[0]) / TICKS for tick in ticks])
    prefix_ids = ids if requests and None not in ids else None
    return Workload(name, prompts, outputs, arrivals, prefix_ids, set_aside, notes)
