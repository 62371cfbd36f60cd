"""Fully sharded data parallel training for PyTorch. The names mirror `torch.distributed.fsdp`, so a changed import is a
port.

Public are the names in `__all__`, and the modules `sherd.errors`, `sherd.wrap`, `sherd.comm_hooks`, `sherd.interop` and
`sherd.train.plain`; the others may change without notice.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sherd._public import *
    from sherd._public import __all__ as __all__


_RENAMED = {"Whole": "Owned"}
"""Names that were public, and what they are called now. Each stays for one version."""


# The names are loaded when the first of them is asked for, because torch takes seconds to load: the command `sherd`
# reads its words, and refuses bad ones, before that (test_a_refusal_loads_no_torch).
def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"sherd.{name} is called sherd.{_RENAMED[name]} now", FutureWarning, stacklevel=2)
        return getattr(import_module(__name__), _RENAMED[name])
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
