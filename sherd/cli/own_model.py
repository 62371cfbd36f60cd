"""Steps of a user's own model, whose operations are to be timed: with few of its blocks, on values that are drawn."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sherd.cli.planned_model import Planned, model_from
from sherd.tensor.structures import map_tensors
from sherd.tools.doctor.operations import DTYPES, Step
from sherd.tools.plan.plan import num_samples, resized_batch
from sherd.tools.plan.planner import compute_in
from sherd.tools.plan.reading import Loss
from sherd.tools.plan.sharding import with_fewer_blocks

BLOCKS = 2
"""Of many equal blocks so many run."""
TOKENS = 512
"""In a sample, unless a config of `sherd train` says it: that of a Hugging Face model may be longer than fits here."""


def steps_of(spec: str, sizes: Sequence[int]) -> Iterator[Step]:
    """Yields training steps of the model that `spec` names, as for `sherd plan`.

    A model of `sherd train` runs in the precision of its config, any other in float32 and in bfloat16. Each of `sizes`
    is a number of samples, or a multiple of the batch that a factory returns.

    Raises:
        InputError: there is no such model, or it cannot be made.
    """
    planned = model_from(spec)
    precisions = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for dtype in DTYPES if planned.config is None else [precisions[planned.config.run.precision]]:
        model = _with_values(planned, dtype)
        batch = planned.batch(1, TOKENS if planned.config is None else planned.config.data.context)
        first, rows = num_samples(batch), _num_tokens(model) if planned.reads_tokens else 1
        for size in sizes:
            drawn = map_tensors(partial(_drawn, rows), resized_batch(batch, first, size * first))
            yield partial(step, model, drawn, planned.layout.loss)


def step(model: nn.Module, batch: Any, loss: Loss) -> None:
    """Run forward and backward of the loss of (model, batch)."""
    model.zero_grad()
    loss(model, batch).backward()


def _with_values(planned: Planned, dtype: torch.dtype) -> nn.Module:
    short = with_fewer_blocks(planned.model, BLOCKS)
    model = (copy.deepcopy(planned.model) if short is None else short[0]).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            # Neither so large nor so small that numbers become denormal, which makes products slow.
            parameter.normal_(0, parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else parameter.fill_(1)
        for buffer in model.buffers():
            buffer.zero_()
    if dtype is not torch.float32:
        compute_in(dtype, model)
    return model


def _num_tokens(model: nn.Module) -> int:
    return min((each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)), default=1)


def _drawn(rows: int, tensor: Tensor) -> Tensor:
    """Returns random values for `tensor`, which is on the meta device. Integers are below `rows`."""
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, dtype=tensor.dtype)
    return torch.randint(rows, tensor.shape).to(tensor.dtype)
