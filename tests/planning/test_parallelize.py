"""Plans lay models over other axes as they are told, and choose these axes where they help."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sherd._torch import TorchDispatchMode, all_gather_single, imagined_ranks, reduce_scatter_single
from sherd.cli.main import main
from sherd.errors import InputError, PolicyError
from sherd.tools.plan.operations import collective_of, is_communication
from sherd.tools.plan.plan import plan
from sherd.tools.simulate.settings import Mesh
from sherd.tools.simulate.timeline import Lane
from sherd.tools.simulate.work import Collective, RankGroup
from tests.planning.models import FIXED, LLAMA
from tests.planning.test_plan_command import FIXED as ALL_SETTINGS

WIDTH, HIDDEN, SAMPLES = 512, 2048, 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def perceptron(layers=6):
    with torch.device("meta"):
        return nn.Sequential(*(Layer() for _ in range(layers)))


def over_tp(model, tp):
    for layer in model:
        parallelize_module(layer, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def planned(mesh, **options):
    given = {"compute_dtype": None, "parallelize": {"tp": over_tp}, **FIXED, "micro_batch": SAMPLES, **options}
    return plan(perceptron(), mesh, torch.zeros(SAMPLES, WIDTH), **given)


def test_each_rank_computes_and_holds_its_part_and_calls_what_the_axis_needs():
    one, four = (planned({"dp": 8 // tp, "tp": tp}).prediction for tp in (1, 4))
    assert four.mesh == Mesh(2, tp=4)
    assert one.flops == 4 * four.flops
    shards = [each.timeline.peak.by_kind["shards"] for each in (one, four)]
    assert shards[0] == shards[1] == 4 * 6 * 2 * WIDTH * HIDDEN // 8
    calls = [each for each in four.timeline.spans if each.lane is Lane.MODEL]
    # One all-reduce in each layer's forward and one in its backward, but the first input has no gradient.
    assert [each.name for each in calls] == ["all-reduce"] * 11
    assert {each.nbytes for each in calls} == {4 * SAMPLES * WIDTH}
    assert not [each for each in one.timeline.spans if each.lane is Lane.MODEL]
    # Ranks of tp read the same samples.
    assert four.samples_per_second == pytest.approx(2 * SAMPLES / four.timeline.seconds)


def test_groups_lie_on_nodes_as_ranks_do():
    near = planned({"dp": 8, "tp": 4}, cluster="h100").prediction
    far = planned({"dp": 2, "tp": 16}, cluster="h100").prediction
    slow, fast = (
        max(span.end - span.start for span in each.timeline.spans if span.lane is Lane.MODEL) for each in (far, near)
    )
    assert slow > fast
    # Groups of tp lie within a node, or go through two; those of dp lie within a node in no case.
    assert set(near.sent) == set(far.sent) == {"within nodes", "across nodes"}


def test_an_axis_is_chosen_where_there_are_fewer_samples_than_ranks_and_not_where_it_only_costs():
    found = planned(8, samples=2 * SAMPLES, cluster="h100")
    assert found.settings.mesh == Mesh(2, tp=4)
    assert found.settings.micro_batches == 1
    with pytest.raises(PolicyError, match="it does not divide the 4 samples of a rank"):
        planned(8, samples=2 * SAMPLES, parallelize={})
    assert planned(8, cluster="h100").settings.mesh.tp == 1


def test_a_function_that_raises_is_told_in_one_line():
    def never(model, tp):
        raise ValueError("not over these\nranks")

    with pytest.raises(InputError, match=r"^the function for tp raised ValueError: not over these$"):
        planned({"dp": 2, "tp": 2}, parallelize={"tp": never})


def test_models_of_transformers_are_laid_by_their_own_plan(tmp_path, capsys):
    file = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 96}
    file.write_text(json.dumps(LLAMA | sizes))
    words = ["--context", "32", *ALL_SETTINGS, "--json"]
    found = []
    for mesh in ("dp=8", "dp=2,tp=4"):
        assert main(["plan", str(file), "--mesh", mesh, *words]) == 0
        found.append(json.loads(capsys.readouterr().out))
    whole, cut = found
    assert cut["settings"]["mesh"]["tp"] == 4
    assert "model parallel" in cut["exposed_seconds"]
    assert cut["peak"]["by_kind"]["activations"] < 0.7 * whole["peak"]["by_kind"]["activations"]


def test_a_factory_may_say_how_its_model_is_laid(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made.py").write_text(
        "import torch\nfrom tests.planning.test_parallelize import over_tp, perceptron\n"
        "def make():\n    return perceptron(), torch.zeros(16, 512), lambda m, x: m(x).sum(), {'tp': over_tp}\n"
        "def wrong():\n    return perceptron(), torch.zeros(16, 512), lambda m, x: m(x).sum(), {'ep': over_tp}\n"
    )
    assert main(["plan", "made.py:make", "--mesh", "dp=4,tp=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["mesh"]["tp"] == 2
    assert main(["plan", "made.py:wrong"]) == 2
    assert "a dict of functions by the axes cp and tp" in capsys.readouterr().err


# torch 2.13 has renamed them.
gathered = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
scattered = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


class Listening(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.heard = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if is_communication(func):
            self.heard.append(collective_of(func, args, result))
        return result


def test_collectives_of_torch_are_read_with_their_bytes_and_ranks():
    with imagined_ranks(16):
        group = dist.new_group([0, 4, 8, 12])
        part, whole = torch.zeros(8, device="meta"), torch.zeros(32, device="meta")
        listening = Listening()
        with listening:
            dist.all_reduce(part, group=group)
            dist.all_gather([torch.empty_like(part) for _ in range(4)], part, group=group)
            all_gather_single(whole, part, group=group)
            reduce_scatter_single(part, whole, group=group)
            dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
            dist.broadcast(part, 0, group=group)
            gathered(part, 0, group) + 1
            scattered(whole, "sum", 0, group) + 1
            functional.all_reduce(part, "sum", group) + 1
            dist.all_reduce(part, group=dist.new_group([0]))
    ranks = RankGroup(4, 4)
    said = [each for each in listening.heard if each is not None]
    assert said == [
        Collective("all-reduce", 32, ranks),
        Collective("all-gather", 128, ranks),
        Collective("all-gather", 128, ranks),
        Collective("reduce-scatter", 128, ranks),
        Collective("all-to-all", 128, ranks),
        Collective("broadcast", 32, ranks),
        Collective("all-gather", 128, ranks),
        Collective("reduce-scatter", 128, ranks),
        Collective("all-reduce", 32, ranks),
    ]
