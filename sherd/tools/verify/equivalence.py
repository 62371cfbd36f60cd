"""`verify_equivalence`: steps of a sharded model next to the same steps of the plain model in one process."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sherd.api.fully_shard import fully_shard
from sherd.checkpoint.catalog import without_wrappers
from sherd.codecs import codec_of
from sherd.comm.agreement import Failure, on_all_ranks
from sherd.comm.groups import default_group
from sherd.comm.objects import all_gather_objects, broadcast_object, raw_bytes
from sherd.engine import ShardedParameter, Unit
from sherd.errors import PolicyError, SherdError, StateError
from sherd.requirements import require_factor, require_floating_dtype, require_int, require_type
from sherd.tensor.structures import map_tensors, tensors_in
from sherd.tools.verify.capture import CaptureReport, capturable
from sherd.tools.verify.report import KINDS, Difference, EquivalenceReport, difference
from sherd.tools.verify.training import (
    EVERY_PART,
    UPDATED,
    WIDTHS,
    ComparedTraining,
    ExpectedStep,
    Key,
    Loss,
    MakeOptimizer,
    Recipe,
    Shown,
    Wire,
    plainly_named,
    save,
    seed_all,
    stored_steps,
    train_plain,
)

T = TypeVar("T")
WHAT = "verify_equivalence"
TENSOR_FLOAT_32 = 2.0**-10
PORTION = 64 * 2**20  # bytes of tensors that rank 0 sends at once


def own_loss(model: nn.Module, batch: object) -> Tensor:
    """Returns the `loss` in the model's output, or the mean square of all its outputs."""
    output = output_of(model, batch)
    loss = loss_in(output)
    if loss is not None:
        return loss
    return torch.cat([tensor.float().flatten() for tensor in tensors_in(output)]).square().mean()


