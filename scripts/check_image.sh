#!/usr/bin/env bash
# Build the container image and test it with a small policy server.
#
#     scripts/check_image.sh [--debian-base]
#
# Needs Linux, docker or podman (ENGINE chooses one), curl, and the development environment (PYTHON, default
# .venv/bin/python) for the policy server. Port 8080 must be free, because the container uses the host's network.
# BUILD_OPTIONS are additional options of the build, such as "--build-arg EXTRAS=serve". If neither docker nor podman is
# running, nothing is checked.
#
# --debian-base builds the base image from Debian packages, for machines that cannot reach a registry. It needs root and
# debootstrap; DEBIAN_MIRROR sets the mirror. The image gets the tag of the official image, if that does not exist yet.
#
# It checks the build, the health check, the user, the API key, a short and a long request, and SIGTERM during a
# read. Then it checks that a second container with the same volume has the files and the reads, and continues the
# interrupted read.
set -euo pipefail

readonly KEY=a-key-of-the-image-check
readonly IMAGE=memagent-check
readonly API=http://127.0.0.1:8080

say() { printf 'check_image: %s\n' "$*"; }
die() { printf 'check_image: error: %s\n' "$*" >&2; exit 1; }

debian_base=false
case "${1:-}" in
    "") ;;
    --debian-base) debian_base=true ;;
    -h | --help) sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *) die "unknown argument $1 (usage: $0 [--debian-base])" ;;
esac

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly repository
readonly python=${PYTHON:-$repository/.venv/bin/python}

engine=
for candidate in ${ENGINE:-docker podman}; do
    if "$candidate" info >/dev/null 2>&1; then
        engine=$candidate
        break
    fi
done
readonly engine
if [[ -z $engine ]]; then
    say "skipped: neither docker nor podman is running here"
    exit 0
fi
[[ -x $python ]] || die "$python does not exist; run make install, or set PYTHON"

scratch=$(mktemp -d)
readonly scratch
readonly name=memagent-check-$$
policy_pid=

clean_up() {
    [[ -z $policy_pid ]] || kill "$policy_pid" 2>/dev/null || true
    "$engine" rm --force "$name" >/dev/null 2>&1 || true
    "$engine" volume rm --force "$name" >/dev/null 2>&1 || true
    rm -rf "$scratch"
}
trap clean_up EXIT

# Build a Debian image with Python 3.11 in which `python` and `pip` work as in the official image.
make_debian_base() {
    local base=$1 root=$scratch/base
    say "building $base from Debian packages"
    debootstrap --variant=minbase --include=python3,python3-pip,python3-venv,ca-certificates \
        bookworm "$root" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} >"$scratch/debootstrap.log" 2>&1 \
        || die "debootstrap failed: $(tail -n 3 "$scratch/debootstrap.log")"
    ln -s python3 "$root/usr/bin/python"
    rm -f "$root"/usr/lib/python3.*/EXTERNALLY-MANAGED
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    # Trust this machine's certificates, because its package index may be behind a proxy.
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
    tar -C "$root" -c . | "$engine" import - "$base" >/dev/null
}

base=$(sed -n 's/^FROM //p' "$repository/Dockerfile")
if "$debian_base" && ! "$engine" image inspect "$base" >/dev/null 2>&1; then
    make_debian_base "$base"
fi

# Send a request to the API: a GET, unless curl options add a body.
send_request() {
    local path=$1
    shift
    curl --silent --show-error --max-time 120 --header "Authorization: Bearer $KEY" "$@" "$API$path"
}

read_file() { send_request /v1/chat/completions --header "Content-Type: application/json" --data-binary "@$scratch/$1" "${@:2}"; }

expect() {
    local check=$1 output=$2 pattern=$3
    [[ $output == *$pattern* ]] || die "$check: expected $pattern, found: ${output:0:2000}"
    say "$check: as expected"
}

start_container() {
    "$engine" run --detach --name "$name" --network host --volume "$name:/data" --env "MEMAGENT_KEYS=alice:$KEY" \
        "$IMAGE" --server-name localhost --base-url "$base_url" --model fake --tokenizer embedded \
        --context-window 1000 --question-tokens 50 --memory-tokens 60 --chunk-tokens 100 --answer-tokens 60 >/dev/null
    local begin=$SECONDS health=
    while [[ $health != healthy ]]; do
        ((SECONDS - begin < 180)) || die "the container is $health: $("$engine" logs "$name" 2>&1 | tail -n 20)"
        [[ $("$engine" inspect --format '{{.State.Running}}' "$name") == true ]] \
            || die "the container ended: $("$engine" logs "$name" 2>&1 | tail -n 20)"
        sleep 1
        health=$("$engine" inspect --format '{{.State.Health.Status}}' "$name")
    done
    say "healthy after $((SECONDS - begin)) s"
}

