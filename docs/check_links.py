"""Whether each link of the built site leads to a file of it, and to an anchor in that file.

    python docs/check_links.py .tox/docs/html

Links to other sites are left alone: there is no network where the tests run.
"""

import html.parser
import os
import sys
import urllib.parse


class Page(html.parser.HTMLParser):
    """What a page links to, and the anchors it has."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = set(), set()
        with open(path, encoding="utf-8") as file:
            self.feed(file.read())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors.add(attributes.get("id"))
        self.links.update(filter(None, (attributes.get(name) for name in ("href", "src"))))


def broken(folder):
    """Return the broken links, as (page, link), and the number of all links."""
    paths = [
        os.path.join(place, name)
        for place, _, names in os.walk(folder)
        for name in names
        if name.endswith(".html")
    ]
    pages = {path: Page(path) for path in paths}
    found, count = [], 0
    for path, page in sorted(pages.items()):
        for link in sorted(page.links):
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            target = os.path.join(os.path.dirname(path), urllib.parse.unquote(parts.path))
            target = os.path.normpath(target) if parts.path else path
            anchors = pages[target].anchors if target in pages else ()
            # genindex is named by the theme's search and not built.
            if not os.path.isfile(target) or parts.fragment and parts.fragment not in anchors:
                found.append((os.path.relpath(path, folder), link))
    return found, count


if __name__ == "__main__":
    found, count = broken(sys.argv[1])
    for page, link in found:
        print("{}: {} leads nowhere".format(page, link))
    print("{} links within the site, {} of them broken".format(count, len(found)))
    sys.exit(1 if found or not count else 0)
