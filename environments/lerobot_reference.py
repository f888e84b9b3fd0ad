"""LeRobot's own outputs and files, to compare with ours. Runs in an environment of environments/lerobot.sh.

    .envs/lerobot/bin/python environments/lerobot_reference.py make FOLDER smolvla
    .envs/lerobot/bin/python environments/lerobot_reference.py make FOLDER pi0 relative
    .envs/lerobot/bin/python environments/lerobot_reference.py chunk FOLDER INPUTS.npz OUT.npz
    .envs/lerobot/bin/python environments/lerobot_reference.py shapes OUT.json smolvla
    .envs/lerobot/bin/python environments/lerobot_reference.py data FOLDER MADE.npz image
    PYTHONPATH=.envs/lerobot033 .envs/lerobot/bin/python environments/lerobot_reference.py data FOLDER MADE.npz video

`make` writes the checkpoint of tiny_lerobot.py (tests), its VLM's config and tokenizer in FOLDER/vlm. `chunk` reads
`images` [B, cameras, H, W, 3] uint8, `texts` [B], `states` [B, P], `noise` [B, L, D], `times` [K] and `demonstrated`
[B, L, A] in the env's units, and writes `velocities` [K, B, L, D] at the noise, `denoised` [B, L, D], `actions`
[B, L, A] in the env's units and `targets` [B, L, A], the demonstrated ones as a network learns them. `shapes` writes
names and shapes of the weights of a policy of published size. `data` writes a data set, its images in Parquet (image)
or in films (video), of episodes `actions_N` [T, A], `states_N` [T, P] and `images_N` [T, 2, H, W, 3], all with `text`.

The kinds are smolvla, pi0 and pi05; the last two need LeRobot 0.6, which has them in one size alone: for `make` and
`chunk` that is replaced by the small one of tiny_lerobot.py, and nothing else.
"""

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(
    0, str(Path(__file__).parents[1] / "tests/plugins/lerobot")
)  # a package of this environment has the name tests
from tiny_lerobot import (  # noqa: E402
    CONFIGS,
    FEATURES,
    GEMMA,
    HEADS,
    MARKS,
    MEASURED,
    PI_SIZES,
    REAL_VLM,
    RELATIVE,
    SIZES,
    VISION,
    VLM,
    random_weight,
    tokenizer,
)

CLASSES = {"smolvla": "SmolVLA", "pi0": "PI0", "pi05": "PI05"}
"""Beginning of LeRobot's class names of each kind."""


def of_lerobot(kind: str, part: str) -> Any:
    """The class `part` (Policy or Config) of a kind."""
    module = {"Policy": "modeling", "Config": "configuration"}[part]
    return getattr(importlib.import_module(f"lerobot.policies.{kind}.{module}_{kind}"), CLASSES[kind] + part)


def write_vlm(folder: Path, vlm: dict[str, Any], kind: str) -> None:
    """Tokenizer of the VLM below a policy of this kind; config and processor of SmolVLA's."""
    from transformers import (
        PreTrainedTokenizerFast,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )

    folder.mkdir(parents=True)
    settings = {"tokenizer_object": tokenizer(kind), "unk_token": "<unk>", "pad_token": "<pad>"}
    if kind != "smolvla":
        PreTrainedTokenizerFast(**settings, bos_token="<bos>").save_pretrained(folder)
        return
    (folder / "config.json").write_text(json.dumps(vlm))
    names = ("fake_image_token", "image_token", "global_image_token", "end_of_utterance_token")
    fast = PreTrainedTokenizerFast(**settings, extra_special_tokens=dict(zip(names, MARKS, strict=True)))
    SmolVLMProcessor(
        SmolVLMImageProcessor(), fast, SmolVLMVideoProcessor(), image_seq_len=4, chat_template=""
    ).save_pretrained(folder)


