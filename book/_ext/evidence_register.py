"""What the back matter is made from: the claims and the exercises that the chapters hold.

A chapter shows a result through `bookkit.evidence.claim(id, value, category)`. Its output, kept in
the chapter's .ipynb twin, carries the three in a form of its own, which is read here. An exercise
is a heading of a chapter's source. So neither list is ever typed. What pages can ask for:

- the directive {claims}: every claim in one table, with `:category:` those of one kind
- the directive {reference_claims}: another text's claims, from a YAML file, with ours beside them
- the directive {exercises}: every exercise; its body names, in order, the reference's own
- the role {claim}`its-id`: one claim within a paragraph

`python book/_ext/evidence_register.py` prints the register.
"""

import json
import re
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from myst_parser.mdit_to_docutils.base import default_slugify
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

from bookkit.evidence import MIME_TYPE, Claim

EXERCISE = re.compile(r"^### (Exercise (\d+): .+)$", re.M)
REFERENCE = "book/reference_claims.yaml"


@dataclass(frozen=True)
class Shown:
    """A claim and the page that shows it."""

    claim: Claim
    docname: str
    where: str

    @property
    def fragment(self) -> str:
        """The place on the page."""
        return f"#claim-{self.claim.id}"


@dataclass(frozen=True)
class Beside:
    """A claim of another text, the ground it stands on there, how ours came out, and ours."""

    claim: str
    ground: str
    outcome: str
    ours: list[Shown]


@dataclass(frozen=True)
class Exercise:
    """An exercise, by its chapter and its number there."""

    docname: str
    number: int
    heading: str

    @property
    def name(self) -> str:
        """How {exercises} names it: notebooks/ch02_allocator 1."""
        return f"{self.docname} {self.number}"


def toc_docnames(entry) -> list[str]:
    """List the pages named in _toc.yml, or a part of it, in reading order."""
    if isinstance(entry, list):
        return [name for part in entry for name in toc_docnames(part)]
    if not isinstance(entry, dict):
        return []
    own = [entry[key] for key in ("root", "file") if key in entry]
    return own + [
        name for key in ("parts", "chapters", "sections") for name in toc_docnames(entry.get(key))
    ]


def chapter_files(root: Path, suffix: str) -> list[tuple[str, Path]]:
    """List the pages of the book that have a file with this ending, in reading order."""
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    files = [(name, root / f"{name}{suffix}") for name in toc_docnames(toc)]
    return [(name, file) for name, file in files if file.is_file()]


def title_of(lines: list[str]) -> str:
    """The first heading, or nothing."""
    return next((line[2:] for line in lines if line.startswith("# ")), "")


def claims_of(twin: Path, docname: str) -> list[Shown]:
    """Read the claims in a notebook's outputs. Raises ValueError as `Claim` does."""
    cells = json.loads(twin.read_text(encoding="utf-8"))["cells"]
    lines = [line for cell in cells for line in "".join(cell["source"]).splitlines()]
    number = (title_of(lines) or docname).partition(".")[0]
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    found = [data[MIME_TYPE] for data in outputs if MIME_TYPE in data]
    return [Shown(Claim(**claim), docname, f"chapter {number}") for claim in found]


def read_register(root: Path) -> list[Shown]:
    """Read every claim of the book, in reading order. Raises ValueError if two share an id."""
    twins = chapter_files(root, ".ipynb")
    register = [shown for name, twin in twins for shown in claims_of(twin, name)]
    twice = [i for i, n in Counter(shown.claim.id for shown in register).items() if n > 1]
    if twice:
        raise ValueError(f"claims with the same id: {', '.join(twice)}")
    return register


def read_reference(file: Path, register: list[Shown]) -> list[Beside]:
    """Read a list of `claim`, `ground`, `outcome` and the ids of `ours`.

    Raises ValueError for an id that no page shows, and for an entry with none.
    """
    by_id, found = {shown.claim.id: shown for shown in register}, []
    for entry in yaml.safe_load(file.read_text(encoding="utf-8")):
        ids = entry.pop("ours")
        unknown = [i for i in ids if i not in by_id]
        if unknown or not ids:
            raise ValueError(f"{entry['claim']!r}: no page shows {', '.join(unknown) or 'it'}")
        found.append(Beside(**entry, ours=[by_id[i] for i in ids]))
    return found


def read_exercises(root: Path) -> dict[str, list[Exercise]]:
    """Read every exercise of the book, by the title of its chapter, in reading order."""
    found = {}
    for docname, source in chapter_files(root, ".md"):
        text = source.read_text(encoding="utf-8")
        if here := EXERCISE.findall(text):
            title = title_of(text.splitlines())
            found[title] = [Exercise(docname, int(number), heading) for heading, number in here]
    return found


# What a page shows


def address(env, shown: Shown) -> nodes.reference:
    """Make the link to where a claim is shown, named by its chapter."""
    uri = env.app.builder.get_relative_uri(env.docname, shown.docname) + shown.fragment
    return nodes.reference("", shown.where, internal=True, refuri=uri)


def said(env, shown: Shown) -> nodes.inline:
    """Say a claim within a line: sentence, then category and link in brackets."""
    start = nodes.Text(f"{shown.claim.value} ({shown.claim.category}, ")
    words = [start, address(env, shown), nodes.Text(")")]
    return nodes.inline("", "", *words, classes=["claim-said"], support_smartquotes=False)


def row(*cells: nodes.Node | list[nodes.Node]) -> nodes.row:
    """Make one row of a table; a list is a cell of several paragraphs."""
    return nodes.row("", *(entry(cell if isinstance(cell, list) else [cell]) for cell in cells))


def entry(paragraphs: list[nodes.Node]) -> nodes.entry:
    """Make one cell of a table."""
    return nodes.entry("", *(nodes.paragraph("", "", words) for words in paragraphs))


