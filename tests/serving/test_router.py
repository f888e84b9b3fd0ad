"""Which replicas a router takes for slow."""

import pytest

from rlvlm.serving.router import Paces


@pytest.fixture
def paces() -> Paces:
    """Three requests of about .3 s on each of two replicas."""
    paces = Paces()
    for took_s in (0.3, 0.31, 0.32):
        paces.add("ask", "a", took_s)
        paces.add("ask", "b", took_s)
    return paces


def test_a_replica_that_takes_much_longer_than_usual_is_slow(paces):
    assert paces.slow("ask", ["a", "b"]) == {}
    for _ in range(5):
        paces.add("ask", "b", 3.0)
    assert paces.slow("ask", ["a"]) == {}, "nothing to compare with"
    for _ in range(5):
        paces.add("ask", "a", 0.3)
    assert paces.slow("ask", ["a", "b"]) == {"b": (3.0, pytest.approx(0.315, abs=0.01))}
    assert paces.slow("compare", ["a", "b"]) == {}, "another method"
    paces.add("ask", "b", 0.3)
    assert paces.slow("ask", ["a", "b"]) == {}, "one quick request is enough"


def test_a_replica_that_fails_at_once_makes_no_other_one_slow(paces):
    for _ in range(5):
        paces.add("ask", "a", 0.002)
    assert paces.slow("ask", ["a", "b"]) == {}


def test_longer_questions_make_no_replica_slow(paces):
    for _ in range(5):
        paces.add("ask", "a", 5.0)
        paces.add("ask", "b", 6.0)
    assert paces.slow("ask", ["a", "b"]) == {}
