"""A program of Hugging Face's accelerate trains with sherd in place of FSDP2 as it does without a plugin."""

import functools
import importlib
import importlib.metadata
import os
import subprocess
import sys
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import sherd
from sherd.errors import ModuleError, PolicyTypeError, StateError, UnsupportedError
from sherd.interop.accelerate import in_place_of_fsdp
from tests.api.test_save_pretrained import built
from tests.interop.clients import ROOT, Block, Net, Program, begun, inputs, random_numbers, recipe, run_recipe
from tests.support.comparing import assert_same
from tests.support.ranks.bodies import on_processes
from tests.support.refusals import one_line

accelerate = pytest.importorskip("accelerate")
gather_object = pytest.importorskip("accelerate.utils").gather_object

BLOCKS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
FSDP1 = {**BLOCKS, "fsdp_version": 1}
FRONTS = [
    *(
        pytest.param({**BLOCKS, "fsdp_version": 2}, {"placement": each}, id=str(each))
        for each in (None, sherd.Flat(), sherd.Owned())
    ),
    *(pytest.param({**FSDP1, "use_orig_params": each}, {}, id=f"fsdp1-{each}") for each in (False, True)),
]
assert_close = functools.partial(assert_same, rtol=None, atol=None)


def whole_run(plugin, **options):
    """A training with all that accelerate offers beside it: figures, weights, outputs."""
    with begun(plugin is not None, **options):
        program = Program(plugin)
        return program.train(stopped=5), program.weights(), program.evaluate()


def sharded_run(folder, plugin, options):
    figures, weights, outputs = whole_run(plugin, **options)
    with begun(**options):
        program = Program(plugin)
        accelerator, model = program.accelerator, program.model
        program.train(stopped=5)
        if plugin["fsdp_version"] == 2:
            units = [type(each).__name__ for each in model.modules() if isinstance(each, sherd.FSDPModule)]
            assert units == ["FSDPNet", *["FSDPBlock"] * 3]
            assert accelerator.unwrap_model(model) is model
        else:
            units = [type(each.module) for each in sherd.FullyShardedDataParallel.fsdp_modules(model)]
            assert units == [Net, *[Block] * 3]
            assert type(accelerator.unwrap_model(model)) is Net
        number = torch.tensor([accelerator.process_index + 1.0])
        assert accelerator.reduce(number).item() == sum(range(1, accelerator.num_processes + 1))
        assert gather_object([accelerator.process_index]) == list(range(accelerator.num_processes))
        state = accelerator.get_state_dict(model)
        assert_close(state, weights if accelerator.is_main_process else {})
        accelerator.save_model(model, folder)
        accelerator.wait_for_everyone()
        plain = Net()
        accelerate.load_checkpoint_in_model(plain, folder)
        with torch.no_grad():
            torch.testing.assert_close(plain(inputs()), outputs)
    return figures, weights, outputs


