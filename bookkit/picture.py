"""What a cell ends in when it draws: a picture, a palette with fixed roles, and a few SVG strokes.

Roles, the same on every page: free is light grey, each sequence has one colour, shared is hatched,
and what is held but empty is outlined. Text and lines take the colour of the page around them, so a
picture is right in light and in dark.
"""

import os
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from html import escape

# Paul Tol's "bright" scheme, safe for colour-blind readers; the darker ones, fit for lines, first.
COLOURS = ("#4477AA", "#EE6677", "#228833", "#AA3377", "#CCBB44", "#66CCEE")
WIDTH = 480  # units across every picture: on a phone its 13-unit text is 9 to 10 pixels high
ENLARGED = 1.125  # pixels a unit, where the column has room
INK = "currentColor"  # the page's text colour
FREE, UNKNOWN = (f'fill="{INK}" fill-opacity="{opacity}"' for opacity in (".13", ".5"))
CENTRED = 'text-anchor="middle"'
SMALL = 'font-size="12" fill-opacity=".8"'

Box = tuple[float, float, float, float]  # x, y, width, height


def in_book() -> bool:
    """Tell whether this process builds the book, where no kernel will answer the reader.  Given."""
    return os.environ.get("LABCORE_STATIC", "") not in ("", "0")


@dataclass(frozen=True)
class Picture:
    """An SVG drawing and the sentence that says what it shows.

    A notebook shows it on white paper; in the book it is part of the page and takes the page's
    colours. Where nothing can be drawn, `description` is printed.  Given.
    """

    svg: str
    description: str

    def __repr__(self) -> str:
        """Return the description: what a reader without the picture needs."""
        return self.description

    @property
    def size(self) -> tuple[float, float]:
        """Width and height, in the drawing's own units.  Given."""
        width, height = self.svg.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split()
        return float(width), float(height)

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        page = {"text/html": f'<div class="picture">{self.svg}</div>'}
        shown = page if in_book() else {"image/svg+xml": on_paper(self.svg)}
        return shown | {"text/plain": self.description}


def on_paper(svg: str) -> str:
    """Give the drawing a white ground and dark ink, for places that show it as an image.  Given."""
    return svg.replace('style="', 'style="background:#fff;color:#222;', 1)


def drawing(
    height: float, body: Iterable[str], title: str, description: str, width: float = WIDTH
) -> Picture:
    """Wrap SVG elements into a picture that shrinks with its column.  Given."""
    size = f'width="{short(width * ENLARGED)}" height="{short(height * ENLARGED)}"'
    view = f'viewBox="0 0 {short(width)} {short(height)}"'
    style = 'style="max-width:100%;height:auto;font-family:inherit"'
    text = f'font-family="sans-serif" font-size="13" fill="{INK}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} {view} {style} {text}>'
    said = f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
    return Picture(f"{head}{said}{''.join(body)}</svg>", f"{title}: {description}")


def stacked(title: str, *pictures: Picture) -> Picture:
    """Put pictures of the common width below one another, as one picture.  Given."""
    body, y, gap = [], 0.0, 10
    for picture in pictures:
        inner = picture.svg.split("</desc>", 1)[1].removesuffix("</svg>")
        body.append(f'<g transform="translate(0 {short(y)})">{inner}</g>')
        y += picture.size[1] + gap
    return drawing(y - gap, body, title, " ".join(picture.description for picture in pictures))


def short(number: float) -> str:
    """Write a coordinate with one decimal at most: 3.04 -> '3'.  Given."""
    return f"{round(number, 1):g}"


def counted(number: int, noun: str) -> str:
    """Write a number with its noun: '1 block', '2 blocks'.  Given."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def colours_of(owners: Iterable[Hashable]) -> dict[Hashable, str]:
    """Give owners colours in order of appearance; the seventh shares the first one's.  Given."""
    return {owner: COLOURS[i % len(COLOURS)] for i, owner in enumerate(dict.fromkeys(owners))}


def path(steps: Iterable[str], attributes: str) -> str:
    """Join the steps of a path: any number of boxes is one path, and none is nothing.  Given."""
    steps = "".join(steps)
    return f'<path d="{steps}" {attributes}/>' if steps else ""


def rectangles(boxes: Iterable[Box], attributes: str) -> str:
    """Draw boxes with these SVG attributes.  Given."""
    corner = "M{} {}h{}v{}h{}z"
    return path((corner.format(*map(short, (x, y, w, h, -w))) for x, y, w, h in boxes), attributes)


def filled(boxes: Iterable[Box], colour: str, opacity: float = 1) -> str:
    """Fill boxes with one colour: something is stored there.  Given."""
    faint = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
    return rectangles(boxes, f'fill="{colour}"{faint}')


def outlined(boxes: Iterable[Box], colour: str) -> str:
    """Draw only the edge of boxes, inside their area: held, but empty.  Given."""
    inner = [(x + 0.6, y + 0.6, w - 1.2, h - 1.2) for x, y, w, h in boxes]
    return rectangles(inner, f'fill="none" stroke="{colour}" stroke-width="1.2"')


def hatched(boxes: Iterable[Box]) -> str:
    """Draw diagonals over boxes, cut at their edges: several sequences hold this.  Given."""
    steps = []
    for x, y, w, h in boxes:
        for k in range(5, int(w + h), 5):  # the line on which across + down = k
            start, end = (max(0, k - h), min(h, k)), (min(w, k), max(0, k - w))
            (x1, y1), (x2, y2) = ((short(x + i), short(y + j)) for i, j in (start, end))
            steps.append(f"M{x1} {y1}L{x2} {y2}")
    return path(steps, f'fill="none" stroke="{INK}" stroke-opacity=".55" stroke-width="1.2"')


def cells_in_rows(runs: Iterable[Box], cell: float, colour: str, opacity: float = 1) -> str:
    """Fill rows of square-edged cells, `cell` wide with one unit between them, as one path.

    Each run is one stroke, dashed at the cells' width: a thousand cells take a few hundred bytes.
    All runs have the same height.  Given.
    """
    runs = list(runs)
    height = short(runs[0][3]) if runs else ""
    faint = f' stroke-opacity="{opacity:g}"' if opacity < 1 else ""
    return path(
        (f"M{short(x)} {short(y + h / 2)}h{short(w)}" for x, y, w, h in runs),
        f'fill="none" stroke="{colour}"{faint} stroke-width="{height}"'
        f' stroke-dasharray="{short(cell)} 1"',
    )


def words(x: float, y: float, text: object, attributes: str = "") -> str:
    """Write text with its baseline at (x, y).  Given."""
    place = f'x="{short(x)}" y="{short(y)}" {attributes}'.rstrip()
    return f"<text {place}>{escape(str(text))}</text>"


def key(y: float, *roles: str) -> str:
    """Draw the line that explains free, empty, shared and unknown, each with its sample.  Given."""
    out, x = [], 0.0
    for role in roles:
        box, ground = [(x, y - 10, 18, 12)], UNKNOWN if role == "held elsewhere" else FREE
        out.append(outlined(box, INK) if role.startswith("empty") else rectangles(box, ground))
        out += [hatched(box) if role == "shared" else "", words(x + 24, y, role, 'font-size="12"')]
        x += 48 + 6.5 * len(role)
    return "".join(out)
