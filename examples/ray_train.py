"""Does a training of Ray Train go on after a worker has failed? One fails at step 5, after a checkpoint of step 4.

python examples/ray_train.py

Needs ray[train]. On several machines `storage_path` is a folder that all of them share.
"""

import tempfile

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import sherd

STEPS, SAVE_EVERY, FAILS_AT = 6, 2, 5


def train() -> None:
    """What each worker runs, again from the last checkpoint after a failure."""
    torch.manual_seed(0)  # the same weights on every rank, before they are cut
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)), nn.Linear(32, 1))
    for block in model[:-1]:
        sherd.fully_shard(block)
    sherd.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    items = {"model": model, "optimizer": optimizer}

    folder = ray.train.get_context().get_storage().experiment_fs_path + "/checkpoints"
    last = ray.train.get_checkpoint()
    first = sherd.load(last.path, items).step + 1 if last else 1
    for step in range(first, STEPS + 1):
        if step == FAILS_AT and first == 1 and dist.get_rank() == 1:
            raise RuntimeError("this worker fails once")
        batch = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(16, 32, generator=batch)
        loss = (model(x) - x[:, :4].sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        metrics = {"step": step, "first": first, "loss": mean.item()}
        saved = None
        if step % SAVE_EVERY == 0:
            # All ranks write their shards to where Ray keeps checkpoints: nothing is left to upload.
            saved = Checkpoint.from_directory(sherd.save(folder, items, step=step))
        ray.train.report(metrics, saved, checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD)


if __name__ == "__main__":
    ray.init(address="local", num_cpus=3, include_dashboard=False)
    with tempfile.TemporaryDirectory() as storage:
        trainer = TorchTrainer(
            train,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                storage_path=storage,
                checkpoint_config=CheckpointConfig(num_to_keep=2),
                failure_config=FailureConfig(max_failures=1),
            ),
        )
        found = trainer.fit().metrics
    print(f"began again at step {found['first']}, loss {found['loss']:.6f} at step {found['step']}")
