"""Builds what pyproject.toml describes, with README.md as a package index has to show it."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def long_description() -> str:
    """README.md with links that lead from anywhere: into the repository, at the tag of this version."""
    (source,) = re.findall(r'^Source = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "sherd/__init__.py").read_text("utf-8"), re.MULTILINE)

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        page = f"README.md{target}" if target.startswith("#") else target
        return f"{picture}[{text}]({source}/{'raw' if picture else 'blob'}/v{version}/{page})"

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)\s]+)\)", absolute, readme)


if __name__ == "__main__":
    setup(long_description=long_description(), long_description_content_type="text/markdown")
