"""The schedule of one model: it answers each event with actions.

Decisions are pure, so each is made once and kept in a graph: states are the nodes, events the edges. From the second
step on a training loop goes round in known nodes, and an answer costs one dictionary look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from sherd.schedule.actions import Action, Event
from sherd.schedule.decide import decide
from sherd.schedule.state import Limits, State, UnitSpec

MOST_NODES = 20_000
"""The graph is dropped beyond this many states: a model that never repeats itself must not fill the memory."""

P = ParamSpec("P")


class Edge:
    """The answer to one event in one state: the `actions`, and the node of the next state, `to`."""

    __slots__ = ("actions", "event", "to")

    def __init__(self, event: Event, to: _Node, actions: tuple[Action, ...]) -> None:
        self.event, self.to, self.actions = event, to, actions


class _Node:
    __slots__ = ("edges", "state")

    def __init__(self, state: State) -> None:
        self.state = state
        self.edges: dict[object, Edge] = {}


class Schedule:
    """The present state of one model's units, and the graph of all answers so far."""

    def __init__(self, specs: tuple[UnitSpec, ...], limits: Limits = Limits()) -> None:
        self._nodes: dict[State, _Node] = {}
        self._node = self._at(State.at_rest(specs, limits))

    @property
    def state(self) -> State:
        return self._node.state

    def on(self, event: Event) -> tuple[Action, ...]:
        """Returns the actions of `event`. The caller carries them out, in order."""
        return self.follow(_itself, event).actions

    def follow(self, event_type: Callable[P, Event], *args: P.args, **kwargs: P.kwargs) -> Edge:
        """Returns the edge of the event `event_type(*args)`. The caller carries out its actions, in order.

        The event is made only where it is new in the present state: a steady-state step makes no objects.
        """
        assert not kwargs, "an event is looked up by its positional arguments"
        node, key = self._node, (event_type, args)
        if key not in node.edges:
            event = event_type(*args, **kwargs)
            state, actions = decide(node.state, event)
            node.edges[key] = Edge(event, self._at(state), actions)
        edge = node.edges[key]
        self._node = edge.to
        return edge

    def move_to(self, state: State) -> None:
        """Go to `state`: the same moment under other policies, or with parameters that are unsharded already."""
        self._node = self._at(state)

    def _at(self, state: State) -> _Node:
        if len(self._nodes) >= MOST_NODES:
            self._nodes.clear()
        node = self._nodes.get(state)
        if node is None:
            node = self._nodes[state] = _Node(state)
        return node


def _itself(event: Event) -> Event:
    return event
