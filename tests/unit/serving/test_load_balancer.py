"""Which engine a request goes to."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.serving.load_balancer import Load, LoadBalancer, Ticket


def dispatcher(*engines: str, ranks: int = 1, concurrency: int = 4, affinity: float = 1.5) -> LoadBalancer:
    found = LoadBalancer(affinity=affinity)
    for engine in engines:
        found.add(engine, ranks=ranks, concurrency=concurrency)
    return found


def take(
    found: LoadBalancer,
    prompt: int = 10,
    budget: int = 100,
    session: str | None = None,
    group: str | None = None,
) -> Ticket:
    ticket = found.take(prompt, budget, session, group=group)
    assert ticket is not None
    return ticket


def places(found: LoadBalancer, *prompts: int) -> list[tuple[str, int]]:
    return [(ticket.engine, ticket.rank) for ticket in (take(found, prompt) for prompt in prompts)]


def test_the_least_tokens_decide_not_the_requests() -> None:
    found = dispatcher("a", "b")
    assert places(found, 1000, 10, 10, 10) == [("a", 0), ("b", 0), ("b", 0), ("b", 0)]


def test_ranks_of_one_engine_are_told_apart() -> None:
    found = dispatcher("a", "b", ranks=2)
    assert sorted(places(found, 10, 10, 10, 10)) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_no_more_than_there_is_room_for() -> None:
    found = dispatcher("a", concurrency=2)
    first, _ = take(found), take(found)
    assert found.take(10, 100) is None
    found.release(first)
    assert take(found).engine == "a"


def test_a_place_is_given_back_once() -> None:
    found = dispatcher("a")
    first, _ = take(found), take(found)
    found.release(first)
    found.release(first)
    assert found.loads() == {"a": [Load(1, 110)]}


def test_lengths_are_learned() -> None:
    """The budget stands for a response until one has ended; what is there keeps its estimate."""
    found = dispatcher("a")
    first, second = take(found, budget=4000), take(found, budget=4000)
    assert first.tokens == 4010
    found.release(first, 200)
    assert take(found, budget=4000).tokens == 210
    assert take(found, budget=50).tokens == 60
    found.release(second, 400)
    assert found.expected == 300
    assert take(found, budget=4000).tokens == 310


def test_the_mean_follows_the_latest() -> None:
    found = dispatcher("a")
    for length in [10] * 200 + [500] * 1000:
        found.release(take(found), length)
    assert found.expected == pytest.approx(500, rel=1e-3)


def test_a_session_stays_where_its_beginning_was_read() -> None:
    found = dispatcher("a", "b", "c", concurrency=100)
    home = take(found, session="s").engine
    for name in range(30):
        take(found, session=str(name))
    assert {take(found, session="s").engine for _ in range(3)} == {home}


def test_the_samples_of_a_prompt_share_the_reading_of_it() -> None:
    found = dispatcher("a", "b", "c", concurrency=100, affinity=3.0)
    homes = [take(found, session=f"p-{number}", group="p").engine for number in range(12)]
    assert homes[0] == homes[1] == homes[2]
    assert len(set(homes)) > 1, "the others are not left idle"
    assert take(found, session="p-0", group="p").engine == homes[0], "a later turn follows its own beginning"


def test_a_session_leaves_an_overloaded_engine_for_good() -> None:
    found = dispatcher("a", "b", concurrency=100, affinity=1.2)
    home = take(found, session="s").engine
    (other,) = {"a", "b"} - {home}
    found.set_open(other, False)
    for _ in range(5):
        take(found)
    found.set_open(other, True)
    assert take(found, session="s").engine == other
    assert take(found, session="s").engine == other


def test_a_session_leaves_an_engine_that_is_full_closed_or_gone() -> None:
    for leave in (
        lambda found, home: [take(found, session="s") for _ in range(3)],
        lambda found, home: found.set_open(home, False),
        lambda found, home: found.remove(home),
        lambda found, home: found.add(home, concurrency=4) or found.set_open(home, False),
    ):
        found = dispatcher("a", "b", affinity=100.0)
        home = take(found, session="s").engine
        leave(found, home)
        assert take(found, session="s").engine != home


def test_sessions_that_nobody_asks_for_are_forgotten() -> None:
    found = LoadBalancer(sessions=2, affinity=1e9)
    for engine in ("a", "b"):
        found.add(engine, concurrency=1000)
    homes = {name: take(found, session=name).engine for name in ("s", "t")}
    assert take(found, session="s").engine == homes["s"]
    take(found, session="u")
    assert len(found._homes) == 2
    assert "t" not in found._homes


def test_engines_to_avoid_get_what_no_other_has_room_for() -> None:
    found = dispatcher("a", "b", concurrency=2)
    chosen = [found.take(10, 100, None, ("a",)) for _ in range(4)]
    assert [ticket.engine for ticket in chosen if ticket] == ["b", "b", "a", "a"]
    assert found.take(10, 100, None, ("a",)) is None


def test_a_replaced_engine_begins_empty() -> None:
    found = dispatcher("a")
    old = take(found)
    found.add("a", concurrency=4)
    found.release(old)
    assert found.loads() == {"a": [Load(0, 0)]}


def test_a_closed_engine_keeps_what_it_has() -> None:
    found = dispatcher("a", "b")
    ticket = take(found)
    found.set_open(ticket.engine, False)
    assert all(take(found).engine != ticket.engine for _ in range(4))
    assert found.loads()[ticket.engine] == [Load(1, 110)]
    assert found.take(10, 100) is None


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 3), st.integers(1, 5))
def test_it_always_picks_the_least_loaded_with_room(seed: int, engines: int, ranks: int, room: int) -> None:
    draw, found = Random(seed), dispatcher(*map(str, range(engines)), ranks=ranks, concurrency=room)
    held: list[Ticket] = []
    is_open = dict.fromkeys(map(str, range(engines)), True)
    for _ in range(120):
        match draw.randrange(5):
            case 0 | 1:
                free = [
                    load.tokens
                    for name, loads in found.loads().items()
                    for load in loads
                    if is_open[name] and load.requests < room
                ]
                ticket = found.take(draw.randrange(1, 500), draw.randrange(1, 500))
                assert (ticket is None) == (not free)
                if ticket is not None:
                    load = found.loads()[ticket.engine][ticket.rank]
                    assert load.tokens - ticket.tokens == min(free)
                    held.append(ticket)
            case 2 | 3 if held:
                found.release(held.pop(draw.randrange(len(held))), draw.choice([None, 100]))
            case 4:
                name = str(draw.randrange(engines))
                is_open[name] = not is_open[name]
                found.set_open(name, is_open[name])
    for ticket in held:
        found.release(ticket)
    assert {load for loads in found.loads().values() for load in loads} == {Load(0, 0)}


def test_what_is_out_of_date_does_not_pile_up() -> None:
    found = dispatcher(*map(str, range(8)), concurrency=1000)
    for _ in range(5000):
        take(found)
        found.release(take(found))
    assert len(found._heap) <= 4 * 8 + 64


def test_an_engine_is_idle_that_had_no_request_since_the_last_question() -> None:
    found = dispatcher("a", "b")
    assert found.take_idle() == ["a", "b"]
    ticket = take(found)
    assert ticket.engine == "a"
    assert found.take_idle() == ["b"]
    assert found.take_idle() == ["b"]  # a's request is still under way
    found.release(ticket)
    assert found.take_idle() == ["b"]  # it ended since
    assert found.take_idle() == ["a", "b"]
