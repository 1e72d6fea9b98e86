#!/usr/bin/env bash
# Make a policy like `smollm2` from its base: corpus, supervised training, closed loop, supervised again. Continues where it was stopped.
#
#     training/recipes/language/make.sh FOLDER              (about 7 hours on one core; `make vllm` first)
#     SMALL=1 training/recipes/language/make.sh FOLDER      (a rehearsal of every step, without vLLM)
#
# One schedule and fixed seeds. The policy that ships went through six editions, adjusted by hand in between
# (memagent_graph/smollm2/CARD.md), and this schedule was not run at full size: it makes one like it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
python=$(realpath --no-symlinks "${PYTHON:-$root/.venv/bin/python}")
export PYTHONPATH="$root:$root/training:$root/integrations" PYTHON=$python MEMAGENT_HOME=${MEMAGENT_HOME:-$(realpath "$1")/home}
mkdir -p "${1:?name a folder}"
cd "$1"
"$root/training/recipes/corpus.sh" corpus
memagent() { "$python" -m memagent_graph "$@"; }
policies=$MEMAGENT_HOME/policies
base_file=SmolLM2-135M-Instruct.Q4_1.gguf
file=(); [[ -z ${BASE_FILE:-} ]] || file=(--file "$BASE_FILE")
supervised() {
    "$python" -m recipes.language.supervised --base "$policies/smollm2-untrained" --corpus corpus --bfloat16 "$@"
}
pack() { # FOLDER, then the adapters and how they are added
    [[ -d $1 ]] || cp -r "$root/memagent_graph/smollm2" "$1"
    "$python" -m recipes.language.pack_adapter --to "$1" --base-file "${BASE_FILE:-$policies/bases/$base_file}" "${@:2}"
}

first=(--steps 1500 --tokens 2400) last=(--steps 260 --tokens 2400)
loop=(--iterations 18 --groups 32 --max-questions 128 --rollouts 8 --lengths 500,2000,4000 --serve-merged --sync-tolerance 0.03
    --set groups_per_step=16 --set warmup_steps=2)
if [[ -n ${SMALL:-} ]]; then
    first=(--steps 1 --tokens 200 --check-sections 1) last=("${first[@]}")
    loop=(--iterations 1 --groups 2 --max-questions 2 --rollouts 2 --lengths 200 --engine local --set groups_per_step=2
        --set warmup_steps=0 --set drop_zero_variance=false)
fi
facts=held_out=no:facts=$root/training/recipes/language/training_facts.toml

memagent policy add smollm2-untrained "${file[@]}"
supervised --out supervised --lr 1e-3 --last-lr 1e-5 --seed 1 --excerpts 0.5 "${first[@]}"
pack first --from supervised
memagent policy add smollm2 --adapter first "${file[@]}"
tr '\0' '\n' <corpus/train.txt >prose.txt
memagent rl --model smollm2 --out loop --lora 4 --task "english_fact:$facts" --task "english_absent:$facts" \
    --advance-at 0.7 --haystack prose.txt --strategy retrieval:chunks=1:chunk_tokens=80:tries=4 --preset dapo --measure-every 0 \
    --set learning_rate=3e-4 --set lr_scheduler_type=linear "${loop[@]}" --resume
pack second --from first loop/adapter --scales 1 0.5 --rank 19
supervised --out last --adapter second --lr 5e-4 --last-lr 1e-5 --seed 2 --mix reading --excerpts 0.25 --rank 19 "${last[@]}"
pack policy --from last/adapter
memagent policy add smollm2 --adapter policy "${file[@]}"
echo "the adapter is in $PWD/policy, the policy in $policies/smollm2"
