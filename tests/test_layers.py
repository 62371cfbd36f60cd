"""Every file in sherd/ knows only what it may know, and says what it is for."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import sherd.engine

PACKAGE = Path(__file__).parent.parent / "sherd"

# `<`: the left is known to the right and not the other way round. `|`: these do not know each other.
# Up to interop it is the library; then come the tools, the trainer and the command line, a storey each. `sherd` is the
# package's own __init__, which says where public names are.
RULE = """
errors, policy, requirements, units, _torch, codecs < layout | schedule | comm | comm_hooks | wrap < tensor | storage
< on_disk < engine < guard < checkpoint, optim, backward_steps, steps_on_thread, clip, grad_scaler, memory < api
< fsdp1 | deltas | uneven < interop
< tools < tools/simulate < tools/report | tools/verify | tools/convert | tools/migrate
| tools/wire_report < tools/plan < tools/doctor
< sherd < train < cli < __main__
"""
# The rooms of sherd/engine/, likewise.
ROOMS = ("state", "moves", "run", "between", "make")
SIMULATE_KNOWS = {"layout", "schedule", "policy", "errors"}
TRAIN_KNOWS = {
    "train/loop.py": "sherd.tools.plan",
    "train/passes.py": "sherd.capturable",
    "train/rank.py": "sherd.explain_memory",
    "train/config.py": "sherd.tools.simulate",
}
"""What the trainer takes from the tools: the recording of a step, whether one may be captured, the note at an out of
memory error, and the settings that plans choose too."""
MOST_ENGINE_NAMES = 20
"""The most names in sherd/engine/__init__.py. The rest of sherd imports nothing else of the engine."""
WITHOUT_TORCH = {"layout", "schedule", "storage", "tools/simulate", "tools/report"}
RIVALS = (
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.replicate",
    "torch.distributed._composable.replicate_with_fsdp",
)

LEVELS = [re.findall(r"[\w/]+", level) for level in RULE.split("<")]
LEVEL_OF = {layer: number for number, level in enumerate(LEVELS) for layer in level}
APART = [set(re.findall(r"[\w/]+", level)) for level in RULE.split("<") if "|" in level]


def may_know(layer: str, other: str) -> bool:
    if layer == other:
        return True
    if layer == "tools/simulate":
        return other in SIMULATE_KNOWS
    apart = any({layer, other} <= group for group in APART)
    return LEVEL_OF[other] <= LEVEL_OF[layer] and not apart


def layer_of(parts: tuple[str, ...]) -> str:
    """The layer of `sherd.<parts>`; a name that is no layer is a public one, of sherd/__init__.py."""
    pairs = ("/".join(parts[:2]), *parts[:1])
    return next((name for name in pairs if name in LEVEL_OF), "sherd")


def room_of(parts: tuple[str, ...]) -> int | None:
    """The number of the engine's room that `sherd.<parts>` is in, if it is in one."""
    return ROOMS.index(parts[1]) if parts[:1] == ("engine",) and parts[1:2] and parts[1] in ROOMS else None


