#!/bin/sh
# The wheels that gpu_check.py needs on a machine without a network, beside torch, cupy and numpy: see gpu_check.md.
#   gpu_wheels.sh fetch FOLDER            on a machine with a network: about 43 MB
#   gpu_wheels.sh install FOLDER TARGET   on the machine with the GPU: into a folder for PYTHONPATH
set -eu

PACKAGES="nvidia-libnvcomp-cu13>=6,<7 zstandard xxhash safetensors blake3 pytest pytest-timeout pytest-xdist hypothesis"
# Imported by tests that are collected, though not marked gpu.
PACKAGES="$PACKAGES typer rich"
PYTHON="${PYTHON:-python3}"

case "${1-}" in
fetch)
    # shellcheck disable=SC2086
    "$PYTHON" -m pip download --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        --dest "$2" $PACKAGES
    du -sh "$2"
    ;;
install)
    "$PYTHON" -m pip install --no-index --no-deps --quiet --target "$3" "$2"/*.whl
    ;;
*)
    sed -n '2,4p' "$0" >&2
    exit 2
    ;;
esac
