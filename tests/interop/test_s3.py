"""A store that speaks S3 holds what was written, whole or not at all, also over a bad connection."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import fsspec
import pytest
from aiobotocore.client import AioBaseClient

from sherd.storage import places
from sherd.storage.files import Checksums
from sherd.storage.folder import Folder
from sherd.storage.places import place_of
from tests.storage.test_remote import keep_two_of_four

BUCKET = "checkpoints"
PART = 5 << 20
LONG = os.urandom(1 << 20) * 12 + b"the end"


@pytest.fixture(scope="module")
def server():
    """The address of a server that speaks S3."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def store(server, monkeypatch):
    """A folder of a new bucket, and fsspec's file system for it."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(places, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(places, "PART_BYTES", PART)
    place = place_of(f"s3://{BUCKET}/run/", endpoint_url=server)
    fs = place._fs
    fs.mkdir(BUCKET)
    yield place
    if fs.exists(f"{BUCKET}/run"):
        fs.rm(f"{BUCKET}/run", recursive=True)
    fs.rmdir(BUCKET)


class Calls:
    """Counts the requests to the server; those whose number is in `failing` do not come through."""

    def __init__(self, monkeypatch):
        self.made, self.failing, self.error = [], (), ConnectionResetError("reset by peer")
        asked = AioBaseClient._make_api_call

        async def ask(client, operation, kwargs):
            self.made.append((operation, kwargs))
            if len(self.made) in self.failing:
                raise self.error
            return await asked(client, operation, kwargs)

        monkeypatch.setattr(AioBaseClient, "_make_api_call", ask)

    @property
    def names(self):
        return [operation for operation, _ in self.made]


@pytest.fixture
def calls(store, monkeypatch):
    monkeypatch.setattr(store._fs, "retries", 1)
    found = Calls(monkeypatch)
    yield found
    found.failing = ()


def chunks_of(raw, size=3 << 20):
    return lambda: (memoryview(raw)[start : start + size] for start in range(0, len(raw), size))


def content(place, name):
    with closing(place.open(name)) as file:
        read = bytearray(file.nbytes)
        file.read_into(0, memoryview(read))
    return bytes(read)


def uploads(place):
    return place._fs.list_multipart_uploads(BUCKET)


def test_a_long_object_is_uploaded_in_parts_a_short_one_in_one_request_and_both_read_back(store, calls):
    sums = Checksums(4 << 20)
    store.write("long", lambda: sums.passing(chunks_of(LONG)()))
    assert calls.names == ["CreateMultipartUpload", *["UploadPart"] * 3, "CompleteMultipartUpload"]
    assert all(kwargs["Body"].seek(0, 2) >= PART for _, kwargs in calls.made[1:3])
    assert content(store, "long") == LONG
    assert sums.nbytes == len(LONG)
    calls.made.clear()
    store.write("short", chunks_of(b"abc"))
    store.write("empty", lambda: ())
    assert calls.names == ["PutObject", "PutObject"]
    assert (content(store, "short"), content(store, "empty")) == (b"abc", b"")


def test_reading_is_one_request_for_the_bytes_asked_for(store, calls):
    store.write("long", chunks_of(LONG))
    file = store.open("long")
    assert (file.name, file.nbytes) == (f"s3://{BUCKET}/run/long", len(LONG))
    calls.made.clear()
    into = bytearray(1000)
    file.read_into(5_000_000, memoryview(into))
    assert into == LONG[5_000_000:5_001_000]
    ((method, kwargs),) = calls.made
    assert (method, kwargs["Range"]) == ("GetObject", "bytes=5000000-5000999")
    with pytest.raises(EOFError):
        file.read_into(len(LONG) - 10, memoryview(bytearray(11)))
    file.read_into(len(LONG), memoryview(b""))


def test_an_upload_whose_source_fails_leaves_nothing_or_the_object_that_was_there(store):
    def chunks(num, error):
        yield from list(chunks_of(LONG)())[:num]
        raise error

    for num, error in ((0, ZeroDivisionError), (1, ZeroDivisionError), (4, ZeroDivisionError), (4, KeyboardInterrupt)):
        with pytest.raises(error):
            store.write("long", lambda num=num, error=error: chunks(num, error))
        assert (uploads(store), store.names()) == ([], []), (num, error)
    store.write("long", chunks_of(b"before"))
    with pytest.raises(KeyboardInterrupt):
        store.write("long", lambda: chunks(4, KeyboardInterrupt))
    assert uploads(store) == []
    assert content(store, "long") == b"before"


@pytest.mark.parametrize("failing", [(1, 2), (2, 5), (3, 6), (5, 10), (4, 7)])
def test_a_write_that_fails_twice_begins_anew_and_comes_through(store, calls, failing):
    begun = []

    def chunks():
        begun.append(True)
        return chunks_of(LONG)()

    calls.failing = failing
    store.write("long", chunks)
    assert len(begun) == 3
    calls.failing = ()
    assert content(store, "long") == LONG
    assert (uploads(store), store.names()) == ([], ["long"])


def test_a_connection_that_stays_away_is_one_error_with_url_and_cause(store, calls):
    calls.failing = range(1, 1000)
    with pytest.raises(OSError) as told:
        store.write("long", chunks_of(LONG))
    assert "ConnectionResetError: reset by peer, tried 4 times: 's3://checkpoints/run/long'" in str(told.value)
    assert isinstance(told.value.__cause__, ConnectionResetError)
    for read in (lambda: content(store, "long"), store.names, lambda: store.remove("long")):
        calls.made.clear()
        with pytest.raises(OSError, match="reset by peer, tried 4 times"):
            read()
        assert len(calls.made) == 4


def test_what_is_not_there_or_not_allowed_is_told_at_once_and_reading_is_tried_again(store, calls):
    with pytest.raises(FileNotFoundError, match="s3://checkpoints/run/none"):
        store.open("none")
    assert "HeadObject" in calls.names
    store.write("short", chunks_of(b"abc"))
    calls.made.clear()
    calls.failing = (1, 3, 4)
    assert content(store, "short") == b"abc"
    assert calls.names == ["HeadObject"] * 2 + ["GetObject"] * 3
    calls.made.clear()
    calls.failing, calls.error = (1,), PermissionError("Access Denied")
    with pytest.raises(PermissionError, match="Access Denied: 's3://checkpoints/run/short'"):
        store.write("short", chunks_of(b"abc"))
    assert len(calls.made) == 1


def test_a_server_that_is_not_there_is_named(store):
    config = {"retries": {"max_attempts": 0}}
    place = place_of("s3://checkpoints/run", endpoint_url="http://127.0.0.1:9", config_kwargs=config)
    place._fs.retries = 1
    with pytest.raises(OSError, match=r"127.0.0.1:9.*tried 4 times: 's3://checkpoints/run/x'"):
        place.write("x", chunks_of(b"abc"))


def test_names_are_those_that_are_there_now_and_an_empty_folder_is_dropped_and_never_its_bucket(store, server):
    other = fsspec.filesystem("s3", endpoint_url=server, skip_instance_cache=True, use_listings_cache=False)
    assert store.names() == []
    place_of(f"s3://{BUCKET}", **store._fs.storage_options).drop()
    assert store._fs.exists(BUCKET)
    store.write("a", chunks_of(b"1"))
    store.drop()
    assert store.names() == ["a"]
    other.pipe_file(f"{BUCKET}/run/b", b"2")
    other.pipe_file(f"{BUCKET}/run/step/c", b"3")
    assert sorted(store.names()) == ["a", "b", "step"]
    other.rm_file(f"{BUCKET}/run/a")
    assert sorted(store.names()) == ["b", "step"]
    for gone in ("a", "step"):
        with pytest.raises(FileNotFoundError):
            store.open(gone)
    for _ in range(2):
        store.remove("b")
    assert store.names() == ["step"]


def test_checkpoints_are_saved_found_pruned_and_swept_by_hand(store):
    keep_two_of_four(Folder(store))


def test_threads_may_read_one_object(store):
    store.write("long", chunks_of(LONG))
    file = store.open("long")

    def read(start):
        into = bytearray(1000)
        file.read_into(start, memoryview(into))
        return bytes(into)

    starts = range(0, 8000, 1000)
    with ThreadPoolExecutor(len(starts)) as threads:
        assert list(threads.map(read, starts)) == [LONG[start : start + 1000] for start in starts]
