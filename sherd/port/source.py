"""How is a value written down as source code, and what must be imported for that?"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import sys
from typing import Any

import torch
from torch import nn

from sherd import wrap


class NoLiteralError(Exception):
    """A value that source code cannot name: a lambda, a class made in a function, a process group."""


class Source:
    """Values as source code, and the imports that they need."""

    def __init__(self) -> None:
        self._modules_of: dict[str, str] = {}
        self._modules: set[str] = set()

    # Imports

    def module(self, name: str) -> None:
        """Import a module."""
        self._modules.add(name)

    def name(self, module: str, name: str) -> str:
        """`name`, imported from `module`; as it is if that is the user's program.

        Raises:
            NoLiteralError: there is another module's `name` already.
        """
        if self._modules_of.setdefault(name, module) != module:
            raise NoLiteralError(name)
        return name

    def imports(self) -> str:
        """The import statements: Python's own modules, torch's, others."""
        blocks: tuple[list[str], ...] = ([], [], [])
        for module in sorted(self._modules):
            alias = " as dist" if module == "torch.distributed" else ""
            blocks[_block(module)].append(f"import {module}{alias}")
        for module in sorted(set(self._modules_of.values()) - {"__main__"}):
            names = sorted(name for name, its in self._modules_of.items() if its == module)
            blocks[_block(module)].append(f"from {module} import {', '.join(names)}")
        return "\n\n".join("\n".join(block) for block in blocks if block)

    # Values

    def of(self, value: Any) -> str:
        """`value` as an expression.

        Raises:
            NoLiteralError: it has none.
        """
        if isinstance(value, str):
            return json.dumps(value)
        if value is None or isinstance(value, bool | int | float):
            return repr(value)
        if isinstance(value, torch.dtype):
            self.module("torch")
            return str(value)
        if isinstance(value, torch.device):
            return json.dumps(str(value))
        if isinstance(value, list | tuple | set | frozenset):
            return self._collection(value)
        if isinstance(value, functools.partial):
            return self._partial(value)
        if isinstance(value, type) or inspect.isfunction(value):
            return self._global(value)
        if type(value).__name__ in ("ModuleWrapPolicy", "CustomPolicy"):
            return self._policy(value)
        if dataclasses.is_dataclass(value) and type(value).__module__.startswith("sherd."):
            return self._record(value)
        raise NoLiteralError(value)

    def _record(self, value: Any) -> str:
        """One of sherd's policies or placements, with the fields that are not at their default."""
        fields = ((each, getattr(value, each.name)) for each in dataclasses.fields(value) if each.repr)
        told = [f"{each.name}={self.of(chosen)}" for each, chosen in fields if chosen != each.default]
        return f"{self.name('sherd', type(value).__name__)}({', '.join(told)})"

    def _policy(self, value: Any) -> str:
        """A wrapping policy, torch's or sherd's."""
        kind = type(value).__name__
        given = self.of(value._module_classes if kind == "ModuleWrapPolicy" else value._lambda_fn)
        return f"{self.name('sherd.wrap', kind)}({given})"

    def _partial(self, value: functools.partial[Any]) -> str:
        named = [f"{name}={self.of(each)}" for name, each in value.keywords.items()]
        told = [self.of(each) for each in (value.func, *value.args)]
        self.module("functools")
        return f"functools.partial({', '.join(told + named)})"

    def _collection(self, value: Any) -> str:
        told = [self.of(each) for each in value]
        if isinstance(value, list):
            return f"[{', '.join(told)}]"
        if isinstance(value, tuple):
            return f"({', '.join(told)}{',' if len(told) == 1 else ''})"
        return f"{{{', '.join(sorted(told))}}}" if told else "set()"

    def _global(self, value: Any) -> str:
        """A class or a function, by the name that its module has for it."""
        module, path = value.__module__, value.__qualname__
        if module in ("sherd.wrap", "torch.distributed.fsdp.wrap") and path.lstrip("_") in wrap.__all__:
            return self.name("sherd.wrap", path.lstrip("_"))
        if getattr(nn, path, None) is value:
            return f"{self.name('torch', 'nn')}.{path}"
        found: Any = sys.modules.get(module)
        for part in path.split("."):
            found = getattr(found, part, None)
        # The main module's own names are looked up where the program runs.
        if "<" in path or (found is not value and module != "__main__"):
            raise NoLiteralError(value)
        self.name(module, path.partition(".")[0])
        return str(path)


def _block(module: str) -> int:
    """Where an import stands: 0 Python's own, 1 torch, 2 others."""
    top = module.partition(".")[0]
    return 0 if top in sys.stdlib_module_names else 1 if top == "torch" else 2
