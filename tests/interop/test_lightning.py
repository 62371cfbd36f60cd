"""Programs of Lightning's Trainer and Fabric train with sherd's strategies as they do without sharding, under DDP."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.metadata
import io
import itertools
import logging
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import sherd
from sherd.errors import (
    CheckpointError,
    ModuleError,
    NoCheckpointError,
    OptimStateError,
    PolicyError,
    PolicyTypeError,
    StateError,
    UnsupportedError,
)
from tests.interop import clients
from tests.support.comparing import assert_same, plain_name, whole_params
from tests.support.refusals import one_line

lightning = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")
pytorch = lightning.pytorch

from lightning.fabric.strategies import DDPStrategy as FabricDDP  # noqa: E402
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

from sherd.interop.lightning import EmaCallback, SherdFabricStrategy, SherdStrategy  # noqa: E402

assert_close = functools.partial(assert_same, rtol=None, atol=None)
SAMPLES = 48
KINDS = ("full", "sharded")
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"policy": {clients.Block}, "placement": sherd.Flat()},
    {"policy": {nn.Linear}, "placement": sherd.Owned()},
    {"policy": sherd.wrap.ModuleWrapPolicy({nn.Linear}), "reshard_after_forward": True},
]


@contextmanager
def begun() -> Iterator[None]:
    """This rank as Lightning expects it of a launcher, without its words."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rank = {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0"}
    with mock.patch.dict(os.environ, rank), redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\..*")
        warnings.filterwarnings("ignore", message="`isinstance.treespec, LeafSpec.` is deprecated")
        yield


class Module(lightning.LightningModule):
    """The Net of the other clients, with a parameter of its own that the steps use."""

    def __init__(self, net: Any = clients.Net) -> None:
        super().__init__()
        self.net = net()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = (self(batch[0]) * self.scale).square().mean()
        self.log("loss", loss, sync_dist=True)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("validation", (self(batch[0]) * self.scale).square().mean(), sync_dist=True)

    def test_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("test", (self(batch[0]) * self.scale).square().mean(), sync_dist=True)

    def predict_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return self(batch[0]) * self.scale

    def configure_optimizers(self) -> Any:
        decayed, others = [], []
        for name, parameter in reversed(list(self.named_parameters())):
            (others if name.endswith("bias") else decayed).append(parameter)
        groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def data() -> DataLoader:
    """Four batches on any number of ranks, which share each batch."""
    generator = torch.Generator().manual_seed(1)
    samples = TensorDataset(torch.randn(SAMPLES, 8, dtype=torch.float64, generator=generator))
    sampler = DistributedSampler(samples, shuffle=False)
    return DataLoader(samples, SAMPLES // 4 // dist.get_world_size(), sampler=sampler)


def trainer_of(folder: str, strategy: Any, **more: Any) -> Any:
    given = {"precision": "64-true", "max_epochs": 2, "enable_checkpointing": False, "num_sanity_val_steps": 0, **more}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        default_root_dir=folder,
        **quiet,
        **given,
    )


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {plain_name(name): value.detach().clone() for name, value in whole_params(module).items()}


def run(folder: str, strategy: Any, module: Any = None, **more: Any) -> tuple[Any, ...]:
    """Train, evaluate and predict. Returns all figures, weights and outputs."""
    module = module or Module()
    trainer = trainer_of(folder, strategy, **more)
    trainer.fit(module, data(), data())
    assert isinstance(module, sherd.FSDPModule) is isinstance(strategy, SherdStrategy)
    figures = {name: value.item() for name, value in trainer.callback_metrics.items()}
    (tested,) = trainer.test(module, data(), verbose=False)
    predicted = torch.cat(trainer.predict(module, data()))
    return module.seen, figures, tested, predicted, weights(module)


