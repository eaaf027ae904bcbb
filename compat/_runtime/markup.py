"""HTML of reports, as notebooks and browsers show it: tables, and pictures with a row per device.

Nothing is read from elsewhere, and all text keeps its size on a page of any width.
"""

from html import escape
from typing import Any, Container, Iterable, NamedTuple, Sequence, Tuple

_WRONG = "background:#fee2e2;color:#7f1d1d;"  # both, to be read on light pages and on dark ones
_CELL = "text-align:left;vertical-align:top;white-space:pre-wrap"
_ROW, _LONGEST = 50, 32  # pixels, and characters of a name on a narrow page
# Style sheets of notebooks set another height of pictures that have no such attribute.
_PICTURE = (
    '<svg xmlns="http://www.w3.org/2000/svg" role="img" width="100%" height="{0}" '
    'style="height:{0}px" font-family="sans-serif" font-size="13" fill="currentColor">'
    "<title>{1}</title>{2}</svg>"
)
_LANE = (
    '<g transform="translate(0 {y})"><title>{full}</title><text y="14">{name}</text>'
    '<text x="100%" y="14" text-anchor="end"{style}>{label}</text>'
    '<rect y="20" width="100%" height="20" fill-opacity=".12"/>'
    '<svg y="20" width="{length:.2%}" height="20" style="height:20px" viewBox="0 0 {parts} 1" '
    'preserveAspectRatio="none"><path fill="#3b82f6" d="M0 1{path}V1z"/></svg></g>'
)
_DOCUMENT = """\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{0}</title>
<style>
:root {{ color-scheme: light dark; font-family: sans-serif }}
body {{ max-width: 60em; margin: 1em auto; padding: 0 1em }}
td, th {{ padding: .2em .4em; border-bottom: 1px solid #8884 }}
table {{ border-collapse: collapse }}
</style>
<h1>{0}</h1>
{1}
</html>
"""


class Lane(NamedTuple):
    """A row of a picture.

    Attributes:
        name: the name of the device or rank.
        label: a few words, at the row's other end.
        length: its part of the width, from 0 to 1.
        heights: of equal parts of its length, from 0 to 1.
        wrong: whether the label is to be red.
    """

    name: str
    label: str
    length: float
    heights: "Sequence[float]" = (1.0,)
    wrong: bool = False


def table(rows: "Iterable[Any]", wrong: "Container[int]" = (), heading: bool = False) -> str:
    """Return a table of texts.

    Arguments:
        rows: the texts of each row.
        wrong: numbers of rows that are red.
        heading: whether row 0 is a heading.
    """
    lines = []
    for number, row in enumerate(rows):
        kinds = ["th"] + ["th" if heading and not number else "td"] * (len(row) - 1)
        style = (_WRONG if number in wrong else "") + _CELL
        cell = '<{0} style="{1}">{2}</{0}>'
        cells = [cell.format(kind, style, escape(text)) for kind, text in zip(kinds, row)]
        lines.append("<tr>{}</tr>".format("".join(cells)))
    body = "\n".join(lines)
    return f'<div style="overflow-x:auto;margin:1em 0"><table>{body}</table></div>'


def sections(groups: "Iterable[Tuple[str, Sequence[str]]]", wrong: "Container[str]") -> str:
    """Return a table of headings and their lines; those without lines are left out."""
    shown = [(heading, "\n".join(lines)) for heading, lines in groups if lines]
    return table(shown, [n for n, (heading, _) in enumerate(shown) if heading in wrong])


def sentence(text: str, wrong: bool = False) -> str:
    """Return a paragraph, which is red if it is ``wrong``."""
    return '<p style="{}">{}</p>'.format((_WRONG + "padding:.3em") * wrong, escape(text))


def picture(title: str, lanes: "Sequence[Lane]", ends: "Sequence[str]" = ()) -> str:
    """Return an SVG image as wide as its container.

    Arguments:
        title: its description.
        lanes: the rows.
        ends: texts below the lanes, at the left end and at the right one.
    """
    parts = [
        _LANE.format(
            y=_ROW * place,
            full=escape(lane.name),
            name=escape(_shortened(lane.name)),
            style=' fill="#dc2626" font-weight="bold"' if lane.wrong else "",
            label=escape(lane.label),
            length=lane.length,
            parts=len(lane.heights),
            path="".join(map(_part, lane.heights)),
        )
        for place, lane in enumerate(lanes)
    ]
    height = _ROW * len(lanes)
    text = '<text x="{}" y="{}" text-anchor="{}" font-size="11">{}</text>'
    for end, place, anchor in zip(ends, ("0", "100%"), ("start", "end")):
        parts.append(text.format(place, height + 2, anchor, escape(end)))
    return _PICTURE.format(height + 10 * bool(ends), escape(title), "\n".join(parts))


def _part(height: float) -> str:
    """Return a part of a path: to a height and on; two pixels at least, where it is not 0."""
    return f"V{round(1 - max(height, 0.1 * (height > 0)), 2):g}h1"


def _shortened(name: str) -> str:
    """Return a name without its middle: it may begin with the number of a rank."""
    return name if len(name) <= _LONGEST else name[:9] + "…" + name[10 - _LONGEST :]


def document(title: str, body: str) -> str:
    """Return a page that needs no other file."""
    return _DOCUMENT.format(escape(title), body)
