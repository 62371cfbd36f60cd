"""How does a user work with unsharded parameters outside forward and backward? `unsharded`, for both front ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from sherd.engine.between.unsharded import UnshardedCopies, require_covers, require_lendable
from sherd.engine.run.seal import unit_of, units_below
from sherd.engine.run.unit import Unit
from sherd.errors import PolicyTypeError, UnsupportedError
from sherd.policy import UnshardTerms, require_bool


@contextmanager
def unsharded(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Within this context the parameters below `module` are whole, in full precision, and the modules' own.

    All ranks must enter it together. The parameters are copies: after the context modules show shards again, with what
    was changed if `writeback`, also when the body raises. Contexts may be nested; the outermost that lends a unit's
    parameters is the one that writes them back. No forward of a unit whose parameters are lent may run inside, and no
    optimizer may step them; forwards of other units may. Changing parameters between a forward and its backward makes
    the backward raise, as it does for plain parameters that are changed in place.

    Args:
        module: any module: a unit, one that contains units, or neither.
        recurse: the units below too; False lends only the parameters of the unit that `module` is. Units that own a
            tied parameter of these are lent with them.
        writeback: keep changes: values, replaced parameters of the same shape (`module.weight = nn.Parameter(...)`),
            `requires_grad`, and, with `with_grads`, gradients.
        rank0_only: only rank 0 of the shard axis sees unsharded parameters, others see their shards.
        offload_to_cpu: the unsharded parameters are in host memory, one unit at a time on its way there.
        with_grads: `.grad` of each parameter is whole too; None where it has none. Otherwise it is None inside.

    Raises:
        UnsupportedError: `rank0_only` with `writeback`, which would leave ranks with different values; `offload_to_cpu`
            with `with_grads`.
        StateError: one of the units is in the middle of a forward or backward, is lent by a context around this one
            that gives less, or has gradients that wait for a reduction and were asked for. Nothing is lent then.
        PlacementError: on leaving with `writeback`, a parameter has another shape.
    """
    terms = UnshardTerms(writeback, rank0_only, offload_to_cpu, with_grads)
    _check(module, terms, recurse=recurse, **dataclasses.asdict(terms))
    to_lend = []
    for unit in _units(module, recurse):
        if unit.lent is None:
            require_lendable(unit, terms)
            to_lend.append(unit)
        else:
            require_covers(unit, terms)
    with ExitStack() as lent:  # takes each back, even if another one cannot be
        for unit in to_lend:
            lent.callback(UnshardedCopies(unit, terms).end)
        yield


def _check(module: nn.Module, terms: UnshardTerms, **flags: Any) -> None:
    if not isinstance(module, nn.Module):
        raise PolicyTypeError(f"unsharded expects a module, got a {type(module).__name__}")
    for name, value in flags.items():
        require_bool(f"unsharded({name}={{}})", value)
    if terms.writeback and terms.rank0_only:
        raise UnsupportedError(
            "writeback=True and rank0_only=True is not supported: the other ranks would keep their old parts; pass "
            "writeback=False, or change the parameters on all ranks"
        )
    if terms.offload_to_cpu and terms.with_grads:
        raise UnsupportedError(
            "offload_to_cpu=True and with_grads=True is not supported: a gradient lies where its parameter does; leave "
            "one of them out"
        )


def _units(module: nn.Module, recurse: bool) -> list[Unit]:
    """Those at and below `module`, and those that own tied parameters of theirs: each once, outermost first."""
    own = unit_of(module)
    found = units_below(module) if recurse else [] if own is None else [own]
    owners = [owner for unit in found for owner in unit.companions]
    return list({unit.id: unit for unit in (*found, *owners)}.values())
