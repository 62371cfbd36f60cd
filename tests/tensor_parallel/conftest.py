"""What these tests need of torch so that threads may stand for ranks."""

import threading

import pytest
import torch.distributed as dist

from sherd.comm import mesh as data_meshes


@pytest.fixture(autouse=True)
def meshes_know_their_thread(monkeypatch):
    """DTensor remembers what it has worked out for a mesh, and tells the meshes of threads apart by the thread; but a
    concatenated mesh does not know its own, so that one rank would take over another's sizes."""

    def with_thread(concatenate):
        def run(meshes):
            mesh = concatenate(meshes)
            if dist.get_backend() == "threaded":
                mesh._thread_id = threading.get_ident()
            return mesh

        return run

    monkeypatch.setattr(data_meshes, "concatenate_meshes", with_thread(data_meshes.concatenate_meshes))
