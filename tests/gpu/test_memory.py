"""Does a step take what `memory_report` says, and at most what FSDP2 takes? As the CUDA allocator counts it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from bench.models import LanguageModel, LlamaBlock, Workload, num_bytes, token_batch
from bench.peak import held_by, peak_of_backward
from bench.systems import FLAT, FSDP2, PLAIN, SHERD, WRAPPER, WRAPPER_FLAT, System, Trainee

OURS = (SHERD, FLAT, WRAPPER, WRAPPER_FLAT)
VOCABULARY, WIDTH, HIDDEN = 4096, 1024, 3584


def stack(dtype: torch.dtype) -> Workload:
    """180 M parameters on eight tokens: activations are next to nothing."""

    def build() -> LanguageModel:
        with torch.device("cuda"):
            blocks: list[nn.Module] = [LlamaBlock(WIDTH, HIDDEN, num_heads=8) for _ in range(12)]
            return LanguageModel(VOCABULARY, WIDTH, blocks, nn.RMSNorm).to(dtype)

    return Workload("Llama", build, lambda seed: token_batch(seed, 1, 8, VOCABULARY))


def held(system: System, workload: Workload, mesh, activations: float):
    """Bytes beside activations at the peak of forward and backward, and what was said before."""
    found = held_by(Trainee(system, workload, mesh), activations)
    gc.collect()
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_ranks", [8, 64])
def test_a_step_takes_what_was_predicted_and_at_most_what_fsdp2_takes(num_ranks, dtype, fake_ranks):
    workload = stack(dtype)
    with fake_ranks(num_ranks) as mesh:
        plain = Trainee(PLAIN, workload, mesh)
        weights = num_bytes(plain.model)
        before = torch.cuda.memory_allocated() - weights
        activations = peak_of_backward(plain) - 2 * weights
        del plain
        gc.collect()
        # Activations, and two workspaces of cuBLAS, which stay.
        assert activations - before < 0.4 * weights, "else the comparison would be one of activations"
        rival = held(FSDP2, workload, mesh, activations).nbytes
        for system in OURS:
            found = held(system, workload, mesh, activations)
            print(f"{system.name}, {num_ranks} ranks: {found.nbytes:,.0f}, said {found.said:,}, FSDP2 {rival:,.0f}")
            assert found.nbytes == pytest.approx(found.said, rel=0.05), system.name
            # The allocator rounds each block up, to 512 bytes at least.
            assert found.nbytes <= rival * 1.005, system.name


@pytest.mark.parametrize("system", OURS, ids=lambda system: system.name)
def test_memory_does_not_grow_from_step_to_step(system, fake_ranks):
    with fake_ranks(8) as mesh:
        before = torch.cuda.memory_allocated()
        trainee = Trainee(system, stack(torch.bfloat16), mesh)
        seen = []
        for seed in range(8):
            trainee.step(trainee.batch(seed))
            torch.cuda.synchronize()
            seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        assert len(set(seen[3:])) == 1, seen
        del trainee
        gc.collect()
        # Two workspaces of cuBLAS, of 32 MiB on Hopper, if these were the first products of this process.
        assert torch.cuda.memory_allocated() - before < 80 << 20, f"of {seen[-1][0] - before} bytes"
