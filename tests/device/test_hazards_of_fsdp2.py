"""Hazards of torch's own FSDP2 on the device: what the detector names, where it names nothing, and that sherd has none
of them. docs/understand/hazards.md says which wait is missing."""

from __future__ import annotations

import functools
import linecache
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as theirs
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

import sherd
import simdevice
from tests.support.models import chain

ROOT = Path(__file__).parents[2]
WIDTH = 64
PAUSES = {"pause_us": 1500, "seed": 1}
Sabotage = Callable[[], AbstractContextManager[Any]]


def line_of_fsdp2() -> str:
    """The innermost line of torch's FSDP2 that queues the task."""
    frame = sys._getframe(0)
    while frame is not None:
        file = frame.f_code.co_filename
        if "_fully_shard" in file:
            return f"{Path(file).name}: {linecache.getline(file, frame.f_lineno).strip()}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


class Headed(nn.Module):
    """A body whose output the head is called with from outside, all at once or in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = chain(3, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x))


def slow_hook(gradient: Tensor) -> None:
    gradient.mul_(2)
    simdevice.sleep(2000)
    gradient.div_(2)


def in_two_groups(block: nn.Module) -> dict[str, Any]:
    """Arguments of FSDP2 by which a block has two groups: one on all ranks, one on every second, as experts have."""
    all_ranks = init_device_mesh("sim", (4,), mesh_dim_names=("all",))
    some = init_device_mesh("sim", (2, 2), mesh_dim_names=("other", "some"))["some"]
    outer, inner = FSDPMeshInfo(all_ranks, 0), FSDPMeshInfo(some, 0)
    own = set(block.down.parameters())
    return {
        "mesh": all_ranks,
        "shard_placement_fn": lambda each: ShardPlacementResult(Shard(0), inner if each in own else outer),
    }


def trained(
    package: str,
    mesh: tuple[int, ...] = (2,),
    offload: bool = False,
    hook: bool = False,
    reduce_dtype: torch.dtype | None = None,
    micro_batches: int = 1,
    in_chunks: bool = False,
    two_groups: bool = False,
    sabotage: Sabotage = nullcontext,
) -> dict[str, int]:
    """On a rank: train three steps with `sabotage()` about them. Returns the numbers of FSDP2's streams by name."""
    library: Any = fsdp if package == "FSDP2" else sherd
    simdevice.label_tasks(line_of_fsdp2)
    torch.manual_seed(0)
    names = ("replicate", "shard")[-len(mesh) :]
    device_mesh = init_device_mesh("sim", mesh, mesh_dim_names=names)
    options: dict[str, Any] = {"mp_policy": library.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)}
    if offload:
        options["offload_policy"] = library.CPUOffloadPolicy()
    model: Any = Headed().to("sim")
    for block in model.body:
        grouped = in_two_groups(block) if two_groups else {}
        library.fully_shard(block, **{"mesh": device_mesh, **options, **grouped})
    library.fully_shard([model.norm, model.head], mesh=device_mesh, **options)
    library.fully_shard(model, mesh=device_mesh, **options)
    streams = {}
    if hook:
        for block in model.body:
            stream = torch.Stream(device="sim")
            streams[f"hook {len(streams)}"] = stream.stream_id
            block.set_all_reduce_hook(slow_hook, stream=stream)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sabotage():
        for _step in range(3):
            for _micro in range(micro_batches):
                hidden = model(torch.randn(8, WIDTH, device="sim"))
                cut = hidden.detach().requires_grad_()
                for chunk in cut.chunk(4) if in_chunks else [cut]:
                    model.head(chunk).square().mean().backward()
                hidden.backward(cut.grad)
            optimizer.step()
            optimizer.zero_grad()
    simdevice.label_tasks(None)
    if library is fsdp:
        context = model._get_fsdp_state()._comm_ctx
        streams |= {
            "reduce-scatter": context.reduce_scatter_stream.stream_id,
            "all-reduce": context.all_reduce_stream.stream_id,
            "compute": 0,
        }
    return streams


# What is taken away from FSDP2


REDUCE, STATE, POST_BACKWARD = theirs.foreach_reduce, theirs.ReduceScatterState, theirs.FSDPParamGroup.post_backward


def without_hold() -> AbstractContextManager[Any]:
    """The buffer of HSDP's all-reduce is not kept until the next backward, as before torch had `AllReduceState`."""

    def reduce(*args: Any, **kwargs: Any) -> Any:
        *found, _buffer, _event, partial_output = REDUCE(*args, **kwargs)
        return (*found, None, None, partial_output)

    return mock.patch.object(theirs, "foreach_reduce", reduce)


def without_wait_for_reductions() -> AbstractContextManager[Any]:
    """Inputs of reductions are dropped without a wait."""
    return mock.patch.object(theirs, "ReduceScatterState", lambda given, _event: STATE(given, None))


