"""A program loads what it uses, and the public names lie where the table says."""

import ast
import importlib
import re
import subprocess
import sys

import sherd
from tests.test_layers import PACKAGE, homes

FULLY_SHARD = 100
"""The most modules that `fully_shard` loads. It only ever falls."""


def loaded_by(program: str) -> set[str]:
    """The modules of sherd that a process has loaded once it has run `program`."""
    show = "; import sys; print(*[name for name in sys.modules if name == 'sherd' or name.startswith('sherd.')])"
    done = subprocess.run([sys.executable, "-c", program + show], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def storey(module: str) -> str:
    part = f"{module}.".split(".")[1]
    return part if part in ("tools", "train", "cli") else "library"


# What is loaded


def test_fully_shard_loads_few_modules_and_none_of_the_tools_the_trainer_and_the_command_line():
    loaded = loaded_by("from sherd import fully_shard")
    assert len(loaded) <= FULLY_SHARD, sorted(loaded)
    assert {storey(module) for module in loaded} == {"library"}


def test_the_wrapper_loads_the_library_alone_and_a_plan_loads_no_trainer():
    assert {storey(module) for module in loaded_by("from sherd import FullyShardedDataParallel")} == {"library"}
    assert {storey(module) for module in loaded_by("import sherd; sherd.plan")} == {"library", "tools"}
    assert loaded_by("import sherd") == {"sherd"}


def test_the_core_loads_no_room_that_plugs_in():
    names = "fully_shard, clip_grad_norm_, iter_full_parameters, load, memory_report, refresh, save, unsharded, Muon"
    rooms = {"fsdp1", "deltas", "interop", "uneven"}
    assert not [each for each in loaded_by(f"from sherd import {names}") if rooms & {*each.split(".")}]


# Where names are


def test_type_checkers_are_told_of_the_modules_that_the_table_names():
    assert homes() == sherd._HOMES
    for name, module in sherd._HOMES.items():
        assert hasattr(importlib.import_module(module), name), name


def test_a_star_imports_all_public_names():
    names: dict[str, object] = {}
    exec("from sherd import *", names)
    assert set(sherd.__all__) <= set(names)


def test_what_is_said_to_be_installed_is_an_extra():
    section = (PACKAGE.parent / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2]
    known = set(re.findall(r"^(\w+) = ", section.partition("\n\n")[0], re.MULTILINE))
    for file in sorted(PACKAGE.rglob("*.py")):
        for call in (each for each in ast.walk(ast.parse(file.read_text())) if isinstance(each, ast.Call)):
            if ast.unparse(call.func) == "install" and isinstance(call.args[0], ast.Constant):
                assert call.args[0].value in known, file


def test_the_library_names_no_module_of_other_storeys_in_a_text():
    """An import by name, `import_module("sherd.tools...")`, would pass the rule of tests/test_layers.py."""
    for file in sorted(PACKAGE.rglob("*.py")):
        top = file.relative_to(PACKAGE).parts[0]
        if top in ("tools", "train", "cli", "__init__.py"):
            continue
        texts = [each.value for each in ast.walk(ast.parse(file.read_text())) if isinstance(each, ast.Constant)]
        others = [
            text for text in texts if isinstance(text, str) and text.startswith("sherd.") and storey(text) != "library"
        ]
        assert others == [], file
