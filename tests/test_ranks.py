"""The ranks that tests run on tell what went wrong, and come back clean."""

import inspect
import os
import re
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
from tests.support.ranks.bodies import on_processes, on_threads


def rank_and_size():
    return dist.get_rank(), dist.get_world_size()


def failure(pool, fn, *args, **options):
    """How `fn` fails on ranks, which do the next function as if nothing had been."""
    with pytest.raises(RanksFailed) as failed:
        pool.run(fn, *args, **options)
    assert pool.run(sum_of_ranks) == [sum(range(pool.num_ranks))] * pool.num_ranks
    return failed.value


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


def surroundings():
    return os.getcwd(), dict(os.environ)


def change_the_surroundings(folder):
    os.chdir(folder)
    os.environ.pop("RANK")
    os.environ.update(LOCAL_RANK="7", ADDED_BY_A_TEST="1")


def warn():
    warnings.warn("careful", UserWarning, stacklevel=1)


def double_in_place(value):
    return value.mul_(2)


def return_argument(value):
    return value


def test_results_come_back_in_rank_order_from_functions_of_the_same_modules(world):
    for num_ranks in (1, 2, 3, 4):
        assert world(num_ranks).run(rank_and_size) == [(rank, num_ranks) for rank in range(num_ranks)]
    assert world(1).run(return_argument, rank_and_size) == [rank_and_size]
    assert rank_and_size.__module__ == "tests.test_ranks"
    assert "tests.test_ranks" in sys.modules


def test_arguments_reach_every_rank_by_value_and_collectives_work(world):
    assert world(3).run(sum_of_ranks, scale=10) == [30, 30, 30]
    sent = torch.arange(3.0)
    assert [found.tolist() for found in world(2).run(double_in_place, sent)] == [[0.0, 2.0, 4.0]] * 2
    assert sent.tolist() == [0.0, 1.0, 2.0]


def test_processes_are_the_same_from_one_test_to_the_next_with_one_thread_each(world):
    assert world(2).run(os.getpid) == world(2).run(os.getpid)
    assert world(2).run(torch.get_num_threads) == [1, 1]


def test_tensors_arrive_plain_and_no_larger_than_they_are(world):
    (found,) = world(1).run(tensors_of_many_kinds)
    assert found["view"].tolist() == [3.0, 4.0]
    assert found["view"].untyped_storage().nbytes() == 8
    assert found["bf16"].dtype == torch.bfloat16
    assert type(found["parameter"]) is torch.Tensor
    assert not found["parameter"].requires_grad


def test_a_failing_ranks_traceback_and_type_are_shown_from_the_tests_own_code_on(world, threads):
    for pool in (world(2), threads(2)):
        failed = failure(pool, raise_on, 1, "who am I")
        assert failed.errors == {1: ("KeyError", "'who am I'")}
        assert "in raise_on" in str(failed)
        assert "raise_on: rank 1 failed" in str(failed)
        assert "tests/support/ranks" not in str(failed)


def test_every_rank_that_raises_is_shown(world):
    failed = failure(world(2), raise_everywhere)
    assert "ranks 0, 1 failed" in str(failed)
    assert failed.errors == {rank: ("ValueError", f"rank {rank} objects") for rank in (0, 1)}


def test_a_bare_assert_shows_the_variables_it_saw(world):
    with pytest.raises(RanksFailed, match="theirs = 7"):
        world(1).run(assert_that_numbers_agree)


def test_ranks_left_waiting_by_one_that_raised_show_where_they_wait(world, monkeypatch):
    monkeypatch.setattr(ranks, "GRACE_S", 0.3)
    failed = failure(world(2), raise_on_rank_0_while_others_wait)
    assert failed.errors == {0: ("ValueError", "not on my watch")}
    assert "rank 1 had not finished" in str(failed)
    assert "in barrier" in str(failed)


@pytest.mark.parametrize(("how", "said"), [("SIGKILL", "killed by SIGKILL"), ("exit", "exit code 3")])
def test_a_rank_that_dies_is_named_long_before_the_time_out(world, how, said):
    failed = failure(world(2), die_on_rank_1, how, timeout=50)
    assert re.search(f"rank 1 died: .*{said}", str(failed))
    assert list(failed.errors) == [1]


