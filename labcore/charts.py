"""Curves and bars: thin helpers over matplotlib that give a picture in the page's own colours.

Import them from `labcore.plot`. matplotlib is imported by the first drawing, never before.
"""

from collections.abc import Mapping, Sequence

from labcore.figure import INK, figure_svg
from labcore.picture import COLOURS, WIDTH, Picture

STYLES = ("-", "--", "-.", ":")  # lines differ in grey, too
FINE_ENOUGH = 200  # points a line is thinned to, in pairs of lowest and highest
LOOK = {
    "font.size": 12,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
}


def _axes(height: float, left: float, right: float, above: float):
    """Return a figure of the common width, and its axes with that much room around them."""
    from matplotlib.figure import Figure

    fig = Figure((WIDTH / 72, height / 72), dpi=72)
    place = (left / WIDTH, 42 / height, 1 - (left + right) / WIDTH, 1 - (42 + above) / height)
    return fig, fig.add_axes(place)


def _picture(draw, title: str, description: str) -> Picture:
    """Draw and write a figure with this book's settings in force, and with nobody else's."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(LOOK)
        return figure_svg(draw(), title, description)  # ticks are made only when it is written


def _thousands(value: float, _position: int = 0) -> str:
    return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"


# --- curves -------------------------------------------------------------------------------------


def curves(
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    labels: tuple[str, str],
    title: str,
    *,
    top: float | None = None,
    mark: float | None = None,
) -> Picture:
    """Draw lines over a common `x`, each named at its right end; the y axis starts at 0.

    `labels` name the axes, x first, with their units. `top` fixes the upper end of the y axis, so
    that the frames of an explorer can be compared; `mark` draws a vertical line there. Long lines
    are thinned to what the width can show. More than four lines are hard to tell apart.
    Raises ValueError for a line whose length is not that of `x`.  Given.
    """
    for name, y in lines.items():
        if len(y) != len(x):
            raise ValueError(f"line {name!r} has {len(y)} values for {len(x)} positions")
    description = _describe_lines(x, lines, labels)
    return _picture(lambda: _curves(x, lines, labels, top, mark), title, description)


def _curves(x, lines, labels, top, mark):
    fig, axes = _axes(270, 56, 12 + 7 * max(map(len, lines)), 24)
    for i, y in enumerate(lines.values()):
        shown = _thinned(y)
        style = {"color": COLOURS[i % len(COLOURS)], "linewidth": 2.2, "clip_on": False}
        dots = "o" if len(x) <= 20 else None
        axes.plot([x[k] for k in shown], [y[k] for k in shown], STYLES[i % 4], marker=dots, **style)
    high = top or axes.get_ylim()[1]
    axes.set(xlabel=labels[0], xlim=(min(x), max(x)), ylim=(0, high))
    axes.annotate(labels[1], (0, 1), (-48, 10), "axes fraction", "offset points")
    axes.yaxis.set_major_formatter(_thousands)
    axes.xaxis.set_major_formatter(_thousands)
    axes.grid(axis="y")
    if mark is not None:
        axes.axvline(mark, color=INK, linewidth=1, linestyle=":")
    ends = {name: y[-1] for name, y in lines.items()}
    for name, place in _spread(ends, high / 12, high).items():
        axes.annotate(
            name, (1, place / high), (8, 0), "axes fraction", "offset points", va="center"
        )
    return fig


def _thinned(y: Sequence[float]) -> list[int]:
    """Return the positions to draw: all of a short line, else the extremes of each stretch."""
    if len(y) <= 2 * FINE_ENOUGH:
        return list(range(len(y)))
    stretch = -(-2 * len(y) // FINE_ENOUGH)
    kept = {0, len(y) - 1}
    for start in range(0, len(y), stretch):
        part = range(start, min(start + stretch, len(y)))
        kept |= {min(part, key=y.__getitem__), max(part, key=y.__getitem__)}
    return sorted(kept)


def _spread(ends: Mapping[str, float], gap: float, high: float) -> dict[str, float]:
    """Move labels apart to at least `gap`, in the order of their values, from 0 to `high`."""
    places, lowest = {}, 0.0
    for name in sorted(ends, key=ends.get):
        places[name] = max(ends[name], lowest)
        lowest = places[name] + gap
    highest = high
    for name in reversed(places):
        places[name] = min(places[name], highest)
        highest = places[name] - gap
    return places


def _describe_lines(x, lines, labels) -> str:
    def point(y, k):
        return f"{_thousands(y[k])} at {_thousands(x[k])}"

    def line(name, y):
        if len(y) <= 8:
            return f"{name} " + ", ".join(point(y, k) for k in range(len(y)))
        low, high = (choose(range(len(y)), key=y.__getitem__) for choose in (min, max))
        ends = f"{name} from {point(y, 0)} to {point(y, -1)}"
        return f"{ends}, lowest {point(y, low)}, highest {point(y, high)}"

    return (
        f"{labels[1]} over {labels[0]}. " + "; ".join(line(*each) for each in lines.items()) + "."
    )


# --- bars ---------------------------------------------------------------------------------------


def bars(
    groups: Mapping[str, float | Mapping[str, float]],
    unit: str,
    title: str,
    *,
    top: float | None = None,
) -> Picture:
    """Draw horizontal bars from 0, each with its value at the end.

    `groups` maps a name to a number, or to several named numbers: their bars then stand together,
    one colour a name. `unit` labels the axis; `top` fixes its end.  Given.
    """
    parts = {
        name: part if isinstance(part, Mapping) else {"": part} for name, part in groups.items()
    }
    rows = [f"{group}: {', '.join(map(_end, part.items()))}" for group, part in parts.items()]
    return _picture(lambda: _bars(parts, unit, top), title, f"{unit}. {'; '.join(rows)}.")


def _bars(parts: Mapping[str, Mapping[str, float]], unit: str, top: float | None):
    bars_of = [(g, bar) for g, part in enumerate(parts.values()) for bar in part.items()]
    places = [24 * i + 10 * g for i, (g, _) in enumerate(bars_of)]
    names = list(dict.fromkeys(name for _, (name, _) in bars_of))
    widest = max(len(_end(bar)) for _, bar in bars_of)
    fig, axes = _axes(84 + places[-1], 14 + 7 * max(map(len, parts)), 12 + 7 * widest, 4)
    for place, (_, (name, value)) in zip(places, bars_of, strict=True):
        axes.barh(place, value, 19, color=COLOURS[names.index(name) % len(COLOURS)])
        axes.annotate(
            _end((name, value)), (value, place), (6, -1), textcoords="offset points", va="center"
        )
    of_group = [
        [y for y, (h, _) in zip(places, bars_of, strict=True) if h == g] for g in range(len(parts))
    ]
    axes.set_yticks([sum(ys) / len(ys) for ys in of_group], list(parts))
    high = top or max(value for _, (_, value) in bars_of) or 1
    axes.set(xlabel=unit, xlim=(0, high), ylim=(places[-1] + 17, -17))
    axes.xaxis.set_major_formatter(_thousands)
    axes.tick_params(left=False)
    return fig


def _end(bar: tuple[str, float]) -> str:
    return f"{bar[0]} {_thousands(bar[1])}".strip()
