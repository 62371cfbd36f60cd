"""Fully sharded data parallel training for PyTorch. The names mirror `torch.distributed.fsdp`, so a changed import is a
port.

Public are the names in `__all__`, and the modules `sherd.errors`, `sherd.wrap`, `sherd.comm_hooks`, `sherd.interop` and
`sherd.train.plain`; the others may change without notice.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sherd._public import *
    from sherd._public import __all__ as __all__


# The names are loaded when the first of them is asked for, because torch takes seconds to load: the command `sherd`
# reads its words, and refuses bad ones, before that (test_a_refusal_loads_no_torch).
def __getattr__(name: str) -> Any:
    if name == "__all__" or not name.startswith("__"):
        public = vars(import_module("sherd._public"))
        names = public.get("__all__", ())  # empty while the file is being loaded
        globals().update({each: public[each] for each in names})
        if names:
            globals()["__all__"] = sorted([*names, "__version__"])
        if name in globals():  # also a module that has been loaded by now, such as sherd.wrap
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the public names, without the modules that define them."""
    own = [name for name in globals() if name.startswith("__")]
    return sorted({*import_module("sherd._public").__all__, *own, "errors", "wrap"})
