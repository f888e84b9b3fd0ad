"""What this guest adds: SmolVLA, pi0 and pi0.5 as `policy.model` with `policy.head flow`."""

from rlvlm.core.guests import Guest, PolicyCheckpoint

GUEST = Guest(
    about="checkpoints of LeRobot: SmolVLA, pi0 and pi0.5",
    docs="flow_policies.md",
    checkpoints={
        "flow": PolicyCheckpoint(
            section="lerobot",
            build="rlvlm.plugins.lerobot.policy:LeRobotPolicy",
            check="rlvlm.plugins.lerobot.loading:fitted",
            outline="rlvlm.plugins.lerobot.loading:outline_with_text",
        )
    },
    settings={"policy.lerobot": "rlvlm.plugins.lerobot.config:LeRobotConfig"},
)
