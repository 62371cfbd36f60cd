"""Is a save planned by each rank for itself, however many ranks there are?"""

import time

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from sherd._torch import dtensor, dtensor_spec, imagined_ranks
from sherd.checkpoint import writing
from sherd.checkpoint.items import items_of
from sherd.checkpoint.ranks import Ranks
from sherd.storage.manifest import File, parsed

NUM_TENSORS = 500


class Imagined(Ranks):
    """Ranks that all say the same as this one."""

    def __init__(self, size):
        self.rank, self.size, self.numbers = 0, size, list(range(size))

    def gather(self, mine, what):
        return [mine] * self.size


def planned(size):
    """The manifest of many sharded tensors on so many ranks, and the seconds that this rank took for it."""
    with imagined_ranks(size):
        mesh = init_device_mesh("cpu", (size,))
        spec = dtensor_spec(mesh, (Shard(0),), torch.Size([2048, 2]), torch.float32)
        local = torch.zeros(2048 // size, 2)
        model = nn.ParameterList([nn.Parameter(dtensor(local, spec)) for _ in range(NUM_TENSORS)])
        ranks, items = Imagined(size), items_of({"model": model})
        started = time.thread_time()
        plan = writing.plan(items, ranks, 1, None, {})
        nbytes = 8 + 4096 * NUM_TENSORS
        own = writing.Written(File("0a-00000.safetensors", nbytes, (0,) * -(-nbytes // (4 << 20))), {}, {}, {})
        written = [
            writing.Written(File(f"0a-{at:05}.safetensors", nbytes, own.file.crc32), {}, {}, {}) for at in range(size)
        ]
        text = writing._manifest(plan, written, size).to_bytes()
        return parsed(text, ""), time.thread_time() - started


def test_planning_takes_no_longer_for_many_ranks_and_the_manifest_lists_no_pieces():
    small, large = ([planned(size) for _ in range(3)] for size in (16, 1024))
    # The shortest: the collection of garbage that earlier tests have left takes a hundred milliseconds now and then.
    ratio = min(time for _, time in large) / min(time for _, time in small)
    assert ratio < 2.5, ratio
    manifest = large[0][0]
    assert len(list(manifest.tensors["model/7"].pieces())) == 1024
    assert len(manifest.to_bytes()) < 200 * NUM_TENSORS + 100 * 1024


@pytest.mark.parametrize("size", [16, 1024])
def test_every_rank_finds_its_piece(size):
    manifest, _ = planned(size)
    pieces = list(manifest.tensors["model/0"].pieces())
    assert [file for file, _ in pieces] == list(range(size))
    assert [box.offsets[0] for _, box in pieces] == list(range(0, 2048, 2048 // size))
