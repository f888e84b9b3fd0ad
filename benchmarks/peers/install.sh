#!/usr/bin/env bash
# Installs the peers that benchmarks/ measures against into benchmarks/.envs (ignored by git), apart from rlvlm's own
# environment. What is there already is kept; delete benchmarks/.envs to start anew. Stock RLlib needs no environment:
# it is the Ray that rlvlm runs on.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
envs="$here/../.envs"
python="${PYTHON:-$(command -v python3.11 || command -v python3)}"

install() {  # install NAME PACKAGE...
  local target="$envs/$1"
  shift
  [ -f "$target/.installed" ] && return
  "$python" -m venv "$target"
  "$target/bin/python" -m pip install --quiet "$@"
  "$target/bin/python" -m pip check
  touch "$target/.installed"
}

# One environment for both: SBX is Stable-Baselines3 with its networks in JAX. The envs are rlvlm's own, so that
# everybody steps the same physics.
install baselines torch==2.13.0 stable-baselines3==2.9.2 sbx-rl==0.28.0 \
  gymnasium==1.2.2 metaworld==3.1.1 mujoco==3.3.0 pillow packaging
echo "peers installed in $envs"
