"""What may be saved beside a model, what is refused, and what another thread saves."""

import json
import math
import os
import random
import threading
import warnings
from collections import OrderedDict
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh

import sherd
from sherd import fully_shard
from sherd.checkpoint import restoring, writing
from sherd.errors import (
    CheckpointError,
    CommError,
    NoCheckpointError,
    OptimStateError,
    PolicyError,
    PolicyTypeError,
    StateError,
    StorageError,
)
from sherd.storage.files import Opened
from sherd.storage.manifest import signed
from sherd.storage.places import DiskPlace, place_of
from tests.checkpoint.layouts import built, filled, model_in, optimizer_of, train, trained_in, value
from tests.support.comparing import assert_same, whole
from tests.support.meshes import mesh_of
from tests.support.ranks import RanksFailed
from tests.support.ranks.bodies import on_processes, on_threads


class Counting(nn.Module):
    """A module with state that is no tensor of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("left_out", torch.zeros(3), persistent=False)
        self.calls, self.scale = 0, torch.ones(4)

    def get_extra_state(self):
        return {"calls": self.calls, "scale": self.scale, (1, 2): "odd key"}

    def set_extra_state(self, state):
        self.calls, self.scale = state["calls"], state["scale"]


def manifest_of(path):
    with Opened(place_of(path)) as found:
        return found.manifest


def test_one_process_without_a_process_group_saves_and_loads(tmp_path):
    model, optimizer = trained_in("plain", steps=range(2))
    user = {"file": os.fsdecode(b"no UTF-8: \xff")}
    path = sherd.save(tmp_path, {"model": model, "optimizer": optimizer}, step=2, user=user)
    files = sorted(Path(path).iterdir())
    losses = train(model, optimizer, range(2, 4))
    for place in (tmp_path, path):
        other = built(1)
        its = optimizer_of(other)
        restored = sherd.load(place, {"model": other, "optimizer": its})
        assert (restored.step, restored.path, restored.world_size, restored.user) == (2, path, 1, user)
        assert os.fsencode(restored.user["file"]) == b"no UTF-8: \xff"
        assert train(other, its, range(2, 4)) == losses
    assert sorted(Path(path).iterdir()) == files, "it stays as it was"


def test_whatever_has_a_state_and_every_kind_of_value(tmp_path):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    ema = sherd.Ema(model, 0.5)
    values = {
        "tensor": torch.arange(5), "nested": [(1, 2.5, None), {3: "three", "$x": True}], "inf": -math.inf,
        "bytes": b"\0\1", "complex": 1 + 2j, "dtype": torch.bfloat16, "scalar": torch.tensor(2, dtype=torch.int16),
        "half": torch.ones(2, dtype=torch.float8_e4m3fn), "none": torch.zeros(0, 3), "odd/name@1": "x",
    }  # fmt: skip
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "ema": ema, "values": values}

    def train(steps):
        for _ in range(steps):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            scheduler.step()
            ema.update()

    def states():
        return whole({name: given[name].state_dict() for name in ("model", "scheduler", "ema")})

    train(3)
    sherd.save(tmp_path, given, step=3)
    expected = states()
    train(2)
    found = sherd.load(tmp_path, {**given, "values": None}).values["values"]
    assert_same(states(), expected)
    assert optimizer.param_groups[0]["lr"] == expected["scheduler"]["_last_lr"][0]
    assert ema.num_updates == 3
    assert list(found) == list(values)
    for key, each in values.items():
        if isinstance(each, torch.Tensor):
            assert found[key].dtype == each.dtype
            assert_same(found[key].float(), each.float(), key)
        else:
            assert found[key] == each, key


def test_extra_state_and_buffers(tmp_path):
    model = nn.Sequential(Counting(), nn.BatchNorm1d(2))
    model[0].calls, model[0].scale = 5, torch.arange(4.0)
    model[1](torch.randn(4, 2))
    sherd.save(tmp_path, {"model": model}, step=0)
    other = nn.Sequential(Counting(), nn.BatchNorm1d(2))
    sherd.load(tmp_path, {"model": other})
    assert other[0].calls == 5
    assert torch.equal(other[0].scale, torch.arange(4.0))
    assert torch.equal(other[1].running_mean, model[1].running_mean)
    assert other[1].num_batches_tracked == 1
    assert not any("left_out" in name for name in manifest_of(tmp_path / "step-00000000").tensors)


def test_views_that_stand_for_other_values_than_their_memory_are_filled_with_the_saved_values(tmp_path):
    model, other, value = nn.Module(), nn.Module(), torch.tensor([1 + 2j, 3 - 1j])
    model.register_buffer("conjugate", value)
    model.register_buffer("negative", value.real)
    sherd.save(tmp_path, {"model": model}, step=0)
    other.register_buffer("conjugate", torch.zeros_like(value).conj())
    other.register_buffer("negative", torch._neg_view(torch.zeros(2)))
    sherd.load(tmp_path, {"model": other})
    assert other.conjugate.is_conj()
    assert other.negative.is_neg()
    assert torch.equal(other.conjugate.resolve_conj(), value)
    assert torch.equal(other.negative.resolve_neg(), value.real)


def test_random_generators_go_on_where_they_were(tmp_path):
    torch.manual_seed(4)
    random.seed(4)
    sherd.save(tmp_path, {"x": 1}, step=0)
    expected = torch.rand(3), random.random()
    torch.rand(9), random.random()
    sherd.load(tmp_path, {"x": 0})
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    now = torch.get_rng_state()
    sherd.load(tmp_path, {"x": 0}, random=False)
    assert torch.equal(torch.get_rng_state(), now)


def test_another_dtype_tied_weights_untied_and_a_part_of_a_larger_model(tmp_path):
    model = built()
    sherd.save(tmp_path, {"model": model}, step=0)
    half = built(1).to(torch.bfloat16)
    sherd.load(tmp_path, {"model": half})
    assert torch.equal(half.embed.weight, model.embed.weight.to(torch.bfloat16))
    untied = built(1)
    untied.head.weight = nn.Parameter(torch.zeros_like(untied.head.weight))
    sherd.load(tmp_path, {"model": untied})
    assert torch.equal(untied.head.weight, model.embed.weight)
    sherd.save(tmp_path / "untied", {"model": untied}, step=0)
    tied = built(1)
    sherd.load(tmp_path / "untied", {"model": tied})
    assert tied.head.weight is tied.embed.weight
    assert torch.equal(tied.embed.weight, model.embed.weight)
    small, large = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sherd.save(tmp_path / "small", {"model": small}, step=0)
    with pytest.warns(UserWarning, match="left out"):
        sherd.load(tmp_path / "small", {"model": large}, strict=False)
    assert torch.equal(large[0].weight, small[0].weight)


@on_processes(2)
def test_what_is_left_out_without_strict_is_returned_on_all_ranks_and_warned_of_on_rank_0(tmp_path):
    def stack(*names, width=2):
        return fully_shard(nn.Sequential(OrderedDict((name, nn.Linear(width, width)) for name in names)))

    sherd.save(tmp_path, {"model": stack("a", "b", "c")}, step=1)
    for names, missing, unexpected in ((("a", "d"), ("d",), ("b", "c")), ("bc", (), ("a",)), ("abcd", ("d",), ())):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            restored = sherd.load(tmp_path, {"model": stack(*names)}, strict=False)
        for found, expected in ((restored.missing, missing), (restored.unexpected, unexpected)):
            assert sorted(found) == sorted(f"model/{name}.{of}" for name in expected for of in ("weight", "bias"))
        texts = [str(each.message) for each in caught if "left out" in str(each.message)]
        assert len(texts) == (dist.get_rank() == 0), names
        for name in (*restored.missing, *restored.unexpected) if texts else ():
            assert name in texts[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored = sherd.load(tmp_path, {"model": stack(*"abc")}, strict=False)
    assert (restored.missing, restored.unexpected) == ((), ())
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"shape \(2, 2\), in the model \(3, 3\).*build the model as it was"):
            sherd.load(tmp_path, {"model": stack(*"abc", width=3)}, strict=strict)


MOVES = {
    "Adam SGD": "exp_avg, exp_avg_sq of 0.weight, where it keeps momentum_buffer",
    "AdamW Adagrad": "exp_avg, exp_avg_sq of 0.weight, where it keeps sum",
    "Adam Adamax": "exp_avg, exp_avg_sq of 0.weight, where it keeps exp_avg, exp_inf",
    "Adagrad AdamW": "sum of 0.weight",
    "RMSprop SGD": "square_avg of 0.weight",
    "SGD RMSprop": "momentum_buffer of 0.weight",
    "Adam AdamW": None,
    "SGD SGD": None,
}


def stepped(name, flat=False, steps=1):
    """Returns a sharded model and an optimizer, which have made some steps."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)), placement=sherd.Flat() if flat else None)
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.5 / (steps + 1), **options)
    optimizer = sherd.flatten_optimizer(optimizer) if flat else optimizer
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


