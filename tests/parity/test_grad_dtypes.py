"""Gradients are reduced, added up and kept in the dtypes in which torch's own `fully_shard` does."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

import sherd
from sherd import CommPolicy, Flat, MixedPrecisionPolicy
from sherd.errors import PolicyError
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import refusal
from tests.support.versions import needs_torch, torch_is_older

B16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
SINCE_2_15 = needs_torch(2, 15, "torch's own fully_shard has it since then")


class Stack(nn.Module):
    """Two layers without biases and a norm between them, which computes in the dtype that it has."""

    def __init__(self, dtype=F32):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(6, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 6, bias=False)
        self.to(dtype)

    def forward(self, inputs):
        hidden = self.norm(self.up(inputs.to(self.up.weight.dtype)).to(self.norm.weight.dtype))
        return self.down(hidden.to(self.down.weight.dtype)).float()


def norms_as_they_are(parameter):
    return parameter.dtype if parameter.dim() == 1 else None


def trained(by, policy, *, grad_dtypes=(), dtype=F32, to=None, backwards=1, synced=(True,), **options):
    """Each parameter's dtype, gradient and the dtype that it may have, after some backwards."""
    model = Stack(dtype)
    parameters = dict(model.named_parameters())
    for name, grad_dtype in dict(grad_dtypes).items():
        parameters[name].grad_dtype = grad_dtype
    if by is sherd:
        options["comm_policy"] = CommPolicy("torch")
    by.fully_shard(model, mp_policy=by.MixedPrecisionPolicy(**policy), **options)
    if to is not None:
        model.to(to)
    for number in range(backwards):
        model.set_requires_gradient_sync(synced[number % len(synced)])
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        model(torch.randn(3, 6, generator=generator)).square().sum().backward()
    return {
        name: (each.dtype, each.grad_dtype, each.grad.dtype, each.grad.full_tensor())
        for name, each in model.named_parameters()
    }


def assert_as_torch(policy, rtol=0.0, **case):
    ours, theirs = (trained(by, policy, **case) for by in (sherd, fsdp))
    for name, expected in theirs.items():
        assert ours[name][:3] == expected[:3], (policy, case, name)
        assert torch.allclose(ours[name][3], expected[3], rtol, atol=rtol), (policy, case, name)


LOW = {"param_dtype": B16}


@on_processes(2)
def test_without_a_reduce_dtype_gradients_are_reduced_as_by_the_torch_that_is_installed():
    for policy in (LOW, {}, {"param_dtype": B16, "reduce_dtype": F32}, {"reduce_dtype": B16}):
        assert_as_torch(policy)
        # What torch 2.15 rounds to the reduce dtype before it adds it, sherd adds before it rounds.
        is_narrower = "param_dtype" not in policy and policy and not torch_is_older(2, 15)
        assert_as_torch(policy, rtol=0.02 if is_narrower else 0.0, backwards=3, synced=(False, False, True))
    in_which = B16 if torch_is_older(2, 15) else F32
    ours, explicit = (trained(sherd, LOW | {"reduce_dtype": each}) for each in (None, in_which))
    assert all(torch.equal(ours[name][3], explicit[name][3]) for name in ours)


@SINCE_2_15
@on_processes(2)
def test_a_parameters_grad_dtype_says_in_which_dtype_its_gradient_is_reduced_and_kept():
    up, norm = "up.weight", "norm.weight"
    for policy in (LOW, {}, {"param_dtype": B16, "reduce_dtype": F32}):
        for grad_dtypes in ({up: B16}, {up: B16, norm: F64}, {up: F32}, dict.fromkeys(trained(sherd, {}), B16)):
            assert_as_torch(policy, grad_dtypes=grad_dtypes)
        assert_as_torch(policy, grad_dtypes={up: F32}, dtype=B16, backwards=2)
        # torch adds up the one in bfloat16, sherd all in the dtype of their reduction.
        assert_as_torch(policy, 0.03, grad_dtypes={up: B16}, backwards=3, synced=(False, False, True))


