from rlvlm.sweeps.config import HalvingConfig
from rlvlm.sweeps.halving import Halving


def test_the_lower_half_stops_at_a_rung() -> None:
    """Rungs at 100, 200 and 400 steps; a run passes when it is not below the median of those that came before it."""
    halving = Halving(HalvingConfig(first_rung=100, keep_one_in=2), total_steps=400)
    assert not halving.is_halted("a", 50, 0.0)  # no rung yet
    assert not halving.is_halted("a", 100, 0.5)  # the first one there passes
    assert halving.is_halted("b", 100, 0.4)
    assert not halving.is_halted("c", 120, 0.6)
    assert not halving.is_halted("a", 200, 0.7)
    assert halving.is_halted("c", 230, 0.6)


def test_a_run_is_measured_once_per_rung() -> None:
    halving = Halving(HalvingConfig(first_rung=100, keep_one_in=2), total_steps=400)
    assert not halving.is_halted("a", 100, 0.5)
    assert not halving.is_halted("a", 150, 0.0)  # between the rungs nothing is decided
