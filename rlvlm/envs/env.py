"""The envs: Gymnasium envs with seeds, exact state, and images that can be drawn later from a few stored numbers.

There are three kinds: steps (numbers in, numbers out), turns (an image and words in, text out) and chunks (images, an
instruction and proprioception in, a chunk of actions out). What they share is `Env`. Frames are references, not pixels:
a stored episode holds snapshots (a few dozen floats), and pixels are drawn when they are looked at. An env that
cannot draw its past again is a `rlvlm.envs.pixels.PixelEnv` too: its snapshots name images that are kept.
`rlvlm.envs.check` holds every env to its contract.
"""

import copy
import hashlib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from string import Template
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self, TypeVar

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rlvlm.core.episodes import ChunkStep, Observations, Reply, Turn
from rlvlm.core.errors import NumericsError, UsageError
from rlvlm.core.progress import count_progress
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.hand_path import paint_path
from rlvlm.envs.replies import read_legacy, read_reply, write_reply

Obs = TypeVar("Obs")
Act = TypeVar("Act")


def place_of(cls: type) -> str:
    """Returns where a class is defined, as `FILE, line N`; its module if there is no source file."""
    try:
        return f"{inspect.getsourcefile(cls)}, line {inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):  # typed at a prompt, or compiled
        return f"module {cls.__module__}"


