"""What `explain_migration` says trains as the wrapper does, and names every argument and every difference."""

import contextlib
import functools
import io
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import wrap as torch_wrap
from torch.distributed.tensor import Replicate

import sherd
from sherd import FullyShardedDataParallel, flatten_optimizer
from sherd.errors import PolicyError, PolicyTypeError
from sherd.tools.migrate import explain_migration
from sherd.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from tests.support.comparing import assert_same, whole_params
from tests.support.models.specimen import WIDTH, Block
from tests.support.ranks.bodies import on_processes, on_threads

BLOCKS = ModuleWrapPolicy({Block})


class Assorted(nn.Module):
    """Blocks, a norm that FSDP1 leaves in full precision, a part to ignore, and a buffer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.aside = Block()
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("scale", torch.linspace(0.1, 1.0, WIDTH))

    def forward(self, x):
        x = self.blocks(x * self.scale)
        x = self.norm(x).to(x.dtype)
        return self.head(x) + self.aside(x).sum()


def fill(module):
    """The same values on every rank and in every order."""
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        with torch.no_grad():
            tensor.fill_(len(name) / 20)


def give_and_fill(module):
    """As FSDP1 wants it: memory first."""
    module.to_empty(device="cpu", recurse=False)
    fill(module)


def strategy(api, name, **more):
    return {"sharding_strategy": api.ShardingStrategy[name], **more}


def by_blocks(**more):
    return {"auto_wrap_policy": BLOCKS, **more}


def with_original_parameters(**more):
    return {"use_orig_params": True, **more}


def pair():
    """Each rank is a shard group of its own, and both are copies; as a user makes them."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return alone[dist.get_rank()], dist.new_group(range(dist.get_world_size()))


def mesh_of(*shape, **names):
    return init_device_mesh("cpu", shape, **names)


# By name: what FullyShardedDataParallel is given, of the module and of what holds the enums (sherd, or torch's module).
CASES = {
    "nothing": lambda model, api: {},
    "a_policy": lambda model, api: {"auto_wrap_policy": torch_wrap.ModuleWrapPolicy({Block})},
    "a_policy_by_size": lambda model, api: {
        "auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=200)
    },
    "a_policy_without_a_name": lambda model, api: {
        "auto_wrap_policy": lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block)
    },
    "no_shard": lambda model, api: strategy(api, "NO_SHARD", **by_blocks()),
    "no_shard_of_a_group": lambda model, api: strategy(api, "NO_SHARD", process_group=dist.new_group([0, 1])),
    "no_shard_of_a_mesh": lambda model, api: strategy(api, "NO_SHARD", device_mesh=mesh_of(2)),
    "hybrid_over_nodes": lambda model, api: strategy(api, "HYBRID_SHARD", **by_blocks()),
    "hybrid_over_a_pair": lambda model, api: strategy(api, "HYBRID_SHARD", process_group=pair()),
    "hybrid_over_a_mesh": lambda model, api: strategy(
        api, "_HYBRID_SHARD_ZERO2", device_mesh=mesh_of(1, 2, mesh_dim_names=("copies", "parts"))
    ),
    "hybrid_over_a_mesh_without_names": lambda model, api: strategy(
        api, "HYBRID_SHARD", device_mesh=DeviceMesh("cpu", [[0], [1]])
    ),
    "a_group": lambda model, api: with_original_parameters(process_group=dist.new_group([0, 1]), **by_blocks()),
    "the_default_group": lambda model, api: by_blocks(
        process_group=dist.group.WORLD, device_id=torch.device("cpu"), backward_prefetch=None
    ),
    "mixed_precision": lambda model, api: with_original_parameters(
        mixed_precision=api.MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16), **by_blocks()
    ),
    "mixed_precision_of_all_inputs": lambda model, api: by_blocks(
        mixed_precision=api.MixedPrecision(
            torch.bfloat16, cast_forward_inputs=True, _module_classes_to_ignore=(nn.BatchNorm1d, nn.Linear)
        )
    ),
    "mixed_precision_without_a_policy": lambda model, api: {
        "mixed_precision": api.MixedPrecision(reduce_dtype=torch.bfloat16, keep_low_precision_grads=False)
    },
    "offload_on_a_mesh": lambda model, api: by_blocks(cpu_offload=api.CPUOffload(True), device_mesh=mesh_of(2)),
    "prefetch": lambda model, api: strategy(
        api,
        "SHARD_GRAD_OP",
        backward_prefetch=api.BackwardPrefetch.BACKWARD_POST,
        forward_prefetch=True,
        limit_all_gathers=False,
        **by_blocks(),
    ),
    "ignored_modules": lambda model, api: by_blocks(ignored_modules=[model.aside]),
    "ignored_parameters": lambda model, api: with_original_parameters(
        ignored_states=(model.aside.up.weight, model.aside.down.bias)
    ),
    "ranks_that_differ": lambda model, api: by_blocks(sync_module_states=True, ignored_states=[model.aside]),
    "ranks_that_differ_hybrid": lambda model, api: strategy(
        api, "HYBRID_SHARD", sync_module_states=True, **by_blocks()
    ),
    "meta": lambda model, api: by_blocks(param_init_fn=give_and_fill),
    "meta_with_ignored_modules": lambda model, api: by_blocks(
        ignored_modules=[model.aside], param_init_fn=give_and_fill
    ),
    "meta_with_ranks_that_differ": lambda model, api: with_original_parameters(
        param_init_fn=give_and_fill, sync_module_states=True
    ),
}


