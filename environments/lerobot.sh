#!/usr/bin/env bash
# Builds an environment in which LeRobot runs, to compare with:
#   environments/lerobot.sh          .envs/lerobot: LeRobot 0.6.1, all policies, data sets 3.0; and beside it, in
#                                    .envs/lerobot033, release 0.3.3 on its path, the last that writes data sets 2.1
# LeRobot wants Python 3.12, and an older torch and transformers, so it never shares an environment with rlvlm. No run
# needs it: it makes the reference that tests/plugins/lerobot holds our networks against, and opens the folders that
# rlvlm writes. It takes 6 to 8 GB, as PyPI's torch for Linux comes with CUDA. Safe to rerun.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:-.envs/lerobot}

[ -x "$dir/bin/python" ] || "${PYTHON:-python3.12}" -m venv "$dir"
# with the kit of this clone and a simulated arm, for tests/plugins/lerobot/test_judge_step.py
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check \
  "lerobot[smolvla,pi,dataset,training]==0.6.1" gym-hil==0.1.14 torch==2.11.0 transformers==5.5.4 --editable .
# what it imports to write a data set is in the environment already
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target "${dir}033" lerobot==0.3.3
# what the comparison imports is imported, so that a package that is missing fails here
"$dir/bin/python" -c "import gym_hil, lerobot
from lerobot.policies.pi0.modeling_pi0 import PI0Policy
from lerobot.policies.pi05.modeling_pi05 import PI05Policy
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
print('lerobot', lerobot.__version__, 'is ready')"
PYTHONPATH="${dir}033" "$dir/bin/python" -c "from lerobot.datasets.lerobot_dataset import LeRobotDataset"
