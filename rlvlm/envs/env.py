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
    """Location of a class's source, as `FILE, line N`; its module where there is no source."""
    try:
        return f"{inspect.getsourcefile(cls)}, line {inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):  # typed at a prompt, or compiled
        return f"module {cls.__module__}"


class Env(gym.Env[Obs, Act]):
    """Common base of the three kinds; `reset` and `step` put `success` (bool) and `progress` (float in [0, 1]) into
    `info`.

    Chance comes from `self.np_random` alone, and belongs to the state. Time limits truncate, they do not terminate.
    """

    metadata = {"render_modes": []}  # images are drawn from snapshots, where they are looked at
    render_mode = None
    goal: str
    """Fills the slot of a judge's prompt, e.g. `open the drawer`; empty where only the user can say it."""
    pixels: Any = None
    """The `rlvlm.envs.pixels.KeptPixels` of an env that cannot draw its past again."""
    note: str = ""
    """Advice for users about this env's images; `rlvlm check-task` prints it."""
    has_success: bool = True
    """Whether the env can tell success; where it cannot, no episode has it, and returns are what is compared."""
    has_progress: bool = True
    """Whether progress is measured; where it only repeats `success`, answers are held against true returns."""
    is_symmetric: bool = False
    """Whether an image that is mirrored, left to right, shows a scene of this env with the same progress."""
    snapshot_size: int
    """S."""
    draws_path: bool = False
    """Whether judges see the path of the hand (`EnvConfig.draw_path`)."""
    grain: float
    """Grain that snapshots are rounded to before they are drawn, in their units: equal keys give equal images."""
    promised: ClassVar[tuple[str, ...]] = ("goal", "snapshot_size")
    """Attributes that every env of this kind has."""
    page: ClassVar[str] = "docs/tasks.md"
    """Page that shows a whole env of this kind."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Refuses a class that lacks methods: where it is and which they are, before an hour of training."""
        # Gymnasium's base is no ABC, so Python itself makes instances of what lacks abstract methods
        missing = [name for name in dir(cls) if getattr(getattr(cls, name, None), "__isabstractmethod__", False)]
        missing += [name for name in ("reset", "step") if getattr(cls, name) is getattr(gym.Env, name)]
        missing += ["grain or image_key"] if cls.image_key is Env.image_key and not hasattr(cls, "grain") else []
        if missing:
            what = f"the env {cls.__name__} ({place_of(cls)}) lacks {', '.join(missing)}"
            raise UsageError(what, f"{cls.page} shows a whole env, and rlvlm/envs/env.py says what each returns")
        return super().__new__(cls)

    @property
    def source_class(self) -> type:
        """The class whose code says how this env behaves, for messages; of a wrapped env the one that is wrapped."""
        return type(self)

    def reset_to(self, start: int) -> tuple[Obs, dict[str, Any]]:
        """First observation and info of the episode that `start` decides: a seed, or an initial state's number."""
        return self.reset(seed=start)

    @abstractmethod
    def snapshot(self) -> FloatArray:
        """The present state as `[S]`: everything that can change the image."""

    def image_key(self, snapshots: FloatArray) -> NDArray[np.int64]:
        """`[N, P]`: snapshots with equal keys look the same, to well under a pixel at any size in use. By default
        snapshots in steps of `grain`.
        """
        return np.rint(snapshots / self.grain).astype(np.int64)

    @abstractmethod
    def draw_sized(self, snapshots: FloatArray, size_px: int | None, camera: str = "") -> Frames:
        """`[N, H, W, 3]` of `snapshots` `[N, S]`, whatever kind of env it is.

        Args:
            snapshots: the env's own.
            size_px: side; of envs in turns the height that their own size is scaled to, where None leaves it.
            camera: of envs in chunks.
        """

    def hand_path(self, snapshots: FloatArray, camera: str = "") -> FloatArray:
        """`[N, 2]` where the hand was at each of `snapshots` `[N, S]`, in the image of the last of them: shares of the
        image's width from its left and of its height from its top. Outside of [0, 1] where the hand was beside the
        image, NaN where it was behind the camera.

        Args:
            snapshots: N >= 1 moments of one episode, in order of time.
            camera: of envs in chunks; the first one by default.

        Raises:
            UsageError: the env does not know, as by default.
        """
        what = f"the env {type(self).__name__} ({place_of(type(self))}) does not know where a hand is in its images"
        raise UsageError(what, "leave out --env.draw-path, or give the env a method hand_path (docs/judges.md)")

    def draw_path(self, image: NDArray[np.uint8], snapshots: FloatArray, camera: str = "") -> NDArray[np.uint8]:
        """A copy of `image` `[H, W, 3]`, drawn of the last of `snapshots` `[N, S]`, with the hand's path through them
        all.
        """
        return paint_path(image, self.hand_path(snapshots, camera))

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """The full state as arrays, numbers and strings: after `set_state` the future is bit-identical."""

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned, on this or another instance of the same config."""

    def generator_text(self) -> str:
        """The state of `np_random`, for `get_state`: as text, for states hold no Python objects."""
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
        """Images `[N, size_px, size_px, 3]` of `snapshots` `[N, S]`. The running episode is not disturbed."""

    def draw_sized(self, snapshots: FloatArray, size_px: int | None, camera: str = "") -> Frames:
        assert size_px is not None, "only envs in turns have a size of their own"
        return self.draw(snapshots, size_px)

    def scripted_action(self, obs: FloatArray) -> FloatArray | None:
        """`[A]` what a script that knows the goal does next, not clipped; None where there is none.

        It shows what a task looks like when it is done, for contact sheets and the like; it is not learned from.
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
"""Reward, terminated, truncated."""


