"""A run from Python: its policy as an object, its learned reward as a function.

These are the public functions of docs/python.md. A loaded policy needs neither Ray nor the judge, and its `act` returns
what the `step` of the run's env takes, so that an episode is a simple loop.
"""

import hashlib
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from rlvlm.algorithms.checkpoint import load_tree
from rlvlm.algorithms.policy_gradient.player import load_vla, load_vlm
from rlvlm.algorithms.sac_pebble.player import load_policy as load_actor
from rlvlm.core.episodes import Observations
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.env import ChunkEnv, TurnEnv
from rlvlm.envs.images import FrameStore
from rlvlm.envs.registry import make_env
from rlvlm.policies.reply_policy import ReplyPolicy, ReplySampling
from rlvlm.policies.squashed_gaussian import SquashedGaussian
from rlvlm.policies.vla.policy import Sampling, VLAPolicy
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.loading import build_policy
from rlvlm.preferences.dataset import Steps
from rlvlm.preferences.networks import StateInput, reward_input
from rlvlm.preferences.reward_model import RewardModel
from rlvlm.runs.files.checkpoints import newest_sound
from rlvlm.runs.files.folder import RunFolder, check_trust, choose_checkpoint, find_folder
from rlvlm.runs.settings.kinds import ChunksRun, StepsRun, TurnsRun

logger = logging.getLogger(__name__)


def learned_reward(run: RunFolder, *, trust: bool = False) -> "ImageReward | StateReward":
    """Returns the reward learned by a run, from its newest intact checkpoint, as a function of what it reads: images,
    or states and actions with `--reward.model state`; its `reads` says which.

    Args:
        run: result of `train` or `find_folder`.
        trust: see `load_policy`.

    Raises:
        UsageError: the run has learned no reward, or has no checkpoint yet; or it refers to code that is not trusted.
        CorruptCheckpoint: all checkpoints are corrupt.
    """
    check_trust([run.path], trust=trust)
    config = run.config()
    if not isinstance(config, StepsRun) or not config.reward.is_learned:
        raise UsageError(f"{run.path} has learned no reward", "use a run with --reward.source preference or score")
    checkpoint = newest_sound(run.checkpoints.newest_first())
    if checkpoint is None:
        raise UsageError(f"{run.path} has no checkpoint yet", f"let it continue: {run.resume_command}")
    reward, model_config = config.reward, config.reward_model
    size_px = model_config.image_px
    env = make_env(config.task, config.env, config.seed)
    inputs = reward_input(env, FrameStore(env, size_px, 1), reward, model_config)
    model = RewardModel(inputs, model_config, seed=0)
    model.set_state(load_tree(checkpoint.algorithm)["schedule"]["loop"]["model"])
    if isinstance(inputs, StateInput):
        return StateReward(model, env.observation_space.shape[0], env.action_space.shape[0])
    return ImageReward(model, size_px)


class ImageReward:
    """A learned reward of images."""

    reads = "images [N, H, W, 3] uint8, after the step"
    """Arguments of the function, in words."""

    def __init__(self, model: RewardModel, size_px: int) -> None:
        self._model, self._size_px = model, size_px

    def __call__(self, images: Frames) -> FloatArray:
        """Returns rewards [N] of `images` [N, H, W, 3], which are scaled to the size that the network reads."""
        size = (self._size_px, self._size_px)
        rows = torch.from_numpy(np.stack([np.asarray(Image.fromarray(image).resize(size)) for image in images]))
        with torch.no_grad():
            members = torch.stack([member(rows) for member in self._model.ensemble.members])
        return self._model.agent_rewards(members.mean(dim=0).numpy())


class StateReward:
    """A learned reward of states and actions."""

    def __init__(self, model: RewardModel, obs_size: int, action_size: int) -> None:
        self._model, self._sizes = model, (obs_size, action_size)
        self.reads = f"observations [N, {obs_size}] after the step, and the actions [N, {action_size}] that led to them"
        """Arguments of the function, in words; both as the run's env gives and takes them."""

    def __call__(self, next_obs: FloatArray, actions: FloatArray) -> FloatArray:
        """Returns rewards [N] of `next_obs` [N, D] and `actions` [N, A] in [-1, 1].

        Raises:
            ValueError: one has another shape.
        """
        rows = [np.asarray(given, np.float32) for given in (next_obs, actions)]
        shapes = [given.shape for given in rows]
        if shapes != [(len(rows[0]), size) for size in self._sizes]:
            got = " and ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"this reward reads {self.reads}, got {got}")
        nothing = np.empty((len(rows[0]), 0), np.float32)
        return self._model.agent_rewards(
            self._model.ensemble.rewards(Steps(next_obs=rows[0], actions=rows[1], snapshots=nothing))
        )


class StepPolicy:
    """A network with numeric actions, as trained by SAC."""

    def __init__(self, network: SquashedGaussian) -> None:
        self.network = network

    def act(self, obs: FloatArray) -> FloatArray:
        """Returns the mode of the policy, [A] in [-1, 1], for an observation [D] of the env.

        Raises:
            ValueError: `obs` has another shape.
        """
        width = self.network.obs_size
        given = np.asarray(obs, np.float32)
        if given.shape != (width,):
            raise ValueError(f"obs must be [{width}], got {list(given.shape)}; give one observation of the run's env")
        device = next(self.network.parameters()).device
        with torch.no_grad():
            return self.network.act(torch.from_numpy(given[None]).to(device))[0].cpu().numpy()


