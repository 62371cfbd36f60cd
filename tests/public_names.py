"""Public names and signatures of torch's FSDP, DTensor, checkpointing and process groups, beside those read last.

python -m tests.public_names            prints what the installed torch has more (+) and what it lacks (-)
python -m tests.public_names --write    records the installed torch's, once somebody has looked at each difference
"""

import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

MODULES = ("fsdp", "tensor", "checkpoint", "checkpoint.state_dict", "distributed_c10d")
OF_A_BUILD = re.compile("ProcessGroup(NCCL|MPI|UCC|XCCL)")
"""Classes that only builds for some devices have."""

RECORD = Path(__file__).with_suffix(".txt")


def names_now() -> list[str]:
    """The names, with signatures, of the installed torch."""
    modules = [import_module(f"torch.distributed.{name}") for name in MODULES]
    return sorted({line for module in modules for line in names_of(module)})


def names_of(module: ModuleType) -> Iterator[str]:
    """Each public function and class that `module` says is its own, and the public names of each class."""
    package = module.__name__
    for name in getattr(module, "__all__", None) or dir(module):
        value = getattr(module, name, None)
        is_its_own = callable(value) and str(value.__module__).startswith("torch.distributed")
        if not is_its_own or name.startswith("_") or OF_A_BUILD.match(name):
            continue
        yield f"{package}.{name}{signature_of(value)}"
        for attribute, member in vars(value).items() if inspect.isclass(value) else ():
            if not attribute.startswith("_"):
                yield f"{package}.{name}.{attribute}{signature_of(getattr(member, '__func__', member))}"


def signature_of(value: Any) -> str:
    """The parameters with their defaults, without types; "" for what has none."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return re.sub(r" at 0x\w+|\s*\n\s*", "", str(inspect.Signature(bare)))


def version_read() -> str:
    """The version of torch that the record is of."""
    return RECORD.read_text().split(maxsplit=2)[1]


def differences() -> list[str]:
    """What the installed torch has more (+) and what it lacks (-), beside the record."""
    recorded, now = set(RECORD.read_text().splitlines()[1:]), set(names_now())
    both = sorted((line, sign) for sign, lines in (("-", recorded - now), ("+", now - recorded)) for line in lines)
    return [f"{sign} {line}" for line, sign in both]


if __name__ == "__main__":
    if "--write" in sys.argv:
        RECORD.write_text("\n".join([f"torch {torch.__version__.split('+')[0]}", *names_now(), ""]))
    else:
        print(f"torch {torch.__version__} beside {version_read()}", *(found := differences()), sep="\n")
        sys.exit(bool(found))
