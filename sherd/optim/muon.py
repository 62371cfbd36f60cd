"""`Muon`: momentum, orthogonalised matrix by matrix, for hidden matrices; AdamW for all other parameters.

After Jordan et al. (2024), "Muon: An optimizer for hidden layers in neural networks", and Liu et al. (2025), "Muon is
scalable for LLM training". Values are those of `torch.optim.Muon` in one process. With `beta2` it is NorMuon, Li et al.
(2025), "NorMuon: Making Muon more efficient and scalable".
"""

from __future__ import annotations

import math
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sherd.engine import ShardedParameter, Unit, watcher
from sherd.errors import OptimizerError, PolicyError, PolicyTypeError
from sherd.layout.placement import Shape
from sherd.optim.flat import FlatStep, flatten_optimizer
from sherd.optim.gradients import zeros_as_gradient
from sherd.optim.matrix import MatrixOptimizer, members_in, number_from_0, real_dtype, rows_of
from sherd.optim.matrix_plan import Group, batch_of
from sherd.optim.matrix_state import MatrixState
from sherd.optim.newton_schulz import QUINTIC, coefficients_of, computes_in, orthogonalized, with_even_rows
from sherd.tensor.ragged import local_part
from sherd.wrap.names import plain_name

Rule = Callable[[str, nn.Module, nn.Parameter], str]
"""Returns why a parameter is left to AdamW, or "" for one that Muon steps. Called with the parameter's name, the module
that has it, and the parameter."""

HEADS = {"lm_head", "head", "output", "classifier", "score", "unembed", "embed_out"}
"""Last names of modules that map hidden numbers to what the model is trained on."""

ADAMW = {"betas": (0.9, 0.95)}
"""Options of AdamW that are other than torch's by default."""


def not_hidden(name: str, module: nn.Module, parameter: nn.Parameter) -> str:
    """Returns why a parameter is no hidden matrix, or "": the rule of `Muon` for the parameters of a model.

    Embeddings, output layers (modules named as in `HEADS`), and what has fewer than two dims (biases, norms) are none.
    A parameter that several modules share is asked about with each of them.
    """
    record = ShardedParameter.of(parameter)
    shape = parameter.shape if record is None else record.shape
    if len(shape) < 2:
        return f"it has {len(shape)} dim{'' if len(shape) == 1 else 's'}"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "it is an embedding"
    # peft trains a copy in a module's place; parts of torch's wrappers begin with a line (`_orig_mod`).
    path, *_ = name.rpartition(".")[0].partition(".modules_to_save.")
    owner = next((part for part in reversed(path.split(".")) if not part.startswith("_")), "")
    return f"{owner} is an output layer" if owner in HEADS else ""


def left_to_adamw(model: nn.Module, rule: Rule = not_hidden) -> dict[str, str]:
    """Returns why each parameter of a model is left to AdamW, by its name: "" for those that Muon steps.

    Raises:
        PolicyTypeError: the rule returns no text.
    """
    with Unit.members_shown(Unit.below(model)):
        name_of_id = {id(parameter): name for name, parameter in model.named_parameters()}
        left = dict.fromkeys(name_of_id.values(), "")
        for path, module in model.named_modules():
            for own, parameter in module.named_parameters(plain_name(path), recurse=False):
                why = rule(own, module, parameter) if parameter.is_floating_point() else f"it is of {parameter.dtype}"
                if not isinstance(why, str):
                    raise PolicyTypeError(f'Muon(rule=...) returned {why!r} for {own}: expected a reason, or ""')
                left[name_of_id[id(parameter)]] = left[name_of_id[id(parameter)]] or why
    return left


