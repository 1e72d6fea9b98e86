#!/usr/bin/env bash
# The closed loop from the adapter that ships, and supervision of equal time from the same adapter. A stopped run continues.
#
#     training/recipes/english/loop.sh FOLDER SEED               (hours on a GPU)
#     CORES=1 training/recipes/english/loop.sh FOLDER SEED       (reads of 4 chunks, for two cores)
#     SMALL=1 training/recipes/english/loop.sh FOLDER SEED       (one iteration and two steps: minutes on two cores)
#
# The outcome reward is token F1 of the answer, on questions on prose in documents of 4 to 16 chunks. The comparison is
# fixed before the start: exact_match on held_out.jsonl, at 4 to 16 chunks.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
python=$(realpath --no-symlinks "${PYTHON:-$root/.venv/bin/python}")
export PYTHONPATH="$root:$root/training:$root/integrations" OMP_WAIT_POLICY=passive
seed=${2:?name a seed}
mkdir -p "${1:?name a folder}"
cd "$1"
export MEMAGENT_HOME=${MEMAGENT_HOME:-$PWD/home}
base="$MEMAGENT_HOME/policies/english-untrained"
questions=() loop=(--iterations 60 --groups 16 --rollouts 8 --set groups_per_step=8 --set warmup_steps=2 --set learning_rate=1e-4)
readings=(--readings 36000); check=(--readings 120); size=()
if [[ -n ${CORES:-} ]]; then
    loop=(--lengths 2k --iterations 50 --groups 4 --rollouts 8 --set drop_zero_variance=false --set groups_per_step=4
        --set warmup_steps=2 --set learning_rate=2e-4)
    start="$root/training/recipes/english/loop-$seed"  # iterations that were done elsewhere
    if [[ -d $start && ! -d loop-$seed ]]; then cp -r "$start" . && mv "loop-$seed/seconds" "loop-$seed.seconds"; fi
    if grep -q -e avx512_bf16 -e amx_bf16 /proc/cpuinfo; then loop+=(--set save_dtype=bfloat16 --set bf16=true); fi
    readings=(--readings 4000); check=(--readings 12); size=(--length 4096 --rows 1 --accumulated 4)
elif [[ -n ${SMALL:-} ]]; then
    questions=(--count 200) loop=(--iterations 1 --groups 2 --rollouts 2 --max-questions 2 --set drop_zero_variance=false --set groups_per_step=2
        --set warmup_steps=0 --set learning_rate=1e-4)
    readings=(--readings 4); check=(--readings 1); size=(--length 1536 --rows 1 --accumulated 1 --steps 2)
fi
"$python" -m memagent_graph policy add english
"$python" -m memagent_graph policy add english-untrained
[[ -f train.jsonl ]] || "$python" -m recipes.english.prose_questions --out train.jsonl "${questions[@]}"
[[ -f held_out.jsonl ]] || "$python" -m recipes.english.prose_questions --out held_out.jsonl --held-out "${questions[@]}"
begin=$SECONDS
trap 'echo $((SECONDS - begin)) >> "loop-$seed.seconds"' EXIT
"$python" -m memagent_graph rl --data train.jsonl --model english --strategy gated --engine local --lora 16 --reward token_f1 \
    --measure-every 0 --set old_logprobs=logged --set skip_certain=0.02 \
    "${loop[@]}" --seed "$seed" --resume --out "loop-$seed"
trap - EXIT
echo $((SECONDS - begin)) >> "loop-$seed.seconds"
minutes=$(awk '{ seconds += $1 } END { print seconds / 60 }' "loop-$seed.seconds")
[[ -f "lessons-$seed.npz" ]] || "$python" -m recipes.english.encoded_lessons --base "$base" "${readings[@]}" --seed "$((seed + 100))" \
    --out "lessons-$seed.npz"
[[ -f check.npz ]] || "$python" -m recipes.english.encoded_lessons --base "$base" "${check[@]}" --seed 1 --held-out --out check.npz
[[ -d twin-$seed ]] || cp -r "$root/memagent_graph/english" "twin-$seed"
"$python" -m recipes.english.supervision --base "$base" --adapter "$root/memagent_graph/english" --lessons "lessons-$seed.npz" \
    --check check.npz --out "twin-$seed" --rate 1e-4 --minutes "$minutes" "${size[@]}"
echo "the loop's policy is in $PWD/loop-$seed, its twin's adapter in $PWD/twin-$seed; to compare them:"
echo "    memagent policy add english --adapter $PWD/twin-$seed"
echo "    memagent eval qa_files --data $PWD/held_out.jsonl --model loop-$seed --out by-loop-$seed      # and --policy english"
