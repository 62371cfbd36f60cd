"""Fine-tune with QLoRA: as lora.py, with the base model's matrices in 4 bits (torchao's NF4), sharded as such.

torchrun --nproc-per-node 2 examples/recipes/qlora.py --out adapters
"""

import torch
from lora import main
from small import made
from torch import nn
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

BLOCK = 64  # elements that share a scale; the scales of `scales` of them are stored in 8 bits, with one factor


def quantized(name: str | None, dtype: torch.dtype) -> nn.Module:
    """The model with the matrices of its blocks in NF4; embedding, norms and head stay.

    A rank's rows must be whole groups of scales: rows / ranks * columns is to be a multiple of BLOCK * scales.
    """
    model = made(name, dtype)
    scales = 256 if name else 16  # 256 is QLoRA's; the small model's matrices have fewer blocks
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                weight = to_nf4(module.weight.detach(), BLOCK, scales)
                module.weight = nn.Parameter(weight, requires_grad=False)
    return model


if __name__ == "__main__":
    main(quantized)