@pytest.mark.values
@pytest.mark.parametrize(("plugin", "options"), FRONTS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_program_trains_evaluates_stops_and_saves_its_model_as_in_one_process(
    plugin, options, num_ranks, world, tmp_path
):
    (expected,) = world(1).run(whole_run, None)
    for found in world(num_ranks).run(sharded_run, str(tmp_path), plugin, options):
        assert_close(found, expected)


def saved_run(folder, plugin, **options):
    """Save between two steps; the figures that come then, and the random numbers."""
    with begun(**options):
        program = Program(plugin)
        program.train(stopped=2)
        program.accelerator.save_state(folder)
        numbers = random_numbers()
        return program.train(2), program.weights(), numbers


def resumed_run(folder, plugin, **options):
    with begun(**options):
        program = Program(plugin)
        program.accelerator.load_state(folder)
        numbers = random_numbers()
        return program.train(2), program.weights(), numbers


@pytest.mark.pairs
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("num_ranks", [2, 1, 4])
@pytest.mark.parametrize(("plugin", "options"), FRONTS)
def test_a_state_continues_on_as_many_ranks_and_on_others(kind, num_ranks, plugin, options, world, tmp_path):
    plugin = {**plugin, "state_dict_type": kind}
    expected = world(2).run(saved_run, str(tmp_path), plugin, **options)
    found = world(num_ranks).run(resumed_run, str(tmp_path), plugin, **options)
    for figures, weights, _ in found:
        assert_close((figures, weights), expected[0][:2])
    if num_ranks == 2:  # a rank's generators go on where they were
        assert [numbers for *_, numbers in found] == [numbers for *_, numbers in expected]


def saved_after_a_wrapper(folder):
    """Once a wrapper's state dict was asked for, torch's functions ask sherd about all optimizers."""
    get_model_state_dict(sherd.FullyShardedDataParallel(torch.nn.Linear(2, 2)))
    return saved_run(folder, BLOCKS), resumed_run(folder, BLOCKS)


def test_a_state_is_loaded_where_the_wrapper_was_used_before(world, tmp_path):
    for saved, resumed in world(2).run(saved_after_a_wrapper, str(tmp_path)):
        assert_close(resumed[:2], saved[:2])


@contextmanager
def begun_with(library):
    """accelerate with sherd, or with torch's FSDP2, which accelerate has on accelerators alone."""
    import accelerate.accelerator as names

    theirs = names.fsdp2_prepare_model
    with begun():
        if library == "torch":
            names.fsdp2_prepare_model = theirs
        yield


def in_turns(libraries, folder, plugin):
    """Train two micro-batches with each of `libraries`, which loads what the one before has saved."""
    figures = []
    for turn, library in enumerate(libraries):
        with begun_with(library):
            program = Program(plugin)
            assert isinstance(program.model, sherd.FSDPModule) is (library == "sherd")
            if turn:
                program.accelerator.load_state(f"{folder}/{turn}")
            figures += program.train(2 * turn, 2 * turn + 2)
            program.accelerator.save_state(f"{folder}/{turn + 1}")
    return figures, program.weights()


@pytest.mark.values
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_state_goes_from_fsdp2_to_sherd_and_back(kind, world, tmp_path):
    plugin = {**BLOCKS, "state_dict_type": kind}
    expected = world(2).run(in_turns, ["torch"] * 3, str(tmp_path / "torch"), plugin)
    found = world(2).run(in_turns, ["torch", "sherd", "torch"], str(tmp_path / "turns"), plugin)
    assert_close(found, expected)


def half_precision(library, precision, version=2):
    with begun_with(library):
        program = Program({**BLOCKS, "fsdp_version": version}, precision)
        assert {parameter.dtype for parameter in program.model.parameters()} == {torch.float32}
        figures = program.train()
        if version == 2:
            assert program.model(inputs()[:1]).dtype == HALVES[precision]
            assert isinstance(program.model, sherd.FSDPModule) is (library == "sherd")
        scaler = program.accelerator.scaler
        return figures, scaler and scaler.get_scale()


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("precision", HALVES)
def test_half_precision_trains_as_under_fsdp2(precision, world):
    (expected, scale), *_ = world(2).run(half_precision, "torch", precision)
    for version in (2, 1):
        for found, own_scale in world(2).run(half_precision, "sherd", precision, version):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-2, atol=2e-2)
            assert own_scale == scale


def differing():
    """rank 0's weights on rank 0 alone, as transformers loads them; what a checkpoint lacks is on the meta device."""
    model = Net()
    if torch.distributed.get_rank():
        for parameter in model.parameters():
            nn.init.constant_(parameter, float("nan"))
        model.head.to("meta")
    return model