def built(name):
    """The model of a case, before it is sharded."""
    torch.manual_seed(dist.get_rank() if "differ" in name else 0)
    with torch.device("meta" if name.startswith("meta") else "cpu"):
        model = Assorted()
    if name == "meta_with_ignored_modules":
        model.aside.to_empty(device="cpu")
    if "ignored" in name or "differ" in name:
        fill(model.aside.up)  # nobody reduces its gradients, so that ranks would part here
        fill(model.aside.down)
        model.aside.requires_grad_(False)
    return model


def trained(model, flat):
    """The losses of two steps, and the whole parameters and the buffers after them."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2, eps=1e-3)
    if flat:
        flatten_optimizer(optimizer)
    data = torch.Generator().manual_seed(7 + dist.get_rank())
    losses = []
    for _ in range(2):
        loss = model(torch.randn(6, WIDTH, generator=data)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    return losses, {**whole_params(model), **buffers}


def set_up(text, model, arguments):
    """Do what the text says: the calls as they stand, the steps around them as the notes tell."""
    notes = re.sub(r"\n# +", " ", text)
    given = [*arguments.get("ignored_modules", ()), *arguments.get("ignored_states", ())]
    ignored = {below for each in given if isinstance(each, nn.Module) for below in each.modules()}
    modules = [each for each in model.modules() if each not in ignored]
    kept = {each for module in ignored for each in module.parameters()} or set(given)
    if "- meta device: before the calls" in notes:
        give_values(modules, notes, arguments)
    if "- sync_module_states: before the calls" in notes:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor not in kept:
                dist.broadcast(tensor.detach(), group_src=0)  # the groups of each mesh here are one rank or all ranks
    if "- device_id: before the calls" in notes:
        model.to(arguments["device_id"])
    names = {**{name: getattr(sherd, name) for name in sherd.__all__}, **vars(sherd.wrap), "torch": torch}
    names |= {"DeviceMesh": DeviceMesh, "init_device_mesh": init_device_mesh, "model": model, **arguments}
    # As the notes say: one node of two ranks, and a pair whose shard groups have one rank each.
    names |= {"ignored_params": kept} if "- ignored_params: the set of" in notes else {}
    names |= {"num_nodes": 1, "ranks_per_node": 2, "ranks": torch.tensor([[0], [1]])}
    exec(compile(text, "explained", "exec"), names)
    if "- meta device: after the calls" in notes:
        give_values(modules, notes, arguments)
    if "- buffer_dtype: after the calls" in notes:
        precise = arguments["mixed_precision"]._module_classes_to_ignore if "auto_wrap_policy" in arguments else ()
        for module in modules:
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and not isinstance(module, precise):
                    setattr(module, name, buffer.to(arguments["mixed_precision"].buffer_dtype))


def give_values(modules, notes, arguments):
    for module in modules:
        module.to_empty(device="cpu", recurse=False)
        if "reset_parameters()" not in notes:
            arguments["param_init_fn"](module)
        elif [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            module.reset_parameters()


def both_ways(name, know_the_module):
    """Training by the wrapper, and by the calls that `explain_migration` writes."""
    model = built(name)
    wrapped = trained(FullyShardedDataParallel(model, **CASES[name](model, sherd)), flat=False)
    model = built(name)
    arguments = CASES[name](model, torch_fsdp)
    set_up(explain_migration(model if know_the_module else None, **arguments), model, arguments)
    return wrapped, trained(model, flat=not arguments.get("use_orig_params", False))


# What does not depend on the module is the same without it.
WITHOUT_A_MODULE = ("a_policy_by_size", "ignored_parameters", "meta")


@pytest.mark.filterwarnings("ignore:mixed_precision and auto_wrap_policy were both given")
@pytest.mark.parametrize(
    ("name", "know_the_module"),
    [*((name, True) for name in CASES), *((name, False) for name in WITHOUT_A_MODULE)],
)
def test_the_calls_that_are_explained_train_as_the_wrapper_does(threads, monkeypatch, name, know_the_module):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for (losses, values), (ported_losses, ported_values) in threads(2).run(both_ways, name, know_the_module):
        assert ported_losses == pytest.approx(losses, rel=1e-6)
        assert_same(ported_values, values, rtol=None, atol=None)


@on_threads(2)
def test_without_a_function_modules_on_meta_reset_themselves():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    arguments = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
    set_up(explain_migration(model, **arguments), model, arguments)
    model(torch.ones(1, 4)).sum().backward()
    for each in whole_params(model).values():
        assert 0 < each.abs().max() <= 0.5  # a Linear of 4 inputs draws from -0.5 to 0.5


# What it says


def test_the_calls_are_printed_and_returned(capsys):
    text = explain_migration()
    assert capsys.readouterr().out == text + "\n"
    assert "fully_shard(model, prefetch_policy=PrefetchPolicy(forward_depth=0), placement=Flat())" in text


@on_processes(2)
def test_rank_0_alone_prints():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        explain_migration()
    assert ("fully_shard(" in out.getvalue()) == (dist.get_rank() == 0)


def test_torchs_values_are_said_as_sherds_are():
    def arguments(api):
        return {
            "sharding_strategy": api.ShardingStrategy.SHARD_GRAD_OP,
            "backward_prefetch": api.BackwardPrefetch.BACKWARD_POST,
            "mixed_precision": api.MixedPrecision(torch.bfloat16, cast_forward_inputs=True),
            "cpu_offload": api.CPUOffload(True),
        }

    text = explain_migration(**arguments(torch_fsdp))
    assert text == explain_migration(**arguments(sherd))
    for each in (
        "reshard_after_forward=False",
        "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, "
        "cast_root_forward_inputs=True)",
        "offload_policy=CPUOffloadPolicy()",
        "prefetch_policy=PrefetchPolicy(forward_depth=0, after_backward=True)",
    ):
        assert f"    {each},\n" in text


def test_a_policy_is_called_by_its_argument_and_norms_are_units_in_full_precision_if_there_are_any():
    lines = explain_migration(auto_wrap_policy=BLOCKS, mixed_precision=sherd.MixedPrecision(torch.float16))
    assert "auto_shard(\n    model, auto_wrap_policy,\n" in lines
    assert "mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.float16)" in lines
    without = explain_migration(Block(), auto_wrap_policy=BLOCKS, mixed_precision=sherd.MixedPrecision(torch.float16))
    assert "_module_classes_to_ignore" not in without


def test_what_has_no_counterpart_is_told():
    text = explain_migration(
        limit_all_gathers=True, auto_wrap_policy=CustomPolicy(fill), mixed_precision=sherd.MixedPrecision(torch.float16)
    )
    for each in ("limit_all_gathers: nothing to say", "returns dicts", "flatten_optimizer(optimizer)"):
        assert each in text


def test_a_call_has_no_lines_above_it_but_those_that_make_its_mesh():
    text = explain_migration(sharding_strategy=sherd.ShardingStrategy.HYBRID_SHARD, auto_wrap_policy=BLOCKS)
    lines = [line for line in text.splitlines() if line and not line.startswith(("#", " "))]
    mesh = 'mesh = init_device_mesh("cpu", (num_nodes, ranks_per_node), mesh_dim_names=("replicate", "shard"))'
    call = "auto_shard(model, auto_wrap_policy, mesh=mesh, prefetch_policy=PrefetchPolicy(forward_depth=0), "
    assert lines == [mesh, f"{call}placement=Flat())"]
    assert "# - ranks_per_node: LOCAL_WORLD_SIZE" in text


def test_placements_are_said_as_they_are():
    text = explain_migration(sharding_strategy=sherd.Placements.preset("zero2", sherd.Flat()), use_orig_params=True)
    names = {"Placements": sherd.Placements, "Flat": sherd.Flat, "Replicate": Replicate}
    placements = eval(text.partition("placements=")[2].partition(",\n)")[0], names)
    assert placements == sherd.Placements.preset("zero2", sherd.Flat())


def test_switches_of_the_environment_are_said(monkeypatch):
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    monkeypatch.setenv("FSDP_USE_FAKE_REDUCE", "1")
    text = explain_migration(mixed_precision=sherd.MixedPrecision(torch.float16))
    assert "full_precision_in_eval=True" in text
    assert "comm_policy=CommPolicy(fake_reduce=True)" in text


# What is refused


def test_what_fsdp1_would_not_take_is_named():
    for arguments, kind, text in (
        ({"sharding_stategy": 1}, PolicyTypeError, "did you mean sharding_strategy?"),
        ({"zzz": 1}, PolicyTypeError, "it takes module, process_group, sharding_strategy"),
        ({"sharding_strategy": "FULL_SHARD"}, PolicyTypeError, "expected sherd's ShardingStrategy"),
        ({"module": 3}, PolicyTypeError, "expected a module, got a int"),
        ({"ignored_modules": 3}, PolicyTypeError, "expected a list or a set of nn.Module"),
        ({"ignored_modules": [], "ignored_states": []}, PolicyError, "Cannot pass both"),
    ):
        with pytest.raises(kind, match=re.escape(text)):
            explain_migration(**arguments)
