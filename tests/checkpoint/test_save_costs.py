"""What a save or a load takes: memory beside what is saved, and for each rank the work to plan it."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

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
        self.call, self.rank, self.size, self.numbers = "", 0, size, list(range(size))

    def gather(self, mine, what):
        return [mine] * self.size


def planned(size):
    """The manifest of many sharded tensors on so many ranks, and how many functions this rank has called for it."""
    with imagined_ranks(size):
        mesh = init_device_mesh("cpu", (size,))
        spec = dtensor_spec(mesh, (Shard(0),), torch.Size([2048, 2]), torch.float32)
        local = torch.zeros(2048 // size, 2)
        model = nn.ParameterList([nn.Parameter(dtensor(local, spec)) for _ in range(NUM_TENSORS)])
        ranks, items = Imagined(size), items_of({"model": model})
        calls: Counter[str] = Counter()
        sys.setprofile(lambda frame, event, _: calls.update([event]))
        plan = writing.plan(items, ranks, 1, None, {})
        nbytes = 8 + 4096 * NUM_TENSORS
        sums, parts = (0,) * -(-nbytes // (4 << 20)), writing.Parts({}, {}, {}, {})
        written = [(File(f"0a-{at:05}.safetensors", nbytes, sums), parts) for at in range(size)]
        text = writing._manifest(plan, written, size).to_bytes()
        sys.setprofile(None)
        return parsed(text, ""), calls["call"] + calls["c_call"]


def test_planning_takes_no_longer_for_many_ranks_and_the_manifest_lists_no_pieces():
    small, large = planned(16), planned(1024)
    assert large[1] < 1.5 * small[1], (small[1], large[1])
    for size, (manifest, _) in ((16, small), (1024, large)):
        pieces = list(manifest.tensors["model/0"].pieces())
        assert [file for file, _ in pieces] == list(range(size))
        assert [box.offsets[0] for _, box in pieces] == list(range(0, 2048, 2048 // size))
        assert len(list(manifest.tensors["model/7"].pieces())) == size
        assert len(manifest.to_bytes()) < 200 * NUM_TENSORS + 100 * size


SIZE_MIB, LAYERS = 4, 8
PROGRAM = """
import json, sys, torch, sherd
from torch import nn

def peak_of(action):
    "The most memory, in MiB, that the process has taken beside what it had."
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    action()
    return (status("VmHWM") - before) / 1024

def status(key):
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith(key)).split()[1])

folder, size, layers = sys.argv[1], int(sys.argv[2]) << 18, int(sys.argv[3])
model = nn.ParameterList([torch.randn(size // 512, 512) for _ in range(layers)])
optimizer = torch.optim.AdamW(model.parameters())
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
optimizer.zero_grad()
items = {"model": model, "optimizer": optimizer}
sherd.save(folder, {"x": 0}, step=0)  # whatever it takes to begin
sherd.load(folder, {"x": 0})
found = {
    "save": peak_of(lambda: sherd.save(folder, items, step=1)),
    "load": peak_of(lambda: sherd.load(folder, items)),
    "async_save": peak_of(lambda: sherd.async_save(folder, items, step=2).wait()),
    "async_save, bounded": peak_of(lambda: sherd.async_save(folder, items, step=3, staging_bytes=16 << 20).wait()),
}
print(json.dumps(found))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell")
def test_a_save_copies_nothing_and_a_load_one_tensor(tmp_path):
    given = [str(tmp_path), str(SIZE_MIB), str(LAYERS)]
    # So that what is freed goes back to the system at once.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, *given], env=environment, capture_output=True, check=True)
    found = json.loads(done.stdout)
    assert found["save"] < 8, found
    assert found["load"] < 3 * SIZE_MIB + 8, found
    assert found["async_save"] < 3 * SIZE_MIB * LAYERS + 8, found
    assert found["async_save, bounded"] < 16 + 16, found
