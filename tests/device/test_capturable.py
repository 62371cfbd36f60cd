"""`sherd.capturable` on several ranks with a device each: what may be captured, and what is named."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import sherd
import simdevice
from tests.gpu.setting_model import batch
from tests.gpu.setting_runs import mesh_of, sharded
from tests.gpu.settings import Setting, legal
from tests.support.models import next_token_loss

SETTINGS = {
    "Shard(0)": Setting(),
    "Shard(1)": Setting(placement="Shard(1)"),
    "Flat": Setting(placement="Flat"),
    "Blocks": Setting(placement="Blocks"),
    "Owned": Setting(placement="Owned"),
    "wrapper": Setting(front="wrapper"),
    "flat wrapper": Setting(front="flat wrapper"),
    "flat wrapper, gradients sharded": Setting(front="flat wrapper", strategy="zero2"),
    "ZeRO-1": Setting(strategy="zero1"),
    "ZeRO-2": Setting(strategy="zero2"),
    "replicated": Setting(strategy="ddp"),
    "HSDP": Setting(mesh=(2, 2), strategy="hsdp"),
    "HSDP, Flat": Setting(mesh=(2, 2), strategy="hsdp", placement="Flat"),
    "hybrid": Setting(mesh=(2, 2), strategy="hfsdp"),
    "bfloat16": Setting(param_dtype="bfloat16", reduce_dtype="float32"),
    "bfloat16, wrapper": Setting(param_dtype="bfloat16", front="wrapper"),
    "no prefetch": Setting(forward_depth=0, backward_depth=0),
    "deep prefetch": Setting(num_blocks=4, forward_depth=3, backward_depth=3),
    "prefetch after backward": Setting(after_backward=True),
    "kept": Setting(reshard=False),
    "freed": Setting(reshard=True),
    "in parts": Setting(part_bytes=1),
    "coalesced": Setting(transport="coalesced"),
    "recomputed": Setting(recompute="kept graph"),
    "tied": Setting(tied=True),
    "frozen": Setting(frozen="block"),
    "micro-batches": Setting(micro_batches=2, accumulation="accumulate"),
    "micro-batches, not synced": Setting(micro_batches=2, accumulation="no_sync"),
}


class Step:
    """A training whose step may be captured: AdamW that counts on the device, clipping, and inputs that stay."""

    def __init__(self, setting: Setting, **options: Any) -> None:
        self.setting, self.count = setting, 0
        self.model: Any = sharded(setting, mesh_of(setting.mesh))
        options = {"capturable": not setting.offload, "foreach": True} | options
        params = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(params, lr=1e-2, **options)
        device = f"sim:{torch.accelerator.current_device_index()}"
        self.batches = [batch(0, micro, dist.get_rank()).to(device) for micro in range(setting.micro_batches)]

    def backward(self) -> torch.Tensor:
        losses = []
        several = self.setting.accumulation == "accumulate"
        with sherd.accumulate(self.model, len(self.batches)) if several else contextlib.nullcontext():
            for number, micro in enumerate(self.batches, 1):
                if self.setting.accumulation == "no_sync":
                    self.model.set_requires_gradient_sync(number == len(self.batches))
                losses.append(next_token_loss(self.model, micro))
                losses[-1].backward()
        return torch.stack([each.detach() for each in losses]).mean()

    def finish(self) -> None:
        sherd.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __call__(self) -> None:
        self.count += 1
        self.loss = self.backward()
        self.finish()


def found(setting: Setting, make: Callable[[Setting], Any] = Step, **options: Any) -> tuple[bool, str]:
    step = make(setting, **options)
    report = sherd.capturable(step.model, step)
    return bool(report), str(report)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_of_every_setting_may_be_captured(name, sim_world):
    setting = legal(SETTINGS[name])
    for may, text in sim_world(setting.num_ranks).run(found, setting).values:
        assert may, text


# What is named


class ReadsItsLoss(Step):
    def finish(self) -> None:
        self.seen = self.loss_now.item()
        super().finish()

    def backward(self) -> torch.Tensor:
        self.loss_now = super().backward()
        return self.loss_now


class KeepsItsLosses(Step):
    def finish(self) -> None:
        self.kept = [*getattr(self, "kept", []), torch.ones(1000, device=self.batches[0].device)]
        super().finish()


class FollowsAnEvent(Step):
    def finish(self) -> None:
        super().finish()
        self.model.set_post_optim_event(torch.accelerator.current_stream().record_event())


class AddsGradientsUp(Step):
    """Gradients are dropped by a step and made again before the next one adds to them."""

    def finish(self) -> None:
        sherd.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.older = getattr(self, "older", [])[-1:] + [each.grad for each in self.model.parameters()]
        for each in self.model.parameters():
            each.grad = each.grad.clone()


class RunsAUnitOfTwo(Step):
    def backward(self) -> torch.Tensor:
        blocks = self.model.blocks
        if self.count % 2:
            with torch.no_grad():
                blocks[0](torch.ones(1, 16, device=self.batches[0].device))
        return super().backward()


NAMED = {
    "loss.item()": (ReadsItsLoss, {}, {}, ("host sync", "item", "test_capturable.py:")),
    "offloaded": (Step, {"offload": "pinned"}, {}, ("host sync", "CPUOffloadPolicy", "sherd/engine/")),
    "counts on the host": (Step, {}, {"capturable": False}, ("host value", "AdamW", "capturable=False")),
    "losses kept": (KeepsItsLosses, {}, {}, ("allocation", "bytes more are alive after each step")),
    "event of the optimizer": (FollowsAnEvent, {}, {}, ("outside event", "set_post_optim_event")),
    "gradients that move": (AddsGradientsUp, {}, {}, ("address", "gradient of")),
    "a unit in one step": (RunsAUnitOfTwo, {}, {}, ("schedule", "of blocks.0 ", "test_capturable.py:")),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_keeps_a_step_from_being_captured_is_named_with_unit_and_line(name, sim_world):
    make, choices, options, words = NAMED[name]
    for may, text in sim_world(2).run(found, Setting(**choices), make, **options).values:
        assert not may
        for word in words:
            assert word in text, text


def one_rank_waits() -> str:
    make = ReadsItsLoss if dist.get_rank() else Step
    step = make(Setting())
    return str(sherd.capturable(step.model, step))


class Raises(Step):
    def finish(self) -> None:
        super().finish()
        if self.count == 3 and dist.get_rank():
            raise ValueError("no more data")


def raising() -> str:
    step = Raises(Setting())
    with pytest.raises(sherd.errors.StateError) as error:
        sherd.capturable(step.model, step)
    step.count = 0
    step()
    return str(error.value)


def test_all_ranks_are_told_of_one_that_waits_or_raises(sim_world):
    first, second = sim_world(2).run(one_rank_waits).values
    assert first == second
    assert "(rank 1)" in first
    for text in sim_world(2).run(raising).values:
        assert "capturable: the step raised ValueError: no more data (rank 1)" in text


# What the guard leaves out of a capture


CAPTURING = "is_current_stream_capturing"


def waits_by_step(captured: int) -> list[bool]:
    """Returns for each of five steps whether the host waits in it, where the device says that step `captured` is
    captured."""
    step, module, found = Step(Setting(mesh=(2, 2), strategy="hsdp")), torch.get_device_module("sim"), []
    for number in range(1, 6):
        waits: list[str] = []
        with mock.patch.object(module, CAPTURING, return_value=number == captured, create=True):
            simdevice.on_host_wait(waits.append)
            step()
            simdevice.on_host_wait(None)
        found.append(bool(waits))
    return found


def test_replicas_compare_their_values_after_the_capture_of_a_step_and_not_in_it(sim_world):
    for captured, expected in ((0, [True, True, True, False, True]), (3, [True, True, False, True, True])):
        for waits in sim_world(4).run(waits_by_step, captured).values:
            assert waits == expected
