"""The register of evidence and the pages say the same: nothing is missing, nothing invented."""

import sys

from bs4 import BeautifulSoup
from built_site import BUILT, HTML, PAGES, name_of, soup_of, words
from chapters import ROOT

from bookkit.evidence import claim

sys.path.insert(0, str(ROOT / "book" / "_ext"))
from evidence_register import read_register, toc_docnames

pytestmark = BUILT


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
        value, category, place = row.find_all("td")
        address = place.find("a")["href"].removeprefix("../")
        found[address] = (words(value), words(category))
    return found


def test_the_register_holds_what_the_pages_show_and_no_more():
    pages = {name_of(page): soup_of(page) for page in PAGES}
    shown, registered = shown_claims(pages), registered_claims(soup_of(HTML / "book/evidence.html"))
    assert registered == shown
    assert shown


def test_claims_are_shown_by_chapters_only():
    prose = {name_of(page): soup_of(page) for page in PAGES if page.parent.name != "notebooks"}
    assert not shown_claims(prose)


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
