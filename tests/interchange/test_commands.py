"""The commands do what they say, with exit codes, one line for what cannot be, and JSON."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

import sherd
from sherd.cli.main import main
from sherd.layout.boxes import Grid, GridCut
from sherd.storage import places
from sherd.storage.manifest import MANIFEST, signed
from sherd.tools.convert import of_sherd
from sherd.tools.convert.formats import open_source
from tests.interchange.checkpoints import bytes_of, put
from tests.interchange.test_round_trips import everything


@pytest.fixture
def run(capsys):
    """`run(*words)`: the exit code, stdout and stderr."""

    def call(*words):
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return call


def two_files(folder, a, b):
    """The words of two files of torch that hold these."""
    for name, state in (("a.pt", a), ("b.pt", b)):
        torch.save(state, folder / name)
    return folder / "a.pt", folder / "b.pt"


@pytest.mark.front("Checkpoints of others")
def test_convert_goes_by_the_end_of_the_name_and_back(tmp_path, run):
    everything(tmp_path / "a")
    for source, target, words in (
        ("a", "b.pt", []),
        ("b.pt", "c", ["--to", "dcp"]),
        ("c", "d", []),
        ("d", "e.safetensors", ["--model-only"]),
    ):
        code, out, err = run("convert", tmp_path / source, tmp_path / target, *words)
        assert (code, out) == (0, "")
        assert err.endswith(f"is written to {tmp_path / target} ({open_source(tmp_path / target).format})\n")
    assert bytes_of(open_source(tmp_path / "d")) == bytes_of(open_source(tmp_path / "a"))
    assert run("diff", tmp_path / "a", tmp_path / "d")[0] == 0
    assert run("diff", tmp_path / "a", tmp_path / "e.safetensors", "--model-only")[0] == 0


def test_convert_copies_what_lies_beside_the_weights_of_hf_and_gives_a_step_to_what_has_none(tmp_path, run):
    everything(tmp_path / "a")
    _, _, said = run("convert", tmp_path / "a", tmp_path / "hf", "--to", "hf")
    assert f"config.json is left out: the source has none; from_pretrained needs the model's in {tmp_path}" in said
    (tmp_path / "hf" / "config.json").write_text('{"num_attention_heads": 4}')
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    (tmp_path / "hf" / "pytorch_model.bin").write_text("no")
    code, out, _ = run("convert", tmp_path / "hf", tmp_path / "other", "--to", "hf", "--json", "--shard-bytes", "24")
    told = json.loads(out)
    assert (code, told["copied"], told["left_out"]) == (0, ["config.json", "tokenizer.json"], [])
    weights = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    expected = ["config.json", *weights, "model.safetensors.index.json", "tokenizer.json"]
    assert sorted(each.name for each in (tmp_path / "other").iterdir()) == expected
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    assert run("convert", tmp_path / "x.pt", tmp_path / "out", "--step", "30")[0] == 0
    assert [each.name for each in sorted((tmp_path / "out").iterdir())] == ["latest", "step-00000030"]


def test_inspect_shows_tensors_pieces_values_and_an_optimizers_groups(tmp_path, run):
    w = torch.arange(8.0).view(4, 2)
    put(tmp_path / "a", {"model/w": (w, Grid(0, (GridCut(0, 2, 1),)))}, {"model/tied": "model/w"}, user={"run": 1})
    code, out, _ = run("inspect", tmp_path / "a")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == f"{tmp_path / 'a'}: sherd, step 7, 1 tensors, 32 B"
    assert "saved by 4 ranks" in lines[1]
    assert lines[3:6] == ["model: module, 1 tensors, 32 B", lines[4], "  tied = w"]
    assert lines[4].split() == ["w", "F32", "[4,", "2]", "32", "B", "2", "parts"]
    code, out, _ = run("inspect", tmp_path / "a", "--json")
    found = json.loads(out)
    assert found["tensors"] == {"model/w": {"dtype": "F32", "shape": [4, 2], "bytes": 32, "pieces": 2}}
    assert (found["step"], found["aliases"], found["user"]) == (7, {"model/tied": "model/w"}, {"run": 1})
    everything(tmp_path / "all")
    _, out, _ = run("inspect", tmp_path / "all")
    assert '  group 0: 2 parameters, {"lr": 0.1, "betas": {"$tuple": [0.9, 0.99]}, "fused": null}' in out
    assert '  state of 2 parameters: {"step": {"$scalar": ["F32", 3.0]}}' in out
    assert " parts" not in out


def test_verify_names_each_file_that_was_changed_or_cut_off_and_says_where_there_are_no_checksums(tmp_path, run):
    tensors = {f"model/{at}": (torch.ones(64), Grid(at)) for at in range(4)}
    path = put(tmp_path / "a", tensors)
    assert run("verify", tmp_path / "a") == (0, f"step 7 of {tmp_path / 'a'} is intact\n", "")
    assert run("verify", path) == (0, f"{path} is intact\n", "")
    changed, cut, missing = (path / f"abc-0000{at}.safetensors" for at in (1, 2, 3))
    raw = bytearray(changed.read_bytes())
    raw[-1] ^= 1
    changed.write_bytes(raw)
    cut.write_bytes(cut.read_bytes()[:-3])
    missing.unlink()
    code, out, _ = run("verify", tmp_path / "a")
    assert code == 1
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == [changed.name, cut.name, missing.name]
    assert "the checksum of bytes" in lines[0]
    assert lines[-1] == f"step 7 of {tmp_path / 'a'} is damaged"
    code, out, _ = run("verify", tmp_path / "a", "--json")
    assert (code, len(json.loads(out)["damages"])) == (1, 3)
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    said = f"{tmp_path / 'x.pt'} is intact; the format torch has no checksums, so changed bytes are not noticed\n"
    assert run("verify", tmp_path / "x.pt") == (0, said, "")


def test_a_save_that_was_not_finished_is_told_by_inspect_and_beside_the_whole_one(tmp_path, run):
    model = torch.nn.Linear(2, 2)
    for step in (40, 50):
        torn = Path(sherd.save(tmp_path / "a", {"model": model}, step=step))
    (torn / MANIFEST).unlink()
    code, _, said = run("inspect", torn)
    assert (code, "is no complete checkpoint: manifest.json is missing" in said) == (2, True), said
    code, out, _ = run("verify", tmp_path / "a")
    first, last = out.splitlines()
    assert (code, last) == (0, f"step 40 of {tmp_path / 'a'} is intact")
    assert first.startswith("step 50 is not complete: ")
    assert list(json.loads(run("verify", tmp_path / "a", "--json")[1])["not_whole"]) == ["50"]


def test_a_runs_folder_stands_for_its_checkpoints(tmp_path, run):
    out, place = tmp_path / "run", tmp_path / "run" / "checkpoints"
    out.mkdir()
    (out / "metrics.jsonl").touch()
    assert "if it is one, say so by --from" in run("inspect", out)[2]
    path = sherd.save(place, {"model": torch.nn.Linear(2, 2)}, step=4)
    assert run("inspect", out)[1] == run("inspect", place)[1]
    assert run("verify", out) == (0, f"step 4 of {place} is intact\n", "")
    assert run("diff", out, path) == (0, f"{place} and {path} are the same\n", "")
    assert run("convert", out, tmp_path / "run.pt")[0] == 0
    assert run("diff", tmp_path / "run.pt", out)[0] == 0
    assert run("prune", out, "--keep-last", "1")[:2] == (0, f"1 checkpoints are left in {place}\n")


def test_what_formats_cannot_hold_is_no_difference_and_models_that_are_the_same_are_said_to_be(tmp_path, run):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    sherd.save(tmp_path / "a", {"model": model, "optimizer": optimizer}, step=1, per_rank={"seen": 3})
    for source, target in (("a", "dcp"), ("dcp", "back"), ("a", "universal"), ("a", "model.pt")):
        words = ["--to", target] if target in ("dcp", "universal") else []
        assert run("convert", tmp_path / source, tmp_path / target, *words)[0] == 0
        assert run("diff", tmp_path / "a", tmp_path / target) == (
            0,
            f"{tmp_path / 'a'} and {tmp_path / target} are the same\n",
            "",
        )
    torch.save(model.state_dict(), tmp_path / "alone.pt")
    lines = run("diff", tmp_path / "a", tmp_path / "alone.pt")[1].splitlines()
    said = ["optimizer: is missing in B, with 4 tensors", "the models are the same; apart from them 1 difference"]
    assert lines == said
    model.weight.data += 1
    sherd.save(tmp_path / "b", {"model": model, "optimizer": optimizer}, step=1, per_rank={"seen": 4})
    lines = run("diff", tmp_path / "a", tmp_path / "b")[1].splitlines()
    assert lines[0].startswith("model/weight: 4 of 4")
    assert "per_rank/0/given/seen: is 3 in A, 4 in B" in lines
    assert "the models are the same" not in lines[-1]


def test_inspect_leaves_the_states_of_random_generators_out(tmp_path, run):
    sherd.save(tmp_path, {"model": torch.nn.Linear(2, 2)}, step=1, per_rank={"seen": 12})
    code, out, _ = run("inspect", tmp_path)
    assert (code, '"seen": 12' in out, "python" in out) == (0, True, False), out


def test_verify_reads_every_byte_and_a_header_that_the_manifest_contradicts(tmp_path, run):
    path = put(tmp_path / "a", {"model/w": (torch.ones(50), Grid(0))})
    file = path / "abc-00000.safetensors"
    whole = file.read_bytes()
    for at in range(0, len(whole), 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert run("verify", tmp_path / "a")[0] == 1, at
    file.write_bytes(whole)
    assert run("verify", tmp_path / "a")[0] == 0
    # The file is as it was written, but another tensor is in it than the manifest says.
    raw = (path / MANIFEST).read_bytes()
    body = raw[: raw.rindex(b',\n"sha256"')].replace(b'"model/w": {', b'"model/v": {')
    (path / MANIFEST).write_bytes(signed(body))
    code, out, _ = run("verify", tmp_path / "a")
    assert code == 1
    assert "lacks model/v, F32 [50] by manifest.json" in out
    assert "has model/w, which manifest.json does not name" in out


def test_diff_says_what_differs_and_by_how_much(tmp_path, run):
    a = {"w": torch.tensor([1.0, 2.0, 4.0]), "only": torch.ones(1), "other": torch.ones(2)}
    b = {"w": torch.tensor([1.0, 2.5, 4.0]), "more": torch.ones(1), "other": torch.ones(3)}
    two = two_files(tmp_path, {**a, "n": torch.tensor([1 << 60])}, {**b, "n": torch.tensor([1 + (1 << 60)])})
    code, out, _ = run("diff", *two)
    assert code == 1
    assert out.splitlines() == [
        "model/w: 1 of 3 elements differ, at most by 0.5 (relative 0.2)",
        "model/only: is missing in B",
        "model/other: is F32 [2] in A, F32 [3] in B",
        "model/n: 1 of 1 elements differ, at most by 1 (relative 8.67362e-19)",
        "model/more: is missing in A",
        "5 differences",
    ]
    first = {"name": "model/w", "what": "1 of 3 elements differ", "max_abs": 0.5, "max_rel": 0.2, "num": 1}
    assert json.loads(run("diff", *two, "--json")[1])["differences"][0] == first


def test_diff_allows_what_it_is_told_to_and_sees_what_is_not_finite(tmp_path, run):
    nan, inf = float("nan"), float("inf")
    two = two_files(tmp_path, {"w": torch.tensor([nan, 2.0, inf])}, {"w": torch.tensor([nan, 2.5, inf])})
    allowed = ([], 1), (["--atol", "0.5"], 0), (["--rtol", "0.2"], 0), (["--rtol", "0.1", "--atol", "0.1"], 1)
    for words, code in allowed:
        assert run("diff", *two, *words)[0] == code, words
    two = two_files(tmp_path, {"w": torch.tensor([nan, inf, 1.0])}, {"w": torch.tensor([1.0, -inf, 1.0])})
    code, out, _ = run("diff", *two, "--rtol", "9", "--atol", "9")
    assert (code, out.splitlines()[0]) == (1, "model/w: 2 of 3 elements differ, at most by inf (relative inf)")
    assert json.loads(run("diff", *two, "--json")[1])["differences"][0]["max_abs"] == "inf"


def test_diff_compares_an_optimizers_settings(tmp_path, run):
    everything(tmp_path / "a")
    run("convert", tmp_path / "a", tmp_path / "b.pt")
    state = torch.load(tmp_path / "b.pt")
    state["optimizer"]["param_groups"][0]["lr"] = 0.5
    torch.save(state, tmp_path / "c.pt")
    code, out, _ = run("diff", tmp_path / "a", tmp_path / "c.pt")
    assert (code, out.splitlines()[0]) == (1, "optimizer/param_groups/0/lr: is 0.1 in A, 0.5 in B")


REFUSED = [
    (["inspect", "nothing"], "nothing is not there"),
    (["inspect", "."], "is no checkpoint of a known format"),
    (["inspect", "x.txt"], "is no checkpoint of a known format"),
    (["inspect", "x.txt", "--from", "torch"], "is no file of torch.save"),
    (["inspect", "x.txt", "--from", "hf"], "is no safetensors file"),
    (["inspect", "x.txt", "--from", "dcp"], "cannot be read"),
    (["inspect", ".", "--from", "sherd"], "holds no checkpoint of sherd"),
    (["inspect", ".", "--from", "universal"], "holds no universal checkpoint"),
    (["verify", "nothing"], "nothing is not there"),
    (["diff", "x.pt", "nothing"], "nothing is not there"),
    (["diff", "x.pt", "x.pt", "--rtol", "-1"], "numbers from 0 on"),
    (["convert", "x.pt", "x.txt"], "is there already"),
    (["convert", "x.pt", "no/where"], "is no folder"),
    (["convert", "x.pt", "y", "--mapping", "nothing.json"], "is none of the presets"),
    (["convert", "x.pt", "y", "--reverse"], "--reverse is about"),
    (["convert", "x.pt", "y", "--mapping", "llama", "--set", "heads"], "is no KEY=N"),
    (["convert", "x.pt", "y", "--memory", "lots"], "is no number of bytes"),
    (["convert", "x.pt", "y", "--to", "deepspeed"], "invalid choice"),
    (["convert", "x.pt"], "required: DST"),
    (["inspect", "x.pt", "--fomr", "hf"], "did you mean --from?"),
]


def test_what_cannot_be_is_told_in_one_line(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("no checkpoint at all")
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    for words, told in REFUSED:
        code, out, err = run(*words)
        assert (code, out) == (2, ""), words
        assert err.startswith(f"sherd {words[0]}: "), words
        assert err.count("\n") == 1, words
        assert told in err, words
    assert sorted(each.name for each in tmp_path.iterdir()) == ["x.pt", "x.txt"]


def test_no_older_checkpoint_is_taken_and_no_format_ruled_out_where_files_cannot_be_read(tmp_path, monkeypatch):
    for step in (1, 2):
        sherd.save(tmp_path / "a", {"value": torch.ones(3)}, step=step)
    cannot_be_read(monkeypatch, "stat", tmp_path / "a" / "step-00000002" / MANIFEST)
    with pytest.raises(OSError, match="Permission denied"):
        of_sherd.folder_of(tmp_path / "a")
    cannot_be_read(monkeypatch, "listdir", tmp_path / "a")
    with pytest.raises(OSError, match="Permission denied"):
        open_source(tmp_path / "a")


def cannot_be_read(monkeypatch, function, wrong):
    """Let the `function` of os fail for the path `wrong`."""
    real = getattr(os, function)

    def failing(path, *args, **options):
        if not isinstance(path, int) and Path(path) == wrong:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, function, failing)


def test_a_disk_that_cannot_be_written_to_has_its_own_code(tmp_path, run, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(places.os, "fsync", full)
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    code, _, err = run("convert", tmp_path / "x.pt", tmp_path / "y")
    assert (code, err) == (74, "sherd convert: a file: No space left on device\n")
    assert [each.name for each in tmp_path.iterdir()] == ["x.pt"]


def test_help_says_what_a_command_does_and_its_exit_codes(capsys):
    for command in ("convert", "inspect", "verify", "diff"):
        with pytest.raises(SystemExit) as left:
            main([command, "--help"])
        assert left.value.code == 0
        assert "exit code: 0, " in capsys.readouterr().out, command


def test_prune_keeps_the_last_and_every_so_many(tmp_path, run):
    for step in (10, 20, 30, 40):
        put(tmp_path / "a", {"model/w": (torch.ones(2), Grid(0))}, step=step)
    said = f"step 30 is removed\nstep 10 is removed\n2 checkpoints are left in {tmp_path / 'a'}\n"
    assert run("prune", tmp_path / "a", "--keep-last", "1", "--keep-every", "20")[:2] == (0, said)
    (tmp_path / "a" / "step-00000040" / "abd-00000.safetensors").write_bytes(b"left")
    _, out, _ = run("prune", tmp_path / "a", "--keep-last", "1", "--sweep", "--json")
    found = json.loads(out)
    assert (found["removed"], found["left"], len(found["swept"])) == ([20], [40], 1)
    assert run("prune", tmp_path / "a", "--keep-last", "0")[0] == 2
    assert run("prune", tmp_path / "no", "--keep-last", "1")[0] == 2
