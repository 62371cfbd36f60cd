"""A step takes what `memory_report` says, and at most what FSDP2 takes, as the device's allocator counts it."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch
from torch import nn

from bench import peak
from bench.models import LanguageModel, LlamaBlock, Workload, num_bytes, token_batch
from bench.peak import held_by, peak_of_backward
from bench.systems import FLAT, FSDP2, PLAIN, SHERD, WRAPPER, WRAPPER_FLAT, System, Trainee
from tests.gpu.devices import Accelerator, end_backwards

OURS = (SHERD, FLAT, WRAPPER, WRAPPER_FLAT)


class AllocatedBytes:
    """What `bench.peak` asks of `LiveBytes`, answered by the device's allocator.

    In requested bytes: small blocks are rounded up to 512 bytes, and a large one keeps a rest of up to 1 MiB, which
    would be much of a small model.
    """

    def __enter__(self) -> AllocatedBytes:
        return self

    def __exit__(self, *error: object) -> None:
        """The allocator counts on."""

    def forget_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats()

    @property
    def peak(self) -> int:
        requested: int = torch.accelerator.memory_stats()["requested_bytes.all.peak"]
        return requested


@pytest.fixture(autouse=True, scope="module")
def counted_by_the_allocator():
    with mock.patch.object(peak, "live_bytes", return_value=AllocatedBytes()):
        yield


def stack(dtype: torch.dtype, accelerator: Accelerator) -> Workload:
    """180 M parameters on eight tokens: activations are next to nothing.

    On a device that computes on the CPU 3 M parameters, on two tokens for the same share of activations.
    """
    is_gpu = accelerator.kind == "cuda"
    vocabulary, width, hidden, num_blocks = (4096, 1024, 3584, 12) if is_gpu else (512, 192, 672, 6)
    num_tokens = 8 if is_gpu else 2

    def build() -> LanguageModel:
        with torch.device(accelerator.device):
            blocks: list[nn.Module] = [LlamaBlock(width, hidden, num_heads=8) for _ in range(num_blocks)]
            return LanguageModel(vocabulary, width, blocks, nn.RMSNorm).to(dtype)

    return Workload("Llama", build, lambda seed: token_batch(seed, 1, num_tokens, vocabulary))


def held(system: System, workload: Workload, mesh, activations: float):
    """Bytes beside activations at the peak of forward and backward, and what was said before."""
    found = held_by(Trainee(system, workload, mesh), activations)
    end_backwards(mesh.device_type)
    gc.collect()
    torch.accelerator.synchronize()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_ranks", [8, 64])
def test_a_step_takes_what_was_predicted_and_at_most_what_fsdp2_takes(num_ranks, dtype, accelerator, fake_ranks):
    workload = stack(dtype, accelerator)
    with fake_ranks(num_ranks) as mesh:
        plain = Trainee(PLAIN, workload, mesh)
        weights = num_bytes(plain.model)
        before = torch.accelerator.memory_stats()["requested_bytes.all.current"] - weights
        activations = peak_of_backward(plain) - 2 * weights
        del plain
        gc.collect()
        # Activations, and on CUDA two workspaces of cuBLAS, which stay.
        assert activations - before < 0.4 * weights, "else the comparison would be one of activations"
        rival = held(FSDP2, workload, mesh, activations).nbytes
        for system in OURS:
            found = held(system, workload, mesh, activations)
            print(f"{system.name}, {num_ranks} ranks: {found.nbytes:,.0f}, said {found.said:,}, FSDP2 {rival:,.0f}")
            assert found.nbytes == pytest.approx(found.said, rel=0.05), system.name
            assert found.nbytes <= rival * 1.005, system.name


@pytest.mark.parametrize("system", OURS, ids=lambda system: system.name)
def test_memory_does_not_grow_from_step_to_step(system, accelerator, fake_ranks):
    with fake_ranks(8) as mesh:
        before = accelerator.allocated()
        trainee = Trainee(system, stack(torch.bfloat16, accelerator), mesh)
        seen = []
        for seed in range(8):
            trainee.step(trainee.batch(seed))
            torch.accelerator.synchronize()
            seen.append((accelerator.allocated(), accelerator.reserved()))
        assert len(set(seen[3:])) == 1, seen
        del trainee
        gc.collect()
        # On CUDA two workspaces of cuBLAS, of 32 MiB on Hopper, if these were the first products of this process.
        allowed = 80 << 20 if accelerator.kind == "cuda" else 0
        assert accelerator.allocated() - before <= allowed, f"of {seen[-1][0] - before} bytes"
