"""Which torch a test needs, and why; and what torch has called differently."""

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

# The timeout of the default group alone; public since 2.14.
set_group_timeout: Callable[[timedelta], None] = (
    getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
)


def torch_is_older(major: int, minor: int) -> bool:
    return torch.__version__ < (major, minor)


def needs_torch(major: int, minor: int, why: str) -> pytest.MarkDecorator:
    """A mark that skips a test under an older torch; `why` says what that one cannot do by itself."""
    return pytest.mark.skipif(
        torch_is_older(major, minor), reason=f"torch {torch.__version__} is older than {major}.{minor}: {why}"
    )