def trained(folder: str, layout: dict[str, Any]) -> None:
    with begun():
        for settings in (
            lambda: {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
            lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
            lambda: {"callbacks": [EarlyStopping("validation", min_delta=10, patience=1)], "max_epochs": 5},
        ):
            expected = run(folder, DDPStrategy(), **settings())
            assert len(expected[0]) == 8
            found = run(folder, SherdStrategy(**layout), **settings())
            assert_close(found, expected)


@pytest.mark.values
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_trainer_clips_accumulates_stops_evaluates_and_predicts_as_under_ddp(layout, world, tmp_path):
    world(2).run(trained, str(tmp_path), layout)


# Checkpoints


def interrupted(folder: str, kind: str, layout: dict[str, Any]) -> tuple[Any, ...]:
    """Train three epochs, with a checkpoint after each. Returns what comes after the first."""
    with begun():
        keeps = ModelCheckpoint(folder, "{epoch}", monitor="validation", mode="max", save_top_k=2, save_last=True)
        strategy = DDPStrategy() if kind == "plain" else SherdStrategy(state_dict_type=kind, **layout)
        module = Module()
        trainer = trainer_of(folder, strategy, max_epochs=3, enable_checkpointing=True, callbacks=[keeps])
        trainer.fit(module, data(), data())
        trainer.save_checkpoint(f"{folder}/last.ckpt")
        kept = sorted(each.name for each in Path(folder).iterdir() if each.name.startswith("epoch"))
        assert len(kept) == 2, kept
        assert "epoch=0.ckpt" in kept
        (tested,) = trainer.test(module, data(), ckpt_path=keeps.best_model_path, verbose=False)
        return module.seen[4:], tested, keeps.best_model_score


def resumed(folder: str, kind: str, layout: dict[str, Any]) -> tuple[Any, ...]:
    with begun():
        module = Module(Unlike)
        strategy = DDPStrategy() if kind == "plain" else SherdStrategy(state_dict_type=kind, **layout)
        trainer = trainer_of(folder, strategy, max_epochs=3)
        trainer.fit(module, data(), ckpt_path=f"{folder}/epoch=0.ckpt")
        if kind != "plain":
            trainer.save_checkpoint(f"{folder}/epoch=0.ckpt")  # in the place of either form
            assert Path(f"{folder}/epoch=0.ckpt").is_dir() is (kind == "sharded")
        return module.seen, weights(module)


class Unlike(clients.Net):
    """Other initial weights, which a checkpoint replaces."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(1)


def of_all_ranks(seen: list[Any]) -> torch.Tensor:
    """The mean losses: each rank has its share of a batch."""
    return torch.tensor(seen, dtype=torch.float64).mean(0)


@pytest.mark.slow
@pytest.mark.pairs
@pytest.mark.parametrize("saved", [*KINDS, "plain"])
@pytest.mark.parametrize("loaded", [*KINDS, "plain"])
@pytest.mark.parametrize("num_ranks", [2, 4, 1])
@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_a_run_is_resumed_from_either_form_of_checkpoint_on_any_number_of_ranks(
    saved, loaded, num_ranks, layout, world, tmp_path
):
    if saved == "sharded" and loaded == "plain":
        pytest.skip("DDPStrategy reads no folder")
    before = world(4 if num_ranks == 2 else 2).run(interrupted, str(tmp_path), saved, layout)
    plain = world(2).run(interrupted, str(tmp_path / "plain"), "plain", {})
    after = world(num_ranks).run(resumed, str(tmp_path), loaded, {})
    assert_close(of_all_ranks([seen for seen, *_ in before]), of_all_ranks([seen for seen, *_ in plain]))
    assert_close([rest for _, *rest in before], [plain[0][1:]] * len(before))
    assert_close(of_all_ranks([seen for seen, _ in after]), of_all_ranks([seen for seen, *_ in plain]))
    if saved == "full":
        module = Module.load_from_checkpoint(str(tmp_path / "last.ckpt"))
        assert_close(weights(module), after[0][1])


class SavesFirst(pytorch.callbacks.Checkpoint):
    """Saves before the first step."""

    def on_train_start(self, trainer: Any, _: Any) -> None:
        trainer.save_checkpoint(f"{trainer.default_root_dir}/first.ckpt")


class Stateless(Module):
    """Its optimizer keeps nothing, and got its scheduler after the checkpoint; a parameter has no gradient."""

    def __init__(self, net: Any = clients.Net) -> None:
        super().__init__(net)
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.net.__class__ is not Unlike:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)]


class Unused(Stateless):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def from_before(folder: str) -> None:
    with begun():
        for kind, make in itertools.product(KINDS, (Module, Stateless, Unused)):
            module, callbacks = make(), [SavesFirst()]
            path, given = f"{folder}/{kind}/{make.__name__}", {"enable_checkpointing": True, "max_epochs": 1}
            trainer = trainer_of(path, SherdStrategy(state_dict_type=kind), callbacks=callbacks, **given)
            trainer.fit(module, data())
            trainer.save_checkpoint(f"{path}/last.ckpt")
            plain, first = make(), make(Unlike)
            strategy = DDPStrategy(find_unused_parameters=True)
            trainer_of(path, strategy, max_epochs=2).fit(plain, data())
            trainer_of(path, SherdStrategy()).fit(first, data(), ckpt_path=f"{path}/first.ckpt")
            assert module.seen == pytest.approx(plain.seen[:4])
            assert_close((first.seen, weights(first)), (plain.seen, weights(plain)))
            last = make(Unlike)
            trainer_of(path, SherdStrategy()).fit(last, data(), ckpt_path=f"{path}/last.ckpt")
            assert_close((last.seen, weights(last)), (plain.seen[4:], weights(plain)))


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_before_its_first_step_and_of_optimizers_without_state(world, tmp_path):
    world(2).run(from_before, str(tmp_path))


class Tuned(Module):
    """A head that is trained from the start, and a backbone that a callback adds to the optimizer later."""

    def __init__(self, net: Any = clients.Net) -> None:
        super().__init__(lambda: nn.Linear(3, 3).double())
        self.backbone = net()
        with torch.no_grad():
            self.net.weight.fill_(0.5 if net is clients.Net else 1.0)
            self.net.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2)


def tuned(folder: str, kind: str, layout: dict[str, Any], after: int | None = None) -> tuple[Any, ...]:
    """Train three epochs, with the backbone from the second on; or go on `after` an epoch. Returns losses, weights."""
    with begun():
        strategy = DDPStrategy() if kind == "plain" else SherdStrategy(state_dict_type=kind, **layout)
        adds = pytorch.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-3)
        keeps = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        given = {"callbacks": [adds] if after is not None else [adds, keeps], "enable_checkpointing": after is None}
        module = Tuned(clients.Net if after is None else Unlike)
        trainer = trainer_of(folder, strategy, max_epochs=3, **given)
        trainer.fit(module, data(), ckpt_path=None if after is None else f"{folder}/epoch={after}.ckpt")
        assert [len(group["params"]) for group in trainer.optimizers[0].param_groups] == [3, 8]
        return module.seen, weights(module)


@pytest.mark.slow
@pytest.mark.pairs
@pytest.mark.parametrize("saved", [*KINDS, "plain"])
@pytest.mark.parametrize("loaded", KINDS)
@pytest.mark.parametrize("num_ranks", [4, 2])
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_groups_of_parameters_that_a_callback_has_added_are_there_when_a_run_is_resumed(
    saved, loaded, num_ranks, layout, world, tmp_path
):
    # DDP does not reduce what is frozen when it begins, so it trains on one rank.
    plain, plain_weights = world(1).run(tuned, str(tmp_path / "plain"), "plain", {})[0]
    folder = tmp_path / saved
    before = world(1 if saved == "plain" else 2).run(tuned, str(folder), saved, layout)
    assert_close(
        (of_all_ranks([seen for seen, _ in before]), before[0][1]), (torch.tensor(plain).double(), plain_weights)
    )
    for epoch in (0, 1):
        # Not the run that went on: Lightning freezes the backbone anew, and adds its group without unfreezing it.
        losses, expected = world(1).run(tuned, str(tmp_path / "plain"), "plain", {}, epoch)[0]
        after = world(num_ranks).run(tuned, str(folder), loaded, layout, epoch)
        assert_close(of_all_ranks([seen for seen, _ in after]), torch.tensor(losses).double())
        assert_close([each for _, each in after], [expected] * num_ranks)


class Other(Module):
    """`Module` with a parameter that is renamed, missing, more or of another shape."""

    def __init__(self, what: str, strict: bool) -> None:
        super().__init__(Unlike)
        self.strict_loading = strict
        if what in ("renamed", "missing"):
            del self.scale
        if what in ("renamed", "more"):
            self.scales = nn.Parameter(torch.ones(3, dtype=torch.float64))
        if what == "shape":
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        used = [each for name, each in self.named_parameters() if name.startswith("scale")]
        return sum(used, self(batch[0])).square().mean()

    def test_step(self, batch: list[torch.Tensor], index: int) -> None:
        self(batch[0])


class Fewer(Module):
    """The same parameters, of which the optimizer steps other ones, or in other groups."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def configure_optimizers(self) -> Any:
        parts = [list(self.net.parameters()), [self.scale]][: self.groups]
        return torch.optim.AdamW([{"params": part} for part in parts], lr=1e-2)


class Twice(Module):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net.parameters(), lr=0.1), torch.optim.SGD([self.scale], lr=0.1)]


