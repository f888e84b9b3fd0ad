"""The pocket VLA: shapes, what it reads, that it looks, and that it can learn."""

import pytest
import torch
from torch.nn import functional

from rlvlm.policies.vla.config import PocketVLAConfig
from rlvlm.policies.vla.pocket import PocketVLA
from tests.oracles import pocket_vla as oracle

TOKENS = 8 * 7


def pocket() -> PocketVLA:
    torch.manual_seed(0)
    return PocketVLA(PocketVLAConfig(), num_cameras=2, proprio_size=3, num_tokens=TOKENS)


def seen(num: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (num, 2, 32, 32, 3), dtype=torch.uint8, generator=generator)
    return images, torch.randn(num, 3, generator=generator)


def test_the_pass_is_that_of_a_plain_program() -> None:
    config = PocketVLAConfig(
        vocabulary=50,
        word_width=6,
        channels=(4, 5),
        image_px=12,
        hidden=16,
        token_width=7,
        dilated=2,
        predicts_offsets=True,
    )
    torch.manual_seed(3)
    policy = PocketVLA(config, num_cameras=2, proprio_size=3, num_tokens=10, num_offsets=6)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():  # what begins at zero or one would hide mistakes
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        policy.words.weight[config.vocabulary] = 0  # stands for no word, and is never trained
    images = torch.randint(0, 256, (3, 2, 12, 12, 3), dtype=torch.uint8, generator=generator)
    proprio = torch.randn(3, 3, generator=generator)
    said = ["push the red block to the pad", "", "lift"]
    found = policy(images, policy.read(said), proprio).detach()
    same, offsets = policy.forward_with_offsets(images, policy.read(said), proprio)
    assert torch.equal(same, found) and offsets.shape == (3, 6)
    weights = {name: value.double().numpy() for name, value in policy.state_dict().items()}
    for row, text in enumerate(said):
        expected, told = oracle.logits_and_offsets(weights, images[row].numpy(), text, proprio[row].double().numpy())
        torch.testing.assert_close(found[row].double(), torch.from_numpy(expected), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(offsets[row].detach().double(), torch.from_numpy(told), atol=1e-5, rtol=1e-5)


def test_a_batch_is_its_rows_one_by_one() -> None:
    policy = pocket()
    images, proprio = seen(4)
    words = policy.read(["push the red block", "push", "", "lift the red block and the blue one"])
    together = policy(images, words, proprio)
    assert together.shape == (4, TOKENS, 256), "all tokens of a chunk at once"
    assert 0.5e6 < sum(parameter.numel() for parameter in policy.parameters()) < 3e6
    for row in range(4):
        alone = policy(images[row : row + 1], words[row : row + 1], proprio[row : row + 1])
        assert torch.allclose(together[row], alone[0], atol=1e-4)


def test_it_reads_words_and_their_order_and_looks_through_each_camera() -> None:
    policy = pocket()
    images, proprio = seen(1)

    def logits(text: str, pixels: torch.Tensor = images) -> torch.Tensor:
        return policy(pixels, policy.read([text]), proprio)

    base = logits("put the cup on the plate")
    assert torch.equal(base, logits("PUT the cup on  the plate"))
    assert not torch.allclose(base, logits("put the plate on the cup"), atol=1e-5)
    for camera in range(2):
        other = images.clone()
        other[:, camera] = 255 - other[:, camera]
        assert not torch.allclose(base, logits("put the cup on the plate", other), atol=1e-5)


@pytest.mark.slow
def test_it_learns_a_batch_by_heart() -> None:
    policy = pocket()
    images, proprio = seen(8)
    words = policy.read(["push"] * 8)
    target = torch.randint(0, 256, (8, TOKENS), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    losses = []
    for _ in range(80):
        loss = functional.cross_entropy(policy(images, words, proprio).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 5 and losses[-1] < 0.5
