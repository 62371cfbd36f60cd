"""A file from elsewhere never runs code, leads outside of its folder, or ends in another error than ours."""

import contextlib
import io
import json
import os
import pickle
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.tensor import distribute_tensor

from sherd.cli.main import main
from sherd.errors import CheckpointError
from sherd.tools.convert.formats import open_source
from sherd.tools.convert.of_dcp import metadata_of
from sherd.tools.convert.of_torch import opened
from sherd.tools.convert.state_trees import in_memory
from tests.interchange.checkpoints import bytes_of, require_read_or_refused
from tests.support.meshes import mesh_of
from tests.support.refusals import NOTHING, refusal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TOUCHED = "touched-by-a-pickle"


class Calls:
    """Pickled, it is a call of `function` with `args`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def named(text):
    """A short string, pickled."""
    return b"\x8c" + bytes([len(text)]) + text


def raw_calls():
    """Pickles by hand: a name that is looked up step by step, and calls of what was found."""
    opening, touch = f"open('{TOUCHED}', 'w')".encode(), f"touch {TOUCHED}".encode()
    return {
        "eval": b"cbuiltins\neval\n(V" + opening + b"\ntR.",
        "exec by a path of attributes": b"\x80\x04" + named(b"builtins") + named(b"exec") + b"\x93" + named(opening)
        + b"\x85R.",
        "getattr of getattr": b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(Vos\ntRVsystem\ntR(V" + touch + b"\ntR.",
        "a dotted name": b"\x80\x04" + named(b"torch") + named(b"os.system") + b"\x93" + named(touch) + b"\x85R.",
        "a method of what is known": b"\x80\x04" + named(b"collections") + named(b"OrderedDict.__init__") + b"\x93).",
        "inst": b"(V" + touch + b"\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nV" + touch + b"\no.",
        "extension registry": b"\x82\x01.",
    }  # fmt: skip


HOSTILE = {
    "os.system": pickle.dumps(Calls(os.system, f"touch {TOUCHED}")),
    "builtins.eval": pickle.dumps(Calls(eval, f"open('{TOUCHED}', 'w')")),
    "torch.load": pickle.dumps(Calls(torch.load, TOUCHED)),
    "functools": pickle.dumps(Calls(__import__("functools").partial, os.system)),
    **raw_calls(),
}


@pytest.fixture
def touched(tmp_path, monkeypatch):
    """The file that a pickle which runs would leave."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / TOUCHED


def torch_file(path, pickled):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", b"\0" * 8)


def test_a_hostile_pickle_is_an_error_and_does_not_run(tmp_path, touched):
    for name, pickled in HOSTILE.items():
        torch_file(tmp_path / "x.pt", pickled)
        said = refusal(CheckpointError, opened, tmp_path / "x.pt")
        assert "x.pt" in said, name
        assert name != "builtins.eval" or "names builtins.eval, which is not among the names" in said
        (tmp_path / ".metadata").write_bytes(pickled)
        assert ".metadata" in refusal(CheckpointError, metadata_of, tmp_path), name
        assert not touched.exists(), name


def test_a_pickle_cannot_change_what_stands_for_its_classes(tmp_path):
    for pickled in (
        # BUILD with a state for slots sets attributes: of a function that is known, of a class, of a dtype
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x0c\x00\x00\x00__defaults__N s\x86b.",
        b"\x80\x02ccollections\nOrderedDict\nN}X\x05\x00\x00\x00items)s\x86b.",
        b"\x80\x02ctorch\nfloat32\nN}X\x01\x00\x00\x00aNs\x86b.",
        b"\x80\x02ctorch\nfloat32\n}X\x01\x00\x00\x00aNsb.",
    ):
        torch_file(tmp_path / "x.pt", pickled)
        with pytest.raises(CheckpointError):
            opened(tmp_path / "x.pt")
        torch.save({"a": torch.arange(3.0)}, tmp_path / "y.pt")
        assert in_memory(opened(tmp_path / "y.pt").tree["a"]).tolist() == [0, 1, 2], pickled


