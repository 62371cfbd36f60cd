"""The terms of a unit, in words, which all ranks must have alike, and hashes of them and of the values of replicas.

A rank that cuts a parameter otherwise, or computes in another dtype, sends as many bytes as the others, in another
order. So ranks compare these words with each collective that they compare, and a rank whose words have changed compares
its next collective, too (`DivergenceChecker`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch.distributed.tensor import Shard

from sherd.engine import Group, ShardedParameter, Unit
from sherd.policy import MixedPrecisionPolicy

HASH_BYTES = 8
_LONGEST = 60
_ROW = 1024


def parameter_in_words(parameter: ShardedParameter) -> str:
    """Returns name, shape and dtype, and "frozen" if it is."""
    shape = "x".join(map(str, parameter.shape)) or "scalar"
    dtype = str(parameter.resting.dtype).removeprefix("torch.")
    return f"{parameter.name} {shape} {dtype}" + ("" if parameter.requires_grad else " frozen")


def _cut(parameter: ShardedParameter) -> str:
    placed = [f"Shard({each.dim})" if type(each) is Shard else repr(each) for each in parameter.shard_spec.placements]
    words = placed[0] if len(placed) == 1 else f"[{', '.join(placed)}]"
    return words if len(words) <= _LONGEST else f"{words[: _LONGEST - 16]}... ({_hash(words).hex()})"


def terms_of(unit: Unit) -> tuple[str, ...]:
    """Returns how the unit is cut, computes, sends and divides, in words. Units of one kind have the same."""
    policy, precision, comm = unit.policy, unit.precision, unit.mesh.comm
    divisor = unit.mesh.num_shards * unit.mesh.num_replicas if policy.divide_factor is None else policy.divide_factor
    terms = [f"gradients divided by {divisor:g}", f"transport {comm.transport!r}, parts of {comm.part_bytes} bytes"]
    if precision != MixedPrecisionPolicy():
        terms.append(str(precision))
    if unit.mesh.keeps_unsharded or unit.mesh.shards_replicas:
        terms.append("replicas own pieces" if unit.mesh.shards_replicas else "gathered parameters are kept")
    own = {name: getattr(policy, name) for name in ("all_gather", "reduce_scatter", "all_reduce_hook", "all_reduce")}
    terms += [f"{name} by {_name(call)}" for name, call in own.items() if call is not None]
    if policy.reduce_unused:
        terms.append("unused parameters are reduced")
    within = f"{unit.name}."
    return (*terms, *(f"{each.name.removeprefix(within)} placed {_cut(each)}" for each in unit.parameters))


def _name(call: object) -> str:
    return str(getattr(call, "__qualname__", type(call).__qualname__))


def digest_of(unit: Unit) -> int:
    """Returns a number that is another one when `unit` has other terms, without words for each call."""
    return unit.compared.know(lambda: _number("\n".join(terms_of(unit))))


def model_of(root: Unit) -> Sequence[Unit]:
    """Returns all units of the model with this root."""
    runtime = root.sealed_into()
    return (root,) if runtime is None else runtime.units


def made_as(root: Unit) -> int:
    """Returns a number that is the same on ranks that have made all units of a model alike, and frozen the same."""
    units = model_of(root)
    said = [str(digest_of(unit)) for unit in units]
    said += ["".join("01"[parameter.requires_grad] for parameter in unit.parameters) for unit in units]
    return _number(" ".join(said))


def values_hash(unit: Unit) -> bytes:
    """Returns a hash of the shards of `unit`, which replicas have alike, as `HASH_BYTES` bytes; the host waits."""
    sums = [_sum(weights.group) for weights in unit.weights if not weights.group.gathers_itself]
    return _hash(struct.pack(f"<{len(sums)}q", *sums).hex())


@torch.no_grad()
def _sum(group: Group) -> int:
    """Returns a sum over the bits of the shards that depends on their order, modulo 2**64: rows are added up, and each
    row counts as often as its number says."""
    bits = group.shard_buffer.detach().view(torch.int16 if group.dtype.itemsize % 2 == 0 else torch.uint8)
    full = bits.numel() // _ROW * _ROW
    rows = torch.cat((bits[:full].view(-1, _ROW).sum(1, dtype=torch.int64), bits[full:].sum(dtype=torch.int64).view(1)))
    return int((rows * torch.arange(1, rows.numel() + 1, device=rows.device)).sum())


def _number(said: str) -> int:
    return int.from_bytes(_hash(said), "little", signed=True)


def _hash(said: str) -> bytes:
    return hashlib.blake2b(said.encode(), digest_size=HASH_BYTES).digest()
