#!/usr/bin/env bash
# Train the adapter of `english` from its base, on the questions of this folder. A stopped run continues.
#
#     training/recipes/english/make.sh FOLDER               (minutes on a GPU; days on a processor)
#     SMALL=1 training/recipes/english/make.sh FOLDER       (two short steps)
#
# The texts are pinned in prose.toml; seeds, rate and schedule are below.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
python=$(realpath --no-symlinks "${PYTHON:-$root/.venv/bin/python}")
export PYTHONPATH="$root:$root/training:$root/integrations" OMP_WAIT_POLICY=passive
mkdir -p "${1:?name a folder}"
cd "$1"
export MEMAGENT_HOME=${MEMAGENT_HOME:-$PWD/home}
base="$MEMAGENT_HOME/policies/english-untrained"
readings=(--readings 36000); check=(--readings 120); size=()
if [[ -n ${SMALL:-} ]]; then
    readings=(--readings 4); check=(--readings 1); size=(--length 1536 --rows 1 --accumulated 1 --steps 2)
fi
"$python" -m memagent_graph policy add english-untrained
[[ -f lessons.npz ]] || "$python" -m recipes.english.encoded_lessons --base "$base" "${readings[@]}" --seed 0 --out lessons.npz
[[ -f check.npz ]] || "$python" -m recipes.english.encoded_lessons --base "$base" "${check[@]}" --seed 1 --held-out --out check.npz
[[ -d english ]] || cp -r "$root/memagent_graph/english" .
"$python" -m recipes.english.supervision --base "$base" --lessons lessons.npz --check check.npz --out english --rate 6e-4 "${size[@]}"
echo "the policy's parts are in $PWD/english; to read with it: memagent policy add english --adapter $PWD/english"
