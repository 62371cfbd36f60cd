"""Each format gives back what was written into it, from a checkpoint of sherd of any layout."""

import json

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sherd.cli import convert_words as words
from sherd.errors import CheckpointError
from sherd.layout.boxes import Grid, whole
from sherd.tools.convert.formats import FORMATS, convert, format_at, open_source
from tests.interchange.checkpoints import boxes_in, bytes_of, put, tensors
from tests.support.refusals import refusal
from tests.support.suites import examples

SETTINGS = settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])


@SETTINGS
@given(
    named=st.dictionaries(st.sampled_from(["a", "b.c", "0.w", "é"]), tensors(), min_size=1, max_size=4),
    to=st.sampled_from(["sherd", "hf", "dcp", "torch"]),
    most=st.sampled_from([1, 9, 100, 1 << 20]),
)
def test_tensors_of_any_layout_and_dtype_come_back(tmp_path_factory, named, to, most):
    folder = tmp_path_factory.mktemp("each")
    put(folder / "in", {f"model/{name}": each for name, each in named.items()}, {"model/tied": f"model/{min(named)}"})
    source, target = open_source(folder / "in"), folder / "out.pt" if to == "torch" else folder / "out"
    convert(source, target, to, most_bytes=most)
    back = open_source(target)
    assert back.format == to == format_at(target)
    found = bytes_of(back, most)
    found.pop("model/tied", None)  # without elements it is no other name of another
    assert found == bytes_of(source, most)
    expected = {name: bytes(_memory(tensor)) for name, (tensor, _) in named.items()}
    assert {name.removeprefix("model/"): raw for name, (_, _, raw) in found.items()} == expected
    if to in ("sherd", "hf"):
        assert back.contents.aliases == source.contents.aliases
    back.close()
    source.close()


def _memory(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else b""


@SETTINGS
@given(each=tensors(), data=st.data(), to=st.sampled_from(["sherd", "hf", "dcp", "torch"]))
def test_any_part_of_a_tensor_is_read(tmp_path_factory, each, data, to):
    tensor, _ = each
    folder = tmp_path_factory.mktemp("part")
    put(folder / "in", {"model/w": each})
    target = folder / "out.pt" if to == "torch" else folder / "out"
    convert(open_source(folder / "in"), target, to)
    box = data.draw(boxes_in(tensor.shape))
    read = torch.empty(box.sizes, dtype=tensor.dtype)
    open_source(target).tensor("model/w").read_into(box, read, 16)
    expected = tensor[box.within(whole(tuple(tensor.shape)))].contiguous()
    assert _memory(read) == _memory(expected)


VALUES = {
    "model": {"kind": "module"},
    "optimizer": {
        "kind": "optimizer",
        "param_groups": [{"lr": 0.1, "betas": {"$tuple": [0.9, 0.99]}, "fused": None, "params": ["b", "w"]}],
        "state": {
            name: {"exp_avg": {"$tensor": f"optimizer/{name}/exp_avg"}, "step": {"$scalar": ["F32", 3.0]}}
            for name in ("w", "b")
        },
    },
    "loader": {
        "kind": "state",
        "state": {"at": 5, "seeds": [1, 2], "queue": {"$tensor": "loader/queue"}, "raw": {"$bytes": "AP8="}},
    },
}


def everything(folder):
    w = torch.randn(3, 2)
    named = {
        "model/w": w,
        "model/b": torch.randn(3),
        "optimizer/w/exp_avg": w * 2,
        "optimizer/b/exp_avg": torch.randn(3),
        "loader/queue": torch.arange(5),
    }
    return put(folder, {name: (tensor, Grid(0)) for name, tensor in named.items()}, values=VALUES)


def test_optimizers_values_and_other_items_come_back(tmp_path):
    source = open_source(everything(tmp_path / "in"))
    for to in ("sherd", "dcp", "torch"):
        target = tmp_path / f"{to}.pt"
        assert convert(source, target, to) == []
        back = open_source(target)
        assert bytes_of(back) == bytes_of(source), to
        assert (back.contents.values, back.contents.step) == (VALUES, 7), to


def test_hf_holds_a_model_alone_says_what_it_leaves_out_and_is_cut_into_files_which_safetensors_reads(tmp_path):
    source = open_source(everything(tmp_path / "in"))
    left_out = convert(source, tmp_path / "out", "hf", shard_bytes=24)
    assert [note.split()[0] for note in left_out] == ["optimizer", "loader"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 36}
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    assert index["weight_map"] == {"b": second, "w": first}
    assert load_file(tmp_path / "out" / first)["w"].shape == (3, 2)
    assert bytes_of(open_source(tmp_path / "out")).items() <= bytes_of(source).items()
    for path in (tmp_path / "out", tmp_path / "out" / "model.safetensors.index.json"):
        assert bytes_of(open_source(path)).keys() == {"model/w", "model/b"}
    assert set(words.FORMATS) == set(FORMATS)
    assert {name for name, each in FORMATS.items() if each.write} == set(words.FORMATS)


def test_the_latest_of_several_checkpoints_is_meant(tmp_path):
    for step in (5, 20):
        put(tmp_path, {"model/w": (torch.full((2,), float(step)), Grid(0))}, step=step)
    assert open_source(tmp_path).contents.step == 20
    assert open_source(tmp_path / "step-00000005").contents.step == 5


def test_what_fails_leaves_nothing_behind_and_no_target_is_overwritten(tmp_path):
    path = everything(tmp_path / "in")
    source = open_source(path)
    for name, said in (("in", "is there already"), ("no/out", "is no folder")):
        assert said in refusal(CheckpointError, convert, source, tmp_path / name, "sherd"), name
    file = path / "abc-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[8 + int.from_bytes(raw[:8], "little")] ^= 1  # the first byte of the first tensor
    file.write_bytes(raw)
    for to in ("sherd", "hf", "dcp", "universal", "torch"):
        said = refusal(CheckpointError, convert, open_source(path), tmp_path / "out", to, model_only=to == "hf")
        assert "abc-00000.safetensors is not what was written" in said, to
        assert [each.name for each in tmp_path.iterdir()] == ["in"], to
