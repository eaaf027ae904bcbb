"""Draw the pictures of README and pages, as SVG files in pictures/: ``python docs/draw.py``.

The rows that devices and ranks get are computed by compat, and the timeline is one that it has
recorded; tests/test_site.py compares the files with what is drawn here.
"""

import json
import os
import sys
from xml.sax.saxutils import escape

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

from compat._rows import splitting  # noqa: E402
from compat._runtime import operation_times, reporting  # noqa: E402

FILLS = {
    "data": "#dbeafe",  # rows of the batch
    "device": "#dcfce7",  # what runs on one device
    "whole": "#fef3c7",  # what sees the whole batch
    "plain": "#f3f4f6",
}
ROWS, DEVICES = 61, 3
GLOBAL_BATCH, RANKS = 256, 4
LINE = 18  # pixels from one line of text to the next


class Picture:
    def __init__(self, width, height, title):
        self.size = width, height
        self.parts = ["<title>{}</title>".format(escape(title))]

    def box(self, x, y, width, height, text, fill="plain"):
        """Draw a box with centred lines of text."""
        self.parts.append(
            '<rect x="{}" y="{}" width="{}" height="{}" rx="6" fill="{}" stroke="#374151"/>'.format(
                x, y, width, height, FILLS[fill]
            )
        )
        lines = text.split("\n")
        top = y + height / 2 - LINE * (len(lines) - 1) / 2
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + LINE * number, line)

    def text(self, x, y, line, anchor="middle"):
        self.parts.append(
            '<text x="{:g}" y="{:g}" text-anchor="{}" dominant-baseline="central">{}</text>'.format(
                x, y, anchor, escape(line)
            )
        )

    def arrow(self, x1, y1, x2, y2):
        self.parts.append(
            '<line x1="{:g}" y1="{:g}" x2="{:g}" y2="{:g}" stroke="#374151" '
            'marker-end="url(#head)"/>'.format(x1, y1, x2, y2)
        )

    def __str__(self):
        width, height = self.size
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" '
            'height="{1}" font-family="sans-serif" font-size="14">\n'
            '<defs><marker id="head" viewBox="0 0 10 10" refX="10" refY="5" markerWidth="8" '
            'markerHeight="8" orient="auto"><path d="M0 0L10 5L0 10z" fill="#374151"/></marker>'
            "</defs>\n"
            '<rect width="{0}" height="{1}" fill="#ffffff"/>\n{2}\n</svg>\n'
        ).format(width, height, "\n".join(self.parts))


def columns(count, width=200, gap=30, left=30):
    """Return the left edges of adjacent boxes, and the width of all."""
    lefts = [left + number * (width + gap) for number in range(count)]
    return lefts, count * width + (count - 1) * gap


def overview():
    """Draw a batch on several devices, at a glance."""
    picture = Picture(720, 236, "A batch on three devices")
    picture.box(20, 86, 150, 64, "a batch\nof {} rows".format(ROWS), "data")
    picture.box(490, 86, 220, 64, "one loss, one update:\nthe numbers of one device", "whole")
    for number, size in enumerate(splitting.sizes(ROWS, DEVICES)):
        y = 20 + 70 * number
        text = "device {}: {} rows\nforward and backward".format(number, size)
        picture.box(240, y, 190, 56, text, "device")
        picture.arrow(170, 118, 240, y + 28)
        picture.arrow(430, y + 28, 490, 118)
    return picture


def replicas():
    """Draw a training step of one process on several devices."""
    width, height = 200, 48
    lefts, whole = columns(DEVICES)
    picture = Picture(whole + 60, 700, "A training step on three devices in one process")
    middles = [left + width / 2 for left in lefts]

    def across(y, text, fill="whole"):
        picture.box(lefts[0], y, whole, height, text, fill)

    def each(y, texts, fill="device"):
        for left, text in zip(lefts, texts):
            picture.box(left, y, width, height, text, fill)

    def arrows(y):
        for middle in middles:
            picture.arrow(middle, y, middle, y + 34)

    sizes = splitting.sizes(ROWS, DEVICES)
    bounds = [splitting.bounds(ROWS, DEVICES, i) for i in range(DEVICES)]
    across(20, "fit(): a batch of {} rows".format(ROWS), "data")
    arrows(68)
    each(
        102,
        ["{} rows: {} to {}".format(n, a, b - 1) for n, (a, b) in zip(sizes, bounds)],
        "data",
    )
    arrows(150)
    each(184, ["device {}\nforward pass".format(number) for number in range(DEVICES)])
    arrows(232)
    across(266, "outputs put together: {} rows, in their order".format(ROWS))
    picture.arrow(sum(middles) / DEVICES, 314, sum(middles) / DEVICES, 348)
    across(348, "loss and metrics of the whole batch")
    arrows(396)
    each(430, ["device {}\nbackward pass".format(number) for number in range(DEVICES)])
    arrows(478)
    across(512, "gradients of the parts, added up: the gradient of the whole batch")
    picture.arrow(sum(middles) / DEVICES, 560, sum(middles) / DEVICES, 594)
    across(594, "one update by the optimizer, of the one set of weights")
    picture.text(whole / 2 + 30, 670, "blue: rows; green: on each device; yellow: once")
    return picture


