"""A world in turns with the episode under way in it: demonstrations, rollouts and evaluations are played here."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rlvlm.envs.turns import TurnWorld
from rlvlm.finite import check_finite
from rlvlm.types.steps import FloatArray
from rlvlm.types.turns import Reply, Turn, TurnEpisode


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnObs:
    """What a player sees in a turn."""

    image: bytes
    """Key of the image: equal keys look the same."""
    prompt: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnOutcome:
    """What came of a reply."""

    obs: TurnObs
    """That was replied to."""
    reply: Reply
    """As the world read it."""
    action: str
    """Name of the action that was read; empty where none was."""
    goal: str
    """What the world asks for in this episode."""
    snapshots: FloatArray
    """[2, S] before the reply and after it, before any reset."""
    env_reward: float
    is_success: bool
    """Whether the world's own test holds after the reply."""
    progress: float
    """The simulator's after the reply, in [0, 1]."""
    gain: float
    """By how much the reply brought success nearer, below 0 for farther: in turns of the expert where they are known,
    in progress elsewhere."""
    is_end: bool
    """Whether the episode is over, for whatever reason."""
    is_terminated: bool
    """Whether it ended for good; a time limit only cuts it."""
    next_obs: TurnObs
    """What the reply led to, before any reset."""
    episode: TurnEpisode | None
    """The whole of it, where it is over."""


class WorldSlot:
    """One of the worlds that are played side by side, and its running episode.

    Args:
        world: nobody else plays it.
        task: its name, for the episodes.
    """

    def __init__(self, world: TurnWorld, task: str) -> None:
        self.world = world
        self._task = task
        self._seed = 0
        self._turn: Turn
        self._history: list[dict[str, Any]] = []

    @property
    def turn(self) -> Turn:
        """The turn that waits for a reply; after an episode's end its last state."""
        return self._turn

    @property
    def obs(self) -> TurnObs:
        """What the player sees of it."""
        key = self.world.picture_key(self._turn.snapshot[None])[0].tobytes()
        return TurnObs(image=key, prompt=self._turn.prompt)

    def begin(self, seed: int) -> None:
        """A new episode from a reset with `seed`."""
        self._seed, self._history = seed, []
        self._turn, _ = self.world.reset(seed=seed)
        self._check({"numbers of the observation": self._turn.snapshot})

    def play(self, text: str) -> TurnOutcome:
        """The turn with `text` as its reply."""
        before, obs, goal, distance = self._turn, self.obs, self.world.goal, distance_of(self.world)
        reply = self.world.read(text)
        self._turn, env_reward, terminated, truncated, info = self.world.step(text)
        self._check({"numbers of the observation": self._turn.snapshot, "rewards": float(env_reward)})
        self._history.append(
            {
                "snapshot": before.snapshot,
                "prompt": before.prompt,
                "reply": reply,
                "env_reward": float(env_reward),
                "success": bool(info["success"]),
                "progress": float(info["progress"]),
            }
        )
        is_end = bool(terminated or truncated)
        return TurnOutcome(
            obs=obs,
            reply=reply,
            action="" if reply.action is None else self.world.action_names[reply.action],
            goal=goal,
            snapshots=np.stack([before.snapshot, self._turn.snapshot]),
            env_reward=float(env_reward),
            is_success=bool(info["success"]),
            progress=float(info["progress"]),
            gain=distance - distance_of(self.world),
            is_end=is_end,
            is_terminated=bool(terminated),
            next_obs=self.obs,
            episode=self._episode(bool(terminated)) if is_end else None,
        )

    def _check(self, came: dict[str, Any]) -> None:
        """Passes where what came from the world is finite.

        Raises:
            NumericsError: it is not.
        """
        fix = f"mend the world; rlvlm check-task {self._task} looks at it"
        check_finite(f"the world {self._task}, {len(self._history)} turns after seed {self._seed}", fix, came)

    def _episode(self, terminated: bool) -> TurnEpisode:
        def column(name: str) -> list[Any]:
            return [row[name] for row in self._history]

        return TurnEpisode(
            task=self._task,
            seed=self._seed,
            snapshots=np.stack([*column("snapshot"), self._turn.snapshot]),
            prompts=tuple(column("prompt")),
            replies=tuple(column("reply")),
            env_rewards=np.array(column("env_reward"), np.float32),
            success=np.array(column("success"), bool),
            progress=np.array(column("progress"), np.float32),
            terminated=terminated,
        )

    def save_tree(self) -> dict[str, Any]:
        """World and running episode as a state tree: after `load_tree` the future is bit-identical."""
        history = [row | {"reply": asdict(row["reply"])} for row in self._history]
        return {"world": self.world.get_state(), "seed": self._seed, "turn": asdict(self._turn), "tape": history}

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores what `save_tree` returned."""
        self.world.set_state(tree["world"])
        self._seed, self._turn = tree["seed"], Turn(**tree["turn"])
        self._history = [row | {"reply": _reply_of(row["reply"])} for row in tree["tape"]]


def distance_of(world: TurnWorld) -> float:
    """How far success is: the expert's turns to it, or what progress lacks where nobody knows these."""
    left = world.turns_left()
    return 1.0 - world.progress() if left is None else float(left)


def _reply_of(columns: dict[str, Any]) -> Reply:
    span = columns["action_span"]
    columns["action_span"] = None if span is None else (span[0], span[1])
    return Reply(**columns)
