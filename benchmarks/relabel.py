"""Time to relabel a replay of 200,000 steps after a fit: `python benchmarks/relabel.py`.

The steps are real ones of drawer_open, played by the random policy of the run's start; the reward models are fitted to
an oracle's answers. Prints CPU seconds per model, the longest that acting stands still, and what there was to look at,
as JSON. `--robot visible` makes every image different from every other: the worst case for an image model.
"""

import argparse
import json
import platform
import statistics
import time
from typing import Literal

import numpy as np
import torch

from rlvlm.algorithms.sac_pebble.algorithm import SACPebbleConfig
from rlvlm.algorithms.sac_pebble.label import Relabelling
from rlvlm.algorithms.sac_pebble.replay import Replay
from rlvlm.algorithms.sac_pebble.runner import StepEnvRunner
from rlvlm.envs.metaworld.config import MetaWorldConfig
from rlvlm.envs.registry import make_env
from rlvlm.preferences.config import FeedbackConfig, RewardModelConfig
from rlvlm.preferences.loop import FeedbackLoop, build_loop
from rlvlm.preferences.teachers import OracleTeacher
from rlvlm.rewards.config import StepRewardConfig

ROWS, EPISODES, QUERIES = 200_000, 20, 200


class Rig:
    """A replay of random play in one env, and reward models fitted to an oracle that watched it.

    Args:
        robot: as in `MetaWorldConfig`.
        rows: of the replay.
        played: steps really played, at most `rows`; further rows repeat them.
    """

    def __init__(self, robot: Literal["hidden", "visible"], rows: int, played: int) -> None:
        env = MetaWorldConfig(robot=robot)
        self._runner = StepEnvRunner(config=SACPebbleConfig().settings(task="drawer_open", env_settings=env))
        self.viewer = make_env("drawer_open", env, 0)
        self.replay = Replay(rows)
        self._episodes = []
        while len(self.replay) < played:
            sample = self._runner.sample(num_steps=min(250, played - len(self.replay)), random_actions=True)
            self.replay.add(sample.transitions, sample.transitions.env_rewards)
            self._episodes += sample.episodes
        whole = self.replay.transitions(slice(0, played))
        while len(self.replay) < rows:
            again = whole.part(np.arange(played) < rows - len(self.replay))
            self.replay.add(again, again.env_rewards)

    def fitted(self, sees: Literal["image", "state"]) -> FeedbackLoop:
        """A preference loop that has held one session, with its images drawn as they would have been on arrival."""
        loop = build_loop(
            self.viewer,
            OracleTeacher(),
            reward=StepRewardConfig(model=sees),
            feedback=FeedbackConfig(queries=QUERIES),
            reward_model=RewardModelConfig(),
            seed=0,
        )
        for episode in self._episodes[:EPISODES]:
            loop.add(episode)
        loop.run_session(3_000)
        return loop


def relabel(replay: Replay, loop: FeedbackLoop) -> list[float]:
    """CPU seconds of each piece, as after a fit."""
    loop.set_state(loop.get_state())  # forgets what the models made of images, as a fit does
    relabelling, pieces = Relabelling(replay), []
    relabelling.start()
    while relabelling.num_waiting:
        started = time.process_time()
        relabelling.advance(loop.source)
        pieces.append(time.process_time() - started)
    return pieces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--robot", choices=("hidden", "visible"), default="hidden")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--played", type=int, help="steps really played, by default all; further rows repeat them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch; a run uses one")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    rig = Rig(chosen.robot, chosen.rows, min(chosen.played or chosen.rows, chosen.rows))
    loops = {sees: rig.fitted(sees) for sees in ("state", "image")}
    totals, longest = {sees: [] for sees in loops}, {sees: [] for sees in loops}
    num_pieces = {}
    for _ in range(chosen.rounds):
        for sees, loop in loops.items():
            pieces = relabel(rig.replay, loop)
            totals[sees].append(sum(pieces))
            longest[sees].append(max(pieces))
            num_pieces[sees] = len(pieces)
    snapshots = rig.replay.transitions(slice(0, chosen.rows)).snapshots
    kinds = len(np.unique(rig.viewer.image_key(snapshots), axis=0))
    print(
        json.dumps(
            {
                "rows": chosen.rows,
                "robot": chosen.robot,
                "threads": chosen.threads,
                "different_pictures": kinds,
                "first_time_s": {sees: round(values[0], 2) for sees, values in totals.items()},
                "median_s": {sees: round(statistics.median(values), 2) for sees, values in totals.items()},
                "longest_piece_s": {sees: round(max(values), 2) for sees, values in longest.items()},
                "pieces": num_pieces,
                "machine": f"{platform.machine()}, {torch.__version__}",
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
