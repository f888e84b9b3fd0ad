#!/usr/bin/env bash
# One run of rlvlm, or one sweep, as a SLURM job on any number of nodes; it saves, requeues itself and goes on at the
# time limit, and when a node is lost. A sweep's report is written at its end.
#
#   rlvlm slurm drawer_open --nodes 2 -- --seed 1      writes a copy of this file with your settings and submits it
#   sbatch cluster/slurm.sh OUT drawer_open --seed 1   by hand; OUT is the run's folder, on a disk all nodes share
#   sbatch cluster/slurm.sh OUT sweep FILE.yaml        the same for a sweep
#
# Variables: RLVLM_PYTHON (default: python), RLVLM_IMAGE (an Apptainer image to run in), RLVLM_SCRATCH (a fast disk for
# checkpoints; the newest and the best are copied to OUT), RLVLM_MAX_RESTARTS (default: 20).
#SBATCH --job-name=rlvlm
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180
# ---- below this line the copies are alike ----
set -euo pipefail
umask 077

out=$1
shift
nodes=${SLURM_JOB_NUM_NODES:-1}
shared="$out.job-$SLURM_JOB_ID" # where the job's nodes meet
rlvlm=("${RLVLM_PYTHON:-python}")
if [[ -n ${RLVLM_IMAGE:-} ]]; then
    mkdir -p "$(dirname "$out")"
    seen="$PWD,$(dirname "$out")${RLVLM_SCRATCH:+,$RLVLM_SCRATCH}${HF_HOME:+,$HF_HOME}"
    rlvlm=(apptainer exec --nv --bind "$seen" "$RLVLM_IMAGE" python)
fi
export PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0
unset RAY_ADDRESS

# USR1 is SLURM's early warning. TERM is pre-emption or scancel: there SLURM decides whether the job comes back.
asked=""
signals=0
run_pid=""
# shellcheck disable=SC2317 # a trap calls it
ask() {
    signals=$((signals + 1))
    [[ -n $asked ]] && return
    asked=$1
    echo "slurm: SIG$1, saving"
    [[ -z $run_pid ]] || kill -USR1 "$run_pid" 2>/dev/null || true
}
trap 'ask USR1' USR1
trap 'ask TERM' TERM

node_pids=()
# shellcheck disable=SC2317 # a trap calls it
leave() {
    rm -rf "$shared" # the nodes end when it is gone
    ((${#node_pids[@]} == 0)) || wait "${node_pids[@]}" 2>/dev/null || true
}
trap leave EXIT

if ((nodes > 1)); then # one node needs none of this: the run starts a Ray of its own
    mkdir -p "$shared"
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$shared/token"
    node=("${rlvlm[@]}" -m rlvlm.plugins.slurm.job_node "$shared" --nodes "$nodes")
    "${node[@]}" --head &
    node_pids+=($!)
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    others=$(
        IFS=,
        echo "${hosts[*]:1}"
    )
    srun --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) --nodelist="$others" \
        --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${node[@]}" &
    node_pids+=($!)
    until [[ -f $shared/ready || -n $asked ]]; do
        if ! kill -0 "${node_pids[0]}" 2>/dev/null; then
            echo "slurm: Ray did not start on all nodes; the reason is above" >&2
            exit 3
        fi
        sleep 0.5
    done
    RAY_ADDRESS=$(cat "$shared/address")
    export RAY_ADDRESS
fi

# Of the run, or of all runs of a sweep.
checkpoints() { find "$out" -maxdepth 5 -path '*/checkpoints/step_*' -prune -print 2>/dev/null | sort || true; }
before_run=$(checkpoints)
code=75
if [[ -z $asked ]]; then
    if [[ -f $out/config.yaml || -f $out/sweep.yaml ]]; then
        words=(resume "$out" --trust) # the job's own folder: what code it names, the job has named
    elif [[ $1 == sweep ]]; then
        words=("$@" --out "$out")
    else
        words=(run "$@" --out "$out")
    fi
    "${rlvlm[@]}" -m rlvlm.cli "${words[@]}" &
    run_pid=$!
    [[ -z $asked ]] || kill -USR1 "$run_pid" 2>/dev/null || true
    while :; do # a signal ends a wait before its time
        before=$signals
        code=0
        wait "$run_pid" || code=$?
        ((before != signals)) || break
    done
fi

again=""
# 75: saved. 138: the signal came before the run could listen, so there is nothing to save yet.
if ((code == 75 || code == 138)) && [[ $asked == USR1 ]]; then
    again="the time limit"
# Not by its settings (2) or its numbers (4): a node, memory or the judge is gone. It comes back as long as it gets further.
elif ((code != 0 && code != 2 && code != 4)) && [[ -z $asked && $(checkpoints) != "$before_run" ]]; then
    again="code $code after a new checkpoint"
fi
if [[ -n $again ]]; then
    if ((${SLURM_RESTART_COUNT:-0} < ${RLVLM_MAX_RESTARTS:-20})); then
        echo "slurm: requeue for $again, after ${SLURM_RESTART_COUNT:-0} restarts"
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "slurm: ${SLURM_RESTART_COUNT:-0} restarts are enough; go on with: rlvlm resume $out" >&2
        again=""
    fi
fi
# What came of the sweep, the runs that failed too; not where it comes back or was told to stop.
if [[ $1 == sweep && -z $again && -z $asked ]]; then
    "${rlvlm[@]}" -m rlvlm.cli report "$out" --trust || echo "slurm: no report: rlvlm report $out" >&2
fi
exit "$code"
