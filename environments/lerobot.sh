#!/usr/bin/env bash
# Builds an environment in which LeRobot runs, to compare with:
#   PYTHON=python3.12 environments/lerobot.sh .envs/lerobot312        LeRobot 0.6.1: all policies, data sets 3.0
#   environments/lerobot.sh                                           .envs/lerobot, LeRobot 0.4.4; and 0.3.3 in
#                                                                     .envs/lerobot033: data sets 2.1
# LeRobot wants an older torch and transformers, so it never shares an environment with rlvlm. Release 0.4.4 is the last
# one for Python 3.11. No run needs it: it makes the reference that
# tests/plugins/lerobot holds our networks against, and opens the folders that rlvlm writes.
# Each takes about 8 GB, as PyPI's torch for Linux comes with CUDA. Safe to rerun.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:-.envs/lerobot}
python=${PYTHON:-.venv/bin/python}

[ -x "$dir/bin/python" ] || "$python" -m venv "$dir"
if "$dir/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
  # with the kit of this clone and a simulated arm, for tests/plugins/lerobot/test_judge_step.py
  packages=("lerobot[smolvla,pi,dataset,training]==0.6.1" gym-hil==0.1.14 torch==2.11.0 transformers==5.5.4 --editable .)
  imports='import gym_hil; from lerobot.policies.pi0.modeling_pi0 import PI0Policy; from lerobot.policies.pi05.modeling_pi05 import PI05Policy'
else
  packages=("lerobot[smolvla]==0.4.4" torch==2.10.0 torchvision==0.25.0 transformers==4.57.6)
  imports='from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy'
fi
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
if [ "${packages[0]}" = "lerobot[smolvla]==0.4.4" ]; then
  # the last release that writes data sets of version 2.1; what it imports for that is in the environment already
  "$dir/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target "${dir}033" lerobot==0.3.3
fi
# what the comparison imports is imported, so that a package that is missing fails here
"$dir/bin/python" -c "import lerobot; $imports; print('lerobot', lerobot.__version__, 'is ready')"
