"""The schedule as an object: it stands in a state, and answers each event with actions.

Decisions are pure, so each is made once: states are the nodes of a graph that grows as it is walked, events its edges.
From the second step on a training loop goes round in the nodes it knows, and an answer costs one dictionary look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from sherd.schedule.actions import Action, Event
from sherd.schedule.decide import decide
from sherd.schedule.state import Limits, State, UnitSpec

MOST_NODES = 20_000
"""Discard the graph beyond this many states: a model that never repeats itself must not fill the memory."""


P = ParamSpec("P")


class Edge:
    """The way out of a state by one event: the `actions` it asks for, and the node `to` which it leads."""

    __slots__ = ("actions", "event", "to")

    def __init__(self, event: Event, to: _Node, actions: tuple[Action, ...]) -> None:
        self.event, self.to, self.actions = event, to, actions


class _Node:
    __slots__ = ("edges", "state")

    def __init__(self, state: State) -> None:
        self.state = state
        self.edges: dict[object, Edge] = {}


class Schedule:
    """Events in, actions out, for one model's units; the same object runs, is simulated and is tested."""

    def __init__(self, specs: tuple[UnitSpec, ...], limits: Limits = Limits()) -> None:
        self._nodes: dict[State, _Node] = {}
        self._node = self._at(State.at_rest(specs, limits))

    @property
    def state(self) -> State:
        """The present state."""
        return self._node.state

    def on(self, event: Event) -> tuple[Action, ...]:
        """Returns the actions that `event` asks for. The caller carries them out, in order."""
        return self.follow(_itself, event).actions

    def follow(self, kind: Callable[P, Event], *args: P.args, **kwargs: P.kwargs) -> Edge:
        """Returns the edge of the event `kind(*args)`, which is made where it is new in the present state only. The
        caller carries out its actions, in order."""
        assert not kwargs, "an event is looked up by what comes in order"
        node, key = self._node, (kind, args)
        if key not in node.edges:
            event = kind(*args, **kwargs)
            state, actions = decide(node.state, event)
            node.edges[key] = Edge(event, self._at(state), actions)
        edge = node.edges[key]
        self._node = edge.to
        return edge

    def move_to(self, state: State) -> None:
        """Go to `state`: the same moment under other choices, or with parameters that were live before."""
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
