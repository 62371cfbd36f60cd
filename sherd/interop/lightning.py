"""sherd as a strategy of Lightning 2.6: `SherdStrategy` for the Trainer, `SherdFabricStrategy` for Fabric.

Both subclass Lightning's `DDPStrategy`, which starts processes and sends what is no parameter. A checkpoint is a file,
as of an unsharded module ("full"), or a folder of shards ("sharded"). A folder has the form of those of Lightning's own
sharded strategies: torch's distributed checkpoint, and `meta.pt`.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Union

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd.api.accumulate import without_reduction
from sherd.api.auto_shard import auto_shard, check_arguments
from sherd.api.blocks import repeated_blocks
from sherd.api.ema import Ema
from sherd.api.fully_shard import Options, fully_shard
from sherd.api.module import register_fsdp_forward_method
from sherd.api.unsharded import unsharded
from sherd.checkpoint.catalog import Catalog
from sherd.checkpoint.loading import to_load
from sherd.checkpoint.saving import Form, state_by_name
from sherd.clip import clip_grad_norm_
from sherd.engine import Unit, watcher
from sherd.errors import CheckpointError, ModuleError, NoCheckpointError, PolicyError, StateError, UnsupportedError
from sherd.grad_scaler import ShardedGradScaler
from sherd.interop.packages import require_tried, take_rank0s_values
from sherd.policy import MixedPrecisionPolicy, OffloadPolicy
from sherd.requirements import require_number
from sherd.wrap import ModuleWrapPolicy, WrapPolicy
from sherd.wrap.names import plain_name

require_tried("lightning", "2.6", "sherd.interop.lightning")

import torchmetrics  # noqa: E402  below the check, which says what to install
from lightning import Callback, fabric, pytorch  # noqa: E402
from lightning.fabric.utilities.device_dtype_mixin import _update_properties  # noqa: E402

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["EmaCallback", "SherdFabricStrategy", "SherdStrategy"]

HALVES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# Lightning's names in checkpoints: a folder's file of all but tensors, written last; the model's shards in a folder of
# `FSDPStrategy`; the model's own parameters, where `state_dict` has averages.
META, MODEL, CURRENT = "meta.pt", "model", "current_model_state"

OTHERWISE = "load it as it was saved, or what has the same names with strict=False (of a module: strict_loading=False)"

State = dict[str, Any]
Targets = Mapping[str, nn.Module | Optimizer]


class _Sharding:
    """What both strategies do. Lightning's own base class comes after this class, and gets the other arguments."""

    broadcast: Callable[[Any], Any]
    is_global_zero: bool
    root_device: torch.device
    world_size: int
    checkpoint_io: Any
    model: nn.Module

    def __init__(
        self,
        # LightningCLI evaluates annotations, and `|` takes no text, which the first of these is.
        policy: Union[WrapPolicy, set[type[nn.Module]], None] = None,  # noqa: UP007
        *,
        state_dict_type: Literal["full", "sharded"] = "full",
        device_mesh: tuple[int, int] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **options: Unpack[Options],
    ) -> None:
        who = type(self).__name__
        check_arguments(options, who)
        if state_dict_type not in ("full", "sharded"):
            raise PolicyError(f'{who}(state_dict_type={state_dict_type!r}): expected "full" or "sharded"')
        if device_mesh is not None and not (isinstance(device_mesh, tuple) and len(device_mesh) == 2):
            raise PolicyError(f"{who}(device_mesh={device_mesh!r}): expected (replicas, shards), two numbers of ranks")
        self._policy = ModuleWrapPolicy(policy) if isinstance(policy, set) else policy
        self._given, self._shape = options, device_mesh
        self.state_dict_type = state_dict_type
        waits = {} if timeout is None else {"timeout": timeout}
        super().__init__(process_group_backend=process_group_backend, **waits)  # type: ignore[call-arg]
        self._set_up: list[nn.Module] = []  # of Fabric, as is the next
        self._backward_sync_control = SimpleNamespace(
            no_backward_sync=lambda module, enabled: without_reduction(Unit.below(module)) if enabled else nullcontext()
        )

    # A module

    @torch.inference_mode(False)
    def _shard(self, module: nn.Module, precision: str) -> None:
        if Unit.of(module) is not None:
            return
        inside, options = Unit.below(module), self._options(precision)
        if inside and self._policy is not None:
            raise PolicyError(
                f"{type(self).__name__}(policy=...): modules of {type(module).__name__} are sharded already, "
                f"{inside[0].name} among them; leave the policy out, or shard no module before"
            )
        metrics = {name: each for name, each in module.named_modules() if isinstance(each, torchmetrics.Metric)}
        for name, metric in metrics.items():
            if metric.device.type == "meta":
                raise ModuleError(
                    f"{name}, a {type(metric).__name__}, started on the meta device, where a metric's first state has "
                    "no value; make it outside of init_module, or in the module's setup hook"
                )
        tensors = chain(module.parameters(), module.buffers())
        filled = [each for each in tensors if not each.is_meta and not isinstance(each, DTensor)]
        take_rank0s_values(filled, options, "the strategy's setup")
        if precision in HALVES and "mp_policy" not in self._given:
            own: Options = {**options, "mp_policy": MixedPrecisionPolicy()}
            for each in module.modules():  # a batch norm computes with weights of its statistics' dtype
                if isinstance(each, nn.modules.batchnorm._BatchNorm) and each.affine and Unit.of(each) is None:
                    fully_shard(each, **own)
        if inside or (self._policy is None and not _has_blocks(module)):
            fully_shard(module, **options)
        else:
            auto_shard(module, self._policy, **options)
        offload = options.get("offload_policy", OffloadPolicy())
        self._give_values(module, torch.device("cpu") if offload.step_place == "host" else self.root_device)
        for metric in metrics.values():
            metric.to(self.root_device)
        _update_properties(module, device=self.root_device)
        # In manual optimization, backwards and steps of optimizers run inside of training_step.
        is_manual = not getattr(module, "automatic_optimization", True)
        for name in STEPS[1:] if is_manual else STEPS:
            if callable(getattr(module, name, None)):
                register_fsdp_forward_method(module, name)

    def _options(self, precision: str) -> Options:
        shape = self._shape or (self.world_size,)
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        options: Options = {"mesh": mesh, "on_touch": "unshard"}
        if precision in HALVES:  # autocast casts the inputs, operation by operation
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=HALVES[precision], reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        return {**options, **self._given}

    def _give_values(self, module: nn.Module, device: torch.device) -> None:
        """Give what is on the meta device memory, and the values of `reset_parameters`, the same on all ranks."""
        empty = [
            each
            for each in module.modules()
            if any(tensor.is_meta for tensor in chain(each.parameters(False), each.buffers(False)))
        ]
        if not empty:
            return
        for each in empty:
            each.to_empty(device=device, recurse=False)
        resets: dict[nn.Module, Any] = {each: getattr(each, "reset_parameters", None) for each in empty}
        without = {type(each).__name__ for each, reset in resets.items() if reset is None}
        if without:
            warnings.warn(
                f"{', '.join(sorted(without))} started on the meta device and has no reset_parameters() method, so its "
                "values are whatever the memory held; write the method, or load a checkpoint that has all of them",
                stacklevel=2,
            )
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.broadcast(torch.initial_seed()))
            for owner in [each for each in module.modules() if Unit.of(each) is not None]:
                with unsharded(owner, recurse=False):
                    for each in filter(resets.get, _modules_of_unit(owner)):
                        resets[each]()

    # States

    def get_module_state_dict(self, module: nn.Module) -> State:
        is_full = self.state_dict_type == "full"
        return get_model_state_dict(module, options=StateDictOptions(full_state_dict=is_full, cpu_offload=is_full))

    def _module_of(self, optimizer: Optimizer) -> nn.Module:
        return self.model

    def get_optimizer_state(self, optimizer: Optimizer) -> State:
        """Returns the state of `optimizer`: sharded, by names; or unsharded, by numbers, as a plain optimizer's."""
        is_full = self.state_dict_type == "full"
        form = Form(full=is_full, on_host=is_full, is_kept=self.is_global_zero or not is_full)
        state = state_by_name(Catalog(self._module_of(optimizer)), optimizer, None, form)
        return _renamed(state, {name: at for at, name in enumerate(_names(state))}) if is_full and state else state

    def _load_optimizer(self, optimizer: Optimizer, state: State, strict: bool) -> None:
        """Load state, which all ranks have, by numbers or names; if not `strict`, what is under the same names."""
        catalog, groups = Catalog(self._module_of(optimizer)), state["param_groups"]  # a dict by numbers in a folder
        state = {**state, "param_groups": list(groups.values()) if isinstance(groups, dict) else groups}
        names = dict.fromkeys(name for entry in chain(*catalog.groups_of(optimizer)) for name in entry.names)
        saved = _names(state)
        is_named = all(isinstance(name, str) for name in saved)
        if is_named and strict:
            _require_same(names, dict.fromkeys(map(plain_name, saved)), strict)
        sizes = [(len(saved), len(state["param_groups"])), (len(names), len(optimizer.param_groups))]
        if (strict or not is_named) and sizes[0] != sizes[1]:
            has, needs = [f"{parameters} parameters in {groups} groups" for parameters, groups in sizes]
            raise CheckpointError(f"the checkpoint has {has} and the optimizer has {needs}; build it as it was saved")
        if not is_named:
            state = _renamed(state, dict(zip(saved, names, strict=True)))
        elif not strict:
            for group in state["param_groups"]:
                group["params"] = [name for name in group["params"] if plain_name(name) in names]
            for name in set(saved).difference(_names(state)):
                state["state"].pop(name, None)
        to_load(catalog, optimizer, state, load_directly=True)

    def _room_for(self, target: nn.Module | Optimizer, name: str, folder: Metadata, strict: bool) -> State:
        """Returns the shards of a module; or memory for what a folder has of an optimizer, by names of parameters."""
        if isinstance(target, nn.Module):
            own, data = get_model_state_dict(target), folder.state_dict_metadata
            saved = {str(path[0]): data[key] for key, (of, *path) in folder.planner_data.items() if of == name}
            _require_same(own, saved, strict)
            return own
        shards = {plain_name(path): each for path, each in Unit.named_members(self._module_of(target)).items()}
        room: State = {"state": {}, "param_groups": {}}
        for key, (of, *path) in folder.planner_data.items():
            if of == name:
                found, at = folder.state_dict_metadata[key], room
                for each in path[:-1]:
                    at = at.setdefault(str(each), {})
                at[str(path[-1])] = None
                if isinstance(found, TensorStorageMetadata):
                    shard = shards.get(str(path[1])) if found.size else None  # a count of steps is on all ranks
                    like = torch.empty(found.size) if shard is None or shard.shape != found.size else shard
                    at[str(path[-1])] = torch.empty_like(like, dtype=found.properties.dtype)
        return room

    def _make_room(self, path: str | Path) -> Path:
        """Remove a checkpoint at `path` that the next one could not replace. Returns rank 0's path."""
        path = self.broadcast(path)
        if self.state_dict_type == "sharded" and re.match(r"\w[\w+.-]+:/", str(path)):
            raise CheckpointError(
                f'{path}: state_dict_type="sharded" writes a folder that all ranks share, to no URL; give a path and '
                'upload the folder, or write state_dict_type="full"'
            )
        path = Path(path)
        if self.is_global_zero and (path / META).exists():
            shutil.rmtree(path)
        elif self.is_global_zero and self.state_dict_type == "sharded" and path.is_file():
            path.unlink()
        self.broadcast(None)  # other ranks wait for rank 0
        return path

    def _save_folder(self, path: str | Path, sharded: State, rest: State) -> None:
        path = self._make_room(path)
        state_dict_saver.save(sharded, checkpoint_id=path)
        if self.is_global_zero:
            torch.save(rest, path / META)

    def _shards(self, path: str | Path, targets: Targets, strict: bool) -> State:
        folder = FileSystemReader(path).read_metadata()
        found = targets.keys() & {name for name, *_ in folder.planner_data.values()}
        shards = {name: self._room_for(targets[name], name, folder, strict) for name in targets if name in found}
        if CURRENT in shards:  # the same model's averages are read into its own shards
            shards[CURRENT] = {name: value.clone() for name, value in shards[CURRENT].items()}
        state_dict_loader.load(shards, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=not strict))
        return shards

    @torch.inference_mode(False)
    def _load(self, path: str | Path, targets: Targets, strict: bool, weights_only: bool | None) -> State:
        """Returns a checkpoint of either kind; of a folder, shards laid out as those of the `targets` that it has."""
        path = self.broadcast(path)
        if Path(path).is_dir():
            if not (Path(path) / META).exists():
                raise NoCheckpointError(f"{path} has no {META}, so it is no complete checkpoint; choose another one")
            sharded = self._shards(path, targets, strict)
            return {**torch.load(Path(path) / META, map_location="cpu", weights_only=weights_only), **sharded}
        if type(self.checkpoint_io) is fabric.plugins.TorchCheckpointIO and Path(path).is_file():
            # Mapped, so that the ranks of a host share one copy.
            return dict(torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only))
        return dict(self.checkpoint_io.load_checkpoint(path, weights_only=weights_only))


