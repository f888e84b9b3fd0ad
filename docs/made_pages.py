"""Pages of the docs that are made as the site is built: settings of the configs, the gallery, the pocket models' cards.

A hook of MkDocs (`mkdocs.yml`). Pages in the repository link to files beside `docs/`; here these become pages too.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import rlvlm
from rlvlm.envs.registry import task_summary
from rlvlm.runs.settings.tree import flat, meanings

ROOT = Path(__file__).parents[1]
RECIPES = {"sac": "drawer_open", "ppo": "number_line", "grpo": "push_block"}
"""A task of each algorithm, whose recipe its page of settings shows."""
TITLES = {"sac": "SAC + PEBBLE", "ppo": "VLM policies (PPO and others)", "grpo": "VLAs (GRPO and others)"}
PROTOCOLS = {
    "An env in steps": "rlvlm.envs.env.StepEnv",
    "An env in turns": "rlvlm.envs.env.TurnEnv",
    "An env in chunks": "rlvlm.envs.env.ChunkEnv",
    "Pixels for an env that cannot draw its past": "rlvlm.envs.pixels.PixelEnv",
    "A task": "rlvlm.envs.registry.Task",
    "A judge": "rlvlm.judges.judge.Judge",
    "A reward source": "rlvlm.rewards.source.RewardSource",
    "A teacher": "rlvlm.preferences.teachers.Teacher",
    "A policy in chunks": "rlvlm.policies.vla.policy.VLAPolicy",
    "A policy in turns": "rlvlm.policies.reply_policy.ReplyPolicy",
    "What every policy is": "rlvlm.policies.protocol.Policy",
    "What a loss sees": "rlvlm.algorithms.policy_gradient.losses.MiniBatch",
    "A loss": "rlvlm.algorithms.policy_gradient.losses.policy_loss",
    "An estimator of advantages": "rlvlm.algorithms.policy_gradient.advantages.estimator",
}
"""What users bring, and the class or decorator that says what it must do."""
COPIES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files beside `docs/` that are pages of the site."""
IMAGES = {
    "seven_tasks.png": "Final scores of seven tasks by reward source; `sweep_into` by earlier code, not solved now.",
    "turn_envs.png": "Envs in turns: number_line, blackjack, ez_points, points24 and doorkey_6x6.",
    "deformables.png": "Rope, water and cloth.",
    "contact_sheet_soccer.png": "A contact sheet of `rlvlm check-task soccer`.",
    "vla_episodes.png": "Episodes of a VLA.",
    "policy_episode.png": "An episode of a VLM that acts.",
    "judged_pair.png": "A pair that the judge compared, from `judge_panel.html`.",
    "learning_curve.png": "A learning curve of drawer_open.",
}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made."""
    pages = {f"settings/{name}.md": settings_page(name, task) for name, task in RECIPES.items()}
    pages |= {target: (ROOT / source).read_text() for source, target in COPIES.items()}
    pages |= {f"examples/{file.stem}.md": code_page(file) for file in sorted((ROOT / "examples").glob("*.py"))}
    pages |= {f"models/{card.parent.name}.md": card.read_text() for card in sorted(ROOT.glob("rlvlm/pocket/*/CARD.md"))}
    pages |= {"gallery.md": gallery(), "models.md": models(), "api.md": api(), "protocols.md": protocols()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:  # noqa: ARG001 - MkDocs names them
    """Has links to files beside `docs/` lead to the pages that these are here."""
    depth = page.file.src_uri.count("/")
    up = "../" * depth
    markdown = re.sub(r"\]\((?:\.\./)*(?:rlvlm/)?pocket/(\w+)/CARD\.md", rf"]({up}models/\1.md", markdown)
    markdown = re.sub(r"\]\((?:\.\./)*examples/(\w+)\.py", rf"]({up}examples/\1.md", markdown)
    for source, target in COPIES.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{re.escape(source)}", f"]({up}{target}", markdown)
    return re.sub(r"\]\(docs/", f"]({up}", markdown) if page.file.src_uri in COPIES.values() else markdown


def settings_page(algorithm: str, task: str) -> str:
    """Every setting of a recipe, with its default and the line that explains it."""
    config = rlvlm.recipe(task)
    about = meanings(config)
    sections: dict[str, list[str]] = {}
    for name, value in flat(config).items():
        if name not in about:  # a section of another algorithm
            continue
        cells = (
            f"`--{name.replace('_', '-')}`",
            "" if value in ("", None, []) else f"`{value}`",
            about.get(name, ""),
        )
        row = " | ".join(cell.replace("|", "\\|") for cell in cells)
        sections.setdefault(name.rpartition(".")[0], []).append(f"| {row} |")
    head = "| setting | default | meaning |\n|---|---|---|\n"
    tables = [f"## {section or 'The run'}\n\n{head}" + "\n".join(rows) for section, rows in sections.items()]
    return (
        f"# Settings: {TITLES[algorithm]}\n\nThe recipe of `{task}`; `python -m rlvlm.run {task} --print-config` shows "
        "it as YAML, `--help-all` has the full explanations.\n\n" + "\n\n".join(tables) + "\n"
    )


def code_page(file: Path) -> str:
    """An example as it stands."""
    return f"# {file.name}\n\n```python\n{file.read_text()}```\n"


def gallery() -> str:
    """The images that the other pages show, and what can be run."""
    shown = "\n\n".join(f"![{text}](images/{name})\n\n{text}" for name, text in IMAGES.items())
    return f"# Gallery\n\nTasks: {task_summary()}.\n\n{shown}\n"


def models() -> str:
    """The small models that ship."""
    cards = sorted(ROOT.glob("rlvlm/pocket/*/CARD.md"))
    rows = []
    for card in cards:
        title = card.read_text().splitlines()[0].removeprefix("# ")
        megabytes = (card.parent / "weights" / "model.safetensors").stat().st_size / 1e6
        rows.append(f"| [{title}](models/{card.parent.name}.md) | {megabytes:.1f} MB |")
    return "\n".join(
        [
            "# Pocket models",
            "",
            "They ship with the package, so that every part runs without a network or a GPU. They know rlvlm's own "
            "tasks alone and are no evidence about large models. `pocket_models/` makes them anew.",
            "",
            *("| model | weights |", "|---|---|"),
            *rows,
            "",
        ]
    )


def protocols() -> str:
    """The classes and decorators that users derive from or write functions for, by their docstrings."""
    parts = "\n\n".join(f"## {title}\n\n::: {name}" for title, name in PROTOCOLS.items())
    return f"# Protocols\n\nEach with its file, option and example: [what you can bring](bring.md).\n\n{parts}\n"


def api() -> str:
    """The public names of `rlvlm`, by their docstrings."""
    names = "\n\n".join(f"::: {module}.{name}" for name, module in sorted(rlvlm.PUBLIC.items()))
    return f"# Public names\n\nAll are attributes of `rlvlm`; [From Python](python.md) shows them at work.\n\n{names}\n"