def of_other_models(folder: str, kind: str) -> None:
    with begun():
        module, path = Module(), f"{folder}/saved.ckpt"
        trainer = trainer_of(folder, SherdStrategy(state_dict_type=kind), max_epochs=1)
        trainer.fit(module, data())
        trainer.save_checkpoint(path)
        fabric = fabric_of(SherdFabricStrategy(state_dict_type=kind))
        (saved, optimizer), values = fabric.setup(module, module.configure_optimizers()["optimizer"]), weights(module)
        fabric.save(f"{folder}/fabric", {"model": saved, "optimizer": optimizer})
        for what, words in {
            "renamed": ("scales", "scale"),
            "missing": ("scale",),
            "more": ("scales",),
            "shape": ("scale", "torch.Size([3])", "torch.Size([1])"),
        }.items():
            trainer = trainer_of(folder, SherdStrategy(), max_epochs=2)
            said = one_line(CheckpointError, trainer.fit, Other(what, True), data(), ckpt_path=path)
            assert all(word in said for word in (*words, "strict_loading=False")), (what, said)
            state = {"model": fabric.setup(Other(what, True))}
            assert words[0] in one_line(CheckpointError, fabric.load, f"{folder}/fabric", state)
            loose, trainer = Other(what, False), trainer_of(folder, SherdStrategy(), max_epochs=1)
            if what == "shape":
                assert words[0] in one_line(CheckpointError, trainer.fit, loose, data(), ckpt_path=path)
                continue
            trainer.test(loose, data(), path, verbose=False)
            common = [name for name in values if name.startswith("net")]
            found = weights(loose)
            assert_close([found[name] for name in common], [values[name] for name in common])
            resumed, trainer = Other(what, False), trainer_of(folder, SherdStrategy(), max_epochs=2)
            if kind == "full" and what != "renamed":  # a file has numbers of parameters, as any optimizer's state has
                assert "parameters in 2 groups" in one_line(
                    CheckpointError, trainer.fit, resumed, data(), None, None, path
                )
                continue
            trainer.fit(resumed, data(), ckpt_path=path)
            steps = [each["step"].item() for each in trainer.optimizers[0].state.values()]
            assert sorted(set(steps)) == (
                [8.0] if (kind, what) in (("full", "renamed"), ("sharded", "missing")) else [4.0, 8.0]
            )
        for other, words in (
            (Fewer(1), "the optimizer has 8 parameters in 1 groups" if kind == "full" else "also has scale"),
            (Fewer(2), "same shape as its parameter" if kind == "full" else "build the optimizer with the same groups"),
            (Twice(), "has 1 optimizers, not 2; make as many"),
        ):
            trainer = trainer_of(folder, SherdStrategy(), max_epochs=2)
            assert words in one_line((CheckpointError, OptimStateError), trainer.fit, other, data(), ckpt_path=path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused_or_its_common_names_are_taken(kind, world, tmp_path):
    (tmp_path / kind).mkdir()
    world(2).run(of_other_models, str(tmp_path / kind), kind)


class OfTorch(Module):
    """Sharded with torch's FSDP2 by its own hook, as Lightning's ModelParallelStrategy wants it."""

    def configure_model(self) -> None:
        for module in (*self.net.blocks, self):
            torch_fsdp.fully_shard(module, mesh=self.device_mesh["data_parallel"])


def from_torchs_shards(folder: str) -> None:
    with begun():
        strategy = pytorch.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        keeps, module = ModelCheckpoint(folder, "{epoch}", save_top_k=-1), OfTorch()
        given = {"precision": "32-true", "callbacks": [keeps], "enable_checkpointing": True}
        trainer_of(folder, strategy, **given).fit(module, data())
        resumed = Module(Unlike)
        trainer_of(folder, SherdStrategy()).fit(resumed, data(), ckpt_path=f"{folder}/epoch=0.ckpt")
        assert_close((resumed.seen, weights(resumed)), (module.seen[4:], weights(module)))


@pytest.mark.slow
def test_a_folder_of_lightnings_own_sharded_strategy_is_read(world, tmp_path):
    world(2).run(from_torchs_shards, str(tmp_path))


# What is sharded, and how


class ByHand(Module):
    """Its blocks are sharded by its own hook, one of them by the other front end."""

    def configure_model(self) -> None:
        if isinstance(self.net.blocks[0], sherd.FSDPModule):
            return
        sherd.fully_shard(self.net.blocks[0])
        self.net.blocks[1] = sherd.FullyShardedDataParallel(self.net.blocks[1], use_orig_params=True)


class InParts(Module):
    """Two optimizers, which training_step steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(8, 3).double()

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        for optimizer, part in zip(self.optimizers(), (self.net, self.other), strict=True):
            optimizer.zero_grad()
            loss = part(batch[0]).square().mean()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            self.seen.append(loss.item())

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.net, self.other)]


def step_by_hand(module: InParts, epochs: int) -> None:
    """Epochs of `InParts` in one process, whose batches are those of all ranks."""
    optimizers = module.configure_optimizers()
    for (x,) in list(DataLoader(data().dataset, SAMPLES // 4)) * epochs:
        for optimizer, part in zip(optimizers, (module.net, module.other), strict=True):
            optimizer.zero_grad()
            part(x).square().mean().backward()
            nn.utils.clip_grad_norm_(part.parameters(), 0.1)
            optimizer.step()


class Accumulating(Module):
    def on_after_backward(self) -> None:
        self.seen.append(float(self.net.head.weight.grad is None))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert 0.1 < sherd.clip_grad_norm_(self.parameters(), float("inf")).item() < 10


def other_modules(folder: str) -> None:
    with begun():
        assert_close(run(folder, SherdStrategy(), ByHand()), run(folder, DDPStrategy()))
        plain = InParts()
        in_parts = run(folder, SherdStrategy(), copy.deepcopy(plain))
        step_by_hand(plain, 2)
        assert_close(in_parts[-1], weights(plain))
        assert run(folder, SherdStrategy(), Module(functools.partial(nn.Linear, 8, 3, dtype=torch.float64)))
        reduced_later = Accumulating()
        run(folder, SherdStrategy(), reduced_later, accumulate_grad_batches=4)
        assert [seen for seen in reduced_later.seen if seen in (0.0, 1.0)] == [1.0, 1.0, 1.0, 0.0] * 2


@pytest.mark.slow
def test_modules_may_be_sharded_in_part_step_themselves_have_no_blocks_and_accumulate_without_reductions(
    world, tmp_path
):
    world(2).run(other_modules, str(tmp_path))


def over_replicas(folder: str) -> None:
    with begun():
        strategy = SherdStrategy(device_mesh=(2, 2), state_dict_type="sharded")
        module = Module()
        trainer = trainer_of(folder, strategy)
        trainer.fit(module, data())
        assert module.net.head.weight.device_mesh.shape == (2, 2)
        assert_close(weights(module), run(folder, DDPStrategy())[-1])


@pytest.mark.slow
def test_replicas_of_shards_train_as_under_ddp(world, tmp_path):
    world(4).run(over_replicas, str(tmp_path))


class Image(Module):
    """With a batch norm, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(x.to(self.norm.running_mean.dtype)))


