"""Checkpoints of DeepSpeed, in the form in which ZeRO-1, 2 and 3 save on each rank. They are only read.

    FOLDER/latest                                                 the name of the last checkpoint's folder
    FOLDER/global_step3/mp_rank_00_model_states.pt                ZeRO-1 and 2: the model, its buffers, the shapes
    FOLDER/global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt      ZeRO-3: a file of each rank instead
    FOLDER/global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt the rank's part of the fp32 parameters and states

A parameter's elements lie in the vectors of several ranks, one run behind the other. The value that is read is the
optimizer's, in fp32. Objects of DeepSpeed's classes become inert.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any

from sherd.errors import CheckpointError
from sherd.layout.boxes import Box
from sherd.storage.places import read_file
from sherd.tools.convert.contents import MODEL, Lazy, Pieced, Reshaped, Source, Spec, TensorPart
from sherd.tools.convert.of_torch import Strided, opened
from sherd.tools.convert.pickles import Inert
from sherd.tools.convert.state_trees import Collected, is_lazy

FORMAT = "deepspeed"

_LATEST, MODEL_FILE = "latest", "mp_rank_00_model_states.pt"
_OPTIM_FILES = "*zero_pp_rank_*_mp_rank_00_optim_states.pt"
MODEL_FILES = f"*{MODEL_FILE}"
_RANK = re.compile(r"zero_pp_rank_(\d{1,6})_mp_rank")


class Files(ExitStack):
    """The open files of a checkpoint."""

    def tree(self, path: Path) -> Mapping[str, Any]:
        """Returns the dict in the file at `path`. Raises CheckpointError if there is none."""
        file = opened(path, stubs=("deepspeed",))
        self.callback(file.close)
        if not isinstance(file.tree, Mapping):
            raise CheckpointError(f"{path} holds a {type(file.tree).__name__} where a dict is expected")
        return file.tree


class Wrong(Exception):
    """Says why an entry of a file cannot be read."""


@contextmanager
def reading(folder: Path) -> Iterator[Files]:
    """Yields the files to read. An error closes them; what DeepSpeed would not write raises CheckpointError."""
    files = Files()
    try:
        yield files
    except BaseException as error:
        files.close()
        if isinstance(error, Wrong):
            raise CheckpointError(f"{folder}: {error}") from None
        if isinstance(error, KeyError | TypeError | ValueError | IndexError | AttributeError):
            raise CheckpointError(f"{folder} is not as DeepSpeed writes it: {error!r:.100}") from None
        raise


def add_model(contents: Collected, tensors: Mapping[str, Any], order: Sequence[str], model: Mapping[str, Any]) -> None:
    """Add `tensors` to `contents`, those in `order` first, with the aliases and the step in `model`, a file's dict."""
    ordered = {name: tensors[name] for name in order if name in tensors}
    contents.add_model(ordered | {name: tensor for name, tensor in tensors.items() if name not in ordered})
    shared = model.get("shared_params") or {}
    contents.aliases |= {
        f"{MODEL}/{alias}": f"{MODEL}/{name}"
        for alias, name in shared.items()
        if name in tensors and alias not in tensors
    }
    step = model.get("global_steps")
    contents.step = step if type(step) is int and step >= 0 else None


def folder_of(path: Path, files: str = MODEL_FILES, latest: str = _LATEST) -> Path | None:
    """Returns the folder that has `files`: `path`, or its subfolder that the file `latest` names."""
    if any(path.glob(files)):
        return path
    try:
        named = read_file(path / latest)[:200].decode().strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, CheckpointError):
        return None
    below = path / named
    return below if named not in ("", "..") and "/" not in named and any(below.glob(files)) else None


def is_at(path: Path) -> bool:
    """Returns whether `path` is a checkpoint of ZeRO."""
    folder = folder_of(path) if path.is_dir() else None
    return folder is not None and any(folder.glob(_OPTIM_FILES))


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    """Returns the files of the ranks, in order. Raises Wrong if a rank's file is missing."""
    of_rank = {}
    for path in folder.glob(pattern):
        match = _RANK.search(path.name)
        if match is not None:
            of_rank[int(match[1])] = path
    if sorted(of_rank) != list(range(len(of_rank))):
        raise Wrong(f"it has files of the ranks {sorted(of_rank)}, and some are not there")
    return [of_rank[rank] for rank in range(len(of_rank))]


