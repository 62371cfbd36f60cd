"""torchtitan's trainer trains its Llama with sherd as it does with FSDP2, and as in one process.

torchtitan asks for an accelerator, and for triton, in which it has kernels for experts. On a CPU the tests give it
nothing for these kernels, a figure of memory, no time-out to change, attention by `scaled_dot_product_attention` (under
context parallelism by its own `FlexAttention` without a compiler), and samples of their own; all else is its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib.metadata
import importlib.util
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch import nn

import sherd
from sherd.errors import PolicyError, UnsupportedError
from sherd.interop.torchtitan import parallelize
from tests.interop.clients import recipe
from tests.support.comparing import assert_same, plain_name, whole_params
from tests.support.refusals import one_line
from tests.support.versions import needs_torch, torch_is_older

absent = importlib.util.find_spec("torchtitan") is None
needs_torchtitan = pytest.mark.skipif(absent, reason="torchtitan is absent: make test-interop installs it")
pytestmark = pytest.mark.filterwarnings("ignore")  # torchtitan's own, of many packages

BATCH, LENGTH, STEPS = 4, 32, 4
TYPED, PARTIAL = "spmd_types", "partial_dtensor"
OF_TORCH = PARTIAL if torch_is_older(2, 14) else TYPED
"""The backend under which torch's own `fully_shard` is the oracle: typed parameters it takes since 2.14."""
FIGURES = ("loss_metrics/global_avg_loss", "grad_norm", "loss_metrics/global_max_loss", "n_tokens_seen")


@functools.cache
def titans() -> Any:
    """What the tests use of torchtitan, once it was told that its device is the CPU, where experts have no kernels."""
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()
    with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):
        import torchtitan.tools.utils  # noqa: F401
    from torchtitan.components import dataloader, tokenizer
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.llama3 import config_registry
    from torchtitan.trainer import Trainer

    class Samples(dataloader.BaseDataLoader):
        """This rank's rows of the same batches, however many ranks share them."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(dataloader.BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, dp_rank: int, local_batch_size: int, **_: Any) -> None:
            self.rows = slice(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
            self.num_read = 0

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            while True:
                generator = torch.Generator().manual_seed(self.num_read)
                drawn = torch.randint(2048, (BATCH, LENGTH + 1), generator=generator)[self.rows]
                self.num_read += 1
                inputs = drawn[:, :-1].contiguous()
                yield {"input": inputs, "positions": torch.arange(LENGTH).expand_as(inputs)}, drawn[:, 1:].contiguous()

        def state_dict(self) -> dict[str, int]:
            return {"num_read": self.num_read}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.num_read = state["num_read"]

    class NoTokenizer(tokenizer.HuggingFaceTokenizer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(tokenizer.HuggingFaceTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            pass

    return SimpleNamespace(
        Samples=Samples,
        NoTokenizer=NoTokenizer,
        Trainer=Trainer,
        checkpointing={"selective": SelectiveAC.Config, "full": FullAC.Config, "none": lambda: None},
        attention={
            "plain": ScaledDotProductAttention.Config,
            "flex": functools.partial(FlexAttention.Config, block_size=LENGTH // 4),
        },
        registry=config_registry,
    )


def of_the_docs(folder: str) -> Any:
    """The config of the program in docs/do/other_packages.md, read as torchtitan's command line does."""
    from torchtitan.config import ConfigManager

    Path(folder, "my_titan.py").write_text(recipe("torchtitan"))
    with mock.patch.object(sys, "path", [folder, *sys.path]):
        return ConfigManager().parse_args(["--module", "my_titan", "--config", "debugmodel"])


def config_of(folder: str, fn: Any, settings: dict[str, Any]) -> Any:
    """torchtitan's debug model with two blocks, on the CPU. `settings` are its own, as on its command line."""
    config = of_the_docs(folder) if fn is None else titans().registry.llama3_debugmodel()
    model = dataclasses.replace(config.model_spec.model, layers=config.model_spec.model.layers[:2])
    for layer in model.layers:
        layer.attention.inner_attention = titans().attention[settings.get("attention", "plain")]()
    fn = fn or config.model_spec.parallelize_fn
    config.model_spec = dataclasses.replace(config.model_spec, model=model, parallelize_fn=fn)
    config.dump_folder = folder
    config.tokenizer, config.dataloader = titans().NoTokenizer.Config(), titans().Samples.Config()
    ranks = dist.get_world_size()
    sharing = [settings.get(f"parallelism.{axis}_parallel_degree", 1) for axis in ("tensor", "context")]
    degree = ranks // math.prod(sharing)
    for name, value in {
        "training.local_batch_size": BATCH // degree,
        "training.seq_len": LENGTH,
        "training.steps": STEPS,
        "training.disable_cuda_graphs": True,
        "training.mixed_precision_param": "float32",
        "checkpoint.enable": True,
        "checkpoint.interval": 2,
        "validator.enable": False,
        "debug.seed": 0,
        **{name: value for name, value in settings.items() if "." in name},
    }.items():
        section, _, field = name.partition(".")
        setattr(getattr(config, section), field, value)
    config.activation_checkpoint = titans().checkpointing[settings.get("activation_checkpoint", "selective")]()
    if settings.get("loss") == "whole":
        config.loss = config.loss.loss_fn
    return config


