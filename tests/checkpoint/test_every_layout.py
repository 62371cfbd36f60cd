"""A checkpoint of one layout on some ranks loads under every other layout on every other number of ranks.

One checkpoint per number of saving ranks holds the model and its optimizer in all layouts. A loading rank keeps one
model per layout and turns them: in turn t, layout number i loads what layout number i + t has saved. Two numbers of
ranks meet in some of the turns, and each number of ranks meets with one of the others in each turn.
"""

import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.checkpoint.layouts import LAYOUTS, differences, model_in, optimizer_of, state_of, train, whole
from tests.support.suites import part

WORLDS = (1, 2, 3, 4)
SAVED, GONE_ON = range(1), range(1, 2)
# What this number of ranks has trained, every number of ranks trains on.
GOING_ON_FROM = 3


def dcp_state_of(model, optimizer):
    values, states = get_state_dict(model, optimizer)
    return {"model": values, "optimizer": states}


def save_all(folder):
    """Train a step in every layout and save; note the whole values, and the losses of the steps that follow."""
    trained = {}
    for layout in LAYOUTS:
        model = model_in(layout)
        optimizer = optimizer_of(model)
        train(model, optimizer, SAVED)
        trained[layout] = model, optimizer
    dcp.save({layout: dcp_state_of(*each) for layout, each in trained.items()}, checkpoint_id=folder)
    expected = {layout: whole(state_of(*each)) for layout, each in trained.items()}
    going_on = trained if dist.get_world_size() == GOING_ON_FROM else {}
    losses = {layout: train(*each, GONE_ON) for layout, each in going_on.items()}
    if dist.get_rank() == 0:
        torch.save((expected, losses), f"{folder}/expected.pt")


@pytest.fixture(scope="module")
def folders(world, tmp_path_factory):
    """By number of ranks, where they have saved."""
    made = {}
    for num_ranks in WORLDS:
        made[num_ranks] = str(tmp_path_factory.mktemp(f"of_{num_ranks}"))
        world(num_ranks).run(save_all, made[num_ranks], timeout=240)
    return made


class Remembering(dcp.FileSystemReader):
    """Opens what it reads once, and as its own: `torch.load` of each item in each turn would take most of the time."""

    def __init__(self, folder):
        super().__init__(folder)
        self._folder = Path(folder)
        self._metadata = None
        self._items = {}

    def read_metadata(self, *args, **kwargs):
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata

    def read_data(self, plan, planner):
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._stored(item)))
                continue
            part = self._stored(item)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            assert target.shape == part.shape
            planner.commit_tensor(item, target.copy_(part))
        done = torch.futures.Future()
        done.set_result(None)
        return done

    def _stored(self, item):
        info = self._metadata.storage_data[item.storage_index]
        place = info.relative_path, info.offset
        if place not in self._items:
            data = (self._folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
            self._items[place] = (
                data if item.type == LoadItemType.BYTE_IO else torch.load(io.BytesIO(data), weights_only=False)
            )
        return self._items[place]


def spoil(values):
    """Numbers that no load may leave."""
    for value in values.values():
        if isinstance(value, dict):
            spoil(value)
        elif isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.fill_(-77)


def load_all(folders, turns):
    """What differs, and the losses of the steps after that are not those of the training that saved."""
    kept = {}
    for layout in LAYOUTS:
        model = model_in(layout, seed=1)
        kept[layout] = model, optimizer_of(model)
    wrong = []
    for saving, folder in folders.items():
        expected, losses = torch.load(f"{folder}/expected.pt", weights_only=False)  # the quicker of its two ways
        reader = Remembering(folder)
        for turn in turns[saving]:
            loads = {LAYOUTS[(at + turn) % len(LAYOUTS)]: layout for at, layout in enumerate(LAYOUTS)}
            states = {saved: dcp_state_of(*kept[layout]) for saved, layout in loads.items()}
            spoil(states)
            dcp.load(states, storage_reader=reader)
            for saved, layout in loads.items():
                model, optimizer = kept[layout]
                case = f"{saved} on {saving} -> {layout} on {dist.get_world_size()}"
                values = states[saved]["model"], states[saved]["optimizer"]
                set_state_dict(model, optimizer, model_state_dict=values[0], optim_state_dict=values[1])
                wrong += differences(state_of(model, optimizer), expected[saved], case)
                if (saving, turn) == (GOING_ON_FROM, turns[saving][-1]):  # every layout has loaded another
                    found = torch.tensor(train(model, optimizer, GONE_ON))
                    if not torch.allclose(found, torch.tensor(losses[saved]), rtol=1e-4):
                        wrong.append(f"{case}: losses {found.tolist()} are not {losses[saved]}")
    return wrong


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_every_layout_loads_what_every_layout_has_saved_on_every_number_of_ranks(world, folders, num_ranks):
    turns = {saving: part(range(len(LAYOUTS)), saving + num_ranks, len(WORLDS)) for saving in WORLDS}
    assert world(num_ranks).run(load_all, folders, turns, timeout=240) == [[]] * num_ranks