@contextmanager
def without_wait_for_parts() -> Iterator[None]:
    """Compute does not wait for the reduction after the backward of a part of a grouped unit."""
    parts = []

    def post_backward(group: Any, *unused: Any) -> None:
        kept, group.modules = group.modules, group.modules[:1]
        parts.append(len(kept) > 1 and group._training_state == theirs.TrainingState.FORWARD)
        try:
            POST_BACKWARD(group, *unused)
        finally:
            group.modules = kept

    with mock.patch.object(theirs.FSDPParamGroup, "post_backward", post_backward):
        yield
    assert any(parts)


@contextmanager
def holding(expected: int) -> Iterator[None]:
    """Takes nothing away: so many inputs of reductions are held at most."""
    held = []

    def post_backward(group: Any, *unused: Any) -> None:
        POST_BACKWARD(group, *unused)
        held.append(len(group.comm_ctx.reduce_scatter_states))

    with mock.patch.object(theirs.FSDPParamGroup, "post_backward", post_backward):
        yield
    assert max(held) == expected


# What the detector says


def named(found: Any, use: str, on: str, reuse: str) -> bool:
    """Whether each rank has a race of a `use` on a stream `on...`, with memory handed out on the stream `reuse`."""
    for rank, (streams, races) in enumerate(zip(found.values, found.races, strict=True)):
        firsts = [f"on sim:{rank} stream {number} at" for name, number in streams.items() if name.startswith(on)]
        second = f"malloc on sim:{rank} stream {streams[reuse]} at"
        sides = [race.split(", and unordered with it ") for race in races]
        if not any(use in one and any(each in one for each in firsts) and second in other for one, other in sides):
            return False
    return True


HSDP_OFFLOADED = {"mesh": (2, 2), "offload": True}
HOOKED = {
    "offloaded": ({"offload": True}, "copy to host"),
    "reduced in another dtype": ({"reduce_dtype": torch.bfloat16}, "copy"),
    "accumulated": ({"micro_batches": 2}, "add"),
}


def test_hsdp_with_offload_is_safe_as_long_as_the_reduced_buffer_is_kept(sim_world):
    world = sim_world(4, **PAUSES)
    world.run(trained, "FSDP2", **HSDP_OFFLOADED)
    found = world.observe(trained, "FSDP2", **HSDP_OFFLOADED, sabotage=without_hold)
    assert named(found, "copy to host", "all-reduce", "reduce-scatter"), found.all_races
    world.run(trained, "sherd", **HSDP_OFFLOADED)


@pytest.mark.parametrize("how", HOOKED)
def test_a_hook_on_a_stream_of_its_own_races_for_the_reduced_buffer_which_fsdp2_does_not_keep(how, sim_world):
    options, use = HOOKED[how]
    world = sim_world(2, **PAUSES)
    found = world.observe(trained, "FSDP2", hook=True, **options)
    assert named(found, use, "hook", "reduce-scatter"), found.all_races
    world.run(trained, "sherd", hook=True, **options)


def test_a_hook_is_safe_where_the_gradient_itself_keeps_the_buffer_and_so_is_each_choice_without_it(sim_world):
    world = sim_world(2, **PAUSES)
    world.run(trained, "FSDP2", hook=True)
    for options, _ in HOOKED.values():
        world.run(trained, "FSDP2", **options)


def test_two_groups_in_a_module_race_only_without_the_wait_of_the_last_one(sim_world):
    world = sim_world(4, **PAUSES)
    world.run(trained, "FSDP2", mesh=(4,), two_groups=True)
    found = world.observe(trained, "FSDP2", mesh=(4,), two_groups=True, sabotage=without_wait_for_reductions)
    assert named(found, "reduce_scatter", "reduce-scatter", "compute"), found.all_races


def test_with_two_groups_one_buffer_more_is_held_than_the_limit(sim_world):
    world = sim_world(4, **PAUSES)
    world.run(trained, "FSDP2", mesh=(4,), sabotage=functools.partial(holding, 1))
    world.run(trained, "FSDP2", mesh=(4,), two_groups=True, sabotage=functools.partial(holding, 2))


@pytest.mark.parametrize("package", ["FSDP2", "sherd"])
def test_a_backward_of_a_part_of_a_grouped_unit_leaves_nothing_unordered(package, sim_world):
    sim_world(2, **PAUSES).run(trained, package, in_chunks=True)


def test_nor_does_it_without_the_wait_that_fsdp2_has_for_it(sim_world):
    sim_world(2, **PAUSES).run(trained, "FSDP2", in_chunks=True, sabotage=without_wait_for_parts)


def test_the_reports_program_names_the_race_and_none_with_its_remedy(tmp_path):
    page = (ROOT / "docs/understand/hazards.md").read_text()
    (program,) = [each for each in re.findall(r"^```py\n(.*?)^```$", page, re.M | re.S) if "simdevice" in each]
    (tmp_path / "race.py").write_text(program)
    alone = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.check_output([sys.executable, "race.py"], cwd=tmp_path, env=alone, text=True, timeout=300)
    slow, recorded = said.split("slow_and_recorded: ")
    assert "`return tensor.to(dtype)`, and unordered with it malloc on sim:0" in slow
    assert recorded.strip() == "0 of 8 gradients are wrong on rank 0"