@contextlib.contextmanager
def changed_metadata(folder):
    """A folder that torch has saved, with what its `.metadata` holds once it was changed."""
    dcp.save({"model": {"w": torch.arange(12.0).view(3, 4)}, "n": 3}, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    yield metadata
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_files_outside_of_the_folder_are_refused(tmp_path):
    for number, name in enumerate(("../x.distcp", "/etc/hostname", "a\0b", "")):
        with changed_metadata(tmp_path / str(number)) as metadata:
            for info in metadata.storage_data.values():
                info.relative_path = name
        assert "not in its folder" in refusal(CheckpointError, read_all, tmp_path / str(number)), name
    for name in ("../up.safetensors", "/etc/hostname", 3):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        assert "not in its folder" in refusal(CheckpointError, open_source, tmp_path), name


def test_dcp_metadata_that_contradicts_itself_is_refused(tmp_path):
    for change in ("chunks share elements", "a chunk is missing", "offset", "length", "other tensor"):
        with changed_metadata(tmp_path / change) as metadata:
            tensor = metadata.state_dict_metadata["model.w"]
            info = next(info for index, info in metadata.storage_data.items() if index.fqn == "model.w")
            match change:
                case "chunks share elements":
                    tensor.chunks.append(dcp.metadata.ChunkStorageMetadata(torch.Size([1, 1]), torch.Size([1, 1])))
                case "a chunk is missing":
                    tensor.size = torch.Size([4, 4])
                case "offset":
                    info.offset = 1 << 40
                case "length":
                    info.length = -5
                case "other tensor":
                    tensor.size, tensor.chunks[0].sizes = torch.Size([4, 3]), torch.Size([4, 3])
        assert refusal(CheckpointError, read_all, tmp_path / change) != NOTHING, change


class Pickler(pickle.Pickler):
    """Has "STORAGE" mean the storage of two numbers."""

    def persistent_id(self, of):
        return ("storage", torch.FloatStorage, "0", "cpu", 2) if of == "STORAGE" else None


def test_a_tensor_outside_of_its_storage_is_refused(tmp_path):
    for offset, size, stride in (
        (1 << 40, (2,), (1,)),
        (0, (2,), (1 << 50,)),
        (0, (-1,), (1,)),
        (0, (2, 2), (1,)),
        (0, (1 << 62,), (0,)),
    ):
        pickled = io.BytesIO()
        call = Calls(torch._utils._rebuild_tensor_v2, "STORAGE", offset, size, stride, False, {})
        Pickler(pickled, 2).dump({"w": call})
        torch_file(tmp_path / "x.pt", pickled.getvalue())
        if stride == (0,):
            # It may repeat one element as often as it says: nothing is allocated for it yet.
            opened(tmp_path / "x.pt")
        else:
            assert "has a tensor of" in refusal(CheckpointError, opened, tmp_path / "x.pt"), (offset, size, stride)


def read_all(path):
    with contextlib.closing(open_source(path)) as source:
        bytes_of(source)


def files_of(kind, folder):
    """A checkpoint of that kind in `folder`, and its files."""
    state = {"model": {"w": torch.arange(12.0).view(3, 4), "b": torch.arange(3.0)}, "step": 5}
    if kind == "dcp":
        dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
        return folder / "dcp", sorted((folder / "dcp").iterdir())
    path = folder / ("x.pt" if kind == "torch" else "model.safetensors")
    if kind == "torch":
        torch.save(state, path)
    else:
        save_file(state["model"], path)
    return path, [path]


@pytest.mark.parametrize("kind", ["torch", "dcp", "hf"])
def test_a_file_with_any_byte_changed_or_cut_off_is_read_or_is_an_error_of_ours(tmp_path, kind):
    path, files = files_of(kind, tmp_path)
    require_read_or_refused(path, files, 150)


def test_a_compressed_archive_and_one_of_another_byte_order_are_refused(tmp_path):
    torch.save({"w": torch.arange(100.0)}, tmp_path / "x.pt")
    for name, how, changed, said in (
        ("y.pt", zipfile.ZIP_DEFLATED, {}, "compressed"),
        ("z.pt", zipfile.ZIP_STORED, {"byteorder": b"big"}, "order of bytes"),
    ):
        with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / name, "w", how) as new:
            for inside in old.namelist():
                new.writestr(inside, changed.get(inside.rpartition("/")[2], old.read(inside)))
        assert said in refusal(CheckpointError, opened, tmp_path / name), name


def test_a_dtensor_in_a_file_of_torch_is_refused_by_name(tmp_path, threads):
    def save(folder):
        torch.save({"w": distribute_tensor(torch.ones(2), mesh_of((1,)))}, folder / "x.pt")

    threads(1).run(save, tmp_path)
    with pytest.raises(CheckpointError, match="_rebuild_wrapper_subclass, which is not"):
        opened(tmp_path / "x.pt")


def test_a_small_pickle_takes_neither_much_memory_nor_time(tmp_path):
    lists = []
    for _ in range(40):
        lists = [lists, lists]
    torch_file(tmp_path / "a.pt", pickle.dumps(lists))
    assert "in several places" in refusal(CheckpointError, opened, tmp_path / "a.pt")
    # Index 2**32 - 1 of a table of what was read: in C that is 64 GiB.
    torch_file(tmp_path / "b.pt", b"\x80\x02}r\xff\xff\xff\xff.")
    assert opened(tmp_path / "b.pt").tree == {}


def test_pipes_devices_and_links_elsewhere_are_not_read_and_names_do_not_reach_the_terminal_as_they_are(
    tmp_path, capsys
):
    folder, index = tmp_path / "in", "model.safetensors.index.json"
    folder.mkdir()
    for make in (lambda at: os.mkfifo(at), lambda at: at.symlink_to("/dev/zero")):
        make(folder / index)
        assert "it is no file" in refusal(CheckpointError, open_source, folder)
        (folder / index).unlink()
    name = "\x1b[2J\u202e\n"
    save_file({name: torch.ones(1)}, folder / "model.safetensors")
    (tmp_path / "private").write_text("secret")
    (folder / "tokenizer.json").symlink_to("../private")
    assert main(["convert", str(folder), str(tmp_path / "out"), "--to", "hf"]) == 0
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert main(["inspect", str(folder)]) == 0
    assert main(["inspect", str(tmp_path / name)]) != 0
    said = "".join(capsys.readouterr())
    assert "\\x1b[2J\\u202e\\n  " in said
    assert "\x1b" not in said
