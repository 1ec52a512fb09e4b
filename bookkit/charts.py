"""Curves and bars by matplotlib, as pictures in the page's own colours and font.

Import them from `bookkit.plot`. matplotlib is imported by the first drawing, never before.
"""

import io
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager

from bookkit.picture import INK, WIDTH, Picture, colours_of, drawing

BLACK = "#000000"  # in a figure; its picture has the colour of the page's text there
STYLES = ("-", "--", "-.", ":")  # lines differ in grey, too
FINE_ENOUGH = 200  # points a line is thinned to, in pairs of lowest and highest
LOOK = {
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": BLACK,
    "grid.alpha": 0.15,
}
TIDY = (  # what matplotlib writes, and what becomes of it
    (r"\s*\n\s*", " "),
    (r"^.*?<svg[^>]*> *| *</svg> *$", ""),
    (r"<!--.*?-->|<style.*?</style>", ""),  # a style would hold for the whole page
    (r'<path d="[^"]*" style="fill: none"/>', ""),  # the invisible ground
    (r' transform="rotate\(-?0 [^"]*"', ""),
    (r' id="[^"]*_[^"]*"', ""),  # the name of a group: nobody refers to it
    (r"font-family: [^;\"]*;? ?", ""),  # the page's own font
    (BLACK, INK),
    (r"xlink:href", "href"),
    (r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.1f}"),
    (r" ?\b([MLCQz]) (?=[^<>]*/>)", r"\1"),  # M 3 4 L 5 6 -> M3 4L5 6
    (r">\s+<", "><"),
)


def figure_svg(fig, title: str, description: str) -> Picture:
    """Turn a matplotlib figure into a picture, and close the figure.

    Same figure, same bytes: no date, and ids made from content and words, so that no two on a page
    clash. Black becomes the page's text colour; text stays text, in the page's font.  Given.
    """
    import matplotlib

    salt = {"svg.hashsalt": title + description}
    plain = {"svg.fonttype": "none", "path.simplify_threshold": 0.5}
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    buffer = io.StringIO()
    with matplotlib.rc_context(salt | plain):
        fig.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    if "matplotlib.pyplot" in sys.modules:  # a figure made without pyplot needs no closing
        sys.modules["matplotlib.pyplot"].close(fig)
    svg = buffer.getvalue()
    for pattern, new in TIDY:
        svg = re.sub(pattern, new, svg)
    width, height = (72 * inches for inches in fig.get_size_inches())
    body = ['<g stroke-linejoin="round">', svg, "</g>"]
    return drawing(height, body, title, description, width)


@contextmanager
def _axes(height: float, left: float, right: float, above: float):
    """Give axes with that much room around them, with this book's settings and nobody else's."""
    from matplotlib import style
    from matplotlib.figure import Figure

    place = (left / WIDTH, 42 / height, 1 - (left + right) / WIDTH, 1 - (42 + above) / height)
    with style.context(["default", LOOK]):
        yield Figure((WIDTH / 72, height / 72), dpi=72).add_axes(place)


def _thousands(value: float, _position: int = 0) -> str:
    return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"


def curves(
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    labels: tuple[str, str],
    title: str,
    *,
    top: float = 0,
    mark: float | None = None,
) -> Picture:
    """Draw lines over a common `x`, each named at its right end; the y axis starts at 0.

    `labels` name the axes, x first, with their units. `top` fixes the upper end of the y axis, so
    that pictures can be compared; `mark` draws a vertical line there. Long lines are thinned to
    what the width can show. More than four lines are hard to tell apart.
    Raises ValueError for a line whose length is not that of `x`.  Given.
    """
    for name, y in lines.items():
        if len(y) != len(x):
            raise ValueError(f"line {name!r} has {len(y)} values for {len(x)} positions")
    with _axes(270, 56, 12 + 7 * max(map(len, lines)), 24) as axes:
        _draw_lines(axes, x, lines)
        high = top or axes.get_ylim()[1]
        axes.set(xlabel=labels[0], xlim=(min(x), max(x)), ylim=(0, high))
        axes.annotate(labels[1], (0, 1), (-48, 10), "axes fraction", "offset points")
        axes.xaxis.set_major_formatter(_thousands)
        axes.yaxis.set_major_formatter(_thousands)
        axes.grid(axis="y")
        if mark is not None:
            axes.axvline(mark, color=BLACK, linewidth=1, linestyle=":")
        ends = {name: y[-1] for name, y in lines.items()}
        for name, place in _spread(ends, high / 12, high).items():
            at = (1, place / high)
            axes.annotate(name, at, (8, 0), "axes fraction", "offset points", va="center")
        return figure_svg(axes.figure, title, _describe_lines(x, lines, labels))


