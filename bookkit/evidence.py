"""Claims: numbers that the book states, each with the kind of evidence behind it.

A chapter ends a cell with `claim(...)`; the book's register collects what those cells show.
"""

import re
from dataclasses import asdict, dataclass
from html import escape

CATEGORIES = (
    "established",  # others have shown it, and are cited
    "measured here",  # by this page, on the machine that built it
    "simulation",  # by a model of a server, not by a server
    "derived",  # by arithmetic from stated facts
    "recorded on a machine",  # measured once; the record names the machine
    "not measured",  # said plainly
)
MIME_TYPE = "application/vnd.labcore.claim+json"


@dataclass(frozen=True)
class Claim:
    """A result: `claim("cow-copies", f"{n} blocks instead of 6", "measured here")`.

    `id` is a name to refer to it by, `value` a sentence that holds the computed numbers, `category`
    the kind of evidence. It shows itself as a line of the page; the machine-readable copy beside
    that feeds the register.
    Raises ValueError for an id that is not lower-case words joined by hyphens, for an empty
    sentence, and for a category that is not in CATEGORIES.  Given.
    """

    id: str
    value: str
    category: str

    def __post_init__(self):
        if not (isinstance(self.id, str) and isinstance(self.value, str)):
            raise TypeError(f"id and value of a claim are text, got {self.id!r}, {self.value!r}")
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.id):
            raise ValueError(f"an id is lower-case words joined by hyphens, got {self.id!r}")
        if not self.value.strip():
            raise ValueError(f"claim {self.id!r} says nothing: its value is {self.value!r}")
        if self.category not in CATEGORIES:
            raise ValueError(f"unknown category {self.category!r}, choose from {CATEGORIES}")

    def __repr__(self) -> str:
        """Return '[category] sentence'."""
        return f"[{self.category}] {self.value}"

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        category = f'<span class="claim-category">{escape(self.category)}</span>'
        value = f'<span class="claim-value">{escape(self.value)}</span>'
        return {
            MIME_TYPE: asdict(self),
            "text/html": f'<div class="claim" id="claim-{self.id}">{category} {value}</div>',
            "text/plain": repr(self),
        }


claim = Claim  # the verb for the chapters
