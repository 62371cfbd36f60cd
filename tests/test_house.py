"""The size of the code, held by ceilings: lines of a storey, files a reader opens for a task, functions, writes, types,
cycles of imports. Calls per unit are held by tests/engine/test_calls.py, modules at import by tests/test_storeys.py.

The core is all of sherd/ except the `sherd` command with its plans, the adapters to other packages and their
checkpoints, the migration guide and the host's transports. `pytest tests/test_house.py -s` prints every figure.
CONTRIBUTING.md says what to do when one is too high.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

import pytest
import torch
from torch import nn

import sherd
from sherd._torch import imagined_ranks
from tests.test_layers import homes, imported

PACKAGE = Path(sherd.__file__).parent
NOT_CORE = (
    *("tools/plan/", "tools/report/", "tools/convert/", "tools/migrate.py"),
    *("train/", "cli/", "interop/", "comm/host/"),
)

STOREYS = {
    "core": (),
    "FSDP1": ("fsdp1/",),
    "plug-ins": ("uneven/", "deltas/", "comm/host/"),
    "adapters": ("interop/",),
    "tools": ("tools/",),
    "trainer": ("train/", "cli/"),
}

MOST_CODE_LINES = 60  # of a function

# A ceiling falls towards the goal, with the code. It rises only with a new capability that a decision describes: the
# optimizers' and the tools' with matrices and their steps beside backward (041), the library's with these, with
# weights that have changed (043), matrices in flat parameters (041) and stages that were adapters before (045), the
# trainer's with loggers in one word; a little of each with what torch 2.14 and 2.15 brought (046), and with numbers,
# optimizers and plans that hold for the whole (047); these two with what ranks compare between collectives (048); the
# core's with a table of the cases of gradients, and a unit in two files (028), its and the tools' with `capturable`,
# and its and the trainer's with steps as graphs (051), the core's and the tools' with gathers into place (052),
# the core's and the tools' with places for each kind of state, masters, activations, losses in parts and steps on a
# thread (053), the core's with sums in the order of ranks, codecs and state in blocks (054), the
# core's, the tools' and the trainer's with formats that are measured, limited, planned and kept (055).
FIGURES = {
    #                                       ceiling    goal
    "foreign writes per 1,000 code lines": (2.9, 3.0),
    "hidden writes, those by write_into too": (15, 0),
    "Any per 1,000 code lines": (8.1, 12.0),
    "isinstance per 1,000 code lines": (19.5, 20.0),
    "import cycles": (0, 0),
    "lines of the whole": (69357, 48000),
    "lines of the core": (41639, 28000),
    "lines of the FSDP1": (2659, 2700),
    "lines of the plug-ins": (3442, 3400),
    "lines of the adapters": (1587, 1500),
    "lines of the tools": (15034, 12000),
    "lines of the trainer": (5101, 4600),
    "files of a walk: forward": (16, 15),
    "files of a walk: backward": (17, 15),
    "files of a walk: save": (23, 25),
    "files of a walk: load": (25, 25),
    "files of a walk: plan": (93, 80),
    "hops in forward": (128, 140),
    "hops in backward": (179, 200),
}

# What is above a limit today. The lists shrink: a name whose limit holds again must go.
LONG_FUNCTIONS: set[str] = set()


# The measure

Function = ast.FunctionDef | ast.AsyncFunctionDef
NO_CODE = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}


@dataclass
class File:
    """The figures of one source file."""

    name: str
    num_lines: int
    code_lines: set[int]
    """Numbers of the lines with a token that is neither a comment nor a docstring."""
    functions: dict[str, int] = field(default_factory=dict)
    """Code lines of each function; an inner function's count for the outer one too."""
    classes: list[str] = field(default_factory=list)
    """Names of the classes that are not inside of something else."""
    num_any: int = 0
    num_isinstance: int = 0
    foreign_writes: list[int] = field(default_factory=list)
    """Lines that assign to an attribute of anything but `self` or `cls`; `self.a.b = ...` is one too."""
    hidden_writes: list[int] = field(default_factory=list)
    """Lines with `setattr`, or a write into the `__dict__` or `vars()` of anything but `self`."""
    imports: set[str] = field(default_factory=set)
    """Dotted names of all imports, also of those under TYPE_CHECKING and inside functions."""


