"""`unsharded`: unsharded parameters outside forward and backward, for both front ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from sherd.api.module import require_module
from sherd.engine import Runtime, Unit, UnshardedCopies
from sherd.errors import UnsupportedError
from sherd.policy import UnshardTerms
from sherd.requirements import require_bool


@contextmanager
def unsharded(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Show unsharded parameters, in full precision, on the modules at and below `module` within this context.

    All ranks must enter it together. The parameters are copies. After the context, also when the body raises, modules
    show shards again, with all changes if `writeback`. Contexts may be nested; the outermost context of a unit writes
    its parameters back. Inside, a forward under `torch.no_grad()` computes with the copies and sends nothing; a forward
    with gradients may not run, and no optimizer may step the parameters. Forwards of other units may run. If parameters
    are changed between a forward and its backward, the backward raises, as for plain parameters that are changed in
    place.

    Args:
        module: any module: a unit, a module that contains units, or neither.
        recurse: include units below `module`; otherwise only the unit `module` itself. Units that own a tied parameter
            of an included unit are included too.
        writeback: keep changes: values, replaced parameters of the same shape (`module.weight = nn.Parameter(...)`),
            `requires_grad`, and, with `with_grads`, gradients.
        rank0_only: only rank 0 of the shard axis sees unsharded parameters, other ranks see their shards.
        offload_to_cpu: the unsharded parameters are in host memory; only one unit at a time is gathered on the device.
        with_grads: `.grad` of each parameter is unsharded too, or None if there is no gradient. Otherwise `.grad` is
            None inside.

    Raises:
        UnsupportedError: `rank0_only` with `writeback`, which would leave ranks with different values; `offload_to_cpu`
            with `with_grads`.
        StateError: a unit is in the middle of a forward or backward; or is in an outer context with fewer arguments
            set; or has gradients that wait for a reduction, with `with_grads`. Nothing is changed.
        PlacementError: on leaving with `writeback`, a parameter has another shape.
        CommError: other ranks do something else, or give other arguments.
    """
    require_module("unsharded expects a module", module)
    terms = UnshardTerms(writeback, rank0_only, offload_to_cpu, with_grads)
    arguments = {"recurse": recurse, **dataclasses.asdict(terms)}
    for name, value in arguments.items():
        require_bool(f"unsharded({name}={{}})", value)
    if writeback and rank0_only:
        raise UnsupportedError(
            "writeback=True and rank0_only=True is not supported: the other ranks would keep their old parts; pass "
            "writeback=False, or change the parameters on all ranks"
        )
    if offload_to_cpu and with_grads:
        raise UnsupportedError(
            "offload_to_cpu=True and with_grads=True is not supported: a gradient is where its parameter is; leave "
            "one of them out"
        )
    own = Unit.of(module)
    units = Unit.below(module) if recurse else [] if own is None else [own]
    owners = [owner for unit in units for owner in unit.tied_owners]
    each_once = {unit.id: unit for unit in (*units, *owners)}.values()
    to_lend = [unit for unit in each_once if not UnshardedCopies.are_lent(unit, terms)]
    words = [f"{name}={value}" for name, value in arguments.items()]
    Runtime.agree_on_call(to_lend, f"enters unsharded of {type(module).__name__}", words)
    with ExitStack() as lent:  # ends all copies, even if the end of one of them raises
        for unit in to_lend:
            lent.callback(UnshardedCopies(unit, terms).end)
        yield
