"""Operators compute on the device what they compute on the CPU: the same kernels run there, as the host orders them."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import simdevice
from simdevice.tests.comparing import assert_same


def made(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_same_as_on_the_cpu(function, tensor, name):
    """`function` returns, and does to its argument, on the device what it does on the CPU."""
    here, there = tensor.clone(), tensor.to("sim")
    expected, found = (tree_leaves([function(each), each]) for each in (here, there))
    for each, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor):
            assert (each.device.type, each.stride()) == ("sim", other.stride()), name
        assert_same(on_host(each), other, name)


def on_host(value):
    return value.cpu() if isinstance(value, torch.Tensor) else value


A, B = made(4, 6), made(6, 5)

FACTORIES = (partial(torch.arange, 5), partial(torch.eye, 3), partial(torch.linspace, 0, 1, 5))
OPERATORS = {
    "arithmetic": lambda x: (x + 1) * x - x / 3 + 2**x - x.sign(),
    "broadcast": lambda x: x + x[:1] * x[:, :1],
    "promotion": lambda x: (x.int() + 1.5, x.double() * torch.ones((), device=x.device), x.bfloat16() + 1),
    "comparison": lambda x: (x > 0, torch.where(x > 0, x, 0), x.clamp(-1, 1), x.isfinite().all()),
    "in place": lambda x: x.add_(1).mul_(2).clamp_(min=0).sqrt_().neg_(),
    "in place on a view": lambda x: x[:, 1:3].zero_().add_(x[:, 3:5]),
    "reductions": lambda x: (x.sum(), x.mean(0), x.max(1), x.amax(0), x.norm(), x.var(), x.argmin(1), x.cumsum(0)),
    "matmul": lambda x: (x @ x.T, torch.addmm(x[:, :4], x, x.T), torch.bmm(x[None], x.T[None]), x @ x[0]),
    "views": lambda x: (x.T, x.view(2, 12), x.permute(1, 0), x.diagonal(), x.view(torch.int32)),
    "strided views": lambda x: (x.unfold(1, 2, 2), x[::2], x.expand(3, 4, 6)),
    "reshape": lambda x: (x.T.reshape(-1), x.T.contiguous(), x.flatten(), x.unsqueeze(1).squeeze()),
    "split": lambda x: (x.chunk(2), x.split([1, 5], 1), x.unbind(0), torch.stack([x, x]), torch.cat([x, x.T.T[:1]])),
    "indexing": lambda x: (x[torch.tensor([2, 0], device=x.device)], x[:, [1, 1]], x[x > 0], x[..., -1], x[1:3, 2]),
    "index put": lambda x: x.index_put_((torch.tensor([1, 1], device=x.device),), x[:2].clone(), accumulate=True),
    "assignment": lambda x: (x.__setitem__((0, slice(None)), 3.0), x.__setitem__(x > 1, 0.5), x)[-1],
    "gather": lambda x: (x.gather(1, x.argsort(1)), torch.zeros_like(x).scatter_(1, x.argsort(1), x)),
    "order": lambda x: (x.sort(1), x.topk(2)),
    "shapes by value": lambda x: (x.nonzero(), x.int().unique(), torch.bincount(x.int().abs().flatten())),
    "numbers": lambda x: (x.sum().item(), x.tolist(), bool(x.any()), x.numel(), torch.equal(x, x.clone())),
    "softmax": lambda x: (x.softmax(1), x.log_softmax(0), x.logsumexp(1), F.gelu(x), F.silu(x), F.softplus(x)),
    "factories of the same kind": lambda x: (torch.zeros_like(x), x.new_ones(3), torch.full_like(x, 2)),
    "factories": lambda x: [factory(device=x.device) for factory in FACTORIES],
    "triangles": lambda x: (x.tril(), x.triu(1)),
    "complex": lambda x: (torch.fft.rfft(x).abs(), torch.view_as_real(x.to(torch.complex64).conj() * 1j)),
    "dtypes": lambda x: (x.half(), x.to(torch.bfloat16).float(), x.long(), x.bool(), x.double()),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "empty": lambda x: (x[:0].sum(), torch.cat([x[:0], x]), x[:0] + 1, x[:, :0].T @ x),
    "foreach": lambda x: torch._foreach_mul(torch._foreach_add([x, x[0]], 1), [x, x[1]]),
    "foreach in place": lambda x: (torch._foreach_add_([x, y := x.clone()], [x.clone(), x.clone()], alpha=2), x, y)[1:],
    "foreach norm": lambda x: torch._foreach_norm([x, x[0]], 2),
    "resize": lambda x: x.clone().resize_(2, 3),
    "set": lambda x: torch.empty(0, device=x.device).set_(x.untyped_storage(), 2, (3, 2), (6, 1)),
}


@pytest.mark.usefixtures("device")
def test_values_and_strides_are_those_of_the_cpu():
    for name, operator in OPERATORS.items():
        assert_same_as_on_the_cpu(operator, A, name)


def test_out_is_filled_an_empty_one_gets_its_shape_and_one_of_a_wrong_shape_fails(device):
    for shape in ((0,), (4, 5)):
        out = torch.empty(shape, device=device)
        address = out.data_ptr()
        assert torch.mm(A.to(device), B.to(device), out=out) is out
        torch.testing.assert_close(out.cpu(), A @ B)
        assert shape == (0,) or out.data_ptr() == address
    torch.add(A.to(device), 1, out=torch.empty(2, 2, device=device))
    with pytest.raises(RuntimeError, match=r"sim: add\.out .* failed"):
        torch.accelerator.synchronize()


def trained(device, optimizer, dtype):
    torch.manual_seed(0)
    layers = [nn.Embedding(20, 16), nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.RMSNorm(32), nn.Linear(32, 20)]
    model = nn.Sequential(*layers).to(dtype).to(device)
    steps = optimizer(model.parameters())
    for seed in range(3):
        tokens = torch.randint(20, (4, 8), generator=torch.Generator().manual_seed(seed)).to(device)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        steps.step()
        steps.zero_grad()
    return [loss.detach().cpu(), *(parameter.detach().cpu() for parameter in model.parameters())]


def test_a_trained_model_is_that_of_the_cpu(device):
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        optimizer = partial(torch.optim.AdamW, lr=0.01, **options)
        for dtype in (torch.float32, torch.bfloat16):
            assert_same(trained(device, optimizer, dtype), trained("cpu", optimizer, dtype), f"{options}, {dtype}")


MODULES = {
    "layer norm in bfloat16": lambda x: F.layer_norm(x.bfloat16(), (8,), *x[0, 0, :2].bfloat16()).float(),
    "layer norm, mixed": lambda x: F.layer_norm(x.bfloat16(), (8,), x[0, 0, 0], x[0, 0, 1]).float(),
    "group norm": lambda x: F.group_norm(x, 2),
    "batch norm": lambda x: F.batch_norm(x, x.new_zeros(4), x.new_ones(4), training=True),
    "convolution": lambda x: F.conv2d(x, x[:, :, :3, :3]),
    "convolution, transposed": lambda x: F.conv_transpose2d(x, x[:, :2, :3, :3], x[0, 0, 0, :2], stride=2),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "dropout in evaluation": lambda x: F.dropout(x, 0.5, training=False) + F.dropout(x, 0.0),
    "pooling": lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2),
    "interpolation": lambda x: F.interpolate(x, scale_factor=2),
    "padding": lambda x: F.pad(x, (1, 2)),
    "embedding": lambda x: F.embedding(torch.tensor([[1, 2], [1, 0]], device=x.device), x.flatten(0, 2)),
    "mean squared error": lambda x: F.mse_loss(x, x.flip(0)),
}


def test_forward_and_backward_are_those_of_the_cpu(device):
    def both(module, x):
        x = x.detach().requires_grad_()
        y = module(x)
        (y * y).sum().backward()
        return y.detach().cpu(), x.grad.cpu()

    x = made(4, 4, 8, 8)
    for name, module in MODULES.items():
        assert_same(both(module, x.to(device)), both(module, x), name, rtol=None, atol=None)


def test_random_numbers_follow_from_the_seed_and_the_order_of_calls(device):
    def drawn():
        x = torch.ones(1000, device=device)
        values = torch.randn(5, device=device), torch.rand(3, 2, device=device), torch.randperm(9, device=device)
        normal = F.dropout(x, 0.3), torch.empty(4, device=device).normal_()
        return *values, *normal, torch.bernoulli(x / 2), x.exponential_()

    torch.manual_seed(7)
    state = torch.sim.get_rng_state()
    first, second = drawn(), drawn()
    assert not torch.equal(first[0], second[0])
    assert 0.2 < (first[3] == 0).float().mean().item() < 0.4
    torch.sim.set_rng_state(state)
    simdevice.configure(pause_us=500, pause_percent=50, seed=3)
    for each, other in zip((*first, *second), (*drawn(), *drawn()), strict=True):
        assert torch.equal(each, other)
    assert simdevice.host_waits().keys() <= {"equal", "equal, no meta kernel", "item"}
    first, second = (torch.Generator(device).manual_seed(4) for _ in range(2))
    assert torch.equal(torch.randn(5, device=device, generator=first), torch.randn(5, device=device, generator=second))
    assert torch.Generator("sim:1").device == torch.device("sim", 1)


def test_autocast_casts_as_on_a_gpu(device):
    x = torch.randn(4, 4, device=device, requires_grad=True)
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert torch.get_autocast_dtype("sim") == torch.bfloat16
        y = x @ x
        assert y.dtype == torch.bfloat16
        assert F.linear(x, x).dtype == torch.bfloat16
        assert y.softmax(1).dtype == y.sum().dtype == F.layer_norm(y, (4,)).dtype == torch.float32
        assert (y + x).dtype == torch.float32
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    assert (x @ x).dtype == torch.float32


def test_modules_move_to_the_device_and_back_as_the_same_parameters(device):
    model = nn.Linear(3, 3)
    weight = model.weight
    model.to(device)
    assert model.weight is weight
    assert weight.device == device
    model(torch.ones(3, device=device)).sum().backward()
    assert weight.grad.device == device
    weight.data = torch.ones(3, 3)
    assert weight.device.type == "cpu"
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        weight.data = torch.ones(3, 3, device="meta")


def test_deepcopy_pickle_and_printing(device, tmp_path):
    x = torch.arange(4.0, device=device)
    assert repr(x) == "tensor([0., 1., 2., 3.], device='sim:0')"
    twin = copy.deepcopy(x)
    assert twin.data_ptr() != x.data_ptr()
    torch.save(x, tmp_path / "x")
    assert torch.load(tmp_path / "x").device == device
    assert torch.load(tmp_path / "x", map_location="cpu").tolist() == x.tolist()
