"""Scratch files hold what was written, are in no folder, and leave nothing however their process ends."""

import contextlib
import errno
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from sherd.errors import ScratchError, StateError, StorageError
from sherd.storage.folder import Folder
from sherd.storage.places import DiskPlace
from sherd.storage.scratch import Scratch, file_system_of
from tests.support.suites import examples

UNIT = "layers.0"


@pytest.fixture
def scratch(tmp_path):
    with ignoring_memory(), Scratch(str(tmp_path / "scratch")) as scratch:
        yield scratch


@contextlib.contextmanager
def ignoring_memory():
    """A machine may have its temporary folder in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sherd.storage.scratch.file_system_of", lambda path: "")
        yield


def written(file, content, start=0):
    file.write_from(memoryview(content), start).wait()


def read(file, nbytes=None, start=0):
    buffer = bytearray(file.nbytes if nbytes is None else nbytes)
    file.read_into(memoryview(buffer), start).wait()
    return bytes(buffer)


def run(program, *words):
    """What a process of Python prints, and what it says on its error stream."""
    command = [sys.executable, "-c", program, *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr


# Bytes


def test_a_file_has_zeros_then_what_was_written_and_its_map_shows_it(scratch):
    file, other = scratch.file(UNIT, 10_000), scratch.file("layers.1", 5)
    assert read(file) == bytes(10_000)
    content = random.Random(0).randbytes(10_000)
    written(file, content)
    written(other, b"other")
    written(file, b"part", 4_096)
    content = content[:4_096] + b"part" + content[4_100:]
    assert (read(file), read(file, 7, 9_993), read(other)) == (content, content[9_993:], b"other")
    mapped = file.map()
    assert bytes(mapped) == content
    mapped[:3] = b"new"
    file.drop()
    assert read(file, 4) == b"new" + content[3:4]
    written(file, b"newer")
    assert (file.map(), bytes(mapped[:5])) == (mapped, b"newer")
    file.drop()
    assert bytes(mapped) == b"newer" + content[5:]


def test_a_unit_without_bytes_has_a_file_too(scratch):
    file = scratch.file(UNIT, 0)
    written(file, b"")
    assert (read(file), len(file.map())) == (b"", 1)


def test_a_buffer_may_have_any_shape_but_not_more_than_the_file(scratch):
    file = scratch.file(UNIT, 8)
    written(file, memoryview(bytearray(range(8))).cast("B", (2, 4)))
    assert read(file) == bytes(range(8))
    for nbytes, start in ((9, 0), (4, 5), (1, -1)):
        with pytest.raises(AssertionError, match="stay inside of the file"):
            file.read_into(memoryview(bytearray(nbytes)), start)


def test_transfers_that_the_system_cuts_short_go_on(scratch, monkeypatch):
    file = scratch.file(UNIT, 1_000)
    for name in ("preadv", "pwritev"):
        function = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, views, start, call=function: call(fd, [views[0][:7]], start))
    content = random.Random(1).randbytes(1_000)
    written(file, content)
    assert read(file) == content


def test_requests_of_a_file_are_carried_out_in_their_order(scratch, monkeypatch):
    file, pwritev = scratch.file(UNIT, 8), os.pwritev

    def slow(fd, views, start):
        time.sleep(0.01 * random.random())
        return pwritev(fd, views, start)

    monkeypatch.setattr(os, "pwritev", slow)
    for _ in range(5):
        buffers = [bytearray(8) for _ in range(3)]
        requests = []
        for number, buffer in enumerate(buffers):
            requests += [
                file.write_from(memoryview(bytes([number] * 8))),
                file.read_into(memoryview(buffer)),
            ]
        assert bytes(file.map()) == bytes([2] * 8)  # which waits for them
        for request in requests:
            request.wait()
        assert [bytes(buffer) for buffer in buffers] == [bytes([number] * 8) for number in range(3)]


def test_threads_share_a_scratch(scratch):
    files = [scratch.file(f"layers.{number}", 64) for number in range(4)]
    failed = []

    def use(number):
        try:
            for step in range(50):
                written(files[number], bytes([number * 50 + step] * 64))
                if read(files[number]) != bytes([number * 50 + step] * 64):
                    failed.append((number, step))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_no_more_than_depth_requests_are_under_way_and_no_thread_is_left(tmp_path, monkeypatch):
    may_go_on, pwritev = threading.Event(), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: may_go_on.wait() and pwritev(*args))
    before = set(threading.enumerate())
    with ignoring_memory(), Scratch(str(tmp_path), depth=3) as scratch:
        files = [scratch.file(f"layers.{number}", 4) for number in range(4)]
        requests = []
        begins = threading.Thread(
            target=lambda: requests.extend(file.write_from(memoryview(b"1234")) for file in files)
        )
        begins.start()
        while len(requests) < 3 and begins.is_alive():
            time.sleep(0.001)
        assert sum(thread.name.startswith("sherd scratch") for thread in threading.enumerate()) == 2
        assert not may_go_on.wait(0.05)
        assert begins.is_alive()  # with its fourth request
        may_go_on.set()
        begins.join()
        for request in requests:
            request.wait()
    assert set(threading.enumerate()) <= before
    with pytest.raises(StateError, match=r"is used after close\(\)"):
        scratch.file(UNIT, 1)
    scratch.close()


# Who shares the folder


def test_ranks_jobs_and_checkpoints_share_a_folder_in_which_nothing_is_seen(tmp_path):
    (tmp_path / "mine.txt").write_text("stays")
    with ignoring_memory(), Scratch(str(tmp_path)) as one, Scratch(str(tmp_path)) as other:
        files = [scratch.file(UNIT, 4) for scratch in (one, other)]
        written(files[0], b"one ")
        written(files[1], b"two ")
        assert [read(file) for file in files] == [b"one ", b"two "]
        assert os.listdir(tmp_path) == ["mine.txt"]
        assert Folder(DiskPlace(tmp_path)).newest() == (None, [])
        one.close()
        assert read(files[1]) == b"two "
    assert (tmp_path / "mine.txt").read_text() == "stays"


def test_a_folder_that_is_removed_meanwhile_takes_no_byte_with_it(tmp_path):
    with ignoring_memory(), Scratch(str(tmp_path / "scratch")) as scratch:
        file = scratch.file(UNIT, 4)
        written(file, b"1234")
        shutil.rmtree(scratch.path)
        written(file, b"5", 1)
        assert read(file) == b"1534"
        with pytest.raises(ScratchError, match=r"layers\.1 \(4 B\) cannot be made in .*: No such file or directory"):
            scratch.file("layers.1", 4)


def test_a_scratch_that_is_dropped_is_closed(tmp_path):
    with ignoring_memory():
        scratch = Scratch(str(tmp_path))
    file = scratch.file(UNIT, 4)
    written(file, b"1234")
    fd, gone, mapped = file._file.fileno(), weakref.ref(scratch), file.map()
    del scratch, file
    gc.collect()
    assert gone() is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert bytes(mapped) == b"1234"


def test_a_forked_process_may_not_use_it_and_holds_no_space(scratch):
    file = scratch.file(UNIT, 4)
    written(file, b"1234")
    request = file.read_into(memoryview(bytearray(4)))
    child = os.fork()
    if not child:
        refused = 0
        for use in (
            lambda: scratch.file("x", 1),
            request.wait,
            file.map,
            scratch.close,
            lambda: read(file),
        ):
            try:
                use()
            except StateError as error:
                refused += "is used in a forked process" in str(error)
        os._exit(0 if (refused, file._file.closed) == (5, True) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert read(file) == b"1234"


# Folders and disks that cannot be used


def test_what_cannot_be_a_scratch_folder_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for path, why in (
        (tmp_path / "file", "Not a directory; choose a folder of a disk"),
        (tmp_path / "missing" / "scratch", "No such file or directory; make the folder above it"),
        (Path("/proc/scratch"), "; "),
    ):
        with pytest.raises(ScratchError, match=f"scratch folder {path} cannot be used: .*{why}") as caught:
            Scratch(str(path))
        assert "\n" not in str(caught.value), path
        assert isinstance(caught.value, StorageError), path


def test_the_name_of_the_rank_is_in_the_message(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ScratchError) as caught:
        Scratch(str(tmp_path / "missing" / "scratch"))
    assert str(caught.value).startswith("[rank 3] scratch folder")


def test_a_folder_in_memory_is_warned_of(tmp_path, monkeypatch):
    assert file_system_of("/proc") == "proc"
    monkeypatch.setattr("sherd.storage.scratch.file_system_of", lambda path: "tmpfs")
    with pytest.warns(UserWarning, match=f"scratch folder {tmp_path} is on tmpfs, memory of the host") as caught:
        Scratch(str(tmp_path)).close()
    assert caught[0].filename == __file__


def test_a_folder_may_be_in_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    Scratch("~/scratch").close()
    assert (tmp_path / "scratch").is_dir()


def test_a_disk_that_is_too_small_is_refused_before_anything_is_taken(scratch):
    scratch.require(1)
    with pytest.raises(ScratchError, match=r"needs 1\.0+ EiB|needs 1,024 PiB, and has [\d.,]+ .iB free: free space"):
        scratch.require(1 << 60)
    with pytest.raises(ScratchError, match=r"layers\.0 \(1,024 PiB\) cannot be made in .*; free space, or choose"):
        scratch.file(UNIT, 1 << 60)
    assert read(scratch.file(UNIT, 4)) == bytes(4)


SMALL_DISK = """
import os, resource, sys
from sherd.errors import ScratchError
from sherd.storage import scratch
scratch.file_system_of = lambda path: ""
with scratch.Scratch(sys.argv[1]) as folder:
    if sys.argv[2] == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))
    else:
        folder.require(900 << 10)
    file = folder.file("layers.0", 500 << 10)
    try:
        folder.file("layers.1", 900 << 10)
    except ScratchError as error:
        print(error)
    file.write_from(memoryview(bytes(range(250)) * 2048)).wait()
    into = bytearray(500 << 10)
    file.read_into(memoryview(into)).wait()
    assert into == bytes(range(250)) * 2048
    assert os.listdir(sys.argv[1]) == []
