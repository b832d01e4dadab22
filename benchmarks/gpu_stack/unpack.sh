#!/bin/sh
# unpack.sh PARTS STACK: unpack the parts of pack.py that lie in the folder PARTS into the folder STACK, on the GPU host.
# Afterwards `. STACK/env.sh` puts the stack in front of what the host's python3 has.
set -eu
parts=$1 stack=$2
mkdir -p "$stack"
cat "$parts"/part.* | xz --decompress --stdout --threads=0 | tar --extract --directory "$stack"

# Bytecode once: users who can't write here would compile SGLang anew in each of a server's processes, for a minute. Some
# files are templates and no Python.
python3 -m compileall -q -j 0 "$stack" >/dev/null || true

# torch looks for CUDA's libraries in the folder nvidia/ beside it: the host's are linked there, NCCL is the stack's own.
python3 - "$stack/nvidia" <<'PYTHON'
import importlib.util
import pathlib
import sys

target = pathlib.Path(sys.argv[1])
target.mkdir(exist_ok=True)
for folder in map(pathlib.Path, importlib.util.find_spec("nvidia").submodule_search_locations):
    for found in folder.iterdir():
        if found.is_dir() and not (target / found.name).exists():
            (target / found.name).symlink_to(found)
PYTHON

cat > "$stack/env.sh" <<ENV
export PYTHONPATH=$stack/nvidia_cutlass_dsl/dsl_packages:$stack:\${PYTHONPATH:-}
export CUDA_HOME=\${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")}
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
ENV
. "$stack/env.sh"
python3 -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, "GPU", torch.cuda.get_device_name(0))'
