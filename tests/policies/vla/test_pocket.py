"""The pocket VLA is a plain program's: what it reads, sees and says."""

import torch

from rlvlm.policies.vla.config import PocketVLAConfig
from rlvlm.policies.vla.pocket import PocketVLA
from tests.oracles import pocket_vla as oracle


def test_the_pass_is_that_of_a_plain_program():
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
    said = ["PUSH the red  block to the pad", "", "lift"]
    found = policy(images, policy.read(said), proprio).detach()
    same, offsets = policy.forward_with_offsets(images, policy.read(said), proprio)
    assert torch.equal(same, found) and offsets.shape == (3, 6)
    weights = {name: value.double().numpy() for name, value in policy.state_dict().items()}
    for row, text in enumerate(said):
        expected, offset = oracle.logits_and_offsets(weights, images[row].numpy(), text, proprio[row].double().numpy())
        torch.testing.assert_close(found[row].double(), torch.from_numpy(expected), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(offsets[row].detach().double(), torch.from_numpy(offset), atol=1e-5, rtol=1e-5)
