"""DeepSpeed's universal checkpoint: files of each trained parameter, for any number of ranks.

    FOLDER/latest_universal                                     the name of the last checkpoint's folder
    FOLDER/global_step3_universal/mp_rank_00_model_states.pt    names and shapes by group; tensors that are not trained
    .../zero_pp_rank_0_mp_rank_00_model_states.pt               the same for ZeRO-3, without tensors
    .../zero/optimizer_state.pt                                 the settings of the groups
    .../zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt   a parameter and its states in fp32

DeepSpeed's `load_hp_checkpoint_state_from_checkpoint_dir` reads all files in NAME under ZeRO-1 and 2, and those of Adam
under ZeRO-3. It knows groups by their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from sherd.checkpoint.encoding import CHUNK_BYTES, DTYPES
from sherd.errors import CheckpointError, in_short
from sherd.layout.boxes import Box, spans, whole
from sherd.storage.places import DiskPlace, Readable, mode_of, read_file
from sherd.tensor.ragged import memory_of
from sherd.tools.convert.contents import MODEL, Contents, Lazy, Read, Source, Spec
from sherd.tools.convert.of_torch import TorchFile, opened, save_file
from sherd.tools.convert.state_trees import GROUPS, PARAMS, STATE, Collected, PendingTensor, tree_of

FORMAT = "universal"

_LATEST, _SETTINGS, _MODEL_FILE = "latest_universal", "zero/optimizer_state.pt", "mp_rank_00_model_states.pt"
_UNIVERSAL, _OF_RANKS = ("zero/*/fp32.pt", _LATEST), ("*zero_pp_rank_*_optim_states.pt", "latest")
"""The files that a folder has, and the file next to it that names the last folder."""
_ZERO3_FILE = f"zero_pp_rank_0_{_MODEL_FILE}"
_KEYS_OF_ZERO3 = {"exp_avg", "exp_avg_sq", "step"}
_VERSION = "0.19.8+sherd"
"""The version of DeepSpeed that writes this form. DeepSpeed refuses versions that are too old."""
_NO_LOSS = ("F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
"""The dtypes whose values fp32 holds exactly."""
_MISSING = object()


class _Files(ExitStack):
    def tree(self, path: Path) -> Mapping[str, Any]:
        """Returns the dict in the file at `path`. Raises CheckpointError if there is none."""
        file = opened(path, stubs=("deepspeed",))
        self.callback(file.close)
        if not isinstance(file.tree, Mapping):
            raise CheckpointError(f"{path} holds a {type(file.tree).__name__} where a dict is expected")
        return file.tree


class _Wrong(Exception):
    """Says why an entry of a file cannot be read."""


@contextmanager
def _reading(folder: Path) -> Iterator[_Files]:
    """Yields the files to read. An error closes them; what DeepSpeed would not write raises CheckpointError."""
    files = _Files()
    try:
        yield files
    except BaseException as error:
        files.close()
        if isinstance(error, _Wrong):
            raise CheckpointError(f"{folder}: {error}") from None
        if isinstance(error, KeyError | TypeError | ValueError | IndexError | AttributeError):
            raise CheckpointError(f"{folder} is not as DeepSpeed writes it: {error!r:.100}") from None
        raise


def _add_model(contents: Collected, tensors: Mapping[str, Any], order: Sequence[str], model: Mapping[str, Any]) -> None:
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


def _folder_of(path: Path, files: str, latest: str) -> Path | None:
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
    """Returns whether `path` is a checkpoint of DeepSpeed: a universal one, or files of ranks, which `read` refuses."""
    return any(_folder_of(path, *each) is not None for each in (_UNIVERSAL, _OF_RANKS))


class _Rested(Readable):
    """A file that is open only while it is read: a checkpoint has more files than a process may have open."""

    def __init__(self, path: Path) -> None:
        self._path, self.name = path, str(path)
        with closing(DiskPlace(path.parent).open(path.name)) as file:
            self.nbytes = file.nbytes

    def read_into(self, start: int, into: memoryview) -> None:
        with closing(DiskPlace(self._path.parent).open(self._path.name)) as file:
            file.read_into(start, into)

    def close(self) -> None:
        """Nothing is open."""


def read(path: Path) -> Source:
    """Returns the universal checkpoint at `path`, open for reading. Raises CheckpointError."""
    folder = _folder_of(path, *_UNIVERSAL)
    if folder is None and (of_ranks := _folder_of(path, *_OF_RANKS)) is not None:
        raise CheckpointError(
            f"{path} is what ranks of DeepSpeed save; make a universal checkpoint of it, and name that: "
            f"python -m deepspeed.checkpoint.ds_to_universal --input_folder {of_ranks} --output_folder FOLDER"
        )
    if folder is None:
        raise CheckpointError(f"{path} holds no universal checkpoint of DeepSpeed: no zero/NAME/fp32.pt")
    contents = Collected()
    with _reading(folder) as files:
        model: Mapping[str, Any] = {}
        listed: list[Mapping[str, Any]] = []
        others: dict[str, Any] = {}
        for file in sorted(folder.glob(f"*{_MODEL_FILE}"))[:1]:
            model = files.tree(file)
            others = {name: model["module"][name] for name in model["buffer_names"] if name in model["module"]}
            listed = list(model["param_shapes"])
            contents.notes.append(f"made by DeepSpeed {str(model.get('ds_version'))[:30]}")
        shapes = {name: shape for group in listed for name, shape in group.items()}
        tensors: dict[str, Any] = {}
        state: dict[str, dict[str, Any]] = {}
        for parameter in sorted(path for path in (folder / "zero").iterdir() if path.is_dir()):
            name = parameter.name
            for file in sorted(parameter.glob("*.pt")):
                value = TorchFile(_Rested(file)).tree
                value = value.get("param", _MISSING) if isinstance(value, Mapping) else value
                if value is _MISSING:
                    raise _Wrong(f"{name}/{file.name} has no param")
                if isinstance(value, Lazy) and len(value.spec.shape) == 1 and name in shapes:
                    value = _shaped(value, shapes[name], name)
                if file.stem == "fp32":
                    tensors[name] = value
                else:
                    state.setdefault(name, {})[file.stem] = value
        _add_model(contents, tensors | others, list(shapes), model)
        contents.add_optimizer(*_with_settings(folder / _SETTINGS, state, listed, contents.notes))
        return contents.source(FORMAT, files.close)


def _shaped(vector: Lazy, shape: Any, name: str) -> Lazy:
    """Returns a parameter that is flattened in its file, as in checkpoints that were made from ZeRO-3."""
    if prod(vector.spec.shape) != prod(shape):
        raise _Wrong(f"{name} has {prod(vector.spec.shape)} elements, and the shape {str(shape)[:50]}")
    spec = Spec(vector.spec.dtype, tuple(shape))

    def read_into(part: Box, target: torch.Tensor, most_bytes: int) -> None:
        most = max(most_bytes // DTYPES[spec.dtype].itemsize, 1)
        for span in spans(whole(spec.shape), part, most) if part.numel else ():
            read = vector.part(Box((span.start,), (span.box.numel,)), most_bytes)
            target[span.wanted.within(part)] = read.view(span.box.sizes)[span.wanted.within(span.box)]

    return Lazy(spec, read_into)


def _with_settings(
    file: Path, state: dict[str, dict[str, Any]], listed: Sequence[Mapping[str, Any]], notes: list[str]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Returns the states with the steps in the optimizer's file, and the groups with names instead of numbers."""
    if not mode_of(file) or not listed:
        notes.append("an optimizer's settings are left out: no file says which parameters they are of")
        return state, []
    common = TorchFile(_Rested(file), stubs=("deepspeed",)).tree
    # A checkpoint made from ZeRO-3 has its steps here.
    by_number = common.get("optimizer_state_dict", {}).get(STATE, {})
    for number, names in enumerate(listed):
        for name in names if "step" in by_number.get(number, {}) else ():
            state.setdefault(name, {}).setdefault("step", by_number[number]["step"])
    groups = [dict(group) for group in common[GROUPS]]
    for group in groups:
        group[PARAMS] = [name for number in group[PARAMS] for name in listed[number]]
    return state, groups


