"""Parameters in scratch files: the values of those in memory, read ahead in the order of the last step."""

import copy
import errno
import fcntl
import gc
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn, optim

import sherd
from sherd import Blocks, Disk, Flat, OffloadPolicy, Owned, fully_shard
from sherd.errors import PolicyError, ScratchError
from sherd.on_disk import DiskVectors, vectors_on
from sherd.optim import chunks
from sherd.storage.scratch import PAGE
from tests.optim.test_masters import made
from tests.support.models import chain, noise
from tests.support.ranks import RanksFailed
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import one_line

WIDTH = 24
LAYOUTS = {
    "Shard": {},
    "Flat": {"placement": Flat()},
    "Blocks": {"placement": Blocks(2)},
    "Owned": {"placement": Owned()},
    "zero1": {"placements": "zero1"},
    "zero2": {"placements": "zero2"},
    "bfloat16": {"mp_policy": sherd.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "kept": {"reshard_after_forward": False},
}


def sharded(policy, **options):
    torch.manual_seed(0)
    model = chain(3, WIDTH).append(nn.Linear(WIDTH, 5))
    for unit in (*model[:3], model):
        fully_shard(unit, offload_policy=policy, **options)
    return model


def step(model, optimizer, number):
    model(noise(number, torch.distributed.get_rank(), 3, WIDTH)).square().mean().backward()
    sherd.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def values_of(model):
    return {name: each.full_tensor().clone() for name, each in model.named_parameters()}


def trained(policy, kind=optim.AdamW, flattens=False, change=None, on_thread=False, **options):
    model = sharded(policy, **options)
    optimizer = made(kind, model, flattens)
    if on_thread:
        sherd.step_on_thread(optimizer)
    with mock.patch.object(chunks, "CHUNK_NUMEL", 64):
        for number in range(4):
            step(model, optimizer, number)
            if change is not None:
                change(model)
    return values_of(model)


def are_equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.values
@pytest.mark.parametrize("layout", LAYOUTS)
@on_threads(2)
def test_values_are_those_of_parameters_in_memory(layout, tmp_path):
    disk, options = Disk(str(tmp_path)), LAYOUTS[layout]
    for policy in (OffloadPolicy(parameters=disk), OffloadPolicy(parameters=disk, optimizer=disk, share=0.5)):
        assert are_equal(trained(policy, **options), trained(OffloadPolicy(), **options)), policy


@pytest.mark.values
@pytest.mark.parametrize("kind", [optim.SGD, optim.Adagrad, sherd.Muon])
@on_threads(1, 2)
def test_any_optimizer_steps_them(kind, tmp_path):
    on_disk = OffloadPolicy(parameters=Disk(str(tmp_path)))
    for flattens in (False, True) if kind is not sherd.Muon else (False,):
        assert are_equal(trained(on_disk, kind, flattens), trained(OffloadPolicy(), kind, flattens))


def through_data(model):
    for each in model.parameters():
        each.data.mul_(0.5)


def in_place(model):
    with torch.no_grad():
        for each in model.parameters():
            each.add_(1.0)


def by_loading(model):
    model.load_state_dict({name: each.mul(0.5) for name, each in model.state_dict().items()})


def unsharded(model):
    with sherd.unsharded(model):
        for each in model.parameters():
            each.detach().mul_(0.5)


@pytest.mark.parametrize("change", [through_data, in_place, by_loading, unsharded])
@on_threads(2)
def test_what_a_program_writes_between_steps_is_read_by_the_next(change, tmp_path):
    on_disk = OffloadPolicy(parameters=Disk(str(tmp_path)))
    assert are_equal(trained(on_disk, change=change), trained(OffloadPolicy(), change=change))


@on_threads(2)
def test_they_are_saved_loaded_and_copied_as_any(tmp_path):
    on_disk = OffloadPolicy(parameters=Disk(str(tmp_path)))
    model, other = sharded(on_disk), sharded(OffloadPolicy())
    step(model, made(optim.AdamW, model), 0)
    other.load_state_dict(model.state_dict())
    copied = copy.deepcopy(model)
    for each in (other, copied):
        assert are_equal(values_of(each), values_of(model))
    step(copied, made(optim.AdamW, copied), 1)
    assert not are_equal(values_of(copied), values_of(model))


@on_threads(1)
def test_units_are_read_ahead_once_their_order_is_known_but_for_the_first_after_a_step(tmp_path):
    disk = Disk(str(tmp_path))
    model = sharded(OffloadPolicy(parameters=disk))
    optimizer, read, at_hand = made(optim.AdamW, model), DiskVectors.read, DiskVectors.at_hand
    log = []

    def noted_use(self, user, *args):
        log.append("use")
        found = at_hand(self, user, *args)
        log.append("over")
        return found

    def noted_read(self, *args):
        log.append("read")
        return read(self, *args)

    with mock.patch.object(DiskVectors, "read", noted_read), mock.patch.object(DiskVectors, "at_hand", noted_use):
        for number in range(4):
            log.clear()
            step(model, optimizer, number)
    uses = " ".join(log[: len(log) - log[::-1].index("over")]).split("over")[:-1]
    # A use that finds its vector read begins one read, that of the next; the first one has to read its own, too.
    assert [each.split().count("read") for each in uses] == [2, *[1] * (len(uses) - 2), 0]


@on_threads(1)
def test_pages_pass_the_page_cache_whichever_byte_a_range_begins_at(tmp_path):
    vectors, flags = vectors_on(Disk(str(tmp_path))), []
    if not vectors._scratch.passes_cache:
        pytest.skip("this file system has no O_DIRECT")
    vector, expected = vectors.empty("a vector", 5 * PAGE, torch.float32), torch.arange(5.0 * PAGE)
    preadv, pwritev = os.preadv, os.pwritev

    def noted(call, fd, views, start):
        is_direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT != 0
        flags.append((is_direct, len(views[0]), start))
        return call(fd, views, start)

    with (
        mock.patch.object(os, "preadv", partial(noted, preadv)),
        mock.patch.object(os, "pwritev", partial(noted, pwritev)),
    ):
        for start, numel in ((0, PAGE), (PAGE, 3 * PAGE + 7), (4 * PAGE + 7, PAGE - 7)):
            buffer = vectors.buffer(start, numel, torch.float32, False)
            buffer.copy_(expected[start : start + numel])
            vectors.write(vector, start, buffer)
        vectors.settle()
        assert torch.equal(vector, expected), "the map shows them"
        for start, numel in ((3, 2 * PAGE), (PAGE - 1, PAGE + 1)):
            buffer = vectors.buffer(start, numel, torch.float32, False)
            vectors.read(vector, start, buffer).wait()
            assert torch.equal(buffer, expected[start : start + numel])
    assert all(is_direct == (nbytes % PAGE == start % PAGE == 0) for is_direct, nbytes, start in flags)
    assert sum(nbytes for is_direct, nbytes, _ in flags if is_direct) >= 0.8 * sum(nbytes for _, nbytes, _ in flags)


def test_threads_make_and_drop_vectors_whose_addresses_are_used_again(tmp_path):
    vectors, switching = DiskVectors(str(tmp_path)), sys.getswitchinterval()

    def used(thread):
        for number in range(100):
            expected = torch.full((3000,), 1000.0 * thread + number)
            vector = vectors.empty(f"{thread}", 3000, torch.float32)
            vectors.write(vector, 0, expected)
            vectors.settle()
            found = torch.empty(1500)
            vectors.read(vector[700:2200], 0, found).wait()
            assert torch.equal(found, expected[700:2200])

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(used, range(4)))
    finally:
        sys.setswitchinterval(switching)


