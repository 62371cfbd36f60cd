"""Views of a buffer survive its memory going and coming back."""

import resource
import sys

import pytest
import torch

from sherd._torch import storage_uses
from sherd.comm.buffers import Buffer
from tests.support.ranks.forked import answer_of

CPU = torch.device("cpu")


def test_freeing_gives_the_memory_back_and_views_see_what_is_written_after_a_refill():
    buffer = Buffer(8, torch.float32, CPU)
    view = buffer.tensor[2:4].view(2, 1)
    assert buffer.tensor.untyped_storage().nbytes() == buffer.nbytes == 32
    buffer.free()
    buffer.free()  # as once
    assert buffer.tensor.untyped_storage().nbytes() == 0
    assert (buffer.tensor.shape, buffer.nbytes) == ((8,), 32)
    buffer.allocate()
    buffer.tensor.copy_(torch.arange(8.0))
    buffer.allocate()  # keeps what was written
    assert view.tolist() == [[2.0], [3.0]]


def test_refilling_moves_no_version_counter_that_autograd_checks():
    buffer = Buffer(4, torch.float32, CPU)
    weight = torch.nn.Parameter(buffer.tensor.data[:4])
    output = (weight * weight).sum()
    buffer.free()
    buffer.allocate()
    buffer.tensor.fill_(3)
    output.backward()
    assert weight.grad.tolist() == [6, 6, 6, 6]


def test_a_buffer_may_be_empty_take_over_a_tensor_of_any_shape_or_share_somebodys_which_it_refuses_to_free():
    empty, tensor = Buffer(0, torch.float32, CPU), torch.ones(3, 2)
    empty.free()
    empty.allocate()
    assert empty.tensor.numel() == empty.nbytes == 0
    buffer = Buffer.of(tensor)
    buffer.free()
    assert tensor.untyped_storage().nbytes() == 0
    buffer.allocate()
    assert tensor.fill_(2).sum() == 12
    around = Buffer.around(tensor)
    assert not around.is_ours
    assert around.tensor is tensor
    with pytest.raises(AssertionError, match="borrowed memory"):
        around.free()


def test_uses_counts_the_views_that_somebody_keeps():
    buffer = Buffer(4, torch.float32, CPU)
    before = storage_uses(buffer.address)
    view = buffer.tensor[:2]
    assert storage_uses(buffer.address) == before + 1
    del view
    assert storage_uses(buffer.address) == before


def faults_of_a_round(buffers):
    for buffer in buffers:
        buffer.allocate()
        buffer.tensor.fill_(1)
    for buffer in buffers:
        buffer.free()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def settled_faults(*mebibytes):
    """Page faults of a later round."""
    buffers = [Buffer(each << 20, torch.uint8, CPU) for each in mebibytes]
    for buffer in buffers:
        buffer.free()
    # The heap of a small process settles after some rounds: small blocks come to lie between the large ones.
    counts = [faults_of_a_round(buffers) for _ in range(12)]
    return counts[-1] - counts[-2]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc is what is taught")
def test_buffers_that_come_and_go_together_cost_no_page_faults():
    assert answer_of(settled_faults, 12, 12, 12) < 100, "three times 3,072 pages"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what the kernel is asked for")
def test_a_buffer_larger_than_malloc_keeps_asks_for_large_pages():
    buffer = Buffer(64 << 20, torch.uint8, CPU)
    buffer.free()
    buffer.allocate()
    assert "hg" in flags_of_the_mapping(buffer.tensor.data_ptr() + (8 << 20))


def flags_of_the_mapping(address):
    """What the kernel was told of the memory at `address`: proc(5), VmFlags of smaps."""
    is_there = False
    with open("/proc/self/smaps") as file:
        for line in file:
            first, *rest = line.split()
            if first == "VmFlags:" and is_there:
                return rest
            if "-" in first:
                begin, end = (int(each, 16) for each in first.split("-"))
                is_there = begin <= address < end
    return []