def read(path: Path) -> Source:
    """Returns the checkpoint of ZeRO at `path`, or the latest below it, open for reading. Raises CheckpointError."""
    folder = folder_of(path)
    if folder is None:
        raise CheckpointError(f"{path} holds no checkpoint of DeepSpeed: no {MODEL_FILE}, and no {_LATEST}")
    with reading(folder) as files:
        if any(folder.glob("*mp_rank_01_*")):
            raise Wrong("it was saved with tensor parallelism; make a universal checkpoint of it with DeepSpeed first")
        optims = [files.tree(file)["optimizer_state_dict"] for file in _by_rank(folder, _OPTIM_FILES)]
        if not optims:
            raise Wrong("it has no files of the optimizer, which hold the parameters in fp32")
        stage = optims[0]["zero_stage"]
        stage = stage.get("", 0) if isinstance(stage, Inert) else stage
        if stage not in (1, 2, 3):
            raise Wrong(f"its ZeRO stage is {str(stage)[:50]}, not 1, 2 or 3")
        counts = optims[0]["partition_count"]
        count = max(counts) if isinstance(counts, list | tuple) else counts
        if count != len(optims):
            raise Wrong(f"it was saved by {count} ranks, and has files of {len(optims)}")
        model_files = _by_rank(folder, MODEL_FILES) if stage == 3 else [folder / MODEL_FILE]
        models = [files.tree(file) for file in model_files]
        zero = _Zero3(optims, models) if stage == 3 else _Zero2(optims, models)
        return _collected(zero, models).source(FORMAT, files.close, zero.pieces())


class _Zero(ABC):
    """The parameters, as the ranks' files describe them.

    Args:
        optims: the optimizers' dicts, by rank.
        models: the models' dicts, by rank, or one for all ranks.
    """

    vectors: str
    """The key of a rank's vectors in the optimizer's dict."""
    base: str
    """The key of the wrapped torch optimizer's state dict."""
    has_whole_parameters: bool

    def __init__(self, optims: Sequence[Mapping[str, Any]], models: Sequence[Mapping[str, Any]]) -> None:
        self.optims, self.models = optims, models
        self.shapes: list[Mapping[str, Any]] = list(models[0]["param_shapes"])

    @abstractmethod
    def places(self, number: int) -> Mapping[str, list[tuple[int, int, int]]]:
        """Returns the runs of the parameters of vector `number`: (rank, start, numel) in order."""

    @abstractmethod
    def frozen(self, name: str) -> Lazy:
        """Returns an untrained parameter."""

    def tensor(self, name: str, shape: Any, places: list[tuple[int, int, int]], vectors: list[Any]) -> Reshaped:
        """Returns the parameter `name`, or a state of it, from the vectors of all ranks."""
        dtype, total, runs = "F32", 0, list[tuple[Box, Lazy]]()
        for vector, start, numel in ((vectors[rank], start, numel) for rank, start, numel in places if numel):
            if not isinstance(vector, Strided) or start + numel > prod(vector.spec.shape):
                raise Wrong(f"{name} lies outside of its vector")
            dtype = vector.spec.dtype
            runs.append((Box((total,), (numel,)), TensorPart(vector, Box((start,), (numel,)))))
            total += numel
        if total != prod(shape) or not all(type(size) is int and size >= 0 for size in shape):
            raise Wrong(f"{name} of shape {str(shape)[:50]} has {total} elements")
        return Reshaped(Pieced(Spec(dtype, (total,)), tuple(runs)), tuple(shape))

    def pieces(self) -> dict[str, int]:
        """Returns by name the number of runs of each parameter."""
        return {
            f"{MODEL}/{name}": sum(1 for _, _, numel in places if numel)
            for number in range(len(self.shapes))
            for name, places in self.places(number).items()
        }


