"""Hooks of `make docs`: the layout of the installed package, and links that leave docs/."""

import posixpath
import re
import tempfile
from pathlib import Path

from mkdocs.plugins import event_priority

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#]+)(#[^)]*)?\)")
_laid_out = tempfile.TemporaryDirectory()


@event_priority(100)  # before mkdocstrings reads its options
def on_config(config):
    """Lay the package out as a wheel has it, so that mkdocstrings finds `tilewright.kernels`."""
    package = Path(_laid_out.name) / "tilewright"
    if not package.exists():
        package.mkdir()
        (package / "__init__.py").symlink_to(ROOT / "src" / "tilewright" / "__init__.py")
        (package / "kernels").symlink_to(ROOT / "kernels")
    handlers = config.plugins["mkdocstrings"].config.handlers
    handlers["python"]["paths"] = [_laid_out.name]
    return config


def on_page_markdown(markdown, page, **_):
    """Give links to files of the source tree as their paths: the site has no such pages."""

    def told(found):
        text, target, _ = found.groups()
        if re.match(r"\w+:", target):
            return found[0]
        here = posixpath.dirname(f"docs/{page.file.src_uri}")
        place = posixpath.normpath(posixpath.join(here, target))
        if place.startswith("docs/") and place.endswith((".md", ".svg", ".png")):
            return found[0]
        if not (ROOT / place).exists():
            return found[0]  # a dead link, which the build refuses
        return text if text.strip("`") == place else f"{text} (`{place}`)"

    return LINK.sub(told, markdown)
