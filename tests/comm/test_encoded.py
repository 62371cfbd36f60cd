"""Parameters and gradients that travel encoded; the optimizer and all other readers have them as they are."""

import gc
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sherd
from bench.peak import LiveBytes
from sherd.codecs import BlockCodec
from sherd.engine import Unit
from sherd.errors import PolicyError, PolicyTypeError
from tests.support.ranks.bodies import on_processes, on_threads

FORMATS = {"int8": 1 / 250, "fp8_e4m3": 1 / 16, "fp8_e5m2": 1 / 8, "int4": 1 / 13.9}
"""With the most that an element is off by, of the largest."""
WAYS: dict[str, dict[str, Any]] = {
    "chunks": {},
    "flat": {"placement": sherd.Flat()},
    "blocks": {"placement": sherd.Blocks(2)},
    "owned": {"placement": sherd.Owned()},
    "bfloat16": {"mp_policy": sherd.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offloaded": {"offload_policy": sherd.CPUOffloadPolicy()},
    "kept between": {"reshard_after_forward": False},
    "gloo": {"transport": "gloo"},
    "torch": {"transport": "torch"},
    "hsdp": {"shape": (2, 2)},
    "hfsdp": {"shape": (2, 2), "placements": "hfsdp", "placement": sherd.Flat()},
}


def made(gather: Any, reduce: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 33), nn.GELU(), nn.Linear(33, 24)) for _ in range(3)))
    shape, transport = options.pop("shape", None), options.pop("transport", "auto")
    shape = shape or (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    policy = sherd.CommPolicy(transport, gather=gather, reduce=reduce)
    for block in (*model, model):
        sherd.fully_shard(block, mesh=mesh, comm_policy=policy, **options)
    return model


def rows(step: int) -> Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))


@pytest.mark.values
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_ranks_compute_with_the_same_values_near_the_shards(way, format_, num_ranks, world):
    if "shape" in WAYS[way]:
        num_ranks = 4
    for of_rank in world(num_ranks).run(near, WAYS[way], format_):
        for found, exact, everywhere in of_rank:
            assert all(torch.equal(found, each) for each in everywhere)
            assert (found.float() - exact).abs().max() <= 1.15 * FORMATS[format_] * exact.abs().max() + 0.001


def near(options: dict[str, Any], format_: str) -> list[tuple[Tensor, Tensor, list[Tensor]]]:
    """Each parameter of a block as a forward reads it, as it is, and as all ranks read it."""
    model = made(format_, **options)
    model(rows(0)).sum().backward()
    with sherd.unsharded(model[1]):
        exact = [each.detach().clone() for each in model[1].parameters()]
    model[1].unshard()
    found = [each.detach().clone() for each in model[1].parameters()]
    model[1].reshard()
    everywhere = []
    for each in found:
        everywhere.append([torch.empty_like(each) for _ in range(dist.get_world_size())])
        dist.all_gather(everywhere[-1], each)
    return list(zip(found, exact, everywhere, strict=True))