class SherdStrategy(_Sharding, pytorch.strategies.DDPStrategy):  # type: ignore[misc]
    """The strategy that has Lightning's Trainer shard with sherd.

        trainer = Trainer(strategy=SherdStrategy(state_dict_type="sharded"), devices=8, precision="bf16-mixed")

    The LightningModule is sharded in place, after `configure_model` and before `configure_optimizers`. Rank 0's initial
    values count. What `configure_model` has sharded by itself stays as it is. Modules that start on the meta device
    (`with trainer.init_module(empty_init=True)`) get memory for their shards, then values by `reset_parameters()`.

    With precision "bf16-mixed" and "16-mixed" parameters are gathered in half precision and gradients are reduced in
    float32, unless `mp_policy` says otherwise; batch norms stay in full precision.

    Args:
        policy: which modules are units, as in `auto_shard`; or a set of classes. None: as the model describes itself,
            or the blocks that it repeats; a model without blocks is one unit.
        state_dict_type: the form of checkpoints. "full": one file with the unsharded state, as of any other strategy,
            which rank 0 gathers and writes. "sharded": a folder, to which each rank writes its shards. Either is loaded
            under either setting, and on any number of ranks.
        device_mesh: `(replicas, shards)`, two numbers of ranks: HSDP. None: shards over all ranks.
        process_group_backend: as `DDPStrategy`'s.
        timeout: as `DDPStrategy`'s.
        options: further arguments of `fully_shard` (`placement`, `mp_policy`, `offload_policy` and others).

    Raises:
        PolicyError, PolicyTypeError: an argument that is out of range, of another type, or unknown to `fully_shard`.
        UnsupportedError: of the Trainer, if a callback averages weights in a copy of the unsharded model.
    """

    @pytorch.strategies.DDPStrategy.precision_plugin.setter  # type: ignore[untyped-decorator]
    def precision_plugin(self, plugin: Any) -> None:
        pytorch.strategies.DDPStrategy.precision_plugin.fset(self, _with_ranks_that_agree(plugin))

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    def _set_up_model(self) -> bool:
        trainer = self.lightning_module.trainer
        for each in trainer.callbacks:
            if isinstance(each, pytorch.callbacks.WeightAveraging | pytorch.callbacks.StochasticWeightAveraging):
                raise UnsupportedError(
                    f"{type(each).__name__} averages a copy of the model that was made before it is sharded; use "
                    "sherd.interop.lightning.EmaCallback(decay=...)"
                )
        is_fitting = trainer.state.fn == pytorch.trainer.states.TrainerFn.FITTING
        if Unit.of(self.model) is None:
            model = self._layer_sync.apply(self.model) if is_fitting and self._layer_sync else self.model
            self.model = self.precision_plugin.convert_module(model)
            self._shard(self.model, self.precision_plugin.precision)
        return bool(is_fitting)

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        if self._set_up_model():
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with without_reduction(Unit.below(self.model)):
            yield

    def lightning_module_state_dict(self) -> State:
        return self.get_module_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> State:
        return self.get_optimizer_state(getattr(optimizer, "optimizer", optimizer))

    def save_checkpoint(self, checkpoint: State, filepath: str | Path, storage_options: object = None) -> None:
        if self.state_dict_type == "full":
            self._make_room(filepath)
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        sharded = {MODEL: checkpoint.pop("state_dict")}
        sharded.update((f"optimizer_{at}", each) for at, each in enumerate(checkpoint.pop("optimizer_states", [])))
        if CURRENT in checkpoint:
            sharded[CURRENT] = checkpoint.pop(CURRENT)
        self._save_folder(filepath, sharded, checkpoint)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> State:
        # As under DDP, states of the model and of callbacks are loaded first, then `on_fit_start` may give optimizers
        # groups that a callback had added, and optimizers are loaded last.
        self._set_up_model()
        # "state_dict" is ModelParallelStrategy's name for the model.
        targets = dict.fromkeys((MODEL, "state_dict", CURRENT), self.model)
        path = self.broadcast(checkpoint_path)
        checkpoint = self._load(path, targets, self.lightning_module.strict_loading, weights_only)
        if MODEL in checkpoint:
            checkpoint["state_dict"] = checkpoint.pop(MODEL)
        if Path(path).is_dir():  # where optimizers find their states
            names = {name for name, *_ in FileSystemReader(path).read_metadata().planner_data.values()}
            checkpoint["optimizer_states"] = [path] * sum(name.startswith("optimizer_") for name in names)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        _load_module(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states, strict = checkpoint["optimizer_states"], self.lightning_module.strict_loading
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"the checkpoint has {len(states)} optimizers, not {len(self.optimizers)}; make as many"
            )
        for at, (optimizer, state) in enumerate(zip(self.optimizers, states, strict=True)):
            if not isinstance(state, dict):
                (state,) = self._shards(state, {f"optimizer_{at}": optimizer}, strict).values()
            self._load_optimizer(optimizer, state, strict)

    def teardown(self) -> None:
        # Shards stay on their device: the next `fit` or `test` goes on with them.
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class SherdFabricStrategy(_Sharding, fabric.strategies.DDPStrategy):  # type: ignore[misc]
    """The strategy that has Lightning's Fabric shard with sherd.

        fabric = Fabric(strategy=SherdFabricStrategy(), devices=8)
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)

    `fabric.setup` shards a module in place, and may be called for several modules. `fabric.save` and `fabric.load` take
    any number of them, and optimizers each of which steps parameters of one module.

    The arguments, and what they raise, are those of `SherdStrategy`.

    Raises:
        StateError: of `fabric.save` and `fabric.load`, for an optimizer of no module that was set up; or a folder of
            shards without the modules to load it into.
    """

    @fabric.strategies.DDPStrategy.precision.setter  # type: ignore[untyped-decorator]
    def precision(self, plugin: Any) -> None:
        fabric.strategies.DDPStrategy.precision.fset(self, _with_ranks_that_agree(plugin))

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with torch.device("meta") if empty_init else nullcontext(), self.precision.module_init_context():
            yield

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: `setup_module` moves the shards."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        self._shard(module, self.precision.precision)
        self._set_up.append(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        watcher.adopt(optimizer)  # built before the sharding; clipping asks it for the parameters before its first step
        return optimizer

    def clip_gradients_norm(self, module: nn.Module, optimizer: Optimizer, **limits: Any) -> torch.Tensor:
        self.precision.unscale_gradients(optimizer)
        return clip_grad_norm_(self.precision.main_params(optimizer), **limits)

    def save_checkpoint(
        self, path: str | Path, state: State, storage_options: object = None, filter: Any = None
    ) -> None:
        if self.state_dict_type == "full":
            self._make_room(path)
            super().save_checkpoint(path, state, storage_options, filter)
            return
        rest = self._convert_stateful_objects_in_state(state, filter or {})
        names = [name for name, each in state.items() if isinstance(each, nn.Module | Optimizer)]
        self._save_folder(path, {name: rest.pop(name) for name in names}, rest)

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> State:
        wanted = state if isinstance(state, dict) else {}
        targets = {name: each for name, each in wanted.items() if isinstance(each, nn.Module | Optimizer)}
        if Path(path).is_dir() and not targets:
            raise StateError(
                f'{path} is a folder; write fabric.load(path, {{"model": model}}), with names of its shards'
            )
        checkpoint = self._load(path, targets, strict, weights_only)
        if not isinstance(state, dict | None):  # of `fabric.load_raw`: the file has this state alone
            self._restored(state, checkpoint, strict)
            return {}
        missing = [name for name in wanted if name not in checkpoint]
        if missing and strict:
            raise KeyError(f"{path} has no {missing[0]!r}; leave it out of the state, or pass strict=False")
        for name in wanted.keys() - set(missing):
            wanted[name] = self._restored(wanted[name], checkpoint.pop(name), strict)
        return checkpoint

    def _restored(self, target: Any, saved: Any, strict: bool) -> Any:
        if isinstance(target, Optimizer):
            self._load_optimizer(target, saved, strict)
        elif isinstance(target, nn.Module):
            _load_module(target, saved, strict)
        elif hasattr(target, "load_state_dict"):
            target.load_state_dict(saved)
        else:
            return saved
        return target

    def _module_of(self, optimizer: Optimizer) -> nn.Module:
        stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for module in self._set_up:
            if stepped <= {id(each) for each in module.parameters()}:
                return module
        raise StateError(
            "an optimizer to be saved or loaded steps parameters of no one module that fabric.setup got; use one "
            "optimizer for each module, and give both to fabric.setup"
        )


class EmaCallback(Callback):  # type: ignore[misc]
    """Average a model's parameters while the Trainer trains it, with `sherd.Ema`: each rank averages its own shards.

    In place of Lightning's `EMAWeightAveraging`, which cannot average shards. The first optimizer step begins the
    averages, and each later step is averaged. Validation and checkpoints (`state_dict`) have the averages, and so has
    the model when training ends. A run that resumes goes on with the model's own parameters, which a checkpoint has as
    `current_model_state`.

    Args:
        decay: a number from 0 to 1, or a function of the number of earlier updates, as `sherd.Ema`'s.
        options: further arguments of `sherd.Ema` (`dtype`, `device`, `buffers`, `trainable_only`).
    """

    def __init__(self, decay: float | Callable[[int], float] = 0.999, **options: Any) -> None:
        if not callable(decay):
            require_number("EmaCallback(decay={})", decay, 0, 1)
        self.ema: Ema | None = None
        self._decay = decay if callable(decay) else lambda num_updates: decay if num_updates else 0.0
        self._options = options
        self._applied = ExitStack()
        self._step = 0

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        if stage == "fit":
            self.ema = None

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        if self.ema is None:
            self.ema = Ema(pl_module, self._decay, **self._options)

    def on_train_batch_end(self, trainer: Any, *args: object) -> None:
        if self.ema is not None and trainer.global_step > self._step:
            self.ema.update()
            self._step = trainer.global_step

    def on_validation_epoch_start(self, trainer: Any, pl_module: nn.Module) -> None:
        if self.ema is not None and (trainer.state.fn == pytorch.trainer.states.TrainerFn.FITTING):
            self._applied.enter_context(self.ema.applied())

    def on_validation_epoch_end(self, trainer: Any, pl_module: nn.Module) -> None:
        self._applied.close()

    def on_exception(self, *args: object) -> None:
        self._applied.close()

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        if self.ema is not None:
            self.ema.copy_to(pl_module)

    def state_dict(self) -> State:
        return {"step": self._step, "num_updates": self.ema.num_updates if self.ema else 0}

    def load_state_dict(self, state_dict: State) -> None:
        self._step = state_dict["step"]
        if self.ema is not None:
            self.ema.num_updates = state_dict["num_updates"]

    def on_save_checkpoint(self, trainer: Any, pl_module: nn.Module, checkpoint: State) -> None:
        if self.ema is None:
            return
        is_folder = getattr(trainer.strategy, "state_dict_type", "full") == "sharded"
        averages: State = {}
        for name, average in self.ema.state_dict()["averages"].items():
            if not is_folder:
                average = (average.full_tensor() if isinstance(average, DTensor) else average).cpu()
            if is_folder or trainer.is_global_zero:
                averages[name] = average
        checkpoint[CURRENT] = checkpoint["state_dict"]
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **averages}

    def on_load_checkpoint(self, trainer: Any, pl_module: nn.Module, checkpoint: State) -> None:
        if trainer.state.fn != pytorch.trainer.states.TrainerFn.FITTING:
            return
        self.ema = Ema(pl_module, self._decay, **self._options)  # of what the strategy has loaded: the averages
        if CURRENT in checkpoint:
            _load_module(pl_module, checkpoint[CURRENT], trainer.lightning_module.strict_loading)


