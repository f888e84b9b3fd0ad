"""A small random SmolVLA, pi0 or pi0.5 in a folder, as LeRobot 0.6.1 writes them.
`environments/lerobot_reference.py` makes the same ones with LeRobot's own code, so this module imports nothing of rlvlm
before it is asked to write.

LeRobot has one size of pi0: both sides put the small sizes below in the place of its two Gemmas and its SigLIP.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

WORDS = ["<unk>", "<pad>", "\n", "push", "the", "red", "block", "onto", "green", "pad", "lift", "it"]
MARKS = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"]
VLM: dict[str, Any] = {
    "model_type": "smolvlm",
    "image_token_id": 13,
    "pad_token_id": 1,
    "scale_factor": 2,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "llama",
        "vocab_size": 24,
        "hidden_size": 24,
        "intermediate_size": 32,
        "head_dim": 8,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
    },
    "vision_config": {
        "model_type": "smolvlm_vision",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    },
}
REAL_VLM: dict[str, Any] = {
    **VLM,
    "image_token_id": 49_190,
    "pad_token_id": 2,
    "scale_factor": 4,
    "text_config": {
        **VLM["text_config"],
        "vocab_size": 49_280,
        "hidden_size": 960,
        "intermediate_size": 2560,
        "head_dim": 64,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "pad_token_id": 2,
    },
    "vision_config": {
        "model_type": "smolvlm_vision",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    },
}
"""Sizes of SmolVLM2-500M-Video-Instruct."""
SIZES: dict[str, Any] = {
    "chunk_size": 6,
    "n_action_steps": 4,
    "max_state_dim": 8,
    "max_action_dim": 7,
    "resize_imgs_with_padding": (32, 32),
    "num_vlm_layers": 4,
    "num_steps": 5,
    "tokenizer_max_length": 8,
}
REAL_SIZES: dict[str, Any] = {
    "chunk_size": 50,
    "n_action_steps": 50,
    "max_state_dim": 32,
    "max_action_dim": 32,
    "resize_imgs_with_padding": (512, 512),
    "num_vlm_layers": 16,
    "num_steps": 10,
    "tokenizer_max_length": 48,
}
"""LeRobot's defaults."""
PI_SIZES: dict[str, Any] = {
    "chunk_size": 6,
    "n_action_steps": 4,
    "max_state_dim": 8,
    "max_action_dim": 7,
    "image_resolution": (32, 32),
    "num_inference_steps": 5,
}
LETTERS = ["<unk>", "<pad>", "<bos>", *"abcdefghijklmnopqrstuvwxyzTSA0123456789 ,:;-\n"]
GEMMA = {
    "gemma_2b": {"hidden_size": 32, "intermediate_size": 48},
    "gemma_300m": {"hidden_size": 16, "intermediate_size": 24},
}
HEADS = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64}
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8
}  # fmt: skip
FEATURES: dict[str, Any] = {
    "observation.state": {"type": "STATE", "shape": [5]},
    "observation.images.front": {"type": "VISUAL", "shape": [3, 40, 48]},
    "observation.images.wrist": {"type": "VISUAL", "shape": [3, 40, 48]},
    "action": {"type": "ACTION", "shape": [3]},
}
STATISTICS = {
    "observation.state": {"mean": np.linspace(-1, 1, 5), "std": np.linspace(0.5, 2, 5)},
    "action": {"mean": np.array([0.1, -0.2, 0.5]), "std": np.array([0.3, 0.0, 2.0])},
}
QUANTILES = {
    "observation.state": {"q01": np.linspace(-1, 1, 5), "q99": np.linspace(0.5, 2, 5)},
    "action": {"q01": np.array([-0.1, -0.2, 0.5]), "q99": np.array([0.3, 0.1, 2.0])},
}
_INPUTS = {name: feature for name, feature in FEATURES.items() if name != "action"}
_NORMS = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
CONFIG: dict[str, Any] = {
    "type": "smolvla",
    "n_obs_steps": 1,
    "input_features": _INPUTS,
    "output_features": {"action": FEATURES["action"]},
    "device": "cpu",
    "normalization_mapping": _NORMS,
    **SIZES,
    "empty_cameras": 0,
    "adapt_to_pi_aloha": False,
    "use_delta_joint_actions_aloha": False,
    "use_cache": True,
    "add_image_special_tokens": False,
    "attention_mode": "cross_attn",
    "prefix_length": -1,
    "pad_language_to": "longest",
    "num_expert_layers": -1,
    "self_attn_every_n_layers": 2,
    "expert_width_multiplier": 0.75,
    "min_period": 0.004,
    "max_period": 4.0,
    "rtc_config": None,
}
"""Fields of config.json: all that say how the network computes, and some of the others."""


