"""`comm_report`: the formats in which a model's parameters and gradients travel, their errors, and their bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from sherd.codecs import codec_of, encode_parts
from sherd.comm.agreement import groups_of
from sherd.comm.failures import announced, named
from sherd.comm.owner_sums import OwnerSums
from sherd.comm.transport import cut
from sherd.comm.wire_errors import WireErrors, relative_error, squares
from sherd.engine import Group, Runtime, ShardedParameter, Unit
from sherd.errors import StateError
from sherd.memory.report import names_of, root_unit
from sherd.policy import Codec, Reduction
from sherd.schedule.actions import Action, Event
from sherd.schedule.state import Keep
from sherd.tensor.ragged import local_part

WHAT = "comm_report"


@dataclass(frozen=True, slots=True)
class CommRow:
    """The messages of one unit in one phase of a step over one mesh axis, in one format.

    Attributes:
        unit: the name of the unit's module.
        axis: "shard" or "replicate", or "all" where gradients are added up in the order of ranks over both.
        phase: "gather" of parameters, or "reduce" of gradients.
        format: the name of a codec, or a dtype.
        unencoded: the dtype that would travel without codec and `Reduction`.
        error: the L2 norm of what arrives minus the exact values over that of the exact ones, of all ranks. NaN and
            infinities are left out. None: not measured.
        nbytes: the bytes that this rank sends in a step of one forward and one backward.
        saved: the bytes that it would send more in the dtype `unencoded`.
        is_above_limit: the format was a codec until its error was above `CommPolicy.error_limit`.
    """

    unit: str
    axis: str
    phase: str
    format: str
    unencoded: str
    error: float | None
    nbytes: int
    saved: int
    is_above_limit: bool = False

    @property
    def _key(self) -> _Key:
        return self.unit, self.axis, self.phase, self.format


_Key = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class _Way:
    """The `row` of one group. `measure` returns the sums of squares of gathers, the others have those of reductions."""

    row: CommRow
    measure: Callable[[], torch.Tensor | None] | None = None
    sent: WireErrors | None = None
    rounding: _Rounding | None = None

    @property
    def errors(self) -> list[WireErrors]:
        """The errors of what is sent, and of how gradients are rounded before."""
        of_rounding = None if self.rounding is None else self.rounding.errors
        return [each for each in (self.sent, of_rounding) if each is not None]


class _Rounding:
    """Sees the gradients of a group as autograd leaves them, and how the dtype rounds them that is to be sent."""

    def __init__(self, group: Group) -> None:
        self.group, self.errors = group, WireErrors()

    def arrives(self, index: int, unsharded: torch.Tensor) -> None:
        if unsharded.grad is None or unsharded.grad.layout is not torch.strided:
            return
        gradient, to = local_part(unsharded.grad), self.group.reduce_dtype
        to = torch.promote_types(to, gradient.dtype) if self.group.takes_any_gradient else to
        self.errors.add(squares(gradient.to(to), gradient))

    def borrowed(self) -> None: ...

    def copy(self, copy: Callable[[], None]) -> None:
        copy()

    def gives_back(self) -> None: ...


class _Steps:
    """Sees the events of steps, as whoever sees gradients must."""

    def begins(self, event: Event) -> None: ...

    def perform(self, action: Action, perform: Callable[[], None]) -> None:
        perform()

    def ended(self, event: Event) -> None: ...


class CommReport:
    """How the parameters and gradients of a model travel. `print` it for a table.

    As a context manager it measures the reductions inside the `with` block: of what is encoded, a part at a time, and
    of how the dtype that is sent rounds each gradient; `rows` then have these errors. All ranks enter and leave it
    together, between steps. Outside of the block nothing is slower.

    Attributes:
        rows: by unit, axis, phase and format.
    """

    rows: tuple[CommRow, ...]

    def __init__(self, model: nn.Module) -> None:
        self._mesh, self._model = root_unit(model, WHAT).mesh, weakref.ref(model)
        self._open, self._ways = ExitStack(), list[_Way]()
        ways, rows = list(_ways_of(model)), dict[_Key, CommRow]()
        for row in (way.row for way in ways):
            same = rows.get(row._key, replace(row, nbytes=0, saved=0))
            rows[row._key] = replace(same, nbytes=same.nbytes + row.nbytes, saved=same.saved + row.saved)
        self.rows = tuple(rows.values())
        self._compare(ways, [[] if way.measure is None else [way.measure()] for way in ways])

    @property
    def nbytes(self) -> int:
        """The bytes that this rank sends in a step."""
        return sum(row.nbytes for row in self.rows)

    @property
    def saved(self) -> int:
        """The bytes that it would send more without codecs and `Reduction`."""
        return sum(row.saved for row in self.rows)

    @property
    def held(self) -> int:
        """The bytes that measurements of reductions hold now on this rank: two float64 sums for each of them."""
        heard = (errors.listeners.get(self) for way in self._ways for errors in way.errors)
        return sum(each.nbytes for each in heard if each is not None)

    def __enter__(self) -> CommReport:
        """Measure reductions from now on.

        Raises:
            StateError: the model is gone, measured or tracked (`track_memory`) already; or its parameters have no data.
        """
        if (model := self._model()) is None or self._ways:
            raise StateError(f"{WHAT}: the model of this report is gone, or the report measures already; make another")
        runtime = Runtime.of(root_unit(model, WHAT), model)
        ways = [way for way in _ways_of(model) if way.row.phase == "reduce"]
        of_groups = {way.rounding.group: way.rounding for way in ways if way.rounding is not None}

        def rounding(number: int, group: int, _: Sequence[ShardedParameter]) -> _Rounding:
            own = runtime.units[number].gradients[group].group
            return of_groups.get(own) or _Rounding(own)

        self._open.enter_context(runtime.observed(_Steps(), rounding))
        self._ways = ways
        for errors in (errors for way in ways for errors in way.errors):
            errors.listeners[self] = None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Measure no more. Collective, unless an exception has ended the block."""
        ways, self._ways = self._ways, []
        self._open.close()
        sums = [[errors.take(self) for errors in way.errors] for way in ways]
        for errors in (errors for way in ways for errors in way.errors):
            errors.listeners.pop(self, None)
        if kind is None:
            self._compare(ways, sums)

    @torch.no_grad()
    def _compare(self, ways: Sequence[_Way], sums: Sequence[Sequence[torch.Tensor | None]]) -> None:
        """Give `rows` the errors of all ranks, by one message. `sums` are this rank's, of each way."""
        keys = list(dict.fromkeys(way.row._key for way in ways))
        totals = torch.zeros(len(keys), 3, dtype=torch.float64, device=self._mesh.device)
        for way, own in zip(ways, sums, strict=True):
            for each in (each for each in own if each is not None):
                totals[keys.index(way.row._key)] += torch.cat((each.to(totals.device), totals.new_ones(1)))
        with announced(groups_of(self._mesh), "compares errors for a report", WHAT, is_rare=True):
            for group in groups_of(self._mesh):
                with named(WHAT, group):
                    dist.all_reduce(totals, group=group)
        found = zip(keys, totals.tolist(), strict=True)
        errors = {key: relative_error(error, exact) for key, (error, exact, is_measured) in found if is_measured}
        self.rows = tuple(replace(row, error=errors.get(row._key, row.error)) for row in self.rows)

    def __str__(self) -> str:
        lines = [("unit", "axis", "phase", "format", "error", "bytes a step", "saved")]
        for row in self.rows:
            error = "not measured" if row.error is None else f"{row.error:.2g}"
            form = f"{row.format} (above the limit)" if row.is_above_limit else row.format
            lines.append((row.unit, row.axis, row.phase, form, error, f"{row.nbytes:,}", f"{row.saved:,}"))
        lines.append(("all", "", "", "", "", f"{self.nbytes:,}", f"{self.saved:,}"))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if at < 4 else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )


