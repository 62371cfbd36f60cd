"""Direct preference optimization: a policy learns to prefer one answer to another, beside a frozen reference.

torchrun --nproc-per-node 2 examples/recipes/dpo.py --out preferring
"""

import argparse
import copy

import torch
import torch.distributed as dist
import transformers
from small import PAIRS, kept, made, own_part, padded
from torch import nn
from torch.nn.functional import logsigmoid

import sherd


def answers(batch: int, step: int) -> list[tuple[str, str]]:
    """This rank's questions with the answers to prefer, then with those to reject: here, what another name does."""
    numbers = own_part(batch, step)
    rejected = [(PAIRS[number][0], PAIRS[(number + step) % len(PAIRS)][1]) for number in numbers]
    return [*(PAIRS[number] for number in numbers), *rejected]


def log_likelihoods(model: transformers.PreTrainedModel, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The log likelihood of each answer, float32 (answers), of tokens and targets, int64 (answers, length)."""
    logits = model(input_ids=tokens, use_cache=False).logits.float()
    return -nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum(dim=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a model that is fine-tuned already; its tokenizer goes into small.py")
    parser.add_argument("--out", default="preferring", help="a folder for the policy")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16, help="questions of a step, over all ranks")
    parser.add_argument("--beta", type=float, default=0.1, help="how much it costs to leave the reference")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    args = parser.parse_args()

    precision = sherd.MixedPrecisionPolicy(torch.bfloat16 if args.bf16 else None, torch.float32)
    policy = sherd.auto_shard(made(args.model), mp_policy=precision)
    # A copy of a sharded model has shards of its own; frozen, it has no gradients and no optimizer state.
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr)
    device, rank, num_ranks = next(policy.parameters()).device, dist.get_rank(), dist.get_world_size()

    for step in range(1, args.steps + 1):
        tokens, targets = (each.to(device) for each in padded(answers(args.batch, step)))
        with torch.no_grad():
            expected = log_likelihoods(reference, tokens, targets)
        chosen, rejected = (log_likelihoods(policy, tokens, targets) - expected).chunk(2)
        loss = -logsigmoid(args.beta * (chosen - rejected)).sum() / args.batch  # equation 7 of arXiv 2305.18290
        (loss * num_ranks).backward()  # gradients are averaged over ranks
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0:
            dist.all_reduce(shown := torch.stack([loss.detach(), (chosen > rejected).sum() / args.batch]))
            if rank == 0:
                print(f"step {step:4d}  loss {shown[0]:.3f}  preferred {shown[1]:.3f}", flush=True)

    sherd.save_pretrained(policy, args.out)
    memory = kept(sherd.memory_report(policy, optimizer), sherd.memory_report(reference))
    if rank == 0:
        print(f"{memory}, those of the reference among them")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
