"""Pretrain a small GPT on your own tokenised files: memory-mapped, shuffled, and resumable to the sample.

torchrun --nproc-per-node 2 examples/recipes/pretrain.py --out run
"""

import argparse
from array import array
from contextlib import suppress
from functools import cache, partial
from itertools import count
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import sherd


class Windows(Dataset[torch.Tensor]):
    """Windows of `length` tokens over files of uint16 tokens, which are mapped and not read; in a new order each epoch.

    Sample n is the same for any number of ranks, so a position in the data is the number of samples that are used.
    """

    def __init__(self, files: list[Path], length: int) -> None:
        self.length = length
        self.tokens = [torch.from_file(str(file), size=file.stat().st_size // 2, dtype=torch.uint16) for file in files]
        sizes = map(len, self.tokens)
        self.starts = [(number, at) for number, size in enumerate(sizes) for at in range(0, size - length + 1, length)]
        self.order = cache(self.drawn)

    def drawn(self, epoch: int) -> torch.Tensor:
        return torch.randperm(len(self.starts), generator=torch.Generator().manual_seed(epoch))

    def __getitem__(self, sample: int) -> torch.Tensor:
        epoch, place = divmod(sample, len(self.starts))
        number, at = self.starts[self.order(epoch)[place]]
        return self.tokens[number][at : at + self.length].long()


class GPT(nn.Module):
    def __init__(self, words: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(context, width)
        layer = partial(nn.TransformerEncoderLayer, width, heads, 4 * width, 0.0, norm_first=True, batch_first=True)
        self.blocks = nn.ModuleList(layer() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.embed(tokens) + self.place.weight[:length]
        for block in self.blocks:
            x = block(x, src_mask=later, is_causal=True)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="a folder of *.bin, uint16 tokens; default: of Python's manual")
    parser.add_argument("--out", type=Path, default="run", help="checkpoints, from which the next start goes on")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    sizes = {"words": 256, "context": 64, "width": 64, "layers": 2, "heads": 4}
    for name, default in {**sizes, "steps": 60, "batch": 16, "save_every": 20, "lr": 3e-3}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    torch.manual_seed(0)  # the same weights on every rank, before they are cut
    model = GPT(*(vars(args)[name] for name in sizes))
    precision = sherd.MixedPrecisionPolicy(torch.bfloat16 if args.bf16 else None, torch.float32)
    sherd.auto_shard(model, mp_policy=precision, comm_policy=sherd.CommPolicy(divergence="join"))  # for sherd.step
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    rank, device = dist.get_rank(), next(model.parameters()).device

    if args.data is None and rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "manual.bin").write_bytes(array("H", list("".join(topics.values()).encode())).tobytes())
    dist.barrier()
    data = Windows(sorted((args.data or args.out).glob("*.bin")), args.context + 1)
    if not data.starts:
        parser.error(f"--data {args.data}: no *.bin there has {args.context + 1} tokens; write them from your texts")
    items = {"model": model, "optimizer": optimizer, "warmup": warmup, "samples": 0}
    first = 1
    with suppress(sherd.errors.NoCheckpointError):
        restored = sherd.load(args.out, items)
        first, items["samples"] = restored.step + 1, restored.values["samples"]
    numbers = (range(at + rank, at + args.batch, dist.get_world_size()) for at in count(items["samples"], args.batch))
    batches = DataLoader(data, batch_sampler=numbers)
    for step, tokens in zip(range(first, args.steps + 1), batches, strict=False):
        with sherd.step(model, optimizer) as attempt:
            logits = model(tokens[:, :-1].to(device)).float()
            loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().to(device))
            loss.backward()
            attempt.agree()  # before clipping, which is a collective
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        items["samples"] += args.batch
        if step % 10 == 0:
            dist.all_reduce(mean := loss.detach() / dist.get_world_size())
            if rank == 0:
                print(f"step {step:4d}  loss {mean:.3f}", flush=True)
        if step % args.save_every == 0 or step == args.steps:
            sherd.save(args.out, items, step=step, keep_last=2)
    memory = sherd.memory_report(model, optimizer)
    if rank == 0:
        kept = sum(row.now for row in memory.rows if row.kind in ("shards", "optimizer state")) / 2**20
        print(f"rank 0 keeps {kept:.2f} MiB of shards and optimizer state")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
