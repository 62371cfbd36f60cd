"""Builds what pyproject.toml describes, with README.md as a package index has to show it."""

import re
from pathlib import Path

ROOT = Path(__file__).parent


def found(pattern: str, file: str) -> str:
    """What the group of `pattern` is in the one line of `file` that it matches."""
    (only,) = re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return str(only)


def version() -> str:
    """The version that the package says it has, read without importing it."""
    return found(r'^__version__ = "(.+)"$', "sherd/__init__.py")


def with_absolute_links(text: str, page: str) -> str:
    """`text` of `page`, whose links lead from anywhere: into the repository, at the tag of this version."""
    source = found(r'^Source = "(.+)"$', "pyproject.toml")

    def absolute(link: "re.Match[str]") -> str:
        picture, words, target = link.groups()
        path = f"{page}{target}" if target.startswith("#") else target
        return f"{picture}[{words}]({source}/{'raw' if picture else 'blob'}/v{version()}/{path})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)\s]+)\)", absolute, text)


if __name__ == "__main__":
    from setuptools import setup

    readme = with_absolute_links((ROOT / "README.md").read_text(encoding="utf-8"), "README.md")
    setup(long_description=readme, long_description_content_type="text/markdown")
