"""How the repository's documents become a site: mkdocs calls these functions, see `hooks` in mkdocs.yml.

The documents' links are relative to the repository's tree, so that they work where the repository is browsed. The site
keeps that tree, README.md and the other documents outside docs/ included; only its URLs leave out `docs/`.
"""

import ast
import re
from pathlib import Path

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = ("*.md", "docs/**/*.md")
OTHER_FILES = ("LICENSE", "docs/**/*.svg", "docs/**/*.csv", "docs/*.css", "examples/*", "examples/*/*.py", "configs/*")
"""Files that documents show or link to; the site gets copies of them."""
ENTRY = re.compile(r"^## (.+)$|^- \[([^\]]+)\]\(([^)#]+)\)", re.MULTILINE)
MODULE = re.compile(r"^::: ([\w.]+)((?: \w+)*)$", re.MULTILINE)
NOT_IN_SEARCH = re.compile(r"docs/decisions/|CHANGELOG")
"""Pages that name everything and explain how to use none of it."""


class Summaries(Extension):
    """The first paragraph of a docstring is one line: the list at the head of a page takes the first line.

    A function is shown with the arguments of its definition, without the overloads that type checkers read, and the
    package's names without the package's own docstring.
    """

    def on_object(self, *, obj: Object, **_: object) -> None:
        if obj.is_function:
            obj.overloads = None
        if obj.docstring:
            first, blank, rest = obj.docstring.value.partition("\n\n")
            obj.docstring.value = " ".join(first.split()) + blank + rest

    def on_package(self, *, pkg: Object, **_: object) -> None:
        pkg.docstring = None


def on_config(config: MkDocsConfig) -> None:
    """The navigation is the list in docs/index.md: a section per heading, a page per entry."""
    navigation = [{"Overview": "docs/index.md"}]
    for section, title, target in ENTRY.findall((ROOT / "docs/index.md").read_text()):
        if section:
            pages = []
            navigation.append({section: pages})
        else:
            pages.append({title: (ROOT / "docs" / target).resolve().relative_to(ROOT).as_posix()})
    config.nav = [entry for entry in navigation if all(entry.values())]  # the questions are no pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The repository's tree in the place of that of docs/."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for path in sorted({path for pattern in (*PAGES, *OTHER_FILES) for path in ROOT.glob(pattern) if path.is_file()}):
        files.append(_file(path.relative_to(ROOT).as_posix(), config))
    return files


def _file(source: str, config: MkDocsConfig) -> File:
    """`docs/understand/layouts.md` is found at layouts/, `README.md` at readme/: docs/index.md is the first page."""
    shown = source.removeprefix("docs/")
    if shown == source and source.endswith(".md"):
        shown = source.lower()  # else README.md would be the first page
    place = File(shown, str(ROOT), config.site_dir, config.use_directory_urls).dest_uri
    return File(source, str(ROOT), config.site_dir, config.use_directory_urls, dest_uri=place)


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """A page that describes a module (`::: module`) describes all of its public names, or those that follow."""
    if NOT_IN_SEARCH.match(page.file.src_uri):
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri.startswith("docs/do/"):
        page.meta["search"] = {"boost": 2}  # whoever searches has a task

    def described(found: re.Match[str]) -> str:
        members = found[2].split() or public_names(found[1])
        order = "\n      group_by_category: false" if found[2] else ""  # as they are listed
        return f"::: {found[1]}\n    options:\n      members: {members}{order}"

    return MODULE.sub(described, markdown)


def on_page_content(html: str, page: Page, **_: object) -> None:
    """Each of them has its place on the page."""
    for module, _ in {*MODULE.findall(page.markdown or "")}:
        missing = [name for name in public_names(module) if f'id="{module}.{name}"' not in html]
        if missing:
            raise PluginError(f"{page.file.src_uri}: {module} has public names that are not on the page: {missing}")


def public_names(module: str) -> list[str]:
    """The names in `__all__` of the module, or in the table that `__all__` is made of; `__version__` is left out."""
    path = ROOT / module.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in ("_HOMES", "__all__"):
            return [name for name in ast.literal_eval(statement.value) if not name.startswith("__")]
    raise PluginError(f"{module} has no `__all__`")