PI_CONFIG: dict[str, Any] = {
    "type": "pi0",
    "n_obs_steps": 1,
    "input_features": _INPUTS,
    "output_features": {"action": FEATURES["action"]},
    "device": "cpu",
    "normalization_mapping": _NORMS,
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "dtype": "float32",
    **PI_SIZES,
    "min_period": 0.004,
    "max_period": 4.0,
    "use_relative_actions": False,
    "relative_exclude_joints": ["gripper"],
    "action_feature_names": None,
    "rtc_config": None,
    "empty_cameras": 0,
    "tokenizer_max_length": 48,
}
"""Fields of config.json: all that say how the network computes, and some of the others."""
_PI05 = {"type": "pi05", "tokenizer_max_length": 200}
_PI05_NORMS = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
CONFIGS = {"smolvla": CONFIG, "pi0": PI_CONFIG, "pi05": {**PI_CONFIG, **_PI05, "normalization_mapping": _PI05_NORMS}}
"""By the type of policy."""
RELATIVE: dict[str, Any] = {
    "use_relative_actions": True, "action_feature_names": ["main_shoulder.pos", "main_Gripper.pos", "elbow"]
}  # fmt: skip
"""Settings of a pi0 whose actions but the gripper's are relative to the state."""
MEASURED = {"smolvla": STATISTICS, "pi0": STATISTICS, "pi05": QUANTILES}
"""The statistics of each."""


def random_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A weight of LeRobot's name, the same on every machine; no gain is 1 and no bias 0, which would hide mistakes."""
    drawn = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) == 1:
        is_gemma = "language_model" in name or "gemma_expert" in name  # whose norms add 1 themselves
        is_gain = "norm" in name and name.endswith("weight") and not is_gemma
        return (0.2 * drawn + is_gain).astype(np.float32)
    return (drawn / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def inputs(num: int = 3) -> dict[str, np.ndarray]:
    """Observations, noise and times for `num` chunks."""
    drawn = np.random.RandomState(0)
    texts = ["push the red block", "lift it", "push the red block onto the green pad again it"]
    return {
        "images": drawn.randint(0, 256, (num, 2, 40, 48, 3)).astype(np.uint8),
        "texts": np.array([texts[index % 3] for index in range(num)]),
        "states": drawn.standard_normal((num, 5)).astype(np.float32),
        "noise": drawn.standard_normal((num, 6, 7)).astype(np.float32),
        "times": np.array([1.0, 0.8, 0.3, 0.0], np.float32),
        "demonstrated": drawn.standard_normal((num, 6, 3)).astype(np.float32),
    }


def tokenizer(kind: str = "smolvla") -> Tokenizer:
    """SmolVLA: words and ends of lines, with which every prompt ends. pi0: letters, behind one that begins."""
    if kind != "smolvla":
        letters = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(LETTERS)}, "<unk>"))
        letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
        begins = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
        letters.post_processor = begins  # pyright: ignore[reportAttributeAccessIssue]
        return letters
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate([*WORDS, *MARKS])}, "<unk>"))
    parts = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    words.pre_tokenizer = pre_tokenizers.Sequence(parts)  # pyright: ignore[reportAttributeAccessIssue]
    return words


def shrink_pi0(patch: Any) -> None:
    """Makes rlvlm's pi0 small, by pytest's `monkeypatch` or by anything else with a `setitem`."""
    from rlvlm.plugins.lerobot import pi0

    for table, small in ((pi0.GEMMA, GEMMA), (pi0.HEADS, HEADS), (pi0.VISION, VISION)):
        for name, value in small.items():
            patch.setitem(table, name, value)


