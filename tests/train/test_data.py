"""A step's text is decided by seed and place alone, and each held-out byte is judged exactly once."""

import itertools
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from sherd.train import text as texts
from sherd.train.config import InputError
from sherd.train.data import Windows, batch, seeded
from sherd.train.text import read_corpus
from tests.support.refusals import one_line

TEXT = torch.arange(1000, dtype=torch.int64).remainder(251).to(torch.uint8)


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


def read(path, held_out=0.25):
    with mock.patch.object(texts, "HELD_OUT", held_out):
        return read_corpus(str(path), context=4)


def content(corpus):
    return corpus.train + corpus.held_out


def test_a_folder_gives_every_text_in_it_each_after_a_nul_and_no_hidden_empty_or_binary_file(tmp_path):
    files = {".git__config": "hidden", ".hidden": "hidden", "empty": "", "picture": b"\x89PNG\0"}
    corpus = read(write(tmp_path, a="first text", sub__b="second one", **files))
    assert corpus.num_documents == 2
    assert sorted(content(corpus).split(b"\0")) == [b"", b"first text", b"second one"]


def test_neither_names_nor_folders_decide_the_split_and_other_text_has_another_digest(tmp_path):
    texts = [f"document {n} " * 5 for n in range(9)]
    one = read(write(tmp_path / "one", **{f"f{n}": text for n, text in enumerate(texts)}))
    two = read(write(tmp_path / "two", **{f"d{n}__g{9 - n}": text for n, text in enumerate(texts)}))
    assert one.digest == two.digest
    assert content(one) == content(two)
    assert read(write(tmp_path / "a", a="x" * 40)).digest != read(write(tmp_path / "b", a="y" * 40)).digest


def test_the_tail_of_the_asked_share_is_held_out_and_a_single_file_is_split_like_a_folder_of_one(tmp_path):
    corpus = read(write(tmp_path, a="z" * 99), held_out=0.2)
    assert (len(corpus.train), len(corpus.held_out)) == (80, 20)
    folder = write(tmp_path, a="some words " * 9)
    assert content(read(tmp_path / "a")) == content(read(folder))


def test_by_default_the_standard_library_is_read_without_tests_and_installed_packages(tmp_path, monkeypatch):
    files = {"a.py": "a = 1\n" * 9, "json__b.py": "b = 2\n", "notes.txt": "no source"}
    others = {"test__c.py": "c", "json__tests__d.py": "d", "site-packages__e.py": "e"}
    path = write(tmp_path, **files, **others)
    monkeypatch.setattr("sysconfig.get_path", {"stdlib": path}.get)
    corpus = read("")
    assert corpus.source == path
    assert sorted(content(corpus).split(b"\0")) == [b"", b"a = 1\n" * 9, b"b = 2\n"]


def test_the_standard_library_of_this_python_is_enough_to_train_on():
    corpus = read_corpus("", context=128)
    assert corpus.num_documents > 300
    assert b"\0" + Path(os.__file__).read_bytes() in content(corpus)


def test_text_that_cannot_be_trained_on_is_refused_in_one_line(tmp_path):
    for number, (files, path, said) in enumerate(
        (
            ({}, "absent", "absent: No such file"),
            ({}, "", "holds 0 bytes of text in 0 documents"),
            ({"empty": ""}, "empty", "holds 0 bytes of text in 0 documents, which leaves 0 held-out bytes"),
            ({"one": "x"}, "one", "holds 1 bytes of text in 1 documents, which leaves 0 held-out bytes"),
            ({"short": "abc"}, "short", "a sample needs 5: give more text, or a smaller context"),
            ({"text": "x" * 12}, "text", "leaves 3 held-out bytes"),
            ({"binary": b"a\0b"}, "binary", "holds NUL bytes, so it is no text"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder, **files)
        told = one_line(InputError, read, folder / path)
        assert said in told, files
        assert path != "absent" or told.startswith("cannot read the text ")


def test_an_unreadable_file_in_a_folder_is_named_and_not_passed_over(tmp_path, monkeypatch):
    path = write(tmp_path, a="x" * 40)

    def denied(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.read_bytes", denied)
    with pytest.raises(InputError, match=r"cannot read the text .*a: Permission denied"):
        read(path)


def test_a_target_is_the_byte_after_its_input_and_ranks_and_micro_batches_cut_the_same_global_batch():
    inputs, targets = batch(TEXT, context=8, seed=0, first=0, num=5)
    assert inputs.shape == targets.shape == (5, 8)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal((inputs + 1) % 251, targets)
    whole = batch(TEXT, 8, seed=3, first=40, num=12)
    parts = [batch(TEXT, 8, seed=3, first=40 + at, num=3) for at in range(0, 12, 3)]
    for side in (0, 1):
        assert torch.equal(whole[side], torch.cat([part[side] for part in parts]))


def test_an_epoch_visits_every_window_once_the_next_one_in_another_order_and_a_batch_may_straddle_two():
    num_windows = (len(TEXT) - 1) // 8
    first, second = (batch(TEXT, 8, 0, epoch * num_windows, num_windows)[0] for epoch in (0, 1))
    windows = TEXT[: num_windows * 8].long().view(-1, 8)
    assert not torch.equal(first, second)
    for epoch in (first, second):
        assert sorted(epoch.tolist()) == sorted(windows.tolist())
    straddling, _ = batch(TEXT, 8, 0, num_windows - 2, 4)
    assert torch.equal(straddling[2:], second[:2])


def test_the_seed_decides_the_order_and_the_global_generator_does_not():
    torch.manual_seed(1)
    one = batch(TEXT, 8, seed=5, first=0, num=6)[0]
    torch.manual_seed(2)
    assert torch.equal(one, batch(TEXT, 8, seed=5, first=0, num=6)[0])
    assert not torch.equal(one, batch(TEXT, 8, seed=6, first=0, num=6)[0])
    # And each part of a key decides.
    draws = [torch.rand(1, generator=seeded(*key)).item() for key in ((0, "a"), (0, "b"), (1, "a"), (0, "a"))]
    assert len(set(draws)) == 3
    assert draws[0] == draws[3]


def test_each_held_out_byte_is_scored_exactly_once_and_in_order():
    for length, context in itertools.product((9, 10, 64, 100), (2, 7, 8, 64)):
        text = torch.arange(1, length + 1, dtype=torch.uint8)
        windows = Windows(text, context)
        # A window past the end is empty.
        inputs, targets, weights = windows.batch([*range(windows.num), windows.num, windows.num + 7])
        assert targets[weights.bool()].tolist() == text.tolist(), (length, context)
        assert torch.equal(inputs[: windows.num, 1:], targets[: windows.num, :-1]), (length, context)
        assert weights[windows.num :].sum() == 0, (length, context)


def test_a_scored_byte_sees_at_least_half_a_context_of_what_came_before_or_the_beginning_of_a_document():
    text = torch.arange(1, 101, dtype=torch.uint8)
    _, targets, weights = Windows(text, 8).batch([5])
    assert weights.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]
    assert targets.tolist() == [[17, 18, 19, 20, 21, 22, 23, 24]]
    inputs, targets, weights = Windows(torch.tensor([7, 8, 9], dtype=torch.uint8), 4).batch([0])
    assert inputs.tolist() == [[0, 0, 0, 7]]
    assert targets[weights.bool()].tolist() == [7, 8]
