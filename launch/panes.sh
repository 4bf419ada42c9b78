#!/bin/bash
# One pane for each process, in tmux: launch/panes.sh run.log 8
#
# run.log is what a launcher prints: `launch/tpu-vm.sh ... > run.log 2>&1`, or this book's launcher
# for one machine. Both put the number of a process in front of its lines, such as "[3] ...". The
# panes go on with the file.

set -euo pipefail
log=${1:?the file with what the launcher prints} count=${2:?the number of processes}
session="processes-$$"
if [[ ! $count =~ ^[1-9][0-9]*$ ]]; then
  echo "panes.sh: expected the number of processes, such as 8; found $count" >&2
  exit 2
fi

for ((i = 0; i < count; i++)); do
  follow="tail -n +1 -F $(printf '%q' "$log") | grep --line-buffered '^\[$i\] '"
  if ((i == 0)); then
    tmux new-session -d -s "$session" -x 200 -y 60 "$follow"
  else
    tmux split-window -t "$session" "$follow"
    tmux select-layout -t "$session" tiled > /dev/null
  fi
done
if [ -t 1 ]; then
  exec tmux attach -t "$session"
fi
echo "$session"
