"""A conversion takes the same memory, whatever the size of the model and of its largest tensor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
PART = 8 * MIB
ROOM = 5 * PART
"""A part of a tensor, another one that is transposed or cut, blocks of files, and small objects."""

PROGRAM = """
import json, re, sys
from pathlib import Path
import torch.distributed.checkpoint.filesystem  # what is loaded once is not counted
from sherd.tools.convert.contents import Spec
from sherd.tools.convert.formats import convert
from sherd.tools.convert.formats import open_source
from sherd.tools.convert.mapping import rules_of
from sherd.tools.convert.of_torch import save
from sherd.tools.convert.state_trees import PendingTensor
from sherd.storage.manifest import header_of

folder, mib, part = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rows = mib << 20 >> 14
tensors = {"big": ("F32", (rows, 2048)), "half.q": ("F32", (rows // 4, 2048)), "half.k": ("F32", (rows // 4, 2048))}
header = header_of(tensors)
with open(folder / "model.safetensors", "wb") as file:
    file.write(header)
    file.truncate(len(header) + (rows + rows // 2) * 8192)
(folder / "rules.json").write_text(json.dumps({"rules": [
    {"merge": ["half.q", "half.k"], "to": "qk"}, {"transpose": "big"},
]}))
big = PendingTensor(Spec("BF16", (rows, 2048)), "big")
state = {"step": 1, "exp_avg": big, "exp_avg_sq": big}
trained = {"model": {"big": big}, "optimizer": {"state": {"big": state}, "param_groups": [{"params": ["big"]}]}}
with open(folder / "trained.pt", "wb") as file:
    save(file, trained, lambda name: (memoryview(bytes(4096)) for _ in range(rows)))


def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def took(source, target, to, rules=()):
    opened = open_source(folder / source)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    convert(opened, folder / target, to, list(rules), most_bytes=part)
    opened.close()
    return status("VmHWM") - before


rules = rules_of(str(folder / "rules.json"), {})
print(json.dumps({
    "hf to sherd": took("model.safetensors", "a", "sherd"),
    "sherd to dcp": took("a", "b", "dcp"),
    "dcp to torch": took("b", "c.pt", "torch"),
    "torch to hf": took("c.pt", "d", "hf"),
    "torch to universal": took("trained.pt", "u", "universal"),
    "joined": took("a", "e", "sherd", rules[:1]),
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is asked of Linux")
@pytest.mark.parametrize("mib", [64, 256])
def test_memory_does_not_grow_with_the_model(tmp_path, mib):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(mib), str(PART)],
        capture_output=True,
        text=True,
        # Memory that is freed goes back to the system, or what glibc keeps, up to 64 MiB, would be counted.
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "MALLOC_MMAP_THRESHOLD_": str(MIB)},
    )
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout)
    assert len(taken) == 6
    assert {what: nbytes for what, nbytes in taken.items() if nbytes > ROOM} == {}
