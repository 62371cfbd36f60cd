"""Python objects travel between ranks, whatever moves the bytes, and without numpy."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sherd.comm.failures import said_by_torch
from sherd.comm.objects import all_gather_objects, broadcast_object, raw_bytes
from tests.support.ranks.bodies import on_processes

ROOT = Path(__file__).parents[2]


def of_each_length():
    mine = {"rank": dist.get_rank(), "text": "x" * 1000 * dist.get_rank(), "none": None}
    return all_gather_objects(mine, "a test"), all_gather_objects(None, "a test")


def test_every_rank_gets_the_objects_of_all_in_rank_order(world, threads):
    expected = [{"rank": rank, "text": "x" * 1000 * rank, "none": None} for rank in range(3)]
    for ranks in (world(3), threads(3)):
        assert ranks.run(of_each_length) == [(expected, [None] * 3)] * 3


@on_processes(3)
def test_the_first_rank_of_a_group_is_who_sends():
    group, rank = dist.new_group([1, 2]), dist.get_rank()
    if rank > 0:
        assert broadcast_object(rank * "a", "a test", group) == "a"
        assert all_gather_objects(rank, "", group) == [1, 2]


def test_of_what_torch_says_its_advice_its_source_line_and_its_frames_are_left_out():
    said = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5"
    advice = ". This is typically caused by a process that has ended. GLHF!"
    for text in (said, said + advice, f"{said}\nException raised from read at pair.cc:1\nframe #0: f", f"{said}."):
        assert said_by_torch(RuntimeError(text)) == "Connection closed by peer [127.0.0.1]:5"
    assert said_by_torch(ValueError("of ours")) == "of ours"


def test_bytes_are_those_of_the_elements_that_a_view_shows():
    text = torch.tensor(list(b"abcdef"), dtype=torch.uint8)
    assert raw_bytes(text[1:4]) == b"bcd"
    assert raw_bytes(text[::2]) == b"ace"
    assert raw_bytes(text[:0]) == b""


WITHOUT_NUMPY = """
import os, sys, tempfile, warnings
from importlib.machinery import PathFinder

class WithoutNumpy(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "numpy" else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutNumpy
warnings.simplefilter("ignore")  # torch says that it has found no numpy
import torch, torch._dynamo, torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
import torch.distributed.checkpoint as dcp
import sherd
from sherd.comm.objects import do_without_numpy

folder = tempfile.mkdtemp()
os.environ["RANK"] = "0" if os.fork() else "1"
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store")

def train(model):
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    sherd.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return optimizer

for placement in (None, sherd.Flat()):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    sherd.fully_shard(model[0], placement=placement)
    sherd.fully_shard(model, placement=placement)
    optimizer = train(model)
    with sherd.unsharded(model):
        assert model[1].weight.shape == (3, 4)
    assert model.state_dict()["1.weight"].full_tensor().shape == (3, 4)

wrapper = sherd.FullyShardedDataParallel(nn.Linear(4, 4), sync_module_states=True)
states = wrapper.optim_state_dict(wrapper, train(wrapper))
with wrapper.state_dict_type(wrapper, sherd.StateDictType.FULL_STATE_DICT):
    assert wrapper.state_dict()["weight"].shape == (4, 4)
wrapper.scatter_full_optim_state_dict(wrapper.full_optim_state_dict(wrapper, train(wrapper)), wrapper)

do_without_numpy()
dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer))), checkpoint_id=f"{folder}/saved")
dist.barrier()
dist.destroy_process_group()
assert "numpy" not in sys.modules
if rank == 0:
    assert os.wait()[1] == 0, "rank 1"
    print("done")
"""


@pytest.mark.slow
def test_both_front_ends_clipping_and_checkpoints_do_without_numpy():
    # A program of its own, as torch looks for numpy once, when it is imported.
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