class _Zero2(_Zero):
    """ZeRO-1 and 2: each rank has a part of each group's vector, and a table of its parameters."""

    vectors = "single_partition_of_fp32_groups"
    base = "base_optimizer_state"
    has_whole_parameters = True

    def places(self, number: int) -> Mapping[str, list[tuple[int, int, int]]]:
        places: dict[str, list[tuple[int, int, int]]] = {}
        for rank, optim in enumerate(self.optims):
            if "param_slice_mappings" not in optim:
                raise Wrong("its version of DeepSpeed does not say where parameters lie; save it with 0.7 or newer")
            for name, fragment in optim["param_slice_mappings"][number].items():
                start, numel = fragment.get("start", 1), fragment.get("numel", 0)
                if type(start) is not int or type(numel) is not int or start < 0 or numel < 0:
                    raise Wrong(f"the place of {name} is no number")
                places.setdefault(name, []).append((rank, start, numel))
        return places

    def frozen(self, name: str) -> Lazy:
        tensor: Lazy = self.models[0]["frozen_param_fragments"][name]
        return tensor


class _Zero3(_Zero):
    """ZeRO-3: each rank has an equal part of each parameter, padded, one behind the other in its vector."""

    vectors = "fp32_flat_groups"
    base = "optimizer_state_dict"
    has_whole_parameters = False

    def places(self, number: int) -> Mapping[str, list[tuple[int, int, int]]]:
        places, start = {}, 0
        for name, shape in self.shapes[number].items():
            numel = prod(shape)
            share = -(-numel // len(self.optims))
            ranks = range(len(self.optims))
            places[name] = [(rank, start, max(min(share, numel - rank * share), 0)) for rank in ranks]
            start += share
        return places

    def frozen(self, name: str) -> Lazy:
        shape, left = self.models[0]["frozen_param_shapes"][name], prod(self.models[0]["frozen_param_shapes"][name])
        vectors = [model["frozen_param_fragments"][name] for model in self.models]
        places = []
        for rank, vector in enumerate(vectors):
            numel = min(prod(vector.spec.shape), left)
            places.append((rank, 0, numel))
            left -= numel
        return self.tensor(name, shape, places, vectors)


def _collected(zero: _Zero, models: Sequence[Mapping[str, Any]]) -> Collected:
    tensors: dict[str, Any] = {}
    state: dict[str, dict[str, Any]] = {}
    bases = [optim[zero.base] for optim in zero.optims]
    for number, shapes in enumerate(zero.shapes):
        places = zero.places(number)
        states = [base["state"].get(number, {}) for base in bases]
        for name, shape in shapes.items():
            if name not in places:
                raise Wrong(f"no rank has elements of {name}")
            vectors = [optim[zero.vectors][number] for optim in zero.optims]
            tensors[name] = zero.tensor(name, shape, places[name], vectors)
            for key, value in states[0].items():
                of_ranks = [of_rank[key] for of_rank in states]
                vector = is_lazy(value) and bool(value.spec.shape)
                whole_state = zero.tensor(f"{name}/{key}", shape, places[name], of_ranks) if vector else value
                state.setdefault(name, {})[key] = whole_state
    model = models[0]
    tensors |= {name: zero.frozen(name) for name in model.get("frozen_param_shapes") or ()}
    shared = model.get("shared_params") or {}
    # `module` has empty tensors for the parameters of ZeRO-3. For ZeRO-1 and 2 it has the untrained tensors, too.
    left = {name: value for name, value in model["module"].items() if name not in tensors and name not in shared}
    buffers = set(model["buffer_names"])
    tensors |= {name: value for name, value in left.items() if name in buffers or zero.has_whole_parameters}
    contents = Collected()
    add_model(contents, tensors, list(model["module"]), model)
    groups = []
    for group in list(bases[0]["param_groups"]):
        names = [name for number in group.get("params", ()) for name in zero.shapes[number]]
        groups.append({**group, "params": names})
    contents.add_optimizer(state, groups)
    contents.notes.append(f"saved by DeepSpeed {str(model.get('ds_version'))[:30]} on {len(zero.optims)} ranks")
    return contents
