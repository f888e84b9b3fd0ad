"""What LeRobot's own code makes of a SmolVLA, to compare with ours. Runs in the environment of environments/lerobot.sh.

    .envs/lerobot/bin/python environments/lerobot_reference.py make FOLDER
    .envs/lerobot/bin/python environments/lerobot_reference.py chunk FOLDER INPUTS.npz OUT.npz
    .envs/lerobot/bin/python environments/lerobot_reference.py shapes OUT.json

`make` writes the checkpoint of tests/tiny_smolvla.py, its VLM's config and tokenizer in FOLDER/vlm. `chunk` reads
`images` [B, cameras, H, W, 3] uint8, `texts` [B], `states` [B, P], `noise` [B, L, D] and `times` [K], and writes
`velocities` [K, B, L, D] at the noise, `denoised` [B, L, D] and `actions` [B, L, A] in the env's units. `shapes` writes
names and shapes of the weights of a SmolVLA of published size.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy, make_att_2d_masks
from transformers import (
    PreTrainedTokenizerFast,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # a package of this environment has the name tests
from tiny_smolvla import (  # noqa: E402
    FEATURES,
    MARKS,
    REAL_VLM,
    SIZES,
    STATISTICS,
    VLM,
    random_weight,
    tokenizer,
)


def write_vlm(folder: Path, vlm: dict[str, Any]) -> None:
    """Config, processor and small tokenizer of the SmolVLM `vlm`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(vlm))
    names = ("fake_image_token", "image_token", "global_image_token", "end_of_utterance_token")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(),
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens=dict(zip(names, MARKS, strict=True)),
    )
    SmolVLMProcessor(
        SmolVLMImageProcessor(), fast, SmolVLMVideoProcessor(), image_seq_len=4, chat_template=""
    ).save_pretrained(folder)


def make(folder: Path) -> None:
    """The small random SmolVLA of tests/tiny_smolvla.py, as LeRobot builds and saves it."""
    write_vlm(folder / "vlm", VLM)
    features = {
        name: PolicyFeature(FeatureType(about["type"]), tuple(about["shape"])) for name, about in FEATURES.items()
    }
    action = features.pop("action")
    config = SmolVLAConfig(
        input_features=features,
        output_features={"action": action},
        device="cpu",
        vlm_model_name=str(folder / "vlm"),
        **SIZES,
    )
    policy = SmolVLAPolicy(config)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            weight.copy_(torch.from_numpy(random_weight(name, tuple(weight.shape))))
    policy.save_pretrained(folder)
    for processor in make_pre_post_processors(config, dataset_stats=STATISTICS):
        processor.save_pretrained(folder)


@torch.no_grad()
def chunk(folder: Path, inputs: Path, out: Path) -> None:
    """What LeRobot makes of `inputs`, through the processors of the folder."""
    policy = SmolVLAPolicy.from_pretrained(folder, strict=True)
    before, after = make_pre_post_processors(policy.config, str(folder))
    given = np.load(inputs)
    batch = {"observation.state": torch.from_numpy(given["states"]).float(), "task": given["texts"].tolist()}
    for index, name in enumerate(policy.config.image_features):
        batch[name] = torch.from_numpy(given["images"][:, index]).permute(0, 3, 1, 2).float() / 255
    seen = before(batch)
    noise, model = torch.from_numpy(given["noise"]).float(), policy.model
    images = policy.prepare_images(seen)
    words = seen["observation.language.tokens"], seen["observation.language.attention_mask"]
    embedded, is_there, is_new = model.embed_prefix(*images, *words, state=policy.prepare_state(seen))
    _, cache = model.vlm_with_expert.forward(
        attention_mask=make_att_2d_masks(is_there, is_new),
        position_ids=torch.cumsum(is_there, dim=1) - 1,
        past_key_values=None,
        inputs_embeds=[embedded, None],
        use_cache=True,
        fill_kv_cache=True,
    )
    velocities = [
        model.denoise_step(is_there, cache, noise, torch.full((len(noise),), float(time))) for time in given["times"]
    ]
    denoised = model.sample_actions(*images, *words, policy.prepare_state(seen), noise=noise)
    actions = after(policy.predict_action_chunk(seen, noise=noise))
    np.savez(out, velocities=torch.stack(velocities).numpy(), denoised=denoised.numpy(), actions=actions.numpy())


def shapes(out: Path) -> None:
    """Names and shapes of all weights above SmolVLM2-500M, in LeRobot's default sizes; none takes memory."""
    with tempfile.TemporaryDirectory() as folder:
        write_vlm(Path(folder) / "vlm", REAL_VLM)
        with torch.device("meta"):
            policy = SmolVLAPolicy(SmolVLAConfig(device="cpu", vlm_model_name=f"{folder}/vlm", load_vlm_weights=False))
    out.write_text(json.dumps({name: list(weight.shape) for name, weight in policy.state_dict().items()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["make", "chunk", "shapes"])
    parser.add_argument("paths", type=Path, nargs="+")
    arguments = parser.parse_args()
    {"make": make, "chunk": chunk, "shapes": shapes}[arguments.command](*arguments.paths)