def measured(source: str, name: str) -> File:
    tree = ast.parse(source)
    file = File(name, len(source.splitlines()), code_lines_of(source, tree))
    note_definitions(file, tree, "")
    file.classes = [each.name for each in tree.body if isinstance(each, ast.ClassDef)]
    for node in ast.walk(tree):
        file.num_any += isinstance(node, ast.Name) and node.id == "Any"
        file.num_isinstance += isinstance(node, ast.Call) and called(node) == "isinstance"
        file.foreign_writes += [node.lineno for target in targets_of(node) if is_foreign(target)]
        file.hidden_writes += [node.lineno for target in targets_of(node) if is_in_dict_of_another(target)]
        if isinstance(node, ast.Call) and is_hidden_call(node):
            file.hidden_writes.append(node.lineno)
    file.imports = {found for _, found in imported(tree, Path(name).parts[:-1])}
    return file


def code_lines_of(source: str, tree: ast.Module) -> set[int]:
    docs: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE and token.type != tokenize.COMMENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docs


def note_definitions(file: File, node: ast.AST, prefix: str) -> None:
    """Count the code lines of every function below `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if isinstance(child, Function):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                lines = file.code_lines.intersection(range(first, (child.end_lineno or first) + 1))
                # Overloads and setters share their name with another function.
                file.functions[name] = max(len(lines), file.functions.get(name, 0))
            note_definitions(file, child, f"{name}.")
        else:
            note_definitions(file, child, prefix)


def called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def targets_of(node: ast.AST) -> Iterator[ast.expr]:
    """Yields the targets of an assignment, those in tuples and lists one by one."""
    if isinstance(node, ast.Assign):
        waiting = list(node.targets)
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.AnnAssign) and node.value is not None):
        waiting = [node.target]
    else:
        return
    while waiting:
        target = waiting.pop()
        if isinstance(target, ast.Tuple | ast.List):
            waiting += target.elts
        else:
            yield target


def is_own(owner: ast.expr) -> bool:
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")


def is_foreign(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and not is_own(target.value)


def is_dict_of_another(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return called(node) == "vars" and bool(node.args) and not is_own(node.args[0])
    return isinstance(node, ast.Attribute) and node.attr == "__dict__" and not is_own(node.value)


def is_in_dict_of_another(target: ast.expr) -> bool:
    return isinstance(target, ast.Subscript) and is_dict_of_another(target.value)


def is_hidden_call(node: ast.Call) -> bool:
    name, function = called(node), node.func
    if isinstance(function, ast.Attribute) and name in ("update", "pop", "setdefault", "__setitem__"):
        return is_dict_of_another(function.value)
    if name == "__setattr__":  # `super().__setattr__` is how a class's own `__setattr__` ends
        return not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call))
    return name in ("setattr", "write_into")


def cycles_of(files: list[File]) -> list[list[str]]:
    """Returns the groups of modules that import one another, directly or through others."""
    modules = {module_of(file.name): file for file in files}
    known = {name: known_imports(name, file.imports, modules) for name, file in modules.items()}
    reached = {name: reach(name, known) for name in known}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in known if name in reached[name]
    }
    return sorted(sorted(group) for group in groups)


def module_of(path: str) -> str:
    return ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")


def known_imports(importer: str, names: set[str], modules: dict[str, File]) -> set[str]:
    """Returns the modules that `names` lie in. A package counts only where it is named itself, and a name of the
    engine's door for the module that the door loads it from."""
    found = set()
    for name in names:
        package, _, last = name.rpartition(".")
        if package == "sherd.engine":
            name = homes(package).get(last, name)
        while name not in modules and "." in name:
            name = name.rpartition(".")[0]
        # `sherd` itself loads its public names when asked for.
        if name in modules and name not in ("sherd", importer) and not importer.startswith(f"{name}."):
            found.add(name)
    return found


