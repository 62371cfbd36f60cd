"""How does a program of Lightning's Trainer shard its model? By one argument, the strategy.

It trains two epochs, then goes on from the first epoch's checkpoint, a folder in which each rank has its shards.

    torchrun --nproc-per-node 2 examples/lightning_trainer.py
"""

import logging
import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sherd.interop.lightning import SherdStrategy


class Block(nn.Module):
    """A residual two-layer perceptron on vectors of `width` floats."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Sums(lightning.LightningModule):
    """Learns the sum of a vector's first eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block(64) for _ in range(4)), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (x,) = batch
        loss = (self.net(x) - x[:, :8].sum(dim=1, keepdim=True)).square().mean()
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        held = sum(parameter.to_local().numel() for parameter in self.parameters())
        print(f"rank {self.global_rank} holds {held} of {sum(each.numel() for each in self.parameters())} parameters")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    data = DataLoader(TensorDataset(torch.randn(2048, 64)), batch_size=32)
    folder = tempfile.mkdtemp()  # rank 0's counts
    for ckpt_path in (None, "first"):
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=SherdStrategy(policy={Block}, state_dict_type="sharded"),
            gradient_clip_val=1.0,
            max_epochs=2,
            callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Sums(), data, ckpt_path=ckpt_path and f"{folder}/epoch=0.ckpt")
        if trainer.is_global_zero:
            print(f"loss {trainer.callback_metrics['loss_epoch'].item():.6f}")


if __name__ == "__main__":
    main()