def chosen(precision: str) -> dict[str, Any]:
    """Arguments of the Trainer, which takes "16-mixed" on a CPU as a plugin alone."""
    if precision != "16-mixed":
        return {"precision": precision}
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    return {"precision": None, "plugins": [pytorch.plugins.MixedPrecision(precision, "cpu", scaler)]}


def in_low_precision(folder: str) -> None:
    with begun():
        for precision in ("bf16-mixed", "bf16-true", "16-mixed"):
            found, expected = [
                run(folder, strategy, Image(), **chosen(precision)) for strategy in (SherdStrategy(), DDPStrategy())
            ]
            assert {each.dtype for each in found[-1].values() if each.is_floating_point()} == {
                torch.bfloat16 if precision == "bf16-true" else torch.float32
            }
            # Not the evaluations: DDP sends rank 0's buffers to the other ranks.
            assert_same([found[0], found[-1]], [expected[0], expected[-1]], rtol=2e-2, atol=2e-2)
        module = Image()
        with pytest.raises(
            ValueError, match="SyncBatchNorm expected input tensor to be on"
        ):  # on a CPU it has no kernel
            run(folder, SherdStrategy(), module, sync_batchnorm=True, precision="32-true")
        assert isinstance(module.norm, nn.SyncBatchNorm)