def reach(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for name in graph[waiting.pop()] - seen:
            seen.add(name)
            waiting.append(name)
    return seen


# Walks of a reader: a step, a save, a load, a plan


class Trace:
    """The files of sherd/ whose functions were called, in order."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._starts: dict[CodeType, int] = {}
        """Where the first call of each function began: a generator that is resumed further down is not called."""

    def __enter__(self) -> "Trace":
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_event(self, frame, event, _):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(f"{PACKAGE}/"):
            return
        if self._starts.setdefault(code, frame.f_lasti) == frame.f_lasti:
            self.files.append(code.co_filename)

    @property
    def num_hops(self) -> int:
        return sum(before != after for before, after in zip(self.files, self.files[1:], strict=False))

    @property
    def num_files(self) -> int:
        return len(set(self.files))


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))


@pytest.fixture(scope="module")
def walks(tmp_path_factory) -> dict[str, Trace]:
    """What is called in the third step of three blocks as rank 0 of 4 ranks, when that model is saved on one rank and
    loaded, and when it is planned.

    In the first step the order of units is learnt. A fake process group answers at once, so that no wait is counted.
    """
    traces = {name: Trace() for name in ("forward", "backward")}
    with imagined_ranks(4):
        model = blocks()
        for block in model:
            sherd.fully_shard(block)
        sherd.fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.ones(2, 8)
        for _ in range(3):
            for name in ("forward", "backward"):
                traces[name] = Trace()
            with traces["forward"]:
                loss = model(batch).sum()
            with traces["backward"]:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("walk")
    for time in ("first", "second"):  # the first one also runs what it imports
        with imagined_ranks(1):
            model = sherd.fully_shard(blocks())
            with Trace() as traces["save"]:
                sherd.save(folder / time, {"model": model}, step=0)
            with Trace() as traces["load"]:
                sherd.load(folder / time, {"model": model})
        with Trace() as traces["plan"]:
            sherd.plan(blocks(), 4, torch.ones(2, 8))
    return traces


# What must hold


@pytest.fixture(scope="module")
def everything() -> list[File]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return [measured(path.read_text(), f"sherd/{path.relative_to(PACKAGE).as_posix()}") for path in paths]


@pytest.fixture(scope="module")
def core(everything) -> list[File]:
    return [file for file in everything if not file.name.removeprefix("sherd/").startswith(NOT_CORE)]


def check(name: str, figure: float, where: object = "") -> None:
    ceiling, goal = FIGURES[name]
    print(f"{name:38} {figure:8.1f}   ceiling {ceiling}, goal {goal}")
    assert round(figure, 1) <= ceiling, (
        f"{name}: {round(figure, 1)} is over the ceiling of {ceiling} (goal {goal}). Change the code, not the ceiling: "
        f"CONTRIBUTING.md, 'When a ceiling is hit'. {where}"
    )


def check_exceptions(what: str, limit: int, found: dict[str, int], exceptions: set[str]) -> None:
    print(f"{what:38} {max(found.values()):8}   limit {limit}, {len(exceptions)} above it")
    above = {name for name, figure in found.items() if figure > limit}
    new = ", ".join(f"{name} ({found[name]})" for name in sorted(above - exceptions))
    assert not new, f"{what}: over {limit}: {new}. Split them: CONTRIBUTING.md, 'When a ceiling is hit'."
    gone = ", ".join(sorted(exceptions - above))
    assert not gone, f"{what}: no longer over {limit}: {gone}. Take them off the list of exceptions."


def check_density(what: str, core: list[File], count: Callable[[File], int]) -> None:
    counts = {file.name: count(file) for file in core}
    most = sorted(counts.items(), key=lambda item: -item[1])[:5]
    figure = 1000 * sum(counts.values()) / sum(len(file.code_lines) for file in core)
    check(f"{what} per 1,000 code lines", figure, "Most: " + ", ".join(f"{name} {count}" for name, count in most))


def test_each_storey_is_small_enough_to_know(everything):
    lines = dict.fromkeys(STOREYS, 0)
    for file in everything:
        inside = [storey for storey, folders in STOREYS.items() if file.name.removeprefix("sherd/").startswith(folders)]
        lines[inside[0] if inside else "core"] += file.num_lines
    for storey, num_lines in {**lines, "whole": sum(lines.values())}.items():
        check(f"lines of the {storey}", num_lines)


def test_no_two_classes_have_one_name(everything):
    homes: dict[str, list[str]] = {}
    for file in everything:
        for name in file.classes:
            homes.setdefault(name, []).append(file.name)
    assert {name: files for name, files in homes.items() if len(files) > 1 and not name.startswith("_")} == {}


def test_no_function_is_longer_than_a_screen(core):
    lines = {f"{file.name}:{name}": count for file in core for name, count in file.functions.items()}
    check_exceptions("code lines of a function", MOST_CODE_LINES, lines, LONG_FUNCTIONS)


def test_objects_write_their_own_fields(core):
    check_density("foreign writes", core, lambda file: len(file.foreign_writes))


def test_no_field_is_written_where_a_search_for_its_name_does_not_find_it(core):
    places = [f"{file.name}:{line}" for file in core for line in file.hidden_writes]
    check("hidden writes, those by write_into too", len(places), ", ".join(places))


def test_types_say_something(core):
    check_density("Any", core, lambda file: file.num_any)


def test_variants_are_data_and_seldom_told_apart_by_their_type(core):
    check_density("isinstance", core, lambda file: file.num_isinstance)


def test_no_two_files_import_each_other(core):
    cycles = cycles_of(core)
    check("import cycles", len(cycles), "; ".join(", ".join(cycle) for cycle in cycles))


def test_a_reader_opens_few_files_to_follow_one_task(walks):
    for name in ("forward", "backward"):
        check(f"hops in {name}", walks[name].num_hops)
    for name, trace in walks.items():
        check(f"files of a walk: {name}", trace.num_files)


# The measure itself


def test_code_lines_have_more_than_a_comment_or_docstring_and_count_for_outer_functions_too():
    source = '"""Doc."""\n\n# why\nx = 1  # one\n\n\ndef f():\n    """Doc,\n    long."""\n    return """a\nb"""\n'
    file = measured(source, "sherd/x.py")
    assert (file.num_lines, len(file.code_lines), file.functions) == (11, 4, {"f": 3})
    source = (
        "class A:\n    @property\n    def a(self):\n        def b():\n            return 1\n        return b\n    c = 1"
    )
    file = measured(source, "sherd/x.py")
    assert file.functions == {"A.a": 5, "A.a.b": 2}


def test_writes_to_others_are_seen():
    for source, foreign, hidden in (
        ("self.a = 1; cls.b = 2; c = 3; self.d: int", 0, 0),
        ("self.a.b = 1", 1, 0),
        ("a.b, (c.d, e) = f", 2, 0),
        ("a.b += 1; a.c: int = 2", 2, 0),
        ("setattr(a, 'b', 1)", 0, 1),
        ("object.__setattr__(a, 'b', 1)", 0, 1),
        ("super().__setattr__('b', 1)", 0, 0),
        ("a.__dict__['b'] = 1; vars(a)['b'] = 2", 0, 2),
        ("a.__dict__.update(b=1); vars(a).pop('b')", 0, 2),
        ("self.__dict__['b'] = 1; vars(self).update(b=1); a.update(b=1)", 0, 0),
    ):
        file = measured(source, "sherd/x.py")
        assert (len(file.foreign_writes), len(file.hidden_writes)) == (foreign, hidden), source


def test_a_cycle_is_found_wherever_the_import_is():
    first, second, apart = (
        measured(f"from sherd.{other} import x", f"sherd/{name}.py")
        for name, other in (("a", "b"), ("b", "c"), ("d", "a"))
    )
    for back in ("from sherd.a import x", "def f():\n    import sherd.a", "if TYPE_CHECKING:\n    from .a import x"):
        third = measured(back, "sherd/c.py")
        assert cycles_of([first, second, third, apart]) == [["sherd.a", "sherd.b", "sherd.c"]], back
    assert cycles_of([first, second, apart]) == []


def test_a_figure_over_its_ceiling_is_told_with_the_new_figure():
    with pytest.raises(AssertionError, match=r"write_into too: 1000 is over the ceiling of"):
        check("hidden writes, those by write_into too", 1000)


def test_a_list_of_exceptions_has_to_be_exact():
    check_exceptions("lines", 2, {"a": 3, "b": 2}, {"a"})
    with pytest.raises(AssertionError, match=r"over 2: a \(3\)"):
        check_exceptions("lines", 2, {"a": 3, "b": 2}, set())
    with pytest.raises(AssertionError, match="no longer over 2: b"):
        check_exceptions("lines", 2, {"a": 3, "b": 2}, {"a", "b"})
