#!/usr/bin/env bash
# Make a policy like `embedded` from scratch: corpus, tokenizer, supervised training, closed loops. A stopped run continues.
#
#     training/recipes/embedded/make.sh FOLDER              (hours on two cores; `make vllm` first)
#     SMALL=1 training/recipes/embedded/make.sh FOLDER      (a rehearsal of every step in minutes, without vLLM)
#
# The schedule and the seeds are fixed. The policy that ships was adjusted by hand between the steps (memagent_graph/embedded/CARD.md),
# and this schedule was never run at full size: it makes a similar policy.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
python=$(realpath --no-symlinks "${PYTHON:-$root/.venv/bin/python}")
export PYTHONPATH="$root:$root/training:$root/integrations" PYTHON=$python
mkdir -p "${1:?name a folder}"
cd "$1"
"$root/training/recipes/corpus.sh" corpus
memagent() { "$python" -m memagent_graph "$@"; }
release() { "$python" -m recipes.embedded.release "$@"; }
copy_shipped_policy() { [[ -d $1 ]] || { rm -rf "$1.new" && cp -r "$root/memagent_graph/embedded" "$1.new" && mv "$1.new" "$1"; }; }

size=(--threads 2 --tokens 6144 --steps 2400 --decay-steps 800) characters=8000000
loops=(100 80 60 40)
loop=(--groups 32 --rollouts 8 --max-questions 200)
if [[ -n ${SMALL:-} ]]; then
    size=(--tokens 512 --steps 2 --decay-steps 1 --ramp-steps 1 --check-rows 1) characters=200000
    loops=(1 1 1 1)
    loop=(--engine local --groups 8 --rollouts 2 --max-questions 8 --set drop_zero_variance=false)
fi
loop+=(--task recipes.embedded.tasks:Alone --task recipes.embedded.tasks:AmongForeign --small --haystack corpus/train.txt
    --lengths 500,1000 --advance-at 0.5 --measure-every 0 --resume --set lr_scheduler_type=linear
    --set groups_per_step=8 --set loss_weights=conversation_mean --set overlong_max_length=48
    --set overlong_cache_length=32 --set old_logprobs=logged --set skip_certain=0.02 --set token_budget=8192
    --set gradient_checkpointing=false --set learning_rate=5e-4 --set muon_learning_rate=2e-3)
warm_up=(--set warmup_steps=3); [[ -z ${SMALL:-} ]] || warm_up=(--set warmup_steps=0)

copy_shipped_policy first
"$python" -m recipes.embedded.tokenizer --corpus corpus/train.txt --out first --limit "$characters"
"$python" -m recipes.embedded.train --corpus corpus --out supervised --shipped first --muon-lr 0.003 --adamw-lr 0.0015 \
    "${size[@]}" --resume
release --edition 1 --checkpoint supervised/last.pt --out first
memagent rl "${loop[@]}" "${warm_up[@]}" --model first --seed 21 --iterations "${loops[0]}" --temperature 1.3 --out loop-1
memagent rl "${loop[@]}" "${warm_up[@]}" --model loop-1 --seed 22 --iterations "${loops[1]}" --temperature 1.5 --out loop-2
memagent rl "${loop[@]}" "${warm_up[@]}" --model loop-2 --seed 23 --iterations "${loops[2]}" --temperature 1.5 --out loop-3
copy_shipped_policy back
release --edition 2 --policy loop-3 --toward first --share 0.3 --out back
memagent rl "${loop[@]}" "${warm_up[@]}" --model back --seed 24 --iterations "${loops[3]}" --temperature 1.5 --out loop-4
copy_shipped_policy policy
release --edition 2 --policy loop-4 --toward back --share 0.5 --out policy
echo "the policy is in $PWD/policy"