@pytest.mark.slow
def test_low_precision_trains_as_under_ddp(world, tmp_path):
    world(2).run(in_low_precision, str(tmp_path))


# Fabric


def fabric_of(strategy: Any) -> Any:
    fabric = lightning.Fabric(accelerator="cpu", strategy=strategy, devices=dist.get_world_size(), precision="64-true")
    fabric.launch()
    return fabric


def fabric_run(folder: str, strategy: Any, clips: dict[str, float], saved: int = 0) -> tuple[Any, ...]:
    """Train two modules, the second on the first one's outputs, from step `saved` on. Returns figures and weights."""
    fabric = fabric_of(strategy)
    modules = [Unlike(), nn.Linear(3, 1)] if saved else [clients.Net(), nn.Linear(3, 1)]
    nn.init.constant_(modules[1].weight, 0.5)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in modules]
    (first, first_optimizer), (second, second_optimizer) = map(fabric.setup, modules, optimizers)
    scheduler = torch.optim.lr_scheduler.StepLR(first_optimizer, 1, 0.9)
    state = {"first": first, "second": second, "of first": first_optimizer, "of second": second_optimizer}
    state |= {"scheduler": scheduler, "step": saved}
    figures: list[float] = []
    if saved:
        rest = fabric.load(f"{folder}/state", state)
        assert (rest, state["step"]) == ({"note": "kept"}, saved)
    for step, (x,) in enumerate(fabric.setup_dataloaders(data())):
        if step < saved:
            continue
        is_last = step % 2 == 1
        with fabric.no_backward_sync(first, enabled=not is_last), fabric.no_backward_sync(second, enabled=not is_last):
            loss = second(first(x)).square().mean()
            fabric.backward(loss)
        figures.append(fabric.all_reduce(loss.detach()).item())
        if is_last:
            norm = fabric.clip_gradients(first, first_optimizer, **clips)
            figures.append(0.0 if norm is None else norm.item())
            for optimizer in (first_optimizer, second_optimizer):
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
        if step == 1 and not saved:
            fabric.save(f"{folder}/state", {**state, "step": 2, "note": "kept"})
    return figures, weights(modules[0]), weights(modules[1])


