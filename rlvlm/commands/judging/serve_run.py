"""`rlvlm serve RUN`: what puts a run's trained policy behind HTTP, beside what does it for judges."""

import io
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from rlvlm.core.errors import UsageError
from rlvlm.gateway.app_file import AppFile, PolicyEntry
from rlvlm.gateway.config import DEFAULT_PORT, ActConfig, HttpConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.runs.folder.run_folder import find_folder
from rlvlm.runs.folder.trust import check_trust
from rlvlm.runs.policy.config import PolicyRunConfig
from rlvlm.serving.config import PlacementConfig

APP = "policy"


def run_app(path: Path, replicas: int, num_gpus: float, trust: bool) -> AppFile:
    """The app of the policy that `path` names.

    Args:
        path: a run's folder, or a checkpoint in it; without one the best is taken.
        replicas: copies of the policy.
        num_gpus: share of a GPU for each.
        trust: whether code that the folder names may be imported.

    Raises:
        UsageError: there is no run or no checkpoint, or its policy does not act in text or by a head.
    """
    check_trust([path], trust=trust)
    folder = find_folder(path)
    config = folder.config()
    if not isinstance(config, PolicyRunConfig):
        raise UsageError(
            f"{folder.path} has no policy that looks at an image and answers: its pipeline is {config.pipeline}",
            "serve a run such as number_line's; others are played by rlvlm eval",
        )
    from rlvlm.algorithms.ppo_vlm.algorithm import make_slot
    from rlvlm.runs.evaluate import choose_checkpoint

    checkpoint = choose_checkpoint(folder, path, print).algorithm.absolute()
    slot = make_slot(config.task, config.env.for_evaluation())
    names = slot.env.action_names
    slot.begin(0)
    stream = io.BytesIO()
    Image.fromarray(slot.env.draw(slot.turn.snapshot[None])[0]).save(stream, "PNG", optimize=True)
    turn = stream.getvalue(), slot.obs.prompt
    slot.env.close()
    entry = PolicyEntry(
        app=APP,
        policy=config.policy,
        num_actions=len(names),
        placement=PlacementConfig(num_replicas=replicas, num_gpus=num_gpus),
        build=partial(trained_policy, checkpoint=checkpoint),
    )
    act = ActConfig(
        app=APP,
        action_names=names,
        max_reply_tokens=config.algo.max_reply_tokens,
        temperature=config.algo.temperature,
    )
    return AppFile(
        name=folder.path.name,
        about=f"the policy of {config.title}",
        host="127.0.0.1",
        port=DEFAULT_PORT,
        judges=(),
        policies=(entry,),
        turn=turn,
        gateway_app="gateway",
        route_prefix="/",
        http=HttpConfig(judges=(), policies=(act,)),
    )


def trained_policy(config: PolicyConfig, num_actions: int, *, checkpoint: Path) -> Any:
    """The policy with the weights of `checkpoint`."""
    from rlvlm.algorithms.ppo_vlm.algorithm import load_trained_policy
    from rlvlm.policies.vlm.loading import load_policy

    policy = load_policy(config, num_actions)
    load_trained_policy(policy, checkpoint)
    return policy
