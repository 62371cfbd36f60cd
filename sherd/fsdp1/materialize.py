"""The preparation of a module that is wrapped: memory, the device, equal values on all ranks, buffer dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from sherd._torch import attributes_of, give_attributes
from sherd.comm.agreement import broadcast_from_rank0
from sherd.comm.mesh import DataMesh
from sherd.engine import ShardedParameter, Unit
from sherd.errors import ModuleError, PolicyTypeError
from sherd.fsdp1 import advice
from sherd.fsdp1.arguments import Ignored, WrapperArguments
from sherd.tensor.ragged import RaggedDTensor, local_part
from sherd.tensor.structures import map_tensors


def _modules(root: nn.Module, ignored: Ignored) -> Iterator[nn.Module]:
    """Yields the modules at and below `root`, breadth first, without units and ignored modules."""
    queue, seen = [root], {root}
    while queue:
        module = queue.pop(0)
        if Unit.of(module) is not None or module in ignored.modules:
            continue
        yield module
        new = [each for each in module.children() if each not in seen]
        seen.update(new)
        queue.extend(new)


def _own(module: nn.Module, ignored: Ignored) -> Iterator[torch.Tensor]:
    yield from (each for each in module.parameters(recurse=False) if each not in ignored.parameters)
    yield from (each for each in module.buffers(recurse=False) if each not in ignored.buffers)


def prepare(
    root: nn.Module,
    mesh: DataMesh,
    ignored: Ignored,
    param_init_fn: Callable[[nn.Module], None] | None,
    device_id: int | str | torch.device | None,
    sync_module_states: bool,
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Give the modules of one unit, at and below `root`, memory, values, the device, and rank 0's values.

    Returns:
        Pairs of a parameter on the meta device and the parameter that replaced it.

    Raises:
        PolicyTypeError: `param_init_fn` cannot be called.
        ModuleError: a module stays on the meta device, or has no `reset_parameters()`.
    """
    on_meta = [
        (module, name, parameter)
        for module in _modules(root, ignored)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    _give_memory(root, mesh.device, param_init_fn, ignored)
    tensors = [tensor for module in _modules(root, ignored) for tensor in _own(module, ignored)]
    if device_id is None:
        advice.of_the_host(tensors, mesh.device)
    else:
        for module in _modules(root, ignored):
            if any(tensor.device != torch.device(device_id) for tensor in _own(module, ignored)):
                module._apply(lambda tensor: tensor.to(device_id), recurse=False)
    if sync_module_states:
        each_once = {id(each): each for module in _modules(root, ignored) for each in _own(module, ignored)}
        with torch.no_grad():
            values = [local_part(each) for each in each_once.values() if not _is_shard(each, mesh)]
            broadcast_from_rank0(values, mesh, "rank 0's broadcast of parameters and buffers (sync_module_states)")
    successors = ((before, module._parameters.get(name)) for module, name, before in on_meta)
    return [(before, successor) for before, successor in successors if successor is not None]


def _is_shard(tensor: torch.Tensor, mesh: DataMesh) -> bool:
    """Returns whether ranks have different parts: a wrapper was taken off or copied, or the weights are tied."""
    is_over_ours = isinstance(tensor, RaggedDTensor) or getattr(tensor, "device_mesh", None) == mesh.mesh
    return is_over_ours or ShardedParameter.of(tensor) is not None


def remember(replaced: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Claim the parameters that `prepare` replaced, after the sharding: an optimizer may have been built from them."""
    for before, successor in replaced:
        record = ShardedParameter.of(successor)
        if record is not None:
            record.claim(before)


def _give_memory(
    root: nn.Module, device: torch.device, param_init_fn: Callable[[nn.Module], None] | None, ignored: Ignored
) -> None:
    """Give tensors on the meta device memory and values: by `param_init_fn`, or `to_empty` and `reset_parameters`."""
    if param_init_fn is not None and not callable(param_init_fn):
        raise PolicyTypeError(
            f"param_init_fn={param_init_fn!r}: Expected it to be callable but got a {type(param_init_fn)}"
        )
    modules = list(_modules(root, ignored))
    if not any(each.is_meta for module in modules for each in _own(module, ignored)):
        return
    for module in modules:
        if param_init_fn is not None:
            param_init_fn(module)
        elif any(True for _ in _own(module, ignored)):
            _reset(module, device)
    for module in modules:
        if any(each.is_meta for each in _own(module, ignored)):
            raise ModuleError(
                f"a {type(module).__name__} is on the meta device still: param_init_fn must give memory and values to "
                "the parameters and buffers of each module it is called with"
            )


@torch.no_grad()
def _reset(module: nn.Module, device: torch.device) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ModuleError(
            f"a {type(module).__name__} is on the meta device and has no `reset_parameters()` method to give it "
            "values; write one, or pass param_init_fn"
        )
    written = {name: attributes_of(each) for name, each in module.named_parameters(recurse=False)}
    module.to_empty(device=device, recurse=False)
    for name, each in module.named_parameters(recurse=False):
        give_attributes(each, written[name])  # `to_empty` makes new Parameters
    reset()


def cast_buffers(
    root: nn.Module, choices: WrapperArguments, ignored: Ignored
) -> dict[tuple[nn.Module, str], torch.dtype]:
    """Cast the floating-point buffers of a wrapper, `root`, to the chosen dtype; nested units cast their own buffers.

    Returns:
        The dtype that each buffer had, by the buffer's module and its name in it.
    """
    before: dict[tuple[nn.Module, str], torch.dtype] = {}
    wanted = choices.buffer_dtype
    if wanted is None:
        return before
    for module in (each for child in root.children() for each in _modules(child, ignored)):
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer not in ignored.buffers:
                before[module, name] = buffer.dtype
                module._buffers[name] = buffer.to(wanted)
    return before


def recast_buffers(before: Mapping[tuple[nn.Module, str], torch.dtype], wanted: torch.dtype | None) -> None:
    """Cast the buffers that `cast_buffers` cast to `wanted`; None casts them back to the dtypes `before`."""
    for (module, name), dtype in before.items():
        buffer = module._buffers.get(name)
        if buffer is not None and buffer.dtype != (wanted or dtype):
            module._buffers[name] = buffer.to(wanted or dtype)


def compute_in_full_precision(module: nn.Module) -> None:
    """Cast the inputs of `module` to float32, and its outputs back to the dtype of its first floating-point input."""
    dtypes: list[torch.dtype | None] = []

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        dtypes[-1] = dtypes[-1] or tensor.dtype
        return tensor.float()

    def before(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        dtypes.append(None)
        widened: tuple[tuple[object, ...], dict[str, object]] = map_tensors(widen, (args, kwargs))
        return widened

    def after(_: nn.Module, args: object, output: object) -> object:
        dtype = dtypes.pop()
        if dtype is None:
            return output
        return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, output)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