def with_fabric(folder: str) -> None:
    with begun():
        for clips in ({"max_norm": 0.1}, {"clip_val": 0.01}):
            expected = fabric_run(folder, FabricDDP(), clips)
            for kind in KINDS:
                path = f"{folder}/{kind}/{next(iter(clips))}"
                Path(path).mkdir(parents=True, exist_ok=True)
                assert_close(fabric_run(path, SherdFabricStrategy(state_dict_type=kind), clips), expected)
                flat = SherdFabricStrategy({nn.Linear}, placement=sherd.Flat(), state_dict_type=kind)
                figures, *after = fabric_run(path, flat, clips, saved=2)
                assert_close((expected[0][3:], *expected[1:]), (figures, *after))
        raw = fabric_of(SherdFabricStrategy())
        module = clients.Net()
        if raw.is_global_zero:
            torch.save(module.state_dict(), f"{folder}/raw")
        raw.barrier()
        loaded = raw.setup(Unlike())
        raw.load_raw(f"{folder}/raw", loaded)
        assert_close(weights(loaded.module), weights(module))


@pytest.mark.slow
def test_fabric_trains_several_modules_and_saves_and_loads_them_as_under_ddp(world, tmp_path):
    world(2).run(with_fabric, str(tmp_path))


def on_meta(folder: str) -> None:
    with begun():
        torch.manual_seed(dist.get_rank())
        trainer = trainer_of(folder, SherdStrategy(), precision="32-true")
        with trainer.init_module(empty_init=True):
            module = Started()
        assert module.net.head.weight.is_meta
        trainer.fit(module, data())
        fabric = fabric_of(SherdFabricStrategy(device_mesh=(2, 1)))
        with fabric.init_module(empty_init=True):
            net = clients.Net()
        net = fabric.setup(net)
        values = weights(net.module)
        assert all(value.isfinite().all() and value.std() > 0 for value in values.values())
        assert_close(values, fabric.broadcast(values))


class Started(Image):
    """Each of its modules knows how to begin."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


@pytest.mark.slow
def test_a_module_may_start_on_the_meta_device_with_the_same_values_on_all_replicas(world, tmp_path):
    world(2).run(on_meta, str(tmp_path))


# Averages


def averaged(folder: str, strategy: Any, callback: Any, ckpt_path: str | None = None) -> tuple[Any, ...]:
    module = Module(Unlike if ckpt_path else clients.Net)
    keeps = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    given = {"callbacks": [callback, keeps], "enable_checkpointing": True, "num_sanity_val_steps": 2}
    trainer = trainer_of(folder, strategy, **given)
    trainer.fit(module, data(), data(), ckpt_path=ckpt_path)
    figures = {name: value.item() for name, value in trainer.callback_metrics.items()}
    (tested,) = trainer.test(module, data(), verbose=False)
    return figures, tested, weights(module)


def with_averages(folder: str) -> None:
    with begun():
        theirs = pytorch.callbacks.EMAWeightAveraging(decay=0.9)
        expected = averaged(f"{folder}/plain", DDPStrategy(), theirs)
        saved = torch.load(f"{folder}/plain/epoch=0.ckpt")["state_dict"]
        for kind in KINDS:
            path = f"{folder}/{kind}"
            strategy = functools.partial(SherdStrategy, state_dict_type=kind)
            assert_close(averaged(path, strategy(), EmaCallback(0.9)), expected)
            if kind == "full":
                assert_close(torch.load(f"{path}/epoch=0.ckpt")["state_dict"], saved)
            module = Module(Unlike)
            trainer_of(folder, strategy()).test(module, data(), f"{path}/epoch=0.ckpt", verbose=False)
            assert_close(weights(module), saved)
            assert_close(averaged(f"{path}/2", strategy(), EmaCallback(0.9), f"{path}/epoch=0.ckpt"), expected)


@pytest.mark.slow
def test_averages_are_those_of_lightnings_callback_and_are_saved_and_resumed(world, tmp_path):
    world(2).run(with_averages, str(tmp_path))


def by_word(folder: str, strategy: Any, callbacks: list[Any]) -> list[Any]:
    """Train, then evaluate and predict with the best and the last checkpoint; the first epoch's is the best.

    DDP does so with a new Trainer: Lightning's own averages are put aside by the one that has trained.
    """
    keeps = ModelCheckpoint(folder, monitor="validation", mode="max", save_top_k=2, save_last=True)
    trainer = trainer_of(folder, strategy, callbacks=[*callbacks, keeps], enable_checkpointing=True)
    module, given = Module(), {"verbose": False}
    trainer.fit(module, data(), data())
    figures: list[Any] = []
    words = ["best", "last", "best"]
    if isinstance(strategy, DDPStrategy) and not isinstance(strategy, SherdStrategy):
        paths = {"best": keeps.best_model_path, "last": keeps.last_model_path}
        words, trainer = [paths[word] for word in words], trainer_of(folder, DDPStrategy())
    for word in words:
        figures += trainer.validate(module, data(), word, **given) + trainer.test(module, data(), word, **given)
        figures += [torch.cat(trainer.predict(module, data(), ckpt_path=word)), weights(module)]
    assert figures[0]["validation"] > figures[4]["validation"]
    return figures


def by_words(folder: str, averages: bool) -> None:
    with begun():
        theirs = [pytorch.callbacks.EMAWeightAveraging(decay=0.5)] if averages else []
        expected = by_word(f"{folder}/plain", DDPStrategy(), theirs)
        for kind in KINDS:
            ours = [EmaCallback(0.5)] if averages else []
            assert_close(by_word(f"{folder}/{kind}", SherdStrategy(state_dict_type=kind), ours), expected)


@pytest.mark.slow
@pytest.mark.parametrize("averages", [True, False])
def test_evaluations_take_the_best_and_the_last_checkpoint_by_these_words(averages, world, tmp_path):
    world(2).run(by_words, str(tmp_path), averages)


PROGRAM = """
import os, signal, sys
from datetime import timedelta
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from sherd.interop.lightning import SherdStrategy
from tests.interop.test_lightning import Module, data