"""


def test_a_limit_on_files_is_told_and_what_is_there_is_kept(tmp_path):
    said, _ = run(SMALL_DISK, tmp_path, "limit")
    assert "scratch file of layers.1 (900 KiB) cannot be made in " in said
    assert "File too large" in said


def test_a_full_disk_is_told_and_what_is_there_is_kept(tmp_path):
    """On a file system of 1 MiB, in a namespace of its own."""
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec "
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "sh", "-c", mount + "true"], capture_output=True).returncode:
        pytest.skip("this system lets no process mount a file system")
    command = f"{mount} {sys.executable} -c '{SMALL_DISK}' {tmp_path} mount"
    ended = subprocess.run([unshare, "-rm", "sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "layers.1 (900 KiB) cannot be made in " in ended.stdout
    assert "No space left on device, 524 KiB are free; free space, or choose a folder of a larger disk" in ended.stdout


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE])
@pytest.mark.parametrize("does", ["read", "written"])
def test_a_request_that_fails_is_never_reported_as_done_and_no_other_is_taken(scratch, monkeypatch, does, number):
    name = {"read": "preadv", "written": "pwritev"}[does]
    file, other = scratch.file(UNIT, 1_000), scratch.file("layers.1", 4)
    written(file, b"x" * 1_000)
    function, count = getattr(os, name), 0

    def half(fd, views, start):
        nonlocal count
        count += 1
        if count == 2:
            raise OSError(number, os.strerror(number))
        time.sleep(0.01)  # the next request is made meanwhile
        return function(fd, [views[0][:500]], start)

    monkeypatch.setattr(os, name, half)
    begin = file.read_into if does == "read" else file.write_from
    failed, next_one = begin(memoryview(bytearray(1_000))), file.read_into(memoryview(bytearray(1_000)))
    text = f"scratch file of {UNIT} in {scratch.path} cannot be {does}: {os.strerror(number)}"
    for request in (failed, next_one, failed):
        with pytest.raises(ScratchError) as caught:
            request.wait()
        assert str(caught.value).startswith(text)
        assert "\n" not in str(caught.value)
    for use in (lambda: written(other, b"1234"), other.map, other.drop, lambda: scratch.file("layers.2", 4)):
        with pytest.raises(ScratchError, match=text):
            use()
    scratch.close()


def test_a_file_that_was_cut_and_bytes_that_never_reached_the_disk_are_told(tmp_path, monkeypatch):
    with ignoring_memory():
        cut, lost = Scratch(str(tmp_path)), Scratch(str(tmp_path))
    file = cut.file(UNIT, 100)
    os.ftruncate(file._file.fileno(), 60)
    with pytest.raises(ScratchError, match=r"layers\.0 in .* cannot be read: it ends at byte 60 of 100"):
        read(file)
    cut.close()

    def fails(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = lost.file(UNIT, 100)
    monkeypatch.setattr("sherd.storage.scratch._raise_lost_writes", fails)
    with pytest.raises(ScratchError, match=r"cannot be read: Input/output error; its disk has failed"):
        read(file)
    lost.close()


LOST = """
import os, sys
from sherd.errors import ScratchError
from sherd.storage.scratch import Scratch
file = Scratch(sys.argv[1]).file("layers.0", 40 << 20)
content, into = memoryview(os.urandom(40 << 20)), bytearray(40 << 20)
file.write_from(content).wait()
os.sync()
file.drop()
try:
    file.read_into(memoryview(into)).wait()
