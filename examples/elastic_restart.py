"""Does torchrun bring a training back after a rank has failed? One fails at step 5, after a checkpoint of step 4.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 1 examples/elastic_restart.py

Without the variable torch 2.13 keeps the addresses of the ranks that failed, and the new ranks may call those.
"""

import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch import nn

import sherd

STEPS, SAVE_EVERY, FAILS_AT = 6, 2, 5


def main() -> None:
    """What each rank runs, again from the last checkpoint after torchrun has started all ranks anew."""
    torch.manual_seed(0)  # the same weights on every rank, before they are cut
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)), nn.Linear(32, 1))
    for block in model[:-1]:
        sherd.fully_shard(block)
    sherd.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    items = {"model": model, "optimizer": optimizer}

    # A folder that a restart finds again. On several machines one that all of them share.
    folder = f"{tempfile.gettempdir()}/sherd-{os.getppid()}"
    try:
        first = sherd.load(folder, items).step + 1
    except sherd.errors.NoCheckpointError:
        first = 1
    for step in range(first, STEPS + 1):
        if step == FAILS_AT and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
            os._exit(1)  # as if it were killed
        batch = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(16, 32, generator=batch)
        loss = (model(x) - x[:, :4].sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % SAVE_EVERY == 0:
            sherd.save(folder, items, step=step, keep_last=2)
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"began again at step {first}, loss {mean.item():.6f} at step {STEPS}")
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
