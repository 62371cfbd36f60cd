"""A tensor whose ranks on one axis have vectors of their own: a flat parameter over tensor parallelism."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from sherd.clip import clip_grad_norm_
from sherd.errors import PlacementError
from sherd.layout.extent import Extent
from sherd.layout.runs import Runs
from sherd.tensor.placement import ragged_spec
from sherd.tensor.ragged import distribute_ragged, redistribute_to
from sherd.tensor.vectors import VectorShard

# Of 5 and 4 elements; the last two of each are the same ones, and so are not to be counted twice.
VECTORS = (torch.tensor([1.0, -2.0, 3.0, 7.0, 8.0]), torch.tensor([-9.0, 5.0, 7.0, 8.0]))
OWN = torch.tensor([1.0, -2.0, 3.0, -9.0, 5.0, 7.0, 8.0])
ENDS = ((3, 5), (4, 4))
"""Of the runs that each vector is cut into."""


def vector_tensor():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh.get_local_rank("tp")
    size = len(VECTORS[tp])
    placement = VectorShard((5, 4), (Extent(size - 2, 2),))
    spec = ragged_spec(mesh, (Replicate(), placement), (9,), torch.float32, Runs((size,), 2, 0, ENDS[tp]), (0,))
    return distribute_ragged(torch.cat(VECTORS), spec)


def seen():
    tensor = vector_tensor()
    tp, dp = tensor.device_mesh.get_local_rank("tp"), tensor.device_mesh.get_local_rank("dp")
    start, stop = (0, *ENDS[tp])[dp : dp + 2]
    assert torch.equal(tensor.to_local(), VECTORS[tp][start:stop])
    assert torch.equal(tensor.full_tensor(), torch.cat(VECTORS))
    for placements in ((Replicate(), Replicate()), (Shard(0), Shard(0))):
        stock = tensor.redistribute(placements=placements)
        assert type(stock) is DTensor
        assert stock.placements == placements
        assert torch.equal(stock.full_tensor(), torch.cat(VECTORS))
        assert torch.equal(redistribute_to(stock, tensor._spec).to_local(), tensor.to_local())
    for again in (copy.deepcopy(tensor), tensor * 1):
        assert again.placements == tensor.placements
    assert pickle.loads(pickle.dumps(tensor.placements)) == tensor.placements
    for reduction in (torch.sum, torch.mean, torch.prod, torch.count_nonzero, torch.max, torch.min):
        torch.testing.assert_close(reduction(tensor).full_tensor(), reduction(OWN))
    for power in (0.0, 1.0, 2.0, torch.inf, -torch.inf):
        torch.testing.assert_close(torch.linalg.vector_norm(tensor, power).full_tensor(), OWN.norm(power))
        torch.testing.assert_close(torch._foreach_norm([tensor, tensor * 2], power)[0].full_tensor(), OWN.norm(power))
    parameter = nn.Parameter(tensor)
    for power in (1.0, 2.0, torch.inf):
        parameter.grad = tensor.clone()
        torch.testing.assert_close(clip_grad_norm_(parameter, 1.0, power), OWN.norm(power))
        torch.testing.assert_close(parameter.grad.to_local(), tensor.to_local() / OWN.norm(power))
    with pytest.raises(PlacementError, match="this rank's part has shape"):
        ragged_spec(
            tensor.device_mesh,
            (Replicate(), VectorShard((5, 5), ())),
            (10,),
            torch.float32,
            Runs((4,), 2, 0, (4, 4)),
            (0,),
        )


def test_vectors_are_gathered_one_behind_the_other_and_reduced_without_copies(threads):
    threads(4).run(seen)
