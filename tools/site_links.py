"""Hooks of mkdocs: every method card is in the navigation, and links to files outside of docs/ become plain text."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Put the pages of docs/terms into the section of method cards."""
    cards = sorted(f"terms/{path.name}" for path in Path(config["docs_dir"], "terms").glob("*.md"))
    (section,) = (one for one in config["nav"] if isinstance(one, dict) and "Method cards" in one)
    section["Method cards"] = cards
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Keep links within docs/ and to other sites; unwrap the others."""
    folder = os.path.dirname(page.file.src_uri)

    def unwrap(link: re.Match[str]) -> str:
        text, target = link.groups()
        outside = "://" not in target and os.path.normpath(os.path.join(folder, target)).startswith("..")
        return text if outside else link.group()

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", unwrap, markdown)
