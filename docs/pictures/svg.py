"""An SVG file, as text, in colors for light and for dark pages."""

from __future__ import annotations

from xml.sax.saxutils import escape

# By class: what a shape is filled with on light and on dark pages.
FILLS = {
    "page": ("#ffffff", "#131416"),
    "ink": ("#1f2328", "#e6e8eb"),
    "faint": ("#5b6570", "#a0a8b1"),
    "blue": ("#6aa5ea", "#2f6db8"),
    "orange": ("#f0a35e", "#a85f17"),
    "green": ("#5fc29a", "#20795a"),
    "violet": ("#a79be8", "#6153b5"),
    "gray": ("#c9ced4", "#4a525b"),
}
# Of these colors there are curves too, of class ``line``.
CURVES = ("blue", "orange", "green", "violet")
LINES = {"arrow": "fill:none;stroke-width:1.2", "thin": "fill:none;stroke-width:1;stroke-dasharray:3 3"}


def style() -> str:
    """Return the style sheet of every picture."""
    rules = [
        "text{font:14px system-ui,-apple-system,'Segoe UI',sans-serif}",
        ".small{font-size:12px}",
        ".bold{font-weight:600}",
    ]
    rules += [".code{font-family:ui-monospace,SFMono-Regular,Menlo,monospace;font-size:12px}"]
    rules += [f".{name}{{{line}}}" for name, line in LINES.items()]
    rules.append(".line{stroke-opacity:0.7}")
    lines = ",".join(f".{name}" for name in LINES)
    for number, scheme in enumerate(("light", "dark")):
        colors = [f".{name}{{fill:{fills[number]}}}" for name, fills in FILLS.items()]
        colors += [
            f".line.{name}{{fill:none;stroke:{fills[number]}}}" for name, fills in FILLS.items() if name in CURVES
        ]
        colors.append(f"{lines}{{stroke:{FILLS['faint'][number]}}}")
        rules += colors if scheme == "light" else ["@media(prefers-color-scheme:dark){", *colors, "}"]
    return "\n".join(rules)


class Picture:
    """A picture under construction. Lengths are in units of its width, from the top left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._shapes: list[str] = []
        self.rect(0, 0, width, height, "page", radius=8)

    def rect(self, x: float, y: float, width: float, height: float, kind: str, radius: float = 2) -> None:
        """Add a rectangle; ``kind`` is a key of ``FILLS``."""
        size = f'width="{width:g}" height="{height:g}" rx="{radius:g}"'
        self._shapes.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" {size}/>')

    def text(self, x: float, y: float, text: str, kind: str = "ink", anchor: str = "start") -> None:
        """Add a line of text whose baseline is at ``y``; ``kind`` is one or more classes of the style sheet."""
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._shapes.append(f'<text class="{kind}" x="{x:g}" y="{y:g}"{place}>{escape(text)}</text>')

    def path(self, commands: str, kind: str, width: float | None = None) -> None:
        """Add a path, in SVG's commands; ``width`` is that of its line."""
        line = "" if width is None else f' stroke-width="{width:g}"'
        self._shapes.append(f'<path class="{kind}" d="{commands}"{line}/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Add a straight line with a head at its end, which is drawn as if it came from above or below."""
        back = 5 if to_y > y else -5
        self.path(f"M{x:g} {y:g}L{to_x:g} {to_y:g}M{to_x - 4:g} {to_y - back:g}L{to_x:g} {to_y:g}l4 {-back:g}", "arrow")

    def source(self) -> str:
        """Return the file."""
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join([head, title, f"<style>\n{style()}\n</style>", *self._shapes, "</svg>"]) + "\n"