def write_lerobot(folder: Path, env: Any = None, kind: str = "smolvla", **changes: Any) -> Path:
    """The checkpoint in `folder`, its VLM's files in `folder`/vlm; `changes` are fields of config.json. With an `env`
    it has its cameras, and its numbers of proprioception and actions. A pi0 needs `shrink_pi0` first.
    """
    from safetensors.numpy import save_file

    from rlvlm.plugins.lerobot.config import LeRobotConfig
    from rlvlm.plugins.lerobot.loading import outline

    write_settings(folder, env, kind, VLM, **changes)
    network = outline(folder, LeRobotConfig())
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    shapes |= {name: shapes[other] for name, other in network.tied.items()}
    shapes |= {name: (HEADS["vocab_size"], GEMMA["gemma_300m"]["hidden_size"]) for name in network.unread}
    save_file({name: random_weight(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def write_settings(folder: Path, env: Any, kind: str, layout: dict[str, Any], **changes: Any) -> None:
    """All of a checkpoint but its weights, whose file is empty; `layout` is the config of a SmolVLA's VLM."""
    from safetensors.numpy import save_file

    vlm = folder / "vlm"
    vlm.mkdir(parents=True)
    (vlm / "config.json").write_text(json.dumps(layout))
    tokenizer(kind).save(str(vlm / "tokenizer.json"))
    features, measured = FEATURES, MEASURED[kind]
    if env is not None:
        features = {f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 40, 48]} for name in env.cameras}
        features["observation.state"] = {"type": "STATE", "shape": [env.proprio_size]}
        features["action"] = {"type": "ACTION", "shape": [len(env.action_low)]}
        first, second = next(iter(measured.values()))
        middle = (np.asarray(env.action_low) + np.asarray(env.action_high)) / 2
        measured = {
            name: {first: at - 0.3 if kind == "pi05" else at, second: at + 0.3 if kind == "pi05" else at * 0 + 0.3}
            for name, at in (("observation.state", np.zeros(env.proprio_size)), ("action", middle))
        }
        changes["input_features"] = {name: about for name, about in features.items() if name != "action"}
    config = {**CONFIGS[kind], **({"vlm_model_name": str(vlm)} if kind == "smolvla" else {}), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    norms = {"eps": 1e-8, "features": features, "norm_map": config["normalization_mapping"]}
    words = {
        "max_length": config["tokenizer_max_length"], "task_key": "task", "padding_side": "right", "truncation": True,
        "padding": "longest" if kind == "smolvla" else "max_length", "tokenizer_name": str(vlm),
    }  # fmt: skip
    begin = [("rename_observations_processor", {"rename_map": {}}), ("to_batch_processor", {})]
    device, worded = ("device_processor", {"device": "cpu", "float_dtype": None}), ("tokenizer_processor", words)
    is_relative = config.get("use_relative_actions", False)
    apart = {"exclude_joints": ["gripper"], "action_names": config.get("action_feature_names")}
    relative = ("relative_actions_processor", {"enabled": is_relative, **apart})
    scaled = ("normalizer_processor", norms)
    before: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "smolvla": [*begin, ("smolvla_new_line_processor", {}), worded, device, scaled],
        "pi0": [*begin, ("pi0_new_line_processor", {}), worded, device, relative, scaled],
        "pi05": [*begin, relative, scaled, ("pi05_prepare_state_tokenizer_processor_step", {}), worded, device],
    }
    restored = ("unnormalizer_processor", {**norms, "features": {"action": features["action"]}})
    absolute = [] if kind == "smolvla" else [("absolute_actions_processor", {"enabled": is_relative})]
    flat = {
        f"{feature}.{name}": values.astype(np.float32)
        for feature, about in measured.items()
        for name, values in about.items()
    }
    for processor, parts in (
        ("policy_preprocessor", before[kind]),
        ("policy_postprocessor", [restored, *absolute, device]),
    ):
        written: list[dict[str, Any]] = []
        for index, (name, settings) in enumerate(parts):
            written.append({"registry_name": name, "config": settings})
            if "normalizer" in name:
                written[-1]["state_file"] = f"{processor}_step_{index}_{name}.safetensors"
                save_file(flat, folder / written[-1]["state_file"])
        (folder / f"{processor}.json").write_text(json.dumps({"name": processor, "steps": written}))
    (folder / "model.safetensors").touch()
