"""Links of the documentation that lead out of docs/, for the site: to the repository if mkdocs.yml
names one, otherwise their words alone.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parents[1] / "docs"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text of a page with those links replaced (called by MkDocs)."""
    folder = (DOCS / page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        words, target, anchor = link[1], link[2], link[3] or ""
        path = (folder / target).resolve()
        if path.is_relative_to(DOCS) and not path.is_dir():
            return link[0]
        if not config.repo_url:
            return words
        where = path.relative_to(DOCS.parent).as_posix()
        return f"[{words}]({config.repo_url.rstrip('/')}/blob/main/{where}{anchor})"

    return LINK.sub(replaced, markdown)