class Muon(MatrixOptimizer):
    """Muon for hidden matrices, AdamW for everything else, under any sharding.

    Arguments up to `adjust_lr_fn` are those of `torch.optim.Muon`, with its defaults.

    Args:
        params: a model, whose parameters `rule` divides; or parameters, `(name, parameter)` pairs or groups of them,
            which are all stepped by Muon but those of groups with `algorithm="adamw"`.
        lr: the learning rate, of AdamW's parameters, too, unless `adamw` has one.
        weight_decay: decoupled from the gradient.
        momentum: of the average of gradients.
        nesterov: orthogonalise the average of the gradient and the momentum instead of the momentum.
        ns_coefficients: of the Newton-Schulz iteration: three numbers, three for each iteration, "quintic" (Jordan et
            al. 2024) or "polar_express" (Amsel et al. 2025).
        eps: the least norm that a matrix is divided by.
        ns_steps: the number of iterations.
        adjust_lr_fn: how the rate depends on a matrix's shape: "original" (None), by sqrt(max(1, rows / columns));
            "match_rms_adamw" (Liu et al. 2025), by 0.2 sqrt(max(rows, columns)); or "spectral_unclamped" (torch 2.14;
            in sherd with every torch), by sqrt(rows / columns).
        rule: says why a parameter of a model is left to AdamW.
        heads: the number of heads of parameters, by the end of their names: as many blocks of rows are orthogonalised
            by themselves.
        adamw: options of AdamW: lr, betas, eps, weight_decay.
        beta2: of the average of each row's mean square, by whose root NorMuon divides the row (Li et al. 2025, who take
            0.95). None: rows are not divided.
        momentum_dtype: of the momentum; None: the parameter's.
        ns_dtype: of the iteration; None: bfloat16 where the device has units for it, else float32.
        wire_dtype: of what travels; None: that of products if it is smaller than the parameter's, else the parameter's.
        tensor_parallel: "whole" puts matrices that tensor parallelism cuts together, "blockwise" orthogonalises each
            rank's part by itself; see `MatrixOptimizer`. The rate then goes by the shape of the part.

    Raises:
        PolicyError: an option has no meaning.
        OptimizerError: a parameter that Muon is to step is no matrix, or its heads do not divide its rows.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Sequence[float] | Sequence[Sequence[float]] = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        rule: Rule = not_hidden,
        heads: Mapping[str, int] | None = None,
        adamw: Mapping[str, object] | None = None,
        beta2: float | None = None,
        momentum_dtype: torch.dtype | None = None,
        ns_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        tensor_parallel: str = "whole",
    ) -> None:
        if not callable(rule):
            raise PolicyTypeError(f"Muon(rule={rule!r}): expected a function of a name, a module and a parameter")
        self._momentum_dtype = real_dtype(momentum_dtype, "Muon(momentum_dtype")
        self._ns_dtype = real_dtype(ns_dtype, "Muon(ns_dtype")
        self._wire_dtype = real_dtype(wire_dtype, "Muon(wire_dtype")
        self._why: dict[str, str] = {}
        """Why a parameter of a model is left to AdamW, by its name."""
        self._adamw: torch.optim.Optimizer | None = None
        # Checked before AdamW's options, which have this rate too: its error would name AdamW.
        number_from_0("Muon(lr", lr)
        self._adamw_options = _adamw_options({"lr": lr, "weight_decay": weight_decay, **_mapping("adamw", adamw)})
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "beta2": beta2,
            "rows": 0,
            "tensor_parallel": tensor_parallel,
            "algorithm": "muon",
        }
        if heads and not isinstance(params, nn.Module):
            raise PolicyError(f"Muon(heads={heads!r}): heads go by names in a model; in groups, say rows= for each")
        model = params if isinstance(params, nn.Module) else None
        if model is not None:
            params = self._divided(model, rule, _mapping("heads", heads), tensor_parallel)
        self._init(params, defaults)
        if model is not None:
            self._model, self._rule = weakref.ref(model), rule

    _model: weakref.ref[nn.Module] | None = None
    """The model that the optimizer was built from, which a copy does not know, and the rule for it."""
    _rule: Rule = staticmethod(not_hidden)

    _PICKLED = ("_momentum_dtype", "_ns_dtype", "_wire_dtype", "_why", "_adamw_options")

    def __setstate__(self, state: Group) -> None:
        super().__setstate__(state)
        self._adamw = None

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group, of Muon's, or of AdamW's with `algorithm="adamw"`; see `MatrixOptimizer`.

        Without `algorithm`, what the rule leaves to AdamW in the model that Muon was built from becomes a group of
        AdamW's. This is how `sherd.refresh` adds new parameters of a model.
        """
        for group in self._parted(param_group):
            is_adamws = isinstance(group, dict) and group.get("algorithm") == "adamw"
            super().add_param_group({**self._adamw_options, **group} if is_adamws else group)

    def _parted(self, group: Group) -> list[Group]:
        """Returns a group, or two that the rule makes of its parameters."""
        model = None if self._model is None else self._model()
        if model is None or not isinstance(group, dict) or "algorithm" in group or "params" not in group:
            return [group]
        left = left_to_adamw(model, self._rule)
        why_of = {id(parameter): left[name] for name, parameter in Unit.named_members(model).items()}
        parts: dict[bool, list[Any]] = {False: [], True: []}
        for each in members_in(group["params"]):
            name, parameter = each if isinstance(each, tuple) else ("", each)
            why = why_of.get(id(parameter), "")
            parts[bool(why)].append(each)
            self._why |= {name: why} if name and why else {}
        ours, others = {**group, "params": parts[False]}, {**group, "params": parts[True], "algorithm": "adamw"}
        return [each for each in (ours, others) if each["params"]] or [group]

    def _check(self, group: Group) -> None:
        if group["algorithm"] not in ("muon", "adamw"):
            raise PolicyError(f"Muon: a group has algorithm={group['algorithm']!r}: expected 'muon' or 'adamw'")
        for option in ("momentum", "eps"):
            number_from_0(f"Muon({option}", group[option])
        if (beta2 := group["beta2"]) is not None:
            number_from_0("Muon(beta2", beta2)
            if float(beta2) >= 1:
                raise PolicyError(f"Muon(beta2={beta2}): expected None or a number from 0 to below 1, such as 0.95")
        adjust = group["adjust_lr_fn"]
        if adjust not in (None, "original", "match_rms_adamw", "spectral_unclamped"):
            raise PolicyError(
                f"Muon(adjust_lr_fn={adjust!r}): expected None, 'original', 'match_rms_adamw' or 'spectral_unclamped'"
            )
        coefficients_of(group["ns_coefficients"], group["ns_steps"])
        super()._check(group)
        of_adamw = {key: group[key] for key in self._adamw_options if key in group}
        if group["algorithm"] == "adamw":
            _adamw_options({key: of_adamw[key] for key in of_adamw.keys() - {"decoupled_weight_decay"}})
        elif wrong := sorted(set(of_adamw) - set(self.defaults)):
            raise PolicyError(
                f"Muon: a group of matrices has {wrong[0]}={group[wrong[0]]!r}, an option of AdamW; leave it out, or "
                "add algorithm='adamw'"
            )

    def _divided(self, model: nn.Module, rule: Rule, heads: Mapping[str, int], across: str) -> list[Group]:
        """Returns the parameter groups of a model: matrices by their heads, then what is left to AdamW."""
        by_rows: dict[int, list[tuple[str, nn.Parameter]]] = {}
        others: list[tuple[str, nn.Parameter]] = []
        named, left = Unit.named_members(model), left_to_adamw(model, rule)
        for name, parameter in named.items():
            if not (left[name] or parameter.requires_grad or _is_matrix(parameter, across)):
                left[name] = "it is frozen"
        for end, number in heads.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise PolicyError(f"Muon(heads=...): {end!r} has {number!r} heads: expected a number from 1 on")
            meant = [name for name in named if name.endswith(end)]
            if not meant:
                raise PolicyError(f"Muon(heads=...): no parameter's name ends with {end!r}; see named_parameters()")
            if all(left[name] for name in meant):
                raise PolicyError(
                    f"Muon(heads=...): {meant[0]} is left to AdamW, since {left[meant[0]]}; leave {end!r} out"
                )
        for name, parameter in named.items():
            if why := left[name]:
                self._why[name] = why
                others.append((name, parameter))
                continue
            number = next((number for end, number in heads.items() if name.endswith(end)), 0)
            batch_of(parameter, name=name, tensor_parallel=across)
            height = parameter.shape[1 if parameter.ndim == 3 else 0]
            if number and height % number:
                raise PolicyError(f"Muon(heads=...): {name} has {height} rows, which {number} heads do not divide")
            by_rows.setdefault(height // number if number else 0, []).append((name, parameter))
        groups: list[Group] = [{"params": named, "rows": rows} for rows, named in by_rows.items()]
        return [*groups, *([{"params": others, "algorithm": "adamw"}] if others else [])]

    def __repr__(self) -> str:
        """Returns what is done with each parameter, and why some are left to AdamW."""
        others: dict[tuple[str, ...], int] = {}
        for name in self._names(group for group in self.param_groups if group["algorithm"] == "adamw").values():
            key = (re.sub(r"\d+", "*", name), f"AdamW, since {self._why.get(name, 'its group says so')}")
            others[key] = others.get(key, 0) + 1
        return "\n".join([super().__repr__(), *rows_of(others)])

    def _dtypes(self, group: Group, parameter: torch.Tensor) -> dict[str, torch.dtype]:
        momentum = {"momentum_buffer": self._momentum_dtype} if self._momentum_dtype else {}
        return {**super()._dtypes(group, parameter), **momentum}

    def _foreign(self, group: Group, parameter: torch.Tensor, state: Mapping[str, object]) -> set[str]:
        if group["algorithm"] == "adamw":
            return watcher.not_adams(state)
        return super()._foreign(group, parameter, state)

    def matrix_groups(self) -> list[Group]:
        """The parameter groups that Muon steps."""
        return [group for group in self.param_groups if group.get("algorithm") != "adamw"]

    def _step_all(self) -> None:
        """Step every parameter that has a gradient, without the hooks of optimizers."""
        super()._step_all()
        if others := [group for group in self.param_groups if group["algorithm"] == "adamw"]:
            if self._adamw is None:
                self._adamw = flatten_optimizer(torch.optim.AdamW([{"params": group["params"]} for group in others]))
            # It has no groups and no state of its own: users, schedulers and checkpoints see one optimizer.
            self._adamw.param_groups, self._adamw.state = others, self.state
            # Hooks, such as those that ask other ranks, see one step of one optimizer:
            # test_hooks_see_one_step_of_one_optimizer
            assert isinstance(self._adamw, FlatStep)
            self._adamw._sherd_stepper.step(self._adamw, in_chunks=False)

    def others(self) -> Sequence[torch.Tensor]:
        """Returns the parameters that AdamW steps, of which several ranks hold elements."""
        given = [each for group in self.param_groups if group["algorithm"] == "adamw" for each in group["params"]]
        records = zip(given, map(ShardedParameter.of, given), strict=True)
        return [each for each, record in records if record is not None and record.is_on_several_ranks]

    def directions(
        self, group: Group, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Returns the momenta, updated in place, or with `nesterov` their averages with the gradients."""
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                dtype = self._momentum_dtype or parameter.dtype
                self.state[parameter]["momentum_buffer"] = zeros_as_gradient(parameter, dtype)
        momenta = [local_part(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        gradients = [gradient.to(own.dtype) for gradient, own in zip(gradients, momenta, strict=True)]
        if not momenta:
            return []
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        return torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta

    def state_shapes(self, group: Group, rows: int, columns: int) -> Mapping[str, Shape]:
        """Returns the shape of the averages of rows, which NorMuon keeps."""
        return {} if group.get("beta2") is None else {"second_momentum_buffer": (rows, 1)}

    def updates(self, group: Group, matrices: torch.Tensor, state: MatrixState | None = None) -> torch.Tensor:
        """Returns the matrices, orthogonalised, and for NorMuon with rows that are divided."""
        dtype = self._ns_dtype or computes_in(matrices.device)
        coefficients = coefficients_of(group["ns_coefficients"], group["ns_steps"])
        update = orthogonalized(matrices, coefficients, group["eps"], dtype, matrices.device.type == "cpu")
        return update if state is None else with_even_rows(update, state["second_momentum_buffer"], group["beta2"])

    def travels_in(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """Returns `wire_dtype`, else the dtype of the products where that is smaller and all ranks have the same.

        Owners round directions to it anyway, and updates have this dtype, so no value changes. Those of NorMuon,
        whose rows are divided after the products, travel in `dtype`.
        """
        products = self._ns_dtype or (computes_in(device) if device.type != "cpu" else dtype)
        if any(group.get("beta2") is not None for group in self.matrix_groups()):
            products = dtype
        return self._wire_dtype or (products if products.itemsize < dtype.itemsize else dtype)

    def scale_of(self, group: Group, rows: int, columns: int) -> float:
        """Returns what the learning rate of a matrix is multiplied by, as `adjust_lr_fn` says."""
        if group["adjust_lr_fn"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        ratio = rows / max(columns, 1)  # a matrix without columns has no elements to scale
        return math.sqrt(ratio if group["adjust_lr_fn"] == "spectral_unclamped" else max(1.0, ratio))


class TorchMuonStep(Muon):
    """The step of a `torch.optim.Muon`, with its groups and its state. Products are in bfloat16, as torch's are."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Not by Muon's own `__init__`, which would make groups, and check options that torch has checked.
        self._optimizer = weakref.ref(optimizer)
        self._ns_dtype, self._wire_dtype, self._plans = torch.bfloat16, None, OrderedDict()
        self._adamw, self._momentum_dtype, self._why, self._stepped = None, None, {}, set()

    @property
    def param_groups(self) -> list[Group]:  # type: ignore[override]  # an attribute of Optimizer
        """Steps all groups, and returns none for torch's step, which asks for them when its closure has run."""
        MatrixOptimizer._step_all(self)
        return []

    def matrix_groups(self) -> list[Group]:
        optimizer = self._optimizer()
        return [] if optimizer is None else optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute of Optimizer
        optimizer = self._optimizer()
        return {} if optimizer is None else optimizer.state

    def others(self) -> Sequence[torch.Tensor]:
        return ()

    @property
    def is_possible(self) -> bool:
        """False if tensor parallelism cuts one of the matrices, which torch's own step gathers."""
        try:
            self._plan_of(self.matrix_groups())
        except OptimizerError:
            return False
        return True


def _is_matrix(parameter: nn.Parameter, tensor_parallel: str) -> bool:
    try:
        batch_of(parameter, tensor_parallel=tensor_parallel)
    except OptimizerError:
        return False
    return True


def _mapping(option: str, value: object) -> Group:
    if value is not None and not isinstance(value, Mapping):
        raise PolicyTypeError(f"Muon({option}={value!r}): expected a mapping")
    return dict(value or {})


def _adamw_options(options: Group) -> Group:
    """Returns all options of torch's AdamW, with Muon's defaults for it.

    Raises:
        PolicyError: an option is wrong, or none of AdamW's.
    """
    options = {**ADAMW, **options}
    try:
        _, _ = options["betas"]
        optimizer = torch.optim.AdamW([torch.empty(0)], **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PolicyError(f"Muon(adamw=...): {error}") from error
    if options.get("differentiable"):
        raise PolicyError("Muon(adamw=...): a step is not differentiable; leave out differentiable=True")
    return optimizer.defaults
