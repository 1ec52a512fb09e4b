"""Axe, which finds what stops a screen reader or a keyboard, made cheap enough for every page.

Most of a chapter's elements are alike: words of code by the thousand, parts of drawings. Each kind
is read once a page. test_browser.py, which has the pages open anyway, calls `violations_in` on
each; here it is shown to find things.
"""

import pytest
from axe_playwright_python.base import AXE_SCRIPT

SERIOUS = {"serious", "critical"}
# Open what is folded, stop what moves; of each kind of word in code leave one, and one formula; of
# a drawing that a reader hears as one picture leave its name.
THIN = """() => {
  const style = document.createElement('style');
  style.textContent = '* { transition: none !important; animation: none !important; }';
  document.head.append(style);
  document.querySelectorAll('details').forEach(box => { box.open = true; });
  const kinds = new Set();
  for (const code of document.querySelectorAll('.highlight pre')) {
    const inside = code.closest('.cell_input, .cell_output')?.className;
    for (const word of [...code.querySelectorAll('span')].reverse()) {
      const kind = `${inside} ${word.className}`;
      if (kinds.has(kind)) word.replaceWith(...word.childNodes);
      kinds.add(kind);
    }
    code.normalize();
  }
  [...document.querySelectorAll('mjx-container')].slice(1).forEach(formula => formula.remove());
  document.querySelectorAll('svg[role=img] > :not(title, desc)').forEach(part => part.remove());
}"""
# Mark one element with words of its own for each colour, size, weight and background on the page.
MARK = """() => {
  const looks = new Set();
  const behind = element => {
    for (; element; element = element.parentElement) {
      const colour = getComputedStyle(element).backgroundColor;
      if (colour !== 'rgba(0, 0, 0, 0)') return colour;
    }
  };
  for (const element of document.body.querySelectorAll('*')) {
    delete element.dataset.look;
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility()) continue;
    const { color, fontSize, fontWeight, opacity } = getComputedStyle(element);
    const look = [color, fontSize, fontWeight, opacity, behind(element)].join();
    if (!looks.has(look)) element.dataset.look = looks.size;
    looks.add(look);
  }
}"""
RUN = """([rules, where]) => axe.run(where || document,
  { resultTypes: ['violations'], selectors: false, preload: false, ...rules })"""
ALL_BUT_CONTRAST = {"rules": {"color-contrast": {"enabled": False}}}
CONTRAST = {"runOnly": ["color-contrast"]}


def violations(tab, rules: dict, where: list | None = None) -> list[str]:
    """List the serious violations of axe's rules in what is thinned and loaded."""
    return [
        f"{found['id']}: {node['html'][:120]}"
        for found in tab.evaluate(RUN, [rules, where])["violations"]
        if found["impact"] in SERIOUS
        for node in found["nodes"]
    ]


def violations_in(tab) -> list[str]:
    """List the serious violations of an open page, in light and in dark."""
    tab.evaluate(THIN)
    tab.evaluate(AXE_SCRIPT)
    found = violations(tab, ALL_BUT_CONTRAST)
    for scheme in ("light", "dark"):
        tab.evaluate(f"() => {{ document.documentElement.dataset.theme = '{scheme}'; }}")
        tab.evaluate(MARK)
        found += [f"{scheme}: {text}" for text in violations(tab, CONTRAST, [["[data-look]"]])]
    return found


BAD = """<!doctype html><html lang="en"><title>A page</title><main><h1>A page</h1>
<style>[data-theme=dark] .dim { color: #333; background: #222; }</style>%s</main></html>"""


@pytest.fixture(scope="module")
def tab():
    from test_browser import CHROMIUM, chromium  # not above: it imports this file

    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with chromium() as browser:
        yield browser.new_page()


@pytest.mark.browser
@pytest.mark.parametrize(
    ("what", "rule"),
    [
        ("<input type='range'>", "label:"),
        ("<details><summary>More</summary><input></details>", "label:"),
        ("<p style='color: #bbb; background: #fff'>pale</p>", "color-contrast:"),
        ("<p class='dim'>dark on dark</p>", "dark: color-contrast:"),
        ("<svg role='img'><path d='M0 0h9'/></svg>", "svg-img-alt:"),
        ("<div role='list'><p>no item</p></div>", "aria-required-children:"),
    ],
)
def test_a_violation_is_found(tab, what, rule):
    tab.set_content(BAD % what)
    found = violations_in(tab)
    assert found and all(rule in text for text in found)


@pytest.mark.browser
def test_a_page_without_a_violation_passes(tab):
    tab.set_content(BAD % "<label>Size <input type='range'></label>")
    assert not violations_in(tab)