def shrink(kind: str, vlm: Path | None) -> None:
    """Makes LeRobot's pi0 small, and its processors read the tokenizer in `vlm`."""
    if kind == "smolvla":
        return
    modeling = importlib.import_module(f"lerobot.policies.{kind}.modeling_{kind}")
    processor = importlib.import_module(f"lerobot.policies.{kind}.processor_{kind}")
    paligemma, expert = modeling.PaliGemmaForConditionalGenerationWithPiGemma, modeling.PiGemmaForCausalLM

    def small_gemma(variant: str) -> Any:
        widths, heads = GEMMA[variant], HEADS
        return modeling.GemmaConfig(
            width=widths["hidden_size"], mlp_dim=widths["intermediate_size"], depth=heads["num_hidden_layers"],
            num_heads=heads["num_attention_heads"], num_kv_heads=heads["num_key_value_heads"],
            head_dim=heads["head_dim"],
        )  # fmt: skip

    def small_paligemma(config: Any) -> Any:
        config.text_config.vocab_size = HEADS["vocab_size"]
        for name, value in VISION.items():
            setattr(config.vision_config, name, value)
        config.vision_config.projection_dim = config.text_config.hidden_size
        return paligemma(config)

    def small_expert(config: Any) -> Any:
        config.vocab_size = HEADS["vocab_size"]
        return expert(config)

    modeling.get_gemma_config = small_gemma
    modeling.PaliGemmaForConditionalGenerationWithPiGemma = small_paligemma
    modeling.PiGemmaForCausalLM = small_expert
    if vlm is not None:
        step = processor.TokenizerProcessorStep
        processor.TokenizerProcessorStep = lambda **settings: step(**{**settings, "tokenizer_name": str(vlm)})


def make(folder: Path, kind: str, relative: Path | None = None) -> None:
    """The small random policy of tiny_lerobot.py, as LeRobot builds and saves it, its actions relative or not."""
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.factory import make_pre_post_processors

    write_vlm(folder / "vlm", VLM, kind)
    shrink(kind, folder / "vlm")
    features = {
        name: PolicyFeature(FeatureType(about["type"]), tuple(about["shape"])) for name, about in FEATURES.items()
    }
    action = features.pop("action")
    own = {"vlm_model_name": str(folder / "vlm"), **SIZES} if kind == "smolvla" else PI_SIZES
    own |= RELATIVE if relative else {}
    config = of_lerobot(kind, "Config")(
        input_features=features, output_features={"action": action}, device="cpu", **own
    )
    assert config.tokenizer_max_length == CONFIGS[kind]["tokenizer_max_length"]
    policy = of_lerobot(kind, "Policy")(config)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            weight.copy_(torch.from_numpy(random_weight(name, tuple(weight.shape))))
    policy.save_pretrained(folder)
    for processor in make_pre_post_processors(config, dataset_stats=MEASURED[kind]):
        processor.save_pretrained(folder)


@torch.no_grad()
def chunk(folder: Path, inputs: Path, out: Path) -> None:
    """LeRobot's outputs for `inputs`, through the processors of the folder."""
    from lerobot.policies.factory import make_pre_post_processors

    kind = json.loads((folder / "config.json").read_text())["type"]
    shrink(kind, None)
    policy = of_lerobot(kind, "Policy").from_pretrained(folder, strict=True)
    # pi0's loader prints what goes wrong, and goes on with random weights
    state = policy.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in load_file(folder / "model.safetensors").items())
    before, after = make_pre_post_processors(policy.config, str(folder))
    given = np.load(inputs)
    batch = {"observation.state": torch.from_numpy(given["states"]).float(), "task": given["texts"].tolist()}
    for index, name in enumerate(policy.config.image_features):
        batch[name] = torch.from_numpy(given["images"][:, index]).permute(0, 3, 1, 2).float() / 255
    targets = before({**batch, "action": torch.from_numpy(given["demonstrated"])})["action"]
    seen = before(batch)
    noise = torch.from_numpy(given["noise"]).float()
    observed, velocity = (smolvla if kind == "smolvla" else pi)(policy, seen)
    velocities = [velocity(noise, torch.full((len(noise),), float(time))) for time in given["times"]]
    denoised = policy.model.sample_actions(*observed, noise=noise)
    actions = after(policy.predict_action_chunk(seen, noise=noise))
    found = {"velocities": torch.stack(velocities), "denoised": denoised, "actions": actions, "targets": targets}
    np.savez(out, **{name: values.numpy() for name, values in found.items()})


Observed = tuple[tuple[Any, ...], Callable[[Tensor, Tensor], Tensor]]
"""A policy's inputs, and its velocity at x and t given these."""


