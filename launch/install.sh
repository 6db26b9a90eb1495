#!/bin/bash
# Installs mwrobust on a machine that is used for nothing else, with a Python
# that is new enough: install.sh SOURCE EXTRAS
set -euo pipefail

home="$HOME/mwrobust"
uv_version=0.11.2
declare -A uv_sha256=(
  [x86_64]=7ac2ca0449c8d68dae9b99e635cd3bc9b22a4cb1de64b7c43716398447d42981
  [aarch64]=04792cac761c4a6ba78267f36f2af541b7f92196d42ac55d21d3ff6b0f5ab6a5
)

mkdir -p "$home"
if [ ! -x "$home/uv" ]; then
  machine=$(uname -m)
  archive="$home/uv.tar.gz"
  url="https://github.com/astral-sh/uv/releases/download/$uv_version"
  curl --fail --silent --show-error --location --retry 3 \
    --output "$archive" "$url/uv-$machine-unknown-linux-gnu.tar.gz"
  # Nothing in it runs before its checksum is that of the release.
  echo "${uv_sha256[$machine]} $archive" | sha256sum --check --quiet
  tar -xzf "$archive" -C "$home" --strip-components=1 --no-same-owner \
    "uv-$machine-unknown-linux-gnu/uv"
fi
# Uses the Python of the image, and downloads one where that is too old.
if [ ! -x "$home/venv/bin/python" ]; then
  "$home/uv" venv --quiet --python='>=3.11,<3.14' "$home/venv"
fi
"$home/uv" pip install --quiet --python="$home/venv/bin/python" \
  --editable="$1[$2]"