def settings():
    expected = whole_run(BLOCKS)
    for more in (
        {"activation_checkpointing": True},
        {"reshard_after_forward": False},
        {"cpu_offload": True},
        {"min_num_params": 50, "auto_wrap_policy": "size_based_wrap", "transformer_cls_names_to_wrap": None},
        {"auto_wrap_policy": None},
    ):
        assert_close(whole_run({**BLOCKS, **more}), expected)
    for policy in ("auto", sherd.wrap.ModuleWrapPolicy({nn.Linear})):
        assert_close(whole_run({"reshard_after_forward": True}, policy=policy), expected)
    with mock.patch("tests.interop.clients.Net", differing):
        assert_close(whole_run({**BLOCKS, "cpu_ram_efficient_loading": True}), expected)
    on_meta = functools.partial(Net().to, "meta")
    with begun(), mock.patch("tests.interop.clients.Net", on_meta):
        said = one_line(ModuleError, Program, {**BLOCKS, "cpu_ram_efficient_loading": True})
        assert "blocks.0.linear.weight" in said, said
    with begun():
        program = Program({**BLOCKS, "ignored_modules": r"blocks\.1\..*"})
        assert sorted(name for name, each in program.model.named_parameters() if type(each) is nn.Parameter) == [
            "blocks.1.linear.bias",
            "blocks.1.linear.weight",
        ]


def test_settings_of_the_plugin_and_arguments_are_kept_and_change_no_number(world):
    world(2).run(settings)


def settings_of_fsdp1(use_orig_params):
    plugin = {**FSDP1, "use_orig_params": use_orig_params}
    expected = whole_run(plugin)
    for more in (
        {"activation_checkpointing": True},
        {"cpu_offload": True},
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"sharding_strategy": "NO_SHARD"},
        {"backward_prefetch": "BACKWARD_POST", "forward_prefetch": True, "limit_all_gathers": False},
        {"min_num_params": 50, "auto_wrap_policy": "size_based_wrap", "transformer_cls_names_to_wrap": None},
        {"auto_wrap_policy": None},
    ):
        assert_close(whole_run({**plugin, **more}), expected)
    assert_close(whole_run(plugin, policy=sherd.wrap.ModuleWrapPolicy({nn.Linear})), expected)
    assert_close(whole_run(plugin, comm_policy=sherd.CommPolicy(divergence="trust")), expected)
    with mock.patch("tests.interop.clients.Net", differing):
        assert_close(whole_run({**plugin, "cpu_ram_efficient_loading": True, "sync_module_states": True}), expected)
        assert_close(whole_run({**plugin, "sync_module_states": True}), expected)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_settings_of_fsdp1s_plugin_are_kept_and_change_no_number(use_orig_params, world):
    world(2).run(settings_of_fsdp1, use_orig_params)


def units_of(library, kind, plugin):
    """The names of the modules that accelerate makes units of in a model of transformers."""
    with begun_with(library):
        plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, **plugin)
        accelerator, model = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin), built(kind)
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        units = sherd.FSDPModule if library == "sherd" else torch.distributed.fsdp.FSDPModule
        return [name for name, each in model.named_modules() if isinstance(each, units)]


@on_processes(2)
def test_units_are_those_of_accelerates_fsdp2():
    for kind, block in (("llama", "LlamaDecoderLayer"), ("llama tied", "LlamaDecoderLayer"), ("gpt2", "GPT2Block")):
        for plugin in ({**BLOCKS, "transformer_cls_names_to_wrap": [block]}, {}):
            expected = units_of("torch", kind, plugin)
            assert units_of("sherd", kind, plugin) == expected, (kind, plugin)
            assert len(expected) > 3, expected


class Params4bit(nn.Parameter):
    """Stands for bitsandbytes'."""


@on_processes(2)
def test_four_bits_are_sharded_where_they_are_stored_as_floating_point():
    with begun():
        accelerator = Program({**BLOCKS, "cpu_ram_efficient_loading": True}).accelerator
        accelerator.free_memory()
        model = Net()
        for name, dtype in (("bytes", torch.uint8), ("halves", torch.bfloat16)):
            packed = torch.Tensor._make_subclass(Params4bit, torch.ones(4, 1, dtype=dtype), False)
            model.blocks[0].register_parameter(name, packed)
        model, _ = accelerator.prepare(model, torch.optim.SGD([model.head.weight, model.head.bias]))
        assert type(model.blocks[0].bytes) is Params4bit
        assert isinstance(model.blocks[0].halves, DTensor)
        accelerator.backward(model(inputs()).sum())


