"""The examples for clusters start on each machine what they say, and what a run needs to go on by itself."""

import re

from torch.distributed.run import config_from_args, parse_args

from sherd.cli.words import MANY_MACHINES
from tests.machines.examples import KUBERNETES, PYTORCHJOB, SLURM, kubernetes, kubernetes_documents, slurm

TRAIN = ["-m", "sherd", "train", "--config", "configs/small.toml"]


def torchrun(number, address, port, out):
    """What a machine is to start."""
    place = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "8"]
    meeting = ["--master-addr", address, "--master-port", port]
    return ["torchrun", *place, *meeting, *TRAIN, "--out", out, "--resume-or-start"]


def test_slurm_starts_one_torchrun_a_machine_which_meet_at_the_first(tmp_path):
    code, calls = slurm(tmp_path / "stubs")
    assert code == 0
    assert calls == [torchrun(number, "node7", "20041", "/shared/runs/41") for number in (0, 1)]


def test_a_slurm_job_that_failed_starts_itself_again_ten_times(tmp_path):
    for restarts, starts_again in ((0, True), (9, True), (10, False)):
        code, calls = slurm(tmp_path / f"stubs{restarts}", code=1, restarts=restarts)
        assert code == 1
        assert (calls[2:] == [["scontrol.py", "requeue", "41"]]) is starts_again, restarts
        assert len(calls) == 2 + starts_again, restarts


def test_kubernetes_starts_the_same_in_each_pod(tmp_path):
    calls = kubernetes(tmp_path / "stubs")
    assert calls == [torchrun(number, "sherd-0.sherd", "29500", "/runs/1") for number in (0, 1)]


def test_the_pods_find_one_another_by_the_names_that_the_service_gives():
    service, job = kubernetes_documents()
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["parallelism"] == job["spec"]["completions"]
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "OnFailure"
    volumes = {each["name"] for each in job["spec"]["template"]["spec"]["volumes"]}
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == volumes


def test_the_operators_environment_has_torchrun_start_the_same_in_each_pod(monkeypatch):
    (job,) = kubernetes_documents(PYTORCHJOB)
    pods = job["spec"]["pytorchReplicaSpecs"]
    assert pods["Master"]["template"] == pods["Worker"]["template"]
    (container,) = pods["Master"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"  # the operator gives its environment to the one of this name
    num_pods = pods["Master"]["replicas"] + pods["Worker"]["replicas"]
    assert container["command"][0] == "torchrun"
    for number in range(num_pods):
        # What version 1.9 of the operator sets, in pkg/controller.v1/pytorch/envvar.go and master.go.
        for name, value in {
            "NNODES": num_pods,
            "NODE_RANK": number,
            "NPROC_PER_NODE": job["spec"]["nprocPerNode"],
            "MASTER_ADDR": f"{job['metadata']['name']}-master-0",
            "MASTER_PORT": 23456,
        }.items():
            monkeypatch.setenv(f"PET_{name}", str(value))
        found = torchruns([*container["command"][1:], *container["args"]])
        assert found == torchruns(torchrun(number, "sherd-master-0", "23456", "/runs/1")[1:]), number


def torchruns(words):
    """What torchrun understands: its options, the program, and the program's words."""
    options, program, rest = config_from_args(parse_args(words))
    return {**vars(options), "run_id": None, "log_line_prefix_template": None, "logs_specs": None}, program, rest


def test_the_help_shows_the_same_command():
    words = MANY_MACHINES.split()
    options = [word for word in torchrun(0, "", "", "") if word.startswith("-") and word not in ("--config",)]
    assert [word for word in words if word.startswith("-")] == options[:-1]
    assert words[words.index("-m") : words.index("-m") + 3] == TRAIN[:3]


def test_an_example_says_how_it_is_started_and_is_short():
    for path in (SLURM, KUBERNETES, PYTORCHJOB):
        text = path.read_text()
        assert re.search(rf"^#     (sbatch|kubectl apply -f) examples/{path.name}$", text, re.MULTILINE), path.name
        assert len(text.splitlines()) < 90, path.name
