"""Checks that every link between the pages of the documentation site leads to a file and a heading of the site."""

import html.parser
import pathlib
import sys
import urllib.parse


class Page(html.parser.HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.links, self.ids = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids.add(attributes.get("id"))
        link = attributes.get("href") or attributes.get("src")
        if link and not urllib.parse.urlsplit(link).scheme:
            self.links.append(link)


site = pathlib.Path(sys.argv[1]).resolve()
pages = {path: Page(path) for path in site.rglob("*.html")}
broken = []
for path, page in pages.items():
    if path.name in ("404.html", "toc.html", "print.html"):
        continue
    for link in page.links:
        link = urllib.parse.urlsplit(link)
        target = path.parent / urllib.parse.unquote(link.path) if link.path else path
        target = target.resolve()
        if not target.exists():
            broken.append(f"{path.relative_to(site)}: {link.path}")
        elif link.fragment and target in pages and urllib.parse.unquote(link.fragment) not in pages[target].ids:
            broken.append(f"{path.relative_to(site)}: {link.path}#{link.fragment}")
if broken or len(pages) < 30:
    sys.exit("\n".join(broken) or f"only {len(pages)} pages")
