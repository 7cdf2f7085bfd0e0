"""Draw three layouts with the library's own picture of them, as notebooks show it.

python docs/draw_layouts.py        # writes docs/images/layout-*.svg
"""

from svg import IMAGES

from ringspan.layout import contiguous, striped, zigzag
from ringspan.layout._picture import draw_layout

GREY = "#7d8590"  # readable on white and on black; a picture in a document has no current colour
SEQ_LEN, WORLD_SIZE = 32, 4

if __name__ == "__main__":
    for build in (contiguous, zigzag, striped):
        picture = draw_layout(build(SEQ_LEN, WORLD_SIZE)).replace("currentColor", GREY)
        (IMAGES / f"layout-{build.__name__}.svg").write_text(f"{picture}\n")