def output_of(model: nn.Module, batch: object) -> object:
    """Returns the output of `model` for `batch`. A tuple, list or dict is passed as arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def loss_in(output: object) -> Tensor | None:
    """Returns the `loss` in a model's output, or None."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def verify_equivalence(
    build: Callable[[], nn.Module],
    batches: Iterable[object],
    *,
    shard: Callable[[nn.Module], nn.Module | None] = fully_shard,
    loss: Loss = own_loss,
    optimizer: MakeOptimizer = sgd,
    parts: int | None = None,
    seed: int = 0,
    compute_dtype: torch.dtype | None = None,
    margin: float = 4.0,
    reference: str | Path | None = None,
    save_reference: str | Path | None = None,
    capture: bool = False,
) -> EquivalenceReport:
    """Train a sharded model together with the plain model, and report the first tensors that differ beyond rounding.

    Each batch is one step. Compared are the parameters and buffers before the first step, and in each step the outputs
    of the units and of the model, the losses, the gradients, the buffers, and the parameters after the optimizer's
    step. The first step with a difference is the last one. All ranks must call this function, and all get the same
    report.

    Only rank 0 trains the plain model, so no other rank needs memory for it. It runs the parts of a batch one after the
    other, and averages their gradients.

    The allowed difference is measured. A second plain model runs with errors in every weight, input and
    sum of gradients: of random sign, and as large as the spacing of the coarsest dtype (`torch.finfo(dtype).eps`). A
    tensor may differ by `margin` times the change that these errors cause, or by `margin` spacings if that is more. The
    dtypes are those of the parameters, of the units' `MixedPrecisionPolicy`, and `compute_dtype`. Weights and gradients
    also get the errors that codecs of `CommPolicy` may make (`Codec.bound`, with the unit's largest value in each
    block), and gradients those of a `Reduction`'s dtype. Under `CommPolicy.reproducible()` all bits must be equal, if
    units compute and reduce in the parameters' own dtype. After the gradients are compared, all models step with the
    plain model's gradients. So an update may only differ by `margin` spacings of the parameter's own dtype, and each
    step begins with the same parameters.

    The caller's process groups, random state and grad mode stay as they are. Without a process group, this function
    makes the one of torchrun's environment and keeps it, as `fully_shard` does; without torchrun, it makes a group of
    one rank for the call.

    Args:
        build: returns the plain model. It is called on every rank, and twice more on rank 0, each time with the same
            seed of torch and Python.
        batches: tensors, or containers of tensors, one per step; the same on all ranks. Dim 0 of each tensor is cut
            into equal `parts`, and data-parallel rank r takes part r. Ranks that differ only in other axes of a mesh
            take the same part.
        shard: shards the model in place, or returns the sharded model: with either front end, over any mesh, after
            `parallelize_module` or not.
        loss: the loss of (model, part of a batch), a mean over samples. By default the `loss` in the model's output,
            else the mean square of the output; a batch that is a tuple, list or dict is passed as arguments.
        optimizer: the optimizer of the parameters that need gradients.
        parts: a multiple of the number of data-parallel ranks, by default that number. With several parts per rank,
            each rank takes neighbouring parts and accumulates gradients. So one process can compute what 8 ranks do.
            Where all bits must be equal, rank r of W takes parts r, r + W and so on, inside `accumulate`.
        seed: seeds `build`, and each forward by step and part: dropout drops the same in both trainings.
        compute_dtype: a coarser dtype that units and parameters do not show, such as an autocast's in `loss`.
        margin: see above.
        reference: a file to compare with instead of training the plain model. It has no errors of codecs, so it is
            refused where values are rounded on their way between ranks, as is `save_reference`; and no order of sums,
            so bits need not be equal.
        save_reference: a file to which rank 0 writes the plain training.
        capture: after steps without a difference, also ask `capturable` whether a step of the sharded model, on the
            last batch, may be captured as a graph: `EquivalenceReport.capture`.

    Returns:
        The report, the same on all ranks.

    Raises:
        PolicyTypeError: an argument of the wrong type. All errors are raised on all ranks.
        PolicyError: batches that differ between ranks, or that `parts` does not divide; a file that does not fit.
        StateError: `build`, `shard`, or the plain training raised an error on a rank.
    """
    with _process_group(), _own_state():
        functions = {"build": build, "shard": shard, "loss": loss, "optimizer": optimizer}
        steps = _agreed("the arguments", partial(_checked, batches, functions, parts, seed, compute_dtype, margin))
        seed_all(seed)
        model = _agreed("build() or shard()", lambda: _sharded(build, shard))
        file = reference or save_reference
        place = _agreed("the model", lambda: _Place.of(model, parts, compute_dtype, bool(file)))
        pieces = _agreed("batches", lambda: [_cut(batch, place.parts, at) for at, batch in enumerate(steps)])
        digests = _same_everywhere([_digest(batch) for batch in steps])
        recipe = Recipe(loss, optimizer, seed, place.parts, place.device, place.watched, place.wires, place.is_exact)
        made_with = {"parts": place.parts, "seed": seed, "batches": digests}
        own_widths = () if place.is_exact else (place.eps,)
        plain = train_plain(build, recipe, WIDTHS if save_reference else own_widths, pieces)
        source = stored_steps(Path(reference), made_with) if reference else plain
        training = _agreed("optimizer()", lambda: ComparedTraining(model, recipe, place.own))
        comparison, kept = _Comparison(place, margin), []
        for number in range(len(pieces) + 1):
            is_first = dist.get_rank() == 0
            expected = _agreed("the plain training", lambda: next(source) if is_first else None)  # noqa: B023
            shown = training.step(number, pieces[number - 1]) if number else training.start()
            gradients = comparison.compare(number, expected, shown, is_update=False)
            if number and not comparison.differences:
                comparison.compare(number, expected, training.update(gradients), is_update=True)
            kept += [expected] if expected and save_reference else []
            if comparison.differences:
                break
        if save_reference:
            _agreed("save_reference", lambda: save(Path(save_reference), made_with, kept) if kept else None)
        is_asked = capture and not comparison.differences
        captured = capturable(model, training.bare_step(pieces[-1])) if is_asked else None
        return comparison.report(f"the file {reference}" if reference else "the plain model on rank 0", captured)


