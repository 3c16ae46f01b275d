"""Shared parts of all pictures: colours, numbers, ticks, and the accessible frame of a figure.

A figure is a self-contained SVG text with a title and a description, the same bytes for the same
data. `INK`, `MUTED` and `PALETTE` have a contrast of at least 4.5:1 on white, as WCAG 2 AA requires
of text (of graphics it requires 3:1). A page in the dark scheme replaces them by the colours of
`DARK`.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence

from moemesh.config.limits import visible

INK = "#1a1f29"
MUTED = "#4d5663"
GRID = "#d5dae1"
IDLE = "#e9edf2"
#: Text colours on light and on dark filled areas.
ON_LIGHT, ON_DARK = "#10151d", "#ffffff"
#: Colours without an order, (on white, on dark); neighbours differ in hue and in lightness.
PALETTE: tuple[tuple[str, str], ...] = (
    ("#1f5fa8", "#6fb0f5"),
    ("#b34700", "#ff9a5c"),
    ("#16704a", "#5fce9c"),
    ("#7a3e9d", "#cf9cf0"),
    ("#0b7285", "#56c8dd"),
    ("#7d5200", "#e0b054"),
    ("#b3245e", "#ff8fb8"),
    ("#4a5568", "#a9b4c6"),
)
COLOURS: tuple[str, ...] = tuple(light for light, _ in PALETTE)
#: Background of a page in the dark scheme.
DARK_GROUND = "#12161d"
#: Replacements of colours in the dark scheme. Those of text and graphics have a contrast of at
#: least 4.5:1 on the background, that of `ON_DARK` on the replaced colours of filled areas; those
#: of the grid and of idle areas have less.
DARK: dict[str, str] = {
    INK: "#e8ebf0",
    MUTED: "#b3bcc9",
    GRID: "#39424f",
    IDLE: "#262d38",
    ON_DARK: ON_LIGHT,
    **dict(PALETTE),
}
#: Dash patterns that go with COLOURS in line charts: colour never carries the meaning alone.
DASHES: tuple[str, ...] = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2 1 2", "1 3", "6 2 1 2 1 2")
WIDTH = 880
FONT_SIZE = 12
#: Characters that XML forbids, besides control characters.
_FORBIDDEN = re.compile(r"[\ud800-\udfff\ufffe\uffff]")
#: Average width of a character of a sans-serif font, in font sizes.
_ADVANCE = 0.58


def escape(text: object) -> str:
    """Text for SVG and HTML: markup escaped, characters that XML forbids replaced."""
    return html.escape(_FORBIDDEN.sub("\ufffd", visible(str(text))), quote=True)


def clip(text: str, length: int) -> str:
    """At most `length` characters; a cut text ends with an ellipsis."""
    return text if len(text) <= length else text[: length - 1] + "…"


def text_width(text: str, size: float = FONT_SIZE) -> float:
    """Approximate width of `text` in pixels."""
    return len(text) * size * _ADVANCE


def coordinate(value: float) -> str:
    """A pixel coordinate, two decimals at most, without needless zeros.

    >>> coordinate(3.0), coordinate(2.504), coordinate(-0.001)
    ('3', '2.5', '0')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def short(value: float) -> str:
    """A number for an axis: at most four digits, then a power of 1000.

    >>> short(0.25), short(1500), short(2_000_000), short(3e-5), short(0)
    ('0.25', '1.5k', '2M', '3e-05', '0')
    """
    if not math.isfinite(value):
        return str(value)
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{suffix}"
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten) from `low` to `high`, about `count` of them.

    >>> ticks(0, 10)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def text(
    x: float,
    y: float,
    content: object,
    *,
    anchor: str = "start",
    fill: str = INK,
    size: float = FONT_SIZE,
    weight: str = "",
) -> str:
    """One line of text, its baseline at `y`."""
    where = f'x="{coordinate(x)}" y="{coordinate(y)}"'
    look = f' fill="{fill}"' + (f' font-size="{coordinate(size)}"' if size != FONT_SIZE else "")
    look += f' text-anchor="{anchor}"' if anchor != "start" else ""
    look += f' font-weight="{weight}"' if weight else ""
    return f"<text {where}{look}>{escape(content)}</text>"


def rectangle(
    x: float, y: float, width: float, height: float, fill: str, *, title: str = "", more: str = ""
) -> str:
    """A filled rectangle. `title`: text for tooltips and screen readers; `more`: more attributes,
    after a blank."""
    size = f'width="{coordinate(width)}" height="{coordinate(height)}"'
    start = f'<rect x="{coordinate(x)}" y="{coordinate(y)}" {size} fill="{fill}"{more}'
    return f"{start}><title>{escape(title)}</title></rect>" if title else f"{start}/>"


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = GRID, width: float = 1) -> str:
    """A line from (`x1`, `y1`) to (`x2`, `y2`), `width` pixels wide."""
    ends = (
        f'x1="{coordinate(x1)}" y1="{coordinate(y1)}" x2="{coordinate(x2)}" y2="{coordinate(y2)}"'
    )
    return f'<line {ends} stroke="{stroke}" stroke-width="{coordinate(width)}"/>'


def legend(entries: Iterable[tuple[str, str]], *, left: float, top: float) -> tuple[str, float]:
    """Coloured squares of (name, colour), wrapped at :data:`WIDTH`; and their height."""
    parts: list[str] = []
    x, y = left, top
    for name, colour in entries:
        name = clip(name, 40)
        width = 18 + text_width(name) + 16
        if x > left and x + width > WIDTH:
            x, y = left, y + 18
        outline = f' stroke="{INK}" stroke-width="0.5"'
        parts.append(rectangle(x, y, 12, 12, colour, more=outline))
        parts.append(text(x + 18, y + 10.5, name))
        x += width
    return "".join(parts), (y + 18 - top if parts else 0)


def figure(
    identity: str,
    title: str,
    description: str,
    height: float,
    body: Sequence[str],
    width: float = WIDTH,
) -> str:
    """A complete figure; `identity` (letters, digits, -) is unique on the page."""
    box = f"0 0 {coordinate(width)} {coordinate(height)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" '
        f'aria-labelledby="{identity}-title {identity}-description" '
        f'font-family="system-ui, sans-serif" font-size="{FONT_SIZE}">'
        f'<title id="{identity}-title">{escape(title)}</title>'
        f'<desc id="{identity}-description">{escape(description)}</desc>'
        f"{''.join(body)}</svg>"
    )


def luminance(colour: str) -> float:
    """Relative luminance of "#rrggbb", 0 black to 1 white (WCAG 2)."""
    channels = (int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2)."""
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def ink_on(colour: str) -> str:
    """The better of dark and white text on `colour`."""
    light, dark = contrast(ON_LIGHT, colour), contrast(ON_DARK, colour)
    return ON_LIGHT if light >= dark else ON_DARK


def tint(colour: str, share: float = 0.45) -> str:
    """`colour` mixed with that share of white."""
    channels = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in channels)
