"""A random program: which model is trained, how it is sharded, and what a step does, as a frozen record.

`draw(seed)` makes one from a seed, and `simpler(program)` lists the programs that are one feature poorer, for the
search of the smallest one that still fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

PLAIN_OUTPUTS = ("tuple", "list", "dict", "named", "dataclass", "nested", "object", "same", "extra_none")
HIDDEN_OUTPUTS = (
    "deque",
    "partial",
    "closure",
    "deep",
    "values",
    "iterator",
    "generator",
    "ndarray",
    "distribution",
    "attribute",
    "written",
)
"""Outputs in what is not looked into, left on the module, or written into the argument."""

CORES = (
    "linear",
    "lowrank",
    "views",
    "norm",
    "scalar",
    "empty",
    "embedding",
    "complex",
    "integers",
    "single",
    "buffers",
    "experts",
    "stash",
    "vmap",
    "nothing",
)
TABLES = ("parameter", "slice")
"""Cores that return a parameter of theirs, or a view of it."""

PLACEMENTS = ("shard", "shard1", "flat", "blocks", "whole")
FRONTS = ("fully_shard", "wrapper", "wrapper_flat")
OTHERWISE = ("placement", "parts", "divisor")

REENTRANT = ("around_reentrant", "inside_reentrant")
RECOMPUTES = ("around", "inside", *REENTRANT)


@dataclass(frozen=True)
class Layer:
    """One module: it adds what its core computes to its input, then calls its children in turn."""

    core: str = "linear"
    children: tuple[Layer, ...] = ()
    unit: bool = False
    """Sharded as a unit of its own."""
    beside: bool = False
    """In one unit with its left neighbour: a list of modules."""
    reshard: bool | int | None = None
    placement: str = ""
    """The unit's own; empty: the program's."""
    output: str = "tensor"
    recompute: str = ""
    aux: int = 0
    """Leaves a loss on itself from this step on, the first being 1."""
    tie: int = 0
    """Layers of one core and one number share their first weight."""
    share: int = 0
    """Layers of one number are one module."""
    frozen: str = ""
    skipped: str = ""
    """"odd": does not run in every other step; "coin": in steps drawn at random."""
    divergent: str = ""
    """"some": ranks use different parameters; "none": some ranks use none."""
    call: str = ""
    forces: bool = False
    inplace: bool = False
    hook: bool = False
    """A hook on the parameters' gradients."""
    module_hook: bool = False
    """A full backward hook on the module."""
    packed: bool = False
    """Runs under saved-tensor hooks of the user's."""


@dataclass(frozen=True)
class Program:
    """A model, how it is sharded, and what a step does."""

    seed: int
    num_ranks: int = 2
    width: int = 4
    steps: int = 3
    layers: tuple[Layer, ...] = (Layer(unit=True),)
    stem: str = "root"
    """Where the first weight is: the root's, or a unit's."""
    root_output: str = "tensor"
    front: str = "fully_shard"
    placement: str = "shard"
    strategy: str = ""
    mesh: str = ""
    transport: str = "auto"
    root_reshard: bool | int | None = None
    policy: bool = False
    """The wrapper finds the units by a policy."""
    offload: bool = False
    on_disk: float = 0.0
    """The share of the optimizer's state that rests on a disk; the optimizer has some, and steps in small chunks."""
    prefetch: tuple[int, int] = (1, 1)
    lists: bool = False
    """Prefetch lists of the user's, for units drawn at random."""
    setters: tuple[str, ...] = ()
    order: int = 0
    """Seeds the order in which units are made, bottom up."""
    optimizer: str = "after"
    """When it is built; or "matrices", after, of a class that steps whole matrices."""
    backwards: str = "one"
    penalty: bool = False
    leaf_input: bool = False
    between: str = ""
    first: str = ""
    """What runs before the first step."""
    garbage: bool = False
    """Some ranks make garbage that only a collection finds, with views of parameters in it."""
    otherwise: str = ""
    """In what the last rank has made its units otherwise, so that all raise."""

    @property
    def tolerance(self) -> float:
        """How far a value may be off, relative to the largest of its tensor."""
        return 1e-4 if any(each.core == "single" for each in every(self.layers)) else 1e-9


def every(layers: Collection[Layer]) -> Iterator[Layer]:
    """All of them, children behind their parents."""
    for each in layers:
        yield each
        yield from every(each.children)


# Drawing


