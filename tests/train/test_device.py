"""Which device, how many ranks and which process groups a run takes on machines that are not this one."""

import pytest
import torch
import torch.distributed as dist

from sherd.cli.dry_run import ranks_to_plan
from sherd.comm.accelerator import accelerator, backend, backend_for
from sherd.train import rank
from sherd.train.config import Config, InputError
from sherd.train.device import default_ranks, device_type, require_ranks
from sherd.train.report import peak_memory
from tests.support.refusals import refusal


class Type(str):
    """A device by its type alone: torch makes none of a type that is registered from outside."""

    @property
    def type(self):
        return str(self)


@pytest.fixture
def machine(monkeypatch):
    """Lets torch see `number` devices of one type, and these backends of process groups; None: no accelerator."""

    def see(device=None, number=0, built=("gloo", "nccl", "xccl")):
        found = Type(device) if device else None
        monkeypatch.setattr(
            torch.accelerator,
            "current_accelerator",
            lambda check_available=False: found if number or not check_available else None,
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)
        monkeypatch.setattr(dist, "is_backend_available", lambda name: name in built)

    return see


@pytest.fixture
def registered(monkeypatch):
    """The device type "other" with a backend "occl", as a package outside torch registers the two."""
    monkeypatch.setattr(dist, "get_default_backend_for_device", {"other": "occl"}.__getitem__)
    monkeypatch.setitem(dist.Backend.backend_capability, "occl", ["other"])


def on(device="auto"):
    return Config(device=device)


def test_the_accelerator_is_taken_with_torchs_backend_for_it(machine):
    for device, groups in (("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl")):
        machine(device, 4)
        assert (device_type(on()), device_type(on(device)), device_type(on("cpu"))) == (device, device, "cpu")
        assert backend() == groups
        assert [default_ranks(on(asked)) for asked in ("auto", device, "cpu")] == [4, 4, 2]


def test_graphs_are_refused_in_a_line_where_the_run_is_not_on_cuda(machine):
    for device, asked, said in (("cuda", "cpu", "cpu"), ("xpu", "auto", "xpu"), (None, "auto", "cpu")):
        machine(device, 4 if device else 0)
        text = refusal(InputError, device_type, Config(device=asked, cuda_graph=True))
        assert text == f"cuda_graph = true needs CUDA, and this run is on {said}; leave it out"
    machine("cuda", 4)
    assert device_type(Config(cuda_graph=True)) == "cuda"


@pytest.mark.usefixtures("registered")
def test_a_device_and_a_backend_from_outside_torch_are_taken_alike(machine):
    machine("other", 3, built=("gloo", "occl"))
    assert device_type(on()) == device_type(on("other")) == "other"
    assert backend() == "cpu:gloo,other:occl"
    assert default_ranks(on()) == 3
    sees = "device = 'cuda', but torch sees no cuda here; available: cpu, other"
    assert refusal(InputError, device_type, on("cuda")) == sees


def test_without_an_accelerator_that_collectives_reach_a_run_is_on_the_cpu_and_may_be_planned_for_others(machine):
    for seen in (
        (None, 0, ("gloo",)),  # torch's CPU build
        ("cuda", 0, ("gloo", "nccl")),  # its CUDA build where there is no GPU
        ("cuda", 2, ("gloo",)),  # a build without NCCL
        ("mps", 1, ("gloo",)),  # torch names gloo for it, which refuses its tensors
        ("mtia", 1, ("gloo",)),  # torch names nothing for it
    ):
        machine(*seen)
        assert accelerator() is None, seen
        assert (device_type(on()), backend()) == ("cpu", "gloo"), seen
        assert default_ranks(on()) == ranks_to_plan(on()) == 2, seen
    machine("xpu", 6)
    assert [ranks_to_plan(on(device)) for device in ("auto", "xpu", "cuda", "cpu")] == [6, 6, 2, 2]


def test_what_torch_says_of_mps_still_needs_the_second_question():
    assert dist.get_default_backend_for_device("mps") == "gloo"
    assert dist.is_backend_available("gloo")
    assert backend_for("mps") is None
    assert backend_for("cpu") == "gloo"


def test_a_device_that_is_not_here_or_that_no_collective_reaches_is_refused_with_what_is(machine):
    machine()
    for device in ("cuda", "npu", "tpu", "meta"):
        sees = f"device = {device!r}, but torch sees no {device} here; available: cpu"
        assert refusal(InputError, device_type, on(device)) == sees
    machine("mps", 1)
    has = "device = 'mps', but torch has no backend of process groups that reaches mps; available: cpu"
    assert refusal(InputError, device_type, on("mps")) == has


def test_ranks_have_a_device_each(machine, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    machine("xpu", 2)
    require_ranks(2, on("xpu"))
    require_ranks(4, on("cpu"))
    too_many = "4 ranks on a machine of 2 xpu devices; start one per device, or set device = 'cpu'"
    assert refusal(InputError, require_ranks, 4, on("xpu")) == too_many
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    require_ranks(4, on("xpu"))  # on two machines


def test_a_rank_takes_the_device_of_its_number_on_its_machine(machine, monkeypatch):
    machine("xpu", 4)
    taken = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    monkeypatch.setattr(rank, "RankGrid", lambda axes, device: (str(axes), device))
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert rank.grid_of(on()) == ("dp=8", "xpu")
    assert rank.grid_of(on("cpu")) == ("dp=8", "cpu")
    assert taken == [3]


def test_a_command_for_a_device_that_is_not_here_starts_nothing(machine, refused, elsewhere):
    machine()
    words = ("train", "--data", "text.txt", "device=tpu")
    for more in ([], ["--nproc", "2"]):
        sees = "sherd train: device = 'tpu', but torch sees no tpu here; available: cpu\n"
        assert refused(*words, *more) == sees
    said = refused(*words[:3], "device=cuda:1")
    assert "device = 'cuda:1' is out of its limits; it must be a type" in said
    assert [path.name for path in elsewhere.iterdir()] == ["text.txt"]


def test_peak_memory_is_in_bytes_and_on_an_accelerator_that_of_its_tensors(monkeypatch):
    assert 50 * 2**20 < peak_memory(torch.device("cpu")) < 2**40
    asked = []
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: asked.append(device) or 77)
    assert peak_memory(torch.device("xpu")) == 77
    assert asked == [torch.device("xpu")]
