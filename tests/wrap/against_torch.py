"""What torch's own auto-wrapping makes of a model: the models, torch's walk, and ours."""

from __future__ import annotations

import copy
import functools
import importlib.util
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn

from sherd.wrap import apply_wraps, choose
from tests.support.models import VOCABULARY, WIDTH, Block, build
from tests.support.models.stacks import Layer, Storey

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


class Wrapped(nn.Module):
    """A wrapper that only remembers what it was made with."""

    def __init__(self, inner: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.inner = inner
        self.kwargs = kwargs

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in sorted(self.kwargs.items()))


class Attending(nn.Module):
    """Attention, which reads a child's weight without calling it, beside norms and a list of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)])
        self.branches = nn.ModuleDict({"a": nn.ModuleList([Block(), Block()]), "b": nn.Sequential(Block(), nn.ReLU())})
        self.scale = nn.Parameter(torch.ones(WIDTH))


_making = threading.Lock()


def tiny(kind: str, head: str, **sizes: Any) -> Callable[..., nn.Module]:
    """How to make a Hugging Face model with these fields of its configuration, and with those that are given then.

    It has no dropout, which would differ by the rank. Only one thread at a time makes one: the imports of transformers
    ask for it, and what it does with globals.
    """

    def make(**fields: Any) -> nn.Module:
        with _making:
            import transformers

            torch.manual_seed(0)
            config = getattr(transformers, f"{kind}Config")(vocab_size=VOCABULARY, **sizes, **fields)
            return getattr(transformers, f"{kind}{head}")(config).eval()

    return make


LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
tiny_llama = tiny("Llama", "ForCausalLM", hidden_size=8, intermediate_size=12, num_key_value_heads=1, **LAYERS, **ENDS)
tiny_gpt2 = tiny("GPT2", "LMHeadModel", n_embd=8, n_layer=2, n_head=2, n_positions=8, **ENDS)

MODELS = {
    **{name: functools.partial(build, name) for name in ("mlp", "nested", "tied_across", "transformer")},
    "attending": Attending,
    "torchs_transformer": lambda: nn.Transformer(WIDTH, 2, 2, 2, 16, batch_first=True),
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
}

CLASSES = (Block, Layer, Storey, nn.MultiheadAttention, nn.LayerNorm, nn.TransformerEncoderLayer, nn.Embedding)
OVERRIDES = {nn.Linear: {"reshard": 2}, nn.ModuleList: {}, nn.LayerNorm: {"mixed_precision": None}}


def by_class(module: nn.Module) -> bool | dict[str, Any]:
    """A CustomPolicy's function that answers with True, False, an empty dict and dicts."""
    return OVERRIDES.get(type(module), isinstance(module, CLASSES))


def policies(source: Any) -> dict[str, Any]:
    """The same policies from torch's module or from sherd's."""
    size, lambda_ = source.size_based_auto_wrap_policy, source.lambda_auto_wrap_policy
    linears = functools.partial(lambda_, lambda_fn=lambda module: isinstance(module, nn.Linear))
    blocks = functools.partial(source.transformer_auto_wrap_policy, transformer_layer_cls=set(CLASSES))
    return {
        "always": source.always_wrap_policy,
        "classes": source.ModuleWrapPolicy(CLASSES),
        "custom": source.CustomPolicy(by_class),
        "lambda": linears,
        "transformer": blocks,
        "either": functools.partial(source._or_policy, policies=[linears, blocks]),
        "classes_as_function": functools.partial(source._or_policy, policies=[source.ModuleWrapPolicy([nn.Linear])]),
        "individually": functools.partial(source._wrap_module_cls_individually, module_classes=[Block, nn.Linear]),
        "size_default": size,
        **{
            f"size_{least}": functools.partial(size, min_num_params=least) for least in (1, 60, 100, 150, 288, 300, 700)
        },
        "size_open": functools.partial(size, min_num_params=50, force_leaf_modules=set(), exclude_wrap_modules=set()),
        "size_closed": functools.partial(
            size, min_num_params=10, force_leaf_modules={Block}, exclude_wrap_modules={nn.Linear}
        ),
    }


def wrapped_by_torch(model: nn.Module, policy: Any, kwargs: dict[str, Any]) -> nn.Module:
    """A copy of `model` after torch's walk."""
    model = copy.deepcopy(model)
    if isinstance(policy, torch_wrap._Policy):
        chosen = policy._run_policy(model, set(), kwargs)
        torch_wrap._post_order_apply(model, torch_wrap._construct_wrap_fn(model, chosen, Wrapped))
    else:
        torch_wrap._recursive_wrap(model, policy, Wrapped, set(), set(), only_wrap_children=True, **kwargs)
    return model


def wrapped_by_us(model: nn.Module, policy: Any, kwargs: dict[str, Any]) -> nn.Module:
    """A copy of `model` after ours."""
    model = copy.deepcopy(model)
    apply_wraps(model, choose(model, policy, root_kwargs=kwargs), lambda module, its: Wrapped(module, **its))
    return model


def names_of(model: nn.Module, chosen: Any) -> list[str]:
    """The chosen modules' names, in the order in which they were chosen."""
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in chosen]