@SINCE_2_15
@on_processes(2)
def test_a_grad_dtype_of_none_takes_gradients_as_they_come():
    for policy in (LOW, {}, {"param_dtype": B16, "reduce_dtype": F32}):
        for grad_dtypes in ({"up.weight": None}, dict.fromkeys(trained(sherd, {}), None)):
            assert_as_torch(policy, grad_dtypes=grad_dtypes)
            assert_as_torch(policy, grad_dtypes=grad_dtypes, dtype=B16, backwards=2)


@SINCE_2_15
@on_processes(2)
def test_single_parameters_keep_their_dtype():
    policy = LOW | {"param_dtype_override_fn": norms_as_they_are}
    for more in ({}, {"reduce_dtype": F32}, {"reduce_dtype": B16}):
        assert_as_torch(policy | more)
        assert_as_torch(policy | more, grad_dtypes={"norm.bias": B16}, backwards=2)


@SINCE_2_15
@on_processes(2)
def test_a_grad_dtype_is_kept_when_the_model_is_converted():
    for grad_dtypes in ({}, {"up.weight": F32}, {"up.weight": B16, "norm.weight": None}):
        for dtype in (B16, F64):
            assert_as_torch({}, grad_dtypes=grad_dtypes, to=dtype)


# With every torch


@on_threads(2)
def test_a_grad_dtype_that_is_set_before_or_after_sharding_survives_conversions_loads_and_copies():
    for placement in (None, Flat()):
        for sets_early in (True, False):
            model = Stack()
            if sets_early:
                model.up.weight.grad_dtype = B16
            sherd.fully_shard(model, placement=placement)
            if not sets_early:
                model.up.weight.grad_dtype = B16
            model.to(F64)
            values = {name: each.full_tensor() + 1 for name, each in model.state_dict().items()}
            model.load_state_dict(values, assign=True)
            for each in (model, copy.deepcopy(model)):
                assert each.up.weight.dtype == each.down.weight.dtype == F64
                assert each.up.weight.grad_dtype == B16
                assert each.down.weight.grad_dtype == F64
                each(torch.ones(2, 6)).sum().backward()
                assert each.up.weight.grad.dtype == B16
                assert each.down.weight.grad.dtype == F64


@on_threads(2)
def test_conversions_leave_gradients_in_the_grad_dtype_that_was_set():
    model = Stack()
    model.up.weight.grad_dtype = B16
    sherd.fully_shard(model)
    model(torch.ones(2, 6)).sum().backward()
    before = model.up.weight.grad.full_tensor()
    model.to(F64)
    assert model.up.weight.grad.dtype == B16
    assert torch.equal(model.up.weight.grad.full_tensor(), before)
    assert model.down.weight.grad.dtype == F64


class WideGradient(torch.autograd.Function):
    """The weight as it is, whose gradient is one third, in float32."""

    @staticmethod
    def forward(ctx, weight):
        return weight * 1

    @staticmethod
    def backward(ctx, gradient):
        return torch.full(gradient.shape, 1 / 3, dtype=F32)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2, dtype=B16))

    def forward(self, inputs):
        return inputs @ WideGradient.apply(self.weight)


@on_threads(2)
def test_a_gradient_that_is_wider_than_its_parameter_is_not_rounded_if_its_grad_dtype_says_so():
    for grad_dtype in (F32, None):
        for synced in ((True,), (False, True)):
            model = Wide()
            model.weight.grad_dtype = grad_dtype
            sherd.fully_shard(model)
            for each in synced:
                model.set_requires_gradient_sync(each)
                model(torch.ones(1, 4, dtype=B16)).sum().backward()
            assert model.weight.grad.dtype == F32
            assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 2), 1 / 3) * len(synced))


@on_threads(2)
def test_zeros_for_unused_parameters_need_a_dtype():
    model = Wide()
    model.weight.grad_dtype = None
    sherd.fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    said = refusal(PolicyError, model(torch.ones(1, 4, dtype=B16)).sum().backward)
    assert said.startswith("weight has grad_dtype=None")
    assert "reduce_dtype=" in said


