"""Shards written through torch.distributed.checkpoint: safetensors, stagers, asynchronous saves, partial loads."""

import copy
import glob
import tempfile as _tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
from torch.distributed.tensor import DTensor, Shard

from sherd import fully_shard
from tests.conformance.newer.behaviours import batch, behaviour, equal, full, main, raises, rank, same, same_models


def folder():
    name = [_tempfile.mkdtemp() if rank() == 0 else None]
    dist.broadcast_object_list(name, src=0)
    return name[0]


def models(seed=1, sizes=(5, 7, 3), fn=None, mesh=None):
    torch.manual_seed(seed)
    plain = nn.Sequential(
        nn.Linear(sizes[0], sizes[1]), nn.Linear(sizes[1], sizes[2]), nn.Linear(sizes[2], 1, bias=False)
    )
    model = copy.deepcopy(plain)
    for m in (*model, model):
        fully_shard(m, **({"shard_placement_fn": fn} if fn else {}), **({"mesh": mesh} if mesh else {}))
    return model, plain


@behaviour(2)
def safetensors_of_shards_read_into_shards():
    model, plain = models()
    where = folder()
    dcp.save(model.state_dict(), storage_writer=HuggingFaceStorageWriter(path=where, save_distributed=True))
    other, _ = models(2)
    state = other.state_dict()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(where))
    other.load_state_dict(state)
    same_models(other, plain, grads=False, tol=0)


@behaviour(2)
def safetensors_consolidated():
    from safetensors.torch import load_file

    model, plain = models()
    where = folder()
    dcp.save(
        model.state_dict(),
        storage_writer=HuggingFaceStorageWriter(path=where, save_distributed=True, enable_consolidation=True),
    )
    dist.barrier()
    found = {}
    for name in glob.glob(where + "/*.safetensors"):
        found.update(load_file(name))
    equal(sorted(found), sorted(plain.state_dict()), "keys")
    for k, v in plain.state_dict().items():
        same(found[k], v, k, 0)


@behaviour(2)
def safetensors_of_a_full_state_on_rank_0():
    from safetensors.torch import load_file

    model, plain = models()
    where = folder()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank() == 0:
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(path=where), no_dist=True)
        found = {}
        for name in glob.glob(where + "/*.safetensors"):
            found.update(load_file(name))
        for k, v in plain.state_dict().items():
            same(found[k], v, k, 0)


@behaviour(2)
def safetensors_of_a_plain_model_read_into_shards():
    from safetensors.torch import save_file

    _, plain = models()
    where = folder()
    if rank() == 0:
        save_file(plain.state_dict(), where + "/model-00001-of-00001.safetensors")
    dist.barrier()
    for fn in (None, lambda p: Shard(p.dim() - 1)):
        torch.manual_seed(2)
        other = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1, bias=False)) if fn is None else None
        if other is None:
            continue
        fully_shard(other)
        state = other.state_dict()
        dcp.load(state, storage_reader=HuggingFaceStorageReader(where))
        other.load_state_dict(state)
        same_models(other, plain, grads=False, tol=0)


@behaviour(4)
def safetensors_of_replicas_of_shards():
    model, plain = models(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard")))
    where = folder()
    dcp.save(model.state_dict(), storage_writer=HuggingFaceStorageWriter(path=where, save_distributed=True))
    other, _ = models(2)
    state = other.state_dict()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(where))
    other.load_state_dict(state)
    same_models(other, plain, grads=False, tol=0)


def staged(**kw):
    model, plain = models()
    stager = DefaultStager(StagingOptions(**kw))
    state = stager.stage(model.state_dict())
    state = state.result() if hasattr(state, "result") else state
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for k, v in plain.state_dict().items():
        assert isinstance(state[k], DTensor), k
        same(state[k], v, k, 0)
    stager.close()


@behaviour(2)
def staged_at_once():
    staged(use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False)


@behaviour(2)
def staged_in_shared_memory():
    staged(use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False)


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


if __name__ == "__main__":
    main()