def smolvla(policy: Any, seen: dict[str, Any]) -> Observed:
    """Inputs and velocity of a SmolVLA."""
    from lerobot.policies.smolvla.modeling_smolvla import make_att_2d_masks

    model = policy.model
    words = seen["observation.language.tokens"], seen["observation.language.attention_mask"]
    observed = (*policy.prepare_images(seen), *words, policy.prepare_state(seen))
    embedded, is_there, is_new = model.embed_prefix(*observed[:-1], state=observed[-1])
    _, cache = model.vlm_with_expert.forward(
        attention_mask=make_att_2d_masks(is_there, is_new),
        position_ids=torch.cumsum(is_there, dim=1) - 1,
        past_key_values=None,
        inputs_embeds=[embedded, None],
        use_cache=True,
    )
    return observed, partial(model.denoise_step, is_there, cache)


def pi(policy: Any, seen: dict[str, Any]) -> Observed:
    """Inputs and velocity of a pi0 or a pi0.5."""
    modeling = importlib.import_module(type(policy).__module__)
    model = policy.model
    words = seen["observation.language.tokens"], seen["observation.language.attention_mask"]
    observed = (*policy._preprocess_images(seen), *words)
    embedded, is_there, is_new = model.embed_prefix(*observed)
    # as in sample_actions: the masks are of the eager implementation
    model.paligemma_with_expert.paligemma.model.language_model.config._attn_implementation = "eager"
    _, cache = model.paligemma_with_expert.forward(
        attention_mask=modeling.prepare_attention_masks_4d(modeling.make_att_2d_masks(is_there, is_new)),
        position_ids=torch.cumsum(is_there, dim=1) - 1,
        past_key_values=None,
        inputs_embeds=[embedded, None],
        use_cache=True,
    )
    state = {"state": policy.prepare_state(seen)} if hasattr(policy, "prepare_state") else {}

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        return model.denoise_step(prefix_pad_masks=is_there, past_key_values=cache, x_t=x, timestep=t, **state)

    return (*observed, *state.values()), velocity


def shapes(out: Path, kind: str) -> None:
    """Names and shapes of all weights in LeRobot's default sizes, SmolVLA above SmolVLM2-500M; none takes memory."""
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"device": "cpu"}
        if kind == "smolvla":
            write_vlm(Path(folder) / "vlm", REAL_VLM, kind)
            settings |= {"vlm_model_name": f"{folder}/vlm", "load_vlm_weights": False}
        with torch.device("meta"):
            policy_class, config_class = of_lerobot(kind, "Policy"), of_lerobot(kind, "Config")
            config = config_class(**settings)
            if kind != "smolvla":  # which would move them to the CPU
                config.device = "meta"
            policy = policy_class(config)
    out.write_text(json.dumps({name: list(weight.shape) for name, weight in policy.state_dict().items()}))


def data(folder: Path, recorded: Path, dtype: Path) -> None:
    """A data set of episodes with two cameras, as LeRobot writes it: version 3.0, or 2.1 by LeRobot 0.3."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    given = np.load(recorded)
    cameras = ("observation.images.image", "observation.images.wrist_image")
    numbers = {"action": given["actions_0"].shape[1:], "observation.state": given["states_0"].shape[1:]}
    features: dict[str, Any] = {
        name: {"dtype": "float32", "shape": shape, "names": [f"number {index}" for index in range(*shape)]}
        for name, shape in numbers.items()
    }
    features |= {
        name: {"dtype": str(dtype), "shape": given["images_0"].shape[2:], "names": ["height", "width", "channels"]}
        for name in cameras
    }
    dataset = LeRobotDataset.create(
        "some/data", fps=20, features=features, root=folder, use_videos=str(dtype) == "video"
    )
    number, task = 0, str(given["text"])
    writes_v21 = not hasattr(dataset, "finalize")
    while f"actions_{number}" in given:
        rows = zip(*(given[f"{name}_{number}"] for name in ("actions", "states", "images")), strict=True)
        for action, state, images in rows:
            frame = {"action": action, "observation.state": state, **dict(zip(cameras, images, strict=True))}
            dataset.add_frame(frame, task) if writes_v21 else dataset.add_frame({**frame, "task": task})
        dataset.save_episode()
        number += 1
    if not writes_v21:
        dataset.finalize()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["make", "chunk", "shapes", "data"])
    parser.add_argument("arguments", nargs="+")
    arguments = parser.parse_args()
    given = [argument if argument in CLASSES else Path(argument) for argument in arguments.arguments]
    {"make": make, "chunk": chunk, "shapes": shapes, "data": data}[arguments.command](*given)
