"""The record of one parameter: its shard, its unsharded form, and the places in the modules where it is registered.

A Parameter object is replaced once, when it is sharded. From then on the module shows the shard (a DTensor), which the
optimizer owns, and the unsharded parameter during forward and backward only. The replaced object knows its successor.

A unit's shards may be merged into one flat parameter. Then the optimizer owns the flat parameter, the shards are views
of it, and modules hold them as plain attributes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import (
    DTensorSpec,
    attributes_of,
    dtensor,
    dtensor_spec,
    grad_dtype_of,
    in_functional_call,
    local_tensor,
    set_grad_dtype,
    spec_of,
)
from sherd.comm.mesh import DataMesh
from sherd.comm.streams import Handoff
from sherd.engine.state.compared import Compared
from sherd.errors import OwnershipError, UnsupportedError, WriteBackError
from sherd.layout.extent import Extent
from sherd.layout.placement import Cut
from sherd.layout.runs import whole_on
from sherd.tensor.gather import part_given, shard_of
from sherd.tensor.placement import in_dtype
from sherd.tensor.ragged import as_dtensor
from sherd.tensor.spmd_types import SpmdTypes, untyped
from sherd.tensor.tensor_parallel import own_spec

if TYPE_CHECKING:
    from sherd.engine.state.fetching import RestingPlace
    from sherd.engine.state.masters import Masters

_records: dict[int, tuple[weakref.ref[ShardedParameter], weakref.ref[torch.Tensor] | None]] = {}
"""The record of each tensor, by the tensor's id, and a reference to the tensor where the record does not hold it.

Nothing is written on tensors: it would travel into copies and files. And no weak reference is taken to a shard, for
torch refuses to swap a tensor that has one (`module.to()`); a shard is compared with its record's.
"""


def record_of(tensor: torch.Tensor) -> ShardedParameter | None:
    """Returns the record of a shard, an unsharded parameter, or a replaced Parameter; None for other tensors."""
    entry = _records.get(id(tensor))
    if entry is None:
        return None
    record, tensor_ref = entry[0](), entry[1]
    if record is None:
        return None
    # Another tensor may have got the id since.
    is_known = (
        tensor is record.shard or tensor is record.optimizer_param if tensor_ref is None else tensor is tensor_ref()
    )
    return record if is_known else None


def name_of(parameter: torch.Tensor) -> str:
    """Returns the name of `parameter` if it is a unit's, else its shape, in words."""
    record = record_of(parameter)
    return f"a plain parameter of shape {tuple(parameter.shape)}" if record is None else record.name


def _forget(key: int, died: object) -> None:
    if any(died is each for each in _records.get(key, ())):
        _records.pop(key, None)


def as_sharded(parameter: torch.Tensor) -> DTensor:
    """Returns `parameter`, a shard or a flat parameter, as a DTensor."""
    assert isinstance(parameter, DTensor), "what the optimizer owns is a DTensor"
    return parameter


