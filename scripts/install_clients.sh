#!/usr/bin/env bash
# Install the clients of the OpenAI API that tests/clients runs against `memagent serve`.
#
#     scripts/install_clients.sh [FOLDER]        (default: .venv-clients in the repository)
#
# There are two virtual environments, because llm needs openai 3 or later, and LlamaIndex needs an earlier version:
#
#     FOLDER/openai-3        openai, langchain-openai, llm      (constraints/clients.txt)
#     FOLDER/openai-2        llama-index-llms-openai-like       (constraints/clients-llama-index.txt)
#
# PYTHON sets the interpreter. If the pinned versions have not changed, a second run does nothing.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly repository
folder=$(realpath --canonicalize-missing --no-symlinks -- "${1:-$repository/.venv-clients}")
readonly folder

die() { printf 'install_clients: error: %s\n' "$*" >&2; exit 1; }

install() {
    local venv=$folder/$1 constraints=$repository/$2 checksum
    shift 2
    [[ -f $constraints ]] || die "$constraints is missing; the checkout is incomplete"
    checksum=$(sha256sum <"$constraints")
    if [[ -x $venv/bin/python && -f $venv/.memagent-stamp && $(<"$venv/.memagent-stamp") == "$checksum" ]]; then
        return
    fi
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --constraint "$constraints" "$@" \
        || die "$* cannot be installed; see pip's error above"
    printf '%s\n' "$checksum" >"$venv/.memagent-stamp"
}

[[ $# -le 1 ]] || die "too many arguments (usage: $0 [FOLDER])"
install openai-3 constraints/clients.txt openai langchain-openai llm
install openai-2 constraints/clients-llama-index.txt llama-index-llms-openai-like
printf 'install_clients: %s is up to date\n' "$folder"
