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
from tests.support.versions import set_group_timeout
from tests.train.test_checkpoint import break_it, put

# The same command, started again and again


def begun(*words):
    """The step that the command goes on from; None if it starts."""
    resumed = configure(parse(["train", *words])).resumed
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
    with pytest.raises(InputError, match="holds no complete checkpoint"):  # it had one, so it does not begin again
        begun(*words)
    put(out, 2)
    assert begun(*words) == 2
    put(out, 5)
    assert begun(*words) == 5


# One folder for all


def told_by(action):
    try:
        action()
    except InputError as error:
        return str(error)


def on_ranks(shared, folders, tmp_path):
    rank = dist.get_rank()
    (tmp_path / folders[rank]).mkdir(exist_ok=True)
    return [
        told_by(lambda: ranks._require_seen(tmp_path / shared)),
        told_by(lambda: ranks._require_seen(tmp_path / folders[rank])),
        told_by(lambda: together(lambda: ranks._require_alike("a text", "ab"[rank], "give all the same"))),
    ]


def test_a_folder_or_text_that_machines_do_not_share_is_refused_by_all_ranks(world, tmp_path):
    (tmp_path / "shared").mkdir()
    found = world(2).run(on_ranks, "shared", ["here", "there"], tmp_path)
    assert found[0] == found[1]
    fine, unseen, unlike = found[0]
    assert fine is None
    assert unseen == "rank 1 does not see the folder of rank 0; --out must be one folder that all machines share"
    assert unlike == "rank 1 has a text b, but rank 0 a; give all the same"
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
        assert said.startswith(
            f"[rank {rank}] a collective of sherd train among ranks [0, 1] failed on rank {rank} with rank {1 - rank}"
        )
        assert "start them again from the last checkpoint" in said
        assert others == [None, None]
    processes.stop()  # their group is of no more use
