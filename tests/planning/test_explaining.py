"""An out of memory error says what held the memory and when, and the changes that it names fit."""

import re
import traceback
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import _get_current_dispatch_mode

import sherd
from bench.peak import LiveBytes
from sherd._torch import imagined_ranks
from sherd.errors import ClusterError, MemoryLimitError, ModuleError, PolicyError, StateError, UnsupportedError
from sherd.policy import MixedPrecisionPolicy, PrefetchPolicy
from sherd.tools.plan.explaining import plain_copy
from sherd.tools.plan.tracing import traced
from sherd.units import in_bytes
from tests.planning.models import Calls, next_token
from tests.planning.tied_stack import LENGTH, SAMPLES, VOCABULARY, WIDTH, Stack, composed, tokens, wrapped
from tests.support.meshes import mesh_of
from tests.support.models import Block


def step(model, optimizer, micro_batch=SAMPLES):
    for _ in range(SAMPLES // micro_batch):
        next_token(model, tokens(micro_batch)).backward()
    optimizer.step()
    optimizer.zero_grad()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def notes_of(error):
    return "\n".join(getattr(error, "__notes__", ()))


def in_turn(model, optimizer, calls):
    for call in calls:
        call(model, optimizer)


def error_of(model, optimizer, *calls, kind=torch.OutOfMemoryError, **options):
    """The error of these calls in turn, with its note."""
    with pytest.raises(kind) as raised, sherd.explain_memory(model, optimizer, **options):
        in_turn(model, optimizer, calls)
    return raised.value


def on_second(run, *args):
    """What `run` returns on the second of two ranks, of which the first is imagined."""
    with imagined_ranks(2, 1):
        return run(*args)


# A limit


def peak_and_failure(make):
    """A settled step as it is traced, and the error under a limit of one byte less than its peak."""
    model = make()
    optimizer = adamw(model)
    for _ in range(2):
        step(model, optimizer)
    with traced(model, optimizer) as trace:
        step(model, optimizer)
    peak = trace.timeline.peak
    with sherd.explain_memory(model, optimizer, limit=peak.nbytes):
        in_turn(model, optimizer, [step, step])
    error = error_of(model, optimizer, step, kind=MemoryLimitError, limit=peak.nbytes - 1)
    return peak, str(error), notes_of(error)


def held_in(said):
    """Kinds of memory and how much of each is said to be held."""
    return dict(re.findall(r"^  (\w[\w ]*?) {2,}([\d.,]+ \w+)", said, re.MULTILINE))


MAKES = {
    "composed": composed,
    "checkpoints": partial(composed, checkpoints=True),
    "kept": partial(composed, reshard_after_forward=False),
    "bfloat16": partial(composed, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "wrapper": wrapped,
    "wrapper, flat parameters": partial(wrapped, False),
}


@pytest.mark.parametrize("way", MAKES)
def test_the_limit_is_exact_and_the_error_says_what_is_held(world, way):
    for peak, said, note in world(2).run(peak_and_failure, MAKES[way]):
        assert said.splitlines()[0].endswith(
            f"{in_bytes(peak.nbytes)} are alive {peak.moment}, more than the limit of {in_bytes(peak.nbytes - 1)}"
        )
        assert held_in(said) == {kind: in_bytes(nbytes) for kind, nbytes in peak.by_kind.items()}
        assert "blocks.0 " in said
        assert note.startswith("explained by sherd: what would fit")


SETTINGS = {
    "blocks computed again": {"checkpoints": True},
    "freed after forward": {"reshard_after_forward": True},
    "kept for backward": {"reshard_after_forward": False},
    "0 prefetched": {"prefetch_policy": PrefetchPolicy(0, 0)},
    "1 prefetched": {"prefetch_policy": PrefetchPolicy(1, 1)},
}


def applied(make, share, **options):
    """The changes that are named under a limit of `share` of the peak, after all of them have run under it."""
    model = make(**options)
    optimizer = adamw(model)
    step(model, optimizer)
    with traced(model, optimizer) as trace:
        step(model, optimizer)
    limit = int(share * trace.timeline.peak.nbytes)
    note = notes_of(error_of(model, optimizer, step, kind=MemoryLimitError, limit=limit))
    del model, optimizer, trace
    changes = re.findall(r"^  (.+): saves (.+), (.+) (?:longer|shorter)$", note, re.MULTILINE)
    for change, saved, _ in changes:
        assert not saved.startswith("-")
        more, size = dict(options), SAMPLES
        for part in change.split(" and "):
            samples = re.fullmatch(r"[\d,]+ micro-batch(?:es)? of (\d+) samples?", part)
            blocks = re.fullmatch(r"(\d+)% of blocks computed again", part)
            if samples:
                size = int(samples[1])
            elif blocks:
                more["checkpoints"] = int(blocks[1]) / 100
            else:
                more |= SETTINGS[part]
        model = make(**more)
        optimizer = adamw(model)
        with LiveBytes(), sherd.explain_memory(model, optimizer, limit=limit):
            for _ in range(3):
                step(model, optimizer, size)
        del model, optimizer
    return [change for change, _, _ in changes], note


@pytest.mark.values
@pytest.mark.parametrize("make", [composed, wrapped])
@pytest.mark.parametrize("share", [0.95, 0.75, 0.5])
def test_changes_that_are_named_fit(world, make, share):
    for changes, _ in world(2).run(applied, make, share):
        assert 1 <= len(changes) <= 3
        assert any("micro-batch" in change for change in changes)
        assert share < 0.7 or any("blocks computed again" in change for change in changes)


class WithStates(Stack):
    """Runs with batches of one size: it has a state of each sample."""

    def __init__(self, checkpoints=False):
        super().__init__(checkpoints)
        self.register_buffer("states", torch.zeros(SAMPLES, LENGTH, WIDTH))

    def forward(self, tokens):
        return super().forward(tokens) + self.states.view(len(tokens), LENGTH, WIDTH).sum()


def with_states(checkpoints=False, **options):
    torch.manual_seed(0)
    return sherd.fully_shard(WithStates(checkpoints), **options)


def test_only_changes_that_the_model_runs_with_are_named_and_none_where_nothing_fits(world):
    for changes, _ in world(2).run(applied, composed, 0.98, reshard_after_forward=False):
        assert "freed after forward" in changes
    for changes, _ in world(2).run(applied, with_states, 0.9):
        assert any("computed again" in change for change in changes)
        assert not any("micro-batch" in change for change in changes)
    for changes, note in world(2).run(applied, composed, 0.3):
        assert changes == []
        assert note.startswith("explained by sherd: no other settings that were tried fit; now: 2 ranks, ")


def below_what_rests():
    """The notes under a limit that shards, gradients and optimizer state alone exceed: in the first forward, before it,
    and after a step; and how much each of the three is."""
    found = []
    for before in (lambda *_: None, lambda *_: torch.zeros(3), step):
        model = composed()
        optimizer = adamw(model)
        if before is step:
            step(model, optimizer)
        shards = sum(each.to_local().nbytes for each in model.parameters())
        error = error_of(model, optimizer, before, step, kind=MemoryLimitError, limit=2 * shards)
        found.append(notes_of(error))
    return found, shards


def with_muon(make, limit):
    """The note of a step with Muon, what rests, and the bytes of its state."""
    model = make()
    optimizer = sherd.Muon(model)
    step(model, optimizer)
    state = sum(
        (each.to_local() if hasattr(each, "to_local") else each).nbytes
        for of_one in optimizer.state.values()
        for each in of_one.values()
        if each.ndim
    )
    error = error_of(model, optimizer, step, kind=MemoryLimitError, limit=limit)
    return notes_of(error), state


def test_the_state_of_muon_is_a_momentum_of_matrices():
    """AdamW's would be twice as large."""
    for make in (composed, partial(wrapped, use_orig_params=False)):
        note, state = on_second(with_muon, make, 1000)
        assert f"{in_bytes(state)} of optimizer state" in note
        assert "no more can be said" not in note


def test_a_limit_below_what_rests_is_said_with_the_cheapest_change():
    notes, shards = on_second(below_what_rests)
    for note in notes:
        said = f"shards, gradients and optimizer state alone take {in_bytes(4 * shards)}, more than the limit:"
        assert said in note.removeprefix("explained by sherd: ").splitlines()
        assert f"{in_bytes(2 * shards)} of optimizer state" in note
        assert "  the cheapest change: shard over 4 ranks at least; now there are 2 to shard over" in note
        assert "no more can be said" not in note


# An error of torch's


def failing(make, where):
    """The error, with its note, of a step that fails in a place, and that of the step after it."""
    model = make()
    optimizer = adamw(model)
    step(model, optimizer)
    found = model.module if isinstance(model, sherd.FullyShardedDataParallel) else model
    inner = found.blocks[2]
    inner = getattr(inner, "module", inner)

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    before = [list(model._forward_pre_hooks), list(optimizer._optimizer_step_post_hooks)]
    if where == "forward":
        hook = inner.down.register_forward_pre_hook(fail)
    elif where == "backward":
        hook = inner.down.register_forward_hook(lambda *given: given[-1].register_hook(fail) and None)
    else:
        hook = optimizer.register_step_pre_hook(fail)
    error = error_of(model, optimizer, step)
    hook.remove()
    assert before == [list(model._forward_pre_hooks), list(optimizer._optimizer_step_post_hooks)]
    optimizer.zero_grad()
    with sherd.explain_memory(model, optimizer):
        step(model, optimizer)
    return str(error), notes_of(error)


WHERE = {"forward": "forward of blocks.2", "backward": "backward of blocks.2", "optimizer": "optimizer"}


@pytest.mark.values
@pytest.mark.parametrize("make", [composed, wrapped, partial(wrapped, False), partial(composed, checkpoints=True)])
@pytest.mark.parametrize("where", WHERE)
def test_an_error_of_torch_goes_on_with_a_note(make, where):
    said, note = on_second(failing, make, where)
    assert said == "CUDA out of memory. Tried to allocate 20.00 MiB"
    lines = note.splitlines()
    assert lines[0] == f"explained by sherd: out of memory in {WHERE[where]}"
    assert lines[1].startswith("predicted to be alive then: ")
    assert {"optimizer state", "shards"} < held_in(note).keys()
    assert any(line.startswith("what would fit") for line in lines)
    assert re.search(r"micro-batch(?:es)? of \d+ samples?: saves ", note)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_is_encoded_has_the_name_of_its_codec(where):
    policy = sherd.CommPolicy(gather="int8")
    _, note = on_second(failing, partial(composed, comm_policy=policy), where)
    assert re.search(r"^  gathered rows \(int8\) +[\d.,]+ \w+", note, re.MULTILINE), note


def run_out(*_):
    raise torch.OutOfMemoryError("no room")


def alone(path):
    """Rank 0 runs out of memory where it needs no other rank. The other one has no part in anything until then."""
    model = composed()
    optimizer = adamw(model)
    step(model, optimizer)
    store = dist.FileStore(path, 2)
    if dist.get_rank():
        step(model, optimizer)
        store.wait(["explained"])
        return ""
    optimizer.register_step_pre_hook(run_out)
    error = error_of(model, optimizer, step)
    store.set("explained", "yes")
    return "".join(traceback.format_exception(error))


def test_an_error_of_one_rank_is_explained_without_the_others_and_its_traceback_shows_the_note(world, tmp_path):
    shown, other = world(2).run(alone, str(tmp_path / "store"))
    assert other == ""
    assert "OutOfMemoryError: no room\nexplained by sherd: out of memory in optimizer\n" in shown
    assert "what would fit" in shown


def note_of(make, run, kind=torch.OutOfMemoryError, optimizer=adamw, **options):
    """The note of the error that `run(model)` raises in the second step."""

    def first_step(model, optimizer):
        model(tokens()).sum().backward()
        optimizer.step()

    model = make()
    return notes_of(error_of(model, optimizer(model), first_step, lambda *_: run(model), kind=kind, **options))


def ends_in_forward(model):
    model.blocks[1].register_forward_pre_hook(run_out)
    model(tokens=tokens(4), scale=torch.ones(1, requires_grad=True))


def reading():
    """Its forward needs values."""
    return sherd.fully_shard(nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Calls(lambda x: x if x.sum() > 0 else -x)))


class Around(nn.Module):
    """A root without parameters of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Embedding(VOCABULARY, WIDTH), *(Block(WIDTH) for _ in range(3))])

    def forward(self, tokens, scale=1):
        x = tokens
        for block in self.blocks:
            x = block(x)
        return x * scale


def bare_root():
    model = Around()
    for block in model.blocks:
        sherd.fully_shard(block)
    return sherd.fully_shard(model)


def checkpointed_by_torch():
    model = Stack()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = sherd.fully_shard(checkpoint_wrapper(block))
    return sherd.fully_shard(model)


def kinds_of_notes():
    def bad_loss(output):
        raise ValueError("no\nloss")

    def cause(model):
        try:
            run_out()
        except torch.OutOfMemoryError as error:
            raise RuntimeError("something else") from error

    found = {
        "keywords": note_of(composed, ends_in_forward),
        "loss": note_of(composed, ends_in_forward, loss=lambda output: output.float().mean(), cluster="h100"),
        "a loss that fails": note_of(composed, ends_in_forward, loss=bad_loss),
        "a cluster that is not there": note_of(composed, ends_in_forward, cluster="h1000"),
        "values": note_of(reading, run_out),
        "replicas": note_of(lambda: composed(mesh=mesh_of((2, 1))), ends_in_forward),
        "bare root": note_of(bare_root, ends_in_forward),
        "checkpoints": note_of(checkpointed_by_torch, run_out),
        "of the CPU": note_of(composed, lambda model: torch.empty(1 << 60), RuntimeError),
        "SGD": note_of(composed, ends_in_forward, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)),
        "runs": note_of(partial(composed, placement=sherd.Flat()), ends_in_forward),
        "not on the error that it has caused": note_of(composed, cause, RuntimeError),
    }
    model = composed()
    found["before the first forward"] = notes_of(error_of(model, adamw(model), run_out))
    return found


def test_notes_of_many_models():
    found = on_second(kinds_of_notes)
    for way in ("keywords", "loss", "replicas", "bare root", "SGD", "runs"):
        assert "out of memory in forward of blocks.1\n" in found[way], way
        assert re.search(r"micro-batch(es)? of 2 samples: saves", found[way]), way
    assert "2 replicas, " in found["replicas"]
    assert "blocks computed again, as the model does, shards" in found["checkpoints"]
    assert "explained by sherd: out of memory in the step\n" in found["of the CPU"]
    assert "optimizer state" not in found["SGD"]
    assert found["not on the error that it has caused"] == ""
    said = "explained by sherd: no more can be said: "
    assert found["a loss that fails"] == f"{said}InputError: the loss does not run without values: no"
    assert found["a cluster that is not there"].startswith(f"{said}ClusterError: cannot read the cluster")
    assert found["values"].startswith(f"{said}InputError: 1 (Calls) does not run without values")
    assert found["before the first forward"] == f"{said}StateError: the model has not run in here yet"


def uses():
    model = composed()
    optimizer = adamw(model)
    with pytest.raises(ModuleError, match="explain_memory expects"), sherd.explain_memory(nn.Linear(2, 2), optimizer):
        pass
    for limit, error in ((0, PolicyError), ("much", ClusterError), ("0 GiB", ClusterError), (1.5, PolicyError)):
        with pytest.raises(error, match="limit"), sherd.explain_memory(model, optimizer, limit=limit):
            pass
    with pytest.raises(ValueError, match="lunch") as raised, sherd.explain_memory(model, optimizer, limit="1 GiB"):
        raise ValueError("lunch")
    assert notes_of(raised.value) == ""
    refused = pytest.raises(StateError, match="tracked already")
    with sherd.explain_memory(model, optimizer, limit="1 GiB"), refused, traced(model, optimizer):
        pass
    with traced(model, optimizer), sherd.explain_memory(model, optimizer):
        step(model, optimizer)
    with sherd.explain_memory(model, optimizer):  # nothing is followed without a limit
        assert _get_current_dispatch_mode() is None
        assert model._sherd_runtime.tape.observer is None
    # One inside of another one: the error is explained once, and by the one whose limit it was.
    notes = []
    for outer, inner in ((None, None), (None, "2.5 MiB"), ("2.5 MiB", None)):
        optimizer.zero_grad()
        with (
            pytest.raises((MemoryError, torch.OutOfMemoryError)) as raised,
            sherd.explain_memory(model, optimizer, limit=outer),
            sherd.explain_memory(model, optimizer, limit=inner),
        ):
            in_turn(model, optimizer, [step, run_out])
        notes += [raised.value.__notes__]
    # A program may catch it, and go on with less.
    with sherd.explain_memory(model, optimizer, limit="2 MiB"):
        with pytest.raises(MemoryLimitError):
            step(model, optimizer)
        optimizer.zero_grad()
        step(model, optimizer, 1)
        with pytest.raises(MemoryLimitError):
            step(model, optimizer)
    assert len(model._forward_pre_hooks) == len(composed()._forward_pre_hooks)
    assert not optimizer._optimizer_step_post_hooks
    assert torch.UntypedStorage.resize_.__name__ != "resize_and_tell"
    return notes


def test_blocks_in_blocks_and_wrong_uses():
    notes = on_second(uses)
    assert [len(each) for each in notes] == [1, 1, 1]
    assert "out of memory in" in notes[0][0]
    assert all(each[0].startswith("explained by sherd: what would fit") for each in notes[1:])


def forms(model):
    return {name: (each.shape, each.dtype) for name, each in model.named_parameters()}


@pytest.mark.parametrize("make", [composed, wrapped, partial(wrapped, False)])
def test_a_plain_copy_is_the_model_before_it_was_sharded(make):
    with imagined_ranks(2):
        plain, before = plain_copy(make()), Stack()
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in before.named_modules()]
    assert forms(plain) == forms(before)
    assert plain.head.weight is plain.embedding.weight
    assert {type(each) for each in plain.modules()} == {type(each) for each in before.modules()}
    assert all(each.is_meta for each in plain.parameters())
    assert plain(tokens().to("meta")).shape == (SAMPLES, LENGTH, VOCABULARY)
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in plain.modules())


def test_a_model_that_holds_a_process_group_is_named():
    with imagined_ranks(2):
        model = composed()
        model.blocks[0].ring = dist.group.WORLD
        with pytest.raises(UnsupportedError, match=r"a Block of the model holds what cannot be copied: .*ProcessGroup"):
            plain_copy(model)
