"""An env in turns with the episode under way in it: demonstrations, rollouts and evaluations are played here."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rlvlm.core.finite import check_finite
from rlvlm.core.steps import FloatArray
from rlvlm.core.turns import Reply, Turn, TurnEpisode
from rlvlm.envs.env import TurnEnv


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
    """As the env read it."""
    action: str
    """Name of the action that was read; empty where none was."""
    goal: str
    """What the env asks for in this episode."""
    snapshots: FloatArray
    """[2, S] before the reply and after it, before any reset."""
    env_reward: float
    is_success: bool
    """Whether the env's own test holds after the reply."""
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


class EnvSlot:
    """One of the envs that are played side by side, and its running episode.

    Args:
        world: nobody else plays it.
        task: its name, for the episodes.
    """

    def __init__(self, world: TurnEnv, task: str) -> None:
        self.env = world
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
        key = self.env.image_key(self._turn.snapshot[None])[0].tobytes()
        return TurnObs(image=key, prompt=self._turn.prompt)

    def begin(self, seed: int) -> None:
        """A new episode from a reset with `seed`."""
        self._seed, self._history = seed, []
        self._turn, _ = self.env.reset(seed=seed)
        self._check({"numbers of the observation": self._turn.snapshot})

    def play(self, text: str) -> TurnOutcome:
        """The turn with `text` as its reply."""
        before, obs, goal, distance = self._turn, self.obs, self.env.goal, distance_of(self.env)
        reply = self.env.read(text)
        self._turn, env_reward, terminated, truncated, info = self.env.step(text)
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
            action="" if reply.action is None else self.env.action_names[reply.action],
            goal=goal,
            snapshots=np.stack([before.snapshot, self._turn.snapshot]),
            env_reward=float(env_reward),
            is_success=bool(info["success"]),
            progress=float(info["progress"]),
            gain=distance - distance_of(self.env),
            is_end=is_end,
            is_terminated=bool(terminated),
            next_obs=self.obs,
            episode=self._episode(bool(terminated)) if is_end else None,
        )

    def episode(self) -> TurnEpisode:
        """The running episode as far as it has come, of one turn at least."""
        return self._episode(terminated=False)

    def _check(self, came: dict[str, Any]) -> None:
        """Passes where what came from the env is finite.

        Raises:
            NumericsError: it is not.
        """
        fix = f"mend the env; rlvlm check-task {self._task} looks at it"
        check_finite(f"the env {self._task}, {len(self._history)} turns after seed {self._seed}", fix, came)

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
        """Env and running episode as a state tree: after `load_tree` the future is bit-identical."""
        history = [row | {"reply": asdict(row["reply"])} for row in self._history]
        return {"world": self.env.get_state(), "seed": self._seed, "turn": asdict(self._turn), "tape": history}

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores what `save_tree` returned."""
        self.env.set_state(tree["world"])
        self._seed, self._turn = tree["seed"], Turn(**tree["turn"])
        self._history = [row | {"reply": _reply_of(row["reply"])} for row in tree["tape"]]


def distance_of(world: TurnEnv) -> float:
    """How far success is: the expert's turns to it, or what progress lacks where nobody knows these."""
    left = world.turns_left()
    return 1.0 - world.progress() if left is None else float(left)


def _reply_of(columns: dict[str, Any]) -> Reply:
    span = columns["action_span"]
    columns["action_span"] = None if span is None else (span[0], span[1])
    return Reply(**columns)
