"""The directive {claims}: every result that a chapter shows, in one table.

A chapter shows a result through `bookkit.evidence.claim(id, value, category)`. Its output, kept in
the chapter's .ipynb twin, carries the three in a form of its own, which is read here. So the
register is generated, never typed.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml
from docutils import nodes
from docutils.parsers.rst import Directive

from bookkit.evidence import MIME_TYPE, Claim


@dataclass(frozen=True)
class Shown:
    """A claim and the page that shows it."""

    claim: Claim
    docname: str
    where: str


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


def claims_of(twin: Path, docname: str) -> list[Shown]:
    """Read the claims in a notebook's outputs. Raises ValueError as `Claim` does."""
    cells = json.loads(twin.read_text(encoding="utf-8"))["cells"]
    lines = [line for cell in cells for line in "".join(cell["source"]).splitlines()]
    title = next((line[2:] for line in lines if line.startswith("# ")), docname)
    number = title.partition(".")[0]
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    found = [data[MIME_TYPE] for data in outputs if MIME_TYPE in data]
    return [Shown(Claim(**claim), docname, f"chapter {number}") for claim in found]


def read_register(root: Path) -> list[Shown]:
    """Read every claim of the book, in reading order. Raises ValueError if two share an id."""
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    twins = [(name, root / f"{name}.ipynb") for name in toc_docnames(toc)]
    register = [shown for name, twin in twins if twin.is_file() for shown in claims_of(twin, name)]
    twice = [i for i, n in Counter(shown.claim.id for shown in register).items() if n > 1]
    if twice:
        raise ValueError(f"claims with the same id: {', '.join(twice)}")
    return register


def row(*cells: nodes.Node) -> nodes.row:
    """Make one row of a table."""
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", cell)) for cell in cells))


def table(rows: list[nodes.row], heads: tuple[str, ...], widths: tuple[int, ...]) -> nodes.table:
    """Make a table of `rows` under the headings `heads`."""
    group = nodes.tgroup("", cols=len(heads))
    group += [nodes.colspec(colwidth=width) for width in widths]
    group += nodes.thead("", row(*map(nodes.Text, heads)))
    group += nodes.tbody("", *rows)
    plain = {"classes": ["claims-register"], "support_smartquotes": False}  # as the chapter has it
    return nodes.table("", group, **plain)


class ClaimsDirective(Directive):
    """Write the register: the result, its category, and a link to where a page shows it."""

    def run(self) -> list[nodes.Node]:
        """Build the table, or stop the build with the reason."""
        env = self.state.document.settings.env
        try:
            register = read_register(Path(env.srcdir))
        except (ValueError, TypeError) as wrong:
            raise self.error(str(wrong)) from wrong
        rows = [self.row(env, shown) for shown in register]
        return [table(rows, ("Result", "Category", "Shown in"), (65, 20, 15))]

    def row(self, env, shown: Shown) -> nodes.row:
        """Turn one claim into a row that links to its place."""
        page = env.app.builder.get_relative_uri(env.docname, shown.docname)
        uri = f"{page}#claim-{shown.claim.id}"
        category = nodes.inline("", shown.claim.category, classes=["claim-category"])
        link = nodes.reference("", shown.where, internal=True, refuri=uri)
        return row(nodes.Text(shown.claim.value), category, link)


def setup(app) -> dict:
    """Tell Sphinx about the directive."""
    app.add_directive("claims", ClaimsDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
