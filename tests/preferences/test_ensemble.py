import pytest
import torch

from rlvlm.preferences.ensemble import read_in_passes
from rlvlm.preferences.networks import ImageNetwork, StateNetwork, spread


def _pictures_and_network(rng: torch.Generator) -> tuple[torch.Tensor, ImageNetwork]:
    network = ImageNetwork(64, rng)
    spread(network.layers[-1], 0.5, rng)
    return torch.randint(0, 256, (150, 64, 64, 3), dtype=torch.uint8, generator=rng), network


def _states_and_network(rng: torch.Generator) -> tuple[torch.Tensor, StateNetwork]:
    return torch.randn(150, 43, generator=rng), StateNetwork(43, rng)


@pytest.mark.parametrize("build", [_pictures_and_network, _states_and_network])
def test_a_reading_depends_on_its_row_alone_to_the_bit(build):
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
def test_all_passes_have_one_size_and_the_filling_is_left_out(num):
    sizes = []

    def read(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return 10 * rows

    rows = torch.arange(num)
    assert read_in_passes(read, lambda part: rows[part], num, 4).tolist() == (10 * rows).tolist()
    assert sizes == [4] * -(-num // 4)