ends, kind, folder = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests behind it has them ignore Ctrl-C

class Ending(Module):
    def train_dataloader(self):
        return data()

    def training_step(self, batch, index):
        if self.global_step == 5 and ends == "by an error" and self.global_rank == 1:
            raise ValueError("a bad batch")
        if self.global_step == 5 and ends == "by Ctrl-C":  # which all ranks get
            self.trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, index)

    def on_train_start(self):
        print("began at", self.global_step, flush=True)

strategy = SherdStrategy(state_dict_type=kind, timeout=timedelta(seconds=90))
keeps = ModelCheckpoint(folder, every_n_train_steps=2, save_last=True)
given = dict(precision="64-true", max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, callbacks=[keeps], **given)
trainer.fit(Ending(), ckpt_path=None if ends.startswith("by") else "last")
"""


def program_that_ends(folder: Path, ends: str, kind: str) -> Any:
    """Returns the code and the words of a program whose two ranks Lightning starts."""
    root = Path(__file__).parent.parent.parent
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")
    }
    return subprocess.run(
        [sys.executable, str(program), ends, kind, str(folder / "kept")],
        env={**environment, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_and_an_error_of_one_rank_end_all_ranks_and_the_last_checkpoint_goes_on(kind, tmp_path):
    for ends in ("by Ctrl-C", "by an error"):
        ended = program_that_ends(tmp_path, ends, kind)
        assert ended.returncode in (1, -9), ended.stderr  # Lightning kills the ranks beside one that ends
        if ends == "by an error":  # not the timeout's
            assert "ValueError: a bad batch" in ended.stderr
            assert re.search(r"CommError: .*rank 1 .* has left", ended.stderr), ended.stderr
        resumed = program_that_ends(tmp_path, "goes on", kind)
        assert (resumed.returncode, resumed.stdout.count("began at 4")) == (0, 2), resumed.stderr
        shutil.rmtree(tmp_path / "kept")


def test_a_strategy_is_made_of_a_config_as_lightnings_cli_does():
    parser = pytest.importorskip("jsonargparse").ArgumentParser()
    parser.add_argument("--strategy", type=pytorch.strategies.Strategy)
    config = {
        "class_path": "sherd.interop.lightning.SherdStrategy",
        "init_args": {
            "policy": ["tests.interop.clients.Block"],
            "state_dict_type": "sharded",
            "device_mesh": [2, 1],
            "process_group_backend": "gloo",
            "timeout": "0:05:00",
        },
        "dict_kwargs": {"reshard_after_forward": False, "on_touch": "error"},
    }
    made = parser.instantiate(parser.parse_object({"strategy": config})).strategy
    assert isinstance(made, SherdStrategy)
    assert str(made._policy) == "ModuleWrapPolicy({Block})"
    assert (made.state_dict_type, made._shape, made._timeout) == ("sharded", (2, 1), timedelta(minutes=5))
    assert made._given == config["dict_kwargs"]


def test_the_strategies_have_a_name_and_fabrics_is_whole_before_its_ranks_are():
    assert type(pytorch.strategies.StrategyRegistry.get("sherd")) is SherdStrategy
    fabric = lightning.fabric.strategies.STRATEGY_REGISTRY.get("sherd")
    module = nn.Linear(1, 1)
    assert type(fabric) is SherdFabricStrategy
    with mock.patch.object(fabric, "_shard"), mock.patch.object(SherdFabricStrategy, "precision"):
        assert fabric.setup_module(module) is module


def evaluated_in_inference_mode(folder: str) -> None:
    with begun():
        strategies = (SherdStrategy(state_dict_type="sharded") for _ in range(2))
        trainer = trainer_of(folder, next(strategies), max_epochs=1)
        trainer.fit(Module(), data())
        trainer.save_checkpoint(f"{folder}/saved")
        expected = trainer.test(Module(Unlike), data(), ckpt_path=f"{folder}/saved", verbose=False)
        with torch.inference_mode():
            module, trainer = Module(Unlike), trainer_of(folder, next(strategies))
            assert trainer.test(module, data(), ckpt_path=f"{folder}/saved", verbose=False) == expected
        trainer.fit(module, data())


def test_a_sharded_checkpoint_is_loaded_in_inference_mode(world, tmp_path):
    world(2).run(evaluated_in_inference_mode, str(tmp_path))


# What cannot be


def test_a_folder_of_shards_goes_to_no_url():
    for strategy in (SherdStrategy(state_dict_type="sharded"), SherdFabricStrategy(state_dict_type="sharded")):
        for url in ("s3://bucket/last", "gs:/bucket/last", "memory://last", Path("s3://bucket")):
            assert 'write state_dict_type="full"' in one_line(CheckpointError, strategy._make_room, url), url


def refusals(folder: str) -> None:
    with begun():
        swa = pytorch.callbacks.StochasticWeightAveraging(1e-2)
        for callback in (pytorch.callbacks.EMAWeightAveraging(decay=0.9), swa):
            trainer = trainer_of(folder, SherdStrategy(), callbacks=[callback])
            assert "use sherd.interop.lightning.EmaCallback" in one_line(
                UnsupportedError, trainer.fit, Module(), data()
            )
        trainer = trainer_of(folder, SherdStrategy())
        with trainer.init_module(empty_init=True):
            module = Module()
            module.metric = torchmetrics.MeanMetric()
        assert "metric, a MeanMetric, started on the meta device" in one_line(ModuleError, trainer.fit, module, data())
        trainer = trainer_of(folder, SherdStrategy("auto"))
        assert "leave the policy out" in one_line(PolicyError, trainer.fit, ByHand(), data())
        trainer = trainer_of(folder, SherdStrategy(state_dict_type="sharded"))
        trainer.fit(Module(), data())
        trainer.save_checkpoint(f"{folder}/saved")
        fabric = fabric_of(SherdFabricStrategy())
        assert "write fabric.load(path, {" in one_line(StateError, fabric.load, f"{folder}/saved")
        stray = torch.optim.SGD(nn.Linear(1, 1).parameters())
        assert "give both to fabric.setup" in one_line(StateError, fabric.save, f"{folder}/x", {"optimizer": stray})
        Path(f"{folder}/empty").mkdir(exist_ok=True)
        assert "has no meta.pt" in one_line(NoCheckpointError, fabric.load, f"{folder}/empty", {"model": Module()})


@pytest.mark.slow
def test_what_cannot_be_is_refused_in_one_line(world, tmp_path):
    world(2).run(refusals, str(tmp_path))
    for kind in (SherdStrategy, SherdFabricStrategy):
        for argument, value, words in (
            ("state_dict_type", "folder", 'expected "full" or "sharded"'),
            ("device_mesh", (1, 2, 3), "expected (replicas, shards)"),
        ):
            assert f"{kind.__name__}({argument}={value!r}): {words}" in one_line(PolicyError, kind, **{argument: value})
        assert "gives fully_shard cut, which it does not take" in one_line(PolicyTypeError, kind, cut=1)
    name = "sherd.interop.lightning"
    for version, words in (("2.4.1", "lightning is 2.4.1, and 2.6 was tried"), (None, "lightning is missing")):
        gone = importlib.metadata.PackageNotFoundError("lightning")
        with (
            mock.patch("importlib.metadata.version", side_effect=gone if version is None else [version]),
            mock.patch.dict(sys.modules),
        ):
            del sys.modules[name]
            said = one_line(UnsupportedError, importlib.import_module, name)
        assert words in said
        assert "pip install 'lightning==2.6.*'" in said


def recipes(folder: str) -> None:
    os.chdir(folder)
    with begun():
        given = {"data": DataLoader(torch.randn(32, 8), 4)}
        module = OfTheDocs()
        names = clients.run_recipe("Lightning", module=module, Block=clients.Block, **given)
        assert isinstance(module.net.blocks[0], sherd.FSDPModule)
        assert (names["trainer"].global_step, Path("checkpoints/last.ckpt").is_file()) == (4, True)
        model = clients.Net().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = {"loss_of": lambda model, batch: model(batch).square().mean()}
        clients.run_recipe("Lightning Fabric", model=model, optimizer=optimizer, **given, **loss)
        assert Path("state/meta.pt").is_file()


class OfTheDocs(Module):
    def __init__(self) -> None:
        super().__init__()
        self.float()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self(batch).square().mean()

    def test_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("test", self(batch).square().mean(), sync_dist=True)


@pytest.mark.slow
def test_the_programs_of_the_docs_run(world, tmp_path):
    world(2).run(recipes, str(tmp_path))
