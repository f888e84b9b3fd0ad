import numpy as np

from rlvlm.algorithms.sft_replies import grouped_by_length


def test_four_examples_by_hand():
    batches = list(grouped_by_length([5, 1, 6, 2], 2, np.random.default_rng(0)))
    assert sorted(sorted(batch) for batch in batches) == [[0, 2], [1, 3]]


def test_an_epoch_has_every_example_once_and_kinds_apart():
    lengths = np.random.default_rng(1).integers(1, 100, 101).tolist()
    kinds = [place % 2 for place in range(101)]
    batches = list(grouped_by_length(lengths, 8, np.random.default_rng(2), kinds))
    assert sorted(place for batch in batches for place in batch) == list(range(101))
    assert all(len({kinds[place] for place in batch}) == 1 for batch in batches)


def test_little_of_a_batch_is_padding():
    lengths = np.random.default_rng(1).integers(1, 100, 256).tolist()

    def padding(batches: list[list[int]]) -> int:
        return sum(max(lengths[i] for i in batch) - lengths[j] for batch in batches for j in batch)

    grouped = list(grouped_by_length(lengths, 8, np.random.default_rng(3)))
    plain = np.random.default_rng(3).permutation(256).reshape(-1, 8).tolist()
    assert padding(grouped) < padding(plain) / 3