def imported(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that `tree`, a file of `package`, imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            source = [*above, *([node.module] if node.module else [])]
            yield from ((node.lineno, ".".join([*source, alias.name])) for alias in node.names)


def is_under(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def is_private(name: str) -> bool:
    return any(re.match(r"_(?!_)", part) for part in name.split("."))


def broken_rules(path: Path, name: str) -> Iterator[str]:
    """What is wrong with the file `path` of sherd/ importing `name`, in words."""
    layer, room = layer_of(places_in(path)), room_of(path.parts[:-1])
    if is_under(name, "sherd") and name != "sherd.__version__":
        parts = tuple(name.split(".")[1:])
        other, other_room = layer_of(parts), room_of(parts)
        if not may_know(layer, other):
            yield f"{layer} may not know {other}"
        elif other == "engine" and layer != "engine" and name not in doors_names():
            yield "the engine's door is sherd/engine/__init__.py: import one of its names"
        if room is not None and other_room is not None and other_room > room:
            yield f"engine/{ROOMS[room]} may not know engine/{ROOMS[other_room]}"
        home = homes().get(name.removeprefix("sherd."), name)
        listed = is_under(name, TRAIN_KNOWS.get(path.as_posix(), "nothing"))
        if layer == "train" and is_under(home, "sherd.tools") and not listed:
            yield f"train knows no tools but those of TRAIN_KNOWS in {Path(__file__).name}"
    if is_under(name, "torch"):
        if layer in WITHOUT_TORCH:
            yield f"{layer} does without torch"
        if layer != "interop" and any(is_under(name, rival) for rival in RIVALS):
            yield "torch's own FSDP is for tests, bench and interop only"
        if is_private(name) and layer != "_torch":
            yield "private torch names belong in sherd/_torch/"


def places_in(path: Path) -> tuple[str, ...]:
    """The dotted name of the file `path` of sherd/, in parts, without `sherd`."""
    parts = path.with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


@functools.cache
def homes(package: str = "sherd") -> dict[str, str]:
    """The module of each name that `package` loads when asked for, as the imports for type checkers say it."""
    tree = ast.parse((PACKAGE.parent / package.replace(".", "/") / "__init__.py").read_text())
    (guarded,) = (each for each in tree.body if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING")
    return {name.rpartition(".")[2]: name.rpartition(".")[0] for _, name in imported(guarded, ("sherd",))}


def doors_names() -> set[str]:
    """The names by which the rest of sherd may know the engine."""
    return {"sherd.engine", *(f"sherd.engine.{name}" for name in homes("sherd.engine"))}


def violations(package: Path) -> list[str]:
    """Each import in `package` (a folder named sherd) that breaks the rule: where, what and why."""
    found = []
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        if path.as_posix() != "__init__.py" and layer_of(places_in(path)) == "sherd":
            where = path.parts[0].removesuffix(".py")
            found.append(f"sherd/{path}: {where} has no place in the rule; give it one in {Path(__file__).name}")
            continue
        tree, package_of = ast.parse(file.read_text()), ("sherd", *path.parts[:-1])
        for line, name in imported(tree, package_of):
            broken = broken_rules(path, name)
            found += [f"sherd/{path}:{line}: imports {name}, but {why}" for why in broken]
    return found


def test_no_import_in_sherd_breaks_the_rule():
    assert violations(PACKAGE) == []


def test_the_engine_has_one_door_of_few_names():
    """That nobody goes past it is a part of the rule."""
    assert homes("sherd.engine") == {name: f"sherd.engine.{home}" for name, home in sherd.engine._HOMES.items()}
    assert sorted(sherd.engine._HOMES) == sherd.engine.__all__
    assert len(sherd.engine.__all__) <= MOST_ENGINE_NAMES
    imports = (imported(ast.parse(file.read_text()), ()) for file in PACKAGE.rglob("*.py"))
    assert doors_names() - {name for of_file in imports for _, name in of_file} == {"sherd.engine"}, "nobody uses it"


def test_every_file_in_sherd_begins_by_saying_what_it_is_for():
    silent = []
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text()
        says = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
        if not (says and text.startswith(('"""', 'r"""'))):
            silent.append(str(file.relative_to(PACKAGE.parent)))
    assert silent == []


WRONG = [
    ("comm/mesh.py", "from sherd.engine.run.unit import Unit", "comm may not know engine"),
    ("comm/mesh.py", "import sherd.layout", "comm may not know layout"),
    ("comm/mesh.py", "from sherd import schedule", "comm may not know schedule"),
    ("comm/mesh.py", "from ..schedule import order", "comm may not know schedule"),
    ("comm/deep/mesh.py", "from ...tensor.ragged import RaggedDTensor", "comm may not know tensor"),
    ("errors.py", "def late():\n    from .api import fully_shard", "errors may not know api"),
    ("engine/unit.py", "from sherd import fully_shard", "engine may not know sherd"),
    ("engine/state/group.py", "from sherd.engine.moves.weights import Weights", "state may not know engine/moves"),
    ("engine/run/unit.py", "from ..between import load", "engine/run may not know engine/between"),
    ("fsdp1/wrapper.py", "from .. import fully_shard", "fsdp1 may not know sherd"),
    ("engine/run/monitor.py", "def late():\n    from sherd.guard import board", "engine may not know guard"),
    ("comm/mesh.py", "def late():\n    from sherd.guard import board", "comm may not know guard"),
    ("guard/board.py", "from sherd.api import module", "guard may not know api"),
    ("api/module.py", "from sherd.fsdp1 import wrapper", "api may not know fsdp1"),
    ("deltas/marks.py", "from sherd.fsdp1 import wrapper", "deltas may not know fsdp1"),
    ("guard/checker.py", "from sherd.uneven import coordinator", "guard may not know uneven"),
    ("guard/checker.py", "from sherd.engine.run.unit import Unit", "the engine's door"),
    ("api/module.py", "def late():\n    import sherd.engine.run.hooks", "the engine's door"),
    ("tools/plan/plan.py", "from sherd.engine import Weights", "the engine's door"),
    ("cli/main.py", "from sherd.engine import run", "the engine's door"),
    ("engine/unit.py", "from sherd.tools.simulate import replay", "engine may not know tools/simulate"),
    ("fsdp1/wrapper.py", "def late():\n    from sherd.tools.plan.plan import plan", "fsdp1 may not know tools/plan"),
    ("memory/report.py", "from sherd.train import loop", "memory may not know train"),
    ("interop/identity.py", "from sherd.cli import words", "interop may not know cli"),
    ("tools/simulate/replay.py", "from sherd.comm import mesh", "tools/simulate may not know comm"),
    ("tools/verify/report.py", "from sherd.tools.convert import formats", "tools/verify may not know tools/convert"),
    ("tools/doctor/ranks.py", "from sherd.train.config import Config", "tools/doctor may not know train"),
    ("tools/convert/formats.py", "from sherd.cli.terminal import say", "tools/convert may not know cli"),
    ("tools/plan/plan.py", "from sherd import fully_shard", "tools/plan may not know sherd"),
    ("train/loop.py", "from sherd.cli.terminal import say", "train may not know cli"),
    ("train/data.py", "from sherd.tools.plan.files import to_json", "train knows no tools"),
    ("train/data.py", "from sherd import explain_memory", "train knows no tools"),
    ("__init__.py", "from sherd.train import loop", "sherd may not know train"),
    ("wrap/walks.py", "from sherd.comm import mesh", "wrap may not know comm"),
    ("wrap/walks.py", "from sherd.engine.run.unit import Unit", "wrap may not know engine"),
    ("layout/extent.py", "import torch", "layout does without torch"),
    ("schedule/order.py", "from torch import Tensor", "schedule does without torch"),
    ("engine/unit.py", "from torch.distributed import fsdp", "torch's own FSDP"),
    ("train/loop.py", "from torch.distributed.fsdp import fully_shard", "torch's own FSDP"),
    ("_torch/modules.py", "import torch.distributed._composable.fsdp", "torch's own FSDP"),
    ("engine/unit.py", "import torch._dynamo", "private torch names"),
    ("engine/unit.py", "from torch import _foreach_norm", "private torch names"),
    ("engine/unit.py", "from torch.distributed.tensor._ops import x", "private torch names"),
    ("leftovers.py", "", "leftovers has no place in the rule"),
]
RIGHT = [
    ("policy.py", "from sherd.errors import SherdError"),
    ("_torch/dynamo.py", "import torch._dynamo"),
    ("layout/packing.py", "from sherd.layout.extent import Extent\nfrom . import placement\nimport math"),
    ("schedule/order.py", "from ..policy import Prefetch"),
    ("engine/runtime.py", "from sherd import layout, schedule, comm, tensor, errors"),
    ("optim.py", "from sherd.checkpoint import files"),
    ("wrap/walks.py", "from torch import nn\nfrom sherd.errors import PolicyError"),
    ("api/auto_shard.py", "from sherd.wrap import choose"),
    ("guard/checker.py", "from sherd.engine import Unit\nfrom sherd.schedule import path"),
    ("tools/simulate/replay.py", "from sherd import layout, schedule, policy"),
    ("tools/doctor/machine.py", "from sherd import __version__\nfrom sherd.tools.plan.plan import Plan"),
    ("train/loop.py", "from sherd import __version__, fully_shard\nfrom sherd.tools.plan.files import to_json"),
    (
        "cli/main.py",
        "from sherd import fully_shard\nfrom sherd.train import loop\nfrom sherd.tools.simulate import replay",
    ),
    ("__init__.py", "from sherd.api.fully_shard import fully_shard\nfrom torch import __version__"),
]


def planted(package: Path, path: str, source: str) -> list[str]:
    """What is wrong with a package that holds this one file."""
    file = package / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    return violations(package)


def test_a_planted_violation_is_found_and_explained_and_an_import_down_the_layers_is_fine(tmp_path):
    for number, (path, source, why) in enumerate(WRONG):
        (found,) = planted(tmp_path / f"{number}" / "sherd", path, source)
        assert found.startswith(f"sherd/{path}"), (path, source)
        assert why in found, (path, source)
    for number, (path, source) in enumerate(RIGHT):
        assert planted(tmp_path / f"right {number}" / "sherd", path, source) == [], (path, source)


def test_each_folder_with_code_is_a_package_that_is_shipped():
    """Without an `__init__.py` a folder can be imported from a checkout, and is missing where sherd is installed."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []
