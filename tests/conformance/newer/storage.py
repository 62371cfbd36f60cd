"""Shards written through torch.distributed.checkpoint: safetensors, stagers, asynchronous saves, partial loads."""

import copy
import glob

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from sherd import fully_shard
from tests.conformance.newer.behaviours import (
    batch,
    behaviour,
    cases,
    equal,
    folder,
    full,
    raises,
    rank,
    same,
    same_models,
    units,
)


def models(seed=1, **kw):
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1, bias=False))
    return units(fully_shard, copy.deepcopy(plain), **kw), plain


def read_into(other, where, plain):
    state = other.state_dict()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(where))
    other.load_state_dict(state)
    same_models(other, plain, grads=False, tol=0)


def assert_files_hold(where, plain):
    found = {}
    for name in glob.glob(where + "/*.safetensors"):
        found.update(load_file(name))
    equal(sorted(found), sorted(plain.state_dict()), "keys")
    for k, v in plain.state_dict().items():
        same(found[k], v, k, 0)


def written_and_read(shape, names):
    model, plain = models(mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    where = folder()
    dcp.save(model.state_dict(), storage_writer=HuggingFaceStorageWriter(path=where, save_distributed=True))
    read_into(models(2)[0], where, plain)


cases(2, safetensors_of_shards_read_into_shards=lambda: written_and_read((2,), ("shard",)))
cases(4, safetensors_of_replicas_of_shards=lambda: written_and_read((2, 2), ("rep", "shard")))


@behaviour(2)
def safetensors_consolidated():
    model, plain = models()
    where = folder()
    writer = HuggingFaceStorageWriter(path=where, save_distributed=True, enable_consolidation=True)
    dcp.save(model.state_dict(), storage_writer=writer)
    dist.barrier()
    assert_files_hold(where, plain)


@behaviour(2)
def safetensors_of_a_full_state_on_rank_0():
    model, plain = models()
    where = folder()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank() == 0:
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(path=where), no_dist=True)
        assert_files_hold(where, plain)


@behaviour(2)
def safetensors_of_a_plain_model_read_into_shards():
    _, plain = models()
    where = folder()
    if rank() == 0:
        save_file(plain.state_dict(), where + "/model-00001-of-00001.safetensors")
    dist.barrier()
    torch.manual_seed(2)
    other = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1, bias=False))
    read_into(fully_shard(other), where, plain)


def staged(in_shared_memory):
    model, plain = models()
    others = {"use_pinned_memory": False, "use_async_staging": False, "use_non_blocking_copy": False}
    stager = DefaultStager(StagingOptions(use_shared_memory=in_shared_memory, **others))
    state = stager.stage(model.state_dict())
    state = state.result() if hasattr(state, "result") else state
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for k, v in plain.state_dict().items():
        assert isinstance(state[k], DTensor), k
        same(state[k], v, k, 0)
    stager.close()


cases(2, staged_at_once=lambda: staged(False), staged_in_shared_memory=lambda: staged(True))


@behaviour(2)
def saved_asynchronously_while_training_goes_on():
    model, _plain = models()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    where = folder()
    m, _ = get_state_dict(model, optimizer)
    want = {k: full(v).clone() for k, v in m.items()}
    future = dcp.async_save(
        {"model": m}, checkpoint_id=where, process_group=dist.new_group()
    )  # a group beside that of training
    future = getattr(future, "upload_completion", future)
    model(batch(2, 5)).square().sum().backward(), optimizer.step()
    future.result()
    other, _ = models(2)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=where)
    set_model_state_dict(other, state["model"])
    for k, v in other.state_dict().items():
        same(v, want[k], k, 0)


@behaviour(2)
def a_part_of_a_checkpoint():
    model, plain = models()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    where = folder()
    m, o = get_state_dict(model, optimizer)
    dcp.save({"model": m, "optimizer": o}, checkpoint_id=where)
    other, _ = models(2)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=where)
    set_model_state_dict(other, state["model"])
    same_models(other, plain, grads=False, tol=0)
    some = {"model": {k: v for k, v in get_model_state_dict(models(3)[0]).items() if k.startswith("0.")}}
    dcp.load(some, checkpoint_id=where)
    for k, v in some["model"].items():
        same(v, plain.state_dict()[k], k, 0)


@behaviour(2)
def strict_and_not_when_keys_differ():
    model, _plain = models()
    state = get_model_state_dict(model)
    state["more"] = torch.zeros(3)
    raises(RuntimeError, lambda: set_model_state_dict(model, state), "an unexpected key")
    del state["0.weight"]
    found = set_model_state_dict(model, state, options=StateDictOptions(strict=False))
    equal((found.missing_keys, found.unexpected_keys), (["0.weight"], ["more"]), "what set_model_state_dict returns")
    del state["more"]
    raises(RuntimeError, lambda: set_model_state_dict(model, state), "a missing key")
