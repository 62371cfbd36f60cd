"""`offload_activations`: what forward saves for backward rests in host memory, for both front ends."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from sherd.api.module import sharded_units
from sherd.engine import Unit
from sherd.policy import SavedOnHost


def offload_activations(
    model: nn.Module, *, budget: int = 0, min_bytes: int = 1 << 20, pin_memory: bool = True
) -> AbstractContextManager[None]:
    """Returns a context in which tensors that forwards of `model` save for backward go to host memory, behind compute.

        with sherd.offload_activations(model):
            loss = loss_of(model(x))
        loss.backward()

    They come back in backward, a unit ahead, inside of the context or outside; values are those without it, to the bit.
    At a time two units' saved tensors are on the device, and `budget` bytes of others. With `torch.utils.checkpoint`
    the inputs of checkpointed blocks are what goes. `fully_shard(offload_policy=OffloadPolicy(activations="host"))`
    does the same for one unit, without a context.

    What several operations save of one storage is copied once. Tensors that something else keeps stay, as freeing them
    would gain nothing: inputs that the program holds, buffers. So do parameters, sharded or unsharded; what is saved
    outside of units' forwards, as by a loss; what hooks of others on saved tensors, or selective checkpointing, keep;
    and tensors of subclasses other than DTensor. Of what a unit saves nothing is copied before another unit saves
    something, so a model of one unit gains nothing. A step that is captured as a graph copies nothing. On a CPU mesh
    the context does nothing: there is no other memory.

    Args:
        model: a module on which `fully_shard` was called, or that holds such modules, or a wrapper.
        budget: the bytes of saved tensors of earlier units that may stay on the device; the newest ones do, which
            backward reads first. All models on the device share it.
        min_bytes: tensors whose memory has fewer bytes stay.
        pin_memory: use page-locked host memory, without which the host waits for each copy. It is kept for later steps.

    Raises:
        ModuleError: nothing below `model` is sharded.
        PolicyError: `budget` or `min_bytes` below 0; `PolicyTypeError` for other types.

    The idea is that of vDNN (Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural
    Network Design", MICRO 2016).
    """
    terms = SavedOnHost(budget, min_bytes, pin_memory)
    return Unit.saving_on_host(sharded_units("offload_activations", model), terms)