class TurnPolicy:
    """A VLM that looks at an image, reads a prompt and answers in text, or by its action head.

    Args:
        model: trained policy.
        env: converts the actions of a head to text.
        sampling: settings of replies, as in training.
    """

    def __init__(self, model: ReplyPolicy, env: TurnEnv, sampling: ReplySampling) -> None:
        self.model = model
        self._env, self._engine = env, PolicyEngine(model)
        self._sampling = sampling

    def act(self, image: Frames, prompt: str, *, greedy: bool = True, seed: int = 0) -> str:
        """Returns the reply, untrusted text for the env's `step`.

        Args:
            image: [H, W, 3] uint8, as drawn by the env; with `policy.history` k > 1 the last k, [k, H, W, 3].
            prompt: user message of this turn, with which the policy was trained: `turn.prompt`.
            greedy: whether to take the most likely token each time; else replies are sampled as in training.
            seed: seed of sampling.

        Raises:
            ValueError: the image has another shape or type.
            UsageError: the prompt is too long for the model.
        """
        pixels = np.asarray(image)
        history = self.model.config.history
        several = (history,) if history > 1 else ()
        if pixels.dtype != np.uint8 or pixels.shape[-1:] != (3,) or (*several, *pixels.shape[-3:]) != pixels.shape:
            wanted = ", ".join(map(str, (*several, "H", "W", 3)))
            raise ValueError(f"image must be [{wanted}] uint8, got {list(pixels.shape)} {pixels.dtype}")
        # an engine identifies images by key; keyed by content, a repeated image is encoded once
        key = hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()
        if self._engine.missing([key]):
            self._engine.show([key], pixels[None])
        obs = Observations(texts=(prompt,), images=(key,))
        [reply] = self._engine.reply(obs, [seed], replace(self._sampling, greedy=greedy))
        return reply.text if reply.action is None else self._env.action_text(reply.action)


class ChunkPolicy:
    """A vision-language-action model that acts in chunks.

    Args:
        model: trained policy.
        env: env of the run, which defines the shapes of inputs and outputs.
    """

    def __init__(self, model: VLAPolicy, env: ChunkEnv) -> None:
        self.model = model
        self.image_px = model.image_px
        """Side of its square images, pixels."""
        self._env = env

    def act(self, images: Frames, instruction: str, proprio: FloatArray) -> FloatArray:
        """Returns the most likely chunk, [L, A] in the env's units, for the env's `step`.

        Args:
            images: [C, H, W, 3] uint8, one of each camera of the env, H = W = `image_px`.
            instruction: e.g. `push the red block onto the pad`.
            proprio: [P] proprioception of the robot, in the env's units.

        Raises:
            ValueError: an argument has another shape or type.
        """
        env, side = self._env, self.image_px
        pixels, felt = np.asarray(images), np.asarray(proprio, np.float32)
        wanted = (len(env.cameras), side, side, 3)
        if pixels.dtype != np.uint8 or pixels.shape != wanted:
            cameras = ", ".join(env.cameras)
            got = f"{list(pixels.shape)} {pixels.dtype}"
            raise ValueError(f"images must be {list(wanted)} uint8, by {cameras}, got {got}")
        if felt.shape != (env.proprio_size,):
            raise ValueError(f"proprio must be [{env.proprio_size}], got {list(felt.shape)}")
        key = hashlib.sha256(pixels.tobytes()).digest()
        self.model.show([key], pixels[None])
        obs = Observations(
            images=(key,), texts=(instruction,), proprio=felt[None], snapshots=np.zeros((1, 0), np.float32)
        )
        return self.model.sample(obs, Sampling()).actions[0]


def load_policy(run: RunFolder | Path | str, *, trust: bool = False) -> StepPolicy | TurnPolicy | ChunkPolicy:
    """Loads the policy trained by a run: from its best checkpoint, or from the checkpoint that the path is in.

    Args:
        run: result of `train`, or the path of a run's folder or of a checkpoint in it.
        trust: whether to import code outside of rlvlm that the folder refers to, such as a task of your own;
            remembered, and not needed for runs made on this machine.

    Raises:
        UsageError: there is no run or no checkpoint, or the folder refers to untrusted code.
        CorruptCheckpoint: the named checkpoint is corrupt, or all are.
        ModelUnavailable: the large model to which an adapter belongs cannot be loaded.
    """
    path = run.path if isinstance(run, RunFolder) else Path(run)
    check_trust([path], trust=trust)
    folder = run if isinstance(run, RunFolder) else find_folder(path)
    config = folder.config()
    checkpoint = choose_checkpoint(folder, path, logger.warning).algorithm
    if isinstance(config, StepsRun):
        return StepPolicy(load_actor(checkpoint))
    env = make_env(config.task, config.env.for_evaluation(), config.seed)
    if isinstance(config, ChunksRun):
        return ChunkPolicy(load_vla(checkpoint, env, config.policy), env)
    assert isinstance(config, TurnsRun), "the only other kind"
    model = build_policy(config.policy, env)
    load_vlm(model, checkpoint)
    sampling = ReplySampling(max_new_tokens=config.algo.max_reply_tokens, temperature=config.algo.temperature)
    return TurnPolicy(model, env, sampling)