class Env(gym.Env[Obs, Act]):
    """Common base of the three kinds of envs; `reset` and `step` put `success` (bool) and `progress` (float in [0, 1])
    into `info`.

    All randomness comes from `self.np_random`, which is part of the state. Time limits truncate, they do not terminate.
    """

    metadata = {"render_modes": []}  # images are drawn from snapshots, where they are looked at
    render_mode = None
    goal: str
    """Goal phrase for a judge's prompt, e.g. `open the drawer`; empty where only the user can state it."""
    pixels: Any = None
    """The `rlvlm.envs.pixels.KeptPixels` of an env that cannot draw its past again."""
    note: str = ""
    """Advice for users about this env's images; `rlvlm check-task` prints it."""
    has_success: bool = True
    """Whether the env can tell success; if not, no episode counts as a success, and runs are compared by return."""
    has_progress: bool = True
    """Whether progress is measured; if it only repeats `success`, judges are compared with true returns instead."""
    is_symmetric: bool = False
    """Whether mirroring an image of this env left to right shows a valid scene with the same progress."""
    snapshot_size: int
    """S, the numbers in a snapshot."""
    robot_columns: tuple[int, ...] = ()
    """Columns of a snapshot with the robot's own pose, where any pose can be drawn with things of another moment; empty
    if not, or if the robot's pose is the goal. A run then shows its judge the robot's movement alone."""
    draws_path: bool = False
    """Whether judges see the path of the hand drawn on the image (`EnvConfig.draw_path`)."""
    grain: float
    """Step size to which snapshots are rounded before drawing, in their units: equal keys give equal images."""
    promised: ClassVar[tuple[str, ...]] = ("goal", "snapshot_size")
    """Attributes that every env of this kind has."""
    page: ClassVar[str] = "docs/tasks.md"
    """Documentation page with a complete env of this kind."""

    def __new__(cls, *_: object, **__: object) -> Self:
        """Refuses a class that lacks methods, before any training; the message names the class's file and them."""
        # Gymnasium's base is not an ABC, so Python itself would instantiate a class with abstract methods
        missing = [name for name in dir(cls) if getattr(getattr(cls, name, None), "__isabstractmethod__", False)]
        missing += [name for name in ("reset", "step") if getattr(cls, name) is getattr(gym.Env, name)]
        missing += ["grain or image_key"] if cls.image_key is Env.image_key and not hasattr(cls, "grain") else []
        if missing:
            what = f"the env {cls.__name__} ({place_of(cls)}) lacks {', '.join(missing)}"
            raise UsageError(what, f"{cls.page} shows a whole env, and rlvlm/envs/env.py says what each returns")
        return super().__new__(cls)

    @property
    def source_class(self) -> type:
        """Class that implements this env, for messages; for a wrapper, the class of the wrapped env."""
        return type(self)

    def reset_to(self, start: int) -> tuple[Obs, dict[str, Any]]:
        """Returns the first observation and info of the episode of `start`: a seed, or an initial state's number."""
        return self.reset(seed=start)

    @abstractmethod
    def snapshot(self) -> FloatArray:
        """Returns the present state as `[S]`: everything that can change the image."""

    def image_key(self, snapshots: FloatArray) -> NDArray[np.int64]:
        """Returns `[N, P]`: snapshots with equal keys look the same, to well under a pixel at any size in use. By
        default snapshots in steps of `grain`.
        """
        return np.rint(snapshots / self.grain).astype(np.int64)

    @abstractmethod
    def draw_sized(self, snapshots: FloatArray, size_px: int | None, camera: str = "") -> Frames:
        """Returns `[N, H, W, 3]` images of `snapshots` `[N, S]`, for any kind of env.

        Args:
            snapshots: snapshots of this env.
            size_px: side of the images; for envs in turns, their height, where None keeps the env's own size.
            camera: camera, for envs in chunks.
        """

    def hand_path(self, snapshots: FloatArray, camera: str = "") -> FloatArray:
        """Returns `[N, 2]`, the hand's position at each of `snapshots` `[N, S]` in the image of the last one: as shares
        of the image's width from the left and of its height from the top. Outside of [0, 1] where the hand was beside
        the image, NaN where it was behind the camera.

        Args:
            snapshots: N >= 1 moments of one episode, in order of time.
            camera: camera, for envs in chunks; the first one by default.

        Raises:
            UsageError: the env does not know the hand's position; this is the default.
        """
        what = f"the env {type(self).__name__} ({place_of(type(self))}) does not know where a hand is in its images"
        raise UsageError(what, "leave out --env.draw-path, or give the env a method hand_path (docs/judges.md)")

    def draw_path(self, image: NDArray[np.uint8], snapshots: FloatArray, camera: str = "") -> NDArray[np.uint8]:
        """Returns a copy of `image` `[H, W, 3]`, which shows the last of `snapshots` `[N, S]`, with the path of the
        hand through all of them drawn on it.
        """
        return paint_path(image, self.hand_path(snapshots, camera))

    def goals_in_view(self, snapshot: FloatArray) -> tuple[str, ...]:
        """Returns the goals that an episode in the scene of `snapshot` `[S]` may have, its own among them: what they
        name can be seen. By default the env's `instructions`, if it lists any.
        """
        return tuple(getattr(self, "instructions", ()))

    def landmarks(self, snapshots: FloatArray) -> FloatArray:
        """Returns `[N, K, D]`, the positions of the hand (first) and of the things that the task involves: ground truth
        for critics and for auxiliary losses of policies.

        Without landmarks, the default (K = 0), a critic sees the snapshots themselves.
        """
        return np.empty((len(snapshots), 0, 3), np.float32)

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Returns the full state as arrays, numbers and strings: after `set_state` the future is bit-identical."""

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned, on this or another instance of the same config."""

    def generator_text(self) -> str:
        """Returns the state of `np_random` for `get_state`, as text, because states hold no Python objects."""
        return json.dumps(self.np_random.bit_generator.state)

    def set_generator(self, text: str) -> None:
        """Restores what `generator_text` gave."""
        self.np_random.bit_generator.state = json.loads(str(text))