class ParameterPlace:
    """An attribute of a module that holds a parameter.

    Attributes:
        module: a weak reference to the module, which a strong one would keep alive.
        registered: the parameter is among the module's parameters. If False, it is a plain attribute, which
            `parameters()` and `state_dict()` do not see.
    """

    __slots__ = ("attribute", "module", "parameters", "registered")

    def __init__(self, module: nn.Module, attribute: str) -> None:
        # The dict, which does not keep its module alive. As it is held here, no other dict gets its id, the `key`.
        self.parameters = module._parameters
        self.attribute = attribute
        self.registered = True
        self.module = weakref.ref(module)

    @property
    def key(self) -> tuple[int, str]:
        return id(self.parameters), self.attribute

    @property
    def exists(self) -> bool:
        """True if the module still exists. If not, another module may have its ids."""
        return self.module() is not None

    @property
    def module_id(self) -> int:
        """The id of the module, or of None if the module is gone."""
        return id(self.module())

    @property
    def shown(self) -> Any:
        """The module's attribute now: the parameter, what a user put in its place, or None if it was deleted."""
        shown = self.parameters.get(self.attribute)  # nn.Module puts a user's new Parameter here, registered or not
        return self._shown_in.get(self.attribute) if shown is None else shown

    def on_copy(self, copies: Mapping[int, Any]) -> ParameterPlace | None:
        """Returns the place on the module's copy, None if there is no copy. `copies` are keyed by the original's id."""
        module = self.module()
        copied = None if module is None else copies.get(id(module))
        return None if copied is None else ParameterPlace(copied, self.attribute)

    def shows(self, parameter: nn.Parameter) -> bool:
        return self.shown is parameter

    def show(self, parameter: nn.Parameter) -> None:
        # Past nn.Module.__setattr__, which would cost ten times as much.
        if not self.registered:
            self.parameters[self.attribute] = None
        self._shown_in[self.attribute] = parameter

    def swap(self, old: nn.Parameter, new: nn.Parameter) -> nn.Parameter | None:
        """Show `new`. Returns `old`, or the Parameter that a user put in its place, or None if a user deleted it."""
        shown = self.shown
        self.show(new)
        is_other = shown is not new and isinstance(shown, nn.Parameter)
        return shown if is_other or (shown is None and self.exists) else old

    def register(self, registered: bool) -> None:
        """Make it one of the module's parameters, in its old order among them, or a plain attribute."""
        if registered == self.registered:
            return
        shown = self.shown
        if registered:
            self._shown_in.pop(self.attribute, None)
        else:
            self.parameters[self.attribute] = None
        self.registered = registered
        self._shown_in[self.attribute] = shown

    @property
    def _shown_in(self) -> dict[str, Any]:
        if self.registered:
            return self.parameters
        module = self.module()
        return {} if module is None else module.__dict__


def key_of(module: nn.Module, attribute: str) -> tuple[int, str]:
    """Returns the key of a place, which is valid as long as the module lives."""
    return id(module._parameters), attribute


class Merged(Protocol):
    """The part of a flat parameter that its members use. `names` are the names of all members."""

    parameter: nn.Parameter
    names: tuple[str, ...]


class Owner(Protocol):
    """The part of a unit that its parameters use."""

    id: int
    compared: Compared
    place: RestingPlace
    was_unsynced: bool
    late: Handoff | None

    @property
    def unsynced(self) -> str:
        """The unit's name if gradients wait for a reduction, else empty."""

    def shards_written(self) -> None:
        """Note that shards have new values: unsharded parameters made from the old ones are stale."""

    def before_step(self) -> None:
        """Prepare for an optimizer to write to the shards. Raises if values would be overwritten, or were lost."""

    @property
    def gathers_as_one(self) -> bool:
        """Whether the user has a custom collective or a hook, which gets all parameters of the unit at once."""

    @property
    def steps_in_backward(self) -> bool:
        """Whether an optimizer steps the unit within backward."""

    def own_gradients(self, owners: Mapping[ShardedParameter, int]) -> None:
        """Let the full gradients of these parameters be reduced to these ranks of their cuts from now on."""


