"""For the documentation's site: README and CONTRIBUTING become pages of it, and links that lead to
other files outside docs/ lead to the repository if mkdocs.yml names one, otherwise they are their
words alone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# files outside docs/, and where the site has them
PAGES = {ROOT / "README.md": "readme.md", ROOT / "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ (called by MkDocs)."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text of a page with its links as the site has them (called by MkDocs)."""
    written_in = Path(str(page.file.abs_src_path)).parent
    shown_in = (DOCS / page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        sign, words, target, anchor = link[1], link[2], link[3], link[4] or ""
        path = (written_in / target).resolve()
        path = DOCS / PAGES[path] if path in PAGES else path
        if path.is_relative_to(DOCS) and not path.is_dir():
            return f"{sign}[{words}]({os.path.relpath(path, shown_in)}{anchor})"
        if not config.repo_url:
            return words
        where = path.relative_to(ROOT).as_posix()
        return f"{sign}[{words}]({config.repo_url.rstrip('/')}/blob/main/{where}{anchor})"

    return LINK.sub(replaced, markdown)
