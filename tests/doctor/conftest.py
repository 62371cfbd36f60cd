import pytest


@pytest.fixture(autouse=True)
def no_rank(monkeypatch):
    """The command is not one of torchrun's ranks."""
    monkeypatch.delenv("RANK", raising=False)