def normalization():
    """Draw batch normalization by the statistics of the whole batch."""
    width, height = 200, 48
    lefts, whole = columns(DEVICES)
    picture = Picture(whole + 60, 290, "Batch normalization of the whole batch on three devices")
    for number, size in enumerate(splitting.sizes(ROWS, DEVICES)):
        left, middle = lefts[number], lefts[number] + width / 2
        text = "device {}: {} rows\ntheir mean and variance"
        picture.box(left, 20, width, height, text.format(number, size), "device")
        picture.arrow(middle, 68, middle, 102)
        picture.arrow(middle, 150, middle, 184)
        text = "device {}\nnormalizes its rows"
        picture.box(left, 184, width, height, text.format(number), "device")
    text = "mean and variance of all {} rows: merged, weighted by rows"
    picture.box(lefts[0], 102, whole, height, text.format(ROWS), "whole")
    text = "green: on each device; yellow: once; gradients take the same way back"
    picture.text(whole / 2 + 30, 262, text)
    return picture


def ranks():
    """Draw a training step of several processes."""
    width, height = 200, 48
    lefts, whole = columns(RANKS)
    picture = Picture(whole + 60, 690, "A training step of four ranks")
    middles = [left + width / 2 for left in lefts]

    def across(y, text, fill="whole"):
        picture.box(lefts[0], y, whole, height, text, fill)

    def each(y, text, fill="device"):
        for number, left in enumerate(lefts):
            picture.box(left, y, width, height, text.format(number), fill)

    def arrows(y):
        for middle in middles:
            picture.arrow(middle, y, middle, y + 34)

    sizes = splitting.sizes(GLOBAL_BATCH, RANKS)
    across(20, "the global batch: {} rows".format(GLOBAL_BATCH), "data")
    arrows(68)
    for number, (left, size) in enumerate(zip(lefts, sizes)):
        text = "rank {}: {} rows\nby compat.shard()".format(number, size)
        picture.box(left, 102, width, height, text, "data")
    arrows(150)
    each(184, "forward pass")
    arrows(232)
    each(266, "loss: the mean\nover its own rows")
    arrows(314)
    each(348, "backward pass")
    arrows(396)
    across(430, "all-reduce: the mean of the gradients, weighted by each rank's rows")
    arrows(478)
    each(512, "the same update\nof its own weights")
    arrows(560)
    across(594, "now and then: the checksums of all weights and state, compared")
    picture.text(whole / 2 + 30, 665, "blue: rows; green: in each process; yellow: all together")
    return picture


def backend():
    """How the backend is chosen."""
    questions = (
        ("backend= was passed?", "that one"),
        ("a Keras is imported?", "the backend it runs on"),
        ("KERAS_BACKEND is set, or the Keras\nruns on TensorFlow only?", "that one"),
        ("keras.json names another one\nthan the Keras' default?", "that one"),
        ("only one backend is installed?", "that one"),
        ("a Keras is installed?", "its default"),
        ("no backend is installed?", "NotInstalledError"),
    )
    picture = Picture(640, 20 + 90 * len(questions) + 60, "How the backend is chosen")
    for number, (question, answer) in enumerate(questions):
        y = 20 + 90 * number
        picture.box(20, y, 290, 56, question)
        picture.arrow(310, y + 28, 400, y + 28)
        picture.text(355, y + 16, "yes")
        picture.box(400, y, 220, 56, answer, "whole" if answer.endswith("Error") else "device")
        picture.arrow(165, y + 56, 165, y + 90)
        picture.text(175, y + 72, "no", "start")
    picture.box(20, 20 + 90 * len(questions), 290, 40, "AmbiguousBackendError", "whole")
    return picture


def timeline():
    """Return a picture of compat with a fixed width, on white.

    The file is what ``--report-json`` wrote of three steps of 1,200 rows with torch on a busy
    machine: dense layers of 1,024 units, two of them, on three simulated devices.
    """
    with open(os.path.join(HERE, "recorded_report.json"), encoding="utf-8") as file:
        uses = reporting.joined([json.load(file)]).devices
    drawn = operation_times.picture((use.title, use) for use in uses)
    drawn = drawn.replace('width="100%"', 'width="500"', 1)
    return drawn.replace('style="', 'style="background:#fff;', 1) + "\n"


PICTURES = {
    "overview.svg": overview,
    "replicas.svg": replicas,
    "normalization.svg": normalization,
    "ranks.svg": ranks,
    "backend.svg": backend,
    "timeline.svg": timeline,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        with open(os.path.join(HERE, "pictures", name), "w", encoding="utf-8") as file:
            file.write(str(draw()))
