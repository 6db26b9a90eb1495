#!/bin/bash
# What a machine does that has mwrobust for its only work:
#
#   worker.sh install SOURCE EXTRAS   mwrobust, with a Python that it runs on
#   worker.sh job EXTRAS ARGS...      starts mwrobust.main, or follows it
#
# A job unpacks ~/mwrobust.tar.gz and runs in the background, so that it does
# not end with the connection. The exit code is 78 where only the user can help.
set -euo pipefail

home="$HOME/mwrobust"
uv_version=0.11.2
declare -A uv_sha256=(
  [x86_64]=7ac2ca0449c8d68dae9b99e635cd3bc9b22a4cb1de64b7c43716398447d42981
  [aarch64]=04792cac761c4a6ba78267f36f2af541b7f92196d42ac55d21d3ff6b0f5ab6a5
)

install() {
  mkdir -p "$home"
  if [ ! -x "$home/uv" ]; then
    local machine url archive="$home/uv.tar.gz"
    machine=$(uname -m)
    url="https://github.com/astral-sh/uv/releases/download/$uv_version"
    curl --fail --silent --show-error --location --retry 3 \
      --output "$archive" "$url/uv-$machine-unknown-linux-gnu.tar.gz"
    # Nothing of it is run before it is known to be the release.
    echo "${uv_sha256[$machine]} $archive" | sha256sum --check --quiet
    tar -xzf "$archive" -C "$home" --strip-components=1 --no-same-owner \
      "uv-$machine-unknown-linux-gnu/uv"
  fi
  # Takes the Python of the image, and fetches one where that is too old.
  if [ ! -x "$home/venv/bin/python" ]; then
    "$home/uv" venv --quiet --python='>=3.11,<3.14' "$home/venv"
  fi
  "$home/uv" pip install --quiet --python="$home/venv/bin/python" \
    --editable="$1[$2]"
}

work() {
  trap 'echo $? >"$home/code"' EXIT
  rm -rf "$home/source"
  mkdir "$home/source"
  tar -xzf "$HOME/mwrobust.tar.gz" -C "$home/source"
  install "$home/source" "$1"
  cd "$home/source"
  "$home/venv/bin/python" -m mwrobust.main "${@:2}"
}

job() {
  local command code
  command=$(printf '%q ' "$@")
  mkdir -p "$home"
  # The background inherits the lock, and holds it until its last process ends.
  exec 9>>"$home/lock"
  if flock --nonblock 9; then
    rm -f "$home/code"
    echo "$command" >"$home/command"
    : >"$home/log"
    setsid bash "$0" work "$@" >>"$home/log" 2>&1 </dev/null &
  elif [ "$command" = "$(cat "$home/command")" ]; then
    echo 'worker.sh: this run is under way; its log:'
  else
    echo "worker.sh: another run is under way: $(cat "$home/command")"
    return 78
  fi
  exec 9>&-
  flock "$home/lock" true & # Ends with the run.
  tail --pid=$! --lines=+1 --follow "$home/log"
  code=$(cat "$home/code" 2>/dev/null || echo 137)
  if [ "$code" -eq 1 ] && grep --quiet '^mwrobust: ' "$home/log"; then
    code=78
  fi
  return "$code"
}

# On one line, which is read before an upload can replace this file.
"$@"; exit
