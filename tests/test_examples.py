"""The programs in examples/ run, and print what their first lines promise."""

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from torch import distributed as dist

from tests.interop.clients import loss_after_six_steps
from tests.support.ranks import forked

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 120


def run_as_torchrun_would(path, words, rank, num_ranks, port):
    """In a process of its own: the environment that torchrun makes, then the program with its arguments `words`."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there already
    sys.argv[1:] = words
    sys.path.insert(0, str(path.parent))  # as Python does for a program
    runpy.run_path(str(path), run_name="__main__")


def run(name, folder, *words, num_ranks=2):
    """What each rank printed in this run. Forked from where torch is imported: torchrun would import it three times."""
    folder.mkdir(exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outputs = [folder / f"{rank}" for rank in range(num_ranks)]
    for output in outputs:
        output.unlink(missing_ok=True)
    processes = []
    try:
        for rank, output in enumerate(outputs):
            given = EXAMPLES / name, words, rank, num_ranks, store.port
            processes.append(forked.start(run_as_torchrun_would, *given, folder=folder, output=output))
        for process in processes:
            process.join(TIMEOUT_S)
        said = [output.with_suffix(".err").read_text() for output in outputs]
        assert [process.exitcode for process in processes] == [0] * num_ranks, "".join(said)
    finally:
        for process in processes:
            process.kill()
    return [output.read_text() for output in outputs]


def losses(text):
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", text)]


def test_a_ported_program_trains_on_shards(tmp_path):
    first, second = run("port_from_fsdp2.py", tmp_path)
    held = [int(re.search(r"holds (\d+) of", text)[1]) for text in (first, second)]
    (everyones,) = {int(re.search(r"of (\d+) parameters", text)[1]) for text in (first, second)}
    assert sum(held) == everyones
    assert losses(first)[-1] < losses(first)[0] / 2


@pytest.mark.slow
def test_a_program_ported_from_the_wrapper_trains_and_says_its_next_port(tmp_path):
    first, second = run("port_from_fsdp1.py", tmp_path)
    held = [int(re.search(r"holds (\d+) elements of 5 flat", text)[1]) for text in (first, second)]
    assert f"rank 0 could save {sum(held)} elements in 26 tensors" in first
    assert "rank 1 could save 0 elements" in second
    assert losses(first)[-1] < losses(first)[0] / 2
    assert "auto_shard(" in first
    assert "auto_shard(" not in second


@pytest.mark.slow
def test_a_model_starts_on_meta_and_allocates_its_shards_alone(tmp_path):
    for text in run("meta_device_start.py", tmp_path):
        before, after = map(int, re.findall(r"(\d+) bytes allocated", text))
        assert before == 0 < after
    assert losses((tmp_path / "0").read_text())[-1] < 5.0  # log(256) is 5.5


@pytest.mark.slow
def test_accumulated_gradients_are_the_same_reduced_once_or_often(tmp_path):
    first, _ = run("gradient_accumulation.py", tmp_path)
    assert first.count("micro-batches, the best of 5\n") == 2
    assert float(re.search(r"difference between the two: (\S+)", first)[1]) < 1e-6


@pytest.mark.slow
def test_one_rank_goes_on_where_two_stopped(tmp_path):
    first, second = run("save_and_reload.py", tmp_path)
    saved, reloaded = losses(first)
    assert saved == pytest.approx(reloaded, rel=1e-4)
    assert second == ""


@pytest.mark.slow
def test_one_rank_and_two_end_with_the_same_bits(tmp_path):
    both, alone = (run("reproducible.py", tmp_path, num_ranks=ranks)[0] for ranks in (2, 1))
    assert both.partition("norm")[1:] == alone.partition("norm")[1:]
    assert re.search(r"digest of all parameters [0-9a-f]{16}$", both, re.MULTILINE)


@pytest.mark.slow
def test_gradients_in_eight_bits_between_nodes_train_as_well_with_a_quarter_of_the_bytes(tmp_path):
    first, second = run("fewer_bits.py", tmp_path)
    usual, rounded = losses(first)
    assert rounded == pytest.approx(usual, rel=0.05)
    more, fewer = (int(found.replace(",", "")) for found in re.findall(r"([\d,]+) bytes of", first))
    assert fewer < 0.26 * more
    assert second == ""


@pytest.mark.slow
def test_a_flat_layout_trains_as_the_default_does_and_shows_its_memory(tmp_path):
    first, second = run("flat_layout.py", tmp_path)
    default, flat = losses(first)
    assert flat == pytest.approx(default, rel=1e-4)
    assert [re.search(r"the (\d+) elements", text)[1] for text in (first, second)] == ["900", "900"]
    assert sum(int(re.search(r"holds (\d+) of", text)[1]) for text in (first, second)) == 900
    assert re.search(r"^predicted peak of a step: \d+\.\d+ MiB, when ", first, re.MULTILINE)
    assert "optimizer state" in first
    assert losses(second) == []


@pytest.mark.slow
def test_muon_goes_on_with_whole_matrices_on_one_rank(tmp_path):
    first, second = run("muon.py", tmp_path)
    saved, ended, went_on = losses(first)
    assert ended < saved < 3.9  # log(50)
    assert went_on == pytest.approx(ended, rel=1e-4)
    assert "*.qkv.weight    12 x 8 x 32  ranks [0, 1]; nothing travels  (2 of them)" in first
    assert "head.weight     AdamW, since head is an output layer" in first
    assert second == ""


def test_the_command_in_an_examples_first_lines_works(tmp_path):
    """One of them as its user starts it, on torchrun."""
    name = "gradient_accumulation.py"
    (command,) = re.findall(r"^    (torchrun .*)$", (EXAMPLES / name).read_text(), re.MULTILINE)
    program, *arguments = command.split()
    assert program == "torchrun"
    assert arguments == ["--nproc-per-node", "2", f"examples/{name}"]
    # A port of its own, because the default one may be taken.
    process = forked.start(forked.torchrun, ["--standalone", *arguments], {}, folder=ROOT, output=tmp_path / "said")
    process.join(TIMEOUT_S)
    process.kill()
    assert process.exitcode == 0, (tmp_path / "said.err").read_text()
    assert "largest difference" in (tmp_path / "said").read_text()


@pytest.mark.slow
def test_torchrun_brings_a_training_back_after_a_rank_has_failed(tmp_path):
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "examples/elastic_restart.py"]
    given = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    process = forked.start(forked.torchrun, words, given, folder=EXAMPLES.parent, output=tmp_path / "said")
    process.join(TIMEOUT_S)
    process.kill()
    assert process.exitcode == 0, (tmp_path / "said.err").read_text()
    found = re.search(r"^began again at step 5, loss (\S+) at step 6$", (tmp_path / "said").read_text(), re.MULTILINE)
    assert float(found[1]) == pytest.approx(loss_after_six_steps(), rel=1e-4)


def test_an_example_is_short_and_says_how_to_run_it():
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) < 80, path
        starts = {"ray_train.py": "python", "elastic_restart.py": "torchrun --nproc-per-node 2 --max-restarts 1"}
        assert f"{starts.get(path.name, 'torchrun --nproc-per-node 2')} examples/{path.name}\n" in text, path
    assert [path.name for path in EXAMPLES.glob("recipes/*.py") if len(path.read_text().splitlines()) >= 120] == []