@pytest.mark.parametrize(
    ("stuck", "rank", "where"),
    [(sleep_on_rank_1, 1, "in sleep_on_rank_1"), (wait_for_a_peer_that_never_comes, 0, "in barrier")],
)
def test_a_stuck_rank_shows_its_stack_at_the_time_out(world, stuck, rank, where):
    world(2).run(sum_of_ranks)
    failed = failure(world(2), stuck, timeout=0.5)
    assert where in str(failed)
    assert failed.errors == {rank: ("TimeoutError", "not finished after 0.5 s")}


def test_groups_a_test_made_are_gone_in_the_next(world):
    before = world(4).run(num_groups)
    made = world(4).run(make_a_sub_group)
    assert all(value == 2.0 and groups > known for (value, groups), known in zip(made, before, strict=True))
    assert world(4).run(num_groups) == before


def test_what_a_test_changed_around_itself_is_as_before_in_the_next(world, tmp_path):
    before = world(2).run(surroundings)
    world(2).run(change_the_surroundings, str(tmp_path))
    assert world(2).run(surroundings) == before


@pytest.mark.filterwarnings("error")
def test_a_tests_warning_filters_hold_on_its_ranks(world):
    with pytest.raises(RanksFailed, match="UserWarning: careful"):
        world(1).run(warn)


def test_what_cannot_be_run_is_refused_with_the_remedy(world, threads):
    with pytest.raises(RanksFailed, match="return its to_local"):
        world(1).run(a_dtensor)
    with pytest.raises(TypeError, match="at module level"):
        world(1).run(lambda: None)
    with pytest.raises(ValueError, match="1 to 4"):
        world(5)
    with pytest.raises(ValueError, match="1 to 8"):
        threads(9)


def a_dtensor():
    return dist.tensor.distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)))


def test_threads_gather_in_rank_order_and_leave_torch_distributed_as_they_found_it(threads):
    before = dist.distributed_c10d._world
    for num_ranks in (1, 2, 8):
        assert threads(num_ranks).run(gathered_ranks) == [[float(rank) for rank in range(num_ranks)]] * num_ranks
    assert dist.distributed_c10d._world is before
    assert not dist.is_initialized()


def test_each_thread_draws_random_numbers_as_a_process_of_its_own(threads):
    expected = random_numbers()
    for found in threads(3).run(random_numbers):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert inspect.isbuiltin(torch.rand), "torch's own again"
    assert "uniform_" not in vars(torch.Tensor)


@on_threads(4)
def test_threads_make_sub_groups_and_run_collectives_inside_gradient_hooks():
    assert make_a_sub_group()[0] == 2
    weight = torch.ones(3, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    (weight * (dist.get_rank() + 1)).sum().backward()
    assert weight.grad[0].item() == 10


def test_a_thread_that_raises_frees_the_others_and_is_shown(threads):
    failed = failure(threads(3), raise_on_rank_0_while_others_wait)
    assert "in raise_on_rank_0_while_others_wait" in str(failed)
    assert failed.errors == {0: ("ValueError", "not on my watch")}


def test_a_thread_that_waits_for_nobody_shows_its_stack(threads):
    failed = failure(threads(2), wait_for_a_peer_that_never_comes, timeout=0.3)
    assert "in barrier" in str(failed)
    assert failed.errors == {0: ("TimeoutError", "not finished after 0.3 s")}


@on_processes(2, right=[True, False])
def body_of_processes(right):
    assert right or dist.get_rank() == 0


@on_threads(1, 2, right=[True, False])
def body_of_threads(right):
    assert right or dist.get_world_size() == 1


def test_a_body_that_fails_on_one_rank_fails_and_names_what_was_tried(world, threads):
    said = r"(?s)with {'right': False} on 2 ranks: .*%s failed.*in %s"
    with pytest.raises(AssertionError, match=said % ("rank 1", "body_of_processes")):
        body_of_processes(world=world)
    with pytest.raises(AssertionError, match=said % ("ranks 0, 1", "body_of_threads")):
        body_of_threads(threads=threads)