@on_processes(2)
def test_another_algorithms_state_is_refused_on_all_ranks_and_torchs_functions_warn_of_it(tmp_path):
    for move, words in MOVES.items():
        saved, loading = move.split()
        model, optimizer = stepped(saved)
        optimizer.state[next(model.parameters())]["by hand"] = 3
        sherd.save(tmp_path / move, {"model": model, "optimizer": optimizer}, step=0)
        state = get_optimizer_state_dict(model, optimizer)
        for flat, steps in ((False, 0), (False, 1), (loading in ("SGD", "Adam", "AdamW"), 0)):
            other, its = stepped(loading, flat, steps)
            if words is None:
                sherd.load(tmp_path / move, {"model": other, "optimizer": its})
                assert its.param_groups[0]["lr"] == 0.25, move
                continue
            before, rate = whole(other.state_dict()), its.param_groups[0]["lr"]
            with pytest.raises(OptimStateError) as raised:
                sherd.load(tmp_path / move, {"model": other, "optimizer": its})
            assert f"{loading} is given another algorithm's state" in str(raised.value)
            assert words in str(raised.value)
            assert_same(whole(other.state_dict()), before)
            assert its.param_groups[0]["lr"] == rate
        if move == "SGD RMSprop":
            continue  # torch raises
        other, its = stepped(loading)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            set_optimizer_state_dict(other, its, state)
        warned = [str(each.message) for each in caught if "another algorithm's state" in str(each.message)]
        assert len(warned) == (words is not None), (move, warned)


