"""Modules under the names that they had before: each stays for one version, and warns."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType

MOVED = {
    "sherd.planning": "sherd.tools.plan",
    "sherd.planning.report": "sherd.tools.report",
    "sherd.simulate": "sherd.tools.simulate",
    "sherd.interchange": "sherd.tools.convert",
    "sherd.doctor": "sherd.tools.doctor",
    "sherd.verify": "sherd.tools.verify",
    "sherd.port": "sherd.tools",
    "sherd.port.explain": "sherd.tools.migrate",
    "sherd.train.cli": "sherd.cli.main",
}
"""Old names of packages and modules, and the new ones. What is in a package has moved with it."""


def now(name: str) -> str:
    """Returns the new name of the module that was called `name`; "" if that is no old name."""
    old = name
    while old and old not in MOVED:
        old = old.rpartition(".")[0]
    return MOVED[old] + name[len(old) :] if old else ""


class Moved(MetaPathFinder):
    """Finds a module by its old name: the very module that has the new one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns None for what is no old name, or has no successor."""
        new = now(fullname) if fullname.startswith("sherd.") else ""
        if not new or find_spec(new) is None:
            return None
        if fullname in MOVED:
            warnings.warn(f"{fullname} is called {new} now", FutureWarning, stacklevel=2)
        return ModuleSpec(fullname, _Successor())


class _Successor(InspectLoader):
    """Puts the module with the new name in the place of the one that is asked for."""

    def exec_module(self, module: ModuleType) -> None:
        """Load the successor of `module`, which nobody has seen yet."""
        sys.modules[module.__name__] = import_module(now(module.__name__))

    def get_code(self, fullname: str) -> CodeType | None:
        """Returns the successor's code, which `python -m` runs."""
        spec = find_spec(now(fullname))
        assert spec is not None and isinstance(spec.loader, InspectLoader), "the finder has looked"
        return spec.loader.get_code(spec.name)

    def get_source(self, fullname: str) -> str | None:
        """Returns None: the source is shown under the new name."""
        return None