def draw(seed: int, num_ranks: int | None = None) -> Program:
    """The program of `seed`."""
    dice = Random(seed)
    ranks = dice.choice((2, 2, 2, 2, 3, 4))
    ranks = num_ranks if num_ranks is not None else ranks
    mesh = dice.choice(("", "2d", "2d")) if ranks == 4 else dice.choice(("", "", "1d"))
    one_axis = ("", "", "", "zero1", "zero2", "zero3", "ddp")
    two_axes = ("", "hsdp", "hfsdp", "hsdp_zero2", "zero1_across_zero2_within", "zero1", "zero2", "zero3", "ddp")
    program = Program(
        seed=seed,
        num_ranks=ranks,
        width=dice.choice((4, 6, 8)),
        layers=tuple(_layer(dice, 0) for _ in range(dice.randint(2, 4))),
        stem=dice.choice(("root", "root", "unit")),
        root_output=_rarely(dice, 0.3, PLAIN_OUTPUTS[:7] + HIDDEN_OUTPUTS[:9], "tensor"),
        front=dice.choice(("fully_shard", "fully_shard", "fully_shard", "wrapper", "wrapper_flat")),
        placement=dice.choice(PLACEMENTS),
        strategy=dice.choice(two_axes if mesh == "2d" else one_axis),
        mesh=mesh,
        transport=dice.choice(("auto", "auto", "gloo", "torch", "coalesced")),
        root_reshard=_reshard(dice, 0.5),
        policy=dice.random() < 0.4,
        offload=dice.random() < 0.1,
        prefetch=(dice.choice((0, 1, 1, 2)), dice.choice((0, 1, 1, 3))),
        lists=dice.random() < 0.15,
        setters=tuple(each for each in SETTERS if dice.random() < 0.06),
        order=dice.randint(0, 99),
        optimizer=dice.choice(("after", "after", "before", "in_backward")),
        backwards=dice.choice(BACKWARDS),
        penalty=dice.random() < 0.12,
        leaf_input=dice.random() < 0.3,
        between=_rarely(dice, 0.4, ("no_grad", "inference", "inner", "unsharded"), ""),
        first=_rarely(dice, 0.2, ("no_grad", "inference", "inner", "inner_trained"), ""),
        garbage=dice.random() < 0.1,
        otherwise=_rarely(dice, 0.06, OTHERWISE, ""),
    )
    program = replace(program, optimizer=_rarely(dice, 0.2, ("matrices",), program.optimizer))
    return legal(replace(program, on_disk=_rarely(dice, 0.25, (0.5, 1.0), 0.0)))


SETTERS = (
    "reshard_after_backward",
    "separate_reduce_scatter_group",
    "reduce_scatter_max_input_buffers",
    "reduce_scatter_unused_params",
    "is_last_backward",
    "divide_factor",
)
BACKWARDS = (
    "one",
    "one",
    "one",
    "retain",
    "parts",
    "early",
    "micro",
    "no_sync",
    "accumulate",
    "forwards",
    "forwards_apart",
)


def _rarely(dice: Random, chance: float, values: tuple[Any, ...], else_: Any) -> Any:
    value = dice.choice(values)
    return value if dice.random() < chance else else_


def _reshard(dice: Random, chance: float) -> bool | int | None:
    return _rarely(dice, chance, (True, False, 1, 2), None)


def _layer(dice: Random, depth: int) -> Layer:
    output = _rarely(dice, 0.25, PLAIN_OUTPUTS, "tensor")
    output = _rarely(dice, 0.15, HIDDEN_OUTPUTS, output)
    core = dice.choice(CORES)
    core = _rarely(dice, 0.06, TABLES, core)
    num_children = dice.choice((0, 0, 0, 1, 2)) if depth < 2 else 0
    return Layer(
        core=core,
        children=tuple(_layer(dice, depth + 1) for _ in range(num_children)),
        unit=dice.random() < 0.75,
        beside=dice.random() < 0.12,
        reshard=_reshard(dice, 0.4),
        placement=_rarely(dice, 0.15, PLACEMENTS, ""),
        output=output,
        recompute=_rarely(dice, 0.2, RECOMPUTES, ""),
        aux=_rarely(dice, 0.1, (1, 2, 2), 0),
        tie=_rarely(dice, 0.2, (1, 2), 0),
        share=_rarely(dice, 0.15, (1, 2), 0),
        frozen=_rarely(dice, 0.15, ("all", "first", "first"), ""),
        skipped=_rarely(dice, 0.15, ("odd", "coin"), ""),
        # Not "none", which is known to fail: a rank that uses none of a unit takes part in its reduction, but not where
        # other ranks alone reach that unit, by a gradient of a gradient, a loss left on a module, or a recomputation.
        divergent=_rarely(dice, 0.12, ("some", "some", ""), ""),
        call=_rarely(dice, 0.2, ("keyword", "twice", "evaluated"), ""),
        forces=dice.random() < 0.05,
        inplace=dice.random() < 0.15,
        hook=dice.random() < 0.1,
        module_hook=dice.random() < 0.06,
        packed=dice.random() < 0.06,
    )


