"""What a function keeps of whole matrices lies with their owners, and goes with the parameters wherever these go."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import Replicate, Shard

import sherd
from sherd import CommPolicy, MatrixOptimizer, ShardingStrategy
from sherd.engine import Unit
from sherd.errors import OptimizerError, PolicyTypeError
from sherd.optim.owners import MatrixWork, in_order
from tests.optim.moves import MOVES, assert_goes_on
from tests.optim.test_muon import FRONTS, assert_as_plain, batches, sharded_by, trained, trained_at_second_try
from tests.support.checkpoints import load, save
from tests.support.comparing import whole_params
from tests.support.meshes import mesh_of
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import one_line
from tests.support.sharding import sharded


def kept_by_shampoo(rows, columns):
    return {"left": (rows, rows), "right": (columns, columns), "step": ()}


def shampoo(matrices, state):
    """Of Gupta et al. (2018), with averages, as a user would write it."""
    state["step"] += 1
    state["left"].lerp_(matrices @ matrices.mT, 0.1)
    state["right"].lerp_(matrices.mT @ matrices, 0.1)
    seen = (1 - 0.9 ** state["step"])[:, None, None]
    return root(state["left"] / seen) @ matrices @ root(state["right"] / seen)


def root(squares):
    """To the power of -1/4."""
    values, vectors = torch.linalg.eigh(squares)
    return (vectors * (values.clamp(min=0) + 1e-4)[:, None] ** -0.25) @ vectors.mT


class Layers(nn.Module):
    """Matrices of several shapes, two alike, heads, and square experts, whose state has their parameter's shape."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second, self.qkv = (nn.Linear(*sizes, bias=False) for sizes in ((5, 4), (4, 4), (4, 12)))
        self.third = nn.Linear(4, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(5, 4, 4) / 2)

    def forward(self, x):
        heads = self.qkv(self.third(torch.tanh(self.second(self.first(x))))).unflatten(1, (3, 4)).sum(1)
        return torch.einsum("bd,edh->beh", heads, self.experts)


def groups(model):
    """The heads of `qkv` are matrices of their own."""
    named = Unit.named_members(model)
    (heads,) = (name for name in named if "qkv" in name)
    return [{"params": [(heads, named.pop(heads))], "rows": 4}, {"params": list(named.items())}]


def optimizer_of(model):
    return MatrixOptimizer(groups(model), shampoo, state=kept_by_shampoo, lr=0.02, weight_decay=0.1)


def by_hand(model, given):
    """Steps one process's parameters matrix by matrix."""
    kept = {}
    for batch in given:
        model(batch).square().mean().backward()
        for name, p in model.named_parameters():
            batch = p.grad.view(3, 4, 4) if "qkv" in name else p.grad if p.ndim == 3 else p.grad[None]
            state = kept.setdefault(
                p, {key: torch.zeros(len(batch), *shape) for key, shape in kept_by_shampoo(*batch.shape[1:]).items()}
            )
            p.data.mul_(1 - 0.02 * 0.1).add_(shampoo(batch, state).view_as(p), alpha=-0.02)
        model.zero_grad()


def test_the_optimizer_steps_as_the_function_does_by_hand():
    plain, stepped = Layers(), Layers()
    by_hand(plain, batches(6))
    trained(stepped, optimizer_of(stepped), batches(6))
    assert_as_plain(stepped, plain)


@on_threads(1, 2, 3, 4, front=FRONTS)
def test_a_function_that_keeps_state_trains_as_in_one_process(front):
    plain, model = Layers(), sharded_by(front, Layers())
    by_hand(plain, batches(4))
    trained(model, optimizer_of(model), batches(4))
    assert_as_plain(model, plain)


@on_threads(4, front=["shard", "flat", "owned", "blocks"], sizes=[(2, 2), (4, 1), (1, 4)])
def test_replicas_keep_each_state_once(front, sizes):
    plain = Layers()
    by_hand(plain, batches(4))
    model = sharded(Layers(), front, mesh=mesh_of(sizes))
    optimizer = optimizer_of(model)
    trained(model, optimizer, batches(4))
    assert_as_plain(model, plain)
    for parameter in model.parameters():
        kept = optimizer.state[parameter]["left"]
        here = torch.tensor([float(kept.to_local().numel())])
        torch.distributed.all_reduce(here)
        assert int(here) == kept.numel()


