"""What `sherd train` checks and chooses before ranks on several machines begin."""

import os

import pytest
import torch
from torch import distributed as dist

from sherd.cli.words import configure, parse
from sherd.errors import CommError
from sherd.train import rank as ranks
from sherd.train.config import InputError
from sherd.train.ranks import apart, lost_touch, take_the_way_to_the_others, together
from sherd.train.saved import newest
from tests.support.versions import set_group_timeout
from tests.train.test_checkpoint import break_it, put

# The same command, started again and again


def begun(*words):
    """The step that the command goes on from; None if it starts."""
    _, resumed = configure(parse(["train", *words]))
    return resumed and resumed.step


def test_resume_or_start_needs_a_folder_starts_where_no_save_has_ended_and_else_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="--resume-or-start needs the --out"):
        begun("--resume-or-start")
    out = tmp_path / "run"
    words = ("--out", str(out), "--resume-or-start")
    assert begun(*words) is None
    out.mkdir()
    (out / "metrics.jsonl").write_text("")  # it ended before its first checkpoint
    assert begun(*words) is None
    break_it(put(out, 3), "never finished")
    assert begun(*words) is None
    break_it(put(out, 4), "missing file")
    with pytest.raises(InputError, match="holds no whole checkpoint"):  # it had a checkpoint, so it does not begin anew
        begun(*words)
    put(out, 2)
    assert begun(*words) == 2
    put(out, 5)
    assert begun(*words) == 5


# One folder for all


def told_by(action):
    try:
        together(action)
    except InputError as error:
        return str(error)


def on_ranks(shared, folders, steps, tmp_path):
    rank = dist.get_rank()
    checkpoint = newest(put(tmp_path / str(steps[rank]), steps[rank]).parent.parent) if steps[rank] else None
    (tmp_path / folders[rank]).mkdir(exist_ok=True)
    return [
        told_by(lambda: ranks._seen_by_all(tmp_path / shared)),
        told_by(lambda: ranks._seen_by_all(tmp_path / folders[rank])),
        told_by(lambda: ranks._same_start(checkpoint)),
    ]


def test_a_folder_that_machines_do_not_share_is_refused_by_all_ranks(world, tmp_path):
    (tmp_path / "shared").mkdir()
    found = world(2).run(on_ranks, "shared", ["here", "there"], [4, 0], tmp_path)
    assert found[0] == found[1]
    fine, unseen, unlike = found[0]
    assert fine is None
    assert unseen.startswith("rank 1 does not see what rank 0 has written to")
    assert unseen.endswith("--out must be one folder that all machines share")
    assert unlike.startswith("rank 1 would go on after step 0, but rank 0 after step 4; --out must be one folder")
    assert [list((tmp_path / name).iterdir()) for name in ("shared", "here", "there")] == [[], [], []]


# The way, and when it is lost


def test_the_interface_is_chosen_only_where_there_is_something_to_choose(monkeypatch):
    for environment, chosen in (
        ({"GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "192.0.2.1"}, None),
        ({"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, None),
        ({"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "no such name"}, None),
        ({"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1", "GLOO_SOCKET_IFNAME": "mine"}, "mine"),
        ({}, None),
    ):
        monkeypatch.setattr(os, "environ", environment.copy())
        take_the_way_to_the_others()
        assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen, environment
    monkeypatch.setattr(os, "environ", {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1"})
    monkeypatch.setattr("sherd.train.ranks.interface_to", {"192.0.2.1": "eth7"}.get)
    take_the_way_to_the_others()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_ranks_that_cannot_meet_are_told_which_way_they_tried(monkeypatch):
    monkeypatch.setattr(os, "environ", {"MASTER_ADDR": "one", "MASTER_PORT": "29500", "RANK": "3"})
    told = str(apart(RuntimeError("Connection refused")))
    assert told.startswith("[rank 3] the ranks did not all meet at one:29500: Connection refused.")
    assert "GLOO_SOCKET_IFNAME" in told


def lost():
    if dist.get_rank() == 0:
        set_group_timeout(torch.distributed.default_pg_timeout / 3600)
        with pytest.raises(RuntimeError) as late:
            dist.all_reduce(torch.ones(1))
        named = lost_touch(late.value)
    else:
        with pytest.raises(RuntimeError) as closed:
            dist.recv(torch.ones(1), 0, tag=5)
        named = lost_touch(closed.value)
    others = (RuntimeError("shapes differ"), CommError("named before"))
    return type(named).__name__, str(named), [lost_touch(each) for each in others]


def test_what_torchs_own_collectives_raise_is_named_and_other_errors_are_left_alone(world):
    processes = world(2)
    for rank, (kind, said, others) in enumerate(processes.run(lost)):
        assert kind == "CommError"
        assert said.startswith(f"[rank {rank}] lost touch with rank {1 - rank}: ")
        assert "--resume" in said
        assert others == [None, None]
    processes.stop()  # their group is of no more use
