"""Bytes a GPU of a learner, by model, by what learns and by number of cards: `python benchmarks/memory_plan.py`.

The rule is `rlvlm.runs.start.memory_plan`, on models without weights (the meta device), with 8,192
tokens at once and gradient checkpointing. Prints a Markdown table in GiB.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import Qwen2_5_VLConfig

from benchmarks.update_memory import WIDTHS
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig, chunk_defaults
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.runs.start.memory_plan import plan, size_of

VISION = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
DEPTHS: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-3b": {"num_hidden_layers": 36, "vocab_size": 151_936, "tie_word_embeddings": True},
    "qwen2.5-vl-7b": {"num_hidden_layers": 28, "vocab_size": 152_064, "tie_word_embeddings": False},
}
CARDS = (1, 2, 4, 8)


def main() -> None:
    from rlvlm.plugins.openvla.config import OpenVLAConfig  # a guest, which `write_config` does without

    print("| GiB a card | learns | " + " | ".join(f"{count} GPU" for count in CARDS) + " |")
    print("|---|---|" + "---|" * len(CARDS))
    with TemporaryDirectory() as root:
        for name in (*DEPTHS, "openvla-oft-7b"):
            folder = write_config(name, Path(root) / name)
            for learns in ("all", "lora", "nf4"):
                if name in DEPTHS:
                    policy: Any = PolicyConfig(
                        model=str(folder),
                        learns="all" if learns == "all" else "lora",
                        quantization="nf4" if learns == "nf4" else "none",
                    )
                elif learns == "nf4":
                    continue
                else:
                    policy = VLAConfig(model=str(folder), openvla=OpenVLAConfig(learns=learns))
                size = size_of(policy, folder)
                cells = []
                for count in CARDS:
                    if learns == "nf4" and count > 1:
                        cells.append("-")
                        continue
                    several = {"num_learners": count, "shard": True} if count > 1 else {}
                    coarse = {"compute_dtype": "bfloat16"} if count > 1 else {}
                    algo = (PolicyGradientConfig if name in DEPTHS else chunk_defaults)(
                        microbatch_tokens=8_192, **several, **coarse
                    )
                    cells.append(f"{plan(size, policy, algo, on_gpu=True).total / 2**30:.0f}")
                print(f"| {name}, {size.total / 1e9:.2f} billion | {learns} | " + " | ".join(cells) + " |")


def write_config(name: str, folder: Path) -> Path:
    """A folder with the `config.json` of a published model, as far as shapes go, and nothing else."""
    folder.mkdir(parents=True)
    if name in DEPTHS:
        text = {**WIDTHS[name], **DEPTHS[name]}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
        vision = {**VISION, "out_hidden_size": text["hidden_size"]}
        tied = DEPTHS[name]["tie_word_embeddings"]
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied).save_pretrained(folder)
    else:
        (folder / "config.json").write_text(json.dumps({"model_type": "openvla", "proprio_size": 8}))
    return folder


if __name__ == "__main__":
    main()