# Legal programs


def legal(program: Program) -> Program:
    """`program` without what plain torch, or the front end by its arguments, cannot do."""
    program = _legal_front(program)
    program = _legal_steps(program)
    layers = tuple(_legal_layer(each, program) for each in program.layers)
    shared: dict[int, Layer] = {}
    return replace(program, layers=_without_doubt(layers, shared))


def _legal_front(program: Program) -> Program:
    if program.mesh == "2d" and program.num_ranks != 4:
        program = replace(program, mesh="")
    if program.mesh != "2d" and program.strategy not in ("", "zero1", "zero2", "zero3", "ddp"):
        program = replace(program, strategy="")
    if program.front == "wrapper_flat":
        strategy = "" if program.strategy == "ddp" and program.mesh == "2d" else program.strategy  # it has no axis then
        program = replace(program, placement="flat", strategy=strategy)
    if program.front != "fully_shard":
        # The wrapper cuts as Flat() unless its strategy says otherwise, and has no say in how bytes travel.
        placement = program.placement if program.strategy and program.placement != "shard1" else "flat"
        program = replace(program, placement=placement, transport="auto", lists=False)
        program = replace(program, setters=tuple(each for each in program.setters if each == "is_last_backward"))
        program = replace(program, otherwise="")
    else:
        program = replace(program, policy=False)
    if program.strategy == "ddp":
        program = replace(program, setters=(), otherwise="parts" if program.otherwise else "")
    return replace(program, root_reshard=_legal_reshard(program.root_reshard, program))


def _legal_steps(program: Program) -> Program:
    layers = list(every(program.layers))
    if program.optimizer == "in_backward" or program.offload:  # which has an optimizer for each parameter
        program = replace(program, on_disk=0.0)
    if program.optimizer == "in_backward" and (
        program.backwards not in ("one", "early", "forwards")
        or any(each.recompute in REENTRANT for each in layers)
        or program.front == "wrapper_flat"
        or program.first == "inner_trained"
    ):
        program = replace(program, optimizer="after")
    if "is_last_backward" in program.setters and program.backwards != "micro":
        program = replace(program, setters=tuple(each for each in program.setters if each != "is_last_backward"))
    if program.optimizer in ("before", "matrices") and program.front == "wrapper_flat":
        program = replace(program, optimizer="after")
    if "inference" in (program.between, program.first) and any(each.forces for each in layers):
        program = replace(program, between="", first="")
    if any(each.module_hook or each.recompute in REENTRANT for each in layers) and program.first == "inner_trained":
        program = replace(program, first="")
    if not program.layers[0].unit:  # what is no unit by itself does not run by itself
        program = replace(program, first="" if program.first.startswith("inner") else program.first)
        program = replace(program, between="" if program.between == "inner" else program.between)
    if program.penalty and program.backwards in ("retain", "parts", "early"):
        program = replace(program, backwards="one")
    return program


def _legal_reshard(reshard: bool | int | None, program: Program) -> bool | int | None:
    num_shards = 2 if program.mesh == "2d" and program.strategy != "zero3" else program.num_ranks
    if program.strategy in ("zero1", "zero2", "ddp", "hsdp_zero2", "zero1_across_zero2_within"):
        return False if reshard is False else None
    if isinstance(reshard, int) and not isinstance(reshard, bool) and num_shards % reshard:
        return None
    return reshard