@dataclass(frozen=True)
class _Place:
    """The sharded model's device, precision, watched modules, and parts of a batch on this rank."""

    parts: int
    own: range
    device: torch.device
    eps: float
    watched: frozenset[str]
    wires: tuple[Wire, ...]
    is_exact: bool

    @classmethod
    def of(cls, model: nn.Module, parts: int | None, compute_dtype: torch.dtype | None, has_file: bool) -> _Place:
        """Read the place off the units of `model`. Without units, the model is data parallel over all ranks."""
        units, tensors = Unit.below(model), list(model.parameters())
        number, rank, device = dist.get_world_size(), dist.get_rank(), tensors[0].device
        if units:
            mesh = units[0].mesh
            number, rank = mesh.num_shards * mesh.num_replicas, mesh.replica * mesh.num_shards + mesh.shard_rank
            device = mesh.device
        parts = parts or number
        if parts % number:
            raise PolicyError(f"{WHAT}(parts={parts}): expected a multiple of the {number} data-parallel ranks")
        precisions = [dtype for unit in units for dtype in (unit.precision.param_dtype, unit.precision.reduce_dtype)]
        dtypes = {compute_dtype, *precisions, *(tensor.dtype for tensor in tensors)}
        inexact = (dtype for dtype in dtypes if dtype and (dtype.is_floating_point or dtype.is_complex))
        eps = max(torch.finfo(dtype).eps for dtype in inexact)
        if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
            eps = max(eps, TENSOR_FLOAT_32)
        modules = plainly_named(model.named_modules())
        watched = {name for name, module in modules.items() if Unit.of(module) is not None}
        per_rank, wires = parts // number, tuple(_wires_of(units, model))
        if has_file and wires:
            raise PolicyError(
                f"{WHAT}(reference=..., save_reference=...): values are rounded on their way between ranks "
                "(comm_policy=), and no file has these errors; leave both out"
            )
        is_exact = not has_file and compute_dtype is None and _is_exact(model, units)
        own = range(rank, parts, number) if is_exact else range(rank * per_rank, (rank + 1) * per_rank)
        return cls(parts, own, device, eps, frozenset({"", *watched}), wires, is_exact)


def _is_exact(model: nn.Module, units: Sequence[Unit]) -> bool:
    """Returns whether gradients are summed in the order of ranks, and nothing is rounded that the plain model has."""
    groups = [weights.group for unit in units for weights in unit.weights]
    in_order = [group.mesh.in_order for group in groups]
    return (
        bool(groups)
        and all(ShardedParameter.of(parameter) is not None for parameter in model.parameters())
        and all(each.unsharded_spec is None for group in groups for each in group.parameters)
        and all(group.compute_dtype == group.reduce_dtype == group.dtype for group in groups)
        and all(
            each is not None and each.reduction.sum_dtype(group.dtype) == group.dtype
            for each, group in zip(in_order, groups, strict=True)
        )
        and not any(group.mesh.comm.gather for group in groups)
    )


def _wires_of(units: Sequence[Unit], model: nn.Module) -> Iterator[Wire]:
    """Yields how values are rounded on their way, for the parameters of each unit on each of its meshes."""
    paths = {id(module): without_wrappers(path) for path, module in model.named_modules()}
    for mesh, parameters in ((mesh, unit.parameters) for unit in units for mesh in unit.meshes):
        places = [place for each in parameters if each.mesh is mesh for place in each.places]
        names = frozenset(".".join(filter(None, (paths.get(each.module_id), each.attribute))) for each in places)
        between = mesh.comm.reductions[1]
        # Between replicas the sum travels back, too.
        taken = [mesh.comm.reduce] * (mesh.num_shards > 1) + [between, between] * (mesh.num_replicas > 1)
        rounds = [codec_of(each.wire) or _eps_of(each.wire) for each in taken if each is not None and each.wire]
        codec = mesh.gather_codec
        if names and (rounds or codec):
            yield Wire(names, () if codec is None else (codec,), tuple(rounds))


