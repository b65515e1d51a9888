"""Sphinx settings of akv's documentation; `python3 noxfile.py -s docs` builds it."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parent))

from events_table import event_rows

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "akv"
author = "the akv authors"
project_copyright = "the akv authors; Apache License 2.0"
try:
    release = metadata.version("akv-connector")
except metadata.PackageNotFoundError:
    release = "from source"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "akv"
html_static_path = ["_static"]
html_show_sourcelink = False

myst_enable_extensions = ["colon_fence", "fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True

# Names of akv must all be found. The documentation of Python, numpy and anyio is not
# at hand when this is built without a network.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!akv\b)[a-z_]+(\..*)?"),
    (r"py:.*", r"(Any|ClassVar|Path|Self|T|Protocol|NewType)"),
    # Where an annotation cannot be evaluated, it is cut at its first comma.
    (r"py:.*", r"(Mapping|tuple)\[int"),
    (r"py:.*", r"(Callable|Iterable|AsyncIterator|Mapping|Sequence)"),
    (r"py:.*", r"(npt?\..*|NDArray|uint8|intp|Memory)"),
    (r"py:.*", r"(OSError|TypeError|ValueError|TimeoutError)"),
    # What a group comes to for a device, and nothing for those who make one.
    (r"py:class", r"akv\.core\.geometry\.Series"),
]


class EventsDirective(SphinxDirective):
    """The table of all events, read from `akv.core.events` while building."""

    titles: ClassVar = ("event", "fields", "what it says")

    def run(self) -> list[nodes.Node]:
        """One row for each event; names in the order of the module."""
        body = nodes.tbody()
        for row in event_rows():
            names = nodes.paragraph()
            for number, name in enumerate(row.fields):
                names += [nodes.Text(", ")] if number else []
                names += nodes.literal("", name)
            sentence = nodes.paragraph()
            for number, part in enumerate(row.doc.split("``")):
                sentence += nodes.literal("", part) if number % 2 else nodes.Text(part)
            event = nodes.paragraph("", "", nodes.literal("", row.name))
            body += self.table_row(event, names, sentence)
        head = nodes.thead()
        head += self.table_row(*(nodes.paragraph(text=text) for text in self.titles))
        group = nodes.tgroup(cols=3)
        group += [nodes.colspec(colwidth=width) for width in (28, 32, 40)]
        group += [head, body]
        return [nodes.table("", group)]

    @staticmethod
    def table_row(*cells: nodes.Node) -> nodes.row:
        """A row of these cells."""
        row = nodes.row()
        row += [nodes.entry("", cell) for cell in cells]
        return row


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive `akv-events`."""
    app.add_directive("akv-events", EventsDirective)
    return {"parallel_read_safe": True}
