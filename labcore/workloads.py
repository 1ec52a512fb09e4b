"""Requests, two numbers each: tokens of the prompt and of the output, drawn or read from a trace.

A trace tells what was asked of a server, not what a policy would have been told.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

#: Why a request is set aside.  Given.
TOO_LONG = "longer than the context"


class Request(NamedTuple):
    """One request: tokens of its prompt and of its output, and when it came, in seconds. Given."""

    prompt: int
    output: int
    arrival: float = 0.0


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests in order of arrival, as arrays of one entry a request. Given.

    `prompts` and `outputs` count tokens; `arrivals` are seconds from the first, `prefix_ids` the
    ids of each prompt's blocks, or None. `set_aside` counts the rows of a trace that are no
    requests.
    """

    name: str
    prompts: np.ndarray
    outputs: np.ndarray
    arrivals: np.ndarray | None = None
    prefix_ids: tuple[tuple[int, ...], ...] | None = None
    set_aside: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for kind in ("prompt", "output"):
            lengths = np.asarray(getattr(self, f"{kind}s"))
            if lengths.ndim != 1 or (lengths.size and lengths.dtype.kind not in "iu"):
                raise ValueError(f"{kind}s are one whole number a request, got {lengths!r:.60}")
            lengths = lengths.astype(np.int64)
            if len(lengths) != len(self.prompts):
                raise ValueError(f"{len(self.prompts)} prompts but {len(lengths)} {kind}s")
            if len(lengths) and lengths.min() < 1:
                i = int(np.argmin(lengths))
                raise ValueError(f"request {i}: {kind} of {lengths[i]} tokens, below 1")
            object.__setattr__(self, f"{kind}s", lengths)
        if self.prefix_ids is not None and len(self.prefix_ids) != len(self):
            raise ValueError(f"{len(self.prefix_ids)} lists of ids for {len(self)} requests")
        if self.arrivals is None:
            return
        arrivals = np.asarray(self.arrivals, dtype=float)
        if arrivals.shape != (len(self),):
            raise ValueError(f"{arrivals.size} arrivals for {len(self)} requests")
        wrong = ~(np.isfinite(arrivals) & (np.diff(arrivals, prepend=0.0) >= 0))
        if wrong.any():
            i = int(np.argmax(wrong))
            came = arrivals[i]
            raise ValueError(f"arrivals are in order and from 0 on, request {i} comes at {came}")
        object.__setattr__(self, "arrivals", arrivals)

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[Request]:
        arrivals = np.zeros(len(self)) if self.arrivals is None else self.arrivals
        columns = (self.prompts, self.outputs, arrivals)
        return map(Request._make, zip(*(column.tolist() for column in columns), strict=True))

    def __str__(self) -> str:
        """The name, the number of requests, and everything that is not among them."""
        parts = [f"{self.name}: {len(self):,} requests"]
        for why, count in self.set_aside.items():
            if count:
                parts.append(f"{count:,} row{'s' * (count > 1)} set aside: {why}")
        return "; ".join(parts + list(self.notes))

    def head(self, n: int) -> "Workload":
        """The first `n` requests."""
        cut = {k: v[:n] for k, v in vars(self).items() if isinstance(v, np.ndarray | tuple)}
        return replace(self, **(cut | {"notes": self.notes}))


# name: (median, sigma) of the prompt and of the output, both log-normal. The means come close to
# those of the reference chapter: 217 + 154, 627 + 47 and 47 + 359 tokens.
SHAPES = {
    "chat": ((180, 0.6), (120, 0.7)),
    "long_prompt": ((600, 0.3), (40, 0.6)),
    "long_answer": ((40, 0.6), (290, 0.7)),
}


def draw(
    shape: str | Sequence, num_requests: int = 3_000, seed: int = 0, max_context: int = 1_024
) -> Workload:
    """Draw requests, synthetic and log-normal: one of `SHAPES` by its name, or a shape like those.

    Prompt and output are cut to `max_context` tokens. Raises ValueError for another name or shape,
    or another median or sigma than there can be.  Given.
    """
    is_name = isinstance(shape, str)
    if is_name and shape not in SHAPES:
        raise ValueError(f"no workload {shape!r}: choose one of {', '.join(SHAPES)}")
    name, (prompt, output) = (shape, SHAPES[shape]) if is_name else ("log-normal", shape)
    for median, sigma in (prompt, output):
        if not (0 < median < np.inf and 0 <= sigma < np.inf):
            raise ValueError(f"a median is above 0 and a sigma at least 0, got {median}, {sigma}")
    rng = np.random.default_rng(seed)
    prompts, outputs = (
        np.rint(rng.lognormal(np.log(median), sigma, num_requests).clip(0, 2**53)).astype(np.int64)
        for median, sigma in (prompt, output)
    )
    prompts = np.clip(prompts, 1, max_context - 1)
    return Workload(name, prompts, np.clip(outputs, 1, max_context - prompts))


def from_pairs(pairs: Iterable[Sequence[int]]) -> Workload:
    """A workload from (prompt, output) pairs; ValueError unless they are whole numbers.  Given."""
    pairs = [pair[:2] if isinstance(pair, Request) else pair for pair in pairs]
    try:
        table = np.array(pairs) if pairs else np.empty((0, 2), np.int64)
    except ValueError:  # rows of different lengths
        table = np.empty(0)
    if table.ndim != 2 or table.shape[1] != 2 or table.dtype.kind not in "iu":
        raise ValueError(f"expected (prompt, output) pairs of whole numbers, got {pairs[:3]!r} ...")
    return Workload("pairs", *table.T)