stop_container() {
    local begin=$SECONDS
    "$engine" stop --time 60 "$name" >/dev/null
    expect "exit status after SIGTERM ($((SECONDS - begin)) s)" \
        "=$("$engine" inspect --format '{{.State.ExitCode}}' "$name")=" =0=
    "$engine" rm "$name" >/dev/null
}

build_options=()
[[ $engine != podman ]] || build_options=(--format docker)  # podman's own format has no health check
begin=$SECONDS
# shellcheck disable=SC2086  # BUILD_OPTIONS is a list of words
DOCKER_BUILDKIT=${DOCKER_BUILDKIT:-0} "$engine" build "${build_options[@]}" --network host --tag "$IMAGE" \
    ${BUILD_OPTIONS:-} "$repository" >"$scratch/build.log" 2>&1 \
    || die "the image cannot be built: $(tail -n 30 "$scratch/build.log")"
size() { "$engine" image inspect --format '{{.Size}}' "$1"; }
say "built in $((SECONDS - begin)) s: $(($(size "$IMAGE") / 1000000)) MB, including $(($(size "$base") / 1000000)) MB of $base"

curl --silent --max-time 5 "$API/health" >/dev/null && die "port 8080 is already in use"
PYTHONPATH=$repository/tests:$repository "$python" -m support.policy_process 0 100 "$scratch/asked" >"$scratch/port" &
policy_pid=$!
until [[ -s $scratch/port ]]; do
    kill -0 "$policy_pid" 2>/dev/null || die "the policy server did not start"
    sleep 0.1
done
base_url=http://127.0.0.1:$(<"$scratch/port")/v1
readonly base_url

PYTHONPATH=$repository/tests:$repository "$python" - "$scratch" <<'PY'
import json
import sys
from pathlib import Path

from support.scripts import make_document

for name, words in (("short", 0), ("long", 1_000), ("longer", 20_000)):
    # The sentence occurs twice, because a chunk boundary may split one of them.
    document = make_document(dict.fromkeys((0.3, 0.5), "The key of harbor is 4711."), words=words)
    question = {"role": "user", "content": f"What is the key of harbor? ({name})"}
    messages = [{"role": "user", "content": document}, question] if words else [question]
    Path(sys.argv[1], name).write_text(json.dumps({"model": "fake", "messages": messages}))
PY

start_container
expect "health" "$(curl --silent --fail "$API/health")" '"ok"'
expect "user" "uid $("$engine" exec "$name" id --user), $("$engine" exec "$name" id --user --name)" memagent
[[ $("$engine" exec "$name" id --user) != 0 ]] || die "the container runs as root"
expect "no key" "$(curl --silent --output /dev/null --write-out '%{http_code}' "$API/v1/models")" 401
expect "short request" "$(read_file short)" unknown
expect "long request" "$(read_file long --dump-header "$scratch/headers")" 4711
run_id=$(sed -n 's/^x-memagent-run-id: *\([^[:space:]]*\).*/\1/Ip' "$scratch/headers")
expect "its run" "$(send_request "/v1/reads/$run_id")" finished
expect "upload" "$(send_request /v1/files --form purpose=user_data --form "file=@$scratch/long;filename=kept.txt")" kept.txt

read_file longer >/dev/null 2>&1 &
request_pid=$!
until [[ $(send_request "/v1/reads") == *running* ]]; do sleep 0.2; done
sleep 3
stop_container
wait "$request_pid" || true
prompts_before=$(wc -l <"$scratch/asked")

start_container
expect "the run in the volume" "$(send_request "/v1/reads/$run_id")" finished
expect "the file in the volume" "$(send_request /v1/files)" kept.txt
expect "the long request again" "$(read_file long --include | tr '[:upper:]' '[:lower:]')" "x-memagent-read: repeated"
[[ $(wc -l <"$scratch/asked") == "$prompts_before" ]] || die "the policy was called again for a finished read"
response=$(read_file longer --include)
expect "the interrupted request" "$(tr '[:upper:]' '[:lower:]' <<<"$response")" "x-memagent-read: resumed"
expect "its answer" "$response" 4711
repeated_prompts=$("$python" -c 'import sys; from collections import Counter
lines = open(sys.argv[1]).readlines()
print(len(lines) - len(set(lines)))' "$scratch/asked")
say "prompts that were sent twice: $repeated_prompts"
((repeated_prompts <= 1)) || die "more than the interrupted chunk was read again"
stop_container
say "all checks passed"
