"""Packages whose inner names the adapters rely on: only versions that were tried."""

from __future__ import annotations

import importlib.metadata

from sherd.errors import UnsupportedError


def require_tried(package: str, tried: str, who: str) -> None:
    """Raise `UnsupportedError`, which says what to install, unless `package` is installed in the version `tried`."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = "missing"
    if not found.startswith(f"{tried}."):
        raise UnsupportedError(
            f"{who}: {package} is {found}, and {tried} was tried; pip install '{package}=={tried}.*'"
        )