def compiled():
    expected = whole_run(BLOCKS)
    with begun():
        program = Program(BLOCKS, more={"dynamo_backend": "eager"})
        assert type(program.model).__name__ == "OptimizedModule"
        assert isinstance(program.accelerator.unwrap_model(program.model, keep_torch_compile=False), sherd.FSDPModule)
        assert_close((program.train(stopped=5), program.weights(), program.evaluate()), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo asks
def test_a_model_that_accelerate_compiles_trains_as_otherwise(world):
    world(2).run(compiled)


def over_a_mesh():
    config = accelerate.ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    with begun():
        program = Program(BLOCKS, more={"parallelism_config": config})
        assert program.model.head.weight.device_mesh.shape == (2, 2)
        return program.train(stopped=5), program.weights()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Slicing a flattened dim:UserWarning")  # accelerate's way to its mesh
def test_replicas_of_shards_train_as_in_one_process(world):
    ((figures, weights, _),) = world(1).run(whole_run, None)
    for found in world(4).run(over_a_mesh):
        assert_close(found, (figures, weights))


@on_processes(2)
def test_a_model_that_is_sharded_already_is_left_as_it_is():
    model = sherd.fully_shard(Net())
    with begun():
        program = Program(BLOCKS)
        found = program.accelerator.prepare(model, torch.optim.SGD(model.parameters()))[0]
    assert found is model
    assert not any(isinstance(block, sherd.FSDPModule) for block in model.blocks)


def test_one_process_without_a_launcher_is_not_sharded():
    with begun():
        assert type(Program(BLOCKS).model) is Net


@on_processes(2)
def test_a_model_may_come_without_an_optimizer():
    with begun():
        accelerator = Program(BLOCKS).accelerator
        accelerator.free_memory()
        model, data = accelerator.prepare(Net(), DataLoader(inputs(), batch_size=4))
        assert isinstance(accelerator.prepare(Net()).blocks[0], sherd.FSDPModule)
        assert len(accelerator._optimizers) == 0
        with torch.no_grad():
            assert_close(torch.cat([accelerator.gather_for_metrics(model(x)) for x in data]), Net()(inputs()))


def refusals():
    for options, version, words in (
        ({"policy": "auto"}, 1, "in_place_of_fsdp(policy=...), with fsdp_version=1: expected a policy of sherd.wrap"),
        ({"placement": sherd.Flat()}, 1, "in_place_of_fsdp(placement=...), with fsdp_version=1: expected"),
        ({"use_orig_params": True}, 2, "in_place_of_fsdp, with fsdp_version=2, gives fully_shard use_orig_params"),
    ):
        with begun(**options):
            plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=version)
            said = one_line(PolicyTypeError, accelerate.Accelerator, cpu=True, fsdp_plugin=plugin)
            assert words in said, said
    with begun(False):
        Program(BLOCKS)
        assert "write in_place_of_fsdp() above the first Accelerator" in one_line(StateError, in_place_of_fsdp)


def test_what_cannot_be_is_refused_in_one_line(world):
    world(2).run(refusals)
    assert "in_place_of_fsdp gives fully_shard cut, which it does not take" in one_line(
        PolicyTypeError, in_place_of_fsdp, cut=1
    )
    for policy in (False, "blocks", 3):
        said = one_line(PolicyTypeError, in_place_of_fsdp, policy)
        assert f"in_place_of_fsdp(policy={policy!r}): expected a policy of sherd.wrap" in said, policy
    for version, words in (("1.14.2", "accelerate is 1.14.2, and 1.15 was tried"), (None, "accelerate is missing")):
        gone = importlib.metadata.PackageNotFoundError("accelerate")
        with mock.patch("importlib.metadata.version", side_effect=gone if version is None else [version]):
            said = one_line(UnsupportedError, in_place_of_fsdp)
        assert words in said, said
        assert "pip install 'accelerate==1.15.*'" in said


def held_by(*owners):
    values = {name: value for owner in owners for name, value in vars(owner).items()}
    return values, {name: value.__code__ for name, value in values.items() if hasattr(value, "__code__")}


