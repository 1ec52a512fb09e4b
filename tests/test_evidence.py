"""Claims: what they accept, and what they put on the page."""

import json

import pytest

from bookkit.evidence import CATEGORIES, MIME_TYPE, claim


def test_a_claim_shows_category_and_sentence_as_text_and_as_html():
    bundle = claim("cow-copies", "4 blocks, not 6", "measured here")._repr_mimebundle_()
    assert bundle["text/plain"] == "[measured here] 4 blocks, not 6"
    assert bundle["text/html"] == (
        '<div class="claim" id="claim-cow-copies">'
        '<span class="claim-category">measured here</span> '
        '<span class="claim-value">4 blocks, not 6</span></div>'
    )


def test_the_machine_readable_copy_holds_exactly_the_three_fields():
    bundle = claim("waste-16", "2.2%", "simulation")._repr_mimebundle_()
    expected = {"id": "waste-16", "value": "2.2%", "category": "simulation"}
    assert json.loads(json.dumps(bundle[MIME_TYPE])) == expected


def test_markup_in_a_sentence_is_shown_and_not_obeyed():
    html = claim("a", "x < y & <b>z</b>", "derived")._repr_mimebundle_()["text/html"]
    assert "x &lt; y &amp; &lt;b&gt;z&lt;/b&gt;" in html


@pytest.mark.parametrize("category", CATEGORIES)
def test_each_category_is_accepted(category):
    assert claim("a-1", "so", category).category == category


@pytest.mark.parametrize("category", ["Simulation", "simulated", "measured", ""])
def test_any_other_category_is_refused_and_named(category):
    with pytest.raises(ValueError, match=f"unknown category '{category}'"):
        claim("a", "so", category)


@pytest.mark.parametrize("id", ["", "Waste", "two words", "-a", "a-", "a--b", "a_b", "é", "a\n"])
def test_an_id_that_is_no_hyphenated_lower_case_is_refused_and_named(id):
    with pytest.raises(ValueError, match="lower-case words") as error:
        claim(id, "so", "derived")
    assert repr(id) in str(error.value)


@pytest.mark.parametrize("value", ["", "  \n"])
def test_a_claim_that_says_nothing_is_refused(value):
    with pytest.raises(ValueError, match="claim 'a' says nothing"):
        claim("a", value, "derived")


def test_a_claim_cannot_be_changed_after_it_was_made():
    with pytest.raises(AttributeError):
        claim("a", "so", "derived").value = "otherwise"


@pytest.mark.parametrize(("id", "value"), [("a", 5), ("a", None), (5, "so")])
def test_a_claim_of_anything_but_text_is_refused(id, value):
    with pytest.raises(TypeError, match="id and value of a claim are text"):
        claim(id, value, "derived")
