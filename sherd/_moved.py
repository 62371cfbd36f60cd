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
    "sherd.interchange.commands": "sherd.cli.convert",
    "sherd.interchange.words": "sherd.cli.convert_words",
    "sherd.doctor.command": "sherd.cli.doctor",
    "sherd.doctor.words": "sherd.cli.doctor_words",
    "sherd.doctor.own_model": "sherd.cli.own_model",
    "sherd.train.cli": "sherd.cli.main",
    "sherd.train.compare_command": "sherd.cli.compare",
    "sherd.train.plan": "sherd.cli.dry_run",
    "sherd.train.plan_command": "sherd.cli.plan",
    "sherd.train.planned_axes": "sherd.cli.planned_axes",
    "sherd.train.planned_model": "sherd.cli.planned_model",
    "sherd.train.planned_transformers": "sherd.cli.planned_transformers",
    "sherd.train.report_command": "sherd.cli.report",
    "sherd.train.terminal": "sherd.cli.terminal",
    "sherd.train.uses": "sherd.cli.uses",
    "sherd.train.using": "sherd.cli.using",
    "sherd.train.words": "sherd.cli.words",
    "sherd.checkpoint.agreement": "sherd.checkpoint.saving",
    "sherd.checkpoint.broadcast": "sherd.checkpoint.loading",
    "sherd.checkpoint.choosing": "sherd.checkpoint.pieces",
    "sherd.checkpoint.export": "sherd.checkpoint.full_tensors",
    "sherd.checkpoint.model_tensors": "sherd.checkpoint.catalog",
    "sherd.checkpoint.random_state": "sherd.checkpoint.items",
    "sherd.checkpoint.relayout": "sherd.tensor.relayout",
    "sherd.checkpoint.rekeying": "sherd.api.state_methods",
    "sherd.checkpoint.staging": "sherd.checkpoint.writing",
    "sherd.storage.blocks": "sherd.storage.files",
    "sherd.storage.opened": "sherd.storage.files",
    "sherd.storage.place": "sherd.storage.places",
    "sherd.storage.remote": "sherd.storage.places",
    "sherd.storage.writing": "sherd.storage.files",
    "sherd.interchange.comparing": "sherd.tools.convert.inspecting",
    "sherd.interchange.converting": "sherd.tools.convert.formats",
    "sherd.interchange.presets": "sherd.tools.convert.mapping",
    "sherd.interchange.showing": "sherd.tools.convert.inspecting",
    "sherd.interchange.torch_files": "sherd.tools.convert.of_torch",
    "sherd.interchange.verifying": "sherd.tools.convert.inspecting",
    "sherd.interchange.views": "sherd.tools.convert.mapped",
    "sherd.planning.arguments": "sherd.tools.plan.plan",
    "sherd.planning.blocks": "sherd.tools.plan.sharding",
    "sherd.planning.collectives": "sherd.tools.plan.operations",
    "sherd.planning.known_results": "sherd.tools.plan.operations",
    "sherd.planning.plain": "sherd.tools.plan.running",
    "sherd.planning.program": "sherd.tools.plan.in_words",
    "sherd.planning.rough": "sherd.tools.plan.planner",
    "sherd.simulate.allocator": "sherd.tools.simulate.reserved",
    "sherd.simulate.cluster_file": "sherd.tools.simulate.cluster",
    "sherd.simulate.meter": "sherd.tools.simulate.timeline",
    "sherd.simulate.moments": "sherd.tools.simulate.segments",
    "sherd.simulate.pipeline": "sherd.tools.simulate.play",
    "sherd.simulate.stretches": "sherd.tools.simulate.segments",
    "sherd.verify.reference": "sherd.tools.verify.training",
    "sherd.memory.predict": "sherd.memory.report",
    "sherd.memory.sizes": "sherd.engine.run.sizes",
    "sherd.tensor.local_step": "sherd.tensor.optimizers",
    "sherd.tensor.own": "sherd.tensor.sharded",
    "sherd.tensor.pairs": "sherd.tensor.elementwise",
    "sherd.tensor.places": "sherd.tensor.placement",
    "sherd.train.best": "sherd.train.saved",
    "sherd.train.display": "sherd.train.report",
    "sherd.train.exchange": "sherd.train.experts",
    "sherd.train.machines": "sherd.train.ranks",
    "sherd.train.pipeline": "sherd.train.passes",
    "sherd.train.trees": "sherd.train.config",
    "sherd.train.transformers_configs": "sherd.train.models",
    "sherd.wrap.walks": "sherd.wrap",
    "sherd.engine.build": "sherd.engine.make",
    "sherd.api.ignored": "sherd.api.fsdp1",
    "sherd.api.optim_states": "sherd.api.state_methods",
    "sherd.api.replicate": "sherd.api.fully_shard",
    "sherd.api.save_adapters": "sherd.api.save_pretrained",
    "sherd.api.state_dict_settings": "sherd.api.state_methods",
    "sherd.api.unit_sizes": "sherd.api.blocks",
    "sherd.comm.board": "sherd.guard.board",
    "sherd.comm.bounded_store": "sherd.guard.bounded_store",
    "sherd.comm.flight": "sherd.guard.flight",
    "sherd.comm.tree": "sherd.guard.order_check",
    "sherd.comm.watchdog": "sherd.guard.watchdog",
    "sherd.engine.run.attempt": "sherd.guard.attempt",
    "sherd.engine.run.away": "sherd.guard.coordinator",
    "sherd.engine.run.coordinator": "sherd.guard.coordinator",
    "sherd.engine.run.divergence": "sherd.guard",
    "sherd.engine.run.for_others": "sherd.guard.coordinator",
    "sherd.engine.run.guard": "sherd.guard.checker",
    "sherd.engine.run.ledger": "sherd.guard.flight",
    "sherd.engine.run.likeness": "sherd.guard.order_check",
    "sherd.engine.run.order_check": "sherd.guard.order_check",
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