def _legal_layer(layer: Layer, program: Program) -> Layer:
    layer = replace(layer, reshard=_legal_reshard(layer.reshard, program))
    layer = replace(layer, children=tuple(_legal_layer(each, program) for each in layer.children))
    if program.front != "fully_shard":
        core = "linear" if layer.core in ("integers", "complex", "single") else layer.core
        layer = replace(layer, beside=False, placement="", core=core)
    if program.front == "wrapper_flat":
        layer = replace(layer, frozen="", tie=0, hook=False)
    if layer.beside and not layer.unit:
        layer = replace(layer, unit=True)
    if layer.core == "nothing" or layer.core in TABLES:
        layer = replace(layer, divergent="", forces=False)
    if layer.core in TABLES:
        layer = replace(layer, output="tensor", children=(), inplace=False, call="", recompute="", aux=0)
    inner = list(every(layer.children))
    if any(each.forces or each.recompute in REENTRANT for each in inner) or layer.recompute in REENTRANT:
        layer = replace(layer, forces=False)
    inside = list(every((layer,)))
    is_reentrant = layer.recompute in REENTRANT
    if is_reentrant and (
        program.penalty
        or program.backwards in ("retain", "parts", "early", "forwards_apart")
        or any(each.forces or each.aux or each.output == "attribute" or each.module_hook for each in inside)
    ):
        layer = replace(layer, recompute="")
    if layer.recompute == "around_reentrant" and layer.output not in ("tensor", "tuple", "extra_none"):
        layer = replace(layer, output="tensor")
    if layer.recompute and (layer.output in ("same", "written", "attribute") or layer.call == "evaluated"):
        layer = replace(layer, recompute="")
    if layer.recompute and any(each.forces or each.core == "buffers" or each.output == "written" for each in inside):
        layer = replace(layer, recompute="")
    # Such a hook is told of positional inputs only, and forbids changes in place of what has passed it.
    changes = any(each.inplace or each.output == "written" for each in every(program.layers))
    if changes or layer.output not in ("tensor", "tuple") or layer.call == "keyword" or layer.share:
        layer = replace(layer, module_hook=False)
    kept = any(each.aux or each.forces for each in inside)
    if layer.output in ("same", "written") or layer.call == "twice" or kept:
        layer = replace(layer, inplace=False)
    if layer.output == "written" and (layer.forces or layer.call == "twice"):
        layer = replace(layer, output="tensor")
    if layer.core == "stash" and program.penalty:
        # What an autograd Function keeps as attributes no hook sees; a gradient of a gradient is right or raises, as
        # the rest of the unit has it: tests/parity/test_ways_into_units.py.
        layer = replace(layer, core="linear")
    if layer.call == "twice" and layer.output == "attribute":
        layer = replace(layer, call="")
    return layer


def _without_doubt(layers: tuple[Layer, ...], shared: dict[int, Layer]) -> tuple[Layer, ...]:
    """Layers of one module are one record, but for how they are called."""
    found = []
    for each in layers:
        if each.share and each.share in shared:
            first = shared[each.share]
            each = replace(first, call=each.call if each.recompute == first.recompute else first.call)
            each = replace(each, children=first.children, aux=0)
            if any(child.share for child in every(each.children)):
                each = replace(each, share=0, children=())
        elif each.share:
            # A module that is used twice has no other such within, and leaves one loss only: of the last time.
            children = tuple(_unshared(child) for child in each.children)
            each = replace(each, children=children, aux=0)
            if each.output == "attribute" or any(child.aux for child in every(children)):
                each = replace(each, share=0)
            else:
                shared[each.share] = each
        else:
            each = replace(each, children=_without_doubt(each.children, shared))
        found.append(each)
    return tuple(found)


def _unshared(layer: Layer) -> Layer:
    return replace(layer, share=0, children=tuple(_unshared(each) for each in layer.children))


# Fewer features


def _switches(record: Any) -> list[dataclasses.Field[Any]]:
    return [each for each in dataclasses.fields(record) if each.name not in ("seed", "num_ranks", "layers", "children")]


def simpler(program: Program) -> Iterator[Program]:
    """Programs with less in them, the simplest first."""
    seen = {program}
    for each in _reduced(program):
        each = legal(each)
        if each not in seen:
            seen.add(each)
            yield each


def _reduced(program: Program) -> Iterator[Program]:
    for layers in _fewer(program.layers):
        if layers:
            yield replace(program, layers=layers)
    for each in _switches(program):
        if getattr(program, each.name) != each.default:
            yield replace(program, **{each.name: each.default})
    if program.steps > 1:
        yield replace(program, steps=program.steps - 1)
    if program.num_ranks > 2 and program.mesh != "2d":
        yield replace(program, num_ranks=2)


def _fewer(layers: tuple[Layer, ...]) -> Iterator[tuple[Layer, ...]]:
    for at, each in enumerate(layers):
        before, after = layers[:at], layers[at + 1 :]
        yield before + after
        if each.children:
            yield before + each.children + after
        for children in _fewer(each.children):
            yield (*before, replace(each, children=children), *after)
        for switch in _switches(each):
            if getattr(each, switch.name) != switch.default:
                yield (*before, replace(each, **{switch.name: switch.default}), *after)


def shown(value: Any) -> str:
    """A program with only what differs from the defaults, to be read and to be pasted."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        said = [
            f"{each.name}={shown(getattr(value, each.name))}"
            for each in dataclasses.fields(value)
            if getattr(value, each.name) != each.default
        ]
        return f"{type(value).__name__}({', '.join(said)})"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(shown, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value)
