"""What a notebook and a browser show of reports: escaped, and red where words say what is wrong.

All of it is well-formed, so that a parser of XML reads it.
"""

import re
import xml.etree.ElementTree as ElementTree

import pytest

import compat
from compat._configuration.settings import Configuration
from compat._runtime import markup
from compat._runtime.operation_times import PARTS, Activity, picture
from compat._runtime.reporting import DeviceUse, Report

pytestmark = pytest.mark.usefixtures("process")

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert('\"&')</script>"


def parsed(html):
    return ElementTree.fromstring("<div>{}</div>".format(html))


def rows(html):
    """Return the texts of a table's cells, and whether each row is red."""
    found = []
    for row in parsed(html).iter("tr"):
        red = {"background:#fee2e2" in cell.get("style") for cell in row}
        assert len(red) == 1
        found.append(([cell.text or "" for cell in row], red.pop()))
    return found


def texts(svg):
    """Return the texts of a picture, in pairs of left and right; and those in red."""
    found = list(ElementTree.fromstring(svg).iter(SVG + "text"))
    pairs = [(a.text, b.text) for a, b in zip(found[::2], found[1::2])]
    return pairs, [each.text for each in found if each.get("fill") == "#dc2626"]


def svgs(html):
    return re.findall(
        r"<svg [^>]*role.*?</g></svg>|<svg [^>]*role.*?</text></svg>", html, re.DOTALL
    )


def test_a_configuration_is_the_table_of_its_report(toy):
    configuration = compat.configure_gpu()
    found = rows(configuration._repr_html_())
    assert [cells[0] for cells, _ in found] == [
        "backend", "versions", "asked", "chosen", "devices", "variables", "applied", "warnings",
    ]  # fmt: skip
    assert found[-1] == (["warnings", "none"], False)
    assert not any(red for _, red in found)
    lines = [line for cells, _ in found for line in cells[1].split("\n")]
    assert [line[11:] for line in str(configuration).splitlines()] == lines


def test_warnings_are_red_and_called_so(toy):
    with pytest.warns(compat.CompatWarning):
        configuration = compat.configure_gpu(gpus=2)
    found = rows(configuration._repr_html_())
    assert [cells for cells, red in found if red] == [["warnings", configuration.warnings[0]]]


def test_all_is_escaped(toy):
    settings = compat.configure_gpu().settings
    args = HOSTILE, HOSTILE, {HOSTILE: HOSTILE}, [HOSTILE], settings, {HOSTILE: HOSTILE}
    configuration = Configuration(*args, applied=[HOSTILE], warnings=[HOSTILE])
    use = DeviceUse(HOSTILE, None, 3, idle=HOSTILE, **Activity(1.0, 1.0, [1.0])._asdict())
    report = Report([use], {HOSTILE: HOSTILE}, {HOSTILE: HOSTILE})
    for html in configuration._repr_html_(), report._repr_html_():
        assert "<script" not in html
        assert HOSTILE in "".join(parsed(html).itertext())


THREE = [
    DeviceUse("cpu:0", None, 1222, 1218, 4),
    DeviceUse("cpu:1", None, 611, 611, 4),
    DeviceUse("cpu:2", idle="no batch was split over it"),
]


def test_a_report_has_a_row_for_each_device():
    html = Report(THREE, {})._repr_html_()
    assert texts(svgs(html)[0]) == (
        [("cpu:0", "1,222 rows"), ("cpu:1", "611 rows"), ("cpu:2", "0 rows")],
        ["0 rows"],
    )
    lanes = ElementTree.fromstring(svgs(html)[0]).iter(SVG + "svg")
    assert [lane.get("width") for lane in lanes] == ["100%", "100.00%", "50.00%", "0.00%"]
    assert rows(html) == [
        (["device", "rows", "in training", "steps", "no rows because"], False),
        (["cpu:0", "1,222", "1,218", "4", ""], False),
        (["cpu:1", "611", "611", "4", ""], False),
        (["cpu:2", "0", "0", "0", "no batch was split over it"], True),
    ]
    verdict = next(parsed(html).iter("p"))
    assert verdict.text.startswith("Only 2 of 3 devices worked. cpu:2 got no rows: ")
    assert "background:#fee2e2" in verdict.get("style")
    assert next(parsed(Report(THREE[:2], {})._repr_html_()).iter("p")).get("style") == ""


def test_a_rank_without_a_report_has_a_row_too():
    html = Report([use._replace(rank=rank) for rank, use in enumerate(THREE[:2])], {}, {}, 0, [2])
    assert texts(svgs(html._repr_html_())[0]) == (
        [("rank 0: cpu:0", "1,222 rows"), ("rank 1: cpu:1", "611 rows"), ("rank 2", "no report")],
        ["no report"],
    )


def test_a_timeline_is_on_one_scale():
    first = Activity(0.625, 2e-3, [1.0, 0.25])
    svg = picture([("cpu:0", first), ("cpu:1", first._replace(busy=0.001, timeline_seconds=1e-3))])
    assert texts(svg) == (
        [("cpu:0", "busy 62%"), ("cpu:1", "busy <1%"), ("0", "2.0 ms")],
        [],
    )
    lanes = list(ElementTree.fromstring(svg).iter(SVG + "svg"))[1:]
    assert [lane.get("width") for lane in lanes] == ["100.00%", "50.00%"]
    assert {lane.get("viewBox") for lane in lanes} == {"0 0 2 1"}
    assert {lane[0].get("d") for lane in lanes} == {"M0 1V0h1V0.75h1V1z"}


def test_what_is_least_can_be_seen():
    svg = picture([("cpu:0", Activity(0.001, 12.0, [0.001] + [0.0] * (PARTS - 1)))])
    assert 'd="M0 1V0.9h1V1h1V1h1' in svg
    assert texts(svg)[0][-1] == ("0", "12.0 s")


def test_a_long_name_keeps_its_beginning_and_its_end():
    name = "rank 11: /job:worker/replica:0/task:11/device:GPU:0"
    svg = markup.picture("", [markup.Lane(name, "1 row", 1.0)])
    assert texts(svg)[0] == [("rank 11: …0/task:11/device:GPU:0", "1 row")]
    assert name in svg  # what the mouse shows


def test_a_page_needs_nothing_else():
    page = Report(THREE, {}).to_html()
    assert page.startswith("<!DOCTYPE html>\n") and '<meta charset="utf-8">' in page
    assert not re.search(r"<(script|link|img|iframe)|\b(src|href)\b|url\(|@import", page)
    assert set(re.findall("https?://[^\"']+", page)) == {"http://www.w3.org/2000/svg"}
