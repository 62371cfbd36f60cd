"""Each `sherd ...` command that a document names can be given as it stands, on the ranks it names and on others."""

import itertools
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from sherd.cli.words import configure, parse, require_fit
from sherd.train.config import Config
from sherd.train.device import default_ranks, require_ranks
from sherd.train.loop import Trainer
from sherd.train.text import read_corpus
from tests.train.test_checkpoint import put
from tests.train.test_loop import grid

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*/*.md"))]
BLOCK = re.compile(r"^```\w*\n(.*?)^```$|((?:^    [^\n]*\n)+)", re.MULTILINE | re.DOTALL)
STARTED_BY_TORCHRUN = re.compile(r"^torchrun\s+(?P<options>.*?)\s*-m\s+(?=sherd )")


def commands():
    """(document, torchrun's options, the words behind `sherd`) of each command in a block of code."""
    for document in DOCUMENTS:
        for fenced, indented in BLOCK.findall(document.read_text()):
            for line in (fenced or indented).replace("\\\n", " ").splitlines():
                start = STARTED_BY_TORCHRUN.match(line := line.strip().removeprefix("$ "))
                command = line[start.end() :] if start else line
                if re.match(r"sherd (--)?[a-z]", command):
                    _, *words = shlex.split(command, comments=True)
                    words = [word for word in words if word != "..."]
                    yield document.name, start["options"] if start else None, words


COMMANDS = list(commands())
TRAIN = [each for each in COMMANDS if each[2][:1] == ["train"]]


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A folder with what the commands name: configs, texts, and a run that was stopped."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "my_texts").mkdir()
    (tmp_path / "my_texts" / "one.txt").write_text("some words, and some more of them. " * 1000)
    put(tmp_path / "runs" / "1", 3, config=Config().tree())
    (tmp_path / "runs" / "1" / "config.toml").write_text("")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def gpus(monkeypatch):
    """Sets how many GPUs torch seems to see."""

    def see(number):
        found = torch.device("cuda") if number else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)
        monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)

    return see


def asked_for(options, args, config):
    """How many ranks a command is for, on all machines together."""
    if options is None:
        return args.nproc or default_ranks(config)
    numbers = {name: int(number) for name, number in re.findall(r"--(nnodes|nproc-per-node)[ =](\d+)", options)}
    return numbers.get("nnodes", 1) * numbers.get("nproc-per-node", 8)


def test_there_are_commands():
    assert {"README.md", "train.md", "machines.md"} <= {document for document, *_ in TRAIN}


def test_every_command_is_one():
    for command in COMMANDS:
        parse(command[2])


@pytest.mark.usefixtures("there")
def test_every_command_gets_as_far_as_its_ranks(gpus):
    for _, options, words in TRAIN:
        args = parse(words)
        config = configure(args).config
        require_fit(args, config)
        for number in (1, 4, 8) if config.cuda_graph else (0, 1, 4, 8):
            gpus(number)
            num_ranks = asked_for(options, args, config)
            if not number or num_ranks <= number:
                require_ranks(num_ranks, config)


@pytest.mark.usefixtures("there")
def test_every_plain_command_fits_any_usual_number_of_ranks(gpus):
    plain = [words for _, options, words in TRAIN if options is None and "--mesh" not in words]
    for words, num_ranks in itertools.product(plain, (1, 4, 8)):
        gpus(num_ranks)
        args = parse([*words, "--nproc", str(num_ranks)])
        config = configure(args).config
        require_fit(args, config)
        require_ranks(num_ranks, config)


def first_step(config):
    trainer = Trainer(config, read_corpus(config.data, config.context), grid(config))
    return trainer.step().loss


@pytest.mark.front("`sherd train`")
@pytest.mark.usefixtures("there")
def test_a_command_of_the_readme_takes_a_step_on_four_ranks(world, tmp_path):
    words = ["train", "--nproc", "4", "lr=0.001"]
    assert ("README.md", None, words) in COMMANDS
    config = configure(parse([*words, "--data", str(tmp_path / "my_texts"), "layers=1"])).config
    (loss,) = set(world(4).run(first_step, config))
    assert loss == pytest.approx(math.log2(256), abs=0.3)
