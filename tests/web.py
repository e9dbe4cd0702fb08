"""A reader of pages."""

from html.parser import HTMLParser


class Reader(HTMLParser):
    """Tags with their attributes, text, and the cells of each table, by the heading above it."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.tables, self._heading, self._inside = [], "", {}, "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """A tag."""
        self.tags.append((tag, dict(attrs)))
        self._inside = {"h2": "h2", "td": "td"}.get(tag, self._inside)
        if tag == "h2":
            self._heading = ""
        if tag == "tr":
            self.tables.setdefault(self._heading, []).append([])
        if tag == "td":
            self.tables[self._heading][-1].append("")

    def handle_endtag(self, tag):
        """The end of one."""
        self._inside = "" if tag == self._inside else self._inside

    def handle_data(self, data):
        """Text between tags."""
        self.text += data
        if self._inside == "h2":
            self._heading += data
        if self._inside == "td":
            self.tables[self._heading][-1][-1] += data

    def row(self, heading, *first):
        """The first row of a section's tables that starts with these cells."""
        return next(r for r in self.tables[heading] if r[: len(first)] == list(first))
