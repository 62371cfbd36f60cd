"""Builds a release of what is committed, checks it, and says what is left to do: `make release`.

python .ci/release.py           # dist/ gets the wheel, the source distribution and the notes
python .ci/release.py --notes   # only prints the notes: this version's section of CHANGELOG.md
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from setup import version, with_absolute_links  # noqa: E402

DIST = ROOT / "dist"
IN_WHEEL = {"py.typed", "tools/simulate/clusters/h100.toml"}


def main() -> None:
    text = notes((ROOT / "CHANGELOG.md").read_text(), version())
    if sys.argv[1:] == ["--notes"]:
        print(text)
        return
    assert not said("git", "status", "--porcelain"), "commit first: a release is built of HEAD"
    tag = f"v{version()}"
    tagged = is_tagged(tag)
    with tempfile.TemporaryDirectory(prefix="sherd-release-") as folder:
        wheel, sources = build(Path(folder))
        show("twine", "check", "--strict", wheel, sources)
        check_wheel(wheel)
        check_sources(sources)
        check_page(wheel)
        with tarfile.open(sources) as file:
            file.extractall(folder, filter="data")
        unpacked = Path(folder, sources.name.removesuffix(".tar.gz"))
        show("make", "-C", unpacked, "docs", f"DOCS={ROOT / '.venv-docs'}")
        try_wheel(wheel, unpacked, Path(folder, "new"))
    kept = DIST / f"notes-{version()}.md"
    kept.write_text(text + "\n")
    print("\nAll checks passed. What is left:")
    if not tagged:
        print(f"    git tag -a {tag} -F {kept.relative_to(ROOT)} --cleanup=verbatim")
    print(f"    git push origin {tag}")
    print(f"    upload {wheel.relative_to(ROOT)} and {sources.relative_to(ROOT)}: to the tag's page;")
    print("    to a package index under another name (CONTRIBUTING.md says why)")


def notes(changelog: str, of: str) -> str:
    """The section of version `of`, a line for each entry. Raises if it has none, or if changes wait for a version."""
    sections = dict(re.findall(r"^## \[(.+?)\].*\n((?:(?!## ).*\n)*)", changelog, re.MULTILINE))
    assert not sections.get("Unreleased", "").strip(), "CHANGELOG.md: give the entries of [Unreleased] to a version"
    assert of in sections, f"CHANGELOG.md: expected a section ## [{of}]"
    return with_absolute_links(re.sub(r"\n +(?=\S)", " ", sections[of].strip()), "CHANGELOG.md")


def is_tagged(tag: str) -> bool:
    """Whether HEAD has this version's tag. Raises if HEAD has another version's, or the tag is at another commit."""
    here = said("git", "tag", "--points-at", "HEAD", "v*").split()
    assert {*here} <= {tag}, f"HEAD has the tag {' '.join(here)}, but sherd.__version__ says {tag[1:]}: change one"
    elsewhere = not here and said("git", "tag", "--list", tag)
    assert not elsewhere, f"{tag} is the tag of another commit: git checkout {tag}, or change sherd.__version__"
    return bool(here)


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution; the wheel is made of the latter."""
    committed = folder / "committed"
    committed.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "x", "-C", committed], input=archive, check=True)
    show("python", "-m", "build", "--no-isolation", "--outdir", DIST, committed)
    return DIST / f"sherd_fsdp-{version()}-py3-none-any.whl", DIST / f"sherd_fsdp-{version()}.tar.gz"


def check_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {name for name in said("git", "ls-files", "sherd").split() if not name.endswith(".md")}
    assert {f"sherd/{name}" for name in IN_WHEEL} <= modules <= names, sorted(modules - names)
    others = {name for name in names - modules if ".dist-info/" not in name}
    assert not others, f"the wheel has more than the package: {sorted(others)}"


def check_sources(sources: Path) -> None:
    with tarfile.open(sources) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    hidden = {name for name in said("git", "ls-files").split() if name.startswith(".") and not name.startswith(".ci/")}
    missing = set(said("git", "ls-files").split()) - hidden - names
    assert not missing, f"the source distribution lacks {sorted(missing)}"


def check_page(wheel: Path) -> None:
    """The README as a package index shows it leads out of the index with every link and picture."""
    from readme_renderer.markdown import render

    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    page = render(zipfile.ZipFile(wheel).read(name).decode().partition("\n\n")[2])
    assert page, "the README is no Markdown"
    targets = re.findall(r'(?:href|src)="([^"]*)"', page)
    dead = [target for target in targets if not target.startswith(("https://", "#"))]
    assert targets, "the README has links"
    assert not dead, f"an index would show dead links: {dead}"


def try_wheel(wheel: Path, sources: Path, folder: Path) -> None:
    """In an environment with torch and the wheel alone: the first steps of a newcomer."""
    show("python", "-m", "venv", folder)
    python = folder / "bin/python"
    pins = sources / "constraints.txt"
    show(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", pins, wheel)
    show(python, sources / ".ci/bare.py")
    show(folder / "bin/sherd", "--help")


def said(*words: str) -> str:
    return subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def show(command: str | Path, *words: str | Path) -> None:
    """Runs a command, of this environment where it has one of that name."""
    print("$", command, *words, flush=True)
    beside = Path(sys.executable).parent / command
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([beside if beside.exists() else command, *words], cwd=ROOT, env=alone, check=True)


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, subprocess.CalledProcessError) as wrong:
        sys.exit(f"no release: {wrong}")