def comm_report(model: nn.Module) -> CommReport:
    """Returns how the parameters and gradients of `model` travel: formats, errors, and bytes on this rank.

    The error of gathers is measured at the call, of the shards as they are: this rank's are encoded and decoded, and
    nothing is gathered. The error of reductions exists only where gradients are reduced:

        with sherd.comm_report(model) as report:
            loss(model(batch)).backward()
        print(report)

    Integer and complex parameters travel unencoded, in rows of their own. Bytes are those of a step of one forward and
    one backward: a message to each other rank, twice for parameters that are gathered again in backward. What a
    backend sends in their place, as a ring does, may differ. Not counted are gathers over a smaller mesh
    (`reshard_after_forward=2`), and the rounding of sums in the dtype in which a backend adds.

    All ranks must call it together, between steps: errors are sums over all ranks, by one all-reduce in float64.

    Args:
        model: the root of the units, on which `fully_shard` was called last, or the wrapper.

    Returns:
        The report; also a context that measures reductions.

    Raises:
        ModuleError: `model` is not a sharded module.
        CommError: not all ranks make this call.
    """
    return CommReport(model)


# The ways of a model


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ways_of(model: nn.Module) -> Iterator[_Way]:
    units = Unit.below(model)
    for name, unit in zip(names_of(model, units), units, strict=True):
        keep = Keep.under(unit.policy.reshard_after_forward, unit is units[0], unit.mesh.num_shards)
        is_again = keep is Keep.NOTHING and unit.policy.unshard_in_backward
        for at, weights in enumerate(unit.weights):
            yield from _gathers(name, unit, at, 1 + (is_again and weights.plan.frees_unsharded))
            if weights.group.trained:
                yield from _reductions(name, unit, at)


