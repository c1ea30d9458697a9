#!/bin/sh
# Compiles flash-attn 2 from its source, which takes hours: `flash-attn.sh PYTHON FOLDER` leaves the
# wheel in FOLDER. PYTHON's environment holds cuda.txt. FLASH_ATTN_CUDA_ARCHS names the GPUs
# ("80;90;100;120"), MAX_JOBS the compilers that run at once. nvcc must be on PATH.
set -eu
here=$(dirname "$0")
lock=$here/flash-attn.txt
python=${1:?usage: flash-attn.sh PYTHON FOLDER}
folder=${2:?usage: flash-attn.sh PYTHON FOLDER}
# PyTorch looks for ninja on PATH. Without it, it compiles one file after the other, and MAX_JOBS
# has no effect.
PATH=$(cd "$(dirname "$(command -v "$python")")" && pwd):$PATH

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Its setup.py asks for the tools before pip would have installed them, so they come first.
awk -v out="$work" '
    /^[A-Za-z]/ { part = (/^flash-attn==/) ? "source" : "tools" }
    { print > (out "/" part ".txt") }
' part=tools "$lock"
"$python" -m pip install --no-cache-dir --require-hashes --no-deps -r "$work/tools.txt"
# Otherwise pip would take a binary from the network that no hash covers.
FLASH_ATTENTION_FORCE_BUILD=TRUE "$python" -m pip wheel --no-cache-dir --require-hashes --no-deps \
    --no-build-isolation --wheel-dir "$folder" -r "$work/source.txt"
