"""A policy's folder in LeRobot's layout, from 0.4 on: reading and writing the files beside the weights.

    config.json                 sizes, image features, settings
    model.safetensors           weights
    policy_preprocessor.json    how observations are prepared, step by step; names the file with their statistics
    policy_postprocessor.json   how actions are restored, in the same form

A folder from outside is untrusted: every file is read within limits, no default replaces a missing value, and unknown
content is refused, because LeRobot would have computed something else. No tensor library is imported here.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from rlvlm.core.checks import check_interval
from rlvlm.core.episodes import FloatArray
from rlvlm.core.errors import ModelUnavailable, first_line
from rlvlm.core.foreign import read_bytes, read_json
from rlvlm.policies.vla.flow.scale import Scale, write_scales

WEIGHTS = "model.safetensors"
_PROCESSORS = ("policy_preprocessor", "policy_postprocessor")
_NORMALISERS = {"policy_preprocessor": "normalizer_processor", "policy_postprocessor": "unnormalizer_processor"}
_RELATIVE = {
    "policy_preprocessor": "relative_actions_processor",
    "policy_postprocessor": "absolute_actions_processor",
}
"""Steps that subtract the state from actions before scaling, and add it to restored ones, if enabled."""
_STEPS = {
    *("rename_observations_processor", "to_batch_processor", "tokenizer_processor", "device_processor"),
    *(*_NORMALISERS.values(), *_RELATIVE.values()),
}
"""Steps of LeRobot's processors common to every supported policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Names of a policy type's settings, and their supported values."""

    step: str
    """Processor step that writes the prompt."""
    image_size: str
    """Setting with the size of the image encoder's images."""
    num_steps: str
    """Setting with the number of Euler steps."""
    only: Mapping[str, Any]
    """Settings with a single supported value."""
    faults: frozenset[str]
    """Faults of LeRobot's releases with which it may have been trained, see `LeRobotConfig.faults`."""


