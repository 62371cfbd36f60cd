"""The documents are true: their code runs, their links lead somewhere, they leave no name out."""

import ast
import builtins
import contextlib
import importlib
import inspect
import io
import os
import re
import tokenize
import traceback
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import sherd
from sherd import errors
from sherd.cli.main import main
from sherd.layout.packing import pack
from sherd.layout.plan import Wanted, plan
from sherd.train.config import FIELDS
from tests.layout.drawing import drawn
from tests.support.ranks import forked
from tests.support.words import old_words

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TOP = ("sherd", "tests", "examples", "docs", "bench", "configs")

CODE_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ENTRY = re.compile(r"^- \[[^\]]+\]\(([^)#]+)\)", re.MULTILINE)
PATH_IN_CODE = re.compile(rf"`((?:{'|'.join(TOP)})/[\w./-]*)`")
TEST_NAME = re.compile(r"\btest_[a-z0-9_]+\b")


def name_of(path):
    return str(path.relative_to(ROOT))


def read(name):
    return (ROOT / name).read_text()


def between(text, marker):
    """What stands between `<!-- marker -->` and `<!-- /marker -->`."""
    (found,) = re.findall(rf"<!-- {marker} -->\n(.*?)<!-- /{marker} -->", text, re.DOTALL)
    return found


# Code

WITH_CODE = [name_of(path) for path in DOCUMENTS if CODE_BLOCK.search(path.read_text())]


def run_blocks(name):
    """A document's blocks one after the other, in one namespace, as its reader would type them; returns that."""
    text, namespace = read(name), {"__name__": "__main__"}
    # A program leaves its process group at its end; here that is the group of all tests of the session.
    with mock.patch.object(dist, "destroy_process_group"):
        for block in CODE_BLOCK.finditer(text):
            line = text.count("\n", 0, block.start(1))
            # As many empty lines in front, so that a traceback names the document's own line.
            exec(compile("\n" * line + block[1], str(ROOT / name), "exec"), namespace)
    return namespace


def run_document(name, folder):
    before = os.getcwd()
    os.chdir(folder)
    try:
        run_blocks(name)
    finally:
        os.chdir(before)


@pytest.mark.parametrize("name", [name for name in WITH_CODE if name != "README.md"])
def test_a_documents_code_runs_on_two_ranks(world, name, tmp_path):
    world(2).run(run_document, name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CODE)
def test_a_documents_program_runs_under_torchrun_where_no_process_group_is_made_for_it(name, tmp_path):
    """As a reader runs it: its blocks are one file."""
    (tmp_path / "page.py").write_text("\n".join(block[1] for block in CODE_BLOCK.finditer(read(name))))
    words = ["--standalone", "--nproc-per-node", "2", "page.py"]
    process = forked.start(forked.torchrun, words, {}, folder=tmp_path, output=tmp_path / "said")
    process.join(120)
    is_done = process.exitcode == 0
    process.kill()
    assert is_done, (tmp_path / "said.err").read_text()


