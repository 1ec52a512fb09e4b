"""Reading request traces, CSV or JSON lines in the form of Azure's and Mooncake's.

A row that is not what it should be stops the reading; one that is no request for us is counted.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from fileinput import FileInput
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from labcore.blocks import BlockTables, blocks_needed
from labcore.prefix import PrefixCache
from labcore.workloads import TOO_LONG, Workload

# arrival, prompt, output: the names of the columns in the traces that this module knows
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")  # date and time, 7 digits of a second
MOONCAKE = ("timestamp", "input_length", "output_length")  # milliseconds; also hash_ids
TICKS = 10**7  # a second: arrivals are compared as whole numbers, exact to the seventh digit
NO_OUTPUT = "no output"  # why a row is set aside, beside TOO_LONG


class TraceError(ValueError):
    """A row that cannot be what it claims to be; the message names file, line and value.  Given."""


def read_trace(
    path: str | Path, max_context: int | None = 1_024, hash_block_size: int = 512
) -> Workload:
    """Read a request trace: .csv, or .jsonl with one JSON object a line.

    Rows out of order are sorted, with a note. Rows with no output, or with more than `max_context`
    tokens (None: no limit), are counted in `set_aside`. Each of a row's `hash_ids` stands for
    `hash_block_size` tokens of the prompt. Raises TraceError, FileNotFoundError.  Given.
    """
    if hash_block_size < 1:
        raise ValueError(f"a block of hashes stands for at least 1 token, got {hash_block_size}")
    requests, set_aside = [], {NO_OUTPUT: 0, TOO_LONG: 0}
    for request in read_rows(path, lambda row: _request(row, hash_block_size)):
        _, prompt, output, _ = request
        if output == 0:
            set_aside[NO_OUTPUT] += 1
        elif max_context is not None and prompt + output > max_context:
            set_aside[TOO_LONG] += 1
        else:
            requests.append(request)
    late = sum(before[0] > after[0] for before, after in pairwise(requests))
    notes = (f"{late:,} out of order, sorted by arrival",) if late else ()
    requests.sort(key=itemgetter(0))  # a stable sort: ties keep the order of the file
    ticks, prompts, outputs, ids = zip(*requests, strict=True) if requests else ((), (), (), ())
    arrivals = np.array([(tick - ticks[0]) / TICKS for tick in ticks])
    prefix_ids = ids if requests and None not in ids else None
    return Workload(Path(path).name, prompts, outputs, arrivals, prefix_ids, set_aside, notes)


def block_keys(
    ids: tuple[int, ...], prompt: int, block_size: int, hash_block_size: int = 512
) -> list[tuple[int, int]]:
    """The keys of a prompt's full blocks of `block_size`, from a trace's ids of its larger ones.

    Part k of id i has key (i, k). Raises ValueError if the sizes do not divide.  Given.
    """
    if min(block_size, hash_block_size) < 1 or hash_block_size % block_size:
        raise ValueError(f"blocks of {block_size} tokens do not divide one of {hash_block_size}")
    if len(ids) < blocks_needed(prompt, hash_block_size):
        raise ValueError(f"{len(ids)} ids of {hash_block_size} tokens for a prompt of {prompt}")
    parts = hash_block_size // block_size
    return [(ids[k // parts], k % parts) for k in range(prompt // block_size)]


class HitRate(NamedTuple):
    """How many of the blocks that prompts asked for were cached. Built in: ch09b"""

    hits: int
    queries: int
    block_size: int

    def __str__(self) -> str:
        if not self.queries:
            return "not known from this trace"
        asked = f"{self.hits:,} of {self.queries:,} blocks of {self.block_size} tokens"
        return f"{self.hits / self.queries:.1%}: {asked}; only full ones are shared"


def replay(
    workload: Workload,
    num_blocks: int | None = None,
    block_size: int = 16,
    hash_block_size: int = 512,
) -> HitRate:
    """The prefix hit rate of a trace's prompts, one after another, in a pool of `num_blocks`.

    None is a pool that never evicts. Each id of the trace stands for `hash_block_size` tokens. Left
    out: answers, and prompts that overlap in time. Raises ValueError, OutOfBlocks.  Built in: ch09b
    """
    if block_size < 1:
        raise ValueError(f"block_size is at least 1, got {block_size}")
    needed = [blocks_needed(prompt, block_size) for prompt in workload.prompts.tolist()]
    cache = PrefixCache(max(1, sum(needed)) if num_blocks is None else num_blocks)
    tables = BlockTables(cache, 1)  # a block of ours is one token here: the block's key
    for i, ids in enumerate(workload.prefix_ids or ()):
        keys = block_keys(ids, int(workload.prompts[i]), block_size, hash_block_size)
        rest = [None] * (needed[i] - len(keys))  # a block that is not full has no key
        tables.append(i, needed[i] - cache.adopt(tables, i, keys + rest))
        cache.publish(tables, i, keys)
        tables.drop(i)
    return HitRate(cache.hits, cache.queries, block_size)


def read_rows(path: str | Path, parse: Callable) -> Iterator:
    """What `parse` makes of each row of a .csv or .jsonl file; else TraceError. Given."""
    path = Path(path)
    if path.suffix not in (".csv", ".jsonl"):
        raise TraceError(f"{path.name}: a trace is a .csv or a .jsonl file")
    with FileInput(path, encoding="utf-8-sig") as lines:
        is_csv = path.suffix == ".csv"
        rows = csv.DictReader(lines) if is_csv else map(json.loads, filter(str.strip, lines))
        try:
            for row in rows:
                if not isinstance(row, dict):
                    raise ValueError(f"expected an object, got {row!r:.40}")
                if None in row:
                    raise ValueError(f"{len(row[None])} more values than columns: {row[None]}")
                yield parse(row)
        except UnicodeDecodeError as error:
            raise TraceError(f"{path.name}: not a text file in UTF-8: {error}") from None
        except (ValueError, RecursionError, csv.Error) as error:
            is_json = isinstance(error, json.JSONDecodeError | RecursionError)
            reason = f"not JSON: {error}" if is_json else str(error)
            raise TraceError(f"{path.name}, line {lines.lineno()}: {reason}") from None


def read_field(row: dict, column: str, parse: Callable, *args):
    """What `parse` makes of one column of a row; its errors name the column. Given."""
    if column not in row:
        raise ValueError(f"no column {column!r}, only {', '.join(row)}")
    try:
        return parse(row[column], *args)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{column}: {error}") from None


def _request(row: dict, hash_block_size: int) -> tuple[int, int, int, tuple | None]:
    """(arrival in ticks, prompt, output, ids of the prompt's blocks or None) of one row."""
    names, ticks = (AZURE, _ticks) if AZURE[0] in row else (MOONCAKE, _ticks_of_ms)
    if names[0] not in row:
        raise ValueError(f"no column {AZURE[0]!r} or {MOONCAKE[0]!r}, only {', '.join(row)}")
    when, prompt, output = names
    prompt, output = read_field(row, prompt, whole, 1), read_field(row, output, whole, 0)
    ids = _hash_ids(row.get("hash_ids"), prompt, hash_block_size)
    return read_field(row, when, ticks), prompt, output, ids


def _ticks(when: str) -> int:
    """Ticks since 2000 of '2023-11-16 18:15:46.6805900'; without a zone the time counts as UTC."""
    try:
        moment = datetime.fromisoformat(str(when)).replace(microsecond=0)
    except ValueError:
        raise ValueError(f"expected a date and a time, got {when!r}") from None
    moment = moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    seconds = round((moment - datetime(2000, 1, 1, tzinfo=UTC)).total_seconds())
    fraction = re.search(r"[.,]\d+|$", str(when))[0][1:]  # ISO 8601 has both marks
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


def whole(value: str | int, least: int) -> int:
    """A whole number, at least `least`, as a trace writes it. Raises ValueError. Given."""
    digits = str(value).strip()
    if not (digits.isascii() and digits.isdigit()) or not least <= int(digits) < 2**62:
        raise ValueError(f"expected a whole number, at least {least}, got {value!r}")
    return int(digits)