def _with_ranks_that_agree(plugin: Any) -> Any:
    """Returns the precision `plugin`, in which torch's own loss scaler, if there is one, is replaced by sherd's."""
    scaler = getattr(plugin, "scaler", None)
    if type(scaler) is torch.amp.GradScaler:
        plugin.scaler = ShardedGradScaler(plugin.device, enabled=scaler.is_enabled())
        plugin.scaler.load_state_dict(scaler.state_dict())
    return plugin


def _has_blocks(module: nn.Module) -> bool:
    says = ("_no_split_modules", "_fsdp_plan")
    return any(getattr(each, name, None) for each in module.modules() for name in says) or bool(repeated_blocks(module))


def _modules_of_unit(owner: nn.Module) -> Iterator[nn.Module]:
    yield owner
    for child in owner.children():
        if Unit.of(child) is None:
            yield from _modules_of_unit(child)


def _load_module(module: nn.Module, state: State, strict: bool) -> None:
    """Load `state` into `module`. What torch says of names and shapes becomes one line."""
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        if not str(error).startswith("Error(s) in loading state_dict"):
            raise
        raise CheckpointError(f"{' '.join(str(error).split()).rstrip('.')}; {OTHERWISE}") from error


def _require_same(own: State, saved: State, strict: bool) -> None:
    """Raise `CheckpointError` if the metadata `saved` has other shapes than `own`, or, if `strict`, other names."""
    other = []
    for name, each in own.items():
        size, shape = getattr(saved.get(name), "size", None), getattr(each, "shape", None)
        if None not in (size, shape) and size != shape:
            other.append(f"{name} of {size} in place of {shape}")
    lacks = [name for name in own if name not in saved and strict]
    more = [name for name in saved if name not in own and strict]
    rows = (("has no", lacks), ("also has", more), ("has", other))
    faults = [f"{words} {', '.join(names[:8])}{' and others' * (len(names) > 8)}" for words, names in rows if names]
    if faults:
        raise CheckpointError(f"the checkpoint {', '.join(faults)}; {OTHERWISE}")


def _names(state: State) -> list[Any]:
    return [name for group in state["param_groups"] for name in group["params"]]


def _renamed(state: State, name_of: Mapping[Any, Any]) -> State:
    groups = [{**group, "params": [name_of[each] for each in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {name_of[key]: each for key, each in state["state"].items()}, "param_groups": groups}


pytorch.strategies.StrategyRegistry.register("sherd", SherdStrategy, override=True)
fabric.strategies.STRATEGY_REGISTRY.register("sherd", SherdFabricStrategy, override=True)