def _eps_of(wire: object) -> float:
    return float(torch.finfo(wire).eps) if isinstance(wire, torch.dtype) else 0.0


class _Comparison:
    """The comparisons made so far, on all ranks."""

    def __init__(self, place: _Place, margin: float) -> None:
        self._place, self._margin = place, margin
        self.differences: list[Difference] = []
        self._closest: dict[str, Difference] = {}
        self._counts: dict[str, int] = {}
        self._steps = 0

    def compare(self, number: int, expected: ExpectedStep | None, shown: Shown, is_update: bool) -> dict[str, Tensor]:
        """Compare the values that step `number` has `shown` on this rank with the `expected` ones, which rank 0 knows.

        With `is_update` these are the updated parameters, else all values before. Returns the expected gradients.
        """
        mine, rank = [], dist.get_rank()
        gradients: dict[str, Tensor] = {}
        for key, value, size, allowed in self._from_rank_0(expected, is_update):
            gradients |= {key.name: value} if key.kind == "gradient" else {}
            found = shown.pop(key, None)
            # A unit may run without a call of its module; under tensor parallelism an output may be a rank's part.
            is_whole = key.kind != "forward output" or (found is not None and found.shape == value.shape)
            if is_whole and key.part in (EVERY_PART, *self._place.own):
                mine.append(difference(key, number, rank, found, value, size, allowed))
        mine += [difference(key, number, rank, shown[key], None, 0, 0) for key in shown if key.kind != "forward output"]
        everywhere = [pair for of_rank in all_gather_objects(list(enumerate(mine)), WHAT) for pair in of_rank]
        for _, measured in everywhere:
            kind = measured.kind
            self._counts[kind] = self._counts.get(kind, 0) + 1
            if kind not in self._closest or measured.share > self._closest[kind].share:
                self._closest[kind] = measured
        too_large = [(at, measured) for at, measured in everywhere if measured.share > 1]
        too_large.sort(key=lambda pair: (KINDS.index(pair[1].kind), pair[0], pair[1].rank))
        self.differences = [measured for _, measured in too_large]
        self._steps = number
        return gradients

    def _from_rank_0(
        self, expected: ExpectedStep | None, is_update: bool
    ) -> Iterator[tuple[Key, Tensor, float, float]]:
        """Yields on all ranks what rank 0 expects: in portions, since another full model may not fit into memory."""
        waiting = [] if expected is None else [key for key in expected if (key.kind == UPDATED) == is_update]
        while True:
            portion, num_bytes = [], 0
            while expected is not None and waiting and num_bytes < PORTION:
                tensor = expected[key := waiting.pop(0)]
                portion.append((key, tensor.value, tensor.size, tensor.allowed(self._place.eps, self._margin)))
                num_bytes += tensor.value.nbytes
            received = broadcast_object(portion, WHAT)
            if not received:
                return
            yield from received

    def report(self, against: str, captured: CaptureReport | None) -> EquivalenceReport:
        place = self._place
        setting = (
            f"{dist.get_world_size()} ranks, {place.parts} part(s) of each batch, against {against}; "
            + (
                "all bits must be equal"
                if place.is_exact
                else f"numbers of the coarsest dtype are {place.eps:.2g} apart"
            )
            + (", and values are rounded on their way between ranks" if place.wires else "")
        )
        return EquivalenceReport(tuple(self.differences), self._closest, self._counts, self._steps, setting, captured)


