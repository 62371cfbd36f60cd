"""`MatrixOptimizer`: an optimizer whose step is a function of full matrices, whatever way their elements are sharded.

    gradient's shard --directions--> direction's shard --to owners--> full matrices, at their owners
                                                                        | function, batched by shape
    parameter's shard <----apply---- update's shard  <--from owners-- full updates

Everything is computed on local tensors: no operation of a step is dispatched by DTensor. Matrices that are complete
on one rank (`Owned()`, experts or heads under a placement that does not cut them) do not travel.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from sherd._torch import DTensorSpec, in_backward
from sherd.comm.failures import own_rank
from sherd.engine import FlatParameter, Runtime, ShardedParameter, Unit, watcher
from sherd.errors import GradientError, OptimizerError, PolicyError, PolicyTypeError, SherdError, in_short
from sherd.layout.extent import Extent
from sherd.layout.placement import Shape
from sherd.optim.exchange import Bucket, Local, MatrixItem, Moving
from sherd.optim.faults import FUNCTION, GRADIENT, NOT_FINITE, OTHERS, Reported
from sherd.optim.gradients import laid_as_gradient, local_gradient, own_gradients
from sherd.optim.loaded import at_rest
from sherd.optim.matrix_plan import Group, MatrixPlan, PlanKey, batch_of, key_of, options_of
from sherd.optim.matrix_state import MatrixState
from sherd.optim.under_way import Parts, carry_out
from sherd.tensor.ragged import local_part
from sherd.wrap.names import plain_name

Shapes = Callable[[int, int], Mapping[str, Shape]]
"""Returns the shapes of what is kept of a matrix, by name, for its numbers of rows and columns."""

KEEPS = 'lambda rows, columns: {"left": (rows, rows)}'

ADAMS = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
"""The keys of Adam's state of a parameter."""

MOST_PLANS = 512
"""A plan holds its parameters, which a user may have taken out of the optimizer since."""