def test_the_newest_is_loaded_a_named_step_and_what_was_passed_over_is_said(tmp_path):
    for step in (1, 2, 10):
        sherd.save(tmp_path, filled(step), step=step)
    for asked, step in ((None, 10), (2, 2)):
        assert sherd.load(tmp_path, filled(0), step=asked).step == value() == step
    (file,) = (tmp_path / "step-00000010").glob("*.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="step 10: .*not what was written.*; step 1 is loaded instead"):
        restored = sherd.load(tmp_path, filled(0))
    assert restored.step == value() == 1
    assert "step-00000010" in restored.passed_over[0]
    assert "not what was written" in restored.passed_over[0]
    assert "manifest.json is missing" in restored.passed_over[1]
    with pytest.raises(CheckpointError, match="not what was written"):
        sherd.load(tmp_path, filled(0), step=10)
    with pytest.raises(NoCheckpointError, match="of step 3"):
        sherd.load(tmp_path, filled(0), step=3)
    with pytest.raises(NoCheckpointError, match="start over"):
        sherd.load(tmp_path / "nowhere", filled(0))
    assert issubclass(NoCheckpointError, FileNotFoundError)


def test_a_run_begins_anew_where_no_save_has_ended_and_not_where_all_checkpoints_are_damaged(tmp_path):
    sherd.save(tmp_path, {"value": torch.ones(3)}, step=1)
    (file,) = (tmp_path / "step-00000001").glob("*.safetensors")
    manifest = tmp_path / "step-00000001" / "manifest.json"
    harms = [
        lambda: file.write_bytes(file.read_bytes()[:-1] + b"x"),
        lambda: file.write_bytes(file.read_bytes()[:-1]),
        file.unlink,
        lambda: manifest.write_bytes(manifest.read_bytes()[:-9]),
    ]
    for harm in harms:
        harm()
        for step in (None, 1):
            with pytest.raises(CheckpointError, match="step-00000001") as raised:
                sherd.load(tmp_path, {"value": torch.ones(3)}, step=step)
            assert not isinstance(raised.value, NoCheckpointError), "a program would begin anew"
    sherd.save(tmp_path / "other", {"value": torch.ones(3)}, step=5)
    (tmp_path / "other" / "step-00000005").rename(tmp_path / "other" / "step-00000009")
    with pytest.raises(NoCheckpointError, match="has a manifest of step 5"):  # no save of step 9 has ended
        sherd.load(tmp_path / "other", {"value": torch.ones(3)})
    manifest.unlink()
    with pytest.raises(NoCheckpointError, match=r"step 1: .*manifest.json is missing.*start over"):
        sherd.load(tmp_path, {"value": torch.ones(3)})


def test_no_older_checkpoint_is_loaded_while_nobody_can_tell_whether_a_damaged_one_was_replaced(tmp_path, monkeypatch):
    for step in (1, 2):
        sherd.save(tmp_path, {"value": torch.ones(3)}, step=step)
    (file,) = (tmp_path / "step-00000002").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    monkeypatch.setattr(restoring, "read_manifest", mock.Mock(side_effect=StorageError("it does not answer")))
    with pytest.raises(StorageError, match="it does not answer"):
        sherd.load(tmp_path, {"value": torch.ones(3)})


def test_the_same_step_again_replaces_it_and_old_ones_go(tmp_path):
    for step in range(1, 8):
        sherd.save(tmp_path, filled(step), step=step, keep_last=2, keep_every=3)
    assert sorted(each.name for each in tmp_path.glob("step-*")) == [f"step-{step:08}" for step in (3, 6, 7)]
    sherd.save(tmp_path, filled(3), step=7)
    assert len(list((tmp_path / "step-00000007").glob("*.safetensors"))) == 1
    sherd.load(tmp_path, filled(4))
    assert value() == 3
    assert json.loads((tmp_path / "latest").read_text())["step"] == 7


def refusals(tmp_path):
    """(the error, its words, what raises it)."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    ring = []
    ring.append(ring)
    of_one_name = {"a/b": torch.ones(2), "a": {"b": torch.zeros(2)}}

    def saving(items, step=0, path=tmp_path, **given):
        return lambda: sherd.save(path, items, step=step, **given)

    def loading(items, **given):
        return lambda: sherd.load(tmp_path / "good", items, **given)

    yield PolicyTypeError, "dict", saving(model)
    yield PolicyTypeError, "expected an int", saving({"model": model}, step=1.5)
    yield PolicyError, "0 or more", saving({"model": model}, step=-1)
    yield PolicyError, "keep_last", saving({"model": model}, keep_last=0)
    yield PolicyTypeError, "JSON", saving({"model": model}, user=object())
    yield PolicyTypeError, "JSON", saving({"model": model}, user=math.nan)
    yield CheckpointError, "nothing to save", saving({})
    yield CheckpointError, "without /", saving({"a/b": model})
    yield CheckpointError, "x/0 is a builtins.object", saving({"x": [object()]})
    yield CheckpointError, "contains itself", saving({"x": ring})
    yield CheckpointError, "two tensors would be called x/a/b", saving({"x": of_one_name})
    yield OptimStateError, "no parameter of the model", saving({"optimizer": optimizer})
    yield CheckpointError, "sparse", saving({"x": torch.eye(3).to_sparse()})
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    yield CheckpointError, "nested", saving({"x": ragged})
    yield PolicyTypeError, "path", saving({"model": model}, path=3)
    sherd.save(tmp_path / "good", {"model": model, "optimizer": optimizer}, step=0)
    for of_file, of_model, words in (
        (torch.ones(2, dtype=torch.complex64), torch.ones(2), "x is of torch.complex64, in the model of torch.float32"),
        (torch.tensor([1.5]), torch.ones(1, dtype=torch.int64), "which would lose more than precision"),
        (torch.ones(2, 3), torch.zeros(1).expand(2, 3), "elements of model/x share memory"),
        (torch.ones(3, 2), torch.zeros(4).as_strided((3, 2), (1, 1)), "elements of model/x share memory"),
    ):
        of_buffers = [nn.Module(), nn.Module()]
        for module, buffer in zip(of_buffers, (of_file, of_model), strict=True):
            module.register_buffer("x", buffer)
        saving({"model": of_buffers[0]}, path=tmp_path / "buffers")()
        yield CheckpointError, words, lambda of=of_buffers[1]: sherd.load(tmp_path / "buffers", {"model": of})
    other_shape = r"model/weight has shape \(2, 2\), in the model \(3, 2\)"
    yield CheckpointError, other_shape, loading({"model": nn.Linear(2, 3)})
    yield CheckpointError, "no item 'net'; load what it has: model, optimizer", loading({"net": model})
    yield CheckpointError, "is a module, not a optimizer", loading({"model": optimizer})
    untouched = nn.Linear(2, 2)
    before = untouched.weight.detach().clone()
    for later in (torch.optim.lr_scheduler.StepLR(optimizer, 1), torch.optim.SGD(untouched.parameters()), 3):
        lacking = "no item 'later'; load what it has: model, optimizer$"
        yield CheckpointError, lacking, loading({"model": untouched, "later": later})
        assert torch.equal(untouched.weight, before)
    other_names = "it lacks model/0.weight, model/0.bias; the model lacks model/bias"
    yield CheckpointError, other_names, loading({"model": nn.Sequential(nn.Linear(2, 2))})
    for name in (".metadata", "model.safetensors", "model-00001-of-00002.safetensors"):
        folder = tmp_path / f"of others {name}"
        folder.mkdir()
        (folder / name).touch()
        of_others = f"has {name}, which is another library's: `sherd convert"
        yield CheckpointError, of_others, lambda folder=folder: sherd.load(folder, {"model": model})
    yield CheckpointError, "is a file: `sherd convert", lambda: sherd.load(folder / name, {"model": model})
    yield StateError, "meta device", loading({"model": nn.Linear(2, 2, device="meta")})
    yield PolicyError, "staging_bytes", loading({"model": model}, staging_bytes=0)


def test_what_cannot_be_is_refused_by_name(tmp_path):
    for error, words, call in refusals(tmp_path):
        with pytest.raises(error, match=words) as raised:
            call()
        assert not isinstance(raised.value, NoCheckpointError), "a program would begin anew"
    assert not list(tmp_path.glob("step-*"))
    assert sherd.load(tmp_path / "good", {"model": nn.Linear(2, 2)}).step == 0


# Other threads


def slow(monkeypatch, event):
    write = DiskPlace.write

    def wait(self, name, chunks):
        if name.endswith(".safetensors"):
            event.wait(20)
        write(self, name, chunks)

    monkeypatch.setattr(DiskPlace, "write", wait)


def test_training_goes_on_while_another_thread_writes_what_was(tmp_path, monkeypatch):
    written = threading.Event()
    slow(monkeypatch, written)
    saving = sherd.async_save(tmp_path, filled(1), step=1)
    filled(0)
    assert not saving.is_done
    written.set()
    assert saving.wait().endswith("step-00000001")
    assert saving.is_done
    sherd.load(tmp_path, filled(0))
    assert value() == 1


def test_the_next_save_waits_and_raises_what_nobody_has_heard(tmp_path):
    sherd.save(tmp_path, filled(0), step=0)
    (tmp_path / "step-00000001").write_text("a file")
    with pytest.raises(CheckpointError, match="the save of step 1"):
        sherd.save(tmp_path, filled(1), step=1)
    sherd.async_save(tmp_path, filled(1), step=1)
    with pytest.raises(CheckpointError, match="the save of step 1"):
        sherd.async_save(tmp_path, filled(2), step=2)
    with pytest.warns(UserWarning, match="step 0 is loaded instead"):
        assert sherd.load(tmp_path, filled(9)).step == value() == 0
    sherd.async_save(tmp_path, filled(2), step=2).wait()
    first = sherd.async_save(tmp_path, filled(3), step=3)
    sherd.async_save(tmp_path, filled(4), step=4)
    assert first.is_done
    assert sherd.load(tmp_path, filled(9)).step == value() == 4


def test_the_bytes_that_wait_to_be_written_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "CHUNK_BYTES", 1 << 16)
    most = []
    held = writing.Staging._has_room
    monkeypatch.setattr(writing.Staging, "_has_room", lambda self: (most.append(self._held), held(self))[1])
    model = nn.Linear(1000, 1000)
    expected = model.weight.detach().clone()
    sherd.async_save(tmp_path, {"model": model}, step=1, staging_bytes=1 << 18).wait()
    assert max(most) <= (1 << 18) + (1 << 16)
    with torch.no_grad():
        model.weight.zero_()
    sherd.load(tmp_path, {"model": model})
    assert torch.equal(model.weight, expected)


@on_processes(3)
def test_ranks_train_on_while_they_save(tmp_path):
    model, optimizer = trained_in("flat")
    items = {"model": model, "optimizer": optimizer}
    saving = sherd.async_save(tmp_path, items, step=1, per_rank={"r": dist.get_rank()})
    losses = train(model, optimizer, range(1, 3))
    saving.wait()
    sherd.load(tmp_path, items)
    assert train(model, optimizer, range(1, 3)) == losses


# What one rank meets, all raise


def refuse(*_):
    raise OSError(28, "No space left on device", "a/file")


def one_rank_cannot(folder, how):
    model = model_in("rows")
    sherd.save(folder, {"model": model}, step=1)
    is_second = dist.get_rank() == 1
    words = "builtins.object" if how == "object" else "on rank 1: a/file: No space"
    own = object() if how == "object" and is_second else 0
    with pytest.MonkeyPatch.context() as patch:
        if how == "file" and is_second:
            patch.setattr(DiskPlace, "write", refuse)
        with pytest.raises(CheckpointError, match=words):
            sherd.save(folder, {"model": model, "x": own}, step=2)


@pytest.mark.parametrize("how", ["object", "file"])
def test_all_ranks_raise_what_one_has_met_and_nothing_is_left(world, tmp_path, how):
    world(2).run(one_rank_cannot, str(tmp_path), how)
    assert place_of(tmp_path).below("step-00000002").names() == []
    assert sherd.load(tmp_path, {"model": built(1)}).step == 1


@on_processes(2)
def test_ranks_whose_tensors_or_requests_differ_save_nothing_that_cannot_be_read(tmp_path):
    odd, model = dist.get_rank() == 1, model_in("rows")
    optimizer = (torch.optim.Adagrad if odd else torch.optim.SGD)(model.parameters(), lr=0.1)
    for one, words in (
        ({"model": sherd.fully_shard(nn.Linear(4, 4, dtype=(torch.float32, torch.float64)[odd]))}, "weight is F32"),
        (
            {"model": model, "optimizer": optimizer},
            "/sum is F32 .* on rank 1, and another tensor or none on rank 0",
        ),
    ):
        with pytest.raises(CheckpointError, match=words):
            sherd.save(tmp_path, one, step=0)
    sherd.save(tmp_path, {"model": model}, step=0)
    with pytest.raises(CheckpointError, match="rank 1 loads 'model' of the newest step with strict=False"):
        sherd.load(tmp_path, {"model": model}, strict=not odd)


def dead_in_the_middle(folder):
    model = model_in("rows")
    sherd.save(folder, {"model": model}, step=1)
    if dist.get_rank() == 1:
        os._exit(3)
    with pytest.raises(CommError):
        sherd.save(folder, {"model": model}, step=2)
    (Path(folder) / "raised").touch()


def test_a_rank_that_dies_leaves_the_last_checkpoint_and_an_error(world, tmp_path):
    with pytest.raises(RanksFailed, match="rank 1 died"):
        world(2).run(dead_in_the_middle, str(tmp_path))
    assert (tmp_path / "raised").exists()
    assert sherd.load(tmp_path, {"model": built(1)}).step == 1


@on_threads(4)
def test_replicas_are_written_once_and_writers_are_balanced(tmp_path):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    for layer in model:
        sherd.fully_shard(layer, mesh=mesh_of((2, 2)))
    frozen = nn.ParameterDict({str(at): nn.Parameter(torch.zeros(600, 600)) for at in range(8)})
    manifest = manifest_of(sherd.save(tmp_path, {"model": model, "plain": frozen}, step=0, random=False))
    sizes = [file.nbytes for file in manifest.files]
    assert sum(sizes) < 1.01 * sum(entry.nbytes for entry in manifest.tensors.values())
    assert max(sizes) < 1.02 * min(sizes)


def in_a_subgroup(folder):
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        mesh = DeviceMesh.from_group(group, "cpu")
        sherd.save(folder, {"model": model_in("rows", mesh=mesh)}, step=0, group=group, per_rank={"of": "two"})
        sherd.load(folder, {"model": model_in("flat", seed=1, mesh=mesh)}, group=group)


def test_some_ranks_save_what_lies_on_them(world, tmp_path):
    world(4).run(in_a_subgroup, str(tmp_path))
    model = built(1)
    assert sherd.load(tmp_path, {"model": model}).per_rank == {}
    assert torch.equal(model.embed.weight, built().embed.weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_and_ddp_modules_are_called_as_the_users_own(world, tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = nn.Sequential(torch.compile(model[0]))
    optimizer = torch.optim.AdamW(compiled.parameters())
    compiled[0]._orig_mod(torch.ones(2)).sum().backward()
    optimizer.step()
    sherd.save(tmp_path, {"model": torch.compile(compiled), "optimizer": optimizer}, step=0)
    other = nn.Sequential(nn.Linear(2, 2))
    its = torch.optim.AdamW(other.parameters())
    sherd.load(tmp_path, {"model": other, "optimizer": its})
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(its.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    world(2).run(of_ddp, str(tmp_path / "ddp"))
    sherd.load(tmp_path / "ddp", {"model": other})


def of_ddp(folder):
    torch.manual_seed(0)
    sherd.save(folder, {"model": nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))}, step=0)
    fsdp1 = pytest.importorskip("torch.distributed.fsdp").FullyShardedDataParallel
    with pytest.raises(CheckpointError, match="torch's FullyShardedDataParallel"):
        sherd.save(folder, {"model": fsdp1(nn.Linear(2, 2), device_id=torch.device("cpu"))}, step=1)


@on_threads(3)
def test_ranks_that_are_threads_save_and_load(tmp_path):
    sherd.save(tmp_path, {"rows": model_in("rows")}, step=0, per_rank={"rank": dist.get_rank()})
    model = model_in("flat", seed=1)
    assert sherd.load(tmp_path, {"rows": model}).per_rank == {"rank": dist.get_rank()}
    assert sherd.save(tmp_path, {"rows": model}, step=1) == str(tmp_path / "step-00000001")


def test_a_checkpoint_of_a_later_format_is_not_passed_over(tmp_path):
    for step in (1, 2):
        path = Path(sherd.save(tmp_path, {"x": step}, step=step)) / "manifest.json"
    raw = path.read_bytes()
    path.write_bytes(signed(raw[: raw.rindex(b',\n"sha256"')].replace(b"sherd/1", b"sherd/2")))
    with pytest.raises(CheckpointError, match="this version reads 'sherd/1'"):
        sherd.load(tmp_path, {"x": 0})
    assert sherd.load(tmp_path, {"x": 0}, step=1).values == {"x": 1}
    sherd.save(tmp_path, {"x": 3}, step=3, keep_last=1)
    assert path.exists()


def pieces_are_missing(folder):
    model = model_in("flat")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(writing, "pieces_here", lambda name, tensor: [])
        with pytest.raises(CheckpointError, match="its parts have"):
            sherd.save(folder, {"model": model}, step=0)


def test_a_save_that_could_not_be_read_is_refused(world, tmp_path):
    world(2).run(pieces_are_missing, str(tmp_path))
    assert place_of(tmp_path).below("step-00000000").names() == []