class Memory:
    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        from torchtitan.components.metrics import DeviceMemStats

        return DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


@contextlib.contextmanager
def flex_on_a_cpu() -> Iterator[None]:
    """Run torchtitan's `FlexAttention` uncompiled, which has a backward on a CPU that torch does not offer."""
    from torch.nn.attention import flex_attention as flex
    from torchtitan.models.common import attention

    masks = functools.partial(flex.create_block_mask, device="cpu")
    with (
        mock.patch.object(flex, "_validate_device"),
        mock.patch.object(attention, "_compiled_create_block_mask", masks),
        mock.patch.object(attention.FlexAttention, "_compiled_flex_attn", flex.flex_attention),
    ):
        yield


class Recorder:
    """A logger of torchtitan's."""

    def __init__(self) -> None:
        self.figures: dict[int, list[float]] = {}

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.figures[step] = [metrics[name] for name in FIGURES]

    def close(self) -> None:
        pass


def whole_process(model: nn.Module, **_: Any) -> nn.Module:
    return model


def with_fsdp2(model: nn.Module, **settings: Any) -> nn.Module:
    """torchtitan's own, with sums that gloo can do."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.models.llama3 import parallelize_llama

    model = parallelize_llama(model, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def trained(folder: str, fn: Any, settings: dict[str, Any]) -> Any:
    """The figures of each step, and the weights afterwards. Without `fn` it is the config of the docs."""
    titans()
    os.environ["LOCAL_RANK"] = "0"
    with (
        mock.patch("torchtitan.components.metrics.build_device_memory_monitor", Memory),
        mock.patch("torchtitan.distributed.utils.set_pg_timeouts"),
        flex_on_a_cpu(),
    ):
        trainer = titans().Trainer(config_of(folder, fn, settings))
        trainer.metrics_processor.logger = Recorder()
        try:
            trainer.train()
            (model,) = trainer.model_parts
            if fn not in (whole_process, with_fsdp2):
                names = [type(each).__name__ for each in model.modules() if isinstance(each, sherd.FSDPModule)]
                assert len(names) == 6, names  # the model, its embedding, two blocks, the norm and the head
            weights = {plain_name(name): value for name, value in whole_params(model).items()}
            return trainer.metrics_processor.logger.figures, weights
        finally:
            trainer.close()
            gc.enable()  # torchtitan does without


def close(found: Any, expected: Any) -> None:
    assert_same(found, expected, rtol=1e-4, atol=1e-5)


def of_all_ranks(run: Any, first: int = 3) -> Any:
    """From that step on, what does not depend on how ranks share the samples; and the weights."""
    figures, weights = run
    return {step: shown[:2] for step, shown in figures.items() if step >= first}, weights


def gone_on(folder: Path, name: str, world: Any, ranks: int, fn: Any, **settings: Any) -> Any:
    """What each rank finds after the checkpoint of step 2, which was saved in another folder."""
    shutil.copytree(folder / "checkpoint/step-2", folder.parent / name / "checkpoint/step-2")
    return world(ranks).run(trained, str(folder.parent / name), fn, settings)


def backend(name: str) -> dict[str, str]:
    return {"parallelism.spmd_backend": name}


@needs_torchtitan
def test_it_goes_on_after_one_processs_checkpoint_as_that_process_does(world, tmp_path):
    (expected,) = world(1).run(trained, str(tmp_path / "one"), whole_process, {})
    found = gone_on(tmp_path / "one", "sherd", world, 2, None)
    for each in found:
        close(of_all_ranks(each), of_all_ranks(expected))
    close(gone_on(tmp_path / "one", "fsdp2", world, 2, with_fsdp2, **backend(OF_TORCH)), found)


@needs_torchtitan
@pytest.mark.slow
def test_either_goes_on_after_the_others_checkpoint_and_its_own(world, tmp_path):
    for fn in (parallelize, with_fsdp2):
        expected = world(2).run(trained, str(tmp_path / fn.__name__), fn, backend(OF_TORCH))
        for other in (parallelize, with_fsdp2):
            name = f"{fn.__name__}-{other.__name__}"
            found = gone_on(tmp_path / fn.__name__, name, world, 2, other, **backend(OF_TORCH))
            for mine, value in zip(found, expected, strict=True):
                close(of_all_ranks(mine), of_all_ranks(value))


TENSOR, REPLICAS = ({f"parallelism.{axis}_degree": 2} for axis in ("tensor_parallel", "data_parallel_replicate"))
CONTEXT = {"parallelism.context_parallel_degree": 2, "attention": "flex"}
# Before 2.15 torch cuts masks for context parallelism in blocks of 128 positions alone.
WITH_CONTEXT = () if torch_is_older(2, 15) else ((2, CONTEXT), (4, CONTEXT))
MESHES = ((1, {}), (2, TENSOR), (2, REPLICAS), (4, TENSOR), (4, REPLICAS), *WITH_CONTEXT)


@needs_torchtitan
@pytest.mark.slow
@pytest.mark.parametrize("spmd_backend", [TYPED, PARTIAL])
def test_every_mesh_trains_as_one_process(world, tmp_path, spmd_backend):
    (expected,) = world(1).run(trained, str(tmp_path / "one"), whole_process, backend(spmd_backend))
    for ranks, mesh in MESHES:
        for found in gone_on(
            tmp_path / "one", f"{mesh} of {ranks}", world, ranks, parallelize, **mesh, **backend(spmd_backend)
        ):
            close(of_all_ranks(found), of_all_ranks(expected))


@needs_torchtitan
@needs_torch(2, 14, "FSDP2 takes typed parameters")
@pytest.mark.slow
def test_typed_parameters_have_the_figures_and_weights_of_fsdp2(world, tmp_path):
    for ranks, mesh in MESHES[1:]:
        folders = (str(tmp_path / f"{who} {mesh} of {ranks}") for who in ("fsdp2", "sherd"))
        expected, found = (
            world(ranks).run(trained, folder, fn, mesh)
            for folder, fn in zip(folders, (with_fsdp2, parallelize), strict=True)
        )
        close(found, expected)


@needs_torchtitan
@pytest.mark.slow
@pytest.mark.parametrize("spmd_backend", [TYPED, PARTIAL])
def test_what_it_is_asked_for_changes_no_number(world, tmp_path, spmd_backend):
    (expected,) = world(1).run(trained, str(tmp_path / "one"), whole_process, backend(spmd_backend))
    whole_loss = {"loss": "whole"}
    for number, (fn, settings) in enumerate(
        (
            (parallelize, {"parallelism.fsdp_reshard_after_forward": "always", **whole_loss}),
            (parallelize, {"parallelism.fsdp_reshard_after_forward": "never", "activation_checkpoint": "full"}),
            (parallelize, {"training.enable_cpu_offload": True, "activation_checkpoint": "none"}),
            (parallelize, {"compile.enable": True, "compile.backend": "aot_eager"}),
            (parallelize, {"debug.spmd_typechecking": spmd_backend == TYPED, **TENSOR}),
            (functools.partial(parallelize, prefetch_policy=sherd.PrefetchPolicy(forward_depth=2)), whole_loss),
        )
    ):
        for found in gone_on(tmp_path / "one", f"sherd{number}", world, 2, fn, **settings, **backend(spmd_backend)):
            close(of_all_ranks(found), of_all_ranks(expected))


@needs_torchtitan
@pytest.mark.slow
def test_bfloat16_has_the_losses_and_norms_of_fsdp2(world, tmp_path):
    half = {"training.mixed_precision_param": "bfloat16", **backend(OF_TORCH)}
    expected = world(2).run(trained, str(tmp_path / "fsdp2"), with_fsdp2, half)
    found = world(2).run(trained, str(tmp_path / "sherd"), parallelize, half)
    # Not the weights: Adam makes steps of one length of gradients that differ in bfloat16's last place, near zero.
    close([figures for figures, _ in found], [figures for figures, _ in expected])


def refused(kind: type[Exception], version: str | None = "0.3.0", placement: Any = None, **settings: Any) -> str:
    """What is said of a config of torchtitan, before anything of torchtitan is used."""
    choices = {"spmd_backend": "partial_dtensor", "pp_enabled": False, "ep_enabled": False}
    choices |= {"enable_fsdp_symm_mem": False, **settings}
    config = dict.fromkeys(("parallel_dims", "parallelism"), SimpleNamespace(**choices))
    others = dict.fromkeys(("training", "compile_config", "ac_config", "dump_folder"))
    found = {"side_effect": importlib.metadata.PackageNotFoundError()} if version is None else {"return_value": version}
    with mock.patch("importlib.metadata.version", **found):
        return one_line(kind, parallelize, nn.Linear(1, 1), placement=placement, **config, **others)


def test_what_was_not_tried_is_refused_in_one_line():
    assert "write --parallelism.spmd_backend spmd_types" in refused(PolicyError, spmd_backend="full_dtensor")
    assert "leave placement out, or write Shard(dim)" in refused(PolicyError, placement=sherd.Flat())
    for name, said in (
        ("pp_enabled", "pipeline_parallel_degree"),
        ("ep_enabled", "expert_parallel_degree"),
        ("enable_fsdp_symm_mem", "enable_fsdp_symm_mem"),
    ):
        assert f"parallelism.{said}: sherd was not tried" in refused(UnsupportedError, **{name: True}), name
    for version, found in (("0.2.2", "0.2.2"), ("0.4.0", "0.4.0"), (None, "missing")):
        said = refused(UnsupportedError, version)
        assert f"torchtitan is {found}, and 0.3 was tried; pip install 'torchtitan==0.3.*'" in said, version
