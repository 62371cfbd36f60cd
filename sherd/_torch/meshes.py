"""Private names of `DeviceMesh`."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Returns one mesh with the axes of all `meshes`, which must come from one root mesh. Private since 2.10."""
    return DeviceMesh._concatenate(meshes)


def keeps_root_order(mesh: DeviceMesh) -> bool:
    """Returns whether the axes of `mesh` are in the order of its root mesh.

    For any other mesh torch raises KeyError where it plans a redistribution (2.13). Private since 2.10; a public slice
    would do, but not for all axes.
    """
    assert mesh.mesh_dim_names is not None, "parts of one mesh have names"
    try:
        mesh._get_slice_mesh_layout(mesh.mesh_dim_names)
    except KeyError:
        return False
    return True


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Returns all axes of `mesh` as one, called `name`. Private since 2.3."""
    return mesh._flatten(name)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Returns this rank's device on `mesh`, which knows only its type (2.11 to 2.13)."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