# Writing


@dataclass(frozen=True)
class _Training:
    """The parts of a checkpoint that DeepSpeed takes.

    Args:
        groups: the names and shapes of the trained parameters, by group.
        settings: the settings of each group.
        states: the tensors of each parameter by key, and its step if there is one.
        rest: the tensors that are not trained.
        without: the names of parameters that are in groups, but have no state.
        aliases: other names of parameters.
    """

    groups: list[dict[str, tuple[int, ...]]]
    settings: list[dict[str, Any]]
    states: dict[str, dict[str, Any]]
    rest: dict[str, PendingTensor]
    without: list[str]
    aliases: dict[str, str]

    @property
    def keys(self) -> set[str]:
        """The states that the optimizer keeps of each parameter."""
        return next(iter(self.states.values())).keys() - {"fp32"}

    def notes(self) -> Iterator[str]:
        if self.without:
            yield f"{in_short(sorted(self.without), 4)}: without state, so DeepSpeed cannot train them from here"
        if self.keys != _KEYS_OF_ZERO3:
            kept = in_short(sorted(self.keys - {"step"}), 4)
            yield f"it is for ZeRO-1 and 2 alone: under ZeRO-3 DeepSpeed loads Adam's states, not {kept}"
        if len(self.groups) > 1:
            yield "under ZeRO-3 DeepSpeed takes the settings of the first group for all: docs/do/convert.md"


