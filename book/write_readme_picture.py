"""Write the picture of the README: the introduction's own, at its starting position.

Run: python book/write_readme_picture.py
"""

from pathlib import Path

import jupytext

from bookkit.picture import on_paper

BOOK = Path(__file__).resolve().parent
PICTURE = BOOK / "_static" / "readme.svg"


def readme_picture() -> str:
    """Run the introduction's first cell and draw one frame, on white."""
    cells = jupytext.read(BOOK / "intro.md").cells
    names = {}
    exec(next(cell.source for cell in cells if cell.cell_type == "code"), names)
    picture, _ = names["render"](block_size=16, watermark=0.05)
    return on_paper(picture.svg) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(readme_picture(), encoding="utf-8")