@dataclass(eq=False)
class ShardedParameter:
    """The record of one parameter.

    Attributes:
        shape: the shape of the unsharded parameter; of its local tensor under tensor parallelism.
        dtype: the dtype of the same tensor.
        mesh: the mesh that the parameter is sharded over.
        plan_id: the number of the unit's plan that cut the parameter, if it is cut into runs.
        shard_spec: the layout of the shard as a DTensor.
        unsharded_spec: the layout of the unsharded parameter as a DTensor, None for a plain tensor.
        types: the types of a plain tensor that is placed on other axes, too; its layout on them is `unsharded_spec`.
        holder: the first module that had the parameter when it was sharded.
        flat: the flat parameter that the shard was merged into, if any.
        restored: a user's function that makes the unsharded DTensor of its local tensor, if any.
        lent: an unsharded copy that the user works with (`sherd.unsharded`), and that modules show instead.
        attributes: what users write on the parameter (`weight.no_decay = True`): the `__dict__` of all its forms.
        is_placed_by_default: the user gave no placement.
        gradient_owner: the rank of the cut that gets the full reduced gradient; None: it is cut as the shard is.
        param_dtype: the dtype that it is gathered in, if it is of floating point; None: its own.
        grad_dtype: the `grad_dtype` that a user has set, in a tuple, which is empty if none was.
        masters: the masters of the group that the parameter is in, if it has any, and the parameter's place in them.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    mesh: DataMesh
    cut: Cut
    plan_id: int
    shard_spec: DTensorSpec
    unsharded_spec: DTensorSpec | None
    shard: nn.Parameter
    holder: weakref.ref[nn.Module]
    places: list[ParameterPlace] = field(default_factory=list)
    flat: Merged | None = None
    restored: Callable[[torch.Tensor], torch.Tensor] | None = None
    lent: nn.Parameter | None = None
    attributes: dict[str, object] = field(default_factory=dict)
    is_placed_by_default: bool = False
    gradient_owner: int | None = None
    param_dtype: torch.dtype | None = None
    grad_dtype: tuple[torch.dtype | None, ...] = ()
    types: SpmdTypes | None = None
    masters: tuple[Masters, Extent] | None = field(default=None, init=False)
    _begun: tuple[list[float], list[float]] | None = None
    _owner: weakref.ref[Owner] | None = None
    # By id. An entry goes with its Parameter, before another tensor can get the id.
    _taken: weakref.WeakValueDictionary[int, nn.Parameter] = field(default_factory=weakref.WeakValueDictionary)

    of = staticmethod(record_of)
    name_of = staticmethod(name_of)

    def __post_init__(self) -> None:
        self.keep_attributes()

    def begin(self, whole: torch.Tensor) -> None:
        """Note a few numbers of the unsharded tensor that this rank has cut, and of its part."""
        is_plain = type(whole) in (torch.Tensor, nn.Parameter) and not whole.is_meta and whole.is_contiguous()
        if is_plain and whole.ndim > 1 and whole.is_floating_point() and whole.dtype.itemsize > 1:
            self._begun = _few(whole), _few(self.local)

    def began_otherwise(self, gathered: torch.Tensor) -> bool:
        """Returns True if other ranks have cut other numbers: `gathered` has them, and this rank's part is unchanged.

        Asked at the first gather, it finds models that ranks built with different seeds.
        """
        begun, self._begun = self._begun, None
        if begun is None or not begun[1] or repr(_few(self.local)) != repr(begun[1]):
            return False  # loaded or filled since
        cut = torch.tensor(begun[0], dtype=torch.float64).to(self.dtype).to(gathered.dtype)
        return repr(_few(gathered)) != repr(cut.tolist())

    def have_masters(self, masters: Masters | None, extent: Extent) -> None:
        self.masters = None if masters is None else (masters, extent)

    def share_attributes(self, form: torch.Tensor) -> None:
        """Let `form`, a form of this parameter, share the attributes that users write on any form.

        A form whose class has set attributes keeps them, and gets a copy of the others.
        """
        if self.types is not None and not isinstance(form, DTensor):
            self.types.annotate(form)
        own = vars(form)
        form.__dict__ = self.attributes if own.keys() <= self.attributes.keys() else {**self.attributes, **own}

    def keep_attributes(self) -> None:
        """Let the shard share the attributes, if it is new, or `module.to()` swapped its `__dict__` for another's."""
        written = vars(self.shard)
        if written is not self.attributes:
            self.attributes.update(written)
            self.share_attributes(self.shard)

    def keep_grad_dtype(self) -> bool:
        """Note the `grad_dtype` of the shard. A shard that has lost it (`module.to()`, `assign=True`) gets it again.

        Returns:
            True if a user has set another one since the last call.
        """
        given = grad_dtype_of(self.shard) if self.flat is None else self.grad_dtype
        if self.masters is not None and not self.grad_dtype and given in ((), (None,)):
            if self.flat is None:
                set_grad_dtype(self.shard, None)
            return False  # the group's: float32 for masters, or what others give
        if self.grad_dtype and not given:
            set_grad_dtype(self.shard, self.grad_dtype[0])
        changed, self.grad_dtype = bool(given) and given != self.grad_dtype, given or self.grad_dtype
        return changed

    def forget_grad_dtype(self) -> None:
        """Let gradients have the dtype of the parameter, as all have in a flat parameter."""
        self.grad_dtype = ()

    def claim(self, tensor: torch.Tensor) -> None:
        """Remember that `tensor` is a form of this parameter: shard, unsharded form, or replaced Parameter."""
        key = id(tensor)
        forget = functools.partial(_forget, key)
        is_held = tensor is self.shard or tensor is self.optimizer_param
        _records[key] = (weakref.ref(self, forget), None if is_held else weakref.ref(tensor, forget))

    def belong_to(self, owner: Owner) -> None:
        self._owner = weakref.ref(owner)

    @property
    def owner(self) -> Owner | None:
        return None if self._owner is None else self._owner()

    def exchange(self, shard: nn.Parameter) -> None:
        """Make `shard`, a DTensor of the same layout, the shard. It succeeds the old one."""
        self.keep_grad_dtype()
        before, self.shard = self.shard, shard
        self.keep_grad_dtype()
        self.share_attributes(shard)
        self.claim(before)
        self.claim(shard)
        self.show(shard)

    def merge(self, flat: Merged) -> None:
        """Make the shard a part of `flat`, which is the optimizer's parameter from now on."""
        self.flat = flat
        self.forget_grad_dtype()
        self.claim(flat.parameter)
        self.register(False)

    @property
    def is_on_several_ranks(self) -> bool:
        """Whether more than one rank holds elements of the parameter, or of the flat parameter that it is in."""
        return self.flat is not None or self.mesh.holds_copies or self.cut.num_holders > 1

    @property
    def is_on_all_ranks(self) -> bool:
        """Whether each rank holds elements of the parameter itself."""
        return self.flat is None and self.cut.num_holders == self.cut.num_ranks

    @property
    def optimizer_param(self) -> nn.Parameter:
        """The optimizer's parameter: the shard, or the flat parameter that it is part of."""
        return self.shard if self.flat is None else self.flat.parameter

    @property
    def requires_grad(self) -> bool:
        return (self.shard if self.flat is None else self.flat.parameter).requires_grad

    @property
    def resting(self) -> torch.Tensor:
        """The local tensor of `optimizer_param`: the memory that the optimizer writes."""
        return local_tensor(as_sharded(self.optimizer_param))

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard as a plain tensor, `cut.local_shape(rank)`."""
        return local_tensor(as_sharded(self.shard))

    def write(self, part: torch.Tensor) -> None:
        """Write this rank's part, in any dtype, to the shard. Elements that change are their own masters."""
        if self.masters is None:
            self.local.copy_(part)
        else:
            masters, own = self.masters
            local = part.to(self.local.device, self.dtype)
            masters.put(own, masters.of_weights(own, local.reshape(-1)))

    def around(self, local: torch.Tensor) -> DTensor:
        """Returns a DTensor around `local`, in the layout of the shard and the dtype of `local`."""
        return as_dtensor(local, in_dtype(spec_of(as_sharded(self.shard)), local.dtype))

    @property
    def forms(self) -> tuple[torch.Tensor, ...]:
        """The tensors by which the shard may be written."""
        return self.optimizer_param, self.shard, self.resting, self.local

    def masters_of(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the masters of a part of the shard, float32. `part` is the view of a tensor like `local` on meta."""
        masters, own = self._own_masters
        held = Extent(own.start + int(part.storage_offset()), part.numel())
        return masters.part(held).view(part.shape)

    def put_masters(self, local: torch.Tensor) -> None:
        """Make `local`, float32 in the shape of the shard, the masters, and the shard these rounded."""
        masters, own = self._own_masters
        masters.put(own, local.reshape(-1))

    @property
    def _own_masters(self) -> tuple[Masters, Extent]:
        assert self.masters is not None, "a caller looks whether there are masters"
        return self.masters

    @property
    def gradient_cut(self) -> Cut:
        """The cut of the reduced gradient, and of the optimizer's state of its shape."""
        owner = self.gradient_owner
        return self.cut if owner is None else whole_on(owner, tuple(self.shape), self.mesh.num_pieces)

    def gradient_spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Returns the layout of the reduced gradient as a DTensor of `dtype`."""
        if self.gradient_owner is not None:
            return own_spec(self.mesh, self.gradient_cut, self.shape, dtype)
        return in_dtype(spec_of(as_sharded(self.optimizer_param)), dtype)

    def register(self, registered: bool) -> None:
        """Make the parameter one of its modules' parameters, or only an attribute."""
        for place in self.places:
            place.register(registered)

    def hang_on(self, places: Sequence[ParameterPlace]) -> None:
        self.places = list(places)

    def rename(self, module_names: dict[int, str]) -> None:
        """Take the name from the first of its modules in `module_names`, the names of modules by id."""
        for place in self.places:
            name = module_names.get(place.module_id)
            if name is not None:
                self.name = f"{name}.{place.attribute}" if name else place.attribute
                return

    def show(self, parameter: nn.Parameter) -> None:
        """Show `parameter`, a form of this one, at every place, unless a copy is lent."""
        if self.lent is None:
            for place in self.places:
                place.show(parameter)

    def notice_replaced(self) -> bool:
        """Take the values of a Parameter that the user put in the shard's place. Returns whether there was one.

        The shard stays, or gets memory if it was on the meta device. It succeeds the Parameter in optimizers.

        Raises:
            UnsupportedError: the Parameter is set for one call of `torch.func.functional_call`.
            OwnershipError: the Parameter is another parameter's shard (tied weights), or the user deleted the shard.
            WriteBackError: the Parameter has neither the unsharded shape, nor as many elements as this rank holds.
        """
        noticed = False
        for place in self.places if self.lent is None else ():
            if place.shows(self.shard):
                continue
            shown = place.shown
            if isinstance(shown, torch.Tensor) and in_functional_call():
                raise UnsupportedError(
                    f"torch.func.functional_call gave a value for {self.name}, which is sharded: what is gathered "
                    "would take its place. Call it on a plain copy of the model, made before fully_shard; to change "
                    "values for good, use load_state_dict() or sherd.unsharded(model)"
                )
            if shown is None and place.exists:
                raise _changed_by_hand(f"{self.name} was deleted, or set to None,")
            if isinstance(shown, nn.Parameter):
                other = record_of(shown)
                is_plain = not isinstance(shown, DTensor)
                if other is self and is_plain and shown.numel() > 0 and shown.untyped_storage().size() == 0:
                    place.show(self.shard)  # an unsharded one, freed meanwhile, that functional_call put back
                    continue
                if other is not None and other is not self:
                    raise _changed_by_hand(f"{self.name} was tied to {other.name}")
                self._take_values(shown)
                self.attributes.update(untyped(attributes_of(shown)))
                if other is None:
                    self.claim(shown)
                    self._taken[id(shown)] = shown
                place.show(self.shard)
                noticed = True
        return noticed

    def has_taken(self, parameter: nn.Parameter) -> bool:
        """Returns whether the user had put `parameter` in the shard's place. Now no module has it."""
        return self._taken.get(id(parameter)) is parameter

    @torch.no_grad()
    def _take_values(self, value: torch.Tensor) -> None:
        if isinstance(value, DTensor):
            value = local_tensor(value) if value.placements == self.shard_spec.placements else value.full_tensor()
        local = self.local
        part = part_given(value, tuple(self.shape), local, self.part_of)
        if part is None:
            raise WriteBackError(
                f"{self.name} was replaced by a tensor of shape {tuple(value.shape)}; it is {tuple(self.shape)}, of "
                f"which this rank holds {local.numel()} elements: give the full tensor or this rank's part, or build "
                "the model again"
            )
        if local.is_meta:
            # A copy even in the same dtype: a view would keep the user's full tensor alive under the shard.
            own = part.to(local.dtype, copy=True, memory_format=torch.contiguous_format)
            self.exchange(nn.Parameter(as_dtensor(own, self.shard_spec), requires_grad=self.shard.requires_grad))
        else:
            local.copy_(part)

    def restore_with(self, restored: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.restored = restored

    @property
    def shown_spec(self) -> DTensorSpec | None:
        """The layout as a DTensor of what modules see of the unsharded parameter; None if that is a plain tensor."""
        return None if self.types is not None else self.unsharded_spec

    def as_unsharded(self, plain: torch.Tensor) -> torch.Tensor:
        """Returns `plain`, of shape `shape`, as modules see it, uncopied: as a DTensor if the parameter was one."""
        return plain if self.types is not None else self.on_its_mesh(plain)

    def on_its_mesh(self, plain: torch.Tensor) -> torch.Tensor:
        """Returns `plain`, of shape `shape`, uncopied: as a DTensor if the parameter is placed on other axes, too."""
        if self.restored is not None:
            return self.restored(plain)
        if self.unsharded_spec is None:
            return plain
        old = self.unsharded_spec
        # A spec of its own even in the same dtype: the user's tensor may have had other strides than `plain`.
        return dtensor(plain, dtensor_spec(old.mesh, old.placements, old.shape, plain.dtype))

    def part_of(self, unsharded: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of `unsharded`, of shape `shape`: a view where the cut allows it."""
        return shard_of(unsharded, self.cut, self.mesh.piece)

    def lend(self, unsharded: nn.Parameter) -> None:
        """Show `unsharded` until it is taken back."""
        self.share_attributes(unsharded)
        self.show(unsharded)
        self.lent = unsharded

    def take_back(self) -> list[object]:
        """Show the shard again. Returns what each place showed: the lent copy, or what the user put in its place."""
        shown = [place.shown for place in self.places]
        self.lent = None
        self.show(self.shard)
        return shown


def _changed_by_hand(change: str) -> OwnershipError:
    return OwnershipError(
        f"{change} after it was sharded. Call sherd.refresh(model) after such a change, on all ranks; under "
        "use_orig_params=False make it before the model is wrapped"
    )


# For all parameters of a group at once. They run twice per gather: one call instead of one for each parameter.


def _few(tensor: torch.Tensor) -> list[float]:
    values: list[float] = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // 16)].tolist()
    return values


def num_trainable(records: Sequence[ShardedParameter]) -> int:
    return sum([(each.shard if each.flat is None else each.flat.parameter).requires_grad for each in records])


def show_unsharded(records: Sequence[ShardedParameter], parameters: Sequence[nn.Parameter]) -> None:
    """Show `parameters`, the unsharded form of each of `records`, which require a gradient if the records do."""
    for record, parameter in zip(records, parameters, strict=True):
        requires_grad = (record.shard if record.flat is None else record.flat.parameter).requires_grad
        if parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)
        for place in record.places if record.lent is None else ():
            module, attribute = None if place.registered else place.module(), place.attribute
            shown_in = place.parameters if module is None else module.__dict__
            if module is not None:
                place.parameters[attribute] = None
            shown_in[attribute] = parameter


def hide_unsharded(
    records: Sequence[ShardedParameter], parameters: Sequence[nn.Parameter], trained: Sequence[bool]
) -> list[tuple[ShardedParameter, nn.Parameter, nn.Parameter | None]]:
    """Show the shards where `parameters`, the unsharded form of each of `records`, were shown.

    A shard requires a gradient from now on if a user set that on its unsharded form: `trained` says what was shown.

    Returns a record, its parameter, and what a user put in its place, a Parameter or None, for each such place.
    """
    replaced = []
    for record, parameter, was_trained in zip(records, parameters, trained, strict=True):
        if parameter.requires_grad != was_trained:
            record.optimizer_param.requires_grad_(parameter.requires_grad)
        for place in record.places if record.lent is None else ():
            module, attribute = None if place.registered else place.module(), place.attribute
            shown_in = place.parameters if module is None else module.__dict__
            if attribute in shown_in and shown_in[attribute] is parameter:
                shown_in[attribute] = record.shard
                continue
            shown = place.swap(parameter, record.shard)
            if shown is not parameter:
                replaced.append((record, parameter, shown))
    return replaced


def notice_replaced(records: Sequence[ShardedParameter]) -> bool:
    """Take the values of Parameters that the user put in the places of shards. Returns whether there were any."""
    noticed = False
    for record in records:
        for place in record.places:
            shown_in, attribute = place.parameters, place.attribute
            if not place.registered and (attribute not in shown_in or shown_in[attribute] is None):
                module = place.module()
                shown_in = shown_in if module is None else module.__dict__
            if attribute not in shown_in or shown_in[attribute] is not record.shard:  # as `shows`, without a call
                noticed |= record.notice_replaced()
                break
    return noticed
