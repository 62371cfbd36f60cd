"""State of full matrices: a tensor with an entry for each matrix of a parameter, on the rank that owns the matrix.

    w: 3 matrices, m x n             rank 0          rank 1          rank 2
    computed by                      | 0 | 1 |                       | 2 |
    state[w]["left"], (3, m, m)      | 0 | 1 |                       | 2 |

It is a `RaggedDTensor` over the ranks that hold the parameter. Whatever saves, loads, moves or copies the state of
optimizers does so with it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from math import prod

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from sherd._torch import DTensorSpec, local_tensor, spec_of
from sherd.layout.placement import Shape
from sherd.layout.runs import Runs
from sherd.optim.exchange import MatrixItem, Ring
from sherd.tensor.placement import Layout, is_ragged, layout_of, ragged_spec
from sherd.tensor.ragged import local_part, ragged_dtensor
from sherd.tensor.relayout import around, full_of, laid_out

MatrixState = dict[str, torch.Tensor]
"""What is kept of matrices of one shape: under each name a tensor [number, *shape]."""


class Home:
    """The owners of the state of one parameter's matrices.

    Args:
        number: the number of its matrices, including those that are complete on other tensor-parallel ranks.
        items: all items of this rank's part, in order.
        ring: the ranks that hold this part. None: the parameter is a plain one, and so is its state.
        spec: the layout of the parameter.
    """

    def __init__(
        self, number: int, items: Sequence[MatrixItem], ring: Ring | None = None, spec: DTensorSpec | None = None
    ) -> None:
        self.number, self._items, self._ring, self._spec = number, items, ring, spec
        self._layouts: dict[Shape, Layout] = {}

    @cached_property
    def _ends(self) -> list[int]:
        """How many matrices the ranks of the ring up to each one compute."""
        counts = [0] * (1 if self._ring is None else len(self._ring.ranks))
        for item in self._items:
            counts[item.owner] += item.batch[0]
        return list(accumulate(counts))

    @cached_property
    def _first(self) -> dict[MatrixItem, int]:
        """The number of the first matrix of each item."""
        numbers = accumulate((item.batch[0] for item in self._items), initial=0)
        return dict(zip(self._items, numbers, strict=False))

    def placed(self, value: torch.Tensor | None, shape: Shape, like: torch.Tensor) -> torch.Tensor:
        """Returns the state with entries of `shape` at the owners: `value`, uncopied if it is there; None: zeros.

        All ranks that hold the parameter must call it: a value in another layout is gathered. Zeros are of the wider of
        float32 and the dtype of `like`. They are on its device, and so is what was moved.
        """
        full_shape = (self.number, *shape)
        layout = self.layout(full_shape)
        if value is None:
            dtype = torch.promote_types(like.dtype, torch.float32)
            local = torch.zeros(layout.local_shape if layout else full_shape, dtype=dtype, device=like.device)
            return ragged_dtensor(local, layout.spec(dtype)) if layout else local
        if layout is None:
            return full_of(value) if isinstance(value, DTensor) else value
        if isinstance(value, DTensor) and is_ragged(spec := spec_of(value)) and layout_of(spec).same_as(layout):
            return value if layout_of(spec) is layout else around(local_tensor(value), layout.spec(value.dtype))
        return laid_out(value, layout.spec(value.dtype), like.device)

    def layout(self, shape: Shape) -> Layout | None:
        """Returns the layout of the state of all matrices, of the shape `shape`; None: every rank has all of it."""
        if self._ring is None or self._spec is None:
            return None
        if shape not in self._layouts:
            mesh, placements = self._spec.mesh, self._spec.placements
            axes, ends = self._ring.axes_of(mesh), tuple(end * prod(shape[1:]) for end in self._ends)
            cut = Runs((self._ends[-1], *shape[1:]), len(ends), 0, ends, by_rows=True)
            # On other axes tensor parallelism divides matrices among ranks, or all ranks have the same ones.
            others = [
                Replicate() if axis in axes or each.is_replicate() else Shard(0) for axis, each in enumerate(placements)
            ]
            self._layouts[shape] = layout_of(ragged_spec(mesh, others, shape, torch.float32, cut, axes))
        return self._layouts[shape]

    def part_of(self, item: MatrixItem, value: torch.Tensor) -> torch.Tensor:
        """Returns the view of `value`, a state in its `layout`, with the entries of one of the own items."""
        before = self._ends[item.owner - 1] if item.owner else 0
        return local_part(value).narrow(0, self._first[item] - before, item.batch[0])
