#!/usr/bin/env bash
# Calibrate vLLM's CPU build on a small model, then check its predictions against the real engine:
# the calibrated block size, another block size, another model shape. About 15 minutes; the machine must be idle.
#
#     benchmarks/spot_cpu.sh OUT [path to vsim]
#
# OUT receives the profile with its samples, one JSON a check, the runs, and the log. Checks of 200 requests in a KV
# cache so small that preemptions occur. Every check runs, whatever the one before it said.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: benchmarks/spot_cpu.sh OUT [VSIM]}
vsim=${2:-vsim}
mkdir -p "$out"
exec > >(tee -a "$out/log.txt") 2>&1
date -u; uptime
engine=(--max-model-len 1024 --max-num-seqs 64)
check=(--requests 200 --load 0.6 --seed 3 --repeats 3 "${engine[@]}")

"$vsim" calibrate --gpu cpu --model benchmarks/first_shape "${engine[@]}" --block-sizes 32,128 --budget-minutes 5 --out "$out/cpu.json" || exit
"$vsim" profiles show "$out/cpu.json" --plot "$out/cpu.svg"

spot() { # name, flags
  local name=$1; shift
  echo; echo "== $name"; uptime
  "$vsim" spotcheck --profile "$out/cpu.json" "${check[@]}" "$@" --json "$out/$name.json" --out "$out/$name"
  echo "exit code $?"
}
spot block-32 --block-size 32 --num-gpu-blocks-override 50
spot block-64 --block-size 64 --num-gpu-blocks-override 26
spot second-shape --block-size 32 --num-gpu-blocks-override 50 --model benchmarks/second_shape
