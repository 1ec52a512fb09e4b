"""From a matplotlib figure to a picture in the page's own colours and font.

Import `figure_svg` from `labcore.plot`. matplotlib is imported by the first drawing, never before.
"""

import hashlib
import io
import re
import sys
from itertools import pairwise

from labcore.picture import Picture, svg_head

INK = "#000000"  # what matplotlib draws in black takes the colour of the page's text
REPEATABLE = {"svg.hashsalt": "labcore", "svg.fonttype": "none", "path.simplify_threshold": 0.5}
DROPPED = (
    r"<metadata>.*?</metadata>|<!--.*?-->",
    r"<style.*?</style>",  # in a page it would hold for everything
    r'<path d="[^"]*" style="fill: none"/>',  # the invisible ground
    r' transform="rotate\(-?0 [^"]*"',
    r"font-family: [^;\"]*;? ?",  # the page's own font
)


def figure_svg(fig, title: str, description: str) -> Picture:
    """Turn a matplotlib figure into a picture, and close the figure.

    Same figure, same bytes: no date, and ids made from the content, so that no two figures on a
    page clash. Black becomes the colour of the text around, the ground transparent; text stays
    text, in the page's font.  Given.
    """
    import matplotlib

    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    buffer = io.StringIO()
    with matplotlib.rc_context(REPEATABLE):
        fig.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    if "matplotlib.pyplot" in sys.modules:  # a figure made without pyplot needs no closing
        sys.modules["matplotlib.pyplot"].close(fig)
    width, height = (72 * inches for inches in fig.get_size_inches())
    head = svg_head(width, height, title, description)
    return Picture(head + _own_ids(_tidy(buffer.getvalue())) + "</svg>", f"{title}: {description}")


def _tidy(svg: str) -> str:
    """Keep what lies inside <svg> and can be seen, in page colours, with one decimal at most."""
    body = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    body = re.sub(r"\s*\n\s*", " ", body)
    body = re.sub(r"\bfont: ((?:\d+|bold) )?([\d.]+px)[^;\"]*", r"font-size: \2", body)
    for pattern in DROPPED:
        body = re.sub(pattern, "", body)
    body = body.replace(INK, "currentColor").replace("xlink:href", "href")
    body = re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.1f}", body)
    body = re.sub(r">\s+<", "><", body).strip()
    body = re.sub(r' d="([^"MCQ]*M[^"MCQ]*)"', _relative, body)
    return f'<g stroke-linejoin="round">{body}</g>'


def _relative(path: re.Match) -> str:
    """Write a path of straight lines by its steps, in tenths of a unit: it packs better."""
    tenths = [round(10 * float(number)) for number in re.findall(r"-?[\d.]+", path[1])]
    points = list(zip(tenths[::2], tenths[1::2], strict=True))
    steps = [
        f"{(x - before_x) / 10:g} {(y - before_y) / 10:g}"
        for (before_x, before_y), (x, y) in pairwise(points)
    ]
    start = f"M{points[0][0] / 10:g} {points[0][1] / 10:g}"
    return f' d="{start}l{" ".join(steps)}{"z" * path[1].strip().endswith("z")}"'


def _own_ids(body: str) -> str:
    """Drop the ids nobody refers to, and begin the others with a hash of the drawing."""
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', body))
    mark = "p" + hashlib.sha256(body.encode()).hexdigest()[:8]

    def renamed(found: re.Match) -> str:
        return f' id="{mark}-{found[1]}"' if found[1] in used else ""

    return re.sub(r'(url\(#|href="#)', rf"\g<1>{mark}-", re.sub(r' id="([^"]+)"', renamed, body))
