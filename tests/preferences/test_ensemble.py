import numpy as np
import pytest
import torch

from rlvlm.preferences.ensemble import PredictionCache, read_in_passes
from rlvlm.preferences.networks import ImageNetwork, StateNetwork, spread


class Reader:
    """Reads 10 times the place and 10 times the place plus 1, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __call__(self, places: np.ndarray) -> np.ndarray:
        self.asked.append(places.tolist())
        return np.stack([places * 10, places * 10 + 1], axis=1).astype(np.float32)


def test_two_looks_by_hand() -> None:
    readings, reader = PredictionCache(num_members=2), Reader()
    assert readings.of([b"a", b"b"], reader).tolist() == [[0, 1], [10, 11]]
    assert readings.of([b"c", b"b", b"d", b"a"], reader).tolist() == [[0, 1], [10, 11], [20, 21], [0, 1]]
    assert readings.of([b"d", b"c"], reader).tolist() == [[20, 21], [0, 1]]
    assert reader.asked == [[0, 1], [0, 2]]
    readings.forget()
    readings.of([b"b"], reader)
    assert reader.asked[-1] == [0] and len(reader.asked) == 3


def test_more_than_fit_are_right_all_the_same() -> None:
    readings, reader = PredictionCache(num_members=2, capacity=3), Reader()
    readings.of([b"a", b"b"], reader)
    assert readings.of([b"c", b"d"], reader).tolist() == [[0, 1], [10, 11]]
    assert readings.of([b"x", b"d", b"c", b"a", b"b"], reader)[:, 0].tolist() == [0, 10, 0, 30, 40]
    assert reader.asked == [[0, 1], [0, 1], [0, 3, 4]]
    assert readings.of([b"b", b"a", b"x"], reader)[:, 0].tolist() == [40, 30, 0]
    assert reader.asked[3:] == [], "what was read last has been kept"


def _pictures_and_network(rng: torch.Generator) -> tuple[torch.Tensor, ImageNetwork]:
    network = ImageNetwork(64, rng)
    spread(network.layers[-1], 0.5, rng)
    return torch.randint(0, 256, (150, 64, 64, 3), dtype=torch.uint8, generator=rng), network


def _states_and_network(rng: torch.Generator) -> tuple[torch.Tensor, StateNetwork]:
    return torch.randn(150, 43, generator=rng), StateNetwork(43, rng)


@pytest.mark.parametrize("build", [_pictures_and_network, _states_and_network])
def test_a_reading_depends_on_its_row_alone_to_the_bit(build) -> None:
    rows, network = build(torch.Generator().manual_seed(0))
    together = read_in_passes(network.eval(), lambda part: rows[part], len(rows), 32)
    assert len(together.unique()) == len(rows)
    with torch.no_grad():
        torch.testing.assert_close(together, network(rows), rtol=1e-4, atol=1e-5)  # one pass of another size
    first = 0
    for size in (1, 2, 3, 10, 17, 90):
        some = rows[first : first + size]
        alone = read_in_passes(network, lambda part, some=some: some[part], size, 32)
        assert torch.equal(alone, together[first : first + size])
        first += size


@pytest.mark.parametrize("num", [1, 4, 5, 8])
def test_all_passes_have_one_size_and_the_filling_is_left_out(num: int) -> None:
    sizes = []

    def read(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return 10 * rows

    rows = torch.arange(num)
    assert read_in_passes(read, lambda part: rows[part], num, 4).tolist() == (10 * rows).tolist()
    assert sizes == [4] * -(-num // 4)
