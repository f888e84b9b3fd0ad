#!/usr/bin/env bash
# Builds an environment with somebody else's framework and the judge's kit of this clone, in which the tests of the
# guest NAME run what docs/in_your_framework.md shows against the real package:
#   environments/frameworks.sh sb3            .envs/sb3       Stable-Baselines3 2.9.2 and Gymnasium
#   environments/frameworks.sh trl            .envs/trl       TRL 1.16.0
#   environments/frameworks.sh verl           .envs/verl      verl 0.9.1, without an inference engine
#   environments/frameworks.sh openenv        .envs/openenv   OpenEnv 0.3.0
#   environments/frameworks.sh inspect        .envs/inspect   inspect-robots 0.60.0, whose logs judge-bench reads
# Another folder is the second argument; the tests look in ENVS, or .envs. LeRobot 0.6.1 has a script of its own,
# lerobot.sh. Those with PyTorch take 2 to 3 GB for processors, 8 GB with CUDA. Safe to rerun.
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?name one of sb3, trl, verl, openenv, inspect}
dir=${2:-.envs/$name}
python=${PYTHON:-.venv/bin/python}
torch=torch==2.13.0

case $name in
  sb3) packages=(stable-baselines3==2.9.2 "$torch") imports="import stable_baselines3" ;;
  trl) packages=(trl==1.16.0 "$torch" transformers==5.23.0) imports="from trl import GRPOTrainer" ;;
  verl) packages=(verl==0.9.1 "$torch") imports="from verl.trainer.ppo.reward import get_custom_reward_fn" ;;
  openenv) packages=(openenv-core==0.3.0) imports="from openenv.core.rubrics import Rubric" ;;
  inspect) packages=(inspect-robots==0.60.0) imports="import inspect_robots" ;;
  *) echo "$name is none of sb3, trl, verl, openenv, inspect" >&2; exit 2 ;;
esac
[ -x "$dir/bin/python" ] || "$python" -m venv "$dir"
"$dir/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check "${packages[@]}" --editable .
# what the tests import is imported, so that a package that is missing fails here
"$dir/bin/python" -c "$imports; import rlvlm; print('$name is ready')"
