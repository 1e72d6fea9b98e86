#!/usr/bin/env bash
# Install this package and Ray into a separate virtual environment, for tests/on_ray and the benchmark on Ray.
#
#     scripts/install_ray.sh [VENV]        (default: .venv-ray in the repository)
#
# PYTHON sets the interpreter. If the pinned versions have not changed, a second run does nothing.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly repository
venv=$(realpath --canonicalize-missing --no-symlinks -- "${1:-$repository/.venv-ray}")
readonly venv
readonly constraints=$repository/constraints/ray.txt

die() { printf 'install_ray: error: %s\n' "$*" >&2; exit 1; }

[[ $# -le 1 ]] || die "too many arguments (usage: $0 [VENV])"
[[ -f $constraints ]] || die "$constraints is missing; the checkout is incomplete"
checksum=$(sha256sum "$constraints" "$repository/pyproject.toml" | sha256sum)
if [[ ! -x $venv/bin/python || ! -f $venv/.memagent-stamp || $(<"$venv/.memagent-stamp") != "$checksum" ]]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --constraint "$constraints" \
        --editable "$repository[corpus,files,ray,postgres]" pytest pytest-asyncio pytest-timeout \
        || die "the package cannot be installed; see pip's error above"
    printf '%s\n' "$checksum" >"$venv/.memagent-stamp"
fi
printf 'install_ray: %s is up to date\n' "$venv"