@on_threads(2)
def test_a_function_chooses_the_parameters_that_keep_their_dtype():
    for placement in (None, Flat()):
        seen, asked = {}, []
        model = Stack()
        model.register_forward_hook(lambda module, *_, seen=seen: seen.update(dtypes_of(module)))

        def choose(parameter, asked=asked):
            asked.append(parameter)
            return norms_as_they_are(parameter)

        given = [*model.parameters()]
        sherd.fully_shard(
            model, mp_policy=MixedPrecisionPolicy(B16, param_dtype_override_fn=choose), placement=placement
        )
        for _ in range(2):
            model(torch.ones(2, 6)).sum().backward()
        assert list(map(id, asked)) == list(map(id, given))
        assert seen == {"up.weight": B16, "norm.weight": F32, "norm.bias": F32, "down.weight": B16}
        assert {each.grad.dtype for each in model.parameters()} == {F32}


def dtypes_of(module):
    return {name: each.dtype for name, each in module.named_parameters()}


@on_threads(2)
def test_another_dtype_is_refused_before_anything_is_sharded():
    for answer in (F64, "bfloat16", True):
        model = Stack()
        policy = MixedPrecisionPolicy(B16, param_dtype_override_fn=lambda _, answer=answer: answer)
        said = refusal(PolicyError, sherd.fully_shard, model, mp_policy=policy)
        assert said.startswith(f"up.weight: param_dtype_override_fn returned {answer!r}; expected torch.float32"), said
        assert type(model) is Stack
        assert type(model.up.weight) is nn.Parameter
    assert "expected a function" in refusal(PolicyError, MixedPrecisionPolicy, param_dtype_override_fn=B16)


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, inputs):
        return (self.weight * 1j * inputs).imag


@on_threads(2)
def test_a_complex_gradient_keeps_its_imaginary_part():
    for policy in (MixedPrecisionPolicy(B16), MixedPrecisionPolicy(reduce_dtype=B16)):
        model = sherd.fully_shard(Turned(), mp_policy=policy)
        model(torch.full((4,), 1 + 2j)).sum().backward()
        plain = Turned()
        plain(torch.full((4,), 1 + 2j)).sum().backward()
        assert plain.weight.grad.imag.any()
        assert torch.equal(model.weight.grad.full_tensor(), plain.weight.grad)


# The wrapper


@on_threads(2)
def test_a_flat_parameter_has_gradients_of_its_own_dtype():
    model = Stack()
    model.up.weight.grad_dtype = B16
    model = sherd.FullyShardedDataParallel(model)
    model(torch.ones(3, 6)).square().sum().backward()
    (flat,) = model.parameters()
    assert flat.grad.dtype == F32


@on_threads(2)
def test_whole_copies_show_gradients_in_the_dtype_that_was_set():
    model = Stack()
    model.up.weight.grad_dtype = B16
    sherd.fully_shard(model)
    model(torch.ones(3, 6)).square().sum().backward()
    before = model.up.weight.grad.full_tensor()
    with sherd.unsharded(model, with_grads=True):
        assert torch.equal(model.up.weight.grad.to(B16), before)
        model.up.weight.grad.mul_(2)
    assert model.up.weight.grad.dtype == B16
    assert torch.equal(model.up.weight.grad.full_tensor(), 2 * before)


@on_threads(2)
def test_a_unit_whose_parameters_are_all_frozen_computes_in_the_dtypes_of_its_floating_ones():
    model = Stack()
    model.steps = nn.Parameter(torch.arange(4), requires_grad=False)
    model.requires_grad_(False)
    sherd.fully_shard(model, mp_policy=MixedPrecisionPolicy(B16))
    seen = {}
    model.register_forward_hook(lambda module, *_: seen.update(dtypes_of(module)))
    model(torch.ones(2, 6))
    assert seen.pop("steps") == torch.int64
    assert set(seen.values()) == {B16}
