"""A release says what was tried: versions, notes and the README as a package index shows it."""

import importlib.util
import re
from functools import partial
from pathlib import Path

import pytest

import sherd
from sherd._torch import NEWEST_TORCH, OLDEST_TORCH
from sherd.tools.doctor.machine import OLDEST_PYTHON

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def script(name):
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tried():
    """Every pair of minor versions in the table, as ((2, 13), (3, 11))."""
    matrix = script(".ci/matrix.py")
    return [(matrix.minors(row)[:2], matrix.minors(row)[2:]) for row in matrix.rows_of(matrix.PAGE.read_text())]


def dotted(version):
    return ".".join(map(str, version))


def test_what_is_said_of_versions_is_what_was_run():
    torches, pythons = (sorted(set(versions)) for versions in zip(*tried(), strict=True))
    project = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project) == [*map(dotted, pythons)]
    assert f'requires-python = ">={dotted(pythons[0])}"' in project
    assert f'dependencies = ["torch>={dotted(torches[0])}"]' in project
    assert (torches[0], torches[-1], pythons[0]) == (OLDEST_TORCH, NEWEST_TORCH, OLDEST_PYTHON)
    spans = (
        f"torch {dotted(torches[0])} to {dotted(torches[-1])} and Python {dotted(pythons[0])} to {dotted(pythons[-1])}"
    )
    assert " ".join((ROOT / "README.md").read_text().split()).count(spans) == 2


def test_every_pair_passed():
    matrix = script(".ci/matrix.py")
    for row in matrix.rows_of(matrix.PAGE.read_text()):
        assert row[2] == "passed", row
        assert re.fullmatch(r"\d+ passed(, \d+ \w*skipped|, \d+ deselected)*( \(few\))?", row[3]), row


def test_a_row_replaces_the_one_with_its_minor_versions(tmp_path, monkeypatch):
    matrix = script(".ci/matrix.py")
    monkeypatch.setattr(matrix, "PAGE", tmp_path / "page.md")
    matrix.PAGE.write_text("# Head\n\n<!-- support -->\n<!-- /support -->\n\nFoot\n")
    newer, older = ("2.13.0+cpu", "3.11.7", "passed", "2 passed", "a"), ("2.9.1", "3.11.7", "passed", "1 passed", "b")
    for row in (newer, older, (*older[:3], "3 passed", "c")):
        matrix.write(row)
    text = matrix.PAGE.read_text()
    assert matrix.rows_of(text) == [(*older[:3], "3 passed", "c"), newer]
    assert text.startswith("# Head\n\n<!-- support -->\n| torch |")
    assert text.endswith("\n<!-- /support -->\n\nFoot\n")


def test_the_notes_are_the_versions_section_a_line_for_each_entry(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    notes = script(".ci/release.py").notes
    waiting = re.compile(r"(?<=^## \[Unreleased\]\n).*?(?=^## )", re.MULTILINE | re.DOTALL)
    text = notes(waiting.sub("\n", (ROOT / "CHANGELOG.md").read_text()), sherd.__version__)
    assert text.count("\n- ") > 30
    assert not re.search(r"^ ", text, re.MULTILINE)
    assert all(link.startswith("https://") for link in LINK.findall(text))
    assert notes("## [Unreleased]\n\n## [2] - then\n\n- a\n  b [c](d.md#e)\n\n## [1] - once\n", "2").startswith(
        "- a b [c](h"
    )
    for changelog in ("## [1] - once\n", "## [Unreleased]\n\n- a\n\n## [2]\n"):
        with pytest.raises(AssertionError, match=r"CHANGELOG\.md"):
            notes(changelog, "2")


def test_a_tag_that_does_not_fit_the_version_is_refused(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT))
    release = script(".ci/release.py")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    for name in ("NAME", "EMAIL"):
        monkeypatch.setenv(f"GIT_AUTHOR_{name}", "a")
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", "a")
    git = partial(release.said, "git", "-c", "commit.gpgSign=false", "-c", "tag.gpgSign=false")
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "-m", "one")
    assert not release.is_tagged("v2.0")
    git("tag", "v2.0")
    assert release.is_tagged("v2.0")
    with pytest.raises(AssertionError, match=r"HEAD has the tag v2\.0, but sherd\.__version__ says 2\.1"):
        release.is_tagged("v2.1")
    git("commit", "--quiet", "--allow-empty", "-m", "two")
    with pytest.raises(AssertionError, match=r"v2\.0 is the tag of another commit: git checkout v2\.0, or"):
        release.is_tagged("v2.0")
    assert not release.is_tagged("v2.1")


def test_links_of_the_readme_lead_out_of_a_package_index(monkeypatch):
    setup = script("setup.py")
    page = setup.with_absolute_links((ROOT / "README.md").read_text(), "README.md")
    here = f"https://github.com/sherd/sherd/blob/v{sherd.__version__}"
    assert len(LINK.findall(page)) > 30
    assert all(link.startswith("https://") for link in LINK.findall(page))
    assert f"[Limits]({here}/README.md#limits)" in page
    picture = setup.with_absolute_links("![p](docs/a.svg)", "README.md")
    assert picture == f"![p]({here.replace('blob', 'raw')}/docs/a.svg)"
