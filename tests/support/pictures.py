"""Pages of pictures, read back: what is drawn, and whether anything else is asked for."""

import re
from html.parser import HTMLParser


class Parsed(HTMLParser):
    """Collects what is drawn: each box with its role and its tip, and all words."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.boxes: list[tuple[str, float, float, str]] = []
        self.words: list[str] = []
        self._tag = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        told = dict(attrs)
        if tag == "rect":
            self.boxes.append((told["class"] or "", float(told["x"] or 0), float(told["width"] or 0), ""))

    def handle_data(self, data: str) -> None:
        if self._tag == "title" and self.boxes:
            self.boxes[-1] = (*self.boxes[-1][:3], data)
        elif self._tag != "style":
            self.words.append(data)


def needs_nothing_else(page: str) -> bool:
    return re.search(r"https?:|//|<script|<link|<img|src=|url\(|@import", page) is None
