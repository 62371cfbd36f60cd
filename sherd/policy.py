"""The choices of a user, as frozen records. No torch at run time: the schedule and the layout may read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from os.path import expanduser
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from sherd.errors import PolicyError, PolicyTypeError
from sherd.requirements import require_bool, require_factor, require_floating_dtype, require_int, require_number

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes in which a unit computes and reduces. Shards, and so the optimizer, keep the dtype of the module.

    Args:
        param_dtype: dtype of the gathered parameters and so of compute; None keeps each parameter's own.
        reduce_dtype: dtype in which floating-point gradients are reduced and accumulated. None takes each parameter's
            `grad_dtype` (unset: its own dtype) with torch 2.15 and later, and `param_dtype` with earlier ones, as
            torch's `fully_shard` of that version does. Parameters of one dtype and unit are reduced in one dtype, to
            which theirs are promoted.
        output_dtype: dtype of floating-point outputs of the unit's forward; None leaves them.
        cast_forward_inputs: cast floating-point inputs of the unit's forward to `param_dtype`, if given.
        cast_root_forward_inputs: as `cast_forward_inputs`, for the root; None takes `cast_forward_inputs`. Beyond
            torch.
        full_precision_in_eval: while the unit's modules are in eval mode, gather and compute in each parameter's own
            dtype, and do not cast inputs. Beyond torch.
        keep_low_precision_grads: leave gradients in `param_dtype`; under pure data parallelism in `reduce_dtype`.
            Beyond torch.
        param_dtype_override_fn: called once with each parameter when it is sharded. It returns the parameter's own
            dtype, which is then kept instead of `param_dtype`; or None, or `param_dtype` itself. All ranks must get
            the same answers. Inputs are cast to `param_dtype` all the same.

    Raises:
        PolicyTypeError: a dtype that is no `torch.dtype`, such as a string, a switch that is no bool, or a
            `param_dtype_override_fn` that cannot be called.
        PolicyError: an integer or bool dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    cast_root_forward_inputs: bool | None = None
    full_precision_in_eval: bool = False
    keep_low_precision_grads: bool = False
    # Not in the repr, which ranks compare: a function's has an address.
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True, repr=False
    )

    def __post_init__(self) -> None:
        if self.param_dtype_override_fn is not None and not callable(self.param_dtype_override_fn):
            raise PolicyTypeError(
                f"MixedPrecisionPolicy(param_dtype_override_fn={self.param_dtype_override_fn!r}): expected a function "
                "of a parameter"
            )
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            require_floating_dtype(f"MixedPrecisionPolicy({name}={{}})", getattr(self, name))
        for name in ("cast_forward_inputs", "full_precision_in_eval", "keep_low_precision_grads"):
            require_bool(f"MixedPrecisionPolicy({name}={{}})", getattr(self, name))
        if self.cast_root_forward_inputs is not None:
            require_bool("MixedPrecisionPolicy(cast_root_forward_inputs={})", self.cast_root_forward_inputs)

    def param_dtype_of(self, name: str, parameter: nn.Parameter) -> torch.dtype | None:
        """Returns the dtype in which `parameter` is gathered; None keeps its own.

        Raises:
            PolicyError: `param_dtype_override_fn` returned something else than it may.
        """
        dtype = None if self.param_dtype_override_fn is None else self.param_dtype_override_fn(parameter)
        if dtype is not None and dtype not in (self.param_dtype, parameter.dtype):
            raise PolicyError(
                f"{name}: param_dtype_override_fn returned {dtype!r}; expected {parameter.dtype}, the parameter's own, "
                f"to keep it, or {'' if self.param_dtype is None else f'{self.param_dtype} or '}None"
            )
        return self.param_dtype if dtype is None else dtype

    def casts_inputs(self, is_root: bool) -> bool:
        """Returns whether a unit's inputs are cast to `param_dtype`."""
        if is_root and self.cast_root_forward_inputs is not None:
            return self.cast_root_forward_inputs
        return self.cast_forward_inputs


