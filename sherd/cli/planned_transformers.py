"""Models that transformers makes of a config.json, for any task, and the batches that they read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sherd.errors import InputError, reason_of

SECONDS, RATE = 10, 16_000
"""A sample of sound is so long, at so many values a second."""
IMAGE = 224
"""The height and width of images, where a config has none."""

Inputs = Callable[[int, int], dict[str, Tensor]]


def read_model(path: str) -> Any:
    """Returns the model of the config.json at `path`, unsharded and on the meta device, with parameters in float32.

    It is of the first class in `architectures`; of a config without these it is a causal LM.

    Raises:
        InputError: transformers is not installed, or makes no such model.
    """
    try:
        import transformers
    except ImportError as error:
        raise InputError(f"{path} needs transformers: pip install transformers") from error
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        config.use_cache = False
        config.apply_spec_augment = False  # where frames of sound are hidden is drawn, and needs values
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0  # the labels are shifted behind it
    except Exception as error:
        raise InputError(f"{path} is no config of transformers: {in_one_line(error)}") from error
    require_sizes(config, path)
    if isinstance(config.architectures, str):
        raise InputError(f"{path}: architectures is {config.architectures!r}; expected a list of names")
    name = (config.architectures or [""])[0]
    made: Any = getattr(transformers, name, None) if name else transformers.AutoModelForCausalLM
    if made is None:
        raise InputError(
            f"{path}: architectures names {name}, which transformers {transformers.__version__} has not; name one that "
            "it has, or give a Python factory"
        )
    try:
        with torch.device("meta"):
            model = (made._from_config if name else made.from_config)(config, dtype=torch.float32)
    except Exception as error:
        raise InputError(f"{path} makes no {name or 'causal LM'}: {in_one_line(error)}") from error
    _let_masks_hide_nothing()
    return model.to("meta")  # some make a parameter where they like


def _let_masks_hide_nothing() -> None:
    """Have transformers take any mask for one of ones alone.

    It adds them up to see it, which needs values, and decoders make such a mask themselves where none is given (5.23).
    Without that function nothing is to be done.
    """
    from transformers import masking_utils

    module: Any = masking_utils
    if hasattr(module, "fast_all"):
        module.fast_all = lambda mask: True


def context_of(model: Any) -> int | None:
    """Returns the most tokens that a sample of `model` may have, as its config says; None if it does not."""
    config = model.config.get_text_config()
    sizes = (getattr(config, each, None) or 0 for each in _LENGTHS)
    return next((size for size in sizes if size > 0), None)


def has_positions(model: Any, context: int | None) -> bool:
    """Returns whether `model` has a table with a row for each of `context` positions, and at most two more."""
    tables = (each for each in (*model.named_parameters(), *model.named_buffers()) if each[1].dim() == 2)
    rows = (len(table) for name, table in tables if any(part in name for part in ("wpe", "position")))
    return context is not None and any(context <= number <= context + 2 for number in rows)


_LENGTHS = ("max_position_embeddings", "n_positions", "max_source_positions")


def batch_of(model: Any) -> Inputs:
    """Returns a function of a number of samples, and of tokens in each, that makes a batch of `model`.

    Tokens come first, then what else it reads: images, sound. A model that decodes what it has encoded gets labels of
    as many tokens, and makes their loss itself; one of sound as many as it has positions for. Of a model that reads
    tokens with images among them it is a batch without images, whose places only values would tell.
    """
    parameters = inspect.signature(model.forward).parameters
    makers = {name: make for name, make in _INPUTS.items() if name in parameters}
    needed = {"input_ids"} if _has_images_among_tokens(model.config) else {*makers}
    if model.main_input_name != "input_ids" and model.main_input_name in makers:
        needed -= {"input_ids"}  # as a decoder's, or as those of words to look for
    if {"labels", "decoder_input_ids"} <= parameters.keys():
        needed, makers = needed | {"labels"}, makers | {"labels": _decoded}
    chosen = {name: makers[name] for name in makers if name in needed}
    if not chosen:
        raise InputError(
            f"{type(model).__name__} reads {model.main_input_name}, of which no batch is known; give a Python factory "
            "that returns (module, batch)"
        )
    config = model.config  # alone: the model may go
    return lambda samples, length: {name: make(config, samples, length) for name, make in chosen.items()}


def _has_images_among_tokens(config: Any) -> bool:
    names = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
    return any(getattr(config, name, None) is not None for name in names)


def _decoded(config: Any, samples: int, length: int) -> Tensor:
    """Labels, also of a model that does not read tokens: as many as it can decode."""
    return _integers(samples, min(length, getattr(config, "max_target_positions", None) or length))


def _images(config: Any, samples: int, length: int) -> Tensor:
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", None) or IMAGE
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    frames = [config.num_frames] if getattr(config, "num_frames", None) else []
    return _numbers(samples, *frames, getattr(config, "num_channels", 3), height, width)


def _sound(config: Any, samples: int, length: int) -> Tensor:
    """A wave, or its spectra over time where the config has their number."""
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return _numbers(samples, config.max_length, config.num_mel_bins)
    return _numbers(samples, SECONDS * RATE)


def _spectra(config: Any, samples: int, length: int) -> Tensor:
    """Twice as many frames as there are positions: the first convolutions of speech models halve them."""
    return _numbers(samples, config.num_mel_bins, 2 * config.max_source_positions)


_INPUTS: dict[str, Callable[[Any, int, int], Tensor]] = {
    "input_ids": lambda config, samples, length: _integers(samples, length),
    "pixel_values": _images,
    "input_values": _sound,
    "input_features": _spectra,
}
"""What models of transformers read, by the name of the argument."""


def _integers(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64, device="meta")


def _numbers(*shape: int) -> Tensor:
    return torch.zeros(*shape, device="meta")


# What is wrong with a config


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def require_sizes(config: Any, name: str) -> None:
    """Raise InputError if a size in `config` is below 1. `name` is what the message calls the config.

    transformers makes models of some such configs, and fails with other errors on the rest.
    """
    for where, field, value in _sizes(config):
        if value < 1:
            raise InputError(f"{name}: {where}{field} = {value}; expected a whole number from 1 on")


def _sizes(config: Any, where: str = "") -> Iterator[tuple[str, str, int]]:
    """Yields the sizes that configs of transformers have in common, each with the config in it and its own name."""
    for name in _SIZES:
        value = getattr(config, name, None)
        if isinstance(value, int):
            yield where, config.attribute_map.get(name, name), value
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from _sizes(getattr(config, name), f"{where}{name}.")


def in_one_line(error: BaseException) -> str:
    """Returns what `error` says."""
    return f"{'KeyError: ' * isinstance(error, KeyError)}{reason_of(error)}"  # whose text is a key, and no more
