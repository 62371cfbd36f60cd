"""Fine-tune with LoRA: the base model is frozen and sharded, adapters of peft are trained and saved.

torchrun --nproc-per-node 2 examples/recipes/lora.py --out adapters
"""

import argparse
from collections.abc import Callable

import peft
import torch
import torch.distributed as dist
from small import PAIRS, kept, made, own_part, padded
from torch import nn
from torch.nn.functional import cross_entropy

import sherd


def main(load: Callable[[str | None, torch.dtype], nn.Module] = made) -> None:
    """Train adapters of the model that `load` gives by its name and dtype."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a pretrained model; its tokenizer goes into small.py")
    parser.add_argument("--out", default="adapters", help="a folder for the adapters")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16, help="pairs of a step, over all ranks")
    parser.add_argument("--rank", type=int, default=8, help="the rank of the adapters' matrices")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--bf16", action="store_true", help="keep and use the base model in bfloat16")
    args = parser.parse_args()

    base = load(args.model, torch.bfloat16 if args.bf16 else torch.float32)
    lora = peft.LoraConfig(target_modules="all-linear", r=args.rank, lora_alpha=2 * args.rank, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora)  # the adapters are float32 in either case
    # Frozen and trained parameters may share a unit; what is frozen has no gradients and no optimizer state.
    precision = sherd.MixedPrecisionPolicy(torch.bfloat16 if args.bf16 else None, torch.float32)
    sherd.auto_shard(model, mp_policy=precision)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=args.lr)
    device, rank, num_ranks = next(model.parameters()).device, dist.get_rank(), dist.get_world_size()
    if rank == 0:
        trained, of_all = (sum(each.numel() for each in some) for some in (adapters, model.parameters()))
        print(f"{trained} of {of_all} elements are trained")

    for step in range(1, args.steps + 1):
        tokens, targets = (each.to(device) for each in padded([PAIRS[pair] for pair in own_part(args.batch, step)]))
        dist.all_reduce(num_targets := (targets >= 0).sum())
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / num_targets
        (loss * num_ranks).backward()  # gradients are averaged over ranks, and answers on one rank may be longer
        nn.utils.clip_grad_norm_(adapters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            dist.all_reduce(total := loss.detach())
            if rank == 0:
                print(f"step {step:4d}  loss {total:.3f}", flush=True)

    sherd.save_pretrained(model, args.out)  # the adapters alone, for PeftModel.from_pretrained
    memory = kept(sherd.memory_report(model, optimizer))
    if rank == 0:
        print(memory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
