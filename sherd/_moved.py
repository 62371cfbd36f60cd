"""Packages under the names that they had before 0.2.0: the names stay for this version, and warn."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType

# A part of a package that went elsewhere stands before the package.
MOVED = {
    "sherd.train.cli": "sherd.cli.main",
    "sherd.interchange.commands": "sherd.cli.convert",
    "sherd.interchange": "sherd.tools.convert",
    "sherd.planning.report": "sherd.tools.report",
    "sherd.planning": "sherd.tools.plan",
    "sherd.simulate": "sherd.tools.simulate",
    "sherd.doctor": "sherd.tools.doctor",
    "sherd.verify": "sherd.tools.verify",
    "sherd.port.explain": "sherd.tools.migrate",
    "sherd.port": "sherd.tools",
}


def now(name: str) -> str:
    """Returns the new name of the module that was called `name`; "" if that is no old name."""
    old = next((old for old in MOVED if f"{name}.".startswith(f"{old}.")), "")
    return old and MOVED[old] + name[len(old) :]


class Moved(MetaPathFinder):
    """Finds a module by its old name: the very module that has the new one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns None for what is no old name, or has no successor."""
        new = now(fullname)
        if not new or find_spec(new) is None:
            return None
        if fullname in MOVED:
            warnings.warn(f"{fullname} is called {new} now", FutureWarning, stacklevel=2)
        return ModuleSpec(fullname, _Successor())


class _Successor(InspectLoader):
    """Puts the module with the new name in the place of the one that is asked for."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(now(module.__name__))

    def get_code(self, fullname: str) -> CodeType | None:
        spec = find_spec(now(fullname))
        assert spec is not None and isinstance(spec.loader, InspectLoader), "the finder has looked"
        return spec.loader.get_code(spec.name)

    def get_source(self, fullname: str) -> None:
        return None
