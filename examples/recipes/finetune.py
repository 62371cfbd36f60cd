"""Fine-tune a Hugging Face model on questions and answers of any length, and save it for `from_pretrained`.

torchrun --nproc-per-node 2 examples/recipes/finetune.py --out tuned
"""

import argparse

import torch
import torch.distributed as dist
from small import PAIRS, kept, made, own_part, padded
from torch import nn
from torch.nn.functional import cross_entropy

import sherd


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a pretrained model; its tokenizer goes into small.py")
    parser.add_argument("--out", default="tuned", help="a folder for the model")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16, help="pairs of a step, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--checkpointing", action="store_true", help="keep fewer activations, compute them again")
    args = parser.parse_args()

    model = made(args.model)
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    precision = sherd.MixedPrecisionPolicy(torch.bfloat16 if args.bf16 else None, torch.float32)
    sherd.auto_shard(model, mp_policy=precision)  # the model's class says what a unit is
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    device, rank, num_ranks = next(model.parameters()).device, dist.get_rank(), dist.get_world_size()

    for step in range(1, args.steps + 1):
        tokens, targets = (each.to(device) for each in padded([PAIRS[pair] for pair in own_part(args.batch, step)]))
        dist.all_reduce(num_targets := (targets >= 0).sum())
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / num_targets
        (loss * num_ranks).backward()  # gradients are averaged over ranks, and answers on one rank may be longer
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
        if step % 10 == 0:
            dist.all_reduce(total := loss.detach())
            if rank == 0:
                print(f"step {step:4d}  loss {total:.3f}", flush=True)

    sherd.save_pretrained(model, args.out, dtype=torch.bfloat16 if args.bf16 else None)
    memory = kept(sherd.memory_report(model, optimizer))
    if rank == 0:
        print(memory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