_MAX_STARTS = 1_000
_HELD_OUT_BYTES = 51  # of 256 values of a byte: a fifth


class TurnEnv(Env[Turn, str]):
    """An env that is played by writing JSON: `{"thoughts": "...", "action": "..."}`.

    `reset` and `step` put into `info`: `success` (bool), `progress` (float in [0, 1], the simulator's truth), `legal`
    (indices of the actions that are legal now) and, after a step, `is_invalid` (whether no legal action could be read)
    and `action` (the index that was carried out, None for none). A reply that cannot be read changes nothing but the
    number of turns and costs the task's penalty; only the reference's rules answer it with a random action.

    A member implements what is abstract here and may rely on `self.np_random` alone for chance.
    """

    promised = (*Env.promised, "action_names", "image_px")
    page = "examples/press_button.py"
    action_names: tuple[str, ...]
    """Every word that an action may be, in a fixed order."""
    image_px: tuple[int, int]
    """Height and width as the reference draws it."""
    rules: Literal["strict", "legacy"] = "strict"
    """legacy: read and answer replies as the reference does."""
    split: Literal["all", "training", "held_out"] = "all"
    """Which starts episodes may have; see `TurnEnvConfig`."""
    num_starts: int | None = None
    """Number of different starts; None: not counted."""
    milestones: Mapping[str, float] = MappingProxyType({})
    """Milestones on the way to success, by name: reached as soon as `progress` is at least so much."""
    template: Template | None = None
    """Words in place of the env's own prompt, `TurnEnvConfig.prompt`'s; None: the env's own."""
    has_expert: bool = True
    """Whether `expert_action` and `expert_thought` know what to do."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Turn, dict[str, Any]]:
        """First turn and info of a new episode; `options` is not used.

        Raises:
            UsageError: no start of the wanted side of the split turned up: the env has too few different ones.
        """
        super().reset(seed=seed, options=options)
        # starts of the other side are drawn and thrown away, so those of the wanted one keep the env's own odds
        for _ in range(_MAX_STARTS):
            self.begin()
            if self.may_start(self.snapshot()):
                return self.turn(), self.info()
        raise UsageError(f"no start of this env is on the side {self.split!r} of the split", "--env.split all")

    def step(self, text: str) -> tuple[Turn, float, bool, bool, dict[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride] - the action of an env in turns is a text
        """Next turn, true reward, terminated, truncated, info.

        Args:
            text: what the player wrote; anything is allowed.
        """
        action = read = self.read(text).action
        if action is None and self.rules == "legacy":  # as the reference answers what it cannot read
            action = int(self.np_random.choice(self.legal()))
        reward, terminated, truncated = self.act(action)
        info = self.info() | {"is_invalid": read is None, "action": action}
        return self.turn(), reward, terminated, truncated, info

    def read(self, text: str) -> Reply:
        """What the env understands; nothing is raised and nothing changes."""
        return (read_legacy if self.rules == "legacy" else read_reply)(text, self.action_names, self.legal())

    def action_text(self, action: int, thought: str = "") -> str:
        """A well-formed reply; `thought` as `expert_thought` gives it, or plain words."""
        return write_reply(self.action_names[action], thought)

    def turn(self) -> Turn:
        """The present observation of the player."""
        text = self.prompt() if self.template is None else self.template.substitute(self.prompt_fields())
        return Turn(snapshot=self.snapshot(), prompt=text)

    def prompt_fields(self) -> dict[str, str]:
        """Fields that a prompt of the user's own may name, by their names behind the dollar sign."""
        actions = ", ".join(f'"{self.action_names[index]}"' for index in self.legal())
        return {"prompt": self.prompt(), "actions": actions, "goal": self.goal}

    def info(self) -> dict[str, Any]:
        """Further facts that `reset` and `step` give."""
        return {"success": self.is_success(), "progress": self.progress(), "legal": self.legal()}

    def legal(self) -> tuple[int, ...]:
        """Indices of the actions that are legal now: all, unless a member says otherwise."""
        return tuple(range(len(self.action_names)))

    def may_start(self, first: FloatArray) -> bool:
        """Whether an episode may start as the one whose first snapshot [S] is `first` did: the split has it."""
        if self.split == "all":
            return True
        # a hash of the start and not a draw: each start is on the same side in every run and every process
        is_held_out = hashlib.sha256(self.start_key(first)).digest()[0] < _HELD_OUT_BYTES
        return is_held_out == (self.split == "held_out")

    def start_key(self, first: FloatArray) -> bytes:
        """Identity of a start, by its snapshot [S]."""
        return first.tobytes()

    def count_starts(self, seeds: int) -> int:
        """How many different starts the first so many seeds have; the episode under way ends."""
        return len({self.start_key(self.reset(seed=seed)[0].snapshot) for seed in range(seeds)})

    @abstractmethod
    def begin(self) -> None:
        """Starts an episode, drawing from `self.np_random`."""

    @abstractmethod
    def act(self, action: int | None) -> Outcome:
        """Carries out an action, or lets a turn pass for its price where `action` is None."""

    @abstractmethod
    def prompt(self) -> str:
        """The user's words of this turn."""

    @abstractmethod
    def is_success(self) -> bool:
        """The env's own success test."""

    @abstractmethod
    def progress(self) -> float:
        """How near to success, in [0, 1]."""

    def turns_left(self) -> int | None:
        """Turns that the expert would still take to success, 0 once it is reached; None where that is not known."""
        return None

    @abstractmethod
    def draw(self, snapshots: FloatArray) -> Frames:
        """Images `[N, H, W, 3]` of `snapshots` `[N, S]`, H and W as `image_px` says. No episode is disturbed."""

    def draw_sized(self, snapshots: FloatArray, size_px: int | None, camera: str = "") -> Frames:
        frames = self.draw(snapshots)
        if size_px is None:
            return frames
        height, width = self.image_px
        size = (round(width * size_px / height), size_px)
        return np.stack([np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BOX)) for frame in frames])

    @abstractmethod
    def expert_action(self) -> int:
        """The next action of an exact script."""

    @abstractmethod
    def expert_thought(self) -> str:
        """Its reading of the image and its reason: members of the reply's JSON object, as text."""


