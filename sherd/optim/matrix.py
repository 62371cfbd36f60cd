"""`MatrixOptimizer`: an optimizer whose step is a function of whole matrices, whatever way their elements are sharded.

    gradient's shard --directions--> direction's shard --there--> whole matrices, at their owners
                                                                    | function, batched by shape
    parameter's shard <----apply---- update's shard   <--back--   whole updates

Everything is computed on local tensors: no operation of a step is dispatched by DTensor. Matrices that lie on one rank
as a whole (`Owned()`, experts or heads under a placement that does not cut them) do not travel.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from sherd._torch import DTensorSpec, in_backward, spec_of
from sherd.comm.failures import own_rank, ranks_in_short
from sherd.comm.objects import all_gather_objects
from sherd.engine import ShardedParameter
from sherd.errors import GradientError, OptimizerError, PolicyError, PolicyTypeError, SherdError
from sherd.layout.extent import Extent, chunks
from sherd.layout.placement import Copies, Cut, Shape
from sherd.optim.exchange import (
    Batch,
    Exchange,
    MatrixItem,
    Moving,
    Part,
    Ring,
    TensorAxis,
    items_of,
    joined_items_of,
    numels_of,
    with_owners,
    work_of,
)
from sherd.optim.faults import FUNCTION, GRADIENT, HEADER, NOT_FINITE, StepFaults, Told, header_of
from sherd.optim.matrix_state import Home, MatrixState
from sherd.optim.owners import MatrixWork, owners_of
from sherd.tensor.gather import shard_of
from sherd.tensor.ragged import as_dtensor, local_part

Group = dict[str, Any]
"""A parameter group of an optimizer, options, or a state."""

Shapes = Callable[[int, int], Mapping[str, Shape]]
"""Returns the shapes of what is kept of a matrix, by name, for its numbers of rows and columns."""

KEEPS = 'lambda rows, columns: {"left": (rows, rows)}'
MOST_PLANS = 512
"""A plan holds its parameters, which a user may have taken out of the optimizer since."""

BUCKET_BYTES = 32 << 20
"""The most that a rank sends in one exchange, unless that gives some ranks nothing to compute."""


class MatrixOptimizer(Optimizer):
    """Steps every parameter by a function of its whole matrix.

    In a step `function(matrices)` is called with the gradients of matrices of one shape, [number, rows, columns], and
    returns as many updates of that shape. A parameter p becomes `p * (1 - lr * weight_decay) - lr * update`. The
    function runs once for each matrix, on one rank: the matrices are divided so that all ranks have equal work. Under
    `Owned()`, and where a rank's shard is whole matrices, nothing travels. Else the shards of a gradient go to its
    owner in one all-to-all, and those of the update come back in another.

    A 2-D parameter is one matrix, a 3-D one a batch of them (experts), and one of more dims, of a convolution, is
    flattened behind its first dim.

    With `state` it is `function(matrices, {name: tensor})`: what it keeps of these matrices, [number, *shape], which it
    changes in place or replaces. `optimizer.state[parameter][name]` shows that of all matrices of a parameter as one
    DTensor, which lies with their owners. Checkpoints take it to other layouts and numbers of ranks.

    Args:
        params: parameters, `(name, parameter)` pairs or groups of them, as for any optimizer of torch.
        function: computes updates, [number, rows, columns], of gradients of that shape. It may not change them.
        state: returns the shapes of what is kept of one matrix, by name, for its numbers of rows and columns:
            `lambda rows, columns: {"left": (rows, rows)}`. It begins as zeros, in float32 or the dtype of a wider
            parameter. None: nothing is kept.
        lr: the learning rate.
        weight_decay: decoupled from the gradient.
        rows: rows of one matrix, for parameters of which every so many rows are a matrix of its own (attention heads).
            0: all rows.
        wire_dtype: the dtype in which gradients and updates travel. None: the parameter's.
        tensor_parallel: "whole" puts matrices that tensor parallelism cuts together; "blockwise" takes the part that it
            leaves to a rank for a matrix, so that nothing travels between such ranks.

    Raises:
        PolicyTypeError: `function` or `state` cannot be called, or `state` returns no shapes.
        PolicyError: `lr`, `weight_decay`, `rows` or `tensor_parallel` has no meaning.
        OptimizerError: a parameter is no matrix, complex, or not divisible into matrices of `rows` rows.
    """

    def __init__(
        self,
        params: Any,
        function: Callable[..., torch.Tensor],
        *,
        state: Shapes | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        rows: int = 0,
        wire_dtype: torch.dtype | None = None,
        tensor_parallel: str = "whole",
    ) -> None:
        if not callable(function):
            raise PolicyTypeError(f"MatrixOptimizer(function={function!r}): expected a function of matrices")
        if state is not None and not callable(state):
            raise PolicyTypeError(f"MatrixOptimizer(state={state!r}): expected a function, such as {KEEPS}")
        self._function, self._shapes = function, state
        self._wire_dtype = real_dtype(wire_dtype, "MatrixOptimizer(wire_dtype")
        options = {"lr": lr, "weight_decay": weight_decay, "rows": rows, "tensor_parallel": tensor_parallel}
        self._init(params, options)

    def _init(self, params: Any, defaults: Group) -> None:
        if isinstance(params, nn.Module) or not isinstance(params, Iterable):
            raise PolicyTypeError(
                f"{type(self).__name__}(params=...) got a {type(params).__name__}: expected parameters, "
                "(name, parameter) pairs, or groups of them"
            )
        self._plans: OrderedDict[_PlanKey, _Plan] = OrderedDict()
        self._stepped: set[int] = set()
        """Parameters, by id, that were stepped within backward since the last step outside of it."""
        super().__init__(params, defaults)
        own_gradients([(parameter, group["rows"]) for group in self.matrix_groups() for parameter in group["params"]])

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            PolicyError: an option has no meaning.
            OptimizerError: a parameter is no matrix that can be stepped, or is in two groups.
        """
        if isinstance(param_group, dict) and "params" not in param_group:
            raise PolicyError(
                f"{type(self).__name__}: a group has no 'params', only {', '.join(param_group)}; name them"
            )
        if isinstance(param_group, dict) and not isinstance(param_group["params"], (torch.Tensor, set)):
            known = {id(parameter) for group in self.param_groups for parameter in group["params"]}
            param_group = {**param_group, "params": list(param_group["params"])}
            for entry in param_group["params"]:
                name, parameter = entry if isinstance(entry, tuple) else ("", entry)
                if id(parameter) in known:
                    raise OptimizerError(f"{name or self._name_of(parameter)} is given twice; leave out one of them")
                known.add(id(parameter))
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
        except Exception:
            self.param_groups.pop()
            raise

    def _check(self, group: Group) -> None:
        """Raise where a group has an option without meaning, or a parameter that cannot be stepped."""
        for option in ("lr", "weight_decay"):
            number_from_0(f"{type(self).__name__}({option}", group[option])
        rows = group["rows"]
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
            raise PolicyError(f"{type(self).__name__}(rows={rows!r}): expected the number of rows of a matrix, or 0")
        across = group["tensor_parallel"]
        if across not in ("whole", "blockwise"):
            name = type(self).__name__
            raise PolicyError(f"{name}(tensor_parallel={across!r}): expected 'whole' or 'blockwise'")
        if any(group is each for each in self.matrix_groups()):
            for index, parameter in enumerate(group["params"]):
                name = group["param_names"][index] if "param_names" in group else ""
                shapes = self.state_shapes(group, *batch_of(parameter, rows, name, across)[1:])
                _require_shapes(shapes)
                if shapes and across == "blockwise" and _takes_parts(parameter):
                    raise OptimizerError(
                        f"{name or name_of(parameter)}: tensor_parallel='blockwise' takes parts of different ranks for "
                        f"matrices, of which {type(self).__name__} keeps nothing; take 'whole', or a function without "
                        "state (Muon without beta2)"
                    )

    _PICKLED: tuple[str, ...] = ("_function", "_shapes", "_wire_dtype")
    """Own attributes that a copy of the optimizer has, too. It plans its steps anew."""

    def __getstate__(self) -> Group:
        """Returns what torch's optimizers pickle, and the own attributes."""
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._PICKLED}}

    def __setstate__(self, state: Group) -> None:
        """Take over a pickled state, or a loaded one, as `load_state_dict` calls this, too."""
        super().__setstate__(state)
        self._plans, self._stepped = OrderedDict(), set()

    def load_state_dict(self, state_dict: Group) -> None:
        """Load a state. Options that its groups do not have, as those of torch's optimizers, stay as they are.

        State of whole matrices keeps its dtype, where torch would give it the parameter's.
        """
        groups, given = state_dict["param_groups"], state_dict["state"]
        if len(groups) == len(self.param_groups):
            filled = [{**own, **loaded} for own, loaded in zip(self.param_groups, groups, strict=True)]
            state_dict = {**state_dict, "param_groups": filled}
        super().load_state_dict(state_dict)
        own, keys = ([each for group in of for each in group["params"]] for of in (self.param_groups, groups))
        key_of = dict(zip(map(id, own), keys, strict=True))
        for group in self.matrix_groups():
            for parameter in group["params"]:
                loaded = given.get(key_of[id(parameter)], {})
                for name, dtype in self._dtypes(group, parameter).items():
                    if name in loaded:
                        self.state[parameter][name] = loaded[name].to(local_part(parameter).device, dtype, copy=True)

    def spec_of_state(self, parameter: torch.Tensor, key: str, shape: torch.Size) -> DTensorSpec | None:
        """Returns where a loaded state belongs: as the gradient lies, or with the matrices' owners; None: elsewhere."""
        record = ShardedParameter.of(parameter)
        if record is None or not shape:
            return None
        if shape == parameter.shape:
            return None if record.gradient_owner is None else record.gradient_spec(torch.float32)
        groups = self.matrix_groups()
        plan = self._plan_of(groups)
        index = next((index for index, each in enumerate(plan.parameters) if each is parameter), None)
        if index is None or index not in plan.homes:
            return None
        home, (_, *sizes) = plan.homes[index], plan.batches[index]
        kept = self.state_shapes(groups[plan.group_of[index]], *sizes).get(key)
        layout = home.layout(tuple(shape)) if kept is not None and (home.number, *kept) == tuple(shape) else None
        return None if layout is None else layout.spec(torch.float32)

    def _dtypes(self, group: Group, parameter: torch.Tensor) -> dict[str, torch.dtype]:
        """Returns the dtypes of what is kept for a parameter in another one than its own."""
        shapes = self.state_shapes(group, *batch_of(parameter, *_options_of(group))[1:])
        return dict.fromkeys(shapes, torch.promote_types(parameter.dtype, torch.float32))

    def matrix_groups(self) -> list[Group]:
        """The parameter groups that are stepped matrix by matrix."""
        return self.param_groups

    def __repr__(self) -> str:
        """Returns what is done with each parameter, a line for all that differ in numbers alone."""
        groups, names = self.matrix_groups(), self._names()
        # Not the plan of a step, which all ranks make together.
        known = self._plans.get(_key_of(groups))
        plan = known if known is not None and known.is_of(groups) else _Plan(groups, joins=False)
        alike: dict[tuple[str, str, bool], list[int]] = defaultdict(list)
        for index, parameter in enumerate(plan.parameters):
            name = re.sub(r"\d+", "*", names.get(id(parameter), name_of(parameter)))
            number, rows, columns = plan.batches[index]
            size = f"{number} x {rows} x {columns}" if number > 1 else f"{rows} x {columns}"
            alike[name, size, plan.is_stepped[index]].append(index)
        lines: dict[tuple[str, ...], int] = {
            (name, size, plan.way_of(indices) if is_stepped else "frozen"): len(indices)
            for (name, size, is_stepped), indices in alike.items()
        }
        return "\n".join([f"{type(self).__name__} of whole matrices", *rows_of(lines)])

    def _names(self) -> dict[int, str]:
        """Returns the names of parameters that were given with names, by id."""
        return {
            id(parameter): name
            for group in self.param_groups
            for name, parameter in zip(group.get("param_names", ()), group["params"], strict=False)
        }

    def _name_of(self, parameter: torch.Tensor) -> str:
        return self._names().get(id(parameter), name_of(parameter))

    def _plan_of(self, groups: Sequence[Group]) -> _Plan:
        # More than one where a unit at a time is stepped (`step_in_backward`).
        of_plan = _key_of(groups)
        plan = self._plans.get(of_plan)
        if plan is None or not plan.is_of(groups):
            plan = self._plans[of_plan] = _Plan(groups)
            if len(self._plans) > MOST_PLANS:
                self._plans.popitem(last=False)
        return plan

    @property
    def flops_of_ranks(self) -> Mapping[int, float]:
        """What each rank computes of matrices that have one owner, by `MatrixItem.flops`."""
        return self._plan_of(self.matrix_groups()).flops

    # What a subclass may do otherwise

    def directions(
        self, group: Group, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Returns what the function is given of each parameter: a tensor shaped as the parameter's gradient here.

        It is computed element by element, on each rank for the elements that lie there.

        Args:
            group: the parameter group.
            parameters: as the optimizer has them.
            gradients: the local tensors of their gradients.
        """
        return gradients

    def state_shapes(self, group: Group, rows: int, columns: int) -> Mapping[str, Shape]:
        """Returns the shapes of what is kept of one matrix, by name; see `state`."""
        return {} if self._shapes is None else self._shapes(rows, columns)

    def updates(self, group: Group, matrices: torch.Tensor, state: MatrixState | None = None) -> torch.Tensor:
        """Returns the updates of whole matrices of one shape, [number, rows, columns].

        What `state_shapes` names is in `state`, and is changed there. Where nothing is kept, `state` is not given.
        """
        return self._function(matrices) if state is None else self._function(matrices, state)

    def scale_of(self, group: Group, rows: int, columns: int) -> float:
        """Returns what the learning rate of a matrix is multiplied by."""
        return 1.0

    def travels_in(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """Returns the dtype, on all ranks the same, in which directions and updates of parameters of `dtype` travel."""
        return self._wire_dtype or dtype

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        What is wrong on one rank raises on all ranks that matrices travel between, before a parameter changes. On
        accelerators, where the host does not wait for other ranks, it does so in the first step. Later, the device
        leaves out updates that are not finite, or whose gradients some ranks lack, and the next step raises.

        Raises:
            GradientError: a gradient lies otherwise than its parameter, or is sparse, or is missing on some ranks.
            OptimizerError: the function failed, returned what it may not, or an update is not finite.
            CommError: another rank did not take part in an exchange.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_all()
        return loss

    def _step_all(self) -> None:
        """Step every parameter that has a gradient, without a closure and the hooks of optimizers."""
        groups = self._left_to_step()
        # Not in `_plan_of`: `torch.optim.Muon` asks for a plan to see whether there can be one.
        if (last := self._plans.get(_key_of(groups))) is not None:
            self._raise_told(last, last.take_told())
        plan = self._plan_of(groups)
        if plan.begins():
            self._move_states(plan, groups)
        directions = self._directions_here(plan, groups)
        updates: dict[int, list[tuple[Extent, torch.Tensor]]] = defaultdict(list)
        self._compute(plan, groups, plan.here, directions, updates, {})
        now = plan.keep_told(self._exchange(plan, groups, directions, updates))
        if now is not None:
            self._raise_told(plan, now)
        for group, indices in zip(groups, plan.by_group, strict=True):
            self._apply(plan, group, [index for index in indices if index in updates], updates)

    def _left_to_step(self) -> list[Group]:
        """Returns the groups of matrices, outside of backward without those that were stepped within it."""
        groups = self.matrix_groups()
        if in_backward():
            self._stepped |= {id(each) for group in groups for each in group["params"]}
            return groups
        stepped, self._stepped = self._stepped, set()
        if not stepped:
            return groups
        # Their gradients are gone, and zeros would travel in their place.
        left = [
            [each for each in group["params"] if each.grad is not None or id(each) not in stepped] for group in groups
        ]
        return [{**group, "params": each} for group, each in zip(groups, left, strict=True)]

    def _directions_here(self, plan: _Plan, groups: Sequence[Group]) -> dict[int, torch.Tensor]:
        """Returns the directions of all parameters that have a gradient, 1-D; none where something is wrong."""
        at = 0
        directions: dict[int, torch.Tensor] = {}
        try:
            gradients: list[torch.Tensor | None] = []
            for parameter in plan.parameters:
                at = len(gradients)
                gradients.append(local_gradient(parameter))
            for group, indices in zip(groups, plan.by_group, strict=True):
                there = [index for index in indices if gradients[index] is not None]
                at, given = indices[0] if indices else 0, [gradients[index] for index in there]
                computed = self.directions(group, [plan.parameters[index] for index in there], given)  # type: ignore[arg-type]
                directions |= {index: each.reshape(-1) for index, each in zip(there, computed, strict=True)}
                self._place_states(plan, group, there, there)
        except Exception as error:
            plan.faults.note(GRADIENT, at, error)
            return {}
        return directions

    def _compute(
        self,
        plan: _Plan,
        groups: Sequence[Group],
        here: Sequence[tuple[MatrixItem, Extent]],
        directions: Mapping[int, torch.Tensor],
        updates: Mapping[int, list[tuple[Extent, torch.Tensor]]],
        whole: Mapping[MatrixItem, torch.Tensor],
        is_void: torch.Tensor | None = None,
    ) -> dict[MatrixItem, torch.Tensor]:
        """Returns the updates of `whole`, and of items that are `here`, and notes the latter in `updates`."""
        at_home = {
            item: directions[item.index][held.start : held.stop].view(item.batch).to(plan.computes_on(item.index))
            for item, held in here
            if item.index in directions
        }
        computed = self._computed(plan, groups, {**whole, **at_home}, is_void)
        for item, held in here:
            if item in computed:
                updates[item.index].append((held, computed[item].reshape(-1)))
        return computed

    def _exchange(
        self,
        plan: _Plan,
        groups: Sequence[Group],
        directions: Mapping[int, torch.Tensor],
        updates: Mapping[int, list[tuple[Extent, torch.Tensor]]],
    ) -> list[tuple[Ring, torch.Tensor]]:
        """Compute all other updates: meanwhile, the next bucket is on its way there, the one before on its way back.

        Returns:
            The headers that came there, unless gradients were there, and back, [2 or 1, ranks, HEADER], of each bucket.
        """
        there = deque(self._there(bucket, directions, plan.faults) for bucket in plan.buckets[:1])
        headers, back = [], []
        for number, bucket in enumerate(plan.buckets):
            if number + 1 < len(plan.buckets):
                there.append(self._there(plan.buckets[number + 1], directions, plan.faults))
            whole, header = bucket.whole(there.popleft())
            headers.append(header)
            # Where the host does not read the headers in time.
            is_void = None if len(header) == 0 or header.device.type == "cpu" else (header != header[0]).any()
            # Of matrices without a gradient nothing is computed or kept.
            idle = {item: torch.zeros_like(each) for item, each in whole.items() if item.index not in directions}
            stepped = {item: each for item, each in whole.items() if item not in idle}
            computed = idle | self._compute(plan, groups, bucket.here, directions, updates, stepped, is_void)
            back.append(bucket.exchange.back(computed, plan.faults.header(bucket.header)))
        told = []
        for bucket, header, moving in zip(plan.buckets, headers, back, strict=True):
            arrived, header_back = bucket.exchange.arrived(moving)
            told.append((bucket.exchange.ring, torch.stack([header, header_back] if len(header) else [header_back])))
            for index, held, update in arrived:
                if index in directions:
                    updates[index].append((held, update))
        return told

    def _there(self, bucket: _Bucket, directions: Mapping[int, torch.Tensor], faults: StepFaults) -> Moving | _Local:
        return bucket.there(directions, self.travels_in(bucket.dtype, bucket.device), faults)

    def _raise_told(self, plan: _Plan, told: Sequence[tuple[list[int], Told]]) -> None:
        """Raise if something is wrong on this rank, or if another rank told so."""
        wrong, index, error = plan.faults.take()
        if wrong:
            raise error or self._failure(plan, wrong, index, own_rank())
        read = [(ranks, each.read()) for ranks, each in told]
        for ranks, headers in [(ranks, ways[way]) for way in range(2) for ranks, ways in read if way < len(ways)]:
            for rank, (wrong, high, low, _) in zip(ranks, headers, strict=True):
                if wrong:
                    raise self._failure(plan, wrong, high * 256 + low - 1, rank)
            self._check_missing(plan, ranks, headers)

    def _failure(self, plan: _Plan, wrong: int, index: int, rank: int) -> SherdError:
        """Returns the error of what is wrong on a rank with a parameter."""
        name, where = self._name_of(plan.parameters[index]), f"on rank {rank}"
        if wrong == NOT_FINITE:
            return OptimizerError(
                f"the update of {name}, computed {where}, has elements that are inf or nan; look for gradients that "
                "are not finite, skip such steps (sherd.step, a gradient scaler), and go on from the last checkpoint"
            )
        log = "its error is in the log of that rank"
        if wrong == FUNCTION:
            return OptimizerError(f"the function of {type(self).__name__} failed for {name} {where}; {log}")
        return GradientError(f"the gradient of {name} cannot be stepped {where}; {log}")

    def _check_missing(self, plan: _Plan, ranks: Sequence[int], headers: Sequence[list[int]]) -> None:
        """Raise where one rank has no gradient of a parameter and another rank has one."""
        if all(header == headers[0] for header in headers):
            return
        lacking, rank = min((header, rank) for header, rank in zip(headers, ranks, strict=True) if any(header))
        other = next(each for header, each in zip(headers, ranks, strict=True) if header != lacking)
        _, high, low, _ = lacking
        name = self._name_of(plan.parameters[high * 256 + low - 1])
        raise GradientError(
            f"rank {rank} has no gradient of {name}, and rank {other} has gradients of other parameters; give all "
            "ranks gradients of the same ones"
        )

    def _computed(
        self,
        plan: _Plan,
        groups: Sequence[Group],
        whole: Mapping[MatrixItem, torch.Tensor],
        is_void: torch.Tensor | None = None,
    ) -> dict[MatrixItem, torch.Tensor]:
        """Returns the updates of whole matrices: one call of `updates` for all of one shape and parameter group.

        Where something is wrong on this rank, updates are zeros.
        """
        alike: dict[tuple[int, tuple[int, ...], torch.dtype, torch.device], list[MatrixItem]] = defaultdict(list)
        for item, matrices in whole.items():
            alike[plan.group_of[item.index], item.batch[1:], matrices.dtype, matrices.device].append(item)
        computed: dict[MatrixItem, torch.Tensor] = {}
        for (group, *_), items in alike.items():
            given = [whole[item] for item in items]
            matrices = given[0] if len(given) == 1 else torch.cat(given)
            update = torch.zeros_like(matrices)
            try:
                if not plan.faults.wrong:
                    update = self._update_of(plan, groups[group], items, matrices)
                    numbers = [item.index for item in items for _ in range(item.batch[0])]
                    if not float(groups[group]["lr"]):
                        # Such a step makes state, for torch's checkpointing, of gradients that are zeros.
                        update = torch.zeros_like(matrices)
                    update = plan.faults.finite(update, numbers, is_void)
            except Exception as error:
                plan.faults.note(FUNCTION, items[0].index, error)
            computed |= zip(items, update.split([item.batch[0] for item in items]), strict=True)
        return computed

    def _update_of(
        self, plan: _Plan, group: Group, items: Sequence[MatrixItem], matrices: torch.Tensor
    ) -> torch.Tensor:
        """Returns the updates of the matrices of some items, and keeps their states.

        Raises:
            OptimizerError: the function failed, or returned or left what it may not.
        """
        function, of = f"the function of {type(self).__name__}", [plan.parameters[item.index] for item in items]
        version = None if matrices.is_inference() else matrices._version
        number, rows, columns = matrices.shape
        shapes = {name: (number, *shape) for name, shape in self.state_shapes(group, rows, columns).items()}
        kept = {
            name: [
                plan.homes[item.index].part_of(item, self.state[parameter][name])
                for item, parameter in zip(items, of, strict=True)
            ]
            for name in shapes
        }
        state = {  # on the device, where what is kept may rest in host memory
            name: (parts[0] if len(parts) == 1 else torch.cat(parts)).to(matrices.device)
            for name, parts in kept.items()
        }
        try:
            update = self.updates(group, matrices, state) if kept else self.updates(group, matrices)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            sizes = tuple(matrices.shape)
            raised = f"{function} raised {type(error).__name__} for matrices of shape {sizes}, of {self._all_names(of)}"
            raise OptimizerError(f"{raised}: {error}") from error
        if wrong := _wrong(update, matrices, version) or _wrong_state(state, shapes):
            raise OptimizerError(f"{function} {wrong.format(self._all_names(of))}")
        for name, parts in kept.items():
            if state[name] is not parts[0]:  # else the function has changed it in place
                torch._foreach_copy_(parts, state[name].split([item.batch[0] for item in items]))
        return update

    def _move_states(self, plan: _Plan, groups: Sequence[Group]) -> None:
        """Move what is kept of parameters to where this plan steps them. All ranks do so in its first step."""
        for parameter in plan.parameters:
            record = ShardedParameter.of(parameter)
            for key, value in self.state.get(parameter, {}).items():
                if record is not None and isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    self.state[parameter][key] = laid_as_gradient(value, record)
        for group, indices in zip(groups, plan.by_group, strict=True):
            self._place_states(plan, group, indices, ())

    def _place_states(self, plan: _Plan, group: Group, indices: Sequence[int], stepped: Container[int]) -> None:
        """Make the states of whole matrices that are stepped, and move those that lie elsewhere than their owners."""
        for index in indices:
            parameter, (_, *sizes) = plan.parameters[index], plan.batches[index]
            shapes = self.state_shapes(group, *sizes) if index in plan.homes else {}
            for name, shape in shapes.items():
                value = self.state[parameter].get(name) if parameter in self.state else None
                number = plan.homes[index].number
                if value is not None and tuple(value.shape) != (number, *shape):
                    raise OptimizerError(
                        f"{self._name_of(parameter)}: its state {name!r} has shape {tuple(value.shape)}, and "
                        f"{type(self).__name__} keeps {(number, *shape)}; load what was saved with the same function"
                    )
                if value is not None or index in stepped:
                    placed = plan.homes[index].placed(value, shape, local_part(parameter))
                    self.state[parameter][name] = placed

    def _all_names(self, parameters: Sequence[torch.Tensor]) -> str:
        names = [self._name_of(each) for each in parameters]
        return ", ".join(names if len(names) <= 3 else [*names[:3], f"{len(names) - 3} more"])

    def _apply(
        self,
        plan: _Plan,
        group: Group,
        indices: Sequence[int],
        updates: Mapping[int, list[tuple[Extent, torch.Tensor]]],
    ) -> None:
        """Decay the parameters `indices` of a group, and add their updates."""
        if not (lr := float(group["lr"])):
            return
        local = {index: local_part(plan.parameters[index]) for index in indices}
        held_here = [each for each in local.values() if each.numel()]
        if held_here and (decay := lr * group["weight_decay"]):
            torch._foreach_mul_(held_here, 1 - decay)
        by_scale: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
        for index, parameter in local.items():
            _, rows, columns = plan.batches[index]
            into, added = by_scale[self.scale_of(group, rows, columns)]
            for held, update in updates[index]:
                is_all = held.numel == parameter.numel()  # of a plain parameter, which may have any strides
                into.append(parameter if is_all else parameter.view(-1)[held.start : held.stop])
                added.append(update.to(parameter).view(into[-1].shape))
        for scale, (into, added) in by_scale.items():
            torch._foreach_add_(into, added, alpha=-lr * scale)


def _wrong(update: object, matrices: torch.Tensor, version: int | None) -> str | None:
    """Returns what is wrong with an update, with {} for the names of the parameters, and what to do; else None."""
    of = f"matrices of shape {tuple(matrices.shape)}, of {{}}"
    if not isinstance(update, torch.Tensor):
        return f"returned {type(update).__name__} for {of}; it must return a tensor of the same shape"
    if update.shape != matrices.shape:
        return f"returned a tensor of shape {tuple(update.shape)} for {of}; it must return the same shape"
    if not update.is_floating_point():
        return f"returned a tensor of {update.dtype} for {of}; it must return real numbers in floating point"
    if update.device != matrices.device:
        return f"returned a tensor on {update.device} for {of}; it must return one on {matrices.device}"
    if version is not None and matrices._version != version:
        return f"changed its input in place, {of}; let it work on a copy"
    return None


def _wrong_state(state: MatrixState, shapes: Mapping[str, Shape]) -> str | None:
    """Returns what is wrong with what a function has left of its state, as `_wrong` does."""
    for name, shape in shapes.items():
        left = state.get(name)
        if left is None or tuple(left.shape) != shape:
            found = "nothing" if left is None else f"shape {tuple(left.shape)}"
            return f"left {found} as state {name!r} of {{}}; it must leave shape {shape}"
    return None


def _takes_parts(parameter: torch.Tensor) -> bool:
    """Returns whether tensor parallelism cuts a parameter, otherwise than between experts."""
    record = ShardedParameter.of(parameter)
    whole, part = tuple(parameter.shape), parameter.shape if record is None else tuple(record.shape)
    return whole != part and not (len(whole) == 3 and whole[1:] == part[1:])


def _require_shapes(shapes: Mapping[str, Shape]) -> None:
    """Raise a PolicyTypeError if what `state` returned is no dict of shapes."""
    try:
        for name, shape in shapes.items():
            torch.empty((len(name), *shape), device="meta")
    except (AttributeError, TypeError, RuntimeError) as error:
        raise PolicyTypeError(
            f"MatrixOptimizer(state=...) returned {shapes!r}: expected shapes, as {KEEPS} returns"
        ) from error


def number_from_0(option: str, value: object) -> None:
    """Raise a PolicyError if the value of an option, "Class(name", is no number from 0 on."""
    try:
        if 0 <= float(value) < math.inf:  # type: ignore[arg-type]
            return
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        pass
    shown = repr(value) if isinstance(value, (str, torch.Tensor)) else value
    raise PolicyError(f"{option}={shown}): expected a number from 0 on")


def real_dtype(dtype: object, option: str) -> torch.dtype | None:
    """Returns a dtype of floating point, or None; raises a PolicyError for the option, "Class(name", if it is other."""
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        return dtype
    raise PolicyError(
        f"{option}={dtype!r}): expected None or a dtype of floating point of 16 bits or more, such as torch.bfloat16"
    )


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Returns the local tensor of a parameter's gradient; None if it has no gradient."""
    gradient = parameter.grad
    if gradient is None:
        return None
    local, own = local_part(gradient), tuple(local_part(parameter).shape)
    record = ShardedParameter.of(parameter)
    if record is not None and record.gradient_owner is not None:
        local = local_part(laid_as_gradient(gradient, record))
        own = record.gradient_cut.local_shape(record.mesh.piece)
    if local.is_sparse:
        raise GradientError(
            f"{name_of(parameter)} has a sparse gradient; a function of whole matrices takes dense ones"
        )
    if tuple(local.shape) != own:
        raise GradientError(
            f"{name_of(parameter)} has a gradient of {tuple(local.shape)} on this rank, and {own} are expected; "
            "leave gradients as backward places them"
        )
    return local.contiguous()


def zeros_as_gradient(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros that lie as the reduced gradient of a parameter does: state, element by element."""
    record = ShardedParameter.of(parameter)
    if record is None or record.gradient_owner is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    local = torch.zeros(record.gradient_cut.local_shape(record.mesh.piece), dtype=dtype, device=parameter.device)
    return as_dtensor(local, record.gradient_spec(dtype))


def laid_as_gradient(value: torch.Tensor, record: ShardedParameter) -> torch.Tensor:
    """Returns a tensor of a parameter's shape as the reduced gradient lies. All ranks must call it.

    State from a file, and gradients that a user made like the parameter, lie otherwise.
    """
    spec = record.gradient_spec(value.dtype)
    if isinstance(value, DTensor) and spec_of(value).placements == spec.placements:
        return value
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    own = shard_of(whole, record.gradient_cut, record.mesh.piece)
    return as_dtensor(own.to(record.resting.device, copy=True).contiguous(), spec)


def own_gradients(parameters: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Let backward reduce the whole gradient of each parameter to one rank, so that all ranks get equal work.

    This is for parameters that the user gave no placement, and whose shards do not consist of whole matrices.

    Args:
        parameters: each with the rows of one of its matrices, 0 for all rows.
    """
    by_ranks: dict[tuple[tuple[int, ...], ...], list[tuple[ShardedParameter, float]]] = defaultdict(list)
    for parameter, rows in parameters:
        record = ShardedParameter.of(parameter)
        if record is not None and may_own_gradient(record) and record.shape.numel():
            number, height, width = batch_of(parameter, rows)
            whole_on_ranks = number % record.mesh.num_shards == 0 and height * number == record.shape[0]
            if number == 1 or not whole_on_ranks:
                copies = tuple(map(tuple, record.mesh.copies_of_shards()))
                by_ranks[copies].append((record, work_of((number, height, width))))
    for copies, records in by_ranks.items():
        ranks = range(len(copies))
        owners = owners_of([MatrixWork(flops, record.shape.numel(), ranks) for record, flops in records], len(ranks))
        by_unit: dict[int, dict[ShardedParameter, int]] = defaultdict(dict)
        for (record, _), owner in zip(records, owners, strict=True):
            by_unit[id(record.owner)][record] = owner
        for of_unit in by_unit.values():
            unit = next(iter(of_unit)).owner
            assert unit is not None, "a parameter that may own its gradient has a unit"
            unit.own_gradients(of_unit)


def may_own_gradient(record: ShardedParameter) -> bool:
    """Returns whether the whole gradient of a parameter, placed by default, may go to one rank."""
    mesh, unit = record.mesh, record.owner
    return (
        record.is_placed_by_default
        and record.gradient_owner is None
        and len(record.shape) != 3
        and record.unsharded_spec is None
        and record.requires_grad
        and mesh.shard_axis is not None
        and mesh.num_shards > 1
        and not (mesh.shards_replicas or mesh.keeps_unsharded)
        and not hasattr(record.resting, "fsdp_pre_all_gather")
        and unit is not None
        and not unit.gathers_as_one
    )


def name_of(parameter: torch.Tensor) -> str:
    """Returns the name of a parameter if it is a unit's, else its shape, in words."""
    record = ShardedParameter.of(parameter)
    return f"a parameter of shape {tuple(parameter.shape)}" if record is None else record.name


def batch_of(parameter: torch.Tensor, rows: int = 0, name: str = "", tensor_parallel: str = "whole") -> Batch:
    """Returns the matrices that a parameter is made of: how many, and the rows and columns of each.

    Args:
        parameter: of 2 dims or more, sharded or not.
        rows: how many rows make a matrix; 0: all of them.
        name: the parameter's name in errors; "": as `name_of` says.
        tensor_parallel: as that of `MatrixOptimizer`.

    Raises:
        OptimizerError: it is no matrix, or has another number of rows.
    """
    record = ShardedParameter.of(parameter)
    name = name or name_of(parameter)
    if not parameter.is_floating_point() or parameter.dtype.itemsize == 1:
        raise OptimizerError(
            f"{name} is of {parameter.dtype}; a function of whole matrices takes real numbers of 16 bits or more"
        )
    if parameter.layout is not torch.strided:
        raise OptimizerError(f"{name} is sparse; a function of whole matrices takes dense ones")
    if record is None and isinstance(parameter, DTensor):
        raise OptimizerError(
            f"{name} is a {type(parameter).__name__} that no unit of sherd holds; shard its module with fully_shard"
        )
    if record is not None and record.flat is not None:
        inside = record.flat.names
        raise OptimizerError(
            f"{', '.join(inside[:4])}{' and others' if len(inside) > 4 else ''} are one flat parameter, a vector: wrap "
            "with use_orig_params=True, so that the optimizer sees each of them"
        )
    if len(parameter.shape) < 2:
        raise OptimizerError(
            f"{name} has shape {tuple(parameter.shape)}, and is no matrix; leave it to another optimizer"
        )
    is_joined = record is None or tensor_axis_of(record, rows, name, tensor_parallel) is not None
    shape = parameter.shape if record is None or is_joined else record.shape
    number, height, width = shape if len(shape) == 3 else (1, shape[0], prod(shape[1:]))
    if rows:
        if height % rows:
            raise OptimizerError(
                f"{name} has {height} rows, which are not divisible into matrices of {rows}; give a number that divides"
            )
        number, height = number * (height // rows), rows
    return number, height, width


def tensor_axis_of(
    record: ShardedParameter, rows: int = 0, name: str = "", tensor_parallel: str = "whole"
) -> TensorAxis | None:
    """Returns the axis of tensor parallelism along which matrices are put together; None where it cuts none of them.

    For the arguments see `batch_of`.

    Raises:
        OptimizerError: several axes cut the parameter, or an axis cuts it otherwise than in rows or in columns.
    """
    spec = record.unsharded_spec
    if spec is None or tensor_parallel == "blockwise":
        return None
    cutting = [
        (axis, placement)
        for axis, placement in enumerate(spec.placements)
        if spec.mesh.size(axis) > 1 and not placement.is_replicate()
    ]
    if not cutting:
        return None
    axis, placement = cutting[0]
    dim, num_dims = getattr(placement, "dim", 0), len(spec.shape)
    if len(cutting) > 1 or type(placement) is not Shard or dim > (2 if num_dims == 3 else 1):
        raise OptimizerError(
            f"{name or record.name} is cut over tensor parallelism by {tuple(spec.placements)}; matrices are put "
            "together of the rows or columns of one axis: take tensor_parallel='blockwise', or another optimizer"
        )
    if dim == 0 and (
        num_dims == 3 or (rows and not any(each.numel % rows for each in chunks(spec.shape[0], spec.mesh.size(axis))))
    ):
        return None
    names, mesh = spec.mesh.mesh_dim_names, record.shard_spec.mesh
    assert names and mesh.mesh_dim_names, "axes beside those of data parallelism have names"
    return TensorAxis(mesh, mesh.mesh_dim_names.index(names[axis]), dim)


def rows_of(lines: Mapping[tuple[str, ...], int]) -> Iterable[str]:
    """Yields lines whose columns are as wide as their longest entry; the last one is how often a line is meant."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for entries, number in lines.items():
        *first, last = (entry.ljust(width) for entry, width in zip(entries, widths, strict=True))
        times = f"  ({number} of them)" if number > 1 else ""
        yield f"  {'  '.join([*first, last.rstrip()])}{times}"


class _Plan:
    """The matrices of some groups, as they are sharded now: which rank computes each, and which travel together."""

    def __init__(self, groups: Sequence[Group], joins: bool = True) -> None:
        """Plan. Without `joins`, matrices that are to be put together of tensor-parallel parts are left out."""
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.group_of = [at for at, group in enumerate(groups) for _ in group["params"]]
        self.by_group = [[i for i, of in enumerate(self.group_of) if of == at] for at in range(len(groups))]
        options = [_options_of(groups[at]) for at in self.group_of]
        self.batches = [batch_of(each, *chosen) for each, chosen in zip(self.parameters, options, strict=True)]
        self._records = [ShardedParameter.of(parameter) for parameter in self.parameters]
        self._axes = [
            None if record is None else tensor_axis_of(record, *chosen)
            for record, chosen in zip(self._records, options, strict=True)
        ]
        self._cuts = [None if record is None else (record.cut, record.gradient_owner) for record in self._records]
        self.is_stepped = [_is_stepped(parameter) for parameter in self.parameters]
        """Of each parameter. Nothing of the others travels."""
        self._owners: dict[int, set[int]] = defaultdict(set)
        self._traveling: set[int] = set()
        self._owned: set[int] = set()
        self._has_begun = False
        self.homes: dict[int, Home] = {}
        """Where the states of parameters lie, by their numbers. A parameter without elements has none."""
        self.flops: dict[int, float] = defaultdict(float)
        """What each rank computes, by `MatrixItem.flops`, of matrices that have one owner."""
        self.here: list[tuple[MatrixItem, Extent]] = []
        """Items that this rank computes by itself, with their elements in the local tensor, before others travel."""
        self.buckets: list[_Bucket] = []
        self.faults = StepFaults()
        self._told: list[tuple[list[int], Told]] = []
        self._has_stepped = False
        for ring, items in self._by_ring(self._joined_cuts() if joins else {}):
            owned = with_owners(items, ring)
            self._divide(ring, owned)
            for index, own in groupby(owned, lambda item: item.index):
                self.homes[index] = self._home(index, list(own), ring)
        # A fault among few ranks is told to more of them by what comes later.
        self.buckets.sort(key=lambda bucket: len(bucket.exchange.ring.ranks))

    def _home(self, index: int, items: Sequence[MatrixItem], ring: Ring) -> Home:
        record = self._records[index]
        assert record is not None, "plain parameters have no ring"
        number, rows, _ = self.batches[index]
        if tuple(record.shape) != tuple(record.optimizer_param.shape) and self._axes[index] is None:
            number = record.optimizer_param.shape[0] // (1 if len(record.shape) == 3 else rows)
        return Home(number, items, ring, record.shard_spec)

    def begins(self) -> bool:
        """Returns True once, before the first step by this plan."""
        self._has_begun, had = True, self._has_begun
        return not had

    def keep_told(self, told: Sequence[tuple[Ring, torch.Tensor]]) -> list[tuple[list[int], Told]] | None:
        """Keep headers, [2, ranks, HEADER], that the next step reads. Returns those to be read now; None for nothing.

        On an accelerator the host reads those of the first step alone now: only then all ranks wait for one another.
        """
        headers = [(ring.ranks, each) for ring, each in told]
        if not told:
            headers = [([own_rank()], each.expand(2, 1, HEADER).contiguous()) for each in self.faults.of_devices()]
        now: list[tuple[list[int], Told]] = []
        later: list[tuple[list[int], Told]] = []
        for ranks, each in headers:
            (later if self._has_stepped and each.device.type != "cpu" else now).append((ranks, Told(each)))
        self._told, self._has_stepped = later, True
        return None if later and not now else now

    def take_told(self) -> list[tuple[list[int], Told]]:
        told, self._told = self._told, []
        return told

    def is_of(self, groups: Sequence[Group]) -> bool:
        """Returns whether the plan still is that of `groups`."""
        return all(
            record is None or (cuts == (record.cut, record.gradient_owner) and record.optimizer_param is parameter)
            for record, cuts, parameter in zip(self._records, self._cuts, self.parameters, strict=True)
        )

    def computes_on(self, index: int) -> torch.device:
        """Returns the device on which a parameter's matrices are computed: its unit's, wherever its shards rest."""
        record = self._records[index]
        return self.parameters[index].device if record is None else record.mesh.device

    def way_of(self, indices: Sequence[int]) -> str:
        """Returns where the matrices of some parameters are computed, and what travels for them, in words."""
        owners = sorted(set().union(*(self._owners[index] for index in indices)))
        if not owners and any(self._axes[index] is not None for index in indices):
            return "a rank of data and tensor parallelism; shards of gradients go there, those of updates come back"
        if not owners:
            return "whole on this rank; every rank computes it"
        who = f"ranks {ranks_in_short(owners)}" if len(owners) > 1 else f"rank {owners[0]}"
        if not self._traveling.isdisjoint(indices):
            return f"{who}; shards of gradients go there, those of updates come back"
        if not self._owned.isdisjoint(indices):
            return f"{who}; backward reduces gradients there, shards of updates come back"
        return f"{who}; nothing travels"

    def _joined_cuts(self) -> dict[int, list[Cut]]:
        """Returns how all parts of parameters that tensor parallelism cuts are cut. Collective over each such axis."""
        by_axis: dict[tuple[DeviceMesh, int], list[int]] = defaultdict(list)
        for index, axis in enumerate(self._axes):
            if axis is not None:
                by_axis[axis.mesh, axis.axis].append(index)
        found: dict[int, list[Cut]] = {}
        for (mesh, number), indices in by_axis.items():
            records = [self._records[index] for index in indices]
            own, what = [each and each.cut for each in records], "how tensor-parallel matrices are cut"
            parts = all_gather_objects(own, what, mesh.get_group(number))
            found |= {index: list(cuts) for index, cuts in zip(indices, zip(*parts, strict=True), strict=True)}
        return found

    def _by_ring(self, joined: Mapping[int, Sequence[Cut]]) -> Iterable[tuple[Ring, list[MatrixItem]]]:
        """Returns the items of parameters that are sharded over the same ranks, for all such ranks.

        A plain parameter is on this rank as a whole. `joined` are the cuts of parts that are put together.
        """
        ring_of: dict[tuple[int, DeviceMesh | None, int], Ring] = {}
        rings: dict[object, tuple[Ring, list[MatrixItem]]] = {}
        for index, (record, batch, axis) in enumerate(zip(self._records, self.batches, self._axes, strict=True)):
            if not self.is_stepped[index]:
                continue
            if record is None:
                everything = Extent(0, self.parameters[index].numel())
                plain = Copies(tuple(self.parameters[index].shape), 1, 0, (1,))
                self.here.append((MatrixItem(index, batch, (Part(plain, plain, everything, batch),)), everything))
                self.homes[index] = Home(batch[0], [self.here[-1][0]])
            elif axis is None or index in joined:
                # Units have meshes of their own, also over the same ranks. A mesh has many parameters.
                key = (id(record.mesh), None, 0) if axis is None else (id(record.mesh), axis.mesh, axis.axis)
                if key not in ring_of:
                    ring_of[key] = Ring(record.mesh, axis)
                ring = ring_of[key]
                _, items = rings.setdefault((tuple(ring.ranks), tuple(ring.holders)), (ring, []))
                if axis is None:
                    items += items_of(index, batch, record.gradient_cut, record.cut)
                    if not batch[0]:
                        # Tensor parallelism leaves no matrix to this rank, but some to others.
                        self.homes[index] = self._home(index, [], ring)
                else:
                    items += joined_items_of(index, batch, joined[index], axis.dim, len(ring.ranks))
        return rings.values()

    def _divide(self, ring: Ring, items: Sequence[MatrixItem]) -> None:
        """Put the items that travel into buckets, each of one dtype, whose gradients travel, or do not."""
        travelers: dict[tuple[bool, torch.dtype], list[tuple[float, MatrixItem]]] = defaultdict(list)
        here, begins = list[tuple[float, MatrixItem]](), list[tuple[float, _Bucket]]()
        for item in items:
            owner = ring.ranks[item.owner]
            self._owners[item.index].add(owner)
            numels = numels_of(item.parts, ring.holders)
            if [rank for rank, numel in enumerate(numels[1]) if numel] != [item.owner]:
                at_owner = numels[0][item.owner] == item.numel
                (self._owned if at_owner else self._traveling).add(item.index)
                dtype = local_part(self.parameters[item.index]).dtype
                travelers[at_owner, dtype].append((self.flops[owner], item))
            elif item.owner == ring.rank:
                here.append((self.flops[owner], item))
            self.flops[owner] += item.flops
        longest = max((item.flops for item in items), default=0.0)
        for (_, dtype), waiting in travelers.items():
            bucket, filled, begun = list[MatrixItem](), 0, 0.0  # when owners come to it
            # In the order in which owners come to them, and as many as keep each owner busy: a rank that computes
            # nothing in a bucket waits for those that do (test_every_rank_computes_in_every_bucket_but_the_last).
            for start, item in sorted(waiting, key=lambda each: each[0]):
                nbytes = item.numel * dtype.itemsize
                if filled + nbytes > BUCKET_BYTES * len(ring.ranks) and start >= begun + longest:
                    begins.append((begun, _Bucket(bucket, ring, dtype)))
                    bucket, filled, begun = [], 0, start
                bucket.append(item)
                filled += nbytes
            begins.append((begun, _Bucket(bucket, ring, dtype)))
        self.buckets += [bucket for _, bucket in begins]
        for start, item in here:  # in its turn, as no other rank is to wait until all of these are computed
            in_turn = [bucket.here for begun, bucket in begins if begun <= start]
            (in_turn[-1] if in_turn else self.here).append((item, item.held(ring.holders[ring.rank])))


_Local = dict[int, torch.Tensor]
"""The directions on this rank, 1-D, by the numbers of their parameters."""


def _is_stepped(parameter: torch.Tensor) -> bool:
    """Returns whether a parameter may have a gradient: whether it is not frozen."""
    return parameter.requires_grad or parameter.grad is not None


_PlanKey = tuple[tuple[object, ...], ...]


def _key_of(groups: Sequence[Group]) -> _PlanKey:
    """Returns what a plan depends on, of each parameter."""
    return tuple(
        (at, *_options_of(group), id(each), each.dtype, local_part(each).device, _is_stepped(each))
        for at, group in enumerate(groups)
        for each in group["params"]
    )


def _options_of(group: Group) -> tuple[int, str, str]:
    """Returns what `batch_of` is given of a group besides its parameters."""
    return group.get("rows", 0), "", group.get("tensor_parallel", "whole")


class _Bucket:
    """Items that travel together between devices, of parameters of one dtype, whose shards may rest in host memory."""

    def __init__(self, items: Sequence[MatrixItem], ring: Ring, dtype: torch.dtype) -> None:
        self.dtype, self.device = dtype, ring.mesh.device
        self.exchange = Exchange(items, ring)
        part, piece = ring.holders[ring.rank]
        self._numels = {item.index: item.parts[part].cut.local_numel(piece) for item in items}
        self.here: list[tuple[MatrixItem, Extent]] = []
        """Items that this rank computes by itself, together with those of the bucket."""
        self.header = torch.empty(0)
        self._missing: list[int] | None = None

    def there(self, directions: Mapping[int, torch.Tensor], wire: torch.dtype, faults: StepFaults) -> Moving | _Local:
        """Start to send the directions in the dtype `wire`, unless they are at their owners.

        Those without a gradient are zeros, so that sizes are the same in each step.
        """
        missing = [index for index in self._numels if index not in directions]
        if missing != self._missing or self.header.dtype != wire:
            self._missing = missing
            self.header = torch.tensor(header_of(missing), dtype=wire, device=self.device)
        local = {
            index: directions[index].to(self.device)
            if index in directions
            else torch.zeros(numel, dtype=wire, device=self.device)
            for index, numel in self._numels.items()
        }
        return local if self.exchange.at_owners else self.exchange.there(local, faults.header(self.header))

    def whole(self, there: Moving | _Local) -> tuple[dict[MatrixItem, torch.Tensor], torch.Tensor]:
        """Returns the own items, each [number, rows, columns], and the headers that came with gradients, if any."""
        if isinstance(there, Moving):
            return self.exchange.whole(there)
        holder = self.exchange.ring.holders[self.exchange.ring.rank]
        held = [(item, item.held(holder)) for item in self.exchange.own]
        whole = {item: there[item.index][part.start : part.stop].view(item.batch) for item, part in held}
        return whole, torch.empty(0)
