"""What is looked at in a browser: reports, pictures, and the site's search for a pasted message.

In headless Chromium, in tox's environment ``docs``, which has unpacked one and built the site.
"""

import html
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.parse

import pytest
from test_report import PATH, SCRIPT

DOCS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "docs")
WIDTH = 900
# Writes into the page where the things that are asked for are: left, top, right, bottom.
PLACES = """\
<script>
const places = [...document.querySelectorAll(%s)].map((each) => {
  const box = each.getBoundingClientRect();
  return [box.left, box.top, box.right, box.bottom];
});
document.documentElement.dataset.places = JSON.stringify(places);
</script>
"""
# Writes into the page which of its frames scroll sideways, or hold what is wider than its place.
WIDER = """\
<script>
window.onload = () => {
  const wider = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument;
    const things = [...page.querySelectorAll("table, pre")].filter((each) =>
      each.tagName === "PRE"
        ? each.scrollWidth > each.clientWidth + 1
        : each.offsetWidth > each.parentElement.clientWidth + 1);
    const whole = page.documentElement.scrollWidth > Number(frame.width);
    return [frame.getAttribute("src"), whole, things.map((each) => each.textContent.slice(0, 80))];
  });
  document.documentElement.dataset.places = JSON.stringify(wider);
};
</script>
"""
# What each message's heading begins with, and the message as it is printed.
MESSAGES = {
    "is not understood. Use a number of seconds above 0": (
        "compat.errors.InvalidArgumentError: COMPAT_TIMEOUT='soon' is not understood. Use a number "
        "of seconds above 0, at most 1e9: how long a rank waits for the others."
    ),
    "cannot be read: <error>. Keras would ignore it": (
        "/home/me/.keras/keras.json cannot be read: Expecting value: line 1 column 1 (char 0). "
        "Keras would ignore it silently. Correct it, set KERAS_BACKEND, or move it away: mv x y"
    ),
    "configure_gpu() came too late for <framework>": (
        "TooLateError: configure_gpu() came too late for theano: device was fixed when theano was\n"
        "imported (by keras.backend.theano_backend).\n"
        "Call it before the first `import theano` or `import keras`."
    ),
    "is installed, but importing it fails": (
        "torch is installed, but importing it fails: libcudart.so.12: cannot open shared object "
        "file. Run `python -c 'import torch'` to see all of it."
    ),
    "Rank <rank> of <size> waited <waited>, but <lost>": (
        "[1] compat.errors.RankLostError: Rank 1 of 4 waited 600 seconds, but rank 2 failed, ended "
        "or did not come: Connection closed by peer [127.0.0.1]:40123. Look at what rank 2 printed."
    ),
    "is a notebook, which Python cannot run": (
        "compat run: error: analysis.ipynb is a notebook, which Python cannot run. Make a script "
        "of it with `jupyter nbconvert --to script`, or call compat.configure_gpu() in its first "
        "cell."
    ),
}