def write(path: Path, contents: Contents, read: Read) -> Sequence[str]:
    """Write `path/global_step0_universal/`, with the step's own number, and `path/latest_universal`.

    Raises:
        CheckpointError: this form has no place for a part of the optimizer's state.
    """
    models, optimizers = contents.of_kind("module"), contents.of_kind("optimizer")
    if len(models) != 1 or len(optimizers) != 1:
        raise CheckpointError(
            f"the format {FORMAT} holds one model and its optimizer, and here are {len(models)} and {len(optimizers)}: "
            "DeepSpeed loads nothing without an optimizer's groups; write a model alone as hf or torch"
        )
    training = _training(contents, models[0], optimizers[0])
    first = next(_steps(training.states), None)  # all of them are the same
    step = contents.step if contents.step is not None else int(first[1] if first else 0)
    folder = path / f"global_step{step}_universal"
    for name, tensors in training.states.items():
        (folder / "zero" / name).mkdir(parents=True)
        for key, value in tensors.items():
            tree = value if key == "step" else {"cat_dim": 0, "param": _widened(value)}
            save_file(folder / "zero" / name / f"{key}.pt", tree, _as_fp32(read, contents.tensors))
    numbers = [{**group, PARAMS: [number]} for number, group in enumerate(training.settings)]
    of_zero3 = {STATE: {0: {"step": first[0]} if first else {}}, GROUPS: numbers}
    save_file(folder / _SETTINGS, {GROUPS: numbers, "ds_version": _VERSION, "optimizer_state_dict": of_zero3}, read)
    states: dict[str, Any] = {
        "module": training.rest,
        "buffer_names": list(training.rest),
        "param_shapes": training.groups,
        "shared_params": training.aliases,
        "lr_scheduler": None,
        "global_steps": step,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": _VERSION,
    }
    save_file(folder / _MODEL_FILE, states, read)
    if training.keys == _KEYS_OF_ZERO3:
        save_file(folder / _ZERO3_FILE, states | {"module": {}}, read)
    (path / _LATEST).write_text(folder.name)
    others = [name for name in contents.values if name not in (models[0], optimizers[0])]
    left_out = [f"{name} is left out: the format {FORMAT} holds a model and its optimizer" for name in others]
    return [*left_out, *training.notes()]


def _training(contents: Contents, model: str, optimizer: str) -> _Training:
    """Returns the parts that DeepSpeed takes. Raises CheckpointError if it cannot train from them."""
    begin = f"{model}/"
    aliases = {
        alias.removeprefix(begin): name.removeprefix(begin)
        for alias, name in contents.aliases.items()
        if alias.startswith(begin)
    }
    tensors = {name: PendingTensor(spec, begin + name) for name, spec in contents.of_item(model).items()}
    tree = tree_of(replace(contents, values={optimizer: contents.values[optimizer]}))[optimizer]
    kept = {aliases.get(name, name): state for name, state in tree[STATE].items() if state}
    states: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, tuple[int, ...]]] = []
    without: list[str] = []
    for group in tree[GROUPS]:
        groups.append({})
        for name in (aliases.get(name, name) for name in group[PARAMS]):
            if name not in tensors:
                raise CheckpointError(f"{optimizer} has the parameter {name}, which {model} has not")
            if name not in kept:
                without.append(name)
                continue
            groups[-1][name] = tensors[name].spec.shape
            own = {key: value for key, value in kept.pop(name).items() if value is not None}
            if "fp32" in own:
                raise CheckpointError(f"{optimizer} has a state fp32 of {name}, and {FORMAT} calls the parameter so")
            # An optimizer that counts steps by group, as DeepSpeed's fused Adam, has none in the states.
            step = {"step": group["step"]} if "step" in group and "step" not in own else {}
            states[name] = {"fp32": tensors[name], **own, **step}
    if kept:
        raise CheckpointError(
            f"{optimizer} has state of parameters that are in none of its groups: {in_short(sorted(kept), 4)}"
        )
    if not states:
        raise CheckpointError(
            f"{optimizer} has no state of any parameter, and DeepSpeed needs it; write the model alone as hf or torch"
        )
    _require(states, tensors, optimizer)
    settings = [{key: value for key, value in group.items() if key != PARAMS} for group in tree[GROUPS]]
    rest = {name: tensor for name, tensor in tensors.items() if name not in states}
    return _Training(groups, settings, states, rest, without, aliases)


