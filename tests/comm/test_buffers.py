"""Do views of a buffer survive its memory going and coming back?"""

import json
import subprocess
import sys

import pytest
import torch

from sherd._torch import storage_uses
from sherd.comm.buffers import Buffer

CPU = torch.device("cpu")


def test_views_stay_the_same_objects_and_see_what_is_written_after_a_refill():
    buffer = Buffer(8, torch.float32, CPU)
    view = buffer.tensor[2:4].view(2, 1)
    buffer.free()
    buffer.allocate()
    buffer.tensor.copy_(torch.arange(8.0))
    assert view.tolist() == [[2.0], [3.0]]


def test_freeing_gives_the_memory_back_and_keeps_the_shape():
    buffer = Buffer(8, torch.bfloat16, CPU)
    assert buffer.tensor.untyped_storage().nbytes() == buffer.nbytes == 16
    buffer.free()
    assert buffer.tensor.untyped_storage().nbytes() == 0
    assert (buffer.tensor.shape, buffer.nbytes) == ((8,), 16)


def test_freeing_and_allocating_twice_is_as_once_and_keeps_what_was_written():
    buffer = Buffer(2, torch.float32, CPU)
    buffer.tensor.fill_(7)
    buffer.allocate()
    assert buffer.tensor.tolist() == [7, 7]
    buffer.free()
    buffer.free()
    assert buffer.tensor.untyped_storage().nbytes() == 0


def test_refilling_moves_no_version_counter_that_autograd_checks():
    buffer = Buffer(4, torch.float32, CPU)
    weight = torch.nn.Parameter(buffer.tensor.data[:4])
    output = (weight * weight).sum()
    buffer.free()
    buffer.allocate()
    buffer.tensor.fill_(3)
    output.backward()
    assert weight.grad.tolist() == [6, 6, 6, 6]


def test_a_buffer_around_somebodys_tensor_shares_it_and_refuses_to_free_it():
    tensor = torch.ones(3)
    buffer = Buffer.around(tensor)
    assert not buffer.is_ours
    assert buffer.tensor is tensor
    with pytest.raises(AssertionError, match="somebody else's memory"):
        buffer.free()


def test_a_buffer_can_take_over_a_tensor_of_any_shape():
    tensor = torch.ones(3, 2)
    buffer = Buffer.of(tensor)
    buffer.free()
    assert tensor.untyped_storage().nbytes() == 0
    buffer.allocate()
    assert tensor.fill_(2).sum() == 12


def test_uses_counts_the_views_that_somebody_keeps():
    buffer = Buffer(4, torch.float32, CPU)
    before = storage_uses(buffer.address)
    view = buffer.tensor[:2]
    assert storage_uses(buffer.address) == before + 1
    del view
    assert storage_uses(buffer.address) == before


def test_an_empty_buffer_comes_and_goes_like_any_other():
    buffer = Buffer(0, torch.float32, CPU)
    buffer.free()
    buffer.allocate()
    assert buffer.tensor.numel() == buffer.nbytes == 0


ROUNDS = """
import json, resource, torch
from sherd._torch import storage_uses
from sherd.comm.buffers import Buffer

def round_of(buffers):
    for buffer in buffers:
        buffer.allocate()
        buffer.tensor.fill_(1)
    for buffer in buffers:
        buffer.free()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def settled(*mebibytes):
    buffers = [Buffer(each << 20, torch.uint8, torch.device("cpu")) for each in mebibytes]
    for buffer in buffers:
        buffer.free()
    # The heap of a small process settles after some rounds: small blocks come to lie between the large ones.
    counts = [round_of(buffers) for _ in range(12)]
    return counts[-1] - counts[-2]

print(json.dumps([settled(12, 12, 12), settled(64)]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc is what is taught")
def test_buffers_that_come_and_go_together_cost_no_page_faults():
    answer = subprocess.run([sys.executable, "-c", ROUNDS], capture_output=True, text=True, check=True).stdout
    together, larger_than_malloc_keeps = json.loads(answer)
    assert together < 100, "three times 3,072 pages"
    if _has_large_pages():
        assert larger_than_malloc_keeps < 2048, "of 16,384 pages"


def _has_large_pages():
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            return "[never]" not in file.read()
    except OSError:
        return False
