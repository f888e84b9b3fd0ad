#!/usr/bin/env bash
# Builds the environment in which LeRobot runs, to compare with: environments/lerobot.sh [DIR]   (default .envs/lerobot)
# LeRobot 0.4.4 wants torch < 2.11 and transformers < 5, so it never shares an environment with rlvlm. No run needs it: it
# makes the reference that tests/policies/vla/lerobot holds our SmolVLA against, and opens the folders that rlvlm writes.
# It takes 8.4 GB, as PyPI's torch for Linux comes with CUDA. Safe to rerun.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:-.envs/lerobot}
python=${PYTHON:-.venv/bin/python}

[ -x "$dir/bin/python" ] || "$python" -m venv "$dir"
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check \
  "lerobot[smolvla]==0.4.4" torch==2.10.0 torchvision==0.25.0 transformers==4.57.6
# what the comparison imports is imported, so that a package that is missing fails here
"$dir/bin/python" -c 'import lerobot; from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy; print("lerobot", lerobot.__version__, "is ready")'
