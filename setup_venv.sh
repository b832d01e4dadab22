#!/bin/sh
# Creates the virtual environment for a machine with no GPU and installs the pinned packages into it.
# Called by the Makefile with PYTHON, VENV, TORCH and TORCH_INDEX; safe to run again. TORCH names another version of torch
# than requirements-cpu.txt does; if it exists as a CUDA build only, that is installed, with CUDA's libraries.
set -eu

stop() {
    printf '\n%s\n' "$1" >&2
    exit 1
}

command -v "$PYTHON" >/dev/null 2>&1 ||
    stop "Python 3.11 is missing: there is no \"$PYTHON\" here. Install it, or name yours: make PYTHON=/path/to/python3.11 …"
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
3.11 | 3.12 | 3.13) ;;
*) stop "Python 3.11, 3.12 or 3.13 is needed and \"$PYTHON\" is $version: SGLang has wheels for these alone. Name yours: make PYTHON=… " ;;
esac
case $(uname -sm) in
"Linux x86_64") ;;
*) stop "Linux on x86_64 is needed: the SGLang wheel exists for nothing else; this is $(uname -sm)." ;;
esac

# Not just a python in it: a set-up that was cut short, or a Debian without its python3.11-venv, leaves one without pip.
if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "[1/4] virtual environment in $VENV"
    "$PYTHON" -m venv "$VENV" || stop "Could not create $VENV. On Debian and Ubuntu the package python$version-venv is needed."
fi
pip() {
    "$VENV/bin/python" -m pip --disable-pip-version-check "$@"
}
failed="pip could not install the pinned packages; its reason is above. If it names a connection, there is no network:
set-up needs PyPI or a mirror of it (pip's own configuration is honoured). Run the same command again to go on."

# torch first and by itself: PyTorch's wheel of PyPI for Linux is the CUDA build, and the CPU index need not be asked for
# the rest.
wanted=${TORCH:-$(sed -n 's/^torch==\([^ #]*\).*/\1/p' requirements-cpu.txt)}
index=${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
is_there="import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$wanted'"
if [ -n "${TORCH:-}" ]; then
    if ! "$VENV/bin/python" -c "$is_there)" 2>/dev/null; then
        echo "[2/4] torch==$wanted; as CUDA build 2.5 GB to download and 6 GB on disk, with CUDA's libraries"
        pip install --progress-bar off --retries 1 $index "torch==$wanted" torchvision || stop "$failed"
    fi
elif ! "$VENV/bin/python" -c "$is_there or torch.version.cuda is not None)" 2>/dev/null; then
    echo "[2/4] torch==$wanted, CPU build"
    pip install --no-deps --progress-bar off --retries 1 $index "torch==$wanted" || stop "$failed"
    cuda=$("$VENV/bin/python" -c 'import importlib.metadata as m; r = m.requires("torch") or []; print(any("nvidia" in line or "cuda" in line for line in r))')
    if [ "$cuda" = True ]; then
        pip uninstall --yes --quiet torch
        stop "pip found only a CUDA build of torch==$wanted, which does not run without CUDA's libraries. Name an index that has CPU
builds: make TORCH_INDEX=https://download.pytorch.org/whl/cpu … (the default), or a mirror of it."
    fi
fi

count=$(grep -c '^[A-Za-z]' requirements-cpu.txt)
echo "[3/4] $count pinned packages (about 310 MB to download the first time)"
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
if [ -n "${TORCH:-}" ]; then grep -v '^torch\(vision\)*==' requirements-cpu.txt; else cat requirements-cpu.txt; fi >"$pins"
pip install --no-deps --progress-bar off -r "$pins" -r requirements-test.txt || stop "$failed"

echo "[4/4] this package, editable, and the CPU shims (see sglang_dsv4/cpu/shims.py)"
pip install --no-deps --no-build-isolation --quiet --editable . || stop "$failed"
"$VENV/bin/python" -m sglang_dsv4.cpu.shims install
