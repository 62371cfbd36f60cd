"""Fine-tune all weights of a model that does not fit the GPU: nothing rests there, and what is used comes in time.

torchrun --nproc-per-node 2 examples/recipes/one_gpu.py
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from small import PAIRS, made, own_part, padded
from torch import nn

import sherd


class WithLoss(nn.Module):
    """The model and its loss, which is computed without all logits in memory, inside of the forward of the root."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        return sherd.chunked_cross_entropy(hidden, self.model.lm_head.weight, targets, reduction="sum")


def main(load: Callable[[str | None, torch.dtype], nn.Module] = made) -> None:
    """Train the model that `load` gives by its name and dtype."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a pretrained model; its tokenizer goes into small.py")
    parser.add_argument("--disk", help="a folder on a disk for the optimizer's state; default: host memory")
    parser.add_argument("--out", help="a folder for the weights at the end")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16, help="pairs of a step, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    model = WithLoss(load(args.model, torch.bfloat16))
    offload = sherd.OffloadPolicy(
        parameters="host",  # and with them gradients, and the step
        masters="host",  # float32 values for the step, in 2.125 bytes in addition to bfloat16
        optimizer=sherd.Disk(args.disk) if args.disk else "host",
        activations="host",
    )
    precision = sherd.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    sherd.auto_shard(model, offload_policy=offload, mp_policy=precision)
    device, rank, num_ranks = torch.device("cpu"), dist.get_rank(), dist.get_world_size()
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)  # passes memory once

    for step in range(1, args.steps + 1):
        tokens, targets = (each.to(device) for each in padded([PAIRS[pair] for pair in own_part(args.batch, step)]))
        dist.all_reduce(num_targets := (targets >= 0).sum())
        loss = model(tokens, targets) / num_targets
        (loss * num_ranks).backward()  # gradients are averaged over ranks
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            dist.all_reduce(total := loss.detach())
            if rank == 0:
                print(f"step {step:4d}  loss {total:.3f}", flush=True)

    if args.out:
        sherd.save_pretrained(model.model, args.out)
    if rank == 0:
        weights = sum(each.to_local().nbytes for each in model.parameters())
        print(f"rank 0 keeps {weights / 2**20:.2f} MiB of weights in host memory, and nothing on a GPU")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