def table(name: str, columns: dict[str, int], rows: list[nodes.row]) -> nodes.table:
    """Make a table of `rows` under the headings of `columns`, which say how wide they are."""
    group = nodes.tgroup("", cols=len(columns))
    group += [nodes.colspec(colwidth=width) for width in columns.values()]
    group += nodes.thead("", row(*map(nodes.Text, columns)))
    group += nodes.tbody("", *rows)
    plain = {"classes": [name], "support_smartquotes": False}  # as the chapter has it
    return nodes.table("", group, **plain)


class FromTheChapters(SphinxDirective):
    """Write what `build` makes of the chapters, or stop the build with the reason."""

    def run(self) -> list[nodes.Node]:
        """Build the nodes."""
        try:
            return self.build(Path(self.env.srcdir))
        except (ValueError, TypeError) as wrong:
            raise self.error(str(wrong)) from wrong


class ClaimsDirective(FromTheChapters):
    """Write the register: the result, its category, and a link to where a page shows it."""

    option_spec = {"category": directives.unchanged}

    def build(self, root: Path) -> list[nodes.Node]:
        """Make the table, of one category where that is asked for."""
        wanted = self.options.get("category")
        register = [s for s in read_register(root) if wanted in (None, s.claim.category)]
        columns = {"Result": 75, "Ground": 25}
        return [table("claims-register", columns, [self.row(shown) for shown in register])]

    def row(self, shown: Shown) -> nodes.row:
        """Turn one claim into a row that links to its place."""
        category = nodes.inline("", shown.claim.category, classes=["claim-category"])
        return row(nodes.Text(shown.claim.value), [category, address(self.env, shown)])


class ReferenceClaimsDirective(FromTheChapters):
    """Write another text's claims and ours side by side."""

    required_arguments = 1

    def build(self, root: Path) -> list[nodes.Node]:
        """Make the table from the YAML file that the argument names, relative to the page."""
        name, file = self.env.relfn2path(self.arguments[0])
        self.env.note_dependency(name)
        rows = [
            row(
                [nodes.Text(there.claim), nodes.emphasis("", there.ground)],
                [nodes.strong("", there.outcome), *(said(self.env, ours) for ours in there.ours)],
            )
            for there in read_reference(Path(file), read_register(root))
        ]
        return [table("claims-beside", {"The reference": 35, "This book": 65}, rows)]


class ExercisesDirective(FromTheChapters):
    """Write the index of exercises; the body's k-th line names the reference's exercise k."""

    has_content = True

    def build(self, root: Path) -> list[nodes.Node]:
        """Make a list for each chapter."""
        chapters = read_exercises(root)
        mark = {line.strip(): k for k, line in enumerate(self.content, 1)}
        unknown = set(mark) - {e.name for chapter in chapters.values() for e in chapter}
        if unknown:
            raise ValueError(f"no chapter has the exercise {', '.join(sorted(unknown))}")
        lines = []
        for title, exercises in chapters.items():
            lines += ["", f"**[{title}](project:/{exercises[0].docname}.md)**", ""]
            lines += [self.line(exercise, mark.get(exercise.name)) for exercise in exercises]
        lists = nodes.container(classes=["exercises"])
        self.state.nested_parse(StringList(lines), self.content_offset, lists)
        return [lists]

    def line(self, exercise: Exercise, mark: int | None) -> str:
        """Link to an exercise, in Markdown, so that Sphinx finds out whether it is there."""
        place = default_slugify(exercise.heading.replace("`", ""))
        of_reference = f", **the reference's exercise {mark}**" if mark else ""
        return f"- [{exercise.heading}](project:/{exercise.docname}.md#{place}){of_reference}"


class ClaimRole(SphinxRole):
    """Say one claim within a paragraph. An id that no page shows fails the build."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Look the claim up among all, which are read once a page."""
        try:
            seen = self.env.temp_data
            if "claims" not in seen:
                seen["claims"] = {s.claim.id: s for s in read_register(Path(self.env.srcdir))}
            return [said(self.env, seen["claims"][self.text])], []
        except (KeyError, ValueError, TypeError) as wrong:
            log = logging.getLogger(__name__)
            log.error("no page shows the claim %s", wrong, location=self.get_location())
            return [nodes.literal("", self.text)], []


def setup(app) -> dict:
    """Tell Sphinx about the directives and the role."""
    app.add_directive("claims", ClaimsDirective)
    app.add_directive("reference_claims", ReferenceClaimsDirective)
    app.add_directive("exercises", ExercisesDirective)
    app.add_role("claim", ClaimRole())
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


# The same, printed


def printed(root: Path) -> str:
    """The register as text, each claim with its page; then the reference's claims and ours."""
    register = read_register(root)
    lines = [f"{len(register)} claims. Pages are those of the built book, in _build/html.", ""]
    for shown in register:
        lines += [f"[{shown.claim.category}] {shown.claim.value}", place_of(shown), ""]
    reference = read_reference(root / REFERENCE, register)
    lines += [f"The reference chapter's {len(reference)} claims, and ours beside them.", ""]
    for k, there in enumerate(reference, 1):
        lines += [f"{k}. {there.claim} ({there.ground})", f"Here: {there.outcome}"]
        lines += [part for s in there.ours for part in (f"- {s.claim!r}", place_of(s))] + [""]
    wrapped = [textwrap.fill(line, 100, subsequent_indent="  ") for line in lines]
    return "\n".join(wrapped)


def place_of(shown: Shown) -> str:
    """The address of a claim in the built book."""
    return f"  {shown.where}: {shown.docname}.html{shown.fragment}"


if __name__ == "__main__":
    print(printed(Path(__file__).resolve().parents[2]), end="")
