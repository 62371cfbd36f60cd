"""What these tests find ready: `hosts`, two machines with a link between them."""

from collections.abc import Iterator

import pytest

from tests.machines.hosts import Hosts, NotAllowed


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two namespaces of this machine, joined by a cable that can be cut; gone after the test, however it ends."""
    made = Hosts()
    try:
        made.build()
    except NotAllowed as reason:
        made.close()
        pytest.skip(f"two hosts need network namespaces and veth, which this machine does not allow: {reason}")
    try:
        yield made
    finally:
        made.close()
