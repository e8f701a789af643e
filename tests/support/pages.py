"""A check that a page is well-formed HTML."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser


class Checker(HTMLParser):
    """Reads a page: fails on a tag that does not match, and collects text, elements, ids and references."""

    VOID = ("meta", "br", "hr", "img", "link", "input")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.elements: list[tuple[str, dict[str, str]]] = []
        """Tags with their attributes, in order."""
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.text = self.script = ""
        self.cells: list[list[str]] = []
        """The text of each row of every table."""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.handle_startendtag(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
        for name, value in attrs:
            if name == "id":
                self.ids[str(value)] += 1
            if name in ("href", "xlink:href", "src"):
                self.links.append(str(value))
            self.links += re.findall(r"url\((.*?)\)", value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            self.script += data
            return
        self.text += data
        if {"td", "th"} & {*self.open}:
            self.cells[-1][-1] += data
