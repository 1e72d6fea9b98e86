#!/usr/bin/env bash
# Install this package and Ray into a virtual environment of its own, for tests/on_ray and the benchmark on Ray.
#
#     scripts/install_ray.sh [VENV]        (default: .venv-ray in the repository)
#
# PYTHON chooses the interpreter. A second run with unchanged pins returns at once.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly repository
venv=$(realpath --canonicalize-missing --no-symlinks -- "${1:-$repository/.venv-ray}")
readonly venv
readonly constraints=$repository/constraints-ray.txt

die() { printf 'install_ray: error: %s\n' "$*" >&2; exit 1; }

[[ $# -le 1 ]] || die "at most one argument (usage: $0 [VENV])"
[[ -f $constraints ]] || die "$constraints is missing; the checkout is incomplete"
wanted=$(sha256sum "$constraints" "$repository/pyproject.toml" | sha256sum)
if [[ ! -x $venv/bin/python || ! -f $venv/.memagent-stamp || $(<"$venv/.memagent-stamp") != "$wanted" ]]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --constraint "$constraints" \
        --editable "$repository[corpus,files,ray,postgres]" pytest pytest-asyncio pytest-timeout \
        || die "it cannot be installed; pip's reason is above"
    printf '%s\n' "$wanted" >"$venv/.memagent-stamp"
fi
printf 'install_ray: %s is up to date\n' "$venv"
