#!/usr/bin/env bash
# Install LiteLLM's proxy into a separate virtual environment, for tests/integration/test_litellm.py.
#
#     scripts/install_litellm.sh [VENV]        (default: .venv-litellm in the repository)
#
# PYTHON sets the interpreter. If the pinned versions have not changed, a second run does nothing.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly repository
venv=$(realpath --canonicalize-missing --no-symlinks -- "${1:-$repository/.venv-litellm}")
readonly venv
readonly constraints=$repository/constraints/litellm.txt

die() { printf 'install_litellm: error: %s\n' "$*" >&2; exit 1; }

[[ $# -le 1 ]] || die "too many arguments (usage: $0 [VENV])"
[[ -f $constraints ]] || die "$constraints is missing; the checkout is incomplete"
checksum=$(sha256sum <"$constraints")
if [[ ! -x $venv/bin/litellm || ! -f $venv/.memagent-stamp || $(<"$venv/.memagent-stamp") != "$checksum" ]]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile --quiet \
        --constraint "$constraints" "litellm[proxy]" \
        || die "LiteLLM cannot be installed; see pip's error above"
    printf '%s\n' "$checksum" >"$venv/.memagent-stamp"
fi
printf 'install_litellm: %s is up to date\n' "$venv"
