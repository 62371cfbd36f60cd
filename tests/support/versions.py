"""Which torch a test needs, and why."""

import pytest
import torch


def torch_is_older(major: int, minor: int) -> bool:
    return torch.__version__ < (major, minor)


def needs_torch(major: int, minor: int, why: str) -> pytest.MarkDecorator:
    """A mark that skips a test under an older torch; `why` says what that one cannot do by itself."""
    return pytest.mark.skipif(
        torch_is_older(major, minor), reason=f"torch {torch.__version__} is older than {major}.{minor}: {why}"
    )
