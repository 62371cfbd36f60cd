"""What memory does a save or a load take beside what is saved?"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SIZE_MIB, LAYERS = 4, 24
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