def _gathers(name: str, unit: Unit, at: int, times: int) -> Iterator[_Way]:
    weights, group = unit.weights[at], unit.weights[at].group
    mesh, dtype = group.mesh, group.compute_dtype
    measure: Callable[[], torch.Tensor | None] | None = partial(_rounded, group)
    if mesh.shards_replicas:
        nbytes = group.sizes[mesh.piece] * dtype.itemsize * (mesh.num_replicas - 1)
        yield _Way(CommRow(name, "replicate", "gather", _name(dtype), _name(dtype), None, nbytes, 0), measure)
    if mesh.num_shards == 1 or weights.plan.is_never_gathered:
        return
    own, others = group.shard_sizes[mesh.shard_rank], mesh.num_shards - 1
    form, plain = _name(dtype), weights.sent_bytes(times) * others
    if group.gathers_itself:
        form, measure = type(group.shard_buffer).__name__, None
    nbytes, codec = plain, weights.plan.codec
    is_above = codec is not None and weights.is_unencoded
    if codec is not None and not is_above:
        form, nbytes, measure = codec.name, codec.num_bytes(own) * times * others, partial(_encoded, unit, at, codec)
    row = CommRow(name, "shard", "gather", form, _name(dtype), None, nbytes, plain - nbytes, is_above)
    yield _Way(row, measure)


@torch.no_grad()
def _rounded(group: Group) -> torch.Tensor:
    """Returns the sums of squares of this rank's shards in compute's dtype."""
    sums = torch.zeros(2, dtype=torch.float64, device=group.shard_buffer.device)
    for each in group.optimizer_params if group.compute_dtype != group.dtype else ():  # not of the padding between
        part = group.shard_buffer[each.extent.start : each.extent.stop]
        sums += squares(part.to(group.compute_dtype), part)
    return sums


@torch.no_grad()
def _encoded(unit: Unit, at: int, codec: Codec) -> torch.Tensor | None:
    """Returns the sums of squares of this rank's shard as `codec` encodes it."""
    own, errors = unit.weights[at].shard_to_encode(), WireErrors()
    errors.listeners[WHAT] = None
    errors.note(codec, own, encode_parts(codec, own, [own.numel()])[0], [own.numel()])
    return errors.take(WHAT)


def _reductions(name: str, unit: Unit, at: int) -> Iterator[_Way]:
    group, plan = unit.weights[at].group, unit.weights[at].plan
    mesh, plain, given = group.mesh, group.reduce_dtype, group.mesh.comm.reduce
    if given is not None and not given.is_encoded and plain.is_floating_point:
        plain = unit.precision.reduce_dtype or group.grad_dtype
    is_one_axis = mesh.num_shards == 1 or mesh.num_replicas == 1
    if plan.owned is not None and mesh.in_order is not None:
        axis = "all" if not is_one_axis else "shard" if mesh.num_shards > 1 else "replicate"
        yield _reduction(name, axis, group, given, plan.owned, mesh.in_order.part, plain, mesh.holds_copies, True)
        return
    if mesh.num_shards > 1:
        yield _reduction(name, "shard", group, given, plan.reduced_by_rank, mesh.shard_rank, plain, False, True)
    if mesh.num_replicas > 1:
        given = mesh.comm.reductions[1]
        plain = mesh.reduce_transport.sum_dtype(group.reduce_dtype) if mesh.num_shards > 1 else plain
        sizes = plan.reduced_by_piece.of(mesh.pieces_of(mesh.shard_rank))
        sizes = sizes if mesh.shards_replicas else cut(sum(sizes), mesh.num_replicas)
        yield _reduction(
            name, "replicate", group, given, sizes, mesh.replica, plain, mesh.holds_copies, mesh.num_shards == 1
        )


def _reduction(
    unit: str,
    axis: str,
    group: Group,
    given: Reduction | None,
    sizes: Sequence[int],
    own: int,
    plain: torch.dtype,
    comes_back: bool,
    is_first: bool,
) -> _Way:
    """Returns the way of parts of `sizes` elements to their owners, and of the sum back to all, if it `comes_back`.

    The gradients of the first way of a group are rounded when they are copied for it.
    """
    transport = group.mesh.replicate_transport if axis == "replicate" else group.mesh.reduce_transport
    errors = transport.errors if isinstance(transport, OwnerSums) else None
    wire = group.reduce_dtype if is_first or given is None else given.wire_dtype(plain)
    codec = codec_of(given.wire) if given is not None and wire.is_floating_point else None
    is_above = codec is not None and errors is not None and errors.is_unencoded
    codec = None if is_above else codec

    def sent(bytes_of: Callable[[int], int]) -> int:
        parts = list(map(bytes_of, sizes))
        return sum(parts) - parts[own] + comes_back * (len(parts) - 1) * parts[own]

    nbytes = sent(wire.itemsize.__mul__ if codec is None else codec.num_bytes)
    last = None if codec is None or errors is None else errors.last
    form, saved = _name(wire) if codec is None else codec.name, sent(plain.itemsize.__mul__) - nbytes
    rounding = _Rounding(group) if is_first and codec is None else None
    return _Way(
        CommRow(unit, axis, "reduce", form, _name(plain), last, nbytes, saved, is_above), None, errors, rounding
    )
