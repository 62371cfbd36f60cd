"""Do the ranks that tests run on tell what went wrong, and come back clean?"""

import inspect
import os
import signal
import sys
import time
import warnings

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.support import ranks
from tests.support.ranks import RanksFailed


def rank_and_size():
    return dist.get_rank(), dist.get_world_size()


def sum_of_ranks(scale=1):
    total = torch.tensor(dist.get_rank() * scale)
    dist.all_reduce(total)
    return total.item()


def gathered_ranks():
    out = torch.empty(dist.get_world_size())
    dist.all_gather(list(out.unbind()), torch.tensor(float(dist.get_rank())))
    return out.tolist()


def random_numbers():
    """Drawn in every way that tests draw, from a known seed; on ranks, others draw between any two of them."""
    torch.manual_seed(3)
    draws = (
        lambda: torch.rand(3),
        lambda: torch.randn(2, 2),
        lambda: torch.randint(2, 11, (4,)),
        lambda: torch.randperm(5),
        lambda: torch.normal(0.0, 1.0, (3,)),
        lambda: torch.multinomial(torch.ones(5), 2),
        lambda: torch.empty(3).exponential_(),
        lambda: nn.Linear(3, 2).weight.detach(),
        lambda: nn.Embedding(3, 2).weight.detach(),
        lambda: nn.MultiheadAttention(4, 2).in_proj_weight.detach(),
        lambda: nn.Dropout(0.3)(torch.ones(16)),
        lambda: checkpoint(
            lambda x: x * torch.rand(3), torch.ones(3, requires_grad=True), use_reentrant=False
        ).detach(),
    )
    drawn = []
    for draw in draws:
        if dist.is_initialized():
            dist.barrier()
        with torch.random.fork_rng():
            torch.rand(dist.get_rank() if dist.is_initialized() else 3)
        drawn.append(draw())
    return drawn


def raise_on(rank, message):
    if dist.get_rank() == rank:
        raise KeyError(message)
    return "fine"


def raise_on_rank_0_while_others_wait():
    if dist.get_rank() == 0:
        raise ValueError("not on my watch")
    dist.barrier()


def raise_everywhere():
    raise ValueError(f"rank {dist.get_rank()} objects")


def assert_that_numbers_agree():
    ours, theirs = 1 + dist.get_rank(), 7
    assert ours == theirs


def die_on_rank_1(how):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL) if how == "SIGKILL" else os._exit(3)
    time.sleep(60)


def sleep_on_rank_1():
    if dist.get_rank() == 1:
        time.sleep(60)


def wait_for_a_peer_that_never_comes():
    if dist.get_rank() == 0:
        dist.barrier()


def make_a_sub_group():
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
    value = torch.ones(1)
    dist.all_reduce(value, group=mesh.get_group(1))
    return value.item(), len(dist.distributed_c10d._world.pg_map)


def num_groups():
    return len(dist.distributed_c10d._world.pg_map)


