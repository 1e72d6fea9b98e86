#!/usr/bin/env bash
# Train the adapter of `english` from its base, on the questions of this folder. Continues where it was stopped.
#
#     training/recipes/english/make.sh FOLDER               (about an hour on one core)
#     SMALL=1 training/recipes/english/make.sh FOLDER       (two short steps)
#
# The texts are pinned in prose.toml. The step, the seed and the rate are those of the adapter in this folder.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
python=$(realpath --no-symlinks "${PYTHON:-$root/.venv/bin/python}")
export PYTHONPATH="$root:$root/training:$root/integrations" OMP_WAIT_POLICY=passive
mkdir -p "${1:?name a folder}"
cd "$1"
export MEMAGENT_HOME=${MEMAGENT_HOME:-$PWD/home}
size=(--until-step 237)
[[ -z ${SMALL:-} ]] || size=(--until-step 2 --tokens 100)
"$python" -m memagent_graph policy add english-untrained
"$python" -m recipes.english.supervision --base "$MEMAGENT_HOME/policies/english-untrained" --out training --seed 0 --minutes 100000 \
    "${size[@]}" --pack adapter
echo "the adapter is in $PWD/adapter"
