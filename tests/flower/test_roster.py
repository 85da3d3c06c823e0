"""The mapping of nodes to clients."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fedecho.flower.grid import Roster, RosterChange


def test_nodes_that_come_and_go() -> None:
    roster = Roster(3)
    assert roster.refresh([5, 9]) == RosterChange([5, 9], [])
    assert roster.enter(9, 0)
    assert roster.enter(5, 2)
    assert roster.clients == [0, 2]
    assert roster.refresh([9, 7]) == RosterChange([7], [2])
    assert roster.node_of(2) is None
    assert roster.refresh([9, 7]) == RosterChange([], [])
    assert roster.refresh([]) == RosterChange([], [0]), "a node that never said who it is was nobody"


def test_a_number_has_one_node() -> None:
    said: list[str] = []
    roster = Roster(2, said.append)
    roster.refresh([1, 2, 3])
    assert roster.enter(1, 0)
    assert not roster.enter(2, 0)
    assert not roster.enter(2, 2)
    assert not roster.enter(2, -1)
    assert len(said) == 3
    assert roster.admit_waiting() == []
    roster.forget(1)
    assert roster.admit_waiting() == [0], "who waited for it has it now"
    assert roster.node_of(0) == 2
    assert not roster.enter(3, 0)
    roster.refresh([2])
    roster.forget(2)
    assert roster.admit_waiting() == [], "who waited is gone too"


def test_numbers_for_nodes_that_cannot_be_asked() -> None:
    roster = Roster(2)
    for node in (8, 4):
        client = roster.number(node)
        assert client is not None
        assert roster.enter(node, client)
    assert (roster.node_of(0), roster.node_of(1)) == (8, 4)
    assert roster.number(6) is None
    roster.forget(8)
    roster.forget(4)
    assert roster.number(4) == 1, "its own of before"
    assert roster.number(6) == 0


def test_a_node_without_a_number_gets_the_next_that_is_free_and_is_spoken_of_once() -> None:
    said: list[str] = []
    roster = Roster(1, said.append)
    roster.refresh([8, 9])
    assert roster.enter(8, 0)
    assert roster.number(9) is None
    assert roster.admit_waiting() == []
    assert len(said) == 1
    roster.refresh([9])
    assert roster.admit_waiting() == [0]
    assert roster.node_of(0) == 9
    roster.refresh([9, 7, 6])
    assert roster.number(7) is None
    assert roster.number(6) is None
    roster.refresh([6])
    assert roster.admit_waiting() == [0], "node 7 went while it waited"
    assert roster.node_of(0) == 6


roster_actions = st.lists(
    st.tuples(st.sampled_from(["come", "claim", "go", "remember"]), st.integers(0, 9), st.integers(0, 4)), max_size=40
)


@given(roster_actions)
@settings(max_examples=100, deadline=None)
def test_numbers_are_those_of_looking_through_all_clients(actions: list[tuple[str, int, int]]) -> None:
    """The rule, looked up the long way: a node's own number of before, else the first fresh one, else the first free one."""
    roster = Roster(5)
    for action, node, client in actions:
        if action == "go":
            roster.forget(node)
        elif action == "remember":
            roster.remember(roster.numbers)
        elif node not in [roster.node_of(each) for each in range(5)]:
            if action == "come":
                free = [each for each in range(5) if roster.node_of(each) is None]
                own = [each for each in free if roster.numbers.get(each) == node]
                fresh = [each for each in free if each not in roster.numbers]
                expected = (own or fresh or free or [None])[0]
                assert roster.number(node) == expected
                client = -1 if expected is None else expected
            roster.enter(node, client)
