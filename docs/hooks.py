"""What the site needs beyond mkdocs: files of the repository that a page links to are pages of the site too,
and no page loads anything from another host.

A link in ``docs/`` to a file outside of it, such as ``../examples/01_quantize.py``, works where the
repository is browsed. In the site it leads to a page made of that file. A link to a file that does not exist
stays as it is, and mkdocs reports it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = "repository/"  # pages made of files outside of docs/
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
LANGUAGES = {".py": "python", ".toml": "toml", ".cu": "cpp"}
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)")


def _site_path(path: str) -> str:
    """Where a file of the repository stands among the site's sources."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{ELSEWHERE}{path}{'' if path.endswith(('.md', '.png')) else '.md'}"


def _target(link: str, path: str) -> str:
    """The file of the repository that a link in the file ``path`` leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _content(path: str) -> str | bytes:
    """A file of the repository as a page: Markdown and pictures as they are, other text as a block."""
    if path.endswith(".png"):
        return (ROOT / path).read_bytes()
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}````\n"


def on_files(files: Files, config: Any) -> Files:
    """Add every file outside of ``docs/`` that a page links to, and what those pages link to."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        links = {_target(link, path) for link in LINK.findall((ROOT / path).read_text())}
        for target in sorted(links - seen):
            if not target.startswith("docs/") and (ROOT / target).is_file():
                new = File.generated(
                    config, _site_path(target), content=_content(target), inclusion=InclusionLevel.NOT_IN_NAV
                )
                new.repository_path = target
                files.append(new)
                waiting += [target] if target.endswith(".md") else []
        seen |= links
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links between files of the repository become links between pages."""
    here = page.file.src_uri
    path = getattr(page.file, "repository_path", f"docs/{here}")

    def moved(link: re.Match[str]) -> str:
        target = _target(link[1], path)
        if not (ROOT / target).is_file():
            return link[1]
        return posixpath.relpath(_site_path(target), posixpath.dirname(here) or ".")

    return LINK.sub(moved, markdown) if path.endswith(".md") else markdown


def on_post_page(output: str, page: Any, config: Any) -> str:
    """PluginError where a page would load something from another host."""
    found = LOADED.findall(output)
    if found:
        raise PluginError(f"{page.file.src_uri} loads {', '.join(found)}: the site must work offline")
    return output
