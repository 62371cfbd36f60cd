"""Distillation: a small model learns what a large, frozen one expects. Both are sharded over the same ranks.

    torchrun --nproc-per-node 2 examples/recipes/distill.py

Without --teacher the teacher is a Llama from a config, trained here first.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data import topics  # Python's manual, which comes with it

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import sherd

ARGUMENTS = {"teacher_steps": 40, "steps": 40, "batch": 16, "context": 64, "teacher_width": 128, "width": 64}
ARGUMENTS |= {"teacher_layers": 3, "layers": 2, "lr": 3e-3, "temperature": 2.0}


def llama(width: int, layers: int, context: int, words: int = 256) -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank, before they are cut
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    config = LlamaConfig(vocab_size=words, num_attention_heads=4, max_position_embeddings=context, **sizes)
    return AutoModelForCausalLM.from_config(config)


def batches(args: argparse.Namespace, steps: int) -> Iterator[torch.Tensor]:
    """This rank's part of each step's batch, [samples, context + 1]; the whole batch is the same for all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.batch % world:
        raise SystemExit(f"--batch {args.batch}: expected a multiple of the {world} ranks")
    text = args.data.read_text() if args.data else "".join(topics.topics.values())
    tokenizer = AutoTokenizer.from_pretrained(args.teacher) if args.teacher else None
    tokens = torch.tensor(tokenizer.encode(text, add_special_tokens=False) if tokenizer else list(text.encode()))
    for step in range(steps + 1):
        drawn = torch.Generator().manual_seed(step)
        starts = torch.randint(len(tokens) - args.context, (args.batch, 1), generator=drawn)
        yield tokens[starts.chunk(world)[rank] + torch.arange(args.context + 1)]


def train(
    args: argparse.Namespace, who: str, model: nn.Module, steps: int, loss_of: Callable[..., torch.Tensor]
) -> None:
    """Train on `loss_of(logits, inputs, targets)`, and print its mean over the ranks beside that of the next token."""
    optimizer, device = torch.optim.AdamW(model.parameters(), lr=args.lr), next(model.parameters()).device
    for step, tokens in enumerate(batches(args, steps)):
        inputs, targets = tokens[:, :-1].to(device), tokens[:, 1:].to(device)
        loss = loss_of(logits := model(inputs).logits, inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            figures = torch.stack([loss.detach(), next_token(logits.detach(), inputs, targets)])
            dist.all_reduce(figures)
            if dist.get_rank() == 0:
                loss, text = (figures / dist.get_world_size()).tolist()
                print(f"{who}step {step:3}  loss {loss:.3f}  text loss {text:.3f}", flush=True)
    if dist.get_rank() == 0:
        print(f"{who}trained: {kept(model, optimizer):.2f} MiB on rank 0")


def kept(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> float:
    """MiB that this rank has between steps, without what ranks of one machine exchange data in."""
    return sum(row.now for row in sherd.memory_report(model, optimizer).rows if row.kind != "transport") / 2**20


def next_token(logits: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, help="a text file; default: Python's manual")
    parser.add_argument("--teacher", help="a folder or name for from_pretrained, with its tokenizer; default: of bytes")
    for name, default in ARGUMENTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    if args.teacher:
        teacher = sherd.auto_shard(AutoModelForCausalLM.from_pretrained(args.teacher))
    else:
        teacher = sherd.auto_shard(llama(args.teacher_width, args.teacher_layers, args.context))
        train(args, "teacher ", teacher, args.teacher_steps, next_token)
    teacher.requires_grad_(False).eval()
    sherd.refresh(teacher)  # its units get to know that there are no gradients
    teacher.set_reshard_after_forward(True)  # of all units: no backward comes to free the last one

    def as_the_teacher(logits: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Kullback-Leibler divergence by token at a temperature, times its square (Hinton et al. 2015)."""
        with torch.no_grad():
            expected = teacher(inputs).logits
        own, wanted = ((each.flatten(0, 1) / args.temperature).log_softmax(-1) for each in (logits, expected))
        return kl_div(own, wanted, reduction="batchmean", log_target=True) * args.temperature**2

    student = sherd.auto_shard(llama(args.width, args.layers, args.context, teacher.config.vocab_size))
    train(args, "", student, args.steps, as_the_teacher)
    if dist.get_rank() == 0:
        print(f"teacher, frozen: {kept(teacher):.2f} MiB on rank 0")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
