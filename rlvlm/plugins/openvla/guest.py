"""What this guest adds: OpenVLA-OFT as `policy.model` with `policy.head tokens`."""

from rlvlm.core.guests import Guest, PolicyCheckpoint

GUEST = Guest(
    about="checkpoints of OpenVLA-OFT with a token head",
    docs="vla.md",
    checkpoints={
        "tokens": PolicyCheckpoint(
            section="openvla",
            build="rlvlm.plugins.openvla.loading:load_openvla",
            check="rlvlm.plugins.openvla.loading:fitted",
            outline="rlvlm.plugins.openvla.loading:outline",
        )
    },
    settings={"policy.openvla": "rlvlm.plugins.openvla.config:OpenVLAConfig"},
)
