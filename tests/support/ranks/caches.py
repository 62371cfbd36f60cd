"""What torch remembers by mesh, and when a test must have it forgotten."""

from __future__ import annotations

import functools

from torch.distributed.tensor import _collective_utils, _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def forget_redistributions() -> None:
    """Empty what DTensor remembers by mesh: it would be given to equal meshes.

    Their groups may be gone. And where ranks are threads, meshes are equal whose threads have the same number, which
    the system gives again: a new thread would get the sizes that another rank worked out.
    """
    _clear_sharding_prop_cache()
    for module in (_redistribute, _collective_utils):
        places = [module, *(each for each in vars(module).values() if isinstance(each, type))]
        for cached in (each for place in places for each in vars(place).values()):
            inner = getattr(cached, "__func__", cached)  # of a static method
            if isinstance(inner, functools._lru_cache_wrapper):
                inner.cache_clear()
    getattr(_redistribute, "_planner_cache", {}).clear()
