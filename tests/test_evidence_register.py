"""The register of evidence and the pages say the same: nothing is missing, nothing invented."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from built_site import BUILT, HTML, PAGES, name_of, soup_of, words
from chapters import ROOT
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

from bookkit.evidence import claim

sys.path.insert(0, str(ROOT / "book" / "_ext"))
from evidence_register import REFERENCE, read_reference, read_register, toc_docnames


def shown_claims(pages: dict) -> dict[str, tuple[str, str]]:
    """Collect what each page shows: address -> (sentence, category)."""
    found = {}
    for name, soup in pages.items():
        for element in soup.select(".claim[id]"):
            category = element.select_one(".claim-category")
            value = element.select_one(".claim-value")
            found[f"{name}#{element['id']}"] = (words(value), words(category))
    return found


def registered_claims(soup) -> dict[str, tuple[str, str]]:
    """Collect the rows of the register: address -> (sentence, category)."""
    found = {}
    for row in soup.select("table.claims-register tbody tr"):
        value, ground = row.find_all("td")
        address = ground.find("a")["href"].removeprefix("../")
        found[address] = (words(value), words(ground.select_one(".claim-category")))
    return found


@BUILT
def test_the_register_holds_what_the_pages_show_and_no_more():
    pages = {name_of(page): soup_of(page) for page in PAGES}
    shown, registered = shown_claims(pages), registered_claims(soup_of(HTML / "book/evidence.html"))
    assert registered == shown
    assert shown


@BUILT
def test_claims_are_shown_by_chapters_only():
    prose = {name_of(page): soup_of(page) for page in PAGES if page.parent.name != "notebooks"}
    assert not shown_claims(prose)


@BUILT
def test_the_twins_hold_the_claims_of_the_built_pages():
    in_twins = {s.claim.id: (words_of(s.claim), s.claim.category) for s in read_register(ROOT)}
    pages = {name_of(page): soup_of(page) for page in PAGES}
    shown = {a.split("#claim-")[1]: c for a, c in shown_claims(pages).items()}
    assert in_twins == shown


def words_of(shown) -> str:
    return " ".join(shown.value.split())


def test_a_claim_that_differs_or_is_missing_is_found():
    def page_of(*claims):
        return BeautifulSoup(
            "".join(c._repr_mimebundle_()["text/html"] for c in claims), "html.parser"
        )

    one, other = claim("one", "1 < 2 blocks", "derived"), claim("one", "3 blocks", "derived")
    name = "notebooks/ch01.html"
    assert shown_claims({name: page_of(one)}) == {f"{name}#claim-one": ("1 < 2 blocks", "derived")}
    assert shown_claims({name: page_of(one)}) != shown_claims({name: page_of(other)})
    assert not shown_claims({name: page_of()})


def test_pages_are_listed_in_reading_order():
    nested = {"chapters": [{"file": "a", "sections": [{"file": "b"}]}]}
    toc = {"root": "r", "parts": [nested, {"chapters": [{"file": "c"}]}]}
    assert toc_docnames(toc) == ["r", "a", "b", "c"]


def test_the_reference_chapters_eleven_claims_stand_beside_ours():
    register = read_register(ROOT)
    reference = read_reference(ROOT / REFERENCE, register)
    assert len(reference) == len({there.claim for there in reference}) == 11
    assert all(set(there.ours) <= set(register) for there in reference)


def test_the_register_is_printed_with_the_page_of_each_claim():
    program = [sys.executable, ROOT / "book" / "_ext" / "evidence_register.py"]
    printed = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    register = read_register(ROOT)
    missing = [s for s in register if f"{s.docname}.html#claim-{s.claim.id}\n" not in printed]
    assert printed.startswith(f"{len(register)} claims.") and not missing
    assert " ".join(
        f"[{register[0].claim.category}] {register[0].claim.value}".split()
    ) in " ".join(printed.split())
    assert "The reference chapter's 11 claims" in printed


# A small book, built by Sphinx alone: its one chapter shows one claim and has two exercises.

CHAPTER = """\
---
orphan: true
---

# 1. Small

### Exercise 1: count `b` blocks (predict)

### Exercise 2: break

Another heading: Exercise 3.
"""
PAGE = """\
# Page

Known: {claim}`its-id`.

```{exercises}
notebooks/ch01 2
```

```{reference_claims} there.yaml
```

```{claims}
:category: not measured
```
"""
THERE = """\
- {claim: It takes three, ground: simulation, outcome: Fewer., ours: [its-id]}
"""


def build(book: Path, page: str = PAGE, there: str = THERE):
    """Build the small book; return its page, parsed, and what Sphinx complains about."""
    shown = claim("its-id", "It takes 2 < 3 'blocks'.", "derived")
    output = {"output_type": "display_data", "data": shown._repr_mimebundle_(), "metadata": {}}
    cells = [{"source": CHAPTER}, {"source": "", "outputs": [output]}]
    for folder in ("book", "notebooks"):
        (book / folder).mkdir()
    (book / "_toc.yml").write_text("{root: book/page, chapters: [{file: notebooks/ch01}]}")
    (book / "book" / "page.md").write_text(page)
    (book / "book" / "there.yaml").write_text(there)
    (book / "notebooks" / "ch01.md").write_text(CHAPTER)
    (book / "notebooks" / "ch01.ipynb").write_text(json.dumps({"cells": cells}))
    settings = {
        "extensions": ["myst_parser", "evidence_register"],
        "root_doc": "book/page",
        "myst_heading_anchors": 3,
        "suppress_warnings": ["myst.header"],
    }
    complaints, out = io.StringIO(), book / "out"
    with patch_docutils(), docutils_namespace():
        Sphinx(book, None, out, out, "html", settings, status=None, warning=complaints).build()
    html = (out / "book" / "page.html").read_text(encoding="utf-8")
    return BeautifulSoup(html, "html.parser"), complaints.getvalue()


def test_a_page_says_a_claim_lists_the_exercises_and_puts_a_reference_beside_ours(tmp_path):
    soup, complaints = build(tmp_path)
    assert not complaints
    sentence, place = "It takes 2 < 3 'blocks'. (derived, chapter 1)", "../notebooks/ch01.html"
    inline = soup.select_one("p > .claim-said")
    assert words(inline) == sentence
    assert inline.find("a")["href"] == f"{place}#claim-its-id"
    lines = soup.select(".exercises li")
    assert [words(line) for line in lines] == [
        "Exercise 1: count b blocks (predict)",
        "Exercise 2: break, the reference’s exercise 1",
    ]
    assert [line.find("a")["href"] for line in lines] == [
        f"{place}#exercise-1-count-b-blocks-predict",
        f"{place}#exercise-2-break",
    ]
    (beside,) = soup.select("table.claims-beside tbody tr")
    assert words(beside) == f"It takes three simulation Fewer. {sentence}"
    assert not soup.select("table.claims-register tbody tr")


def test_what_no_chapter_has_stops_the_build(tmp_path):
    page = PAGE.replace("`its-id`", "`no-such`").replace("ch01 2", "ch01 3")
    _, complaints = build(tmp_path, page, THERE.replace("its-id", "another"))
    assert "no page shows the claim 'no-such'" in complaints
    assert "no chapter has the exercise notebooks/ch01 3" in complaints
    assert "'It takes three': no page shows another" in complaints


def test_a_claim_with_nothing_beside_it_is_refused(tmp_path):
    file = tmp_path / "there.yaml"
    file.write_text(THERE.replace("its-id", ""))
    with pytest.raises(ValueError, match="'It takes three': no page shows it"):
        read_reference(file, [])