def _checked(
    batches: Iterable[object],
    functions: Mapping[str, object],
    parts: int | None,
    seed: int,
    compute_dtype: torch.dtype | None,
    margin: float,
) -> list[object]:
    """Returns the batches as a list. Raises PolicyTypeError or PolicyError."""
    for name, function in functions.items():
        require_type(f"{WHAT}({name}=...): expected a function", function, Callable)
    require_int(f"{WHAT}(parts={{}})", 1 if parts is None else parts, 1)
    require_int(f"{WHAT}(seed={{}})", seed, 0)
    require_floating_dtype(f"{WHAT}(compute_dtype={{}})", compute_dtype)
    require_factor(f"{WHAT}(margin={{}})", margin)
    require_type(f"{WHAT}(batches=...): expected a list of batches", batches, Iterable)
    listed = list(batches)
    if not listed or not all(any(tensor.dim() for tensor in tensors_in(batch)) for batch in listed):
        raise PolicyError(f"{WHAT}(batches=...): expected one or more batches, each with a tensor that has rows")
    return listed


def _sharded(build: Callable[[], nn.Module], shard: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Returns the sharded model. Raises PolicyTypeError or PolicyError."""
    plain = build()
    require_type(f"{WHAT}(build=...): expected it to return a module", plain, nn.Module)
    sharded = shard(plain)
    model = plain if sharded is None else sharded
    require_type(f"{WHAT}(shard=...): expected it to return a module or None", model, nn.Module)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PolicyError(f"{WHAT}(build=...): no parameter of the model needs a gradient, so nothing would be trained")
    return model


def _cut(batch: object, parts: int, number: int) -> dict[int, object]:
    """Returns the equal parts of `batch`, by number. Tensors without dims are in all parts."""
    rows = {len(tensor) for tensor in tensors_in(batch) if tensor.dim()}
    size, rest = divmod(max(rows), parts)
    if len(rows) > 1 or rest or not size:
        raise PolicyError(
            f"{WHAT}(batches=...): the tensors of batch {number} have {sorted(rows)} rows, to be cut into {parts} "
            "equal parts. Gradients are averaged over ranks, so only the mean of equal parts is a reference: drop or "
            "pad rows"
        )

    def rows_of(part: int, tensor: Tensor) -> Tensor:
        return tensor[part * size : (part + 1) * size] if tensor.dim() else tensor

    return {part: map_tensors(partial(rows_of, part), batch) for part in range(parts)}


def _digest(batch: object) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors_in(batch):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(raw_bytes(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8)))
    return digest.hexdigest()


def _same_everywhere(digests: list[str]) -> list[str]:
    """Returns `digests`. Raises PolicyError on all ranks if a rank's digests differ."""
    for rank, others in enumerate(first := all_gather_objects(digests, WHAT)):
        if others != first[0]:
            raise PolicyError(
                f"{WHAT}(batches=...): rank {rank} has other batches than rank 0, or another number; give all ranks "
                "the same full batches, of which each takes its part"
            )
    return digests


def _agreed(what: str, action: Callable[[], T]) -> T:
    """Returns the result of `action` on this rank.

    Raises:
        SherdError: on all ranks, if `action` raised an error on a rank.
    """

    def failure_of(error: Exception) -> Failure:
        if isinstance(error, SherdError):
            return type(error), str(error.args[0])
        return StateError, f"{WHAT}: {what} failed on rank {dist.get_rank()}: {error!r}"

    return on_all_ranks(action, WHAT, failure_of)


@contextmanager
def _process_group() -> Iterator[None]:
    """A context with a default process group. Torchrun's group stays after it, as with `fully_shard`."""
    if dist.is_initialized() or "RANK" in os.environ:
        default_group()
        yield
        return
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _own_state() -> Iterator[None]:
    """A context that computes gradients, and restores random states at its end."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
    before = random.getstate()
    try:
        with (
            torch.random.fork_rng(devices, device_type=accelerator.type if accelerator else "cuda"),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield
    finally:
        random.setstate(before)