def test_accelerate_has_its_own_names_back_at_the_end():
    import accelerate.accelerator as names

    owners = names, names.Accelerator, names.FullyShardedDataParallelPlugin
    before, modules = held_by(*owners), set(sys.modules)
    with in_place_of_fsdp():
        now = held_by(*owners)
        assert {name for name in before[0] if before[0][name] is not now[0][name]} == {
            *("AcceleratorState", "get_grad_scaler", "get_fsdp2_grad_scaler", "fsdp2_prepare_model"),
            *("prepare", "_prepare_fsdp2", "__post_init__"),
        }
        assert {name for name in before[1] if before[1][name] is not now[1].get(name)} >= {
            *("prepare_model", "get_state_dict", "extract_model_from_parallel"),
            *(f"{verb}_fsdp_{what}" for verb in ("save", "load") for what in ("model", "optimizer")),
        }
    assert before == held_by(*owners)
    assert {name for name in set(sys.modules) - modules if name.startswith("sherd.interop.accelerate,")} == set()


def test_two_that_end_in_the_order_in_which_they_began_give_the_names_back():
    import accelerate.accelerator as names

    owners = names, names.Accelerator, names.FullyShardedDataParallelPlugin
    before = held_by(*owners)
    first, second = in_place_of_fsdp(), in_place_of_fsdp()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert before != held_by(*owners), "the second one is in force"
    second.__exit__(None, None, None)
    assert before == held_by(*owners)
    with in_place_of_fsdp():
        in_place_of_fsdp()  # as a program does, which ends with the context
    assert before == held_by(*owners)


def recipe_of_accelerate(folder):
    os.chdir(folder)
    expected = Net()
    with begun():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names = run_recipe(
            "Accelerate",
            model=model,
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1),
            data=DataLoader(inputs(), batch_size=4),
            loss_of=lambda model, batch: model(batch).square().mean(),
        )
        assert isinstance(names["model"], sherd.FSDPModule)
        assert isinstance(names["model"].blocks[0], sherd.FSDPModule)
        state = names["accelerator"].get_state_dict(model)
        names["accelerator"].wait_for_everyone()
        accelerate.load_checkpoint_in_model(expected, "out")
        assert not state or state.keys() == expected.state_dict().keys()
        assert_same({name: expected.get_parameter(name).data for name in state}, state)


def test_the_program_of_the_docs_runs(world, tmp_path):
    world(2).run(recipe_of_accelerate, str(tmp_path))


LAUNCHED = """
from sherd.interop.accelerate import in_place_of_fsdp

in_place_of_fsdp()

import accelerate
import sherd
import torch
from tests.interop.clients import Net

accelerator = accelerate.Accelerator()
model = Net()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
units = sum(isinstance(module, sherd.FSDPModule) for module in model.modules())
accelerator.backward(model(torch.ones(2, 8, device=accelerator.device)).float().sum())
optimizer.step()
accelerator.print("units", units, accelerator.num_processes, accelerator.mixed_precision)
accelerator.end_training()
"""


def test_accelerates_command_makes_the_config_of_the_docs_of_one_for_fsdp1(tmp_path):
    yaml = pytest.importorskip("yaml")
    expected = yaml.safe_load(recipe("Accelerate", "yaml"))
    config = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_use_orig_params": True}
    config |= {name: value for name, value in expected["fsdp_config"].items() if "reshard" not in name}
    path = tmp_path / "fsdp.yaml"
    path.write_text(yaml.safe_dump({**expected, "fsdp_config": {**config, "fsdp_version": 1}}))
    command = importlib.import_module("accelerate.commands.to_fsdp2")
    words = command.to_fsdp2_command_parser().parse_args(["--config_file", str(path), "--overwrite"])
    command.to_fsdp2_command(words)
    assert yaml.safe_load(path.read_text()) == expected


@pytest.mark.slow
def test_accelerate_launch_takes_the_config_of_the_docs(tmp_path):
    config = recipe("Accelerate", "yaml")
    (tmp_path / "fsdp.yaml").write_text(config.replace("LlamaDecoderLayer", Block.__name__))
    (tmp_path / "program.py").write_text(LAUNCHED)
    words = ["-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file", "fsdp.yaml", "program.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "units 4 2 bf16\n", done.stderr