@on_threads(1)
def test_a_vector_may_be_collected_as_garbage_by_the_thread_that_reads_it(tmp_path):
    vectors, dropped, preadv = DiskVectors(str(tmp_path)), threading.Event(), os.preadv
    vector, buffer = vectors.empty("a vector", PAGE, torch.float32), torch.ones(PAGE)
    cycle = [vector]
    cycle.append(cycle)

    def collecting(*arguments):
        dropped.wait()
        gc.collect()
        return preadv(*arguments)

    with mock.patch.object(os, "preadv", collecting):
        request = vectors.read(vector, 0, buffer)
        del vector, cycle
        dropped.set()
        request.wait()
    assert not buffer.any()
    assert not vectors._files


@on_threads(1)
def test_a_disk_that_fails_is_told_by_the_forward_and_by_all_that_follow(tmp_path):
    model = sharded(OffloadPolicy(parameters=Disk(str(tmp_path))))

    def failing(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    x = noise(0, 0, 3, WIDTH)
    model(x)
    with mock.patch.object(os, "preadv", failing):
        assert "continue from a checkpoint" in one_line(ScratchError, model, x)
    assert "continue from a checkpoint" in one_line(ScratchError, model, x)


@on_processes(2)
def test_what_would_be_stepped_on_a_thread_is_left_to_the_caller(tmp_path):
    for share in (1, 0.5):  # the thread steps units one by one of which the caller has made the first step in spans
        on_disk = OffloadPolicy(parameters=(disk := Disk(str(tmp_path))), optimizer=disk, share=share)
        assert are_equal(trained(on_disk, on_thread=True), trained(OffloadPolicy())), share


@on_threads(1)
def test_steps_move_to_backward_and_back_where_a_part_is_on_a_disk(tmp_path):
    def moved(policy):
        model = sharded(policy)
        optimizer = made(optim.AdamW, model)
        for number in range(6):
            if number % 2:
                in_backward = sherd.step_in_backward(model, optimizer)
            model(noise(number, 0, 3, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 2:
                in_backward.remove()
        return values_of(model)

    assert are_equal(moved(OffloadPolicy(optimizer=Disk(str(tmp_path)), share=0.5)), moved(OffloadPolicy()))


def fails(how, folder):
    """What both ranks say once a disk of rank 1 fails."""
    rank, rank_1_fails = torch.distributed.get_rank(), nullcontext()
    if rank:
        rank_1_fails = mock.patch.object(os, "preadv", mock.Mock(side_effect=OSError(errno.EIO, "broken")))
    options = {"mp_policy": sherd.MixedPrecisionPolicy(torch.bfloat16)} if how == "cast" else {}
    model, x = sharded(OffloadPolicy(parameters=Disk(folder)), **options), noise(0, rank, 3, WIDTH)
    optimizer = made(optim.AdamW, model)
    step(model, optimizer, 0)
    loss = model(x).square().mean() if how == "backward" else None
    with rank_1_fails, torch.set_grad_enabled(how != "evaluation"):
        if loss is not None:
            loss.backward()
        else:
            model(x)


@pytest.mark.parametrize("how", ["forward", "cast", "backward", "evaluation"])
def test_a_read_that_fails_on_one_rank_is_one_error_on_all(how, tmp_path, world):
    with pytest.raises(RanksFailed) as failed:
        world(2).run(fails, how, str(tmp_path), timeout=60.0)
    assert [kind for kind, _ in failed.value.errors.values()] == [ScratchError.__name__] * 2
    assert len({text.partition("]")[2] for _, text in failed.value.errors.values()}) == 1


@on_threads(1)
def test_a_tensor_that_gathers_itself_is_refused_before_anything_is_changed(tmp_path):
    model = nn.Linear(4, 4)
    model.weight.fsdp_pre_all_gather = lambda mesh: ((), None)
    said = one_line(PolicyError, fully_shard, model, offload_policy=OffloadPolicy(parameters=Disk(str(tmp_path))))
    assert "parameters='host'" in said
    assert type(model.weight) is nn.Parameter
