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

install() {
  mkdir -p "$home"
  if [ ! -x "$home/uv/uv" ]; then
    curl -LsSf https://astral.sh/uv/install.sh |
      env UV_UNMANAGED_INSTALL="$home/uv" sh
  fi
  # Takes the Python of the image, and fetches one where that is too old.
  if [ ! -x "$home/venv/bin/python" ]; then
    "$home/uv/uv" venv --quiet --python='>=3.11,<3.14' "$home/venv"
  fi
  "$home/uv/uv" pip install --quiet --python="$home/venv/bin/python" \
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
