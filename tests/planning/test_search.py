"""The search finds the fastest settings that fit, and says why, and what would fit where none does."""

from dataclasses import replace
from itertools import product

from sherd.tools.plan.in_words import advice_of
from sherd.tools.simulate.search import IMPOSSIBLE, Outcome, Published, Room, Verdict, cheapest_changes, search
from sherd.tools.simulate.settings import NAMES, VALUES, Mesh, Settings, Space
from sherd.tools.simulate.timeline import Advice

SPACE = Space(num_ranks=16, batch=64, per_node=8)


def outcome(settings):
    """A step that is slower the less memory it takes, in each choice by itself."""
    seconds = 10.0 + 0.5 * (settings.placement == "shard") + 0.2 * (settings.prefetch == 0)
    seconds += 1.0 * settings.reshard + 3.0 * settings.checkpointing + 8.0 * (settings.offload != "nothing")
    seconds += 2.0 / settings.micro_batch + 0.1 * settings.mesh.shard / 16
    nbytes = 100 - 20 * settings.reshard - 30 * settings.checkpointing - 25 * (settings.offload != "nothing")
    nbytes += 5 * settings.prefetch + 10 * settings.micro_batch + 200 // settings.mesh.shard
    return Outcome(seconds, nbytes)


def everything():
    for mesh, size in product((Mesh(16), *SPACE.meshes(Mesh(16))), (1, 2, 4)):
        usual = Settings(mesh, micro_batch=size, micro_batches=4 // size)
        names = ("placement", "checkpointing", "prefetch", "reshard", "offload")
        values = (("shard", "flat"), VALUES["checkpointing"], (0, 1, 2), (False, True), ("nothing", "everything"))
        for chosen in product(*values):
            yield replace(usual, **dict(zip(names, chosen, strict=True)))


BEGINNINGS = [Settings(Mesh(16), checkpointing=checkpointing, micro_batches=4) for checkpointing in (True, False)]


def test_what_is_found_is_about_the_fastest_of_all_that_fit_or_what_lacks_least():
    outcomes = [outcome(each) for each in everything()]
    for limit in (1000, 150, 110, 90, 70):
        found = search(outcome, SPACE, BEGINNINGS, Room(limit))
        assert found.fits, limit
        fastest = min(each.seconds for each in outcomes if each.nbytes <= limit)
        assert outcome(found.best).seconds <= 1.05 * fastest, limit
        assert len(found.outcomes) < len(outcomes) / 3, limit
    found = search(outcome, SPACE, BEGINNINGS, Room(1))
    assert not found.fits
    assert outcome(found.best).nbytes == min(outcome(each).nbytes for each in everything())
    assert cheapest_changes(outcome, SPACE, BEGINNINGS[1], Room(1)) == []


def test_settings_that_are_given_stay():
    space = replace(SPACE, fixed=frozenset({"checkpointing", "mesh", "micro_batch"}))
    found = search(outcome, space, BEGINNINGS[:1], Room(1000))
    assert {(each.mesh, each.checkpointing, each.micro_batch) for each in found.outcomes} == {(Mesh(16), True, 1)}
    assert (found.best.placement, found.best.reshard) == ("flat", False)


def refusing(settings):
    return IMPOSSIBLE if settings.placement == "flat" or settings.mesh.shard < 4 else outcome(settings)


def test_what_the_model_refuses_is_neither_chosen_nor_shown():
    for limit in (1000, 110, 1):
        found = search(refusing, SPACE, BEGINNINGS, Room(limit))
        assert found.fits == (limit > 1)
        assert {each.placement for each in found.outcomes} == {"shard"}
        assert set(found.ranking) <= set(found.outcomes)
        assert IMPOSSIBLE not in found.outcomes.values()
        changes = cheapest_changes(refusing, SPACE, found.best, Room(limit))
        assert IMPOSSIBLE not in [its for _, its in changes]


def test_each_choice_is_compared_with_the_best_other_one():
    found = search(outcome, SPACE, BEGINNINGS, Room(110))
    others = list(found.others())
    assert [name for name, _, _ in others] == [name for name in NAMES if name in dict.fromkeys(n for n, _, _ in others)]
    for name, other, its in others:
        assert getattr(other, name) != getattr(found.best, name)
        assert its == outcome(other)
        assert its.nbytes > 110 or its.seconds >= outcome(found.best).seconds


def test_the_cheapest_changes_fit_and_come_in_order():
    settings = Settings(Mesh(16), reshard=False, micro_batches=4)
    assert outcome(settings).nbytes > 110
    changes = cheapest_changes(outcome, SPACE, settings, Room(110))
    assert [each.seconds for _, each in changes] == sorted(each.seconds for _, each in changes)
    assert all(its.nbytes <= 110 for _, its in changes)
    assert [settings.differing(each) for each, _ in changes] == [["reshard"], ["checkpointing"], ["offload"]]
    ((change, its),) = cheapest_changes(outcome, SPACE, settings, Room(70))
    assert its.nbytes <= 70
    assert len(settings.differing(change)) > 1, "where no single one is enough several are told together"


def test_meshes_are_parts_of_nodes_or_whole_nodes_and_other_axes_take_ranks_from_those_of_samples():
    space = Space(16, 64, 8, axes=("tp", "cp"), fits=lambda mesh: mesh.tp <= 4)
    found = {(mesh.shard, mesh.cp, mesh.tp) for mesh in space.meshes(Mesh(16)) if mesh.replicate == 1}
    cps = {(16 // cp, cp, 1) for cp in (1, 2, 4, 8, 16)}
    assert found == cps | {(8, 1, 2), (4, 1, 4)}
    near = Mesh(4, cp=2, tp=2)
    others = {(mesh.shard, mesh.cp, mesh.tp) for mesh in space.meshes(near)}
    assert {(8, 2, 1), (8, 1, 2), (2, 2, 4), (2, 4, 2)} <= others
    assert all(mesh.num_ranks == 16 for mesh in space.meshes(near))
    meshes = list(Space(48, 48, 8).meshes(Mesh(48)))
    assert [mesh.shard for mesh in meshes] == [48, 24, 16, 8, 4, 2, 1]
    assert all(mesh.num_ranks == 48 for mesh in meshes)


def test_micro_batches_add_up_to_the_batch_and_are_more_where_fewer_ranks_read_samples():
    space = Space(16, 64, 8, axes=("tp",))
    found = [each for each in space.changed(Settings(Mesh(16), micro_batches=4), "mesh") if each.mesh.tp > 1]
    assert {(each.mesh.shard, each.mesh.tp, each.micro_batches) for each in found} == {
        (8, 2, 8),
        (4, 4, 16),
        (2, 8, 32),
    }
    assert space.with_values(Settings(Mesh(16), micro_batch=3), {"mesh": Mesh(8, tp=2)}) is None
    sizes = {(each.micro_batch, each.micro_batches) for each in SPACE.changed(BEGINNINGS[0], "micro_batch")}
    assert sizes == {(2, 2), (4, 1)}


def test_what_has_no_effect_is_neither_told_nor_a_difference():
    now, kept = Settings(Mesh(4), reshard=False), Settings(Mesh(4), strategy="zero2")
    assert "freed after forward" in str(Settings(Mesh(4)))
    assert {"reshard", "recompute"} & {*kept.in_words()} == set()
    assert now.differing(kept) == ["strategy"]
    assert kept.differing(now) == ["strategy", "reshard"]
    selective = Settings(Mesh(4), checkpointing=1.0, recompute="selective")
    given = advice_of(selective, Outcome(1.0, 10), Settings(Mesh(4), strategy="zero1"), Outcome(2.0, 4))
    assert given == Advice("zero1 and activations kept", 6, 1.0)


def test_settings_with_a_margin_are_chosen_before_tight_ones_unless_they_take_half_as_long_again():
    published = Published("A100", 0.06, 0.25, 4)
    settings = [Settings(Mesh(4), prefetch=number, micro_batches=16) for number in range(3)]
    space = replace(SPACE, fixed=frozenset(NAMES) - {"prefetch"})
    for roomy, best in ((1.4, 0), (1.6, 1)):
        outcomes = dict(zip(settings, (Outcome(roomy, 80), Outcome(1.0, 81), Outcome(0.5, 101)), strict=True))
        room = Room(100, published=published)
        assert [room.answer(each) for each in outcomes.values()] == [Verdict.FITS, Verdict.TIGHT, Verdict.NOT]
        found = search(outcomes.__getitem__, space, settings[1:2], room)
        assert found.best == settings[best], roomy
        assert found.fits


def test_settings_that_need_more_of_a_node_than_it_has_do_not_fit():
    def in_host(settings):
        return replace(outcome(settings), host_bytes=1000 * (settings.offload != "nothing"))

    for host, fits in ((999, False), (1000, True), (None, True)):
        assert search(in_host, SPACE, BEGINNINGS, Room(60, host)).fits == fits, host