def _draw_lines(axes, x, lines) -> None:
    look = {"marker": "o" if len(x) <= 20 else None, "linewidth": 2.2, "clip_on": False}
    for i, (name, colour) in enumerate(colours_of(lines).items()):
        shown = _thinned(lines[name])
        points = [x[k] for k in shown], [lines[name][k] for k in shown]
        axes.plot(*points, STYLES[i % 4], color=colour, **look)


def _thinned(y: Sequence[float]) -> list[int]:
    """Return the positions to draw: all of a short line, else the extremes of each stretch."""
    stretch = 1 if len(y) <= 2 * FINE_ENOUGH else -(-2 * len(y) // FINE_ENOUGH)
    parts = [range(len(y))[start : start + stretch] for start in range(0, len(y), stretch)]
    extremes = {choose(part, key=y.__getitem__) for part in parts for choose in (min, max)}
    return sorted({0, len(y) - 1} | extremes)


def _spread(ends: Mapping[str, float], gap: float, high: float) -> dict[str, float]:
    """Move labels apart to at least `gap`, in the order of their values, from 0 to `high`."""
    places, lowest = {}, 0.0
    for above, name in zip(reversed(range(len(ends))), sorted(ends, key=ends.get), strict=True):
        lowest = max(ends[name], lowest)
        places[name] = min(lowest, high - above * gap)
        lowest += gap
    return places


def _describe_lines(x, lines, labels) -> str:
    rows = []
    for name, y in lines.items():
        points = [f"{_thousands(b)} at {_thousands(a)}" for a, b in zip(x, y, strict=True)]
        if len(y) <= 8:
            rows.append(f"{name} {', '.join(points)}")
        else:
            low, high = (points[choose(range(len(y)), key=y.__getitem__)] for choose in (min, max))
            low_high = f"lowest {low}, highest {high}"
            rows.append(f"{name} from {points[0]} to {points[-1]}, {low_high}")
    return f"{labels[1]} over {labels[0]}. {'; '.join(rows)}."


def bars(
    groups: Mapping[str, float | Mapping[str, float]], unit: str, title: str, *, top: float = 0
) -> Picture:
    """Draw horizontal bars from 0, each with its value at the end.

    `groups` maps a name to a number, or to several named numbers: their bars then stand together,
    one colour a name. `unit` labels the axis; `top` fixes its end.  Given.
    """
    parts = {
        name: part if isinstance(part, Mapping) else {"": part} for name, part in groups.items()
    }
    every = [bar for part in parts.values() for bar in part.items()]
    colours = colours_of(name for name, _ in every)
    bottom = 24 * (len(every) - 1) + 10 * (len(parts) - 1)
    right = 12 + 7 * max(len(_end(bar)) for bar in every)
    rows = [f"{group}: {', '.join(map(_end, part.items()))}" for group, part in parts.items()]
    with _axes(84 + bottom, 14 + 7 * max(map(len, parts)), right, 4) as axes:
        place, middles = 0, []
        for part in parts.values():
            middles.append(place + 12 * (len(part) - 1))
            for name, value in part.items():
                axes.barh(place, value, 19, color=colours[name])
                end = _end((name, value)), (value, place), (6, -1)
                axes.annotate(*end, textcoords="offset points", va="center")
                place += 24
            place += 10
        axes.set_yticks(middles, list(parts))
        high = top or max(value for _, value in every) or 1
        axes.set(xlabel=unit, xlim=(0, high), ylim=(bottom + 17, -17))
        axes.xaxis.set_major_formatter(_thousands)
        axes.tick_params(left=False)
        return figure_svg(axes.figure, title, f"{unit}. {'; '.join(rows)}.")


def _end(bar: tuple[str, float]) -> str:
    return f"{bar[0]} {_thousands(bar[1])}".strip()
