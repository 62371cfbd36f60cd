"""Does a file from elsewhere never run code, lead outside of its folder, or end in another error than ours?"""

import contextlib
import io
import json
import os
import pickle
import random
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp

from sherd.errors import CheckpointError
from sherd.interchange.contents import Named, chunks_of
from sherd.interchange.formats import open_source
from sherd.interchange.of_dcp import metadata_of
from sherd.interchange.torch_files import opened

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TOUCHED = "touched-by-a-pickle"


class Calls:
    """Pickled, it is a call of `function` with `args`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def raw_calls():
    """Pickles by hand: a name that is looked up step by step, and calls of what was found."""
    touch = f"open('{TOUCHED}', 'w')"
    return {
        "eval": b"cbuiltins\neval\n(V" + touch.encode() + b"\ntR.",
        "exec by a path of attributes": b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93\x8c"
        + bytes([len(touch)])
        + touch.encode()
        + b"\x85R.",
        "getattr of getattr": b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(Vos\ntRVsystem\ntR(Vtouch "
        + TOUCHED.encode()
        + b"\ntR.",
        "a dotted name": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c"
        + bytes([len("touch " + TOUCHED)])
        + b"touch "
        + TOUCHED.encode()
        + b"\x85R.",
        "a method of what is known": b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93).",
        "inst": b"(Vtouch " + TOUCHED.encode() + b"\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nVtouch " + TOUCHED.encode() + b"\no.",
        "extension registry": b"\x82\x01.",
    }


HOSTILE = {
    "os.system": pickle.dumps(Calls(os.system, f"touch {TOUCHED}")),
    "builtins.eval": pickle.dumps(Calls(eval, f"open('{TOUCHED}', 'w')")),
    "torch.load": pickle.dumps(Calls(torch.load, TOUCHED)),
    "functools": pickle.dumps(Calls(__import__("functools").partial, os.system)),
    **raw_calls(),
}


@pytest.fixture
def nothing_touched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / TOUCHED).exists()


def torch_file(path, pickled):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", b"\0" * 8)


@pytest.mark.usefixtures("nothing_touched")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_an_error_and_does_not_run(tmp_path, name):
    torch_file(tmp_path / "x.pt", HOSTILE[name])
    with pytest.raises(CheckpointError, match=r"x\.pt"):
        opened(tmp_path / "x.pt")
    (tmp_path / ".metadata").write_bytes(HOSTILE[name])
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        metadata_of(tmp_path)


def test_the_error_names_what_was_not_loaded(tmp_path):
    torch_file(tmp_path / "x.pt", HOSTILE["builtins.eval"])
    with pytest.raises(CheckpointError, match=r"names builtins\.eval, which is not among the names"):
        opened(tmp_path / "x.pt")


@pytest.mark.parametrize(
    "pickled",
    [
        # BUILD with a state for slots sets attributes: of a function that is known, of a class, of a dtype
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x0c\x00\x00\x00__defaults__N s\x86b.",
        b"\x80\x02ccollections\nOrderedDict\nN}X\x05\x00\x00\x00items)s\x86b.",
        b"\x80\x02ctorch\nfloat32\nN}X\x01\x00\x00\x00aNs\x86b.",
        b"\x80\x02ctorch\nfloat32\n}X\x01\x00\x00\x00aNsb.",
    ],
)
def test_a_pickle_cannot_change_what_stands_for_its_classes(tmp_path, pickled):
    torch_file(tmp_path / "x.pt", pickled)
    with pytest.raises(CheckpointError):
        opened(tmp_path / "x.pt")
    torch.save({"a": torch.arange(3.0)}, tmp_path / "y.pt")
    assert opened(tmp_path / "y.pt").tree["a"].value().tolist() == [0, 1, 2]


def saved(folder):
    dcp.save({"model": {"w": torch.arange(12.0).view(3, 4)}, "n": 3}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("name", ["../x.distcp", "/etc/hostname", "a\0b", ""])
def test_dcp_files_outside_of_the_folder_are_refused(tmp_path, name):
    folder = saved(tmp_path / "dcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="not in its folder"):
        read_all(folder)


@pytest.mark.parametrize("change", ["chunks share elements", "a chunk is missing", "offset", "length", "other tensor"])
def test_dcp_metadata_that_contradicts_itself_is_refused(tmp_path, change):
    folder = saved(tmp_path / "dcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    tensor = metadata.state_dict_metadata["model.w"]
    index = next(index for index in metadata.storage_data if index.fqn == "model.w")
    if change == "chunks share elements":
        tensor.chunks.append(dcp.metadata.ChunkStorageMetadata(torch.Size([1, 1]), torch.Size([1, 1])))
    if change == "a chunk is missing":
        tensor.size = torch.Size([4, 4])
    if change == "offset":
        metadata.storage_data[index].offset = 1 << 40
    if change == "length":
        metadata.storage_data[index].length = -5
    if change == "other tensor":
        tensor.size, tensor.chunks[0].sizes = torch.Size([4, 3]), torch.Size([4, 3])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError):
        read_all(folder)


@pytest.mark.parametrize("file", ["../up.safetensors", "/etc/hostname", 3])
def test_hf_index_with_files_outside_of_its_folder_is_refused(tmp_path, file):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError, match="not in its folder"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "args", [(1 << 40, (2,), (1,)), (0, (2,), (1 << 50,)), (0, (-1,), (1,)), (0, (2, 2), (1,)), (0, (1 << 62,), (0,))]
)
def test_a_tensor_outside_of_its_storage_is_refused(tmp_path, args):
    offset, size, stride = args
    pickled = io.BytesIO()
    torch.save({"w": torch.arange(2.0)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as archive:
        names = archive.namelist()
    assert any(name.endswith("data.pkl") for name in names)

    class Pickler(pickle.Pickler):
        def persistent_id(self, of):
            return ("storage", torch.FloatStorage, "0", "cpu", 2) if of == "STORAGE" else None

    call = Calls(torch._utils._rebuild_tensor_v2, "STORAGE", offset, size, stride, False, {})
    Pickler(pickled, 2).dump({"w": call})
    torch_file(tmp_path / "x.pt", pickled.getvalue())
    if args[1] == (1 << 62,):
        return  # a stride of 0 may repeat one element as often as it says: nothing is allocated for it yet
    with pytest.raises(CheckpointError, match="has a tensor of"):
        opened(tmp_path / "x.pt")


def read_all(path):
    source = open_source(path)
    try:
        for name in source.contents.tensors:
            for _ in chunks_of(Named(source, name), 1 << 20):
                pass
    finally:
        source.close()


def files_of(kind, folder):
    state = {"model": {"w": torch.arange(12.0).view(3, 4), "b": torch.arange(3.0)}, "step": 5}
    if kind == "torch":
        torch.save(state, folder / "x.pt")
        return folder / "x.pt", [folder / "x.pt"]
    if kind == "dcp":
        dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
        return folder / "dcp", sorted((folder / "dcp").iterdir())
    from safetensors.torch import save_file

    save_file(state["model"], folder / "model.safetensors")
    return folder / "model.safetensors", [folder / "model.safetensors"]


@pytest.mark.parametrize("kind", ["torch", "dcp", "hf"])
def test_a_file_with_any_byte_changed_or_cut_off_is_read_or_is_an_error_of_ours(tmp_path, kind):
    path, files = files_of(kind, tmp_path)
    random.seed(3)
    for file in files:
        whole = file.read_bytes()
        for turn in range(150):
            broken = bytearray(whole)
            if turn % 5 == 0:
                del broken[random.randrange(len(whole)) :]
            else:
                broken[random.randrange(len(whole))] = random.randrange(256)
            file.write_bytes(broken)
            with contextlib.suppress(CheckpointError):
                read_all(path)
        file.write_bytes(whole)


def test_a_compressed_archive_and_one_of_another_byte_order_are_refused(tmp_path):
    torch.save({"w": torch.arange(100.0)}, tmp_path / "x.pt")
    with (
        zipfile.ZipFile(tmp_path / "x.pt") as old,
        zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(CheckpointError, match="compressed"):
        opened(tmp_path / "y.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "z.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("byteorder") else old.read(name))
    with pytest.raises(CheckpointError, match="order of bytes"):
        opened(tmp_path / "z.pt")


def test_a_dtensor_in_a_file_of_torch_is_refused_by_name(tmp_path, threads):
    def save(folder):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_tensor

        mesh = init_device_mesh("cpu", (1,))
        torch.save({"w": distribute_tensor(torch.ones(2), mesh)}, folder / "x.pt")

    threads(1).run(save, tmp_path)
    with pytest.raises(CheckpointError, match="_rebuild_wrapper_subclass, which is not"):
        opened(tmp_path / "x.pt")