class StepEnv(Env[FloatArray, FloatArray]):
    """A continuous-control env. Observations are float32 `[D]`, actions float32 `[A]` in [-1, 1]; `info` has `snapshot`
    besides (`[S]` float32, of the state just reached).
    """

    observation_space: gym.spaces.Box  # pyright: ignore[reportIncompatibleVariableOverride] - narrower than Gymnasium's
    action_space: gym.spaces.Box  # pyright: ignore[reportIncompatibleVariableOverride]
    promised = (*Env.promised, "observation_space", "action_space")

    @abstractmethod
    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Returns images `[N, size_px, size_px, 3]` of `snapshots` `[N, S]`. The running episode is not disturbed."""

    def draw_sized(self, snapshots: FloatArray, size_px: int | None, camera: str = "") -> Frames:
        assert size_px is not None, "only envs in turns have a size of their own"
        return self.draw(snapshots, size_px)

    def scripted_action(self, obs: FloatArray) -> FloatArray | None:
        """Returns `[A]`, the next action of a script that knows the goal, not clipped; None where there is no script.

        It shows on contact sheets and the like what a solved task looks like; no policy learns from it.
        """
        return None


def check_action(action: FloatArray) -> None:
    """Raises unless `action` [A] is finite: a simulator does not recover from one that is not.

    Raises:
        NumericsError: it is not.
    """
    if not np.isfinite(action).all():
        raise NumericsError(f"actions must be finite, got {action}", "look at the policy's losses before this step")


Outcome = tuple[float, bool, bool]
"""Result of a turn: reward, terminated, truncated."""


_MAX_STARTS = 1_000
_HELD_OUT_BYTES = 51  # of 256 values of a byte: a fifth


class TurnEnv(Env[Turn, str]):
    """An env that is played by writing JSON: `{"thoughts": "...", "action": "..."}`.

    `reset` and `step` put into `info`: `success` (bool), `progress` (float in [0, 1], the simulator's truth), `legal`
    (indices of the actions that are legal now) and, after a step, `reply` (the text as `read` returned it),
    `is_invalid` (whether it held no legal action) and `action` (the index that was carried out, None for none). A reply
    that cannot be read changes nothing but the number of turns and costs the task's penalty; only the reference's rules
    answer it with a random action.

    A subclass implements the abstract methods and takes all randomness from `self.np_random`.
    """

    promised = (*Env.promised, "action_names", "image_px")
    page = "examples/press_button.py"
    action_names: tuple[str, ...]
    """All actions, as written in replies, in a fixed order."""
    image_px: tuple[int, int]
    """Height and width of the image, as in the reference."""
    rules: Literal["strict", "legacy"] = "strict"
    """strict or legacy; legacy reads and answers replies as the reference does; see `TurnEnvConfig.rules`."""
    split: Literal["all", "training", "held_out"] = "all"
    """Starts that episodes may have; see `TurnEnvConfig.split`."""
    num_starts: int | None = None
    """Number of different starts; None: not counted."""
    milestones: Mapping[str, float] = MappingProxyType({})
    """Milestones on the way to success, by name: each is reached once `progress` is at least its value."""
    template: Template | None = None
    """Template that replaces the env's own prompt (`TurnEnvConfig.prompt`); None: the env's own."""
    has_expert: bool = True
    """Whether `expert_action` and `expert_thought` are implemented."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Turn, dict[str, Any]]:
        """Returns the first turn and info of a new episode; `options` is not used.

        Raises:
            UsageError: no start of the wanted side of the split was drawn: the env has too few different ones.
        """
        super().reset(seed=seed, options=options)
        # starts of the other side are drawn and discarded, so that the rest keep their relative frequencies
        for _ in range(_MAX_STARTS):
            self.begin()
            if self.may_start(self.snapshot()):
                return self.turn(), self.info()
        raise UsageError(f"no start of this env is on the side {self.split!r} of the split", "--env.split all")

    def step(self, text: str) -> tuple[Turn, float, bool, bool, dict[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride] - the action of an env in turns is a text
        """Returns the next turn, true reward, terminated, truncated, info.

        Args:
            text: the player's reply; any text is allowed.
        """
        reply = self.read(text)
        action = reply.action
        if action is None and self.rules == "legacy":  # the reference answers an unreadable reply with a random action
            action = int(self.np_random.choice(self.legal()))
        reward, terminated, truncated = self.act(action)
        info = self.info() | {"reply": reply, "is_invalid": reply.action is None, "action": action}
        return self.turn(), reward, terminated, truncated, info

    def read(self, text: str) -> Reply:
        """Parses a reply; raises nothing and changes nothing."""
        return (read_legacy if self.rules == "legacy" else read_reply)(text, self.action_names, self.legal())

    def action_text(self, action: int, thought: str = "") -> str:
        """Returns a well-formed reply; `thought` as `expert_thought` returns it, or plain text."""
        return write_reply(self.action_names[action], thought)

    def turn(self) -> Turn:
        """Returns the player's present observation."""
        text = self.prompt() if self.template is None else self.template.substitute(self.prompt_fields())
        return Turn(snapshot=self.snapshot(), prompt=text)

    def prompt_fields(self) -> dict[str, str]:
        """Returns the fields that a user's prompt file may use, by their names after the dollar sign."""
        actions = ", ".join(f'"{self.action_names[index]}"' for index in self.legal())
        return {"prompt": self.prompt(), "actions": actions, "goal": self.goal}

    def info(self) -> dict[str, Any]:
        """Returns further entries of the `info` of `reset` and `step`."""
        return {"success": self.is_success(), "progress": self.progress(), "legal": self.legal()}

    def legal(self) -> tuple[int, ...]:
        """Returns the indices of the actions that are legal now: all, unless a subclass overrides it."""
        return tuple(range(len(self.action_names)))

    def may_start(self, first: FloatArray) -> bool:
        """Returns whether the split contains the start whose first snapshot [S] is `first`."""
        if self.split == "all":
            return True
        # hashed rather than drawn, so that each start is on the same side in every run and every process
        is_held_out = hashlib.sha256(self.start_key(first)).digest()[0] < _HELD_OUT_BYTES
        return is_held_out == (self.split == "held_out")

    def start_key(self, first: FloatArray) -> bytes:
        """Returns the identity of a start, given its first snapshot [S]."""
        return first.tobytes()

    def count_starts(self, seeds: int) -> int:
        """Returns how many different starts the seeds 0 to `seeds` - 1 lead to; this ends the running episode."""
        return len({self.start_key(self.reset(seed=seed)[0].snapshot) for seed in range(seeds)})

    @abstractmethod
    def begin(self) -> None:
        """Starts an episode, drawing from `self.np_random`."""

    @abstractmethod
    def act(self, action: int | None) -> Outcome:
        """Carries out an action; None, for an unreadable reply, only uses up a turn and costs the penalty."""

    @abstractmethod
    def prompt(self) -> str:
        """Returns the user message of this turn."""

    @abstractmethod
    def is_success(self) -> bool:
        """Returns the env's own test of success."""

    @abstractmethod
    def progress(self) -> float:
        """Returns how near the state is to success, in [0, 1]."""

    def turns_left(self) -> int | None:
        """Returns the number of turns the expert still needs, 0 after success; None if unknown."""
        return None

    @abstractmethod
    def draw(self, snapshots: FloatArray) -> Frames:
        """Returns images `[N, H, W, 3]` of `snapshots` `[N, S]`, H and W from `image_px`; disturbs no episode."""

    def draw_sized(self, snapshots: FloatArray, size_px: int | None, camera: str = "") -> Frames:
        frames = self.draw(snapshots)
        if size_px is None:
            return frames
        height, width = self.image_px
        size = (round(width * size_px / height), size_px)
        return np.stack([np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BOX)) for frame in frames])

    @abstractmethod
    def expert_action(self) -> int:
        """Returns the next action of an exact script."""

    @abstractmethod
    def expert_thought(self) -> str:
        """Returns the expert's reading of the image and its reason: members of the reply's JSON object, as text."""


