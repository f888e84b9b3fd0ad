"""What this guest adds: the backends `clip` and `blip2` of `judge.backend`."""

from rlvlm.core.guests import Guest, JudgeBackend

GUEST = Guest(
    about="CLIP, SigLIP and BLIP-2 as judges",
    docs="judges.md",
    judges={
        "clip": JudgeBackend(
            build="rlvlm.plugins.similarity.clip:clip_judge",
            wants_weights=True,
            needs_train=True,
            has_random_weights=True,
            reads_states=True,
        ),
        "blip2": JudgeBackend(
            build="rlvlm.plugins.similarity.blip2:blip2_judge",
            wants_weights=True,
            needs_train=True,
            has_random_weights=True,
            reads_states=True,
            sees_goal_images=False,
        ),
    },
)