@pytest.fixture(scope="module")
def opened():
    """Return a function that opens an address, and returns the page after its scripts have run."""
    root = os.environ["COMPAT_TEST_BROWSER"]
    libraries = [os.path.join(root, "libraries"), os.path.join(root, "libraries", "pulseaudio")]
    path = os.path.join(root, "usr", "lib", "chromium", "chromium-headless-shell")
    environ = dict(os.environ, LD_LIBRARY_PATH=os.pathsep.join(libraries))
    if not os.path.exists(path):  # apt-get has not brought it
        environ = None
        path = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
        if path is None:
            lacks = pytest.fail if os.environ.get("CI") else pytest.skip
            lacks("apt-get has brought no Chromium, and none is on PATH")

    def page(address):
        command = [path, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--window-size={},800".format(WIDTH), "--virtual-time-budget=10000"]
        command += ["--allow-file-access-from-files"]  # of frames
        return subprocess.check_output(
            command + ["--dump-dom", "file://" + address],
            env=environ, stderr=subprocess.DEVNULL, universal_newlines=True, timeout=100,
        )  # fmt: skip

    return page


def places(opened, path, text, selector):
    """Where the things are that a selector finds in an HTML page with this text."""
    path.write_text(text + PLACES % json.dumps(selector), encoding="utf-8")
    return written(opened(str(path)))


def written(page):
    """Return what a script has written into a page."""
    return json.loads(html.unescape(re.search('data-places="([^"]*)"', page).group(1)))


@pytest.mark.parametrize("width", [1280, 390])
def test_pages_are_no_wider_than_the_screen(opened, width):
    """On a narrow one, code and tables may scroll in their places."""
    site = os.environ["COMPAT_TEST_SITE"]
    folders = [(DOCS, ""), (os.path.join(DOCS, "backends"), "backends/")]
    names = [top + name for folder, top in folders for name in sorted(os.listdir(folder))]
    names = [name for name in names if name.endswith(".md")]
    frame = '<iframe src="{}.html" width="{}" height="900"></iframe>'
    path = os.path.join(site, "all_pages.html")
    with open(path, "w", encoding="utf-8") as file:
        file.write("".join(frame.format(name[:-3], width) for name in names) + WIDER)
    try:
        found = written(opened(path))
    finally:
        os.remove(path)
    assert len(found) == len(names) > 20
    assert [page for page, whole, _ in found if whole] == []
    if width == 1280:
        assert [(page, things) for page, _, things in found if things] == []


def test_the_report_of_a_script(opened, tmp_path):
    """A lane for each device, one below the other, within the page, and a blue bar in each."""
    script, page, installed = (tmp_path / name for name in ("train.py", "page.html", "installed"))
    script.write_text(SCRIPT)
    entry_points = installed / "compat_numpy-1.0.dist-info" / "entry_points.txt"
    os.makedirs(os.path.dirname(str(entry_points)))
    entry_points.write_text("[keras_gpu_compat.backends]\nnumpy = compat_numpy:backend\n")
    command = [sys.executable, "-m", "compat", "run", "--backend=numpy", "--simulate=3"]
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join([PATH, str(installed)]))
    subprocess.check_call(command + ["--report-html", str(page), str(script)], env=environ)
    text = page.read_text(encoding="utf-8")
    bars = places(opened, tmp_path / "bars.html", text, "svg[role=img] path")
    assert len(bars) == 3
    for left, top, right, bottom in bars:
        assert 0 <= left and right <= WIDTH and right - left > WIDTH / 2
        assert bottom - top == 20
    assert all(above[3] < below[1] for above, below in zip(bars, bars[1:]))


@pytest.mark.parametrize("name", sorted(os.listdir(os.path.join(DOCS, "pictures"))))
def test_the_texts_of_pictures_are_inside_and_apart(opened, tmp_path, name):
    with open(os.path.join(DOCS, "pictures", name), encoding="utf-8") as file:
        text = "<body style='margin:0'>" + file.read()
    whole, *found = places(opened, tmp_path / "page.html", text, "body > svg, text")
    _, _, width, height = whole
    assert len(found) > 3
    for number, (left, top, right, bottom) in enumerate(found):
        assert 0 <= left < right <= width + 1 and 0 <= top < bottom <= height, number
        for other in found[:number]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top


@pytest.mark.parametrize("heading", MESSAGES)
def test_the_search_finds_the_entry_of_a_pasted_message(opened, heading):
    site = os.path.join(os.environ["COMPAT_TEST_SITE"], "search.html")
    page = opened("{}?q={}".format(site, urllib.parse.quote(MESSAGES[heading])))
    results = page.partition('id="search-results"')[2]
    address, title = re.search('<a href="([^"]*)"[^>]*>(.*?)</a>', results).groups()
    assert address.startswith("troubleshooting.html#")
    assert html.unescape(title).startswith("Troubleshooting > " + heading)