FIRST_HELD_OUT_STATE = 1_000_000
"""First initial state reserved for evaluation; training draws smaller numbers."""


class ChunkEnvs(ABC):
    """N envs whose episodes begin together and are stepped side by side; finished ones are not stepped any more."""

    lost: frozenset[int] = frozenset()
    """Indices of envs lost since `begin`: their observations are placeholders and must not be learned from."""

    def batches(self, state_ids: NDArray[np.int64]) -> list[NDArray[np.intp]]:
        """Returns the indices of `state_ids` `[N]` in batches; each is begun and played to its end before the next.

        There is one batch, unless all envs together need more memory than a machine has.
        """
        return [np.arange(len(state_ids))]

    @abstractmethod
    def begin(self, state_ids: NDArray[np.int64]) -> Observations:
        """Returns the first observations of new episodes, from initial states `[N]`; N may differ each time."""

    @abstractmethod
    def step(self, rows: NDArray[np.intp], chunks: FloatArray) -> ChunkStep:
        """Returns the results of `chunks` `[n, L, A]`, in the env's units, for the envs `rows` `[n]`."""


class ChunkEnv(Env[Observations, FloatArray]):
    """An env that is driven by chunks of L actions; the policy observes it between chunks.

    `reset` takes an initial state's number in `options["state_id"]`; without it the number is drawn with the seed.
    `reset` and `step` put into `info`: `state_id`, `progress` (float in [0, 1], the simulator's truth), `success`
    (bool), and `step` besides: `steps` (env steps run, the chunk stops at the end of the episode), `env_rewards`
    (`[steps]`) and `snapshots` (`[steps, S]`, after each). `success` of a step is whether the env's own test held after
    any action of the chunk; where an episode goes on after it (`ChunkEnvConfig.continue_after_success`),
    `success_at_end` (bool) is whether it held after the last one. Time limits truncate, they do not terminate.
    """

    instructions: tuple[str, ...] = ()
    """Every instruction that an episode may have; imported demonstrations must use these. Empty if they cannot be
    listed."""
    cameras: tuple[str, ...]
    """Names of the policy's cameras."""
    chunk_steps: int
    """L, the actions in a chunk."""
    action_low: FloatArray
    """[A] smallest values of an action, in the env's units."""
    action_high: FloatArray
    """[A] largest values."""
    scaled_actions: tuple[bool, ...]
    """For each of the A action dimensions: whether it is normalised by the demonstrations' quantiles (a gripper is
    not)."""
    proprio_size: int
    """P, the numbers of proprioception."""
    num_offsets: int = 0
    """W, the numbers in the offsets from the hand to the other landmarks."""
    offset_unit: float = 1.0
    """Unit in which offsets are counted, in units of `landmarks`: a typical distance between hand and things."""
    episode_steps: int
    """Env steps of the longest episode."""
    num_held_out: int | None = None
    """Number of initial states for evaluation, where there are few: numbers from `FIRST_HELD_OUT_STATE` on that differ
    by a multiple of this number share a state. None where each number has its own."""

    promised = (
        *Env.promised,
        *("cameras", "chunk_steps", "action_low", "action_high", "scaled_actions", "proprio_size", "episode_steps"),
    )
    page = "docs/chunk_envs.md"

    def drawn_state(self, seed: int | None, options: dict[str, Any] | None) -> int:
        """Returns the initial state's number: the one in the options, or one drawn with the seed."""
        super().reset(seed=seed, options=options)
        # drawn even if unused, so that the generator advances equally in both cases
        drawn = int(self.np_random.integers(FIRST_HELD_OUT_STATE))
        return drawn if options is None else int(options.get("state_id", drawn))

    def draw_cameras(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Returns [N, cameras, H, W, 3] uint8, the images of `snapshots` [N, S] by every camera, H = W = `size_px`."""
        return np.stack([self.draw(snapshots, size_px, camera) for camera in self.cameras], axis=1)

    def reset_to(self, start: int) -> tuple[Observations, dict[str, Any]]:
        return self.reset(options={"state_id": start})

    @staticmethod
    def answer_alone(
        came: ChunkStep, state_id: int, row: int = 0
    ) -> tuple[Observations, float, bool, bool, dict[str, Any]]:
        """Returns what `step` returns for the chunk of one env, `row`; `state_id`: its initial state's number."""
        steps = int(came.steps[row])  # later entries are padding after the episode's end
        info = {
            "state_id": state_id,
            "progress": float(came.progress[row]),
            "success": bool(came.success[row]),
            "success_at_end": bool(came.success_at_end[row]),
            "steps": steps,
            "env_rewards": came.env_rewards[row, :steps],
            "snapshots": came.snapshots[row, :steps],
        }
        reward, terminated, truncated = came.env_rewards[row].sum(), came.terminated[row], came.truncated[row]
        return came.obs.row(row), float(reward), bool(terminated), bool(truncated), info

    @abstractmethod
    def step(self, chunk: FloatArray) -> tuple[Observations, float, bool, bool, dict[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride] - the action of an env in chunks is a chunk
        """Returns observation after `chunk` `[L, A]`, the sum of its steps' rewards, terminated, truncated, info.

        Args:
            chunk: in the env's units; the env clips values outside of `action_low` and `action_high`.
        """

    @abstractmethod
    def draw(self, snapshots: FloatArray, size_px: int, camera: str = "") -> Frames:
        """Returns images `[N, size_px, size_px, 3]` of `snapshots` `[N, S]` by a camera, the first one by default.

        The running episode is not disturbed.
        """

    def draw_sized(self, snapshots: FloatArray, size_px: int | None, camera: str = "") -> Frames:
        assert size_px is not None, "only envs in turns have a size of their own"
        return self.draw(snapshots, size_px, camera)

    def offsets(self, snapshots: FloatArray) -> FloatArray:
        """Returns `[N, W]`, the vectors from the hand to the other landmarks, in multiples of `offset_unit`."""
        landmarks = self.landmarks(snapshots)
        return (landmarks[:, 1:] - landmarks[:, :1]).reshape(len(landmarks), -1) / np.float32(self.offset_unit)

    def augment_scenes(self, snapshots: FloatArray, starts: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Returns `[N, S]` scenes that were never played: the robot of `snapshots` `[N, S]` among the things of
        `starts` `[N, S]`, each moved a little; they augment the training of vision.

        Raises:
            UsageError: the env does not support it, which is the default.
        """
        raise UsageError(f"{type(self).__name__} has no scenes but those that are played", "--sft.scenes 0")

    def scripted_chunk(self, noise: float, rng: np.random.Generator) -> FloatArray | None:
        """Returns `[L, A]`, the next chunk of a script that knows the goal; None, the default, where there is no
        script.

        Args:
            noise: standard deviation of the noise added to each action, whose range counts as [-1, 1].
            rng: of the noise.
        """
        return None

    def many(self) -> ChunkEnvs:
        """Returns envs of the same config that are stepped side by side: by default copies of this one, stepped in
        sequence.

        An env that cannot be copied (one that holds a renderer) or that steps many states at once overrides this.
        """
        return SyncChunkEnvs(lambda: copy.deepcopy(self))


class SyncChunkEnvs(ChunkEnvs):
    """Ordinary envs that are stepped one after the other.

    Args:
        envs: envs of one config, at least as many as episodes are begun with; or a function that makes one, called
            whenever another is needed.
    """

    def __init__(self, envs: Sequence[ChunkEnv] | Callable[[], ChunkEnv]) -> None:
        self._make = envs if callable(envs) else None
        self._envs: list[ChunkEnv] = [] if callable(envs) else [*envs]

    def begin(self, state_ids: NDArray[np.int64]) -> Observations:
        """Returns the first observations of N new episodes.

        Raises:
            ValueError: there are fewer envs than episodes, and no function to make more.
        """
        if self._make is None and len(state_ids) > len(self._envs):
            what = f"{len(state_ids)} episodes need as many envs, there are {len(self._envs)}"
            raise ValueError(f"{what}; give SyncChunkEnvs what makes one, and it makes as many as are needed")
        while self._make and len(self._envs) < len(state_ids):
            self._envs.append(self._make())
        seen = []
        for env, state_id in zip(self._envs, state_ids.tolist(), strict=False):  # there may be more envs than episodes
            seen.append(env.reset(options={"state_id": state_id})[0])
            count_progress()
        return Observations.joined(seen)

    def step(self, rows: NDArray[np.intp], chunks: FloatArray) -> ChunkStep:
        """Drives the envs `rows` [n] by `chunks` [n, L, A]."""
        answers = []
        for row, chunk in zip(rows.tolist(), chunks, strict=True):
            answers.append(self._envs[row].step(chunk))
            count_progress()
        seen, _, terminated, truncated, infos = zip(*answers, strict=True)
        snapshots, rewards = [], []
        for info in infos:
            # steps left out after an episode's end have no reward and repeat the last snapshot
            left_out = chunks.shape[1] - info["steps"]
            snapshots.append(np.pad(info["snapshots"], ((0, left_out), (0, 0)), mode="edge"))
            rewards.append(np.pad(info["env_rewards"], (0, left_out)))
        return ChunkStep(
            obs=Observations.joined(list(seen)),
            snapshots=np.stack(snapshots),
            steps=np.array([info["steps"] for info in infos], np.int64),
            env_rewards=np.stack(rewards),
            success=np.array([info["success"] for info in infos], bool),
            success_at_end=np.array([info.get("success_at_end", info["success"]) for info in infos], bool),
            progress=np.array([info["progress"] for info in infos], np.float32),
            terminated=np.array(terminated, bool),
            truncated=np.array(truncated, bool),
        )