_PI = {
    "image_size": "image_resolution",
    "num_steps": "num_inference_steps",
    "only": {"n_obs_steps": 1},
}
LAYOUTS = {
    "smolvla": Layout(
        step="smolvla_new_line_processor",
        image_size="resize_imgs_with_padding",
        num_steps="num_steps",
        only={"n_obs_steps": 1, "adapt_to_pi_aloha": False, "add_image_special_tokens": False},
        faults=frozenset({"shifted_patches"}),
    ),
    "pi0": Layout(step="pi0_new_line_processor", faults=frozenset({"dark_borders"}), **_PI),
    "pi05": Layout(
        step="pi05_prepare_state_tokenizer_processor_step", faults=frozenset({"dark_borders", "padded_state"}), **_PI
    ),
}
"""Supported types of policies, by the name in config.json."""
_MODES = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
"""LeRobot's modes of normalisation, each with its two statistics."""
_OTHER_TYPES = {"pi0_fast", "act", "diffusion", "groot", "xvla", "vqbet", "tdmpc", "sac", "wall_x"}
_MAX_STATISTICS_BYTES = 2**20
_PERCENTILE = 2.3263
"""Distance of a normal distribution's 99th percentile from its mean, in standard deviations."""
_STATE, _ACTION = "observation.state", "action"
_AGAIN = "download the checkpoint again, or give --policy.model another one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of a policy besides those of its VLM."""

    chunk_steps: int
    """H, the steps of a chunk in the network."""
    state_dims: int
    """Numbers of the state, including padding."""
    action_dims: int
    """D, the numbers of an action, including padding."""
    image_px: int
    """Side of the image encoder's images, pixels."""
    min_period: float
    """Shortest period of the sines that encode a time, in units of the whole flow."""
    max_period: float
    """Longest period of these sines."""

    def __post_init__(self) -> None:
        # written by strangers: memory allocated because of them is limited
        _check_whole(self, "[1, 1024]", "chunk_steps", "state_dims", "action_dims")
        _check_whole(self, "[1, 4096]", "image_px")
        check_interval(self, "", "(0, 1000]", "min_period", "max_period")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSizes:
    """Sizes of SmolVLA's action expert, and of the part of its VLM that it reads."""

    num_layers: int
    """Number of layers of the VLM's language model that are used."""
    expert_layers: int
    """Number of layers of the action expert: the same, or fewer if all of them read only the body."""
    joint_every: int
    """Period of layers in which actions also attend to each other, from the first on; 0: none."""
    width: float
    """The expert's width as a share of the body's."""

    def __post_init__(self) -> None:
        _check_whole(self, "[1, 1024]", "num_layers", "expert_layers")
        _check_whole(self, "[0, 1024]", "joint_every")
        check_interval(self, "", "(0, 4]", "width")
        if self.expert_layers != self.num_layers and (self.joint_every or self.num_layers % self.expert_layers):
            raise ValueError(
                f"{self.expert_layers} expert layers beside {self.num_layers} of the VLM, actions attending to each "
                f"other every {self.joint_every}: LeRobot cannot compute that either"
            )

    @property
    def are_joint(self) -> list[bool]:
        """Returns for each layer of the expert whether actions also attend to each other."""
        return [self.joint_every > 0 and index % self.joint_every == 0 for index in range(self.expert_layers)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Normalisation of a feature in the checkpoint."""

    mode: str
    """IDENTITY, or a key of `_MODES`."""
    first: FloatArray
    """[size of the feature] mean, or smaller quantile, in the env's units."""
    second: FloatArray
    """[size of the feature] standard deviation, or larger quantile."""
    least: FloatArray | None = None
    """[size of the feature] smallest value in the data; None: not in the checkpoint."""
    most: FloatArray | None = None
    """[size of the feature] largest value."""

    @property
    def scale(self) -> Scale:
        """Returns these statistics as a flow policy's scale; missing quantities are computed for a normal distribution.

        Departure: LeRobot divides by a width of 0 and 1e-8; here a constant number is left unscaled, and is -1 by
        quantiles and 0 by the mean, as it is there for the value that it always had.
        """
        is_by_mean = self.mode in ("IDENTITY", "MEAN_STD")
        if is_by_mean:
            mean, std = self.first, self.second
            low, high = mean - _PERCENTILE * std, mean + _PERCENTILE * std
        else:
            low, high = self.first, self.second
            mean, std = (low + high) / 2, (high - low) / (2 * _PERCENTILE)
        columns = {"mean": mean, "std": std, "q01": low, "q99": high}
        mode = "mean_std" if is_by_mean else "quantiles"
        constant = 0.0 if is_by_mean else -1.0
        return Scale(mode=mode, constant=constant, **{name: tuple(found.tolist()) for name, found in columns.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Content of a folder besides its weights."""

    folder: Path
    """Folder that it was read from."""
    kind: str
    """Policy type in config.json, a key of `LAYOUTS`."""
    files: Mapping[str, Any]
    """Files by name: the values of JSON files, and the arrays of statistics."""
    tokenizer: str
    """Folder or hub name of the tokenizer, usually the VLM's."""
    max_tokens: int
    """Maximum tokens of a prompt, >= 1; longer ones are cut off."""
    cameras: tuple[str, ...]
    """Names of the image features, in order."""
    sources: tuple[str, ...]
    """Names of these images in the data, before the checkpoint's processor renames them."""
    num_denoising_steps: int
    """K, the Euler steps from noise to action in evaluation."""
    state: Statistics
    """Normalisation of the P numbers of the state."""
    action: Statistics
    """Normalisation of the A numbers of an action."""
    relative: tuple[bool, ...]
    """For each of the A numbers of an action, whether LeRobot trained it relative to the state before its chunk."""
    to_env: tuple[FloatArray, FloatArray] | None = None
    """[A] factor and offset that make the checkpoint's actions the env's, see `units`; None: they have one unit."""

    @property
    def action_scale(self) -> Scale:
        """Returns the scale of actions in the env's units; `action` is in the checkpoint's, as it is written back."""
        scale = self.action.scale
        return scale if self.to_env is None else scale.converted(*self.to_env)

    @property
    def statistics(self) -> str:
        """Returns the scales of a flow policy's actions and proprioception, as JSON."""
        return write_scales({"action": self.action_scale, "proprio": self.state.scale})

    @property
    def config(self) -> Any:
        """Values of config.json."""
        return self.files["config.json"]

    @property
    def sizes(self) -> Sizes:
        """Returns the sizes besides those of the VLM.

        Raises:
            ModelUnavailable: they are missing, out of bounds, or inconsistent.
        """
        with _bad_config():
            side, other = self.config[LAYOUTS[self.kind].image_size]
            if side != other:
                raise ValueError(f"its images are {side} x {other}, which must be square")
            return Sizes(
                chunk_steps=self.config["chunk_size"],
                state_dims=self.config["max_state_dim"],
                action_dims=self.config["max_action_dim"],
                image_px=side,
                min_period=self.config["min_period"],
                max_period=self.config["max_period"],
            )

    def expert_sizes(self, vlm_layers: int) -> ExpertSizes:
        """Returns SmolVLA's sizes, given that the VLM's language model has `vlm_layers`.

        Raises:
            ModelUnavailable: see `sizes`.
        """
        config = self.config
        with _bad_config():
            layers = config["num_vlm_layers"] if config["num_vlm_layers"] > 0 else vlm_layers
            if layers > vlm_layers:
                raise ValueError(f"it uses {layers} layers of a VLM that has {vlm_layers}")
            return ExpertSizes(
                num_layers=layers,
                expert_layers=config["num_expert_layers"] if config["num_expert_layers"] > 0 else layers,
                joint_every=1
                if "cross" not in config["attention_mode"]
                else max(0, config["self_attn_every_n_layers"]),
                width=config["expert_width_multiplier"],
            )


@contextmanager
def _bad_config() -> Iterator[None]:
    """Converts errors in config.json to `ModelUnavailable`."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise ModelUnavailable(f"the checkpoint's config.json cannot be used: {_said(error)}", _AGAIN) from error


def _check_whole(sizes: Any, interval: str, *names: str) -> None:
    if not all(isinstance(getattr(sizes, name), int) for name in names):
        raise ValueError(f"{', '.join(names)} must be whole numbers, got {sizes}")
    check_interval(sizes, "", interval, *names)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads the content of `folder` besides its weights.

    Raises:
        ModelUnavailable: a file is missing or broken, belongs to another kind of policy or an older layout, statistics
            are missing, or it requires something unsupported.
    """
    try:
        config = read_json(folder / "config.json")
        kind = config.get("type")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelUnavailable(f"{folder} holds no policy of LeRobot: {first_line(error)}", _AGAIN) from error
    if not isinstance(kind, str) or kind not in LAYOUTS:
        known = "is not known here yet" if kind in _OTHER_TYPES else "is no policy of LeRobot"
        raise ModelUnavailable(
            f"{folder} holds a policy of type {str(kind)[:80]!r}, which {known}",
            f"choose a checkpoint of type {', '.join(LAYOUTS)} in LeRobot's layout",
        )
    if not (folder / WEIGHTS).is_file():
        raise ModelUnavailable(f"{folder} has no {WEIGHTS}; an adapter or pickled weights are not read", _AGAIN)
    absent = [f"{name}.json" for name in _PROCESSORS if not (folder / f"{name}.json").is_file()]
    if absent:
        raise ModelUnavailable(
            f"{folder} has no {absent[0]}: it is older than LeRobot 0.4, and its statistics lie among its weights",
            "python -m lerobot.processor.migrate_policy_normalization --pretrained-path FOLDER",
        )
    try:
        files: dict[str, Any] = {"config.json": config}
        scales = {name: _read_scales(folder, name, files) for name in _PROCESSORS}
        return _checkpoint(folder, files, scales)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ModelUnavailable(f"{folder} cannot be used: {_said(error)}", _AGAIN) from error


def _checkpoint(folder: Path, files: dict[str, Any], scales: dict[str, dict[str, Statistics]]) -> Checkpoint:
    config: Any = files["config.json"]
    layout = LAYOUTS[config["type"]]
    for name, usual in layout.only.items():
        if config[name] != usual:
            raise ValueError(f"its {name} is {config[name]}; only {usual} is done here")
    if _ACTION not in scales["policy_postprocessor"] or _STATE not in scales["policy_preprocessor"]:
        raise ValueError(f"its processors scale no {_ACTION} or no {_STATE}")
    action, other = scales["policy_postprocessor"][_ACTION], scales["policy_preprocessor"].get(_ACTION)
    if other is not None and not (np.array_equal(action.first, other.first) and action.mode == other.mode):
        raise ValueError("its two processors have statistics of different data sets for actions")
    # listed in the config once a policy was made from it; LeRobot fills them with blanks, and masks them
    empty = {f"observation.images.empty_camera_{index}" for index in range(min(config["empty_cameras"], 100))}
    cameras = [name for name, feature in config["input_features"].items() if feature["type"] == "VISUAL"]
    [tokenizer] = [
        step["config"]
        for step in files["policy_preprocessor.json"]["steps"]
        if step["registry_name"] == "tokenizer_processor"
    ]
    [renames] = [
        step["config"].get("rename_map", {})
        for step in files["policy_preprocessor.json"]["steps"]
        if step["registry_name"] == "rename_observations_processor"
    ] or [{}]
    before = {str(new): str(old) for old, new in renames.items()}
    if tokenizer["padding_side"] != "right" or not 1 <= tokenizer["max_length"] <= 10_000:
        side, length = tokenizer["padding_side"], tokenizer["max_length"]
        raise ValueError(f"its prompts are padded on the {side} to {length} tokens")
    sizes = {"state": (scales["policy_preprocessor"][_STATE], "max_state_dim"), "action": (action, "max_action_dim")}
    for name, (scale, limit) in sizes.items():
        if len(scale.first) > config[limit]:
            raise ValueError(f"its {name} has {len(scale.first)} numbers, its {limit} is {config[limit]}")
    if not 1 <= config[layout.num_steps] <= 1_000:
        raise ValueError(f"{layout.num_steps} must be in [1, 1000], got {config[layout.num_steps]}")
    return Checkpoint(
        folder=folder,
        kind=config["type"],
        files=files,
        tokenizer=str(tokenizer["tokenizer_name"]),
        max_tokens=int(tokenizer["max_length"]),
        cameras=tuple(name for name in cameras if name not in empty),
        sources=tuple(str(before.get(name, name)) for name in cameras if name not in empty),
        num_denoising_steps=int(config[layout.num_steps]),
        state=scales["policy_preprocessor"][_STATE],
        action=action,
        relative=_relative(files, len(action.first), len(scales["policy_preprocessor"][_STATE].first)),
    )


def _relative(files: Mapping[str, Any], size: int, state_size: int) -> tuple[bool, ...]:
    """Returns whether LeRobot trained each of the `size` numbers of an action relative to the state."""
    enabled: dict[str, Any] = {}
    for name in _PROCESSORS:
        steps = files[f"{name}.json"]["steps"]
        names = [step["registry_name"] for step in steps]
        for index, step in enumerate(steps):
            if step["registry_name"] == _RELATIVE[name] and step["config"]["enabled"]:
                # statistics are those of relative actions: subtracted before scaling, added after restoring
                if (index < names.index(_NORMALISERS[name])) != (name == "policy_preprocessor"):
                    raise ValueError(f"{name}.json has {_RELATIVE[name]} on the wrong side of {_NORMALISERS[name]}")
                enabled[name] = step["config"]
    says = [files["config.json"].get("use_relative_actions", False), *(name in enabled for name in _PROCESSORS)]
    if says != [says[0]] * 3:
        raise ValueError(
            "whether its actions are relative to the state is not the same in use_relative_actions of config.json and "
            f"in its two processors: {', '.join(map(str, says))}"
        )
    if not enabled:
        return (False,) * size
    if size > state_size:
        raise ValueError(f"its actions of {size} numbers are relative to a state of {state_size}")
    about = enabled["policy_preprocessor"]
    # as in LeRobot: a name excludes every joint that contains it, and numbers without names are all relative
    excluded = [str(joint).lower() for joint in about["exclude_joints"] if joint]
    named = [str(joint).lower() for joint in (about["action_names"] or [])[:size]]
    mask = [not any(part in joint for part in excluded) for joint in named]
    return (*mask, *(True for _ in range(size - len(mask))))


def _read_scales(folder: Path, name: str, files: dict[str, Any]) -> dict[str, Statistics]:
    """Returns the normalisation of each non-image feature in one of the two processors; adds the files to `files`."""
    processor = files[f"{name}.json"] = read_json(folder / f"{name}.json")
    known = {*_STEPS, LAYOUTS[files["config.json"]["type"]].step}
    for step in processor["steps"]:
        step_name = step.get("registry_name")
        if step_name not in known:
            raise ValueError(f"{name}.json has a step {str(step_name)[:80]!r}; known are {', '.join(sorted(known))}")
    [step] = [step for step in processor["steps"] if step["registry_name"] == _NORMALISERS[name]]
    config, statistics = step["config"], {}
    if "state_file" in step:
        file = step["state_file"]
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{name}.json names {file[:80]!r}; statistics are *.safetensors in the same folder")
        statistics = safetensors.numpy.load(read_bytes(folder / file, _MAX_STATISTICS_BYTES))
        files[file] = statistics
    scales = {}
    for feature, about in config["features"].items():
        mode = config["norm_map"].get(about["type"], "IDENTITY")
        some = config.get("normalize_observation_keys")
        if some is not None and about["type"] != "ACTION" and feature not in some:
            mode = "IDENTITY"
        if about["type"] == "VISUAL" and mode != "IDENTITY":
            raise ValueError(f"its images are normalised by {mode}; only IDENTITY is done here")
        if about["type"] in ("STATE", "ACTION"):
            scales[feature] = _scale(feature, about, mode, float(config["eps"]), statistics)
    return scales


def _scale(feature: str, about: Any, mode: str, eps: float, statistics: Mapping[str, FloatArray]) -> Statistics:
    [size] = about["shape"]
    bounds = {
        name: np.asarray(statistics[key], np.float32).reshape(size)
        for name, key in (("least", f"{feature}.min"), ("most", f"{feature}.max"))
        if key in statistics
    }
    if mode == "IDENTITY":
        return Statistics(mode=mode, first=np.zeros(size, np.float32), second=np.ones(size, np.float32), **bounds)
    if mode not in _MODES:
        raise ValueError(f"{feature} is normalised by {str(mode)[:80]!r}; known are IDENTITY, {', '.join(_MODES)}")
    found = []
    for name in _MODES[mode]:
        key = f"{feature}.{name}"
        if key not in statistics:
            raise ValueError(
                f"statistics are missing: {key}; without them LeRobot leaves {feature} as it is. Save the processors "
                "again with the statistics of the data set that it was trained on"
            )
        values = statistics[key].astype(np.float32)
        if values.shape != (size,) or not np.isfinite(values).all():
            raise ValueError(f"{key} has shape {values.shape} or is not finite, the feature has {size} numbers")
        found.append(values)
    first, second = found
    if (second < (0 if mode == "MEAN_STD" else first)).any() or not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"the statistics of {feature} have a negative width, or an eps that is not positive")
    return Statistics(mode=mode, first=first, second=second, **bounds)


def write_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes all files but the weights, unchanged except for the statistics `checkpoint.state` and `.action`."""
    for name, content in checkpoint.files.items():
        if name.endswith(".json"):
            (folder / name).write_text(json.dumps(content, indent=4) + "\n")
            continue
        statistics = dict(content)
        for feature, scale in ((_STATE, checkpoint.state), (_ACTION, checkpoint.action)):
            for key, values in zip(_MODES.get(scale.mode, ()), (scale.first, scale.second), strict=False):
                if f"{feature}.{key}" in statistics:
                    statistics[f"{feature}.{key}"] = values
        (folder / name).write_bytes(safetensors.numpy.save(statistics))


def _said(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else first_line(error)
