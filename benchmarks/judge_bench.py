"""The table of judges that run on any machine, as docs/judge_bench.md has it: `python benchmarks/judge_bench.py OUT`.

Measures each on one suite (`--suite tiny`), and writes OUT/NAME/bench.json and OUT/table.md; half an hour on two busy
cores, most of it CLIP's. What has a row is not measured again. Of the project's own training are the pocket judges
alone. The random Qwen3-VL has the pocket judge's shapes and untrained weights; it never stops writing, so it is cut
short. The constant server is an OpenAI-like one on the loopback that always answers 0; brightness is a function of
one's own. The paper's accuracies are those that `--reward.teacher published` draws from.
"""

import json
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from rlvlm.judge_bench.rows import read_row
from rlvlm.judges.config import JudgeConfig
from rlvlm.pages.judge import cells
from rlvlm.pocket.models import weights_folder
from rlvlm.preferences.config import THEIR_TASKS
from rlvlm.preferences.teachers import SHARES
from rlvlm.reports.judge_bench import bench_judge
from rlvlm.reports.options import BenchOptions
from rlvlm.vlms.config import ApiConfig

COLUMNS = (
    *("accuracy on decided pairs", "undecided", "said left", "label swaps with the order", "AUC of success"),
    *("called success: reversed", "VOC, order along an episode", "answers per second"),
)


class Constant(BaseHTTPRequestHandler):
    """An OpenAI-like server whose answer is 0 whatever it is asked."""

    def do_POST(self) -> None:  # noqa: N802 - the base's name
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "0"}
        usage = {"prompt_tokens": 700, "completion_tokens": 1, "total_tokens": 701}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "constant", "usage": usage,
                           "choices": [choice]}).encode()  # fmt: skip
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Says nothing."""


def brightness(images: list[Any], _: str) -> list[float]:
    """The judge `benchmarks.judge_bench:brightness`."""
    return [float(np.mean(image)) / 255 for image in images]


def random_qwen(folder: Path) -> str:
    """A folder with untrained weights of the pocket judge's shapes."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from rlvlm.vlms.supervised import save

    torch.manual_seed(0)
    shapes = AutoConfig.from_pretrained(weights_folder())
    model: Any = AutoModelForImageTextToText.from_config(shapes, dtype=torch.float32)
    model.generation_config = GenerationConfig.from_pretrained(weights_folder())
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(weights_folder())
    save(model, tokenizer, Qwen2VLImageProcessorPil.from_pretrained(weights_folder()), folder)
    return str(folder)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    out: tyro.conf.Positional[Path] = Path("judge_table")
    """Folder of the rows."""
    suite: str = "tiny"
    """Suite of `rlvlm judge-bench`."""
    clip_pairs: int = 10
    """Pairs of each task in CLIP's row, which is also shown the last image of an episode alone."""


def main(settings: Settings) -> None:
    """Measures what has no row yet, and writes the table."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Constant)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    api = ApiConfig(base_url=f"http://127.0.0.1:{server.server_port}/v1", key_env="")
    qwen = random_qwen(settings.out / "random_qwen")
    judges: dict[str, tuple[str, JudgeConfig]] = {
        "oracle": ("oracle", JudgeConfig()),
        "random": ("random", JudgeConfig()),
        "always left": ("left", JudgeConfig()),
        "pocket": ("none", JudgeConfig()),
        "pocket, both orders": ("none", JudgeConfig(both_orders=True)),
        "pocket scorer": ("none", JudgeConfig(model="scorer", score="success")),
        "pocket video": ("none", JudgeConfig(model="video", score="success")),
        "Qwen3-VL, random weights": (
            "none",
            JudgeConfig(model=qwen, max_new_tokens=8),
        ),
        "constant server": ("none", JudgeConfig(backend="openai", model="constant", api=api)),
        "brightness": ("none", JudgeConfig(backend="benchmarks.judge_bench:brightness")),
        "CLIP, random weights": ("none", JudgeConfig(backend="clip", model="random")),
    }
    lines: list[tuple[str, ...]] = [("judge", *COLUMNS, "faults named")]
    for name, (reference, config) in judges.items():
        folder = settings.out / name.replace(",", "").replace(" ", "_")
        if not (folder / "bench.json").exists() or not read_row(folder)["bench"]["is_whole"]:
            # CLIP's image encoder takes minutes for a task's 100 pairs on a processor
            fewer = {"pairs": settings.clip_pairs, "frames": 1} if config.backend == "clip" else {}
            options: Any = {"suite": settings.suite, "judge": config, "out": folder, "reference": reference, **fewer}
            code = bench_judge(BenchOptions(**options))
            if code:  # stopped by a signal: the next one is not begun
                sys.exit(code)
        row = read_row(folder)
        facts = cells(row)
        faults = "; ".join(fault["name"] for fault in row["faults"]) or "none"
        lines.append((name, *(facts.get(column, "-") for column in COLUMNS), faults))
    for task, their in THEIR_TASKS.items():
        right, wrong, undecided = SHARES[their].sum(0)
        share, silent = 100 * right / (right + wrong), 100 * undecided / SHARES[their].sum()
        lines.append((f"the paper's VLM on {task}", f"{share:.1f} %", f"{silent:.1f} %", *"-" * len(COLUMNS[2:]), "-"))
    rule = "|---" * len(lines[0]) + "|"
    table = [f"| {' | '.join(line)} |" for line in lines]
    text = "\n".join([table[0], rule, *table[1:]]) + "\n"
    (settings.out / "table.md").write_text(text)
    sys.stdout.write(f"\n{text}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