except ScratchError as error:
    print(error)
else:
    assert into == content, "other bytes were read than written, without an error"
"""


@pytest.mark.slow
def test_bytes_that_a_real_disk_lost_after_they_were_written_are_told(tmp_path):
    """The disk is a file of 64 MiB in 24 MiB of memory: the system takes what is written, and then cannot write it."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    mount = (
        f"mkdir {memory} {disk} && mount -t tmpfs -o size=24m tmpfs {memory} && truncate -s 64m {memory}/disk && "
        f"mkfs.ext4 -q -O ^has_journal {memory}/disk && mount -o loop {memory}/disk {disk}"
    )
    unmount = f"umount {disk}; umount {memory}"
    tried = ["unshare", "-m", "sh", "-c", f"{mount} && {unmount}"]
    if shutil.which("unshare") is None or subprocess.run(tried, capture_output=True).returncode:
        pytest.skip("this system lets this process mount no disk")
    shutil.rmtree(memory)
    shutil.rmtree(disk)
    command = f"{mount} && {sys.executable} -c '{LOST}' {disk}; {unmount}"
    ended = subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert "layers.0 in " in ended.stdout, ended.stderr
    assert "for bytes that were written before" in ended.stdout


# The end of a process

LIFE = """
import os, sys, tempfile
from sherd.storage import scratch
tempfile._O_TMPFILE_WORKS = sys.argv[2] == "without a name"
scratch.file_system_of = lambda path: ""
print("begins", flush=True)
while True:
    folder = scratch.Scratch(sys.argv[1])
    files = [folder.file(f"layers.{number}", 1 << 20) for number in range(4)]
    content = memoryview(bytearray(1 << 20))
    requests = [file.write_from(content) for file in files for _ in range(2)]
    [request.wait() for request in requests]
    if sys.argv[3] == "ends":
        for file in files:
            file.write_from(content), file.map()
        break
    folder.close()
"""


def test_a_kill_at_any_moment_leaves_nothing(tmp_path):
    moments = random.Random(0)
    for kind in ["without a name", "removed at once"] * examples(50):
        process = subprocess.Popen([sys.executable, "-c", LIFE, tmp_path, kind, "kill"], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"begins\n"
        time.sleep(0.03 * moments.random())
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        left = list(tmp_path.iterdir())
        assert kind == "removed at once" or not left
        for path in left:  # a file that has a name for a moment, and no byte then
            assert path.stat().st_size == 0
            path.unlink()


def test_the_end_of_the_program_waits_for_what_was_begun_and_says_nothing(tmp_path):
    assert run(LIFE, tmp_path, "without a name", "ends") == ("begins\n", "")
    assert os.listdir(tmp_path) == []


def test_an_exception_closes_it(tmp_path):
    files = []

    def body():
        with ignoring_memory(), Scratch(str(tmp_path)) as scratch:
            files.append(scratch.file(UNIT, 4))
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert files[0]._file.closed