FIRST_HELD_OUT_STATE = 1_000_000
"""Initial states from this number on are for evaluation alone; training draws smaller numbers."""


class ChunkEnvs(ABC):
    """N envs whose episodes begin together and are driven side by side; finished ones are stepped no further."""

    lost: frozenset[int] = frozenset()
    """Rows whose env is gone since `begin`: their observations are made up, and are not learned from."""

    def batches(self, state_ids: NDArray[np.int64]) -> list[NDArray[np.intp]]:
        """The places of `state_ids` `[N]` in batches, each of which is begun and driven to its end before the next.

        One batch of all, unless they take more memory together than a machine has.
        """
        return [np.arange(len(state_ids))]

    @abstractmethod
    def begin(self, state_ids: NDArray[np.int64]) -> Observations:
        """First observations of N new episodes, from the initial states `state_ids` `[N]`; N may differ each time."""

    @abstractmethod
    def step(self, rows: NDArray[np.intp], chunks: FloatArray) -> ChunkStep:
        """Results of `chunks` `[n, L, A]`, in the env's units, in the envs `rows` `[n]`."""


class ChunkEnv(Env[Observations, FloatArray]):
    """An env that is driven by chunks of L actions and looked at between them.

    `reset` takes an initial state's number in `options["state_id"]`; without it the number is drawn with the seed.
    `reset` and `step` put into `info`: `state_id`, `progress` (float in [0, 1], the simulator's truth), `success`
    (bool), and `step` besides: `steps` (env steps run, the chunk stops at the end of the episode), `env_rewards`
    (`[steps]`) and `snapshots` (`[steps, S]`, after each). `success` of a step is whether the env's own test held after
    any action of the chunk; where an episode goes on after it (`ChunkEnvConfig.continue_after_success`),
    `success_at_end` (bool) is whether it held after the last one. Time limits truncate, they do not terminate.
    """

    instructions: tuple[str, ...] = ()
    """All that an episode may have, which imported demonstrations must keep to; empty where they cannot be listed."""
    cameras: tuple[str, ...]
    """Names of the cameras that a policy sees through."""
    chunk_steps: int
    """L."""
    action_low: FloatArray
    """[A] smallest values of an action, in the env's units."""
    action_high: FloatArray
    """[A] largest values."""
    scaled_actions: tuple[bool, ...]
    """A of them: whether a dimension is normalised by the demonstrations' quantiles; False for a gripper in [0, 1]."""
    proprio_size: int
    """P."""
    num_offsets: int = 0
    """W, numbers in the offsets from the hand to the other landmarks."""
    offset_unit: float = 1.0
    """How far the hand typically is from things, in the units of `landmarks`: what offsets are counted in."""
    episode_steps: int
    """Env steps of the longest episode."""
    num_held_out: int | None = None
    """Initial states for evaluation, where there are few: numbers from `FIRST_HELD_OUT_STATE` on that are so far apart
    have the same one. None where each number has its own."""

    promised = (
        *Env.promised,
        *("cameras", "chunk_steps", "action_low", "action_high", "scaled_actions", "proprio_size", "episode_steps"),
    )
    page = "docs/chunk_envs.md"

    def drawn_state(self, seed: int | None, options: dict[str, Any] | None) -> int:
        """The initial state's number: that of the options, or one drawn with the seed."""
        super().reset(seed=seed, options=options)
        # drawn even where it is not used: the generator goes on in the same way in both cases
        drawn = int(self.np_random.integers(FIRST_HELD_OUT_STATE))
        return drawn if options is None else int(options.get("state_id", drawn))

    def draw_cameras(self, snapshots: FloatArray, size_px: int) -> Frames:
        """[N, cameras, H, W, 3] uint8, the images of `snapshots` [N, S] by every camera, H = W = `size_px`."""
        return np.stack([self.draw(snapshots, size_px, camera) for camera in self.cameras], axis=1)

    def reset_to(self, start: int) -> tuple[Observations, dict[str, Any]]:
        return self.reset(options={"state_id": start})

    @staticmethod
    def answer_alone(
        came: ChunkStep, state_id: int, row: int = 0
    ) -> tuple[Observations, float, bool, bool, dict[str, Any]]:
        """The return value of `step` for the chunk of one env: that of `row`, whose initial state's number is
        `state_id`.
        """
        steps = int(came.steps[row])  # what lies behind them in the arrays is padding: the episode had ended
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
        """Observation after `chunk` `[L, A]`, the sum of its steps' rewards, terminated, truncated, info.

        Args:
            chunk: in the env's units; what lies outside of `action_low` and `action_high` is the env's to clip.
        """

    @abstractmethod
    def draw(self, snapshots: FloatArray, size_px: int, camera: str = "") -> Frames:
        """Images `[N, size_px, size_px, 3]` of `snapshots` `[N, S]` by a camera, the first one by default.

        The running episode is not disturbed.
        """

    def draw_sized(self, snapshots: FloatArray, size_px: int | None, camera: str = "") -> Frames:
        assert size_px is not None, "only envs in turns have a size of their own"
        return self.draw(snapshots, size_px, camera)

    def landmarks(self, snapshots: FloatArray) -> FloatArray:
        """`[N, K, D]` where the hand is in space and the things that the task is about, the hand first; for what learns
        from the simulator's truth: critics, and auxiliary tasks of policies.

        Where there are none, as by default (K = 0), a critic goes by the snapshots themselves.
        """
        return np.empty((len(snapshots), 0, 3), np.float32)

    def offsets(self, snapshots: FloatArray) -> FloatArray:
        """`[N, W]` from the hand to each other landmark, one after the other, in multiples of `offset_unit`."""
        landmarks = self.landmarks(snapshots)
        return (landmarks[:, 1:] - landmarks[:, :1]).reshape(len(landmarks), -1) / np.float32(self.offset_unit)

    def augment_scenes(self, snapshots: FloatArray, starts: FloatArray, rng: np.random.Generator) -> FloatArray:
        """`[N, S]` scenes that were not played: the robot of `snapshots` `[N, S]` among the things of `starts`
        `[N, S]`, each of them moved a little; for what learns to see.

        Raises:
            UsageError: this env has none, as by default.
        """
        raise UsageError(f"{type(self).__name__} has no scenes but those that are played", "--sft.scenes 0")

    def scripted_chunk(self, noise: float, rng: np.random.Generator) -> FloatArray | None:
        """`[L, A]` what a script that knows the goal does next; None where there is none, as by default.

        Args:
            noise: standard deviation of what is added to each action, where its range is scaled to [-1, 1].
            rng: of the noise.
        """
        return None

    def many(self) -> ChunkEnvs:
        """Envs of the same config that are driven side by side: by default copies of this one, one after another.

        An env that cannot be copied (one that holds a renderer) or that steps many states at once has its own.
        """
        return SyncChunkEnvs(lambda: copy.deepcopy(self))


class SyncChunkEnvs(ChunkEnvs):
    """Ordinary envs, one after another.

    Args:
        envs: all of one config, and at least as many as episodes are begun with; or what makes one of them, which is
            called as often as one more is needed.
    """

    def __init__(self, envs: Sequence[ChunkEnv] | Callable[[], ChunkEnv]) -> None:
        self._make = envs if callable(envs) else None
        self._envs: list[ChunkEnv] = [] if callable(envs) else [*envs]

    def begin(self, state_ids: NDArray[np.int64]) -> Observations:
        """First observations of N new episodes.

        Raises:
            ValueError: there are fewer envs, and nothing makes more.
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
            # steps that an episode's end left out have no reward, and show what there was at the end
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
