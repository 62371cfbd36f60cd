"""`sherd doctor FILE` names the rank that left the others' way, from what ranks have written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from sherd.cli import main as cli
from sherd.tools.doctor.flight import judged, read
from tests.support.commands import refusal

FORWARD = ["gathers unit a", "gathers unit b", "gathers unit c"]
STACK = """  File "train.py", line 30, in main
    batch = next(batches)
  File "data.py", line 7, in load
    lock.acquire()
"""


def mesh(whats: list[str], waits_s: float = 0.0, wants: str = "", ranks: tuple[int, ...] = (0, 1, 2)) -> dict[str, Any]:
    """What a rank says of a mesh on which it has started these."""
    collectives = [
        {"number": number, "time": 1.0, "phase": "forward", "unit": "", "what": what, "bytes": 64, "state": "started"}
        for number, what in enumerate(whats, 1)
    ]
    return {"mesh": str(ranks), "ranks": ranks, "waits_s": waits_s, "wants": wants, "collectives": collectives}


def write(
    folder: Path, rank: int, *meshes: dict[str, Any], failed: bool = False, job: str = "j", when: float = 5
) -> Path:
    """A record of one of three ranks."""
    said = {
        "job": job, "rank": rank, "num_ranks": 3, "host": "h", "process": 1, "time": when, "why": f"why {rank}",
        "asked": 1, "line": f"train.py:{30 + rank}", "stack": STACK, "waits": False, "failed": failed,
        "meshes": list(meshes),
    }  # fmt: skip
    path = folder / f"sherd-flight-{job}-rank{rank}.json"
    path.write_text(json.dumps(said))
    return path


def wrong(folder: Path) -> list[tuple[str, str]]:
    return [(each.name, each.value) for each in judged(read([folder])) if each.verdict == "failure"]


def test_a_rank_that_has_not_come_is_named_with_its_line_and_what_it_does(tmp_path):
    write(tmp_path, 0, mesh(FORWARD, waits_s=9), failed=True)
    write(tmp_path, 1, mesh(FORWARD[:2]))
    write(tmp_path, 2, mesh(FORWARD, waits_s=9), failed=True)
    ((name, value),) = wrong(tmp_path)
    assert name == "rank 1"
    assert value == "has not come to collective 3; it is at train.py:31: batch = next(batches) > lock.acquire()"


def test_a_rank_that_wants_what_others_have_not_started_is_named(tmp_path):
    write(tmp_path, 0, mesh(FORWARD), failed=True)
    write(tmp_path, 1, mesh(FORWARD[:1], waits_s=0.3, wants="gathers unit c (c.weight)"), failed=True)
    write(tmp_path, 2, mesh(FORWARD[:2]), failed=True)
    ((name, value),) = wrong(tmp_path)
    assert name == "rank 1"
    assert value == "left the common way at collective 2, at train.py:31: it gathers unit c (c.weight)"


def test_a_folder_around_that_of_the_records_will_do(tmp_path):
    (tmp_path / "sherd-flights").mkdir()
    for rank in range(3):
        write(tmp_path / "sherd-flights", rank, mesh(FORWARD[: 3 - rank]))
    assert [name for name, _ in wrong(tmp_path)] == [name for name, _ in wrong(tmp_path / "sherd-flights")] != []


def test_of_ranks_that_compare_those_that_are_fewer_are_named_and_of_two_both(tmp_path):
    for rank, wants in enumerate(("gathers unit b", "gathers unit c", "gathers unit b")):
        write(tmp_path, rank, mesh(FORWARD[:1], waits_s=0.1, wants=wants), failed=True)
    assert [name for name, _ in wrong(tmp_path)] == ["rank 1"]
    (tmp_path / "sherd-flight-j-rank2.json").unlink()
    assert [name for name, _ in wrong(tmp_path)] == ["rank 2", "rank 0", "rank 1"]


def test_a_rank_that_waits_for_an_earlier_one_is_not_blamed_for_what_others_sent_ahead(tmp_path):
    write(tmp_path, 0, mesh(FORWARD, waits_s=3), failed=True)
    write(tmp_path, 2, mesh(FORWARD[:2], waits_s=3), failed=True)
    assert [name for name, _ in wrong(tmp_path)] == ["rank 1"]
    assert "it has left no record" in wrong(tmp_path)[0][1]


def test_a_rank_that_is_stuck_is_blamed_once_though_it_is_on_two_meshes(tmp_path):
    for rank in range(3):
        two = [mesh(FORWARD, ranks=(0, 1))] if rank < 2 else []
        write(tmp_path, rank, mesh(FORWARD[: 2 if rank == 1 else 3], waits_s=9.0 * (rank != 1)), *two)
    assert [name for name, _ in wrong(tmp_path)] == ["rank 1"]


def test_ranks_that_did_the_same_are_not_blamed(tmp_path, capsys):
    for rank in range(3):
        write(tmp_path, rank, mesh(FORWARD))
    assert cli.main(["doctor", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "all collectives up to number 3" in shown
    assert "its last is collective 3: it gathers unit c (forward, 64 bytes, started)" in shown


def test_of_a_folder_the_newest_job_is_read_and_files_may_be_named(tmp_path, capsys):
    for rank in range(3):
        write(tmp_path, rank, mesh(FORWARD))
    old = [write(tmp_path, rank, mesh(FORWARD[:rank]), job="older", when=1) for rank in range(3)]
    assert wrong(tmp_path) == []
    assert cli.main(["doctor", *map(str, old), "--json"]) == 2
    assert "older" in json.loads(capsys.readouterr().out)["findings"][0]["value"]


def test_what_is_no_record_or_a_folder_without_any_is_refused(tmp_path, capsys):
    file = tmp_path / "x.json"
    for content in ("", "{}", "[]", '{"meshes": [{}]}'):
        file.write_text(content)
        assert "x.json is no flight record" in refusal(capsys, "doctor", file), content
    assert "no sherd-flight-*.json in" in refusal(capsys, "doctor", tmp_path)


def test_reading_loads_no_torch(tmp_path):
    write(tmp_path, 0, mesh(FORWARD))
    program = (
        "import sys; from sherd.cli.main import main; main(['doctor', sys.argv[1]]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True)
