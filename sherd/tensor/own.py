"""The base class of this library's DTensors: values that are assigned to `.data` go into their memory."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from sherd._torch import local_tensor, spec_of
from sherd.errors import WriteBackError
from sherd.tensor.gather import part_given
from sherd.tensor.placement import places_of
from sherd.tensor.places import Places


class OwnDTensor(DTensor):
    """A DTensor of this library. A DTensor of torch that is assigned to `.data` changes the shell around the local
    tensor and leaves that as it is: the values are lost."""

    @property
    def data(self) -> torch.Tensor:
        """The tensor outside autograd. It can be set to a DTensor of the same shape, an unsharded tensor, or this
        rank's part: the values are copied into the memory that the tensor has, in its own dtype. All ranks must set it
        where it is set to a DTensor with other placements.

        Raises:
            WriteBackError: it is set to a tensor of another shape.
        """
        return self.detach()  # torch's own would not share the version counter, which tells that it was written to

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        local = local_tensor(self)
        if isinstance(value, DTensor):
            value = local_tensor(value) if self.lies_as(value) else value.full_tensor()
        part = part_given(value, tuple(self.shape), local, self._piece_of)
        if part is None:
            raise WriteBackError(
                f".data = a tensor of shape {tuple(value.shape)}: this one is {tuple(self.shape)}, of which this rank "
                f"holds {local.numel()} elements; give the whole tensor or this rank's part"
            )
        with torch.no_grad():
            local.copy_(part)
            torch.autograd.graph.increment_version(self)

    def lies_as(self, other: DTensor) -> bool:
        """Returns True if both have the same elements on the same ranks."""
        return places_at(self).same_as(places_of(spec_of(other)))

    @abstractmethod
    def around(self, local: torch.Tensor) -> OwnDTensor:
        """Returns a tensor that lies as this one, around `local`, this rank's part of it, outside autograd."""

    @abstractmethod
    def _piece_of(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of an unsharded tensor of this shape."""


places_at: Callable[[OwnDTensor], Places] = operator.attrgetter("_spec.sherd_places")
"""Returns the places of a tensor's pieces, the very object for tensors that lie alike."""