@on_threads(4, stage=[0, 1, 2, 3], cut=[Shard(0), Shard(1), sherd.Owned(), sherd.Flat()])
def test_every_stage_keeps_state_as_one_process(stage, cut):
    """Optimizer state over replicas, and then gradients and parameters too; beside parameters that are sharded."""
    plain = Layers()
    by_hand(plain, batches(3))
    levels = [[cut if stage >= at else Replicate(), cut] for at in (3, 2, 1)]
    model = sharded(Layers(), mesh=mesh_of((2, 2)), placements=sherd.Placements(*levels))
    trained(model, optimizer_of(model), batches(3))
    assert_as_plain(model, plain)


@pytest.mark.parametrize("form", ["sherd", "dcp"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_state_goes_on_under_another_layout_on_other_ranks(threads, tmp_path, form, move, steps_before):
    folder = tmp_path / "checkpoint"
    assert_goes_on(threads, folder, form, move, Layers, optimizer_of, batches(4), by_hand, trained, steps_before)


@on_processes(2, front=["shard", "owned", "wrapper", "flat wrapper"], from_rank0=[False, True])
def test_a_full_state_dict_has_the_state_of_one_process_and_loads(front, from_rank0):
    plain, models = Layers(), [sharded(Layers(), front) for _ in range(2)]
    by_optimizer, first, second = (optimizer_of(each) for each in (plain, *models))
    trained(plain, by_optimizer, batches(2))
    trained(models[0], first, batches(2))
    full = StateDictOptions(full_state_dict=True)
    found = get_optimizer_state_dict(models[0], first, options=full)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(found["state"][name], by_optimizer.state[p], rtol=1e-4, atol=1e-6)
    models[1].load_state_dict(models[0].state_dict())
    given = found if not from_rank0 or torch.distributed.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
    set_optimizer_state_dict(models[1], second, given, options=options)
    trained(plain, by_optimizer, batches(4)[2:])
    trained(models[1], second, batches(4)[2:])
    assert_as_plain(models[1], plain)


@on_threads(3, front=["shard", "flat"])
def test_state_moves_with_its_matrix_when_owners_change(front):
    """As they do where the optimizer gets another parameter to step, or a parameter is frozen for a while."""
    plain, model = Layers(), sharded(Layers(), front)
    for each in (plain, model):
        late = groups(each)
        optimizer = MatrixOptimizer(late[1:], shampoo, state=kept_by_shampoo, lr=0.02)
        trained(each, optimizer, batches(2))
        optimizer.add_param_group(late[0])
        trained(each, optimizer, batches(4)[2:])
        optimizer.param_groups[1]["params"][0].requires_grad_(False)
        trained(each, optimizer, batches(6)[4:])
        optimizer.param_groups[1]["params"][0].requires_grad_(True)
        trained(each, optimizer, batches(8)[6:])
    assert_as_plain(model, plain)


@on_threads(2, front=["shard", "owned"])
def test_what_has_no_gradient_keeps_its_state(front):
    model = sharded(Layers(), front)
    optimizer = optimizer_of(model)
    trained(model, optimizer, batches(1))
    before = {name: optimizer.state[p]["step"].full_tensor() for name, p in model.named_parameters()}
    model(batches(1)[0]).square().mean().backward()
    model.second.weight.grad = None
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(optimizer.state[p]["step"].full_tensor(), before[name] + (name != "second.weight")), name


@on_threads(2, front=["shard", "owned"])
def test_a_copy_keeps_its_own_state(front):
    model = sharded(Layers(), front)
    optimizer = optimizer_of(model)
    trained(model, optimizer, batches(2))
    copies = copy.deepcopy((model, optimizer))
    for each, stepped in ((model, optimizer), copies):
        trained(each, stepped, batches(2))
    torch.testing.assert_close(whole_params(copies[0]), whole_params(model))


@pytest.mark.parametrize("form", ["sherd", "dcp", "own"])
@on_threads(2)
def test_it_is_kept_in_float32_beside_parameters_in_bfloat16(form, tmp_path):
    def kept(matrices, state):
        state["sum"] += matrices.float()
        return matrices

    models = [sharded(Layers().bfloat16()) for _ in range(2)]
    options = {"state": lambda rows, columns: {"sum": (rows, columns)}}
    optimizers = [MatrixOptimizer(model.parameters(), kept, **options) for model in models]
    trained(models[0], optimizers[0], [batch.bfloat16() for batch in batches(4)])
    if form == "sherd":
        sherd.save(tmp_path, {"model": models[0], "optimizer": optimizers[0]}, step=2)
        sherd.load(tmp_path, {"model": models[1], "optimizer": optimizers[1]})
    elif form == "dcp":
        save(models[0], optimizers[0], tmp_path)
        load(models[1], optimizers[1], tmp_path)
    else:
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        expected, found = (optimizer.state[p]["sum"] for optimizer, p in zip(optimizers, parameters, strict=True))
        assert found.dtype is torch.float32
        assert torch.equal(found.full_tensor(), expected.full_tensor())


def test_what_a_function_may_not_keep_is_named():
    weight = nn.Parameter(torch.ones(6, 4))
    weight.grad = torch.ones(6, 4)

    def made(function, state=lambda rows, columns: {"left": (rows, rows)}):
        return MatrixOptimizer([("w", weight)], function, state=state)

    def drops(matrices, state):
        del state["left"]
        return matrices

    def widens(matrices, state):
        state["left"] = torch.zeros(1, 6, 7)
        return matrices

    for error, words, action in (
        (
            PolicyTypeError,
            "MatrixOptimizer(state='left'): expected a function, such as",
            lambda: made(torch.sign, "left"),
        ),
        (
            PolicyTypeError,
            "state=...) returned None: expected shapes, as lambda",
            lambda: made(torch.sign, lambda *_: None),
        ),
        (PolicyTypeError, "returned {'left': 3}", lambda: made(torch.sign, lambda *_: {"left": 3})),
        (PolicyTypeError, "returned {'left': (-1,)}", lambda: made(torch.sign, lambda *_: {"left": (-1,)})),
        (OptimizerError, "left nothing as state 'left' of w; it must leave shape (1, 6, 6)", made(drops).step),
        (OptimizerError, "left shape (1, 6, 7) as state 'left' of w; it must", made(widens).step),
    ):
        assert words in one_line(error, action), words
    optimizer = made(lambda matrices, state: matrices)
    optimizer.step()
    optimizer.state[weight]["left"] = torch.zeros(1, 5, 5)
    assert "w: its state 'left' has shape (1, 5, 5)" in one_line(OptimizerError, optimizer.step)


def test_owners_of_neighbours_are_in_order():
    def ordered(*owners, fixed=()):
        works = [MatrixWork(1, 1, [owner] if at in fixed else range(4)) for at, owner in enumerate(owners)]
        return in_order(owners, works, 4)

    assert ordered(3, 0, 2, 1) == [0, 1, 2, 3]
    assert ordered(3, 1, 0, fixed=(1,)) == [0, 1, 3]
    assert ordered(3, 1, 3, 2, 2, fixed=(1, 3)) == [1, 1, 2, 2, 3]
    assert ordered(0, 2, 0, 3, fixed=(1, 3)) == [0, 2, 2, 3]


@on_threads(4, front=["wrapper", "flat wrapper"], strategy=list(ShardingStrategy))
def test_every_strategy_of_the_wrapper_and_its_own_state_dicts(front, strategy):
    plain = Layers()
    by_hand(plain, batches(4))
    options = {"device_mesh": mesh_of((2, 2))} if "HYBRID" in strategy.name else {}
    models = [sharded(Layers(), front, sharding_strategy=strategy, **options) for _ in range(2)]
    first, second = (optimizer_of(model) for model in models)
    trained(models[0], first, batches(2))
    state = sherd.FullyShardedDataParallel.optim_state_dict(models[0], first)
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(sherd.FullyShardedDataParallel.optim_state_dict_to_load(models[1], second, state))
    trained(models[1], second, batches(4)[2:])
    assert_as_plain(models[1], plain)


@on_threads(2, front=["shard", "owned", "flat wrapper"])
def test_it_is_kept_in_steps_in_backward(front):
    plain, model = Layers(), sharded(Layers(), front)
    by_hand(plain, batches(3))
    sherd.step_in_backward(model, optimizer_of(model))
    for batch in batches(3):
        model(batch).square().mean().backward()
    assert_as_plain(model, plain)


@on_processes(2)
def test_a_step_that_is_undone_is_kept_nowhere():
    plain, model = Layers(), sharded(Layers(), comm_policy=CommPolicy(divergence="join"))
    by_hand(plain, batches(2))
    trained_at_second_try(model, optimizer_of(model), batches(2))
    assert_as_plain(model, plain)


@on_threads(2)
def test_it_is_in_host_memory_with_what_is_offloaded():
    plain, model = Layers(), sharded(Layers(), offload_policy=sherd.CPUOffloadPolicy())
    by_hand(plain, batches(3))
    trained(model, optimizer_of(model), batches(3))
    assert_as_plain(model, plain)