@dataclass(frozen=True)
class Disk:
    """A folder on a disk of this host, for scratch files. They have no names, and end with their process.

    Args:
        path: the folder; it is made if the folder above it exists. It may hold other files, and other jobs may use it.
            `~` is the user's home.

    Raises:
        PolicyTypeError: `path` is no str, or empty. PolicyError: it begins with the `~` of a user who is unknown.
    """

    path: str

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path or "\0" in self.path:
            raise PolicyTypeError(f"Disk(path={self.path!r}): expected the path of a folder, a str")
        if expanduser(self.path).startswith("~"):
            raise PolicyError(f"Disk(path={self.path!r}): this host has no such user; give the folder without ~")


PLACES = ("device", "host")
Place = Literal["device", "host"] | Disk
"""Where something rests between two uses: the memory of the device that computes, that of the host, or a disk."""


@dataclass(frozen=True)
class OffloadPolicy:
    """Where each kind of state rests between two uses. By default all of it is on the mesh's device.

    The optimizer steps where gradients are. What rests farther away (device, host, disk: from near to far) comes there
    a unit at a time, behind the step of the unit before, and goes back; parameters may be nearer, as copies.

        state only          OffloadPolicy(optimizer="host")            the device steps
        a step on the host  OffloadPolicy(gradients="host")            weights stay on the device, as copies
        everything          OffloadPolicy(parameters="host")           what `CPUOffloadPolicy()` says

    On a CPU mesh "device" and "host" are one memory. The values of a step are those without offload, to the last bit,
    where the host computes as the device does.

    Args:
        parameters: where the weights rest that are gathered. From a disk a unit's are read while the unit before
            computes, in the order of the step before.
        gradients: where gradients of shards rest; None: "host" if parameters are not on the device, else "device".
        optimizer: where the optimizer's state rests; None: with the gradients.
        masters: where the part of each bfloat16 parameter rests that makes it an exact float32 master: 2.125 bytes an
            element. The optimizer then steps float32 values, and the parameters are these rounded. None: no masters.
        activations: where tensors that forward saves for backward rest, "device" or "host" (`offload_activations`).
        share: the part of the bytes that is offloaded, from 0.0 to 1.0: of the units in the order in which they are
            made, evenly spread.
        pin_memory: use page-locked host memory, so that copies overlap with compute. Ignored without an accelerator.

    Raises:
        PolicyError: no such place; or something would rest nearer than the gradients, where the step is.
        PolicyTypeError: `share` is no number, `pin_memory` no bool.
    """

    parameters: Place = field(default="device", kw_only=True)
    gradients: Place | None = field(default=None, kw_only=True)
    optimizer: Place | None = field(default=None, kw_only=True)
    masters: Place | None = field(default=None, kw_only=True)
    activations: Place = field(default="device", kw_only=True)
    share: float = field(default=1.0, kw_only=True)
    pin_memory: bool = True

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for name in ("parameters", "gradients", "optimizer", "masters", "activations"):
            place = getattr(self, name)
            is_place = isinstance(place, Disk) or (isinstance(place, str) and place in PLACES)
            if not (is_place or (place is None and name not in ("parameters", "activations"))):
                raise PolicyError(f"{kind}({name}={place!r}): expected 'device', 'host' or Disk(path)")
        near = {"gradients": "sherd.step_in_backward keeps those of one unit", "activations": "activations='host'"}
        for name, instead in near.items():
            if isinstance(getattr(self, name), Disk):
                raise PolicyError(f"{kind}({name}={getattr(self, name)!r}): {name} do not rest on a disk; {instead}")
        require_number(f"{kind}(share={{}})", self.share, 0.0, 1.0)
        if isinstance(self.pin_memory, Disk) or (isinstance(self.pin_memory, str) and self.pin_memory in PLACES):
            raise PolicyTypeError(f"{kind}({self.pin_memory!r}): name what rests there, as in optimizer='host'")
        require_bool(f"{kind}(pin_memory={{}})", self.pin_memory)
        step = self.step_place
        if step == "device" and self.parameters != "device":
            raise PolicyError(
                f"{kind}(parameters={self.parameters!r}, gradients='device'): the step is where gradients are, and its "
                "parameters cannot be farther away; leave gradients out"
            )
        for name in ("optimizer", "masters"):
            if step == "host" and getattr(self, name) == "device":
                raise PolicyError(
                    f"{kind}({name}='device'): gradients are on the host, and so is the step; {name}='host', or a disk"
                )

    @property
    def step_place(self) -> Place:
        """Where gradients rest, and so where the optimizer steps."""
        return self.gradients or ("device" if self.parameters == "device" else "host")

    @property
    def state_place(self) -> Place:
        """Where the optimizer's state rests."""
        return self.optimizer or self.step_place


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Offloading: shards, their gradients and so the optimizer's state stay in host memory.

    Unsharded parameters are on the mesh's device. The policy has no effect on a CPU mesh.

    Args:
        pin_memory: use page-locked memory, so that copies overlap with compute. Ignored without an accelerator.
    """

    parameters: Place = field(default="host", kw_only=True)


@dataclass(frozen=True, slots=True)
class SavedOnHost:
    """The arguments of `sherd.offload_activations`, by name, for one unit."""

    budget: int = 0
    min_bytes: int = 1 << 20
    pin_memory: bool = True

    def __post_init__(self) -> None:
        require_int("offload_activations(budget={})", self.budget, 0)
        require_int("offload_activations(min_bytes={})", self.min_bytes, 0)
        require_bool("offload_activations(pin_memory={})", self.pin_memory)


@dataclass(frozen=True)
class PrefetchPolicy:
    """The distance at which all-gathers run ahead of compute. The order of units is learnt in the first step.

    Args:
        forward_depth: units gathered ahead in forward.
        backward_depth: units gathered ahead in backward.
        bytes_in_flight: the most bytes of gathers in flight; a prefetch that would exceed them waits. None: no limit.
        after_backward: in backward, gather ahead only after the unit's own parameters are freed: less memory, less
            overlap (FSDP1's BACKWARD_POST).
    """

    forward_depth: int = 1
    backward_depth: int = 1
    bytes_in_flight: int | None = None
    after_backward: bool = False

    def __post_init__(self) -> None:
        require_bool("PrefetchPolicy(after_backward={})", self.after_backward)
        for name in ("forward_depth", "backward_depth", "bytes_in_flight"):
            value = getattr(self, name)
            if value is not None or name != "bytes_in_flight":
                require_int(f"PrefetchPolicy({name}={{}})", value, 0)


class Codec(ABC):
    """Values as fewer bytes: what a collective sends in the place of gradients or parameters.

    A codec must give the same bytes for the same values on all ranks, touch no global state (as a random generator),
    and decide nothing on the host by the values. Formats with one scale for each block are made by `codec`.

    Attributes:
        name: names the codec in errors; ranks whose codecs have different names do not understand each other.
    """

    name: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self, 'name', None)!r})"  # the same on all ranks, which compare it

    @abstractmethod
    def num_bytes(self, numel: int) -> int:
        """Returns the bytes of `numel` encoded elements, for every `numel` from 0 on."""

    @abstractmethod
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out`, uint8 [num_bytes(n)], with `values`, floating-point [n], which stay as they are."""

    @abstractmethod
    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out`, floating-point [n], with the values in `encoded`, uint8 [num_bytes(n)]."""

    @abstractmethod
    def bound(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a bound of |decoded - value| for each element of `values`, [n], float32 or float64.

        For finite values, decoded into float32 or float64: a narrower dtype adds its rounding.
        """


ORDERS = ("any", "ranks")
ROUNDINGS = ("nearest", "stochastic")
CODECS = ("int8", "fp8_e4m3", "fp8_e5m2", "int4")
"""The names of formats that `sherd.codec` makes."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients travel to the ranks that own them, and how the owners add them up.

    Args:
        wire: the dtype in which each rank's gradients travel, rounded once, or the `Codec` that encodes them (or the
            name of one: `codec`); None: the unit's `reduce_dtype`.
        sum: the dtype in which owners add up, or that of the wire, if that is wider; None: float32.
        order: "any": the order is the backend's. "ranks": an owner adds the gradients of rank 0, then of rank 1 and so
            on onto those of the micro-batches before. If micro-batch j of rank r is the batch j * W + r of W ranks, the
            sum has the same bits for each W. Every backward then reduces; the bytes are those of a reduce-scatter over
            all data-parallel ranks.
        feedback: each rank keeps what its gradients have lost on the wire, and adds it to those of its next reduction
            (error feedback: Seide et al., 2014; Karimireddy et al., 2019). That takes 4 bytes for each element that a
            rank sends along an axis, sharded or not. Units then reduce unused parameters, as under a codec.
        rounding: "nearest", or "stochastic": a wire of bfloat16 rounds up or down at random, so that the mean of many
            roundings is the value. Of a run that is repeated or resumed the bits are the same; in the order of ranks
            for each W, too.
        seed: of the random numbers, 0 or more.

    Raises:
        PolicyError: `wire` or `sum` is no floating dtype of 16 bits or more, a codec's name, the order or the rounding
            is unknown, or a codec is to add in the order of ranks; `feedback` in that order or without a `wire`;
            "stochastic" without a wire of bfloat16. `PolicyTypeError`: it is no dtype, `feedback` no bool.
    """

    wire: torch.dtype | str | Codec | None = None
    sum: torch.dtype | None = None
    order: str = "any"
    feedback: bool = False
    rounding: str = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.wire, str) and self.wire not in CODECS:
            raise PolicyError(
                f"Reduction(wire={self.wire!r}): expected a dtype, a Codec, or one of {', '.join(CODECS)}"
            )
        if self.is_encoded and self.order == "ranks":
            raise PolicyError(
                f"Reduction(wire={self.wire!r}, order='ranks'): a block ends where a shard does, so each number of "
                "ranks rounds otherwise; take a dtype, or order='any'"
            )
        for name in ("sum",) if self.is_encoded else ("wire", "sum"):
            dtype = getattr(self, name)
            require_floating_dtype(f"Reduction({name}={{}})", dtype)
            if dtype is not None and (dtype.itemsize < 2 or dtype.is_complex):
                raise PolicyError(f"Reduction({name}={dtype}): expected a real dtype of 16 bits or more")
        if self.order not in ORDERS:
            raise PolicyError(f"Reduction(order={self.order!r}): expected one of {', '.join(ORDERS)}")
        require_bool("Reduction(feedback={})", self.feedback)
        require_int("Reduction(seed={})", self.seed, 0)
        if self.feedback and (self.is_in_order or self.wire is None):
            why = "what a rank has lost depends on the number of ranks; take order='any'"
            why = why if self.is_in_order else "without a wire nothing is lost; give wire=, a codec or a dtype"
            raise PolicyError(f"Reduction(wire={self.wire!r}, order={self.order!r}, feedback=True): {why}")
        if self.rounding not in ROUNDINGS:
            raise PolicyError(f"Reduction(rounding={self.rounding!r}): expected one of {', '.join(ROUNDINGS)}")
        if self.is_stochastic and str(self.wire) != "torch.bfloat16":
            raise PolicyError(
                f"Reduction(wire={self.wire!r}, rounding='stochastic'): only wire=torch.bfloat16 is rounded at random"
            )

    @property
    def is_stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def is_remembered(self) -> bool:
        """Whether a rank keeps something from one reduction to the next: what was lost, or how many there were."""
        return self.feedback or self.is_stochastic

    @property
    def is_in_order(self) -> bool:
        return self.order == "ranks"

    @property
    def is_encoded(self) -> bool:
        """Whether gradients travel as the bytes of a codec."""
        return isinstance(self.wire, Codec | str)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which gradients travel, or are encoded, that would else be reduced in `dtype`."""
        wire: Any = None if self.is_encoded or not dtype.is_floating_point else self.wire
        return wire or dtype

    def row_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which they are collected: the wire's, unless what that loses is to be known.

        Raises:
            PolicyError: the wire would lose nothing.
        """
        wire = self.wire_dtype(dtype)
        if not self.is_remembered or not dtype.is_floating_point:
            return wire
        if not self.is_encoded and wire.itemsize >= dtype.itemsize:
            raise PolicyError(
                f"{self}: gradients in {dtype} lose nothing on this wire; leave feedback and rounding out, or give "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )
        return dtype

    def sum_dtype(self, wire: torch.dtype) -> torch.dtype:
        """Returns the dtype of the sums of gradients that travel in `wire`."""
        import torch  # this module is read without it

        return torch.promote_types(self.sum or torch.float32, wire)


TRANSPORTS = ("auto", "torch", "coalesced", "gloo", "shared_memory")
DIVERGENCES = ("error", "join", "trust")
ABOVE_LIMIT = ("raise", "unencoded")


@dataclass(frozen=True)
class CommPolicy:
    """The transport of collectives between ranks.

    Args:
        transport: "auto" takes shared memory for gloo ranks that are all on one host, the calls that are fast on gloo
            for other gloo ranks, and torch's calls for every other backend: "coalesced" for 32 MiB of parameters or
            more at once, if the backend can (NCCL), else "torch", its single calls. "torch", "gloo" and "shared_memory"
            choose one of these. "coalesced" is torch's calls, but each tensor cut by `Shard(0)` is gathered straight
            into place, and a group in one launch: no copy and no second buffer, but more and smaller messages. All
            units of a mesh should have one transport.
        fake_all_gather: send nothing when parameters are gathered, to measure the cost of communication. Results are
            wrong.
        fake_reduce: send nothing when gradients are reduced. Results are wrong.
        divergence: "error": if the collectives of a step differ from those of the last step, ranks compare them before
            they send, and all ranks raise if they differ. "join": all ranks issue the same collectives, in an agreed
            order; a rank that skips a unit takes part with zero gradients, and `sherd.join` serves a rank that has no
            batch left. All units of a model should have it. "trust": no comparison.
        part_bytes: on an accelerator, a unit with at least twice as many bytes of parameters is gathered and reduced in
            two to four parts, of at least `part_bytes` each. Backward frees each part by itself: less memory, more
            messages. None: always in one part.
        reduce: how gradients travel and are added up. None: in the unit's `reduce_dtype`, by the backend's own
            reduce-scatter.
        reduce_replicas: the same between replicas (HSDP). None: as `reduce`.
        gather: the `Codec`, or the name of one, that encodes parameters for their gathers; None: they travel in
            compute's dtype. A shard is encoded once a step, and all ranks decode the same values, this rank's own too.
            The optimizer, checkpoints and `unsharded` have the shards as they are.
        error_limit: the largest relative error of what codecs encode, for each unit, axis and phase (gather, reduce):
            the L2 norm of decoded minus exact values over that of the exact ones, of all ranks since they compared
            last. They compare at the end of each backward that reduces gradients, in one message; an accelerator's host
            waits then. None: nothing is measured.
        above_limit: "raise": all ranks raise `CommError`. "unencoded": the unit's gathers, or reductions over the axis,
            are not encoded from the next one on, and rank 0 logs a warning.

    Raises:
        PolicyError: an unknown `transport`, `divergence` or codec, `part_bytes` less than 1, or two reductions of which
            one is in the order of ranks, or that order with `gather`; a limit that is no finite number above 0, without
            a codec, or with `divergence="join"`; `PolicyTypeError` if a reduction is no `Reduction`, or a codec no
            `Codec`.
    """

    transport: str = "auto"
    fake_all_gather: bool = False
    fake_reduce: bool = False
    divergence: str = "error"
    part_bytes: int | None = 64 << 20
    reduce: Reduction | None = None
    reduce_replicas: Reduction | None = None
    gather: str | Codec | None = None
    error_limit: float | None = None
    above_limit: str = "raise"

    def __post_init__(self) -> None:
        if not isinstance(self.gather, Codec | str | None):
            raise PolicyTypeError(f"CommPolicy(gather={self.gather!r}): expected a Codec, or the name of one")
        if isinstance(self.gather, str) and self.gather not in CODECS:
            raise PolicyError(f"CommPolicy(gather={self.gather!r}): expected a Codec, or one of {', '.join(CODECS)}")
        for name in ("reduce", "reduce_replicas"):
            if not isinstance(given := getattr(self, name), Reduction | None):
                raise PolicyTypeError(f"CommPolicy({name}={given!r}): expected a Reduction or None")
        if self.reduce_replicas not in (None, self.reduce) and (self.sums_in_order or self.reduce_replicas.is_in_order):
            raise PolicyError(
                f"CommPolicy(reduce={self.reduce}, reduce_replicas={self.reduce_replicas}): the order of ranks is one "
                "for all ranks; leave reduce_replicas out"
            )
        if self.sums_in_order and self.gather is not None:
            raise PolicyError(
                f"CommPolicy(reduce=Reduction(order='ranks'), gather={self.gather!r}): a block ends where a shard "
                "does, so each number of ranks rounds otherwise; leave gather out, or take order='any'"
            )
        if self.sums_in_order and self.divergence == "join":
            raise PolicyError(
                "CommPolicy(reduce=Reduction(order='ranks'), divergence='join'): ranks with other numbers of batches "
                "have no common order of them; take divergence='error'"
            )
        if self.divergence not in DIVERGENCES:
            raise PolicyError(f"CommPolicy(divergence={self.divergence!r}): expected one of {', '.join(DIVERGENCES)}")
        if self.transport not in TRANSPORTS:
            raise PolicyError(f"CommPolicy(transport={self.transport!r}): expected one of {', '.join(TRANSPORTS)}")
        if self.part_bytes is not None:
            require_int("CommPolicy(part_bytes={})", self.part_bytes, 1)
        if self.above_limit not in ABOVE_LIMIT:
            raise PolicyError(f"CommPolicy(above_limit={self.above_limit!r}): expected one of {', '.join(ABOVE_LIMIT)}")
        if self.error_limit is not None:
            require_factor("CommPolicy(error_limit={})", self.error_limit)
            if self.gather is None and not self.encodes_gradients:
                raise PolicyError(
                    f"CommPolicy(error_limit={self.error_limit}): nothing is encoded; give a codec as gather= or as "
                    "Reduction(wire=), or leave the limit out"
                )
            if self.divergence == "join":
                raise PolicyError(
                    f"CommPolicy(error_limit={self.error_limit}, divergence='join'): ranks without a batch do not "
                    "compare errors; take divergence='error'"
                )

    @classmethod
    def reproducible(cls, **options: Any) -> CommPolicy:
        """Returns a policy with which a training has the same bits on any number of ranks, and other `options`.

        Norms of gradients have them, too (`clip_grad_norm_`). docs/do/reproducible.md says what else it takes.
        """
        return cls(**{"reduce": Reduction(order="ranks"), **options})

    @property
    def encodes_gradients(self) -> bool:
        """Whether gradients travel as the bytes of a codec, along one axis or both, or with what others have lost."""
        return any(each is not None and (each.is_encoded or each.feedback) for each in self.reductions)

    @property
    def reductions(self) -> tuple[Reduction | None, Reduction | None]:
        """The reductions along the shard axis, and between replicas."""
        return self.reduce, self.reduce_replicas or self.reduce

    @property
    def remembers(self) -> bool:
        """Whether ranks keep something from one reduction to the next."""
        return any(each is not None and each.is_remembered for each in self.reductions)

    @property
    def sums_in_order(self) -> bool:
        """Whether gradients are added up in the order of ranks."""
        return self.reduce is not None and self.reduce.is_in_order


Unmanaged = Literal["error", "replicate", "ignore"]
"""The treatment of trainable parameters that are added to a sharded model, and that no unit has."""

OnTouch = Literal["error", "unshard", "ignore"]
"""The treatment of a call of a module inside a unit, outside the unit's forward, while the unit is sharded."""


class Level(IntEnum):
    """The tensors that are sharded over one data-parallel axis. Each level adds one kind to the level before.

    The levels are the stages of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models", SC 2020).
    """

    COPIES = 0
    """Nothing: gradients are all-reduced (DDP)."""
    OPTIMIZER = 1
    """Optimizer state (ZeRO-1): gradients are reduced at the last backward of a step."""
    GRADIENTS = 2
    """Gradients too (ZeRO-2): they are reduced at every backward."""
    PARAMETERS = 3
    """Parameters too (ZeRO-3): they are gathered for use."""


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The data-parallel axes of a larger device mesh, by name; several names are flattened into one axis.

    Args:
        shard: axis name(s) that parameters are sharded over.
        replicate: axis name(s) over which the sharded parameters are replicated.

    Raises:
        PolicyError: no name is given, or one name twice.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        names = self.shard_names + self.replicate_names
        if not names:
            raise PolicyError("DataParallelMeshDims needs at least one axis name in shard or in replicate")
        if len(set(names)) < len(names):
            raise PolicyError(f"DataParallelMeshDims names an axis twice: {names}")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Returns `shard` as a tuple."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Returns `replicate` as a tuple."""
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


class Comm(ABC):
    """A collective of the user's own, which also allocates the memory that it runs on."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a buffer of shape `size` for the collective. Called on the collective's stream."""


class AllGather(Comm):
    """An all-gather for `set_custom_all_gather`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` (`[W * n]`) with every rank's `input_tensor` (`[n]`), in rank order."""


class ReduceScatter(Comm):
    """A reduce-scatter for `set_custom_reduce_scatter`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` (`[n]`) with this rank's part of `input_tensor` (`[W * n]`), reduced over the ranks."""


class CountsBackwards(Protocol):
    """A counter of backwards, which knows the last backward before the optimizer step."""

    num_averaged: int
    """The number of backwards whose mean is wanted; 1 for their sum."""

    @property
    def is_in_first_forward(self) -> bool:
        """Returns whether the latest forward is the first forward of its model."""

    def begin_forward(self, root: int) -> bool:
        """Note the start of a forward of the model whose root unit has the id `root`.

        Returns:
            True if shards may have been written since the last forward.
        """

    def begin_backward(self, root: int, name: str) -> bool:
        """Note the start of a backward of the model, which errors call `name`.

        Returns:
            True for the last backward before the optimizer step.
        """

    def end_backward(self, root: int, has_brought_gradients: bool) -> None:
        """Note the end of a backward of the model."""


@dataclass(frozen=True, slots=True)
class UnshardTerms:
    """The arguments of `sherd.unsharded`, by name, for one unit."""

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool

    def missing_from(self, outer: UnshardTerms) -> list[str]:
        """Returns the arguments of this context that `outer`, the context around this one, lacks."""
        wanted = {
            "writeback=True": self.writeback and not outer.writeback,
            "rank0_only=False": outer.rank0_only and not self.rank0_only,
            "with_grads=True": self.with_grads and not outer.with_grads,
        }
        return [argument for argument, is_missing in wanted.items() if is_missing]


_WORDS = {"unmanaged": get_args(Unmanaged), "on_touch": get_args(OnTouch)}


@dataclass(frozen=True)
class UnitPolicy:
    """All choices of a unit that can change after its construction. A setter of `FSDPModule` replaces one field.

    Args:
        reshard_after_forward: None means False for the root, and True for other units.
        accumulates_unsharded: inside `sherd.accumulate`, only the last backward reduces over the shard axis.
        accumulates_copies: inside `sherd.accumulate`, only the last backward reduces over the replicate axis.
        accumulation: the counter of an open `sherd.accumulate`; None outside.
        renews_copies: each forward renews unsharded copies that are kept, as the user may have written to shards.
        reduce_buffers: the number of reductions that may be in flight. None means 1 with streams; without streams 0,
            since a reduction then takes its time from compute anyway.
        contributes: use the gradients of the next backwards; otherwise the unit takes part in reductions with zeros.
        divide_factor: the divisor of summed gradients; None means the number of data-parallel ranks.
        forward_prefetch: the ids (`Unit.id`) of the units to gather behind this unit's forward; None means the learnt
            order. `backward_prefetch` is the same for backward.
        all_reduce: the user's own sum over the replicate axis, in place.
        when_reduced: called when reduced gradients are added to the shards' gradients, in host memory with CPU offload.
        notices_replaced: before a gather, look for parameters that the user has put in the place of shards, and take
            their values.
        finalizes_by_hand: the user ends each step's backwards by `finalize_backward`; read from the root.
        keeps_storage: the memory of unsharded parameters is not freed while modules show shards.
        unmanaged: the treatment of trainable parameters that no unit has; read from the root.
        on_touch: the treatment of calls of modules inside the unit, outside the unit's forward.
    """

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    reduce_gradients: bool = True
    all_reduce_gradients: bool = True
    contributes: bool = True
    accumulates_unsharded: bool = False
    accumulates_copies: bool = True
    accumulation: CountsBackwards | None = None
    reduce_unused: bool = False
    renews_copies: bool = True
    reduce_buffers: int | None = None
    divide_factor: float | None = None
    forward_prefetch: tuple[int, ...] | None = None
    backward_prefetch: tuple[int, ...] | None = None
    prefetch: PrefetchPolicy = PrefetchPolicy()
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    separate_reduce_group: bool = False
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook_stream: torch.Stream | None = None
    all_reduce: Callable[[torch.Tensor], None] | None = None
    when_reduced: Callable[[], None] | None = None
    notices_replaced: bool = True
    finalizes_by_hand: bool = False
    keeps_storage: bool = False
    unmanaged: Unmanaged = "error"
    on_touch: OnTouch = "error"

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            if self.__dict__[name] not in words:
                raise PolicyError(f"{name}={self.__dict__[name]!r}: expected one of {', '.join(words)}")