def tensors_of_many_kinds():
    big = torch.arange(1000.0)
    return {
        "view": big[3:5],
        "bf16": torch.ones(2, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(big[:2]),
    }


def warn():
    warnings.warn("careful", UserWarning, stacklevel=1)


def grad_through_a_hook():
    weight = torch.ones(3, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    (weight * (dist.get_rank() + 1)).sum().backward()
    return weight.grad[0].item()


def double_in_place(value):
    return value.mul_(2)


def return_argument(value):
    return value


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_results_come_back_in_rank_order(world, num_ranks):
    assert world(num_ranks).run(rank_and_size) == [(rank, num_ranks) for rank in range(num_ranks)]


def test_arguments_reach_every_rank_and_collectives_work(world):
    assert world(3).run(sum_of_ranks, scale=10) == [30, 30, 30]


def test_a_tensor_argument_reaches_every_rank_by_value(world):
    sent = torch.arange(3.0)
    assert [found.tolist() for found in world(2).run(double_in_place, sent)] == [[0.0, 2.0, 4.0]] * 2
    assert sent.tolist() == [0.0, 1.0, 2.0]


def test_processes_are_the_same_from_one_test_to_the_next(world):
    assert world(2).run(os.getpid) == world(2).run(os.getpid)


def test_each_rank_has_one_thread_and_no_more(world):
    assert world(2).run(torch.get_num_threads) == [1, 1]


def test_tensors_arrive_plain_and_no_larger_than_they_are(world):
    (found,) = world(1).run(tensors_of_many_kinds)
    assert found["view"].tolist() == [3.0, 4.0]
    assert found["view"].untyped_storage().nbytes() == 8
    assert found["bf16"].dtype == torch.bfloat16
    assert type(found["parameter"]) is torch.Tensor
    assert not found["parameter"].requires_grad


def test_a_failing_ranks_traceback_and_type_are_shown(world):
    with pytest.raises(RanksFailed) as failed:
        world(2).run(raise_on, 1, "who am I")
    assert failed.value.errors == {1: ("KeyError", "'who am I'")}
    assert "in raise_on" in str(failed.value)
    assert "raise_on: rank 1 failed" in str(failed.value)
    assert world(2).run(sum_of_ranks) == [1, 1]


def test_every_rank_that_raises_is_shown(world):
    with pytest.raises(RanksFailed, match="ranks 0, 1 failed") as failed:
        world(2).run(raise_everywhere)
    assert failed.value.errors == {rank: ("ValueError", f"rank {rank} objects") for rank in (0, 1)}
    assert world(2).run(sum_of_ranks) == [1, 1]


def test_a_bare_assert_shows_the_variables_it_saw(world):
    with pytest.raises(RanksFailed, match="theirs = 7"):
        world(1).run(assert_that_numbers_agree)


def test_ranks_left_waiting_by_one_that_raised_show_where_they_wait(world, monkeypatch):
    monkeypatch.setattr(ranks, "GRACE_S", 0.3)
    with pytest.raises(RanksFailed) as failed:
        world(2).run(raise_on_rank_0_while_others_wait)
    assert failed.value.errors == {0: ("ValueError", "not on my watch")}
    assert "rank 1 had not finished" in str(failed.value)
    assert "in barrier" in str(failed.value)
    assert world(2).run(sum_of_ranks) == [1, 1]


@pytest.mark.parametrize(("how", "said"), [("SIGKILL", "killed by SIGKILL"), ("exit", "exit code 3")])
def test_a_rank_that_dies_is_named_long_before_the_time_out(world, how, said):
    with pytest.raises(RanksFailed, match=f"rank 1 died: .*{said}") as failed:
        world(2).run(die_on_rank_1, how, timeout=50)
    assert list(failed.value.errors) == [1]
    assert world(2).run(sum_of_ranks) == [1, 1]


@pytest.mark.parametrize(
    ("stuck", "rank", "where"),
    [
        (sleep_on_rank_1, 1, "in sleep_on_rank_1"),
        (wait_for_a_peer_that_never_comes, 0, "in barrier"),
    ],
)
def test_a_stuck_rank_shows_its_stack_at_the_time_out(world, stuck, rank, where):
    world(2).run(sum_of_ranks)
    with pytest.raises(RanksFailed, match=where) as failed:
        world(2).run(stuck, timeout=0.5)
    assert failed.value.errors == {rank: ("TimeoutError", "not finished after 0.5 s")}
    assert world(2).run(sum_of_ranks) == [1, 1]


def test_groups_a_test_made_are_gone_in_the_next(world):
    before = world(4).run(num_groups)
    made = world(4).run(make_a_sub_group)
    assert all(value == 2.0 and groups > known for (value, groups), known in zip(made, before, strict=True))
    assert world(4).run(num_groups) == before


@pytest.mark.filterwarnings("error")
def test_a_tests_warning_filters_hold_on_its_ranks(world):
    with pytest.raises(RanksFailed, match="UserWarning: careful"):
        world(1).run(warn)


def test_a_dtensor_is_refused_with_the_remedy(world):
    with pytest.raises(RanksFailed, match="return its to_local"):
        world(1).run(a_dtensor)


def a_dtensor():
    return dist.tensor.distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)))


def test_a_local_function_is_refused_with_the_remedy(world):
    with pytest.raises(TypeError, match="at module level"):
        world(1).run(lambda: None)


def test_sizes_out_of_range_are_refused(world, threads):
    with pytest.raises(ValueError, match="1 to 4"):
        world(5)
    with pytest.raises(ValueError, match="1 to 8"):
        threads(9)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_threads_gather_in_rank_order(threads, num_ranks):
    expected = [float(rank) for rank in range(num_ranks)]
    assert threads(num_ranks).run(gathered_ranks) == [expected] * num_ranks


def test_each_thread_draws_random_numbers_as_a_process_of_its_own(threads):
    expected = random_numbers()
    for found in threads(3).run(random_numbers):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert inspect.isbuiltin(torch.rand), "torch's own again"
    assert "uniform_" not in vars(torch.Tensor)


def test_threads_run_collectives_inside_gradient_hooks(threads):
    assert threads(4).run(grad_through_a_hook) == [10.0] * 4


def test_threads_make_sub_groups(threads):
    assert [value for value, _ in threads(4).run(make_a_sub_group)] == [2.0] * 4


def test_a_thread_that_raises_frees_the_others_and_is_shown(threads):
    with pytest.raises(RanksFailed, match="in raise_on_rank_0_while_others_wait") as failed:
        threads(3).run(raise_on_rank_0_while_others_wait)
    assert failed.value.errors == {0: ("ValueError", "not on my watch")}
    assert threads(3).run(sum_of_ranks) == [3, 3, 3]


def test_a_thread_that_waits_for_nobody_shows_its_stack(threads):
    with pytest.raises(RanksFailed, match="in barrier") as failed:
        threads(2).run(wait_for_a_peer_that_never_comes, timeout=0.3)
    assert failed.value.errors == {0: ("TimeoutError", "not finished after 0.3 s")}
    assert threads(2).run(sum_of_ranks) == [1, 1]


def test_threads_leave_torch_distributed_as_they_found_it(threads):
    before = dist.distributed_c10d._world
    threads(2).run(sum_of_ranks)
    assert dist.distributed_c10d._world is before
    assert not dist.is_initialized()


def test_test_modules_are_named_the_same_on_every_rank(world):
    assert world(1).run(return_argument, rank_and_size) == [rank_and_size]
    assert rank_and_size.__module__ == "tests.test_ranks"
    assert "tests.test_ranks" in sys.modules