class MatrixOptimizer(Optimizer):
    """Steps every parameter by a function of its full matrix.

    In a step `function(matrices)` is called with the gradients of matrices of one shape, [number, rows, columns], and
    returns as many updates of that shape. A parameter p becomes `p * (1 - lr * weight_decay) - lr * update`. The
    function runs once for each matrix, on one rank: the matrices are divided so that all ranks have equal work. Under
    `Owned()`, and where a rank's shard is full matrices, nothing travels. Else the shards of a gradient go to its
    owner in one all-to-all, and those of the update return in another.

    A 2-D parameter is one matrix, a 3-D one a batch of them (experts), and one of more dims, of a convolution, is
    flattened behind its first dim.

    With `state` it is `function(matrices, {name: tensor})`: what it keeps of these matrices, [number, *shape], which it
    changes in place or replaces. `optimizer.state[parameter][name]` shows that of all matrices of a parameter as one
    DTensor, with its entries on the owners. Checkpoints load it in other layouts and on other numbers of ranks.

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
        self._plans: OrderedDict[PlanKey, MatrixPlan] = OrderedDict()
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
        if isinstance(param_group, dict) and not isinstance(param_group["params"], set):
            known = {id(parameter) for group in self.param_groups for parameter in group["params"]}
            param_group = {**param_group, "params": members_in(param_group["params"])}
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
            self.param_groups.pop()  # torch has added it; a caller that catches the error must not step it
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
                        f"{name or self._name_of(parameter)}: tensor_parallel='blockwise' takes parts of different "
                        f"ranks for matrices, of which {type(self).__name__} keeps nothing; take 'whole', or a "
                        "function without state (Muon without beta2)"
                    )

    _PICKLED: tuple[str, ...] = ("_function", "_shapes", "_wire_dtype")
    """Own attributes that a copy of the optimizer has, too. The copy plans its own steps."""

    def __getstate__(self) -> Group:
        """Returns what torch's optimizers pickle, and the own attributes."""
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._PICKLED}}

    def __setstate__(self, state: Group) -> None:
        """Take over a pickled state, or a loaded one, as `load_state_dict` calls this, too."""
        super().__setstate__(state)
        self._plans, self._stepped = OrderedDict(), set()

    def load_state_dict(self, state_dict: Group) -> None:
        """Load a state. Options that its groups do not have, as those of torch's optimizers, stay as they are.

        State of full matrices keeps its dtype, where torch would give it the parameter's. AdamW's moments of matrices
        are left out, with the options of their group: no momentum can be made of them. A warning names them.
        """
        state_dict = watcher.fitting(self, state_dict, self._foreign)
        groups, given = state_dict["param_groups"], state_dict["state"]
        if len(groups) == len(self.param_groups):
            filled = [{**own, **loaded} for own, loaded in zip(self.param_groups, groups, strict=True)]
            state_dict = {**state_dict, "param_groups": filled}
        super().load_state_dict(state_dict)
        # torch has cast the loaded state to the dtypes of parameters: take what was given again.
        own, keys = ([each for group in of for each in group["params"]] for of in (self.param_groups, groups))
        key_of_id = dict(zip(map(id, own), keys, strict=True))
        for group in self.matrix_groups():
            for parameter in group["params"]:
                loaded = given.get(key_of_id[id(parameter)], {})
                for name, dtype in self._dtypes(group, parameter).items():
                    if name in loaded:
                        self.state[parameter][name] = at_rest(parameter, loaded[name].clone(), dtype)

    def _foreign(self, group: Group, parameter: torch.Tensor, state: Mapping[str, object]) -> set[str]:
        """Returns the keys of a parameter's state that its group cannot use."""
        is_adams = "exp_avg" in state and "exp_avg" not in self._dtypes(group, parameter)
        return ADAMS & set(state) if is_adams else set()

    def spec_of_state(self, parameter: torch.Tensor, key: str, shape: torch.Size) -> DTensorSpec | None:
        """Returns the layout of a loaded state: the gradient's, or at the matrices' owners; None: torch's choice."""
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
        shapes = self.state_shapes(group, *batch_of(parameter, *options_of(group))[1:])
        return dict.fromkeys(shapes, torch.promote_types(parameter.dtype, torch.float32))

    def matrix_groups(self) -> list[Group]:
        """The parameter groups that are stepped matrix by matrix."""
        return self.param_groups

    def __repr__(self) -> str:
        """Returns what is done with each parameter, a line for all that differ in numbers alone."""
        groups = self.matrix_groups()
        names = self._names(groups)
        # Not the plan of a step, which all ranks make together.
        plan = self._plans.get(key_of(groups)) or MatrixPlan(groups, joins=False)
        alike: dict[tuple[str, str, bool], list[int]] = defaultdict(list)
        for index, parameter in enumerate(plan.parameters):
            name = re.sub(r"\d+", "*", names[id(parameter)])
            number, rows, columns = plan.batches[index]
            size = f"{number} x {rows} x {columns}" if number > 1 else f"{rows} x {columns}"
            alike[name, size, plan.is_stepped[index]].append(index)
        lines: dict[tuple[str, ...], int] = {
            (name, size, plan.way_of(indices) if is_stepped else "frozen"): len(indices)
            for (name, size, is_stepped), indices in alike.items()
        }
        return "\n".join([f"{type(self).__name__} of full matrices", *rows_of(lines)])

    def _names(self, groups: Iterable[Group]) -> dict[int, str]:
        names: dict[int, str] = {}
        for group in groups:
            given = group.get("param_names") or map(ShardedParameter.name_of, group["params"])
            names |= zip(map(id, group["params"]), given, strict=False)
        return names

    def _name_of(self, parameter: torch.Tensor) -> str:
        return self._names(self.matrix_groups()).get(id(parameter)) or ShardedParameter.name_of(parameter)

    def _plan_of(self, groups: Sequence[Group]) -> MatrixPlan:
        # More than one where a unit at a time is stepped (`step_in_backward`).
        of_plan = key_of(groups)
        plan = self._plans.get(of_plan)
        if plan is None:
            plan = self._plans[of_plan] = MatrixPlan(groups, others=list(self._plans.values()))
            if len(self._plans) > MOST_PLANS:
                self._plans.popitem(last=False)
        return plan

    @property
    def flops_of_ranks(self) -> Mapping[int, float]:
        """The work of each rank, in units of `MatrixItem.flops`, on matrices that have one owner."""
        return self._plan_of(self.matrix_groups()).flops

    def _agree_on(self, plan: MatrixPlan) -> None:
        """Return when all ranks are about to step by this plan for the first time.

        Raises:
            CommError: they do something else, or step other matrices, with other options.
        """
        # The other options of the groups are among what is pending.
        terms = [f"{name.lstrip('_')}={getattr(self, name)}" for name in self._PICKLED if name.endswith("_dtype")]
        units: dict[int, Unit] = {}
        for index in sorted(plan.traveling):
            parameter, (number, rows, columns) = plan.parameters[index], plan.batches[index]
            wire = self.travels_in(parameter.dtype, plan.computes_on(index))
            terms.append(f"{self._name_of(parameter)} as {number} x {rows} x {columns} in {wire}")
            if (record := ShardedParameter.of(parameter)) is not None and isinstance(owner := record.owner, Unit):
                units[owner.id] = owner
        Runtime.agree_on_call(list(units.values()), f"begins to step {type(self).__name__} by a new plan", terms)

    # What a subclass may do otherwise

    def others(self) -> Sequence[torch.Tensor]:
        """Returns the parameters that are stepped after the matrices, otherwise."""
        return ()

    def directions(
        self, group: Group, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Returns what the function is given of each parameter: a tensor shaped as the parameter's local gradient.

        It is computed element by element, on each rank for its own elements.

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
        """Returns the updates of full matrices of one shape, [number, rows, columns].

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
            GradientError: a gradient has another layout than its parameter, or is sparse, or is missing on some ranks.
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
        carry_out(self._parts_of_step())

    @torch.no_grad()
    def _parts_of_step(self) -> Parts:
        """Steps every parameter that has a gradient. Yields where it would wait for what travels."""
        is_beside_backward, groups = in_backward(), self._left_to_step()
        plan = self._plan_of(groups)
        yield from _Step(self, plan, groups).parts()
        if is_beside_backward:  # the hooks of optimizers have noted writes before these updates arrived
            plan.note_written()

    def _left_to_step(self) -> list[Group]:
        """Returns the groups of matrices, outside of backward without those that were stepped within it."""
        groups = self.matrix_groups()
        if in_backward():
            self._stepped |= {id(each) for group in groups for each in group["params"]}
            return groups
        stepped, self._stepped = self._stepped, set()
        if not stepped:
            return groups
        # Their gradients are gone, and zeros would be sent in their place.
        left = [
            [each for each in group["params"] if each.grad is not None or id(each) not in stepped] for group in groups
        ]
        return [{**group, "params": each} for group, each in zip(groups, left, strict=True)]


class _Step:
    """One step of an optimizer by a plan.

    Attributes:
        directions: what the function is given of each parameter that has a gradient, 1-D, by the parameter's number in
            the plan. Empty where something is wrong on this rank.
        updates: elements of each parameter's local tensor, and what is added to them.
    """

    def __init__(self, optimizer: MatrixOptimizer, plan: MatrixPlan, groups: Sequence[Group]) -> None:
        self.optimizer, self.plan, self.faults = optimizer, plan, plan.faults
        self.groups = list(zip(groups, plan.by_group, strict=True))
        self.directions: dict[int, torch.Tensor] = {}
        # Where nothing travels no header tells the other ranks.
        self.others = optimizer.others() if plan.traveling else ()
        self.updates: dict[int, list[tuple[Extent, torch.Tensor]]] = defaultdict(list)

    def parts(self) -> Parts:
        """Makes the step. Yields where it would wait for what travels."""
        if reported := self.faults.take_reported():
            self._raise_reported(reported)
        self.faults.take()  # of a step that was given up with the backward around it
        if self.plan.begins():
            self.optimizer._agree_on(self.plan)
            self._move_states()
        self._take_directions()
        self.faults.look_at_others(len(self.plan.parameters), self.others)
        self._compute(self.plan.local, {})
        now = self.faults.keep_reported((yield from self._exchange()))
        if now is not None:
            self._raise_reported(now)
        for group, indices in self.groups:
            self._apply(group, [index for index in indices if index in self.updates])

    def _move_states(self) -> None:
        """Move what is kept of parameters to where this plan steps them. All ranks do so in its first step."""
        state_of = self.optimizer.state
        for parameter in self.plan.parameters:
            record = ShardedParameter.of(parameter)
            for key, value in state_of.get(parameter, {}).items():
                if record is not None and isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    state_of[parameter][key] = laid_as_gradient(value, record)
        for group, indices in self.groups:
            self._place_states(group, indices, makes_them=False)

    def _place_states(self, group: Group, indices: Sequence[int], makes_them: bool) -> None:
        """Move the states of matrices that are not at their owners. With `makes_them`, make new ones."""
        state_of = self.optimizer.state
        for index in indices:
            parameter, (_, *sizes) = self.plan.parameters[index], self.plan.batches[index]
            if (home := self.plan.homes.get(index)) is None:
                continue
            for name, shape in self.optimizer.state_shapes(group, *sizes).items():
                value = state_of[parameter].get(name) if parameter in state_of else None
                if value is not None and tuple(value.shape) != (home.number, *shape):
                    raise OptimizerError(
                        f"{self.optimizer._name_of(parameter)}: its state {name!r} has shape {tuple(value.shape)}, and "
                        f"{type(self.optimizer).__name__} keeps {(home.number, *shape)}; load what was saved with the "
                        "same function"
                    )
                if value is not None or makes_them:
                    state_of[parameter][name] = home.placed(value, shape, local_part(parameter))

    def _take_directions(self) -> None:
        """Note the directions of all parameters that have a gradient, 1-D; none where something is wrong."""
        at = 0
        directions: dict[int, torch.Tensor] = {}
        try:
            gradients: list[torch.Tensor | None] = []
            for parameter in self.plan.parameters:
                at = len(gradients)
                gradients.append(local_gradient(parameter))
            for group, indices in self.groups:
                present = [index for index in indices if gradients[index] is not None]
                at, given = indices[0] if indices else 0, [gradients[index] for index in present]
                parameters = [self.plan.parameters[index] for index in present]
                computed = self.optimizer.directions(group, parameters, given)  # type: ignore[arg-type]
                directions |= {index: each.reshape(-1) for index, each in zip(present, computed, strict=True)}
                self._place_states(group, present, makes_them=True)
        except Exception as error:
            self.faults.note(GRADIENT, at, error)
        else:
            self.directions = directions

    def _exchange(self) -> Generator[None, None, list[tuple[list[int], torch.Tensor]]]:
        """Compute all other updates: meanwhile, the next bucket travels to its owners, and the one before from them.

        Yields before it waits for the first bucket that travels to owners, and when all travel from them.

        Returns:
            The headers of each bucket, [2 or 1, ranks, HEADER], and the ranks. Two: to owners and from
            them; one: gradients were at owners already.
        """
        buckets = self.plan.buckets
        # One bucket ahead: while a rank computes a bucket's updates, the next one is on its way.
        sent, headers, updates = deque(map(self._to_owners, buckets[:1])), [], []
        first = next((bucket for bucket in buckets if not bucket.at_owners), None)
        for number, bucket in enumerate(buckets):
            sent += map(self._to_owners, buckets[number + 1 : number + 2])
            if bucket is first:
                yield
            header, moving = self._turn(bucket, sent.popleft())
            headers.append(header)
            updates.append(moving)
        # Nothing reads directions any more: their memory is free for what runs while the updates travel.
        with_gradient = set(self.directions)
        self.directions.clear()
        if updates:
            yield
        status = []
        for bucket, header, moving in zip(buckets, headers, updates, strict=True):
            arrived, from_owners = bucket.arrived(moving)
            status.append((bucket.ring.ranks, torch.stack([header, from_owners] if len(header) else [from_owners])))
            for index, held, update in arrived:
                if index in with_gradient:
                    self.updates[index].append((held, update))
        return status

    def _to_owners(self, bucket: Bucket) -> Moving | Local:
        wire = self.optimizer.travels_in(bucket.dtype, bucket.device)
        return bucket.to_owners(self.directions, wire, self.faults)

    def _turn(self, bucket: Bucket, sent: Moving | Local) -> tuple[torch.Tensor, Moving]:
        """Compute the updates of a bucket that has reached its owners, and start to send them to the holders.

        Returns:
            The headers that came with it, if any, and the exchange that was started.
        """
        full, header = bucket.full(sent)
        # Where the host does not read the headers in time.
        is_void = None if len(header) == 0 or header.device.type == "cpu" else (header != header[0]).any()
        # Of matrices without a gradient nothing is computed or kept.
        idle = {item: torch.zeros_like(each) for item, each in full.items() if item.index not in self.directions}
        stepped = {item: each for item, each in full.items() if item not in idle}
        computed = idle | self._compute(bucket.local, stepped, is_void)
        return header, bucket.from_owners(computed, self.faults)

    def _compute(
        self,
        local: Sequence[tuple[MatrixItem, Extent]],
        received: Mapping[MatrixItem, torch.Tensor],
        is_void: torch.Tensor | None = None,
    ) -> dict[MatrixItem, torch.Tensor]:
        """Returns the updates of the items in `received` and `local`, and notes those of the latter.

        One call of the function computes all matrices of one shape and parameter group, or one matrix. Where something
        is wrong on this rank, updates are zeros.
        """
        matrices = dict(received)
        for item, held in local:
            if item.index in self.directions:
                own = self.directions[item.index][held.start : held.stop].view(item.batch)
                matrices[item] = own.to(self.plan.computes_on(item.index))
        alike: dict[tuple[object, ...], list[MatrixItem]] = defaultdict(list)
        for item, each in matrices.items():
            alone = item if self.plan.one_by_one else None
            alike[self.plan.group_of[item.index], item.batch[1:], each.dtype, each.device, alone].append(item)
        computed: dict[MatrixItem, torch.Tensor] = {}
        for items in alike.values():
            group = self.groups[self.plan.group_of[items[0].index]][0]
            together = _joined([matrices[item] for item in items])
            update = torch.zeros_like(together)
            try:
                if not self.faults.wrong:
                    update = self._update_of(group, items, together)
                    numbers = [item.index for item in items for _ in range(item.batch[0])]
                    if not float(group["lr"]):
                        # Such a step makes state, for torch's checkpointing, of gradients that are zeros.
                        update = torch.zeros_like(together)
                    update = self.faults.finite(update, numbers, is_void)
            except Exception as error:
                self.faults.note(FUNCTION, items[0].index, error)
            computed |= zip(items, update.split([item.batch[0] for item in items]), strict=True)
        for item, held in local:
            if item in computed:
                self.updates[item.index].append((held, computed[item].reshape(-1)))
        return computed

    def _update_of(self, group: Group, items: Sequence[MatrixItem], matrices: torch.Tensor) -> torch.Tensor:
        """Returns the updates of the matrices of some items, and keeps their states.

        Raises:
            OptimizerError: the function failed, or returned or left what it may not.
        """
        optimizer, of = self.optimizer, [self.plan.parameters[item.index] for item in items]
        function = f"the function of {type(optimizer).__name__}"
        version = None if matrices.is_inference() else matrices._version
        number, rows, columns = matrices.shape
        shapes = {name: (number, *shape) for name, shape in optimizer.state_shapes(group, rows, columns).items()}
        kept = {
            name: [
                self.plan.homes[item.index].part_of(item, optimizer.state[parameter][name])
                for item, parameter in zip(items, of, strict=True)
            ]
            for name in shapes
        }
        # On the device, where what is kept may rest in host memory.
        state = {name: _joined(parts).to(matrices.device) for name, parts in kept.items()}
        try:
            update = optimizer.updates(group, matrices, state) if kept else optimizer.updates(group, matrices)
        except torch.OutOfMemoryError:
            raise  # not wrapped, since callers catch it by its type
        except Exception as error:
            sizes = tuple(matrices.shape)
            raised = f"{function} raised {type(error).__name__} for matrices of shape {sizes}, of {self._names_of(of)}"
            raise OptimizerError(f"{raised}: {error}") from error
        if wrong := _wrong(update, matrices, version) or _wrong_state(state, shapes):
            raise OptimizerError(f"{function} {wrong.format(self._names_of(of))}")
        for name, parts in kept.items():
            if state[name] is not parts[0]:  # else the function has changed it in place
                torch._foreach_copy_(parts, state[name].split([item.batch[0] for item in items]))
        return update

    def _apply(self, group: Group, indices: Sequence[int]) -> None:
        if not (lr := float(group["lr"])):
            return
        local = {index: local_part(self.plan.parameters[index]) for index in indices}
        nonempty = [each for each in local.values() if each.numel()]
        # Before any update is added, as in torch: an update is not decayed.
        if nonempty and (decay := lr * group["weight_decay"]):
            torch._foreach_mul_(nonempty, 1 - decay)
        by_scale: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
        for index, parameter in local.items():
            _, rows, columns = self.plan.batches[index]
            into, added = by_scale[self.optimizer.scale_of(group, rows, columns)]
            for held, update in self.updates[index]:
                is_all = held.numel == parameter.numel()  # of a plain parameter, which may have any strides
                into.append(parameter if is_all else parameter.view(-1)[held.start : held.stop])
                added.append(update.to(parameter).view(into[-1].shape))
        for scale, (into, added) in by_scale.items():
            torch._foreach_add_(into, added, alpha=-lr * scale)

    # What went wrong

    def _raise_reported(self, reported: Sequence[tuple[list[int], Reported]]) -> None:
        wrong, index, error = self.faults.take()
        if wrong:
            raise error or self._failure(wrong, index, own_rank())
        read = [(ranks, each.read()) for ranks, each in reported]
        for ranks, headers in [(ranks, ways[way]) for way in range(2) for ranks, ways in read if way < len(ways)]:
            for rank, (wrong, high, low, _) in zip(ranks, headers, strict=True):
                if wrong:
                    raise self._failure(wrong, high * 256 + low - 1, rank)
            self._check_missing(ranks, headers)

    def _failure(self, wrong: int, index: int, rank: int) -> SherdError:
        name, where = self._name_at(index), f"on rank {rank}"
        if wrong == OTHERS:
            return GradientError(
                f"the gradient of {name}, which {type(self.optimizer).__name__} leaves to AdamW, has elements that are "
                f"inf or nan {where}; skip such steps (sherd.step, a gradient scaler)"
            )
        if wrong == NOT_FINITE:
            return OptimizerError(
                f"the update of {name}, computed {where}, has elements that are inf or nan; look for gradients that "
                "are not finite, skip such steps (sherd.step, a gradient scaler), and go on from the last checkpoint"
            )
        log = "its error is in the log of that rank"
        if wrong == FUNCTION:
            return OptimizerError(f"the function of {type(self.optimizer).__name__} failed for {name} {where}; {log}")
        return GradientError(f"the gradient of {name} cannot be stepped {where}; {log}")

    def _check_missing(self, ranks: Sequence[int], headers: Sequence[list[int]]) -> None:
        """Raise where one rank has no gradient of a parameter and another rank has one."""
        if all(header == headers[0] for header in headers):
            return
        lacking, rank = min((header, rank) for header, rank in zip(headers, ranks, strict=True) if any(header))
        other = next(each for header, each in zip(headers, ranks, strict=True) if header != lacking)
        _, high, low, _ = lacking
        name = self._name_at(high * 256 + low - 1)
        raise GradientError(
            f"rank {rank} has no gradient of {name}, and rank {other} has gradients of other parameters; give all "
            "ranks gradients of the same ones"
        )

    def _name_at(self, index: int) -> str:
        return self.optimizer._name_of([*self.plan.parameters, *self.others][index])

    def _names_of(self, parameters: Sequence[torch.Tensor]) -> str:
        return in_short([self.optimizer._name_of(each) for each in parameters], 3)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the tensors concatenated; a single one uncopied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def members_in(params: Any) -> list[Any]:
    """Returns a group's parameters, or `(name, parameter)` pairs, with the members of flat parameters for these."""
    members: list[Any] = []
    for entry in [params] if isinstance(params, torch.Tensor) else params:
        name, flat = entry if isinstance(entry, tuple) else ("", entry)
        record = ShardedParameter.of(flat) if isinstance(flat, FlatParameter) else None
        if record is None or not isinstance(record.owner, Unit):
            members.append(entry)
            continue
        shards = [each.shard for each in record.owner.parameters]  # a unit has one flat parameter
        names = [plain_name(f"{name.rpartition('.')[0]}.{own}").lstrip(".") for own in flat.names]
        members += zip(names, shards, strict=True) if isinstance(entry, tuple) else shards
    return members


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
    """Returns whether tensor parallelism cuts a parameter other than between experts."""
    record = ShardedParameter.of(parameter)
    full, part = tuple(parameter.shape), parameter.shape if record is None else tuple(record.shape)
    return full != part and not (len(full) == 3 and full[1:] == part[1:])


def _require_shapes(shapes: Mapping[str, Shape]) -> None:
    try:
        for name, shape in shapes.items():
            torch.empty((len(name), *shape), device="meta")  # fails for a name that is no text, or a shape that is none
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


def rows_of(lines: Mapping[tuple[str, ...], int]) -> Iterable[str]:
    """Yields lines whose columns are as wide as their longest entry; the last one is how often a line is meant."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for entries, number in lines.items():
        *first, last = (entry.ljust(width) for entry, width in zip(entries, widths, strict=True))
        times = f"  ({number} of them)" if number > 1 else ""
        yield f"  {'  '.join([*first, last.rstrip()])}{times}"