def test_a_block_that_fails_is_named_by_its_documents_line(tmp_path, monkeypatch):
    (tmp_path / "broken.md").write_text("Words.\n\n```python\nx = 1\nx.missing\n```\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    with pytest.raises(AttributeError) as error:
        run_blocks("broken.md")
    assert traceback.extract_tb(error.value.__traceback__)[-1].lineno == 5


def readme_on_a_rank():
    """What README's program prints, and the last batch that it has drawn."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        last = run_blocks("README.md")["x"]
    return printed.getvalue(), last.tolist()


@pytest.mark.front("A first program")
def test_the_readmes_program_prints_its_loss_on_rank_0_as_shown_and_each_rank_has_data_of_its_own(world):
    (printed, batch), (silent, other_batch) = world(2).run(readme_on_a_rank)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", read("README.md"), re.MULTILINE | re.DOTALL)
    steps, losses = zip(*re.findall(r"^step +(\d+)  loss (\S+)$", printed, re.MULTILINE), strict=True)
    assert (steps, losses[-1] < losses[0]) == (("0", "10", "20", "30", "40"), True)
    assert [float(each) for each in losses] == pytest.approx([float(each) for each in shown.split()[3::4]], rel=0.1)
    assert silent == ""
    assert batch != other_batch


def test_the_readmes_first_screen_says_what_has_not_run():
    assert "no two GPUs have run it together yet" in " ".join(read("README.md").splitlines()[:20])


# Links and paths


def slug(heading):
    """The anchor of a heading: lower case, hyphens for blanks, nothing else but letters, digits and underscores."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


def prose(file):
    """Its text without blocks of code, in which a comment looks like a heading."""
    return re.sub(r"^```.*?^```$", "", file.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(file):
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", prose(file), re.M)}


def dead_links(document):
    for target in LINK.findall(prose(document)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        # A folder is no page of the site.
        if not file.is_file() or (anchor and anchor not in anchors(file)):
            yield target


def in_documents(find):
    """What `find` finds in each document, by its name."""
    return {name_of(document): found for document in DOCUMENTS if (found := list(find(document)))}


def test_every_link_of_a_document_leads_somewhere():
    assert in_documents(dead_links) == {}


def test_a_link_to_a_missing_file_or_heading_or_to_a_folder_is_dead(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "b.md").write_text("# Two `words`\n\n```python\n# Code\n```\n")
    (tmp_path / "a.md").write_text("[b](b.md) [b](b.md#two-words) [b](b.md#code) [b](c.md) [b](folder)\n")
    assert list(dead_links(tmp_path / "a.md")) == ["b.md#code", "c.md", "folder"]


def misplaced_lists(document):
    text = prose(document)
    yield from re.findall(r"^(?! |- |\d+\. |\|)\S.*\n(?:- |\d+\. ).*", text, re.MULTILINE)
    yield from re.findall(r"^ {1,3}(?:- |\d+\. ).*", text, re.MULTILINE)


def test_a_list_stands_as_the_sites_markdown_wants_it():
    """After an empty line, and four blanks in for a list in a list; GitHub shows the rest as a list too."""
    assert in_documents(misplaced_lists) == {}


def test_commands_with_comments_fit_the_site_at_1280_pixels():
    for name in (
        "README.md",
        "docs/look_up/config.md",
        "docs/index.md",
        "docs/do/snippets.md",
        "docs/do/other_packages.md",
    ):
        assert [line for line in read(name).splitlines() if line.startswith("    ") and len(line) > 110] == [], name


def missing_paths(document):
    return [path for path in PATH_IN_CODE.findall(document.read_text()) if not (ROOT / path).exists()]


def test_every_path_that_a_document_names_exists():
    assert in_documents(missing_paths) == {}


def test_the_file_map_names_what_there_is_and_leaves_nothing_out():
    entries = [line.split()[0] for line in between(read("ARCHITECTURE.md"), "file map").splitlines() if "  " in line]
    assert [entry for entry in entries if not (ROOT / entry).exists()] == []
    code = [*ROOT.glob("sherd/*.py"), *(path.parent for path in ROOT.glob("sherd/*/__init__.py"))]
    there = {name_of(path) + ("/" if path.is_dir() else "") for path in code}
    assert there - set(entries) == set()


def test_every_decision_is_listed_once_and_numbered_without_gaps():
    pages = sorted(path.name for path in (ROOT / "docs/decisions").glob("[0-9]*.md"))
    assert [int(page[:3]) for page in pages] == list(range(1, len(pages) + 1))
    assert LINK.findall(read("docs/decisions/README.md")) == pages


def test_a_decision_says_its_status_and_date_and_the_list_repeats_them():
    head = re.compile(r"# (\d+)\. .*\n\n- Status: (accepted|withdrawn)\b.*\n- Date: (\d{4}-\d\d-\d\d)\n")
    told = [head.match(path.read_text()) for path in sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))]
    assert None not in told
    row = re.compile(r"^\| (\d+) \| .* \| (accepted|withdrawn)\b.* \| (\S+) \|$", re.MULTILINE)
    assert row.findall(read("docs/decisions/README.md")) == [match.groups() for match in told]


def test_the_index_lists_every_page_once():
    listed = [(ROOT / "docs" / target).resolve() for target in ENTRY.findall(read("docs/index.md"))]
    not_listed = {ROOT / "docs/index.md", *ROOT.glob("docs/decisions/[0-9]*.md")}
    assert sorted(listed) == [each for each in DOCUMENTS if each not in not_listed]


def described_modules():
    """The modules in the reference."""
    pages = [path.read_text() for path in ROOT.glob("docs/look_up/*.md")]
    return {module for page in pages for module in re.findall(r"^::: (\S+)", page, re.MULTILINE)}


def test_every_module_that_documents_and_examples_import_from_is_in_the_reference():
    """All of its names: the site is not built where one is missing on the page."""
    described = described_modules()
    programs = [path.read_text() for path in (*DOCUMENTS, *ROOT.glob("examples/*.py"))]
    imported = {
        name for text in programs for name in re.findall(r"^ *(?:from|import) (sherd[\w.]*)", text, re.MULTILINE)
    }
    assert {"sherd", "sherd.wrap"} <= imported <= described
    assert all(importlib.import_module(module).__all__ for module in described if not is_adapter(module))


# Words


def old_words_of(document):
    """Those in its prose. A decision keeps its title, which other pages name in links."""
    text = re.sub(r"\[[^\]]*\]\(\d{3}-[^)]*\)|\]\([^)]*\)", "", prose(document))
    yield from old_words(text.partition("\n")[2] if document.parent.name == "decisions" else text)


def test_documents_are_written_in_plain_words():
    assert in_documents(old_words_of) == {}


def test_an_old_word_is_named_with_what_to_write_instead():
    assert list(old_words("`whole`, dearest, waits for\never.")) == [
        "...`code`, dearest, waits for ever....: for 'for ever' write: forever"
    ]


def remarks(source):
    """Comments, docstrings and other strings of several words in a Python file, as one text."""
    comments = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    constants = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return "\n".join([*comments, *(each for each in constants if isinstance(each, str) and " " in each)])


def test_the_librarys_remarks_and_messages_are_written_in_plain_words():
    found = {
        name_of(path): words
        for path in sorted(ROOT.glob("sherd/**/*.py"))
        if (words := list(old_words(remarks(path.read_text()))))
    }
    assert found == {}


# Drawings


def drawn_in_layouts(placement):
    """The drawing of a placement in docs/understand/layouts.md: its lines, without what is in front of `rank`."""
    lines = read("docs/understand/layouts.md").partition(f"    {placement}")[2].split("\n\n")[0].splitlines()
    return [line.strip() for line in lines]


def test_the_drawings_of_layouts_show_what_comes_out():
    for placement in (sherd.Flat(), sherd.Blocks(2), sherd.Owned()):
        wanted = [Wanted(shape, placement, name) for name, shape in (("w", (5, 32)), ("v", (3, 16)), ("b", (48,)))]
        name = repr(placement).replace("rows=", "")
        assert drawn_in_layouts(name) == drawn(pack(plan(wanted, 3), 3), "wvb"), name


# Names


def test_every_public_name_and_every_method_of_a_unit_is_in_the_port_guide():
    guide = read("docs/do/from_fsdp2.md")
    for name in set(sherd.__all__) - {"__version__"}:
        assert re.search(rf"\b{name}\b", guide), name
    for method, _ in inspect.getmembers(sherd.FSDPModule, callable):
        assert method.startswith("_") or f"`{method}" in guide, method


def test_an_error_has_its_own_entry_which_says_which_python_error_it_is():
    page = read("docs/look_up/errors.md")
    for error in errors.__all__:
        assert f"## {error}\n" in page, error
        entry = page.partition(f"## {error}\n")[2].partition("\n## ")[0]
        said = re.search(r"^Also an? `(\w+)`", entry, re.M)
        assert issubclass(getattr(errors, error), getattr(builtins, said[1]) if said else Exception), error
        assert said or error == "SherdError", error


def test_every_option_of_the_command_that_the_readme_names_exists(capsys):
    for command in ("train", "generate", "eval", "convert"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    section = read("README.md").partition("## `sherd train`")[2].partition("\n## ")[0]
    named = set(re.findall(r"--[a-z-]+\b", section))
    assert {"--data", "--resume"} <= named <= known


def test_every_field_of_sherd_train_that_the_table_of_other_tools_names_exists():
    tables = read("docs/do/other_packages.md").partition("\n## Where is X?\n")[2]
    named = set(re.findall(r"`sherd train [^`]*?\b(\w+)=", tables))
    assert {"micro_batch"} <= named <= set(FIELDS)


def is_adapter(dotted):
    """Whether it takes another package to import it: tests/interop/test_documents.py."""
    return dotted.startswith("sherd.interop.")


def names_in_the_questions():
    return set(re.findall(r"\bsherd(?:\.[A-Za-z_]\w*)+", read("docs/index.md")))


def found_by(dotted):
    """What has this name, which may be that of a module."""
    found = sherd
    for name in dotted.split(".")[1:]:
        found = getattr(found, name, None) or importlib.import_module(f"{found.__name__}.{name}")
    return found


def test_every_name_and_argument_in_the_questions_exists():
    page = read("docs/index.md")
    assert page.count("? |") > 80
    for dotted in names_in_the_questions():
        assert is_adapter(dotted) or found_by(dotted) is not None
    arguments = set(inspect.signature(sherd.fully_shard).parameters)
    named = set(re.findall(r"`(\w+)=", page)) - {"context_fn", "changed_since"}
    assert {"mp_policy", "placement"} <= named <= arguments
    assert set(re.findall(r"`sherd train (?:--\S+ \S+ )?(\w+)=", page)) <= set(FIELDS)


def test_every_make_target_that_a_document_names_exists():
    targets = set(re.findall(r"^(\w+):", read("Makefile"), re.M))
    named = {name for path in DOCUMENTS for name in re.findall(r"`make (\w+)", path.read_text())}
    assert {"test", "train"} <= named <= targets


def test_a_source_distribution_holds_every_file_of_the_root():
    taken_anyway = {"README.md", "LICENSE", "pyproject.toml", "setup.py", "MANIFEST.in"}
    there = {path.name for path in ROOT.glob("[A-Za-z]*") if path.is_file()}
    assert {"mkdocs.yml", "Makefile"} <= there
    assert there - taken_anyway - set(read("MANIFEST.in").split()) == set()


# Capabilities

SECTIONS_TO_TRY = (
    "A first program",
    "Coming from FSDP2",
    "Coming from FSDP1",
    "Checkpoints of others",
    "`sherd train`",
)
FRONT = re.compile(r'^@pytest\.mark\.front\("(.+)"\)\n(?:(?!def ).*\n)*def (test_\w+)', re.MULTILINE)


def test_every_capability_of_the_readme_has_one_marked_test_which_a_table_names():
    section = read("README.md").partition("\n## What it offers")[2].partition("\n## ")[0]
    offered = re.findall(r"^- \*\*(.+?)[.:]?\*\*", section, re.MULTILINE)
    assert all(f"\n## {section}\n" in read("README.md") for section in SECTIONS_TO_TRY)
    table = re.findall(
        r"^\| (.+) \| `(.+)::(test_\w+)` \|$", between(read("CONTRIBUTING.md"), "capabilities"), re.MULTILINE
    )
    assert [capability for capability, *_ in table] == [*SECTIONS_TO_TRY, *offered]
    marked = [
        (capability, name_of(path), test)
        for path in sorted(ROOT.glob("tests/**/test_*.py"))
        for capability, test in FRONT.findall(path.read_text())
    ]
    assert sorted(marked) == sorted(table)


# Tests that comments and documents name


def known_tests():
    files = list(ROOT.glob("tests/**/test_*.py"))
    functions = {name for file in files for name in re.findall(r"^ *def (test_\w+)", file.read_text(), re.M)}
    return functions | {file.stem for file in files}


def test_every_test_that_a_comment_in_sherd_names_exists():
    known = known_tests()
    unknown = [
        f"{name_of(path)}: {test}"
        for path, text in ((path, path.read_text()) for path in sorted(ROOT.glob("sherd/**/*.py")))
        if TEST_NAME.search(text)  # most files name none, and to take one apart takes a while
        for test in TEST_NAME.findall(remarks(text))
        if test not in known
    ]
    assert unknown == []


def test_every_test_that_a_document_names_exists():
    known = known_tests()
    shown_as_examples = set(TEST_NAME.findall(between(read("CONTRIBUTING.md"), "style")))
    unknown = [
        f"{name_of(path)}: {test}"
        for path in DOCUMENTS
        for test in TEST_NAME.findall(path.read_text())
        if test not in known | shown_as_examples
    ]
    assert unknown == []
