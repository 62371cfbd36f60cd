"""The model of a program, unsharded."""

from __future__ import annotations

import contextlib
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.random_programs.containers import found_in, packed
from tests.random_programs.cores import DTYPE, Core, Moment
from tests.random_programs.programs import TABLES, Layer, Program


class Made(nn.Module):
    """A layer: its core, then its children."""

    def __init__(self, layer: Layer, making: Making) -> None:
        super().__init__()
        self.layer, self.moment = layer, making.moment
        self.core = Core(layer.core, making.program.width, making.noise, making.moment, layer.divergent)
        self.below = nn.ModuleList(making.made(each) for each in layer.children)
        self.calls = [(each, making.coin()) for each in layer.children]
        self.aux: Tensor | None = None
        self.result: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        kept = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor)
        with kept if self.layer.packed else contextlib.nullcontext():
            return self._run(x)

    def _run(self, x: Tensor) -> Any:
        layer = self.layer
        if layer.core in TABLES:
            return self.core(x)
        # What is written to must not be what autograd has kept.
        given = x * 1.0 if layer.output == "written" else x
        y = self._with_forces(given) if layer.forces else self._body(given)
        if layer.aux and self.moment.step + 1 >= layer.aux and torch.is_grad_enabled():
            self.aux = self.core(y).square().mean()
        if layer.output == "same":
            return x
        if layer.output == "attribute":
            self.result = y
            return None
        if layer.output == "written":
            x.copy_(y)
            return None
        return packed(layer.output, y)

    def _body(self, x: Tensor) -> Tensor:
        if self.layer.recompute.startswith("inside") and torch.is_grad_enabled():
            return checkpoint(self._plain_body, x, use_reentrant=self.layer.recompute == "inside_reentrant")
        return self._plain_body(x)

    def _plain_body(self, x: Tensor) -> Tensor:
        x = 0.5 * x + self.core(x)
        return called_in_turn(self.below, self.calls, x, self.moment)

    def _with_forces(self, x: Tensor) -> Tensor:
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            at = x if x.requires_grad and differentiable else x.detach().requires_grad_()
            y = self._body(at)
            (force,) = torch.autograd.grad(y.square().sum(), at, create_graph=differentiable)
            y = y - 0.1 * force
        return y if differentiable else y.detach()


def called_in_turn(modules: Any, calls: list[tuple[Layer, int]], x: Tensor, moment: Moment) -> Tensor:
    """`x` through all of `modules` that run in this step."""
    for module, (layer, coin) in zip(modules, calls, strict=True):
        is_odd = moment.step % 2 == 1
        if (layer.skipped == "odd" and is_odd) or (layer.skipped == "coin" and (coin >> moment.step) % 2):
            continue
        if layer.call == "evaluated" and module.training:
            with torch.no_grad():
                module.eval()
                called(module, layer, x.detach().clone())
                module.train()
        x = called(module, layer, x)
        if layer.call == "twice":
            x = called(module, layer, x)
    return x


def called(module: Any, layer: Layer, x: Tensor) -> Tensor:
    """One call of a layer's module, and its result."""

    def call(x: Tensor) -> Any:
        return module(x=x) if layer.call == "keyword" else module(x)

    if layer.output == "written":
        x = x.clone()
    if layer.recompute.startswith("around") and torch.is_grad_enabled():
        output = checkpoint(call, x, use_reentrant=layer.recompute == "around_reentrant")
    else:
        output = call(x)
    if layer.core in TABLES:
        return x + output
    if layer.output == "written":
        return x
    result = bare(module).result if layer.output == "attribute" else found_in(layer.output, output)
    return result.mul_(0.9) if layer.inplace else result


def bare(module: Any) -> Any:
    """The module itself, without a wrapper."""
    return getattr(module, "module", module)


class Root(nn.Module):
    """The whole model: a first weight, the layers, and the losses that these leave on themselves."""

    def __init__(self, program: Program, moment: Moment) -> None:
        super().__init__()
        making = Making(program, moment)
        self.program, self.moment = program, moment
        stem = Core("linear", program.width, making.noise, moment, "")
        if program.stem == "unit":
            self.stem = stem
        else:
            self.first, self.bias = stem.first, stem.bias
        self.layers = nn.ModuleList(making.made(each) for each in program.layers)
        self.calls = [(each, making.coin()) for each in program.layers]
        # Behind the back of nn.Module, which would register them a second time.
        self.made = tuple(making.all)
        making.finish(self)

    def forward(self, x: Tensor) -> Any:
        for each in self.made:
            each.aux = None
        with_stem = self.program.stem == "unit"
        x = self.stem(x) if with_stem else torch.tanh(x @ self.first.t() + self.bias)
        half = len(self.layers) // 2
        middle = called_in_turn(self.layers[:half], self.calls[:half], x, self.moment)
        last = called_in_turn(self.layers[half:], self.calls[half:], middle * 1.0, self.moment)
        return packed(self.program.root_output, torch.stack([middle, last]))

    def losses(self, output: Any) -> tuple[Tensor, Tensor]:
        """Of the first half of the layers, and of all of them."""
        middle, last = found_in(self.program.root_output, output)
        left = [each.aux for each in self.made if each.aux is not None]
        late = (last - 0.5).square().mean() + sum(left, torch.zeros((), dtype=DTYPE))
        return middle.square().mean(), late


class Making:
    """Modules in the making: what is shared and tied is found again."""

    def __init__(self, program: Program, moment: Moment) -> None:
        self.program, self.moment = program, moment
        self.noise = torch.Generator().manual_seed(program.seed)
        self.all: list[Made] = []
        self._coins = Random(program.seed)
        self._shared: dict[int, Made] = {}

    def coin(self) -> int:
        """A bit for each step."""
        return self._coins.getrandbits(16)

    def made(self, layer: Layer) -> Made:
        """The module of `layer`: a new one, or one that others have too."""
        if layer.share in self._shared:
            return self._shared[layer.share]
        module = Made(layer, self)
        self.all.append(module)
        if layer.share:
            self._shared[layer.share] = module
        return module

    def finish(self, root: Root) -> None:
        """Tie, freeze, hook."""
        tied: dict[tuple[int, str], nn.Parameter] = {}
        for each in self.all:
            if each.layer.tie and hasattr(each.core, "first"):
                each.core.first = tied.setdefault((each.layer.tie, each.layer.core), each.core.first)
        for each in self.all:
            parameters = list(each.core.parameters(recurse=False))
            frozen = {"all": parameters, "first": parameters[:1]}.get(each.layer.frozen, [])
            for parameter in frozen:
                parameter.requires_grad_(False)
        for each in self.all:
            for parameter in each.core.parameters(recurse=False) if each.layer.hook else ():
                if parameter.requires_grad:
                    parameter.register_hook(lambda gradient: gradient * 0.5)
            if each.layer.module_hook:
                each.register_full_backward_hook(_looked_at)


def _looked_at(module: nn.Module, inputs: Any, outputs: Any) -> None:
    assert len(outputs) > 0, "the hook is of a module with results"
