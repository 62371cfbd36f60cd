"""What the documents name of the adapters to other packages exists."""

import importlib

from tests import test_docs


def test_every_adapter_in_the_reference_says_its_names():
    adapters = set(filter(test_docs.is_adapter, test_docs.described_modules()))
    assert "sherd.interop.lightning" in adapters
    assert all(importlib.import_module(module).__all__ for module in adapters)


def test_every_name_of_an_adapter_in_the_questions_exists():
    named = set(filter(test_docs.is_adapter, test_docs.names_in_the_questions()))
    assert named
    for dotted in named:
        assert test_docs.found_by(dotted) is not None
