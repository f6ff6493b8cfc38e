"""Hook of mkdocs: links to files outside of docs/ (source code, recipes, README) become plain text on the site."""

from __future__ import annotations

import os
import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Keep links within docs/ and to other sites; unwrap the others."""
    folder = os.path.dirname(page.file.src_uri)

    def unwrap(link: re.Match[str]) -> str:
        text, target = link.groups()
        outside = "://" not in target and os.path.normpath(os.path.join(folder, target)).startswith("..")
        return text if outside else link.group()

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", unwrap, markdown)
