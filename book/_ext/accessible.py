"""Two things that readers by ear and readers on paper need.

1. docutils calls a bibliography a list, and its entries something that a list must not hold: the
   role `doc-biblioentry`, which its standard has since withdrawn. Here they are the list's items.
2. Paper is white: while a page is printed, it is in its light colours, whatever the screen shows.
"""

LIST, ENTRY = 'role="list" class="citation-list"', 'role="doc-biblioentry"'
PRINT_LIGHT = """(() => {
  const look = document.documentElement.dataset;
  let onScreen;
  addEventListener("beforeprint", () => { onScreen ??= look.theme; look.theme = "light"; });
  addEventListener("afterprint", () => { look.theme = onScreen; onScreen = undefined; });
})();"""


def list_entries(app, pagename, templatename, context, doctree) -> None:
    """Make each entry of a bibliography an item of its list."""
    if LIST in context.get("body", ""):
        context["body"] = context["body"].replace(ENTRY, 'role="listitem"')


def setup(app) -> dict:
    """Tell Sphinx about both."""
    app.add_js_file(None, body=PRINT_LIGHT)
    app.connect("html-page-context", list_entries)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