def train(model: Any, num_steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for step in range(num_steps):
        loss = (model(rows(step % 2)) - rows(step % 2).roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.values
@pytest.mark.parametrize("way", [way for way in WAYS if "shape" not in WAYS[way]])
@on_processes(2)
def test_training_goes_as_without(way):
    encoded, plain = (train(made(codec, **WAYS[way]), 12) for codec in ("int8", None))
    assert encoded[-1] < 0.9 * encoded[0]
    torch.testing.assert_close(torch.tensor(encoded), torch.tensor(plain), rtol=0.03, atol=0.01)


@on_threads(2)
def test_values_that_a_user_writes_to_shards_are_gathered_next():
    """By a forward and by `unshard`, without an optimizer's step in between."""
    model = made("int8")
    last = model[2]
    with torch.no_grad():
        assert model(rows(0)).any()
        for each in last.parameters():
            each.data.zero_()
        assert not model(rows(0)).any()
        last[0].bias.fill_(1.0)
        last.unshard()
        torch.testing.assert_close(last[0].bias.data, torch.ones(33), rtol=0, atol=0.01)


@on_processes(2)
def test_a_shard_is_encoded_once_a_step_also_over_micro_batches():
    model, calls = made("int8"), []
    encode = BlockCodec.encode

    def counted(self: BlockCodec, values: Tensor, out: Tensor) -> None:
        calls.append(values.numel())
        encode(self, values, out)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.object(BlockCodec, "encode", counted):
        for _ in range(3):
            calls.clear()
            with sherd.accumulate(model, 2):
                for step in range(2):
                    model(rows(step)).sum().backward()
            assert len(calls) == 3  # the root has no parameters of its own
            optimizer.step()
            optimizer.zero_grad()


@on_processes(2)
def test_a_step_starts_from_the_shards_as_they_are():
    """A step of SGD subtracts the gradient from the full precision: what is decoded never becomes a parameter."""
    model = made("int4")
    with sherd.unsharded(model):
        before = [each.detach().clone() for each in model.parameters()]
    model(rows(0)).sum().backward()
    gradients = [each.grad.full_tensor() for each in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    for was, now, gradient in zip(before, model.parameters(), gradients, strict=True):
        assert torch.equal(now.full_tensor(), was - 0.5 * gradient)


class Halved(sherd.Codec):
    """A codec of a user's own: bfloat16."""

    name = "halved"

    def num_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, out: Tensor) -> None:
        out.copy_(values.to(torch.bfloat16).view(torch.uint8))

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        out.copy_(encoded.clone().view(torch.bfloat16))

    def bound(self, values: Tensor) -> Tensor:
        return values.abs().float() * 2**-8


@on_processes(2)
def test_a_codec_of_the_users_own_serves_gathers_and_reductions():
    policy = sherd.CommPolicy(gather=Halved(), reduce=sherd.Reduction(wire=Halved()))
    layer = nn.Linear(8, 8, bias=False)
    weight = layer.weight.detach().clone()
    dist.broadcast(weight, 0)
    layer.weight.data.copy_(weight)
    sherd.fully_shard(layer, comm_policy=policy)
    out = layer(torch.eye(8))
    assert torch.equal(out.T, weight.to(torch.bfloat16).float())
    (out * 0.1).sum().backward()
    assert torch.equal(layer.weight.grad.full_tensor(), torch.full((8, 8), 0.1).to(torch.bfloat16).float())


@pytest.mark.values
@pytest.mark.parametrize("format_", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_gradients_that_travel_encoded_are_near_the_others(way, format_, num_ranks, world):
    """Also tiny ones: nothing else is in their blocks."""
    num_ranks = 4 if "shape" in WAYS[way] else num_ranks
    for found, exact in zip(
        *(world(num_ranks).run(gradients, WAYS[way], each) for each in (format_, None)), strict=True
    ):
        for ours, theirs in zip(found, exact, strict=True):
            assert (ours - theirs).abs().max() <= 2.2 * FORMATS[format_] * torch.cat(exact).abs().max()
            assert ours.abs().max() > 0


def gradients(options: dict[str, Any], wire: str | None) -> list[Tensor]:
    reduce = None if wire is None else sherd.Reduction(wire=wire)
    model = made(None, reduce, **options)
    loss = model(rows(0)).square().mean() * 1e-6
    loss.backward()
    return [each.grad.full_tensor().flatten().float() for each in model.parameters()]


@on_processes(2)
def test_what_cannot_be_encoded_is_refused():
    encoded = sherd.CommPolicy(gather="int8")
    kept = {"placements": "zero1", "placement": sherd.Flat(), "comm_policy": encoded}
    with pytest.raises(PolicyError, match="would round the shards, which are parts of unsharded parameters"):
        sherd.fully_shard(nn.Linear(4, 4), **kept)
    sherd.fully_shard(nn.Linear(4, 4), placements="ddp", comm_policy=encoded)  # of which nothing is gathered
    with pytest.raises(PolicyError, match=r"gather='int9'.: expected a Codec, or one of int8"):
        sherd.CommPolicy(gather="int9")
    with pytest.raises(PolicyError, match=r"order='ranks'.*gather='int8'.*leave gather out"):
        sherd.CommPolicy.reproducible(gather="int8")
    with pytest.raises(PolicyTypeError, match=r"gather=8.: expected a Codec, or the name of one"):
        sherd.CommPolicy(gather=8)
    model = sherd.fully_shard(nn.Linear(4, 4), comm_policy=sherd.CommPolicy(reduce=sherd.Reduction(wire="int8")))
    with pytest.raises(PolicyError, match="a reduction of the user's own would not; leave one of the two out"):
        Unit.of(model).change(all_reduce=lambda _: None)


@on_processes(2)
def test_the_peak_of_a_step_with_formats_is_as_forecast():
    formats = (("int8", None), ("int4", "int8"), (None, "fp8_e5m2"), ("fp8_e4m3", "int4"))
    placements, dtypes = (None, sherd.Flat()), (None, torch.bfloat16)
    for (gather, wire), placement, dtype, reshard in product(formats, placements, dtypes, (True, False)):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
        policy = sherd.CommPolicy(gather=gather, reduce=sherd.Reduction(wire=wire) if wire else None)
        precision = sherd.MixedPrecisionPolicy(dtype, torch.float32 if dtype else None)
        options = {"comm_policy": policy, "mp_policy": precision, "reshard_after_forward": reshard}
        for block in (*model, model):
            sherd.fully_shard(block, **options | ({"placement": placement} if placement else {}))
        x = torch.randn(1, 256)
        with LiveBytes() as live:
            for _ in range(3):
                model.zero_grad()
                gc.collect()
                report = sherd.memory_report(model)
                live.forget_peak()
                before = live.now
                model(x).float().square().sum().backward()
        forecast = report.predicted_peak - sum(row.now for row in report.rows)
        assert forecast == pytest.approx(live.peak - before, rel=0.02), (gather, wire, placement, dtype, reshard)