def _require(states: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, PendingTensor], optimizer: str) -> None:
    """Raise CheckpointError for a state that has no place in this form, or that DeepSpeed does not read."""
    other = "the formats sherd, dcp and torch can"
    first = next(iter(states))
    for name, state in states.items():
        for part in (name, *state):
            if not part or part in (".", "..") or any(letter in part for letter in "/\\\0"):
                raise CheckpointError(f"{part[:100]!r} is the name of a folder or file here, which cannot be one")
        if state.keys() != states[first].keys():
            of_name, of_first = (in_short(sorted(keys - {"fp32"}), 4) for keys in (state.keys(), states[first].keys()))
            raise CheckpointError(
                f"{optimizer} keeps {of_name} of {name}, and {of_first} of {first}; the format "
                f"{FORMAT} cannot hold parameters whose states differ; {other}"
            )
        for key, value in state.items():
            if key == "step":
                continue
            if not isinstance(value, PendingTensor) or value.spec.shape != tensors[name].spec.shape:
                is_ = (
                    f"has the shape {value.spec.shape}" if isinstance(value, PendingTensor) else f"is {str(value)[:50]}"
                )
                raise CheckpointError(
                    f"{optimizer}: {key} of {name} {is_}; the format {FORMAT} holds states of the parameter's shape, "
                    f"{tensors[name].spec.shape}, and a step; {other} hold it"
                )
            if value.spec.dtype not in _NO_LOSS:
                raise CheckpointError(
                    f"{key} of {name} is of {value.spec.dtype}; the format {FORMAT} holds fp32; {other} hold it"
                )
    counted = dict(zip(states, (step for _, step in _steps(states)), strict=False))
    differs = next((name for name, step in counted.items() if step != counted[first]), None)
    if differs is not None:
        raise CheckpointError(
            f"{optimizer} has made {counted[first]:g} steps of {first}, and {counted[differs]:g} of {differs}; "
            f"DeepSpeed counts one for all, so the format {FORMAT} cannot hold them; {other}"
        )


def _steps(states: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Any, float]]:
    """Yields the step of each parameter, as the optimizer keeps it and as a number."""
    for name, state in states.items():
        if "step" in state:
            step = state["step"].value if isinstance(state["step"], PendingTensor) else state["step"]
            if not isinstance(step, torch.Tensor | int | float) or not math.isfinite(step):
                raise CheckpointError(f"the step of {name} is no number, which the format {FORMAT} needs it to be")
            yield state["step"], float(step)


def _widened(value: PendingTensor) -> PendingTensor:
    """Returns `value` in fp32. DeepSpeed cuts tensors along a dim, so a tensor without dims gets one."""
    own = None if value.value is None else value.value.float().reshape(value.spec.shape or (1,))
    return PendingTensor(Spec("F32", value.spec.shape or (1,)), value.name, own)


def _as_fp32(read: Read, specs: Mapping[str, Spec]) -> Read:
    """Returns `read` with tensors converted from any floating dtype to fp32."""

    def chunks(name: str) -> Iterator[memoryview]:
        dtype = DTYPES[specs[name].dtype]
        for chunk in read(name):
            if dtype == torch.float32:
                yield chunk
                continue
            for part in torch.frombuffer(chunk, dtype=dtype).split(CHUNK_BYTES // 4):
                yield memory_of(part.float())

    return chunks
